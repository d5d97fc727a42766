"""Minibatches of RL training: each rank's share of each optimizer step, and the token batches that go through the models."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from rlhf_core.config import RlConfig
from rlhf_core.data.batching import batch_indices, deal_out_groups
from rlhf_core.models.batch import Branches, TokenBatch, collate_branches, continue_prefix, group_by_prefix
from rlhf_core.trainers.rl.data import DemonstrationStream
from rlhf_core.trainers.supervised.demonstrations import Demonstration
from rlhf_core.types import Sequences, TrainBatch

Totals = dict[str, float]

# Combined over micro-batches, optimizer steps and ranks by these functions; everything else is summed.
EXTREMES: dict[str, Callable[[float, float], float]] = {"policy_ratio_max": max, "policy_ratio_min": min}


@dataclass(frozen=True)
class Minibatch:
    """This rank's rows of one optimizer step, and the denominators of the whole step, all ranks together.

    rows: positions in the batch of all rollouts.
    ptx: this rank's demonstrations; empty where rl.ptx.coef is 0.
    """

    batch: TrainBatch
    rows: list[int]
    num_loss_tokens: int
    num_sequences: int
    ptx: list[Demonstration]
    num_ptx_tokens: int


def plan_update(batch: TrainBatch, demonstrations: DemonstrationStream, rl: RlConfig, *, seed: int, step: int) -> list[list[Minibatch]]:
    """Return each rank's share of each optimizer step, for all epochs.

    The contents of a minibatch don't depend on the number of ranks. Samples of a prompt share a minibatch if group_size divides
    minibatch_size, and a rank if the prompts can be dealt out evenly, so that the prompt is computed once. Ranks get equally many samples
    and about equally many tokens; those that share sequences have the same shares.
    """
    groups = rl.trainer.data_parallel_size
    unit = rl.group_size if rl.minibatch_size % rl.group_size == 0 else 1
    plans: list[list[Minibatch]] = [[] for _ in range(groups)]
    steps = len(batch) // rl.minibatch_size * rl.ppo_epochs
    sizes = (batch.sequences.starts + batch.ends).tolist()
    order_seed = int(np.random.SeedSequence([seed, step, 1]).generate_state(1)[0])
    for k in range(steps):
        units = batch_indices(k, batch_size=rl.minibatch_size // unit, num_examples=len(batch) // unit, seed=order_seed)
        shares = deal_out_groups([range(u * unit, (u + 1) * unit) for u in units], sizes, ranks=groups)
        mask = batch.response_mask[[row for share in shares for row in share]]
        tokens, sequences = int(mask.sum()), int(mask.any(1).sum())
        ptx = demonstrations.batch(step * steps + k)
        ptx_tokens = sum(d.num_trained for d in ptx)
        for group, share in enumerate(shares):
            plans[group].append(Minibatch(batch.select(share), share, tokens, sequences, ptx[group::groups], ptx_tokens))
    return rl.trainer.of_ranks(plans)


def add_totals(totals: Totals, further: Totals) -> None:
    """Add sums, and keep the more extreme of two extremes, in place."""
    for name, value in further.items():
        totals[name] = EXTREMES.get(name, operator.add)(totals[name], value) if name in totals else value


def before(batch: TokenBatch) -> TokenBatch:
    """Return the same sequences with the token before each selected one selected: the critic's value is that of the state before a
    token.
    """
    selected = torch.zeros_like(batch.selected)
    selected[:, :-1] = batch.selected[:, 1:]
    return TokenBatch(batch.input_ids, selected, pictures=batch.pictures)


def prompt_rows(sequences: Sequences, *, max_tokens: int, shared: bool) -> tuple[list[list[int]], list[list[Branches]]]:
    """Return groups of consecutive sequences of one prompt, as positions; and the rows of each group, with a shared prompt where that is
    less to compute.

    Args:
        max_tokens: of a shared row.
        shared: False: each sequence is a group and a row.
    """
    ids, starts = sequences.lists(), sequences.starts.tolist()
    groups = group_by_prefix(ids, starts, max_tokens=max_tokens) if shared else [[i] for i in range(len(ids))]
    return groups, [continue_prefix(ids[group[0]][: starts[group[0]]], [ids[i][starts[i] :] for i in group]) for group in groups]


def token_batch(rows: list[Branches], trained: torch.Tensor, *, pad_id: int) -> TokenBatch:
    """Return rows [B, T] with the trained response tokens selected.

    Args:
        trained: [branches, R] bool, in the order of the rows' branches.
    """
    tokens = collate_branches(rows, pad_id=pad_id, every_token=True)
    lengths = [len(branch) for row in rows for branch in row.branches]
    selected = torch.cat([mask[:n] for mask, n in zip(trained, lengths, strict=True)])
    return replace(tokens, selected=tokens.selected.masked_scatter(tokens.selected, selected))


def real_tokens(rows: list[Branches], width: int) -> torch.Tensor:
    """Return which tokens of the rows aren't padding, [B, width] bool."""
    return torch.arange(width) < torch.tensor([len(row) for row in rows])[:, None]


def unflatten(flat: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return flat values [N] at the True positions of a mask [B, R], zeros elsewhere; gradients flow."""
    return torch.zeros(mask.shape, dtype=flat.dtype, device=flat.device).masked_scatter(mask, flat)
