"""Scorer of kind http against a server in a thread: right scores, each response once, whatever the server does."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import re
import socket
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path

import pytest
from aiohttp import web
from score_service import Misbehaviour, Service, Tree, running, serving

from rlhf_core.config import ScorerConfig
from rlhf_core.scorers import service as transport
from rlhf_core.scorers.dialects import answer_of_items, request_of_items
from rlhf_core.scorers.needs import try_services
from rlhf_core.scorers.text import ScoreItem, TextScorers, score_item
from rlhf_core.types import Prompt

ROOT = Path(__file__).parents[3]
KEY = "a-key-of-the-test-1234"


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(transport, "FIRST_PAUSE", 0.01)


def item(number: int, label: str | None = None) -> ScoreItem:
    """Of a response with `number` characters."""
    prompt = Prompt(f"id-{number}", "clerk", [{"role": "user", "content": "Say x."}], [5, 6], label)
    return score_item(prompt, "x" * number, finished=True, response_length=number, rendered=("<user>Say x.", f"<user>Say x.{'x' * number}"))


def config(service: Service | str, **settings) -> ScorerConfig:
    return ScorerConfig(name="it", kind="http", url=service if isinstance(service, str) else service.url, **{"timeout": 20.0, **settings})


def scores(service: Service | str, count: int = 20, *, in_time: bool = False, **settings) -> list[float]:
    """Of responses with 1 to `count` characters."""
    found, _ = TextScorers(0, [config(service, **settings)], {}, in_time=in_time).score_items("it", [item(n) for n in range(1, count + 1)])
    return found


def first(times: int, answer: Misbehaviour) -> Misbehaviour:
    """Misbehave in the first requests only."""
    left = [times]

    async def misbehave(service: Service, request: web.Request, tree: Tree) -> web.StreamResponse | None:
        left[0] -= 1
        return await answer(service, request, tree) if left[0] >= 0 else None

    return misbehave


async def unavailable(service: Service, request: web.Request, tree: Tree) -> web.StreamResponse:
    return web.Response(status=503, text="starting")


async def reset(service: Service, request: web.Request, tree: Tree) -> web.StreamResponse:
    request.transport.abort()
    return web.Response()


async def broken_off(service: Service, request: web.Request, tree: Tree) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Length": "5000"})
    await response.prepare(request)
    await response.write(b'{"scores": [1.0')
    request.transport.abort()
    return response


async def one_is_nan(service: Service, request: web.Request, tree: Tree) -> web.StreamResponse:
    right = await service.scores({"items": tree["items"][1:]})
    return web.Response(text=json.dumps({"scores": [math.nan, *right["scores"]]}), content_type="application/json")


async def one_too_few(service: Service, request: web.Request, tree: Tree) -> web.StreamResponse:
    return web.json_response({"scores": [0.0] * (len(tree["items"]) - 1)})


async def endless(service: Service, request: web.Request, tree: Tree) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    while True:
        await response.write(b"[" * 65536)


async def announced_huge(service: Service, request: web.Request, tree: Tree) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Length": str(2**40)})
    await response.prepare(request)
    await asyncio.sleep(3600)
    return response


async def a_page(service: Service, request: web.Request, tree: Tree) -> web.StreamResponse:
    return web.Response(text="<html>Welcome to the proxy</html>", content_type="text/html")


def status(number: int, **headers: str) -> Misbehaviour:
    async def answer(service: Service, request: web.Request, tree: Tree) -> web.StreamResponse:
        return web.Response(status=number, headers=headers)

    return answer


PASSING = {
    **{"503": unavailable, "reset": reset, "broken off": broken_off, "NaN": one_is_nan, "count": one_too_few},
    **{"endless": endless, "huge": announced_huge, "page": a_page},
    **{str(number): status(number) for number in (408, 425, 429, 502)},
}


@pytest.mark.parametrize("fault", PASSING)
def test_faults_that_pass_leave_right_scores_and_each_response_is_scored_once(fault):
    with serving(misbehave=first(3, PASSING[fault])) as service:
        assert scores(service) == [float(n) for n in range(1, 21)]
        assert service.scored == {"x" * n: 1 for n in range(1, 21)}
        assert len(service.requests) == 6, "three batches of at most eight, and three that failed"


def test_a_batch_keeps_its_idempotency_key_over_retries():
    with serving(misbehave=first(4, unavailable)) as service:
        scores(service, 16, batch_size=8, concurrency=2)
    bodies = {}
    for key, body in zip(service.keys, service.requests, strict=True):
        bodies.setdefault(key, []).append(body)
    assert len(bodies) == 2 and sum(map(len, bodies.values())) == 6
    assert all(body == group[0] for group in bodies.values() for body in group)


def test_what_the_service_is_sent():
    with serving() as service:
        TextScorers(0, [config(service)], {}).score_items("it", [item(2, label="14")])
        (body,) = service.requests
    assert body == {
        "version": 1,
        "scorer": "it",
        "items": [
            {
                "id": "id-2/0",
                "messages": [{"role": "user", "content": "Say x."}],
                "response": "xx",
                "label": "14",
                "metadata": {"id": "id-2", "source": "clerk", "finished": True, "response_length": 2},
            }
        ],
    }


def test_the_service_of_the_documentation_scores():
    page = (ROOT / "docs/scorers.md").read_text().partition("### Write one")[2]
    names = {"__name__": "example"}
    exec(re.search(r"```python\n(.*?)```", page, re.DOTALL)[1], names)
    request, answer = re.search(r"```json\n(.*\n.*)\n(.*)\n```", page).groups()
    assert answer_of_items(json.loads(answer), 1).service == {"name": "tone", "version": "2"}
    with running(lambda: names["app"]) as address:
        scorers = TextScorers(0, [config(f"{address}/score")], {})
        assert scorers.score_items("it", [item(3), replace(item(1), response="a b c")])[0] == [0.0, 0.2]
    sent = request_of_items("tone", [("prompt-7/0", item(1))])
    assert json.loads(request).keys() == sent.keys() and json.loads(request)["items"][0].keys() == sent["items"][0].keys()


def test_openrlhf_services_are_sent_whole_texts_and_answer_with_rewards():
    with serving() as service:
        found, metrics = TextScorers(0, [config(service, dialect="openrlhf", batch_size=2)], {}).score_items("it", [item(1, "a"), item(3)])
    assert service.requests == [{"query": ["<user>Say x.x", "<user>Say x.xxx"], "prompts": ["<user>Say x."] * 2, "labels": ["a", None]}]
    assert found == [13.0, 15.0] and metrics == {"long": 14.0}  # 12 characters of the prompt; the mean of both


def test_openrlhf_services_for_one_query_may_answer_with_a_number():
    async def number(service: Service, request: web.Request, tree: Tree) -> web.StreamResponse:
        return web.json_response({"rewards": 0.25})

    with serving(misbehave=number) as service:
        assert scores(service, 2, dialect="openrlhf", batch_size=1) == [0.25, 0.25]
        assert all(map(math.isnan, scores(service, 2, dialect="openrlhf", batch_size=2, retries=0)))


def test_256_items_of_50_ms_each_take_less_than_two_and_a_half_seconds():
    with serving(seconds=0.05) as service:
        start = time.perf_counter()
        found = scores(service, 256)
        seconds = time.perf_counter() - start
    assert found == [float(n) for n in range(1, 257)] and set(service.scored.values()) == {1} and service.most_at_once == 16
    assert seconds < 2.5


def test_no_more_requests_at_once_than_allowed():
    with serving(seconds=0.02) as service:
        scores(service, 24, batch_size=2, concurrency=3)
    assert service.most_at_once == 3 and [len(r["items"]) for r in service.requests] == [2] * 12


REFUSED = {
    "wrong key": (status(401), "the service answered 401 Unauthorized: {url}, item id-1/0 to id-8/7: without a reason"),
    "bad request": (status(400), "the service answered 400"),
    "not found": (status(404), "the service answered 404"),
    "redirect": (
        status(307, Location="https://elsewhere.example/score?token=1"),
        "the service answered 307: {url}, item id-1/0 to id-8/7: a redirect to https://elsewhere.example/score, which isn't followed",
    ),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_other_statuses_are_an_error_at_once(fault, caplog):
    misbehave, message = REFUSED[fault]
    with serving(misbehave=misbehave) as service, caplog.at_level(logging.WARNING, logger="rlhf"):
        assert all(map(math.isnan, scores(service, 8)))
        assert len(service.requests) == 1
    assert message.format(url=service.url) in caplog.text
    assert "scorer it: expected a score for every response, got none for 8; " in caplog.text


def saying(text: str) -> Misbehaviour:
    async def answer(service: Service, request: web.Request, tree: Tree) -> web.StreamResponse:
        return web.Response(text=text, content_type="application/json")

    return answer


@pytest.mark.parametrize(
    ("answer", "expected", "message"),
    [
        ('{"scores": [NaN, 2]}', [math.nan, 2.0], "was expected of the service: {url}, item id-1/0: got nan"),
        ('{"scores": [1, -Infinity]}', [1.0, math.nan], "{url}, item id-2/1: got -inf"),
        ('{"scores": [1e999, 2]}', [math.nan, 2.0], "{url}, item id-1/0: got inf"),
        (f'{{"scores": [1{"0" * 400}, 2]}}', [math.nan, 2.0], "{url}, item id-1/0: got 1000"),
        ('{"scores": ["3", 2]}', [math.nan, 2.0], "{url}, item id-1/0: got '3'"),
        ('{"scores": [true, 2]}', [math.nan, 2.0], "{url}, item id-1/0: got True"),
        ('{"scores": [1]}', [math.nan] * 2, "{url}, item id-1/0 to id-2/1: expected 2 in `scores`, one for each item, got 1; got {{"),
        ('{"scores": 1}', [math.nan] * 2, "{url}, item id-1/0 to id-2/1: expected an object with a list `scores`"),
        ("[1, 2]", [math.nan] * 2, "expected an object with a list `scores`"),
        ("", [math.nan] * 2, "Expecting value"),
        ("[" * 200_000, [math.nan] * 2, "the service's answer can't be used: {url}"),
        ("\xff", [math.nan] * 2, "the service's answer can't be used: {url}"),
    ],
)
def test_answers_that_break_the_protocol_leave_no_score_and_name_the_item(answer, expected, message, caplog):
    with serving(misbehave=saying(answer)) as service, caplog.at_level(logging.WARNING, logger="rlhf"):
        assert scores(service, 2, retries=0) == pytest.approx(expected, nan_ok=True)
    assert message.format(url=service.url) in caplog.text


def test_a_reason_counts_all_that_have_it(caplog):
    with serving(misbehave=status(400)) as service, caplog.at_level(logging.WARNING, logger="rlhf"):
        scores(service, 20)
    assert [r.getMessage().partition(" 400")[0] for r in caplog.records if r.name == "rlhf"] == [
        "scorer it: expected a score for every response, got none for 20; the service answered"
    ]


def test_only_responses_without_a_score_are_sent_again():
    with serving(misbehave=first(1, one_is_nan)) as service:
        assert scores(service, 3) == [1.0, 2.0, 3.0]
    assert [[i["response"] for i in r["items"]] for r in service.requests] == [["x", "xx", "xxx"], ["x"]]


def test_null_is_unscored_and_not_asked_for_again(caplog):
    answer = '{"scores": [null, 0.5], "errors": ["no judge awake", null], "metrics": {"cost": 0.1, "bad": "x"}}'
    with serving(misbehave=saying(answer)) as service, caplog.at_level(logging.WARNING, logger="rlhf"):
        found, metrics = TextScorers(0, [config(service)], {}).score_items("it", [item(1), item(2)])
        assert len(service.requests) == 1
    assert found == pytest.approx([math.nan, 0.5], nan_ok=True) and metrics == {"cost": 0.1}
    assert f"got none for 1; the service left it unscored: {service.url}, item id-1/0: no judge awake" in caplog.text


@pytest.mark.parametrize("as_date", [False, True])
def test_retry_after_is_waited_for(as_date):
    def asking(service: Service, request: web.Request, tree: Tree):
        at = format_datetime(datetime.now(UTC) + timedelta(seconds=2), usegmt=True)  # whole seconds: one to two
        return status(429, **{"Retry-After": at if as_date else "1"})(service, request, tree)

    with serving(misbehave=first(1, asking)) as service:
        start = time.perf_counter()
        assert scores(service, 2) == [1.0, 2.0]
        assert time.perf_counter() - start > 0.9
    assert transport.seconds_of("soon") == transport.seconds_of(None) == transport.seconds_of("-3") == 0.0


def test_a_wait_beyond_the_deadline_isnt_begun(caplog):
    with serving(misbehave=status(503, **{"Retry-After": "3600"})) as service:
        start = time.perf_counter()
        assert math.isnan(scores(service, 1)[0])
        assert time.perf_counter() - start < 5
    assert "the service answered 503" in caplog.text


async def asleep(service: Service, request: web.Request, tree: Tree) -> web.StreamResponse:
    await asyncio.sleep(3600)
    return web.Response()


def test_the_whole_call_of_a_step_ends_at_its_timeout_and_keeps_what_came(caplog):
    async def first_batch_only(service: Service, request: web.Request, tree: Tree):
        return None if tree["items"][0]["response"] == "x" else await asleep(service, request, tree)

    with serving(misbehave=first_batch_only) as service:
        start = time.perf_counter()
        assert scores(service, 16, timeout=1.0, in_time=True) == pytest.approx([*map(float, range(1, 9)), *[math.nan] * 8], nan_ok=True)
        assert 0.9 < time.perf_counter() - start < 10
    assert f"got none for 8; the time for these responses (timeout) is over: {service.url}" in caplog.text


def test_outside_rl_each_request_has_the_timeout_for_itself(caplog):
    """Four requests of 0.4 s one after the other: in a step of RL a timeout of 1 s leaves time for two."""
    for in_time, scored in ((True, 4), (False, 8)):
        with serving(seconds=0.2) as service:
            found = scores(service, 8, batch_size=2, concurrency=1, timeout=1.0, in_time=in_time)
            assert [math.isfinite(score) for score in found] == [True] * scored + [False] * (8 - scored)
    with serving(misbehave=asleep) as service:
        assert all(map(math.isnan, scores(service, 2, timeout=0.5)))


def test_a_request_that_hangs_is_sent_again_after_its_own_timeout():
    with serving(misbehave=first(1, asleep)) as service:
        assert scores(service, 2, request_timeout=1.0) == [1.0, 2.0]


def test_nobody_listens(caplog):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{probe.getsockname()[1]}/score"
    assert all(map(math.isnan, scores(address, 2, retries=1)))
    assert f"the connection to the service failed: {address}, item id-1/0 to id-2/1" in caplog.text
    with pytest.raises(ValueError, match=f"scorer it: expected the service at {address} to score a made-up response, got: the connection"):
        try_services([config(address, retries=1)])


@pytest.mark.parametrize("place", ["api_key_env", "api_key_file"])
def test_the_key_is_sent_and_never_shown(place, monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("JUDGE_KEY", KEY)
    (tmp_path / "key").write_text(f"{KEY}\n")
    where = {place: "JUDGE_KEY" if place == "api_key_env" else str(tmp_path / "key")}
    with serving(key=KEY) as service:
        assert scores(service, 2, **where) == [1.0, 2.0]
        service.key = "another"
        assert math.isnan(scores(service, 1, **where)[0])
    assert "the service answered 401 Unauthorized: " in caplog.text and "not the key: Bearer ***" in caplog.text
    assert KEY not in caplog.text and KEY not in repr(config("http://a", **where))


def test_a_key_that_isnt_there_is_refused_at_once(monkeypatch, tmp_path):
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    for where, got in (
        ({"api_key_env": "JUDGE_KEY"}, "in the environment variable JUDGE_KEY, got nothing"),
        ({"api_key_file": f"{tmp_path}/absent"}, "got: No such file or directory"),
    ):
        with pytest.raises(ValueError, match=f"scorer it: expected a key .*{got}"):
            TextScorers(0, [config("http://127.0.0.1:9/", **where)], {})
    (tmp_path / "two").write_text("one\ntwo-secret")
    with pytest.raises(ValueError, match="got 14 characters that aren't one word of ASCII") as refused:
        TextScorers(0, [config("http://127.0.0.1:9/", api_key_file=f"{tmp_path}/two")], {})
    assert "secret" not in str(refused.value)


def test_a_service_is_tried_with_a_made_up_item_and_may_name_itself(caplog):
    with serving() as service:
        assert try_services([config(service), ScorerConfig(name="n", kind="number")]) == {"it": {"url": service.url}}
        assert service.requests[0]["items"][0]["metadata"]["id"] == "trial"
    with serving(misbehave=saying('{"scores": [null], "service": {"name": "judge", "version": "7", "more": 1}}')) as service:
        assert try_services([config(service)]) == {"it": {"url": service.url, "name": "judge", "version": "7"}}


def test_a_service_that_changes_its_version_is_reported(caplog):
    versions = iter("778")

    async def versioned(service: Service, request: web.Request, tree: Tree) -> web.StreamResponse:
        return web.json_response({**await service.scores(tree), "service": {"name": "judge", "version": next(versions)}})

    with serving(misbehave=versioned) as service, caplog.at_level(logging.INFO, logger="rlhf"):
        scorers = TextScorers(0, [config(service)], {})
        for _ in range(3):
            scorers.score_items("it", [item(1)])
    said = [r.getMessage() for r in caplog.records if r.name == "rlhf"]
    assert said == [
        f"scorer it: {service.url} calls itself judge 7",
        "scorer it: expected scores of the service judge 7, as before, got those of judge 8; they may differ",
    ]


def test_proxies_of_the_environment_are_used_but_not_for_this_machine(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://proxy.example:3128")
    monkeypatch.setenv("no_proxy", "inside.example")
    assert transport.proxy_for("http://judge.example/score") == "http://proxy.example:3128"
    assert transport.proxy_for("http://127.0.0.1:5/score") is transport.proxy_for("http://inside.example/score") is None
