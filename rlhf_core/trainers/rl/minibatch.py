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
from rlhf_core.trainers.demonstrations import Demonstration
from rlhf_core.trainers.rl.data import DemonstrationStream
from rlhf_core.types import TrainBatch

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
    """For each rank its share of each optimizer step, all epochs.

    The contents of a minibatch don't depend on the number of ranks. Samples of a prompt share a minibatch if group_size divides
    minibatch_size, and a rank if the prompts can be dealt out evenly, so that the prompt is computed once. Ranks get equally many samples
    and about equally many tokens; those that share sequences have the same shares.
    """
    groups = rl.trainer.data_parallel_size
    unit = rl.group_size if rl.minibatch_size % rl.group_size == 0 else 1
    plans: list[list[Minibatch]] = [[] for _ in range(groups)]
    steps = len(batch) // rl.minibatch_size * rl.ppo_epochs
    sizes = real_tokens(batch).sum(1).tolist()
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
    """The same sequences with the token before each selected one selected: the critic's value is that of the state before a token."""
    selected = torch.zeros_like(batch.selected)
    selected[:, :-1] = batch.selected[:, 1:]
    return TokenBatch(batch.input_ids, selected)


def contiguous(batch: TrainBatch) -> TokenBatch:
    """Left-padded prompts and right-padded responses as right-padded sequences [B, T], trained response tokens selected."""
    ids = torch.cat([batch.prompt_ids, batch.response_ids], dim=1)
    selected = torch.cat([torch.zeros_like(batch.prompt_mask), batch.response_mask], dim=1)
    padding = (~batch.prompt_mask).sum(1, keepdim=True)
    source = (torch.arange(ids.shape[1], device=ids.device) + padding).clamp(max=ids.shape[1] - 1)
    beyond = torch.arange(ids.shape[1], device=ids.device) + padding >= ids.shape[1]
    return TokenBatch(ids.gather(1, source), selected.gather(1, source) & ~beyond)


def real_tokens(batch: TrainBatch) -> torch.Tensor:
    """[B, T] bool, the tokens of `contiguous` that aren't padding: the prompt, and the response up to its last trained token."""
    columns = torch.arange(1, batch.response_mask.shape[1] + 1, device=batch.response_mask.device)
    lengths = batch.prompt_mask.sum(1) + (batch.response_mask * columns).amax(1)
    width = batch.prompt_mask.shape[1] + batch.response_mask.shape[1]
    return torch.arange(width, device=lengths.device) < lengths[:, None]


def prompt_rows(batch: TrainBatch, *, max_tokens: int) -> tuple[list[list[int]], list[list[Branches]]]:
    """Groups of consecutive samples of one prompt, as positions in the batch; and the rows of each group, with a shared prompt where that
    is less to compute.

    A response ends with its last trained token, and has at least one token. A shared row has at most `max_tokens` tokens.
    """
    columns = torch.arange(1, batch.response_mask.shape[1] + 1)
    lengths = (batch.response_mask * columns).amax(1).clamp(min=1).tolist()
    prompts = [ids[mask].tolist() for ids, mask in zip(batch.prompt_ids, batch.prompt_mask, strict=True)]
    responses = [ids[:n] for ids, n in zip(batch.response_ids.tolist(), lengths, strict=True)]
    sequences, starts = [p + r for p, r in zip(prompts, responses, strict=True)], [len(p) for p in prompts]
    groups = group_by_prefix(sequences, starts, max_tokens=max_tokens)
    return groups, [continue_prefix(prompts[group[0]], [responses[i] for i in group]) for group in groups]


def shared(rows: list[Branches], batch: TrainBatch, *, pad_id: int) -> TokenBatch:
    """Rows [B, T] with the trained response tokens of `batch` selected, in its order."""
    tokens = collate_branches(rows, pad_id=pad_id, every_token=True)
    lengths = [len(branch) for row in rows for branch in row.branches]
    trained = torch.cat([mask[:n] for mask, n in zip(batch.response_mask.cpu(), lengths, strict=True)])
    return replace(tokens, selected=tokens.selected.masked_scatter(tokens.selected, trained))


def unflatten(flat: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Flat values [N] at the True positions of a mask [B, R], zeros elsewhere; gradients flow."""
    return torch.zeros(mask.shape, dtype=flat.dtype, device=flat.device).masked_scatter(mask, flat)
