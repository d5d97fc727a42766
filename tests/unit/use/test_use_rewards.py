"""A reward model behind HTTP: the same scores as in this process in both dialects, and what it refuses."""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest
import torch
from score_service import running
from test_use_serve import settings
from tiny_models import save_tiny_models, tiny_params, tiny_tokenizer

from rlhf_core.config import ScorerConfig
from rlhf_core.engines.rollout.requests import Sample
from rlhf_core.models.tokenizer import load_tokenizer
from rlhf_core.sampling.prompts import choose_prompts
from rlhf_core.sampling.scoring import LocalScorers, ResponseScorer
from rlhf_core.scorers.needs import try_services
from rlhf_core.use import rewards
from rlhf_core.use.__main__ import main
from rlhf_core.use.choice import choose
from rlhf_core.use.rewards import RewardService, curl, reward_service

MAX_LENGTH = 60
ROWS = [
    {"id": str(n), "source": "mine", "messages": [{"role": "user", "content": f"Sort 4{'1' * n}."}], "label": None} for n in range(6)
]  # fmt: skip
TEXTS = [("14", True), ("Certainly: 1 4.", True), ("I can", False), ("", True)]
CHATML = (
    "{% for m in messages %}{{ '<|user|>' if m.role == 'user' else '<|assistant|>' }}{{ m.content }}{{ '<|end|>' }}\n{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def service(folder: Path, *, key: str | None = None, max_length: int = MAX_LENGTH) -> RewardService:
    return reward_service(choose(model=folder), settings(folder, name="reward", api_key=key, max_length=max_length))


@pytest.fixture(scope="module")
def ends_with_a_line_break(tmp_path_factory) -> Path:
    """A reward model whose template writes a line break after the end token, as ChatML does."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHATML
    return save_tiny_models(tmp_path_factory.mktemp("models"), tokenizer, seed=3)[1]


@pytest.fixture(params=["plain", "line break"])
def folder(request, reward_folder: Path, ends_with_a_line_break: Path) -> Path:
    return reward_folder if request.param == "plain" else ends_with_a_line_break


def scored(folder: Path, *configs: ScorerConfig) -> dict[str, list[float]]:
    """Scores by each scorer of the same responses, of a policy with the reward model's tokenizer; the last one is too long."""
    tokenizer = load_tokenizer(str(folder), trust_remote_code=False)
    model = tiny_params().model.model_copy(update={"max_length": MAX_LENGTH})
    scorers = LocalScorers(list(configs), reward_model=folder, source_judges={}, model=model)
    prompts = choose_prompts(ROWS, tokenizer, longest=MAX_LENGTH, count=None, seed=0)
    texts = [*TEXTS, ("1" * 99, True)]
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id] * finished for text, finished in texts]
    samples = [Sample(i, [], finished) for i, (_, finished) in zip(ids, texts, strict=True)]
    groups = ResponseScorer(scorers, tokenizer).score_groups(prompts, [samples] * len(prompts))
    return {c.name: [r.components[c.name] for group in groups for r in group] for c in configs}


@pytest.fixture
def address(folder: Path) -> Iterator[str]:
    with running(service(folder).app) as address:
        yield address


def test_scores_over_http_equal_those_in_process_in_both_dialects(folder: Path, address: str):
    found = scored(
        folder,
        ScorerConfig(name="here", kind="reward_model"),
        ScorerConfig(name="items", kind="http", url=f"{address}/score", batch_size=30),
        ScorerConfig(name="texts", kind="http", url=f"{address}/get_reward", dialect="openrlhf", batch_size=30),
        ScorerConfig(name="in_parts", kind="http", url=f"{address}/score", batch_size=4),
    )
    assert len(found["here"]) == 30 and sum(map(math.isnan, found["here"])) == 6
    for name in ("items", "texts"):  # in one request, so that batches are the same too
        assert found[name] == pytest.approx(found["here"], abs=0, rel=0, nan_ok=True)
    assert found["in_parts"] == pytest.approx(found["here"], abs=5e-6, nan_ok=True)
    assert len({round(score, 5) for score in found["here"] if not math.isnan(score)}) > 20


def ask(address: str, path: str, body: bytes | str, **headers: str) -> tuple[int, dict, dict]:
    async def post() -> tuple[int, dict, dict]:
        async with aiohttp.ClientSession() as session, session.post(f"{address}/{path}", data=body, headers=headers) as answer:
            return answer.status, await answer.json(), dict(answer.headers)

    return asyncio.run(post())


def item(**changes) -> dict:
    return {"messages": [{"role": "user", "content": "Sort 41."}], "response": "14"} | changes


def test_what_cannot_be_scored_is_null_with_its_reason(address: str):
    body = {"version": 1, "items": [item(), item(response="1" * 99), item(messages=[{"role": "robot", "content": "x"}])]}
    status, tree, _ = ask(address, "score", json.dumps(body))
    assert status == 200 and tree["errors"][0] is None and isinstance(tree["scores"][0], float)
    assert tree["scores"][1] is None and "more than the 60 of --max-length" in tree["errors"][1]


def test_answers_name_the_model_by_its_hash(reward_folder: Path):
    with running(service(reward_folder).app) as address:
        told = try_services([ScorerConfig(name="it", kind="http", url=f"{address}/score")])["it"]
    assert told["name"] == "reward" and re.fullmatch(r"[0-9a-f]{32}\.dir", told["version"])


