"""Predicts the hours of a whole run's training from the FLOP and the efficiency that a step's prediction uses."""

from __future__ import annotations

import math

from rlhf_core.planning.hardware import Cluster, Efficiency
from rlhf_core.planning.plan import Prediction, Workload
from rlhf_core.planning.timing import compute_seconds, forward_flops, update_flops

HOUR = 3600


def hours_of_a_pass(work: Workload, pairs: int, found: Prediction, cluster: Cluster, efficiency: Efficiency) -> dict[str, float]:
    """Return the hours of one pass over preference pairs for SFT, the reward model, DPO and RL.

    SFT trains on the chosen responses, the reward model on both with a scalar head, and DPO on both, with one more forward pass for the
    reference. All GPUs compute the updates (Kaplan et al. 2020, as in `forward_flops`). Communication, evaluation and start aren't counted,
    and a pair's prompt counts twice. RL takes the placement's predicted step as often as the prompts of the pairs need.

    Args:
        work: the workload of a step, whose mean lengths stand for those of the pairs.
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
