"""What each rank gets of each optimizer step of RL training, and how the ranks' figures come together again."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from rlhf_core.config import RlConfig
from rlhf_core.data.batching import batch_indices
from rlhf_core.trainers.demonstrations import Demonstration
from rlhf_core.trainers.rl.data import DemonstrationStream
from rlhf_core.types import TrainBatch

Totals = dict[str, float]

# What is not summed over micro-batches, optimizer steps and ranks.
EXTREMES: dict[str, Callable[[float, float], float]] = {"policy_ratio_max": max, "policy_ratio_min": min}


@dataclass(frozen=True)
class Minibatch:
    """This rank's rows of one optimizer step's batch, and the denominators of the whole step, all ranks together.

    rows: their places in the batch of all rollouts.
    ptx: this rank's demonstrations; empty where rl.ptx.coef is 0.
    """

    batch: TrainBatch
    rows: list[int]
    num_loss_tokens: int
    num_sequences: int
    ptx: list[Demonstration]
    num_ptx_tokens: int


def plan_update(batch: TrainBatch, demonstrations: DemonstrationStream, rl: RlConfig, *, seed: int, step: int) -> list[list[Minibatch]]:
    """Every epoch's minibatches of a step, dealt out: for each rank its share of each optimizer step.

    What is in a minibatch doesn't depend on the number of ranks. Samples of a prompt are in the same one where their number divides its
    size, and on the same rank where the prompts can be dealt out evenly, so that a prompt is computed once.
    """
    ranks = rl.trainer.ranks
    unit = rl.group_size if rl.minibatch_size % rl.group_size == 0 else 1
    plans: list[list[Minibatch]] = [[] for _ in range(ranks)]
    steps = len(batch) // rl.minibatch_size * rl.epochs
    order_seed = int(np.random.SeedSequence([seed, step, 1]).generate_state(1)[0])
    for k in range(steps):
        units = batch_indices(k, batch_size=rl.minibatch_size // unit, num_examples=len(batch) // unit, seed=order_seed)
        shares = _dealt_out([list(range(u * unit, (u + 1) * unit)) for u in units], ranks)
        mask = batch.response_mask[[row for share in shares for row in share]]
        tokens, sequences = int(mask.sum()), int(mask.any(1).sum())
        ptx = demonstrations.batch(step * steps + k)
        ptx_tokens = sum(d.num_trained for d in ptx)
        for rank, share in enumerate(shares):
            plans[rank].append(Minibatch(batch.select(share), share, tokens, sequences, ptx[rank::ranks], ptx_tokens))
    return plans


def _dealt_out(groups: list[list[int]], ranks: int) -> list[list[int]]:
    """Rows for each rank: whole groups if all ranks get as many, otherwise row by row."""
    together = len(groups) % ranks == 0
    dealt = groups if together else [[row] for group in groups for row in group]
    return [[row for group in dealt[rank::ranks] for row in group] for rank in range(ranks)]


def gather(totals: Totals, found: Totals) -> None:
    """Add what was found to the totals, or keep the more extreme of the two."""
    for name, value in found.items():
        totals[name] = EXTREMES.get(name, operator.add)(totals[name], value) if name in totals else value
