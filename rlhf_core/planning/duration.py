"""Hours of a whole run's training, by the FLOP and the efficiency that a step's prediction uses."""

from __future__ import annotations

import math

from rlhf_core.planning.hardware import Cluster, Efficiency
from rlhf_core.planning.plan import Prediction, Workload
from rlhf_core.planning.timing import compute_seconds, forward_flops, update_flops

HOUR = 3600


def hours_of_a_pass(work: Workload, pairs: int, found: Prediction, cluster: Cluster, efficiency: Efficiency) -> dict[str, float]:
    """Hours of one pass over preference pairs by each kind of training.

    SFT computes the chosen responses, the reward model both with a scalar head, DPO both, and once more forward for the reference. Each is
    an update by all GPUs (Kaplan et al. 2020, as `forward_flops`), without communication, evaluation or start; prompts count twice in a
    pair. RL takes a step of the placement for each step's prompts.

    Args:
        work: its mean lengths are those of the pairs too.
    """
    checkpointing = found.placement.checkpointing

    def hours(sequences: int, *, head: bool = True, forward_only: int = 0) -> float:
        forward = forward_flops(work.policy, work.sequence, work.sequence, head=head)
        flops = sequences * update_flops(forward, checkpointing=checkpointing) + forward_only * forward
        return compute_seconds(flops, cluster.gpus, cluster, efficiency) / HOUR

    steps = math.ceil(pairs * work.group_size / work.samples)
    return {
        "SFT": hours(pairs),
        "reward model": hours(2 * pairs, head=False),
        "DPO": hours(2 * pairs, forward_only=2 * pairs),
        "RL": steps * found.step / HOUR,
    }
