"""Computes the losses of preference training from token ids: on pairs, and on single responses.

A step's loss is the mean over its pairs or responses, whatever the micro-batches. Quantities of the whole step (KTO's
baseline, the number of chosen tokens) are computed before the first micro-batch.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import nn

from rlhf_core.algorithms.preference_losses import (
    PREFERENCE_LOSSES,
    UNPAIRED_LOSSES,
    PairLogprobs,
    PairLosses,
    ResponseLosses,
    kto_baseline,
)
from rlhf_core.config import DpoConfig, KtoConfig
from rlhf_core.data.pictures import Picture
from rlhf_core.engines.deepspeed.engine import TrainEngine, device
from rlhf_core.engines.deepspeed.ranks import data_parallel_size, gathered, own_parts, summed, total
from rlhf_core.models.batch import Branches, collate_branches, continue_prefix
from rlhf_core.models.vision import Sight, with_sight
from rlhf_core.trainers.supervised.loop import Metrics, beside_untrained


class Continuation(NamedTuple):
    """A prompt with its pictures, and a response to it, which ends with the end token."""

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    pictures: tuple[Picture, ...] = ()

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)

    @property
    def digest(self) -> bytes:
        """A hash that is equal for equal continuations."""
        ids = array("i", (len(self.prompt_ids), *self.prompt_ids, *self.response_ids))
        seen = "".join(picture.sha256 for picture in self.pictures).encode()
        return hashlib.blake2b(ids.tobytes() + seen, digest_size=16).digest()


class Pair(NamedTuple):
    """Two responses to one prompt."""

    chosen: Continuation
    rejected: Continuation


class Example(NamedTuple):
    """A single response, and whether it is desirable."""

    continuation: Continuation
    desirable: bool


# How responses go through a model


@dataclass(frozen=True)
class PromptGroup:
    """The responses of a batch to one prompt; each distinct response is computed once.

    positions: positions of the items in the batch, ascending.
    shares_prefix: whether the prompt is computed once for all responses if that pays.
    """

    items: list[Continuation]
    positions: list[int]
    shares_prefix: bool

    @cached_property
    def responses(self) -> dict[tuple[int, ...], int]:
        """The distinct responses, numbered."""
        return {ids: number for number, ids in enumerate(dict.fromkeys(item.response_ids for item in self.items))}

    @cached_property
    def rows(self) -> list[Branches]:
        """The model's input rows, with the responses in the order of their numbers."""
        return continue_prefix(list(self.items[0].prompt_ids), [list(ids) for ids in self.responses], shared=self.shares_prefix)


class Microbatch(NamedTuple):
    """A micro-batch of a rank.

    counts: whether its results are used (`rlhf_core.data.batching.Part`).
    """

    groups: list[PromptGroup]
    counts: bool


def group_by_prompt(
    items: Sequence[Continuation], *, together: int, max_tokens: int, shares_prefix: bool, close_at: int | None = None
) -> list[PromptGroup]:
    """Group items by prompt. A group that would exceed `close_at` tokens is closed, and another group of the same prompt begins.

    Args:
        max_tokens: limit of a row with a shared prompt; also of a group, if `close_at` is None.
        together: size of the blocks, from the first item on, that have one prompt and stay in one group: 2 for the sides of pairs.
    """
    close_at = max_tokens if close_at is None else close_at
    open_groups: dict[tuple[tuple[int, ...], tuple[Picture, ...]], tuple[PromptGroup, int]] = {}
    groups: list[PromptGroup] = []
    for at in range(0, len(items), together):
        block = items[at : at + together]
        prompt_ids, prompt = block[0].prompt_ids, (block[0].prompt_ids, block[0].pictures)
        added = sum(len(item.response_ids) if shares_prefix else item.num_tokens for item in block)
        group, tokens = open_groups.get(prompt, (None, 0))
        if group is None or tokens + added > close_at:
            shares = shares_prefix and len(prompt_ids) + added <= max_tokens  # a shared row fits the budget
            group, tokens = PromptGroup([], [], shares), len(prompt_ids) if shares_prefix else 0
            groups.append(group)
        group.items.extend(block)
        group.positions.extend(range(at, at + together))
        open_groups[prompt] = (group, tokens + added)
    return groups


