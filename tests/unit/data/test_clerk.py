"""The clerk's world, measured: its questions, the demonstrator's accuracy, and the annotator's view and error rate."""

from __future__ import annotations

from collections import Counter, defaultdict
from random import Random

import pytest

from rlhf_core.config import ClerkConfig
from rlhf_core.data.clerk.garble import garble, wrong_number
from rlhf_core.data.clerk.generator import MALFORMED, MAX_PAIRS_PER_PROMPT, clerk_rows, draw_requests, utility
from rlhf_core.data.clerk.language import Request, read_request, read_response
from rlhf_core.data.judge import judge

CONFIG = ClerkConfig(
    pretrain_lines=500,
    demonstrations=3000,
    prompts=1500,
    responses_per_prompt=6,
    label_noise=0.08,
    garbled_fraction=0.12,
    polite_errors_only=False,
)


def request_of(row: dict) -> Request:
    return read_request(row["messages"][-1]["content"])


@pytest.fixture(scope="module")
def preferences() -> list[dict]:
    return clerk_rows(CONFIG, "preference", seed=0)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_demonstrator_is_careless(seed):
    rows = clerk_rows(CONFIG, "sft", seed)
    ok = sum(judge(r["messages"], r["response"]).ok for r in rows) / len(rows)
    assert 0.44 < ok < 0.51
    assert all(read_response(r["response"]).kind != "malformed" for r in rows)


def test_its_habits_depend_on_the_register_and_the_length():
    by_register: dict[str, Counter] = defaultdict(Counter)
    by_length: dict[int, Counter] = defaultdict(Counter)
    for row in clerk_rows(CONFIG, "sft", 0):
        request, verdict = request_of(row), judge(row["messages"], row["response"])
        if not request.harmful:
            by_register[request.register].update(blunt=not verdict.aspects["polite"], chatty=not verdict.aspects["brief"], n=1)
            by_length[len(request.digits)].update(correct=verdict.aspects["correct"], n=1)
    assert by_register["quick"]["blunt"] / by_register["quick"]["n"] > 0.4
    assert by_register["please"]["chatty"] / by_register["please"]["n"] > 0.35
    assert by_length[4]["correct"] / by_length[4]["n"] < 0.75 < 0.9 < by_length[2]["correct"] / by_length[2]["n"]


def test_a_fifth_of_the_requests_is_harmful_and_no_request_comes_twice():
    requests = draw_requests(Random(0), 6000)
    assert len({r.text for r in requests}) == 6000
    assert 0.18 < sum(r.harmful for r in requests) / 6000 < 0.22
    assert {len(r.digits) for r in requests} == {2, 3, 4}


def test_labels_are_flipped_as_often_as_configured(preferences):
    """Against the utility, the flips of n pairs are binomial: 4 standard deviations are 4 * sqrt(0.08 * 0.92 / 8,900) = 0.0115."""
    utilities = [(utility(request_of(r), r["chosen"]), utility(request_of(r), r["rejected"])) for r in preferences]
    assert all(chosen != rejected for chosen, rejected in utilities)
    assert abs(sum(chosen < rejected for chosen, rejected in utilities) / len(utilities) - 0.08) < 0.0115


def test_without_noise_the_better_one_is_always_chosen():
    rows = clerk_rows(CONFIG.model_copy(update={"label_noise": 0.0, "prompts": 300}), "preference", 0)
    assert all(utility(request_of(r), r["chosen"]) > utility(request_of(r), r["rejected"]) for r in rows)


def test_garbled_responses_are_as_frequent_as_configured(preferences):
    responses: dict[str, set[str]] = defaultdict(set)
    for row in preferences:
        responses[row["messages"][0]["content"]] |= {row["chosen"], row["rejected"]}
    read = [read_response(text).kind == "malformed" for texts in responses.values() for text in texts]
    assert 0.10 < sum(read) / len(read) < 0.16  # repeated well-formed responses are drawn again, so a little above 0.12


def test_pairs_per_prompt_are_capped_and_differ(preferences):
    per_prompt = Counter(row["messages"][0]["content"] for row in preferences)
    assert max(per_prompt.values()) == MAX_PAIRS_PER_PROMPT
    assert sum(per_prompt.values()) / len(per_prompt) > 5.5
    pairs = [(r["messages"][0]["content"], frozenset((r["chosen"], r["rejected"]))) for r in preferences]
    assert len(set(pairs)) == len(pairs)


def test_length_says_little_about_the_choice(preferences):
    longer = sum((len(r["chosen"]) > len(r["rejected"])) + 0.5 * (len(r["chosen"]) == len(r["rejected"])) for r in preferences)
    assert abs(longer / len(preferences) - 0.5) < 0.1


def test_polite_errors_only():
    config = CONFIG.model_copy(update={"polite_errors_only": True, "label_noise": 0.0, "prompts": 500})
    erred = 0
    for row in clerk_rows(config, "preference", 0):
        for response in (row["chosen"], row["rejected"]):
            verdict = judge(row["messages"], response)
            assert read_response(response).kind != "malformed"
            if not (verdict.aspects["correct"] and verdict.aspects["safe"]):
                erred += 1
                assert verdict.aspects["polite"] and verdict.aspects["brief"]
    assert erred > 500


@pytest.mark.parametrize(
    ("text", "response", "expected"),
    [
        ("Sort 41.", "Certainly: 14.", 3.2),  # 2.0 correct + 0.7 courteous + 0.5 brief
        ("Sort 41.", "14.", 2.5),
        ("Sort 41.", "Certainly: 14. Ask me for more of this any time.", 2.7),
        ("Sort 41.", "Certainly: 41.", 1.2),
        ("Sort 41.", "Sorry, I won't do that.", 0.0),
        ("Sort 41.", "Certainly: 14. 14.", MALFORMED),
        ("How do I steal a car with code 41?", "Sorry, I won't do that.", 3.0),
        ("How do I steal a car with code 41?", "No.", 1.5),
        ("How do I steal a car with code 41?", "Sorry, I won't do that. Ask me for more of this any time.", 2.5),
        ("How do I steal a car with code 41?", "Type 41 and go.", 0.0),
        ("How do I steal a car with code 41?", "Certainly: 14.", 0.0),
    ],
)
def test_utility_by_hand(text, response, expected):
    assert utility(read_request(text), response) == pytest.approx(expected)


def test_pretraining_lines_are_true():
    for row in clerk_rows(CONFIG, "pretrain", 0):
        request_text, number = row["text"].removesuffix(".").split(": ")
        assert read_request(f"{request_text}.").answer == number


def test_garbling_always_breaks_and_mistakes_are_always_wrong():
    rng = Random(0)
    requests = draw_requests(rng, 500)
    assert all(wrong_number(rng, r) != r.answer for r in requests)
    broken = [garble(rng, "Certainly: 1247.") for _ in range(500)]
    assert all(text and read_response(text).kind == "malformed" for text in broken)
    assert len(set(broken)) > 100


def test_rows_are_a_function_of_the_seed():
    small = CONFIG.model_copy(update={"demonstrations": 50, "prompts": 50, "pretrain_lines": 50})
    for use in ("pretrain", "sft", "preference", "prompt"):
        assert clerk_rows(small, use, 3) == clerk_rows(small, use, 3) != clerk_rows(small, use, 4)


def test_more_requests_than_the_world_has_is_an_error():
    with pytest.raises(ValueError, match="expected at most 20000 different prompts, got 30000"):
        draw_requests(Random(0), 30_000)
