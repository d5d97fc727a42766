"""What is measured of a step, by hand; what stops the run; and that every column is known before the first step."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from tiny_models import tiny_params

from rlhf_core.config import RlConfig, curve_columns
from rlhf_core.sampling.rewards import RewardNormalizer
from rlhf_core.trainers.rl.credit import compute_advantages
from rlhf_core.trainers.rl.heldout import evaluation_metrics
from rlhf_core.trainers.rl.metrics import TooManyUnscored, batch_metrics, check_scored, lag_metrics, update_metrics
from rlhf_core.trainers.rl.mismatch import LogprobMismatch, check_logprobs
from rlhf_core.types import Prompt, Rollout, RolloutBatch, Sequences, Span

NAN = math.nan
TWO_SCORERS = [
    {"name": "model", "kind": "reward_model", "weight": 2.0, "normalization": "none"},
    {"name": "short", "kind": "length", "weight": -1.0, "normalization": "none", "target_length": 3},
    {"name": "seen", "kind": "regex", "weight": 0.0, "normalization": "none", "pattern": "e"},
]


def config(**overrides) -> RlConfig:
    return tiny_params(**{"rl.reward.scorers": TWO_SCORERS, **overrides}).rl


def batch_of(components: dict[str, list[float]], *, width: int = 2, finished: list[bool] | None = None) -> RolloutBatch:
    rows = len(next(iter(components.values())))
    zeros, ids = torch.zeros(rows, width), torch.ones(rows, width, dtype=torch.long)
    sequences = Sequences.of([[1] * (1 + width)] * rows, [1] * rows)
    return RolloutBatch(
        sequences=sequences, response_ids=ids, response_mask=ids.bool(), rollout_logprobs=zeros,
        old_logprobs_source="recompute", old_logprobs=zeros,
        sampler_logprobs=zeros, ref_logprobs=zeros, values=zeros, components={n: torch.tensor(s) for n, s in components.items()},
        baseline=None, group_ids=torch.arange(rows), finished=torch.tensor(finished or [True] * rows),
        policy_versions=torch.zeros_like(ids), turns=torch.zeros_like(ids), turn_rewards=zeros, lengths=torch.full((rows,), width),
    )  # fmt: skip


@pytest.mark.parametrize("bad", [NAN, math.inf])
def test_metrics_by_hand_over_what_could_be_scored(bad: float):
    batch = batch_of({"model": [1.0, bad, 3.0], "short": [0.0, 0.0, -1.0], "seen": [1.0, 1.0, bad]}, finished=[True, False, True])
    mask = torch.tensor([[True, False], [True, True], [True, True]])
    batch = replace(batch, response_mask=mask, lengths=mask.sum(1), ref_logprobs=batch.ref_logprobs - 0.5)
    # scores: 2*1 - 0 = 2, unscored, 2*3 + 1 = 7: mean 4.5, deviation 2.5, the longer one higher; KL 0.5 per token, of 1 + 2 + 2 tokens in 3
    # responses; all tokens are the same: 1 of 5, of the 2 pairs 1; no response has three; `seen` has one row in common with the score
    assert batch_metrics(batch, batch.old_logprobs, config().reward) == pytest.approx(
        {
            "score_mean": 4.5, "score_std": 2.5, "score_model": 2.0, "score_short": -1 / 3, "score_seen": 1.0,
            "failed_model": 1, "failed_short": 0, "failed_seen": 1, "kl_mean": 2.5 / 3, "response_length": 5 / 3,
            "truncated_fraction": 1 / 3, "unscored_fraction": 1 / 3, "kl_token_mean": 0.5, "kl_token_min": 0.5, "kl_token_max": 0.5,
            "reward_length_correlation": 1.0, "repetition": NAN, "distinct_1": 0.2, "distinct_2": 0.5, "agreement_seen": NAN,
        },
        nan_ok=True,
    )  # fmt: skip


def test_update_metrics_are_means_over_tokens_and_optimizer_steps():
    # two ranks, two optimizer steps, the second minibatch's successor was too far away
    sums = {
        "tokens": 10, "entropy_sum": 20.0, "clip_frac_sum": 1.0, "approx_kl_sum": 0.5, "policy_loss": 0.6, "ptx_loss": 3.0,
        "grad_norm": 8.0, "optimizer_steps": 4, "stopped_early": 2, "skipped_steps": 6,
        "policy_ratio_max": 1.5, "policy_ratio_min": math.inf,
    }  # fmt: skip
    assert update_metrics(sums, ranks=2) == pytest.approx(
        {
            "entropy": 2.0, "clip_frac": 0.1, "approx_kl": 0.05, "stopped_early": 1.0, "skipped_steps": 3.0,
            "policy_loss": 0.3, "ptx_loss": 1.5, "grad_norm": 2.0, "policy_ratio_max": 1.5,
        }
    )  # fmt: skip


def test_what_no_optimizer_step_had_is_left_out():
    only_critic = {"tokens": 10, "value_loss": 0.5, "critic_grad_norm": 2.0, "optimizer_steps": 1, "stopped_early": 0, "skipped_steps": 0}
    counts = {"stopped_early": 0.0, "skipped_steps": 0.0}
    assert update_metrics(only_critic, ranks=1) == {**counts, "value_loss": 0.5, "critic_grad_norm": 2.0}
    none = {"tokens": 10, "entropy_sum": 5.0, "clip_frac_sum": 0.0, "approx_kl_sum": 9.0, "optimizer_steps": 0, "stopped_early": 1}
    none |= {"skipped_steps": 0}
    assert update_metrics(none, ranks=1) == {**counts, "entropy": 0.5, "clip_frac": 0.0, "approx_kl": 0.9, "stopped_early": 1.0}
    assert update_metrics({"optimizer_steps": 0, "stopped_early": 0, "skipped_steps": 1}, ranks=1) == counts | {"skipped_steps": 1.0}


def test_more_unscored_responses_than_the_limit_stop_the_run_and_the_scorer_is_named():
    fine = {"model": [0.0] * 10, "short": [NAN, *[0.0] * 9], "seen": [NAN] * 10}  # 1 of 10 is the limit of 0.1; seen has no weight
    check_scored(batch_of(fine), config(), step=3)
    for bad in ([NAN, NAN], [NAN, math.inf]):
        with pytest.raises(TooManyUnscored, match=r"step 3: scorer short: .*max_unscored_fraction=0\.1 .*got 0\.2"):
            check_scored(batch_of({**fine, "short": [*bad, *[0.0] * 8]}), config(), step=3)


def test_at_least_one_response_needs_all_its_scores():
    lenient = config(**{"rl.reward.max_unscored_fraction": 1.0})
    with pytest.raises(TooManyUnscored, match=r"scorer model: .*got 1"):
        check_scored(batch_of({"model": [NAN, NAN], "short": [0.0, 0.0], "seen": [0.0, 0.0]}), lenient, step=0)
    with pytest.raises(TooManyUnscored, match=r"expected a response that every scorer could score"):
        check_scored(batch_of({"model": [NAN, 1.0], "short": [0.0, NAN], "seen": [0.0, 0.0]}), lenient, step=0)


def compared(difference: torch.Tensor, rl: RlConfig, dtype: str = "float32") -> float:
    rows, width = difference.shape
    batch = batch_of({"model": [0.0] * rows, "short": [0.0] * rows, "seen": [0.0] * rows}, width=width)
    return check_logprobs(batch, difference, rl, step=4, dtype=dtype)


def test_the_sampling_engine_is_compared_with_the_distribution_that_was_sampled_from():
    difference = torch.tensor([[1e-5, -3e-5], [0.0, 2e-5]])
    assert compared(difference, config()) == pytest.approx(3e-5)
    for bad in (1.0, math.inf, NAN):
        difference[1, 1] = bad
        with pytest.raises(
            LogprobMismatch,
            match=r"step 4: expected the rollout .*got a largest difference of .*rl\.rollout\.max_logprob_difference=0\.001;",
        ):
            compared(difference, config())


def test_positions_where_the_end_token_was_forbidden_are_not_compared():
    difference = torch.tensor([[0.7, 0.4, 1e-5]])
    assert compared(difference, config(**{"rl.rollout.min_new_tokens": 2})) == pytest.approx(1e-5)
    with pytest.raises(LogprobMismatch):
        compared(difference, config(**{"rl.rollout.min_new_tokens": 1}))
    assert compared(difference, config(**{"rl.rollout.min_new_tokens": 3})) == 0.0


@pytest.mark.parametrize("filtered", [{"rl.rollout.top_p": 0.9}, {"rl.rollout.top_k": 20}])
def test_with_a_filter_the_thousandth_part_at_its_edge_is_left_out_and_no_more(filtered):
    difference = torch.full((1, 3000), 1e-5)
    difference[0, :3] = math.inf
    assert compared(difference, config(**filtered)) == pytest.approx(1e-5)
    with pytest.raises(LogprobMismatch):
        compared(difference, config())
    difference[0, 3] = 1.0
    with pytest.raises(LogprobMismatch, match="largest difference of 1,"):
        compared(difference, config(**filtered))
    difference[0, :4] = NAN
    with pytest.raises(LogprobMismatch, match="largest difference of nan,"):
        compared(difference, config(**filtered))


@pytest.mark.parametrize("algorithm", ["ppo", "grpo", "reinforce_pp"])
def test_every_column_of_a_step_is_known_before_the_first(algorithm: str):
    rl = config(**{"rl.algorithm": algorithm, "rl.ptx.coef": 0.1, "rl.moe_aux_coef": 0.1, "rl.evaluation.every": 3})
    batch = batch_of({"model": [1.0, 2.0], "short": [0.0, -1.0], "seen": [0.0, 1.0]})
    _, advantage_metrics = compute_advantages(batch, rl, RewardNormalizer(rl.reward), kl_coef=0.1)
    losses = dict.fromkeys(("policy_loss", "value_loss", "ptx_loss", "moe_aux_loss", "grad_norm", "critic_grad_norm"), 1.0)
    sums = {"tokens": 4, "entropy_sum": 1.0, "clip_frac_sum": 0.0, "approx_kl_sum": 0.0, "optimizer_steps": 1, "stopped_early": 0}
    sums |= {"skipped_steps": 0, "policy_ratio_max": 1.2, "policy_ratio_min": 0.8, **losses}
    evaluated = {name: scores.numpy() for name, scores in {"score": batch.components["model"], **batch.components}.items()}
    row = {
        **batch_metrics(batch, batch.old_logprobs, rl.reward),
        **advantage_metrics,
        **update_metrics(sums, ranks=1),
        **evaluation_metrics(evaluated, None, ["made"] * len(batch.finished), rl),
    }
    columns = curve_columns(rl)
    assert set(row) <= set(columns) and len(set(columns)) == len(columns)


def shares(name: str) -> set[str]:
    """The columns of a further rewarded scorer's part in the update."""
    return {f"share_{name}", f"correlation_model.{name}", f"correlation_short.{name}"}


