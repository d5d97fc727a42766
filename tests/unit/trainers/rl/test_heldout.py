"""Figures of the evaluations during training, by hand: means, pass@k, intervals, and both by data source."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from rl_here import rl_job_here, running
from tiny_models import tiny_params

from rlhf_core.config import ConfigError, RlConfig, curve_columns
from rlhf_core.data.schema import write_rows
from rlhf_core.sampling.rewards import weighted_score
from rlhf_core.trainers.rl.data import evaluation_prompts
from rlhf_core.trainers.rl.heldout import check_evaluated_sources, evaluation_metrics
from rlhf_core.trainers.rl.loop import evaluate

NAN = math.nan
SCORERS = [
    {"name": "model", "kind": "reward_model", "weight": 2.0, "normalization": "none"},
    {"name": "short", "kind": "length", "weight": -1.0, "normalization": "none", "target_length": 3},
    {"name": "seen", "kind": "regex", "weight": 0.0, "normalization": "none", "pattern": "e"},
]
SOURCES = {
    "data.sources": [{"name": name, "kind": "clerk", "uses": ["pretrain", "sft", "preference", "prompt"], "weight": 1.0} for name in "ab"]
}


def config(**changes) -> RlConfig:
    """Args: changes: of rl.evaluation, or of keys with dots."""
    keys = {name if "." in name else f"rl.evaluation.{name}": value for name, value in changes.items()}
    return tiny_params(**{"rl.reward.scorers": SCORERS, "rl.evaluation.every": 5, **SOURCES, **keys}).rl


def scores(**by_scorer: list[float]) -> dict[str, np.ndarray]:
    """Scores of `model`, `short` and `seen`, zeros where none are given, and their weighted sum."""
    count = max(map(len, by_scorer.values()))
    found = {name: torch.tensor(by_scorer.get(name, [0.0] * count)) for name in ("model", "short", "seen")}
    found = {"score": weighted_score(found, config().reward.scorers), **found}
    return {name: values.numpy() for name, values in found.items()}


def test_evaluation_measures_the_weighted_sum_and_each_scorer():
    greedy = scores(model=[1.0, 2.0], short=[0.0, NAN], seen=[NAN, NAN])
    found = evaluation_metrics(greedy, None, ["a", "b"], config())
    assert {name: found[name] for name in ("eval_score", "eval_model", "eval_short")} == {
        "eval_score": 2.0,
        "eval_model": 1.5,
        "eval_short": 0.0,
    }
    assert math.isnan(found["eval_seen"]) and math.isnan(found["eval_score_low"])  # one score has no known spread


def test_the_score_has_students_interval_over_prompts():
    found = evaluation_metrics(scores(model=[0.5, 1.0, 1.5, 2.0]), None, ["a"] * 4, config())
    # scores 1, 2, 3, 4: mean 2.5, s = sqrt(5 / 3), t(0.975, 3) = 3.18245, half = 3.18245 * 1.29099 / 2 = 2.05426
    assert (found["eval_score"], found["eval_score_low"], found["eval_score_high"]) == pytest.approx((2.5, 0.44574, 4.55426), abs=1e-4)


def test_pass_at_k_counts_samples_and_prompts():
    sampled = scores(model=[0.5, 0.0, 0.5, 0.5, 0.0, 0.0, 0.4, 0.5])  # scores 1, 0 | 1, 1 | 0, 0 | 0.8, 1
    found = evaluation_metrics(scores(model=[0.0] * 4), sampled, ["a"] * 4, config(samples=2))
    assert found["eval_pass_1"] == 4 / 8 and found["eval_pass_2"] == 3 / 4
    # Wilson with 3 of 4: centre (0.75 + 1.92073 / 4) / (1 + 3.84146 / 4) = 0.62751, half 0.32692 by sqrt(0.75 * 0.25 / 4 + 3.84146 / 64)
    assert (found["eval_pass_2_low"], found["eval_pass_2_high"]) == pytest.approx((0.30064, 0.95441), abs=1e-4)
    # the samples of a prompt are no independent trials: wider than Wilson's 0.215 to 0.785 with 8 trials
    assert found["eval_pass_1_low"] < 0.215 and found["eval_pass_1_high"] > 0.785
    easier = evaluation_metrics(scores(model=[0.0] * 4), sampled, ["a"] * 4, config(samples=2, pass_score=0.8))
    assert easier["eval_pass_1"] == 5 / 8
    by_scorer = evaluation_metrics(scores(model=[0.0] * 4), sampled, ["a"] * 4, config(samples=2, metric="model", pass_score=0.5))
    assert by_scorer["eval_pass_1"] == 4 / 8


def test_samples_without_a_score_neither_pass_nor_fail():
    sampled = scores(model=[0.5, NAN, 0.0, 0.0, 0.5, 0.5])
    found = evaluation_metrics(scores(model=[0.0] * 3), sampled, ["a"] * 3, config(samples=2))
    assert found["eval_pass_1"] == 3 / 5 and found["eval_pass_2"] == 1 / 2
    nothing = evaluation_metrics(scores(model=[0.0] * 3), scores(model=[NAN] * 6), ["a"] * 3, config(samples=2))
    assert math.isnan(nothing["eval_pass_1"]) and math.isnan(nothing["eval_pass_2_low"])


def test_sources_have_figures_of_their_own_in_the_columns_of_the_curves():
    rl = config(samples=2, sources=["a", "b"])
    sampled = scores(model=[0.5, 0.5, 0.0, 0.0, 0.5, 0.0])
    found = evaluation_metrics(scores(model=[0.5, 1.0, 2.0]), sampled, ["a", "b", "b"], rl)
    assert (found["eval_score.a"], found["eval_score.b"]) == (1.0, 3.0)
    assert (found["eval_pass_1.a"], found["eval_pass_1.b"], found["eval_pass_2.b"]) == (1.0, 0.25, 0.5)
    assert {column for column in curve_columns(rl) if column.startswith("eval_")} == set(found)


def test_a_limit_may_be_on_a_sources_pass_rate():
    limits = {"rl.monitor": {"mine": {"metric": "eval_pass_1_low.b", "below": 0.2, "action": "rollback"}}}
    assert config(samples=2, sources=["b"], **limits).limits["mine"].metric == "eval_pass_1_low.b"
    with pytest.raises(ConfigError, match="expected a column of the curves"):
        config(samples=2, **limits)


def test_a_scorer_may_not_be_named_as_a_figure():
    taken = [{**SCORERS[2], "name": "pass_1", "weight": 1.0}]
    with pytest.raises(ConfigError, match=r"expected names that no figure of the evaluation has, got \['pass_1'\]"):
        tiny_params(**{"rl.reward.scorers": taken, "rl.evaluation.every": 5, "rl.evaluation.samples": 2})


def with_validation(folder: Path, counts: dict[str, int]) -> None:
    rows = [
        {
            "id": f"{source}{i}",
            "source": source,
            "split": "validation",
            "label": None,
            "messages": [{"role": "user", "content": f"sort {i}"}],
        }
        for source, count in counts.items()
        for i in range(count)
    ]
    train = {**rows[0], "id": "t", "split": "train", "messages": [{"role": "user", "content": "sort 4172."}]}
    write_rows(folder, "prompt", [train, *rows])


def test_each_source_has_its_prompts_and_a_missing_one_is_refused(model_folders, tmp_path, monkeypatch):
    job = rl_job_here(
        model_folders, tmp_path, **{"rl.evaluation.every": 1, "rl.evaluation.prompts": 3, "rl.evaluation.sources": ["b", "a"], **SOURCES}
    )
    with_validation(tmp_path / "data/prepared", {"a": 9, "b": 2})
    prompts = evaluation_prompts(job.model_copy(update={"prepared": str(tmp_path / "data/prepared")}))
    assert [prompt.source for prompt in prompts] == ["b", "b", "a", "a", "a"] and len({prompt.id for prompt in prompts}) == 5
    monkeypatch.chdir(tmp_path)
    check_evaluated_sources(job.rl)
    other = job.rl.model_copy(update={"evaluation": job.rl.evaluation.model_copy(update={"sources": ["a", "c"]})})
    with pytest.raises(ValueError, match=r"expected sources with validation prompts, some of \['a', 'b'\], got \['c'\]"):
        check_evaluated_sources(other)


def test_evaluations_of_one_policy_are_equal_and_samples_of_a_prompt_differ(model_folders, tmp_path):
    changes = {"rl.evaluation.every": 1, "rl.evaluation.prompts": 4, "rl.evaluation.samples": 3, "rl.evaluation.pass_score": 0.0}
    job = rl_job_here(model_folders, tmp_path, **changes)
    with_validation(tmp_path / "prepared", {"a": 4})
    with running(job) as run:
        prompts = run.run.validation
        sampled = run.workers.rollouts.generate_for_evaluation(prompts)
        assert [r.prompt.id for r in sampled] == [prompt.id for prompt in prompts for _ in range(3)]
        assert len({tuple(r.response_ids) for r in sampled}) > 4
        assert sampled == run.workers.rollouts.generate_for_evaluation(prompts)
        first, again = (evaluate(run.workers, prompts, job.rl) for _ in range(2))
        assert first == pytest.approx(again, nan_ok=True) and 0 <= first["eval_pass_1"] <= first["eval_pass_3"] <= 1
