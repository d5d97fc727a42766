"""The columns of RL's curves, and the limits that `rl.monitor` sets for them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from rlhf_core.config.base import Section

if TYPE_CHECKING:
    from rlhf_core.config.rl import RlConfig

LimitAction = Literal["warn", "stop", "rollback"]


class LimitConfig(Section):
    """A limit for a column of plots/train_policy.csv, and what happens when the column is past it (docs/monitors.md).

    above, below: exactly one of these and fall. fall: the share of its highest value so far by which the column has fallen.
    window: steps over which the column is averaged. patience: steps in a row that must be past the limit.
    from_step: the first step that counts. action: rollback ends with the best policy by rl.evaluation.metric.
    """

    metric: str
    above: float | None = None
    below: float | None = None
    fall: float | None = Field(default=None, gt=0)
    window: int = Field(default=1, gt=0)
    patience: int = Field(default=1, gt=0)
    from_step: int = Field(default=1, gt=0)
    action: LimitAction

    def conflicts(self) -> Iterator[str]:
        given = {name: value for name in ("above", "below", "fall") if (value := getattr(self, name)) is not None}
        if len(given) != 1:
            yield f"limit: expected exactly one of above, below and fall, got {given or 'none'}; split it or add one"


# The limits of `rl.monitor`, which lays its own over them.
DEFAULT_LIMITS = {
    "kl": LimitConfig(metric="kl_token_mean", above=1.0, window=3, patience=2, action="stop"),
    "entropy": LimitConfig(metric="entropy", below=0.01, window=3, patience=2, action="stop"),
    "repetition": LimitConfig(metric="repetition", above=0.5, window=3, patience=2, action="stop"),
    "truncated": LimitConfig(metric="truncated_fraction", above=0.5, window=3, action="warn"),
    "variety": LimitConfig(metric="distinct_2", fall=0.8, window=3, patience=2, action="warn"),
    "length": LimitConfig(metric="reward_length_correlation", above=0.98, window=5, patience=3, action="warn"),
    "frontier": LimitConfig(metric="frontier_gap", above=1.0, window=5, patience=3, action="warn"),
    "clipping": LimitConfig(metric="clip_frac", above=0.5, window=3, patience=3, action="warn"),
    "ratio": LimitConfig(metric="policy_ratio_max", above=100.0, window=3, patience=2, action="warn"),
    "token_kl": LimitConfig(metric="kl_token_max", above=20.0, window=3, patience=2, action="warn"),
}


def completed_limits(monitor: dict[str, Any]) -> dict[str, Any]:
    """Return the default limits with those of `rl.monitor` laid over them.

    A limit that names its metric replaces the default of its name. One that doesn't changes only the keys that it writes. None switches a
    limit off.
    """
    completed: dict[str, Any] = {name: limit.model_dump(exclude_defaults=True) for name, limit in DEFAULT_LIMITS.items()}
    for name, given in monitor.items():
        changes_default = isinstance(given, dict) and "metric" not in given and name in DEFAULT_LIMITS
        completed[name] = completed[name] | given if changes_default else given
    return completed


# Columns of plots/train_policy.csv. Those of KL_COLUMNS need a reference.
KL_COLUMNS = ("kl_mean", "kl_token_mean", "kl_token_min", "kl_token_max", "frontier_gap")
_BATCH_COLUMNS = (
    *("score_mean", "score_std", "reward_mean", "kl_mean", "kl_coef", "entropy", "response_length", "truncated_fraction"),
    *("kl_token_mean", "kl_token_min", "kl_token_max", "frontier_gap"),
    *("reward_length_correlation", "repetition", "distinct_1", "distinct_2", "unscored_fraction"),
)
_UPDATE_COLUMNS = (
    *("policy_loss", "value_loss", "clip_frac", "approx_kl", "policy_ratio_min", "policy_ratio_max"),
    *(
        "grad_norm",
        "critic_grad_norm",
        "stopped_early",
        "skipped_steps",
        "explained_variance",
        "advantage_zero_fraction",
        "logprob_difference",
    ),
)
_MISMATCH_COLUMNS = ("mismatch_mean", "mismatch_max", "mismatch_kl", "ratio_mean", "corrected_fraction")


def curve_columns(rl: RlConfig) -> tuple[str, ...]:
    """Return the columns of plots/train_policy.csv. They depend on the configuration alone, so that a resumed run has the same columns."""
    names = [s.name for s in rl.reward.scorers]
    columns = ["step", *_BATCH_COLUMNS, *(f"score_{n}" for n in names), *(f"failed_{n}" for n in names)]
    columns += [f"{kind}_{s.name}" for s in rl.reward.scorers if not s.weight for kind in ("gap", "agreement")]
    columns += [f"disagreement_{s.name}" for s in rl.reward.scorers if s.members > 1]
    if len(rewarded := [s.name for s in rl.reward.rewarded]) > 1:
        columns += [*(f"share_{name}" for name in rewarded), *(f"correlation_{a}.{b}" for a, b in combinations(rewarded, 2))]
    columns += _UPDATE_COLUMNS
    columns += ["distillation_loss"] * (rl.distillation is not None)
    columns += ["ptx_loss"] * (rl.ptx.coef > 0) + ["moe_aux_loss"] * (rl.moe_aux_coef > 0)
    columns += [] if rl.old_logprobs_source(0) == "from_engine" else _MISMATCH_COLUMNS
    columns += ["success_fraction", "mixed_fraction", "drawn_share"] * rl.measures_success
    columns += ["policy_lag", "policy_lag_max", "spans_per_response", "cut_off"] * (rl.rollout.max_lag > 0)
    if rl.dynamic_sampling.enabled:
        columns += ["dynamic_rounds", "dropped_groups", *(f"drawn_score_{name}" for name in ("mean", *names))]
    columns += ["eval_score", *(f"eval_{n}" for n in names), *rl.evaluation.columns] * (rl.evaluation.every is not None)
    columns += ["turns", "tool_calls", "failed_tool_calls", "failed_episodes"] * (rl.environment is not None)
    columns += ["scorer_metrics"] * any(s.kind in ("function", "code", "http", "llm_judge") for s in rl.reward.scorers)
    return tuple(columns)