def test_columns_of_options_are_there_only_with_the_option():
    plain, function = set(curve_columns(config())), {"name": "own", "kind": "function", "path": "a.py:b", "weight": 1.0}
    options = {
        "rl.ptx.coef": (0.1, {"ptx_loss"}),
        "rl.moe_aux_coef": (0.1, {"moe_aux_loss"}),
        "rl.evaluation.every": (2, {"eval_score", "eval_score_low", "eval_score_high", "eval_model", "eval_short", "eval_seen"}),
        "rl.reward.scorers": (
            [*TWO_SCORERS, {**function, "normalization": "none"}],
            {"score_own", "failed_own", "scorer_metrics"} | shares("own"),
        ),
    }
    programs = [*TWO_SCORERS, {"name": "tests", "kind": "code", "weight": 1.0, "normalization": "none"}]
    assert set(curve_columns(config(**{"rl.reward.scorers": programs}))) - plain == {
        *("score_tests", "failed_tests", "scorer_metrics"),
        *shares("tests"),
    }
    for key, (value, columns) in options.items():
        assert set(curve_columns(config(**{key: value}))) - plain == columns
    ahead = config(**{"rl.rollout.max_lag": 1})
    assert set(curve_columns(ahead)) - plain == {
        "policy_lag",
        "policy_lag_max",
        "spans_per_response",
        "cut_off",
    } and "mismatch_kl" in plain - set(curve_columns(ahead))
    assert "mismatch_kl" in curve_columns(config(**{"rl.rollout.max_lag": 1, "rl.correction.kind": "tis"}))
    dynamic = config(**{"rl.algorithm": "grpo", "rl.dynamic_sampling.enabled": True})
    assert set(curve_columns(dynamic)) - plain == {
        *("dynamic_rounds", "dropped_groups"),
        *("drawn_score_mean", "drawn_score_model", "drawn_score_short", "drawn_score_seen"),
    }