@pytest.mark.parametrize(
    ("path", "body", "status", "reason"),
    [
        ("score", "not JSON", 422, "Invalid JSON"),
        ("score", '{"version": 2, "items": []}', 422, "version: Input should be 1"),
        ("score", json.dumps({"version": 1, "items": [item(), item(response=3)]}), 422, "items.1.response: Input should be a valid string"),
        ("score", json.dumps({"version": 1, "items": [item(messages=[])]}), 422, "items.0.messages"),
        ("score", json.dumps({"version": 1, "items": [item()] * 1025}), 422, "items: List should have at most 1024 items"),
        ("get_reward", '{"prompts": []}', 422, "query: Field required"),
        ("scores", "{}", 404, "Not Found"),
        ("score", b"x" * (2**20), 413, "Maximum request body size 1000 exceeded"),
    ],
)
def test_requests_that_break_the_protocol_are_refused_by_name(reward_folder: Path, monkeypatch, path, body, status, reason):
    if status == 413:
        monkeypatch.setattr(rewards, "MAX_BODY", 1000)
    with running(service(reward_folder).app) as address:
        found, tree, _ = ask(address, path, body)
    assert found == status and reason in tree["error"]


def test_a_wrong_key_is_refused(reward_folder: Path, monkeypatch):
    monkeypatch.setenv("RIGHT", "right-key")
    monkeypatch.setenv("WRONG", "wrong-key")
    with running(service(reward_folder, key="right-key").app) as address:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "right-key"}):
            assert ask(address, "get_reward", '{"query": ["a"]}', **headers)[0] == 401
        scorer = ScorerConfig(name="it", kind="http", url=f"{address}/score", api_key_env="RIGHT")
        assert try_services([scorer])["it"]["name"] == "reward"
        with pytest.raises(ValueError, match=r"got: the service answered 401 Unauthorized: .*expected the key of this service") as refused:
            try_services([scorer.model_copy(update={"api_key_env": "WRONG"})])
    assert "wrong-key" not in str(refused.value)


def test_requests_beyond_the_limit_are_told_to_come_again_and_are_scored_in_the_end(reward_folder: Path, monkeypatch):
    monkeypatch.setattr(rewards, "MAX_WAITING", 1)
    made = service(reward_folder)
    entered, release = threading.Event(), threading.Event()
    score = made._scores

    def slow(encoded, pictures):
        entered.set()
        assert release.wait(30)
        return score(encoded, pictures)

    monkeypatch.setattr(made, "_scores", slow)
    with running(made.app) as address:
        first = threading.Thread(target=ask, args=(address, "get_reward", '{"query": ["a"]}'))
        first.start()
        assert entered.wait(30)
        status, tree, headers = ask(address, "get_reward", '{"query": ["a"]}')
        assert (status, headers["Retry-After"]) == (503, "1") and "at most 1 requests at once" in tree["error"]
        release.set()
        first.join()
        found = scored(reward_folder, ScorerConfig(name="items", kind="http", url=f"{address}/score", concurrency=2, retries=9))
    assert sum(map(math.isnan, found["items"])) == 6


def test_the_command_serves_a_folder_and_stops_at_a_signal(reward_folder: Path):
    port = settings().port
    command = [
        sys.executable,
        "-m",
        "rlhf_core.use",
        "serve",
        "--model",
        str(reward_folder),
        "--port",
        str(port),
        "--api-key-env",
        "REWARD_KEY",
    ]
    server = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | {"REWARD_KEY": "a-key"}
    )
    try:
        assert server.stdout.readline().startswith(f"Serving {reward_folder.name} at http://127.0.0.1:{port}/score")
        example = server.stdout.readline()
        shell = subprocess.run(
            example, shell=True, capture_output=True, text=True, timeout=60, env=os.environ | {"REWARD_KEY": "a-key"}, check=True
        )
        assert isinstance(json.loads(shell.stdout)["scores"][0], float)
        server.send_signal(signal.SIGTERM)
        assert server.wait(30) == 0 and server.stdout.read() == "Stopped.\n"
    finally:
        server.kill()
        server.wait()


def test_other_machines_need_a_key(reward_folder: Path, capsys):
    assert main(["serve", "--model", str(reward_folder), "--host", "0.0.0.0"]) == 2
    assert "--host: expected a key for requests from other machines, got none for 0.0.0.0" in capsys.readouterr().err
    assert "a-secret" not in curl(settings(api_key="a-secret"), "MY_KEY") and "Bearer $MY_KEY" in curl(settings(), "MY_KEY")


def test_an_ensemble_answers_with_its_mean(reward_folder: Path, tokenizer, tmp_path: Path):
    folder = tmp_path / "ensemble"
    shutil.copytree(reward_folder, folder)
    other = save_tiny_models(tmp_path / "other", tokenizer, seed=5)[1]
    shutil.copytree(other, folder / "member_1")
    with running(service(folder).app) as address:
        found = scored(
            folder,
            ScorerConfig(name="here", kind="reward_model", members=2),
            ScorerConfig(name="there", kind="http", url=f"{address}/score"),
        )
    assert found["there"] == pytest.approx(found["here"], abs=5e-6, nan_ok=True)
    assert torch.tensor(found["here"]).isfinite().sum() == 24
