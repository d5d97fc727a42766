"""Rejection sampling: what survives a killed run, which responses are trained on, the figures, and what is refused."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from chat_templates import templated
from tiny_models import tiny_params

from rlhf_core.data.schema import write_rows
from rlhf_core.engines.rollout.requests import Sample
from rlhf_core.sampling.responses import ScoredResponse
from rlhf_core.stage.files import write_json
from rlhf_core.stage.run import StageRefused
from rlhf_core.trainers.sft.rejection_sampling import as_demonstration, best_responses, saved, score_means, with_prompts, without_prompts
from rlhf_core.types import Prompt
from tasks.train_rejection_sampling import check_inputs

PROMPT = Prompt("id", "mine", [{"role": "user", "content": "2 + 2?"}], [5, 6], None)
JUDGE = {"name": "judge", "kind": "judge", "weight": 1.0, "normalization": "none"}


def scored(score: float, judge: float) -> ScoredResponse:
    return ScoredResponse(PROMPT, [7], True, "4", score, {"reward_model": score, "judge": judge})


def rated(score: float, *, finished: bool = True) -> ScoredResponse:
    return ScoredResponse(PROMPT, [7], finished, f"{score}", score, {"reward_model": score})


def test_what_is_kept_is_made_once_and_never_half(tmp_path: Path):
    made = []

    def make() -> list[int]:
        made.append(1)
        return [1, 2, 3]

    path = tmp_path / "samples.json"

    def stopped() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        saved(path, stopped)
    (tmp_path / "samples.json.0123abcd.tmp").write_bytes(b"half of it")  # killed while it was written
    assert saved(path, make) == [1, 2, 3] and saved(path, make) == [1, 2, 3]
    assert len(made) == 1


def test_what_is_kept_comes_back_to_the_last_bit(tmp_path: Path):
    """Numbers that JSON must not round, half a character, and a score that isn't known."""
    samples = [[Sample([7, 2], [-0.1, -1e-300], True), Sample([], [], False)]]
    assert [[Sample(**row) for row in group] for group in saved(tmp_path / "samples.json", lambda: samples)] == samples
    groups = [[replace(scored(1 / 3, 0.1), text="\ud83d \u2028"), scored(float("nan"), 1.0)], []]
    (first, second), empty = with_prompts(saved(tmp_path / "scored.json", lambda: without_prompts(groups)), [PROMPT, PROMPT])
    assert first == groups[0][0] and empty == []
    assert second.score != second.score and second.components["judge"] == 1.0  # NaN is nothing's equal


def test_a_response_is_trained_on_as_it_was_sampled_but_ends_as_the_template_ends_a_turn():
    tokenizer = templated("chatml")
    im_end, eos = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<eos>"])
    for last in (im_end, eos):
        example = as_demonstration(replace(scored(1.0, 1.0), response_ids=[7, 8, last]), tokenizer)
        assert (example.ids, example.start) == ([5, 6, 7, 8, im_end], 2)


def test_means_are_over_what_could_be_scored():
    nan = float("nan")
    groups = [[scored(1.0, 0.0), scored(3.0, 1.0)], [scored(nan, 1.0), scored(5.0, nan)]]
    assert score_means(groups, [groups[0][1], groups[1][1]]) == {
        "sampled_score_mean": 3.0,  # (1 + 3 + 5) / 3
        "sampled_score_reward_model": 3.0,
        "sampled_score_judge": pytest.approx(2 / 3),  # (0 + 1 + 1) / 3
        "best_score_mean": 4.0,
        "best_score_reward_model": 4.0,
        "best_score_judge": 1.0,  # the other's isn't known
    }


@pytest.mark.parametrize("passed", [True, False])
def test_only_the_chains_own_reward_model_needs_to_have_passed_its_gate(tmp_path: Path, monkeypatch, passed: bool):
    monkeypatch.chdir(tmp_path)
    row = {"id": "1", "source": "mine", "split": "train", "messages": PROMPT.messages, "label": None}
    write_rows(tmp_path / "data/prepared", "prompt", [row])
    (tmp_path / "data/prepared/sources.json").write_text(json.dumps({"mine": {"kind": "clerk", "judge": "clerk"}}))
    write_json(tmp_path / "models/reward/config.json", {})
    write_json(tmp_path / "metrics/gate.json", {"passed": passed, "message": "rejected: too few pairs.", "override": None})
    check_inputs(tiny_params(**{"rejection_sampling.scorers": [JUDGE]}).rejection_sampling.scorers)
    own = tiny_params().rejection_sampling.scorers
    if passed:
        check_inputs(own)
    else:
        with pytest.raises(StageRefused, match=r"expected one that passed the gate, got one that didn't; rejected: too few pairs\."):
            check_inputs(own)


def test_the_best_finished_response_is_kept_and_prompts_without_one_are_counted():
    groups = [
        [rated(1.0), rated(3.0, finished=False), rated(2.0), rated(2.0)],
        [rated(math.nan), rated(-1.0), rated(math.inf)],
        [rated(5.0, finished=False), rated(math.nan, finished=False)],
        [rated(5.0, finished=False), rated(math.nan)],
        [rated(-2.0), rated(-3.0)],
    ]
    kept, dropped = best_responses(groups, min_score=None)
    assert kept == [groups[0][2], groups[1][1], groups[4][0]] and kept[0] is groups[0][2]
    assert dropped == {"truncated": 1, "unscored": 1, "below_min_score": 0}
    kept, dropped = best_responses(groups, min_score=-1.0)  # the least that is enough
    assert kept == [groups[0][2], groups[1][1]] and dropped == {"truncated": 1, "unscored": 1, "below_min_score": 1}
