"""The algorithms of online RL, by rl.algorithm: the one place that says what each of them is and needs.

`rlhf_core.config` makes the keys of params.yaml from it, and everything else asks it by `RlConfig.spec`. It imports no torch, so that
params are read, planned and scheduled without.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Algorithm:
    """An online algorithm, and its section `rl.<name>` of params.yaml.

    estimator: module:function that computes the advantages. It names as parameters what it needs of the quantities that
        `rlhf_core.trainers.rl.credit.compute_advantages` offers, and returns advantages [B, R], with a critic advantages and returns.
    group_size: default samples of a prompt.    smallest_group: the fewest that the estimator can compare.
    settings: further keys of the section, arguments of the estimator, and their defaults: a bool is a switch, a float a share of 0 to 1.
    critic: a value model learns beside the policy; the section has the critic's keys too.
    greedy_baseline: the greedy response to each prompt is sampled and scored too.
    decoupled: each scorer's scores are normalised within their group before they are summed.
    turn_estimator: as `estimator`, with a reward for each turn of an episode; None: it compares whole episodes only.
    aggregation: of the loss, as in the paper, with `rl.loss_aggregation: auto`.
    """

    estimator: str
    group_size: int
    smallest_group: int = 1
    settings: Mapping[str, bool | float] = field(default_factory=dict)
    critic: bool = False
    greedy_baseline: bool = False
    decoupled: bool = False
    turn_estimator: str | None = None
    aggregation: str = "token_mean"

    @property
    def compares_samples(self) -> bool:
        """Whether the baseline is that of a prompt's own samples."""
        return self.smallest_group > 1

    def estimate(self, *, by_turn: bool = False) -> Callable[..., Any]:
        """Return the estimator's function; imports torch."""
        return pkgutil.resolve_name(self.turn_estimator if by_turn else self.estimator)


ALGORITHMS = {
    "ppo": Algorithm(
        "rlhf_core.algorithms.advantages:ppo",
        group_size=1,
        critic=True,
        turn_estimator="rlhf_core.algorithms.advantages:ppo",
        settings={"gamma": 1.0, "gae_lambda": 0.95, "whiten_advantages": True},
    ),
    "grpo": Algorithm(
        "rlhf_core.algorithms.advantages:grpo",
        group_size=8,
        smallest_group=2,
        settings={"normalize_std": True},
        turn_estimator="rlhf_core.algorithms.turns:grpo_by_turn",
    ),
    "dr_grpo": Algorithm("rlhf_core.algorithms.advantages:dr_grpo", group_size=8, smallest_group=2, aggregation="constant_horizon"),
    "rloo": Algorithm("rlhf_core.algorithms.advantages:rloo", group_size=4, smallest_group=2),
    "reinforce_pp": Algorithm(
        "rlhf_core.algorithms.advantages:reinforce_pp", group_size=1, turn_estimator="rlhf_core.algorithms.advantages:reinforce_pp"
    ),
    "reinforce_pp_baseline": Algorithm("rlhf_core.algorithms.advantages:reinforce_pp_baseline", group_size=4, smallest_group=2),
    "remax": Algorithm("rlhf_core.algorithms.advantages:remax", group_size=1, greedy_baseline=True),
    "gdpo": Algorithm("rlhf_core.algorithms.advantages:gdpo", group_size=8, smallest_group=2, decoupled=True),
}