def test_in_bfloat16_the_mean_and_the_quantile_count_and_a_single_token_does_not():
    difference = torch.full((1, 3000), 0.02)
    difference[0, :3] = 5.0
    assert compared(difference, config(), "bfloat16") == pytest.approx(0.02)
    with pytest.raises(LogprobMismatch, match=r"a largest difference of 5, above rl\.rollout\.max_logprob_difference=0\.001"):
        compared(difference, config(), "float32")
    difference[0, 3] = 5.0
    with pytest.raises(
        LogprobMismatch, match=r"a quantile 0\.999 of the differences of 5, above rl\.rollout\.bfloat16_p999_difference=0\.8"
    ):
        compared(difference, config(), "bfloat16")
    with pytest.raises(LogprobMismatch, match=r"a mean difference of 0\.1, above rl\.rollout\.bfloat16_mean_difference=0\.08"):
        compared(torch.full((1, 30), -0.1), config(), "bfloat16")
    cold = config(**{"rl.rollout.temperature": 0.5})  # logits twice as far apart
    assert compared(torch.full((1, 30), -0.1), cold, "bfloat16") == pytest.approx(0.1)
    with pytest.raises(LogprobMismatch, match=r"a mean difference of 0\.2, above rl\.rollout\.bfloat16_mean_difference=0\.08 / temp"):
        compared(torch.full((1, 30), -0.2), cold, "bfloat16")
    with pytest.raises(LogprobMismatch, match=r"rounds small ones away: set model\.dtype=float32, or rl\.lora=null"):
        compared(torch.full((1, 30), -0.2), config(**{"rl.lora": {}}), "bfloat16")
    difference[0, 0] = NAN
    with pytest.raises(LogprobMismatch, match="nan"):
        compared(difference, config(), "bfloat16")
    assert compared(torch.zeros(1, 0), config(), "bfloat16") == 0.0


def test_the_lag_is_that_of_sampled_tokens():
    prompt = Prompt("p", "made", [], [5], None)
    rollouts = [
        Rollout(prompt, [Span([7, 8], [-1.0] * 2, 3), Span([90], [0.0], None, False), Span([9], [-1.0], 5)], True, 0),
        Rollout(prompt, [Span([7, 8, 9], [-1.0] * 3, 4)], False, 0),  # cut off before its fourth token
        Rollout(prompt, [Span([7, 8, 9, 10], [-1.0] * 4, 4)], False, 0),  # truncated
    ]
    # Lags at version 5: two tokens of 2, one of 0, seven of 1; four parts in three responses.
    expected = {"policy_lag": 11 / 10, "policy_lag_max": 2, "spans_per_response": 4 / 3, "cut_off": 1}
    assert lag_metrics(rollouts, version=5, longest=4) == pytest.approx(expected)