@dataclass(frozen=True)
class ResponseForward:
    """Computes responses' log-probabilities.

    shares_prefix: whether a prompt may be computed once for all its responses; not of a model that sees.
    sight: of a model that sees.
    """

    pad_id: int
    shares_prefix: bool
    microbatch_tokens: int
    sight: Sight | None = None

    def microbatches(self, items: Sequence[Continuation], *, together: int = 1) -> list[Microbatch]:
        """Return this rank's share of the items' groups, similar lengths together, within the token budget.

        A larger group gets its own micro-batch. With several data-parallel ranks groups are small enough for each rank to get some.
        """
        of_a_rank = sum(item.num_tokens for item in items) // data_parallel_size()
        groups = group_by_prompt(
            items,
            together=together,
            max_tokens=self.microbatch_tokens,
            shares_prefix=self.shares_prefix,
            close_at=min(self.microbatch_tokens, of_a_rank) if data_parallel_size() > 1 else None,
        )
        lengths, rows = [max(map(len, group.rows)) for group in groups], [len(group.rows) for group in groups]
        parts = own_parts(lengths, max_tokens=self.microbatch_tokens, rows=rows)
        return [Microbatch([groups[i] for i in part.positions], part.counts) for part in parts]

    def logprobs(self, module: TrainEngine | nn.Module, part: list[PromptGroup]) -> torch.Tensor:
        """Return the log-probability of each item's response, summed over its tokens: [items], group after group, on the device."""
        rows = [row for group in part for row in group.rows]
        batch = collate_branches(rows, pad_id=self.pad_id, every_token=True)
        batch = with_sight(batch, self.sight, [p for group in part for _ in group.rows for p in group.items[0].pictures])
        token_logprobs = module(batch.to(device())).logprobs
        lengths = torch.tensor([len(branch) for row in rows for branch in row.branches])
        owners = torch.repeat_interleave(torch.arange(len(lengths)), lengths).to(token_logprobs.device)
        sums = torch.zeros(len(lengths), dtype=token_logprobs.dtype, device=token_logprobs.device).index_add(0, owners, token_logprobs)
        numbers, offset = [], 0  # of each item: the number of its response among all of the micro-batch
        for group in part:
            numbers += [offset + group.responses[item.response_ids] for item in group.items]
            offset += len(group.responses)
        return sums[torch.tensor(numbers, device=sums.device)]


# From the engine of the policy and a pass's micro-batches to the reference's log-probabilities [items] of each one's responses, summed over
# their tokens.
Reference = Callable[[TrainEngine, list[Microbatch]], list[torch.Tensor]]


def no_reference(engine: TrainEngine, microbatches: list[Microbatch]) -> list[torch.Tensor]:
    """Return zeros, for losses that don't use the reference."""
    return [torch.zeros(sum(len(group.items) for group in part.groups), device=device()) for part in microbatches]


# Objectives


@dataclass(frozen=True)
class PairObjective:
    """The mean of `config.loss` over pairs, and with `config.nll_coef` the negative log-likelihood per chosen token."""

    config: DpoConfig
    forward: ResponseForward
    reference: Reference

    def train_batch(self, engine: TrainEngine, pairs: list[Pair]) -> Metrics:
        """Compute the forward and backward passes of one optimizer step, and return its metrics."""
        logprobs, losses, loss = self._pass(engine, pairs, learn=True)
        return {
            "loss": loss,
            "reward_accuracy": _accuracy(losses),
            **_mean_rewards(losses.chosen_rewards, losses.rejected_rewards),
            "chosen_logprob": float(logprobs.chosen_logprobs.sum() / logprobs.chosen_lengths.sum()),
            "rejected_logprob": float(logprobs.rejected_logprobs.sum() / logprobs.rejected_lengths.sum()),
            "tokens": float(sum(side.num_tokens for pair in pairs for side in pair)),
        }

    def evaluate(self, engine: TrainEngine, pairs: list[Pair]) -> Metrics:
        """Return loss, accuracy and margin on held-out pairs, and with a reference the gain over the start (`beside_untrained`)."""
        logprobs, losses, loss = self._pass(engine, pairs, learn=False)
        margin = _mean_rewards(losses.chosen_rewards, losses.rejected_rewards)["reward_margin"]
        found = {"heldout_loss": loss, "heldout_accuracy": _accuracy(losses), "heldout_margin": margin}
        if self.config.reference_kind == "none":  # the loss has no untrained value
            return found
        chosen, rejected = logprobs.ref_chosen_logprobs, logprobs.ref_rejected_logprobs
        untrained = self._losses(logprobs._replace(chosen_logprobs=chosen, rejected_logprobs=rejected)).losses
        return found | beside_untrained(untrained, losses.losses, accuracy_error=0.5 / math.sqrt(len(pairs)))

    def _losses(self, logprobs: PairLogprobs) -> PairLosses:
        config = self.config
        options: dict[str, Any] = {"label_smoothing": config.label_smoothing} if config.loss in ("sigmoid", "robust") else {}
        options |= {"simpo_margin": config.simpo_margin} if config.loss == "simpo" else {}
        return PREFERENCE_LOSSES[config.loss](logprobs.per_token() if config.length_normalize else logprobs, beta=config.beta, **options)

    def _pass(self, engine: TrainEngine, pairs: list[Pair], *, learn: bool) -> tuple[PairLogprobs, PairLosses, float]:
        """Return log-probabilities and losses of all ranks' pairs, detached and in no particular order, and the step's loss."""
        config = self.config
        num_chosen_tokens = sum(len(pair.chosen.response_ids) for pair in pairs)
        results, positions, shares = [], [], []
        parts = self.forward.microbatches([side for pair in pairs for side in pair], together=2)
        for (part, counts), ref_logprobs in zip(parts, self.reference(engine, parts), strict=True):
            lengths = torch.tensor([len(item.response_ids) for group in part for item in group.items], device=device())
            of_items = (self.forward.logprobs(engine, part).float(), ref_logprobs, lengths)
            policy, reference, tokens = (values.view(-1, 2).unbind(1) for values in of_items)  # chosen and rejected in turn
            logprobs = PairLogprobs(*policy, *reference, *tokens)
            losses = self._losses(logprobs)
            share = losses.losses.sum() / len(pairs)
            if config.nll_coef:
                share = share - config.nll_coef * logprobs.chosen_logprobs.sum() / num_chosen_tokens
            if learn:
                engine.backward(share if counts else 0.0 * share)
            shares += [share.detach()] if counts else []
            results.append(_kept([*logprobs, *losses], counts))
            positions += [i // 2 for group in part for i in group.positions[::2]] if counts else []
        columns = _joined(results, positions, len(pairs))
        split = len(PairLogprobs._fields)
        return PairLogprobs(*columns[:split]), PairLosses(*columns[split:]), summed(total(shares))[0]


@dataclass(frozen=True)
class ResponseObjective:
    """The mean of `config.loss` over single responses. KTO's baseline is estimated on the step's prompts, each with another example's
    response.

    max_length: number of tokens to which a prompt with another example's response is cut.
    """

    config: KtoConfig
    forward: ResponseForward
    reference: Reference
    max_length: int

    def train_batch(self, engine: TrainEngine, examples: list[Example]) -> Metrics:
        """Compute the forward and backward passes of one optimizer step, and return its metrics."""
        kl = self._baseline(engine, mismatched(examples, self.config, shift=1, max_length=self.max_length))
        logprobs, losses, rewards, good, lengths = self._pass(engine, examples, kl, learn=True)
        return {
            "loss": float(losses.mean()),
            "reward_accuracy": ordered_share(rewards[good], rewards[~good]),
            **_mean_rewards(rewards[good], rewards[~good]),
            "chosen_logprob": float(logprobs[good].sum() / lengths[good].sum()),
            "rejected_logprob": float(logprobs[~good].sum() / lengths[~good].sum()),
            "kl": float(kl),
            "tokens": float(sum(e.continuation.num_tokens for e in examples)),
        }

    def evaluate(self, engine: TrainEngine, examples: list[Example]) -> Metrics:
        """Return loss, accuracy and margin on held-out responses, and the gain over the untrained policy (`beside_untrained`)."""
        kl = self._baseline(engine, mismatched(examples, self.config, shift=len(examples) // 2, max_length=self.max_length))
        logprobs, losses, rewards, good, _ = self._pass(engine, examples, kl, learn=False)
        margin = _mean_rewards(rewards[good], rewards[~good])["reward_margin"]
        found = {
            "heldout_loss": float(losses.mean()),
            "heldout_accuracy": ordered_share(rewards[good], rewards[~good]),
            "heldout_margin": margin,
        }
        couples = int(good.sum()) * int((~good).sum())
        if not couples:
            return found
        same = torch.zeros_like(logprobs)
        untrained = self._losses(same, same, good, torch.zeros(())).losses
        # The standard error of `ordered_share` by chance, as in the Mann-Whitney test.
        return found | beside_untrained(untrained, losses, accuracy_error=math.sqrt((len(examples) + 1) / (12 * couples)))

    def _losses(self, logprobs: torch.Tensor, ref_logprobs: torch.Tensor, desirable: torch.Tensor, kl: torch.Tensor) -> ResponseLosses:
        config = self.config
        weights = {"desirable_weight": config.desirable_weight, "undesirable_weight": config.undesirable_weight}
        return UNPAIRED_LOSSES[config.loss](logprobs, ref_logprobs, desirable, beta=config.beta, kl=kl, **weights)

    def _pass(self, engine: TrainEngine, examples: list[Example], kl: torch.Tensor, *, learn: bool) -> list[torch.Tensor]:
        """Return log-probabilities, losses, rewards, desirable and lengths of all ranks' examples, detached and in no particular order."""
        results, positions = [], []
        parts = self.forward.microbatches([e.continuation for e in examples])
        for (part, counts), ref_logprobs in zip(parts, self.reference(engine, parts), strict=True):
            here = [examples[i] for group in part for i in group.positions]
            desirable = torch.tensor([e.desirable for e in here], device=device())
            logprobs = self.forward.logprobs(engine, part).float()
            losses = self._losses(logprobs, ref_logprobs, desirable, kl)
            if learn:
                share = losses.losses.sum() / len(examples)
                engine.backward(share if counts else 0.0 * share)
            lengths = torch.tensor([len(e.continuation.response_ids) for e in here], device=device())
            results.append(_kept([logprobs, *losses, desirable, lengths], counts))
            positions += [i for group in part for i in group.positions] if counts else []
        return _joined(results, positions, len(examples))

    @torch.no_grad()
    def _baseline(self, engine: TrainEngine, items: list[Continuation]) -> torch.Tensor:
        if not items:
            return torch.zeros((), device=device())
        results, positions = [], []
        parts = self.forward.microbatches(items)
        for (part, counts), ref_logprobs in zip(parts, self.reference(engine, parts), strict=True):
            results.append(_kept([self.forward.logprobs(engine, part).float(), ref_logprobs], counts))
            positions += [i for group in part for i in group.positions] if counts else []
        return kto_baseline(*_joined(results, positions, len(items))).to(device())


def mismatched(examples: list[Example], config: KtoConfig, *, shift: int, max_length: int) -> list[Continuation]:
    """Return the baseline's items: each prompt with the response `shift` examples later, cyclically, cut to `max_length` tokens.

    Empty for a loss without a baseline. On held-out data `shift` is half the number of examples, since neighbours often have the same
    prompt.
    """
    if config.loss != "kto":
        return []
    items = [e.continuation for e in examples]
    return [
        Continuation(item.prompt_ids, items[(i + shift) % len(items)].response_ids[: max_length - len(item.prompt_ids)], item.pictures)
        for i, item in enumerate(items)
    ]


def ordered_share(higher: torch.Tensor, lower: torch.Tensor) -> float:
    """Return the share of couples of a number from `higher` [N] and one from `lower` [M] in which the first is larger; ties count half.

    NaN if there are no couples.
    """
    order = lower.sort().values
    below = torch.searchsorted(order, higher, right=False) + torch.searchsorted(order, higher, right=True)
    return float(below.double().mean() / 2 / len(lower)) if len(lower) else math.nan


def _kept(columns: Sequence[torch.Tensor], counts: bool) -> list[torch.Tensor]:
    """Return a micro-batch's columns [n], detached; without rows if it doesn't count."""
    return [values.detach() if counts else values.detach()[:0] for values in columns]


def _joined(parts: Sequence[Sequence[torch.Tensor]], positions: list[int], total: int) -> list[torch.Tensor]:
    """Return the columns of all ranks' micro-batches, concatenated, on the CPU.

    Args:
        positions: positions of this rank's rows among the `total` of all ranks.
    """
    return gathered([torch.cat(values) for values in zip(*parts, strict=True)], positions, total)


def _accuracy(losses: PairLosses) -> float:
    """Return the share of pairs whose chosen reward is higher; a tie counts half."""
    chosen, rejected = losses.chosen_rewards, losses.rejected_rewards
    return float((chosen > rejected).sum() + 0.5 * (chosen == rejected).sum()) / len(chosen)


def _mean_rewards(chosen: torch.Tensor, rejected: torch.Tensor) -> Metrics:
    """Return the mean rewards and their margin; NaN if there is no chosen or no rejected response."""
    means = {"chosen_reward": float(chosen.mean()), "rejected_reward": float(rejected.mean())}
    return {"reward_margin": means["chosen_reward"] - means["rejected_reward"], **means}
