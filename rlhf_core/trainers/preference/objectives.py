"""The optimizer steps and held-out looks of preference training: on pairs, and on single responses.

A step's loss is the mean over its pairs, or responses, however they are cut into micro-batches. What holds for the step as a whole (KTO's
baseline, the number of chosen tokens) is known before the first of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rlhf_core.algorithms.preference_losses import PREFERENCE_LOSSES, UNPAIRED_LOSSES, PairLogprobs, PairLosses, kto_baseline
from rlhf_core.config import DpoConfig, KtoConfig
from rlhf_core.engines.deepspeed_engine import TrainEngine, device
from rlhf_core.trainers.preference.data import Continuation, Example, Pair, PromptGroup, ResponseForward, mismatched
from rlhf_core.trainers.preference.reference import Reference
from rlhf_core.trainers.supervised import Metrics, Phase


@dataclass(frozen=True)
class PairObjective:
    """The mean of `config.loss` over pairs and, with `config.nll_coef`, the negative log-likelihood per chosen token."""

    config: DpoConfig
    forward: ResponseForward
    reference: Reference

    def train_batch(self, engine: TrainEngine, pairs: list[Pair]) -> Metrics:
        """Forward and backward of one optimizer step."""
        logprobs, losses, loss = self._pass(engine, pairs, learn=True)
        return {
            "loss": loss,
            "reward_accuracy": _points(losses) / len(pairs),
            **_mean_rewards(losses.chosen_rewards, losses.rejected_rewards),
            "chosen_logprob": float(logprobs.chosen_logprobs.sum() / logprobs.chosen_lengths.sum()),
            "rejected_logprob": float(logprobs.rejected_logprobs.sum() / logprobs.rejected_lengths.sum()),
            "tokens": float(sum(side.num_tokens for side in _sides(pairs))),
        }

    def evaluate(self, engine: TrainEngine, pairs: list[Pair]) -> Metrics:
        """The same objective and its rewards."""
        _, losses, loss = self._pass(engine, pairs, learn=False)
        margin = _mean_rewards(losses.chosen_rewards, losses.rejected_rewards)["reward_margin"]
        return {"heldout_loss": loss, "heldout_accuracy": _points(losses) / len(pairs), "heldout_margin": margin}

    def _pass(self, engine: TrainEngine, pairs: list[Pair], *, learn: bool) -> tuple[PairLogprobs, PairLosses, float]:
        """Everything of all pairs, without gradient and in no particular order, and their loss."""
        num_chosen_tokens = sum(len(pair.chosen.response_ids) for pair in pairs)
        seen_logprobs, seen_losses, loss = [], [], 0.0
        for part in self.forward.microbatches(_sides(pairs), together=2):
            logprobs = self._logprobs(engine, part)
            losses = self._losses(logprobs.per_token() if self.config.length_normalize else logprobs)
            share = losses.losses.sum() / len(pairs)
            if self.config.nll_coef:
                share = share - self.config.nll_coef * logprobs.chosen_logprobs.sum() / num_chosen_tokens
            if learn:
                engine.backward(share)
            loss += float(share.detach())
            seen_logprobs.append(_detached(logprobs))
            seen_losses.append(_detached(losses))
        return PairLogprobs(*_joined(seen_logprobs)), PairLosses(*_joined(seen_losses)), loss

    def _logprobs(self, engine: TrainEngine, part: list[PromptGroup]) -> PairLogprobs:
        """The groups hold the chosen and the rejected side of each pair in turn."""
        lengths = torch.tensor([len(item.response_ids) for group in part for item in group.items], device=device())
        of_items = (self.forward.logprobs(engine, part).float(), self.reference(part), lengths)
        policy, reference, tokens = (values.view(-1, 2).unbind(1) for values in of_items)
        return PairLogprobs(*policy, *reference, *tokens)

    def _losses(self, logprobs: PairLogprobs) -> PairLosses:
        config = self.config
        options: dict[str, Any] = {}
        if config.loss in ("sigmoid", "robust"):
            options["label_smoothing"] = config.label_smoothing
        if config.loss == "simpo":
            options["simpo_margin"] = config.simpo_margin
        return PREFERENCE_LOSSES[config.loss](logprobs, beta=config.beta, **options)


def pair_items(train: list[Pair], heldout: list[Pair], batches: list[list[int]]) -> list[Continuation]:
    """All that training on these batches, and evaluation, will ask of the reference."""
    return [*_sides([train[i] for batch in batches for i in batch]), *_sides(heldout)]


@dataclass(frozen=True)
class ResponseObjective:
    """The mean of `config.loss` over single responses; KTO's baseline comes from the step's prompts with each other's responses.

    max_length: tokens to which a prompt with another's response is cut.
    """

    config: KtoConfig
    forward: ResponseForward
    reference: Reference
    max_length: int

    def train_batch(self, engine: TrainEngine, examples: list[Example]) -> Metrics:
        """Forward and backward of one optimizer step."""
        kl = self._baseline(engine, unrelated(examples, self.config, shift=1, max_length=self.max_length))
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
        """The same objective and its rewards."""
        kl = self._baseline(engine, unrelated(examples, self.config, shift=_half(examples), max_length=self.max_length))
        _, losses, rewards, good, _ = self._pass(engine, examples, kl, learn=False)
        margin = _mean_rewards(rewards[good], rewards[~good])["reward_margin"]
        return {
            "heldout_loss": float(losses.mean()),
            "heldout_accuracy": ordered_share(rewards[good], rewards[~good]),
            "heldout_margin": margin,
        }

    def _pass(self, engine: TrainEngine, examples: list[Example], kl: torch.Tensor, *, learn: bool) -> list[torch.Tensor]:
        """Log-probabilities, losses, rewards, desirable and lengths of all examples, without gradient and in no particular order."""
        config, seen = self.config, []
        for part in self.forward.microbatches([e.continuation for e in examples]):
            here = [examples[i] for group in part for i in group.positions]
            desirable = torch.tensor([e.desirable for e in here], device=device())
            logprobs = self.forward.logprobs(engine, part).float()
            weights = {"desirable_weight": config.desirable_weight, "undesirable_weight": config.undesirable_weight}
            made = UNPAIRED_LOSSES[config.loss](logprobs, self.reference(part), desirable, beta=config.beta, kl=kl, **weights)
            if learn:
                engine.backward(made.losses.sum() / len(examples))
            lengths = torch.tensor([len(e.continuation.response_ids) for e in here], device=device())
            seen.append(_detached((logprobs, *made, desirable, lengths)))
        return _joined(seen)

    @torch.no_grad()
    def _baseline(self, engine: TrainEngine, items: list[Continuation]) -> torch.Tensor:
        if not items:
            return torch.zeros((), device=device())
        parts = self.forward.microbatches(items)
        logprobs = torch.cat([self.forward.logprobs(engine, part).float() for part in parts])
        return kto_baseline(logprobs, torch.cat([self.reference(part) for part in parts]))


def example_items(
    train: list[Example], heldout: list[Example], batches: list[list[int]], config: KtoConfig, *, max_length: int
) -> list[Continuation]:
    """All that training on these batches, and evaluation, will ask of the reference."""
    asked: list[Continuation] = []
    for examples, shift in (*(([train[i] for i in batch], 1) for batch in batches), (heldout, _half(heldout))):
        asked += [e.continuation for e in examples]
        asked += unrelated(examples, config, shift=shift, max_length=max_length)
    return asked


def unrelated(examples: list[Example], config: KtoConfig, *, shift: int, max_length: int) -> list[Continuation]:
    """What the baseline is estimated from: each prompt with the response `shift` further on. Nothing where the loss has no baseline."""
    items = [e.continuation for e in examples]
    return mismatched(items, shift=shift, max_length=max_length) if config.loss == "kto" else []


def preference_phase(objective: PairObjective | ResponseObjective, train: Sequence[Any], heldout: Sequence[Any], *, steps: int) -> Phase:
    """Steps on pairs, or single responses, as the objective has it; without held-out ones nothing is evaluated."""

    def train_batch(engine: TrainEngine, chosen: list[int]) -> Metrics:
        return objective.train_batch(engine, [train[i] for i in chosen])

    def evaluate(engine: TrainEngine) -> Metrics:
        return objective.evaluate(engine, heldout)

    return Phase("preference", steps, objective.config.batch_size, len(train), train_batch, evaluate if heldout else None)


def ordered_share(higher: torch.Tensor, lower: torch.Tensor) -> float:
    """Of all couples of one number [N] that should be higher and one [M] that should be lower, the share in that order; ties are half.

    NaN without couples.
    """
    order = lower.sort().values
    below = torch.searchsorted(order, higher, right=False) + torch.searchsorted(order, higher, right=True)
    return float(below.double().mean() / 2 / len(lower)) if len(lower) else math.nan


def _half(examples: list[Example]) -> int:
    """Neighbours in the held-out data often have the same prompt; responses half the data away hardly ever."""
    return len(examples) // 2


def _sides(pairs: Sequence[Pair]) -> list[Continuation]:
    return [side for pair in pairs for side in pair]


def _detached(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.detach() for tensor in tensors]


def _joined(seen: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    """Micro-batches' tensors one after the other, on the CPU."""
    return [torch.cat(values).cpu() for values in zip(*seen, strict=True)]


def _points(losses: PairLosses) -> float:
    """Pairs whose rewards are in the right order; a tie is half a point."""
    chosen, rejected = losses.chosen_rewards, losses.rejected_rewards
    return float((chosen > rejected).sum() + 0.5 * (chosen == rejected).sum())


def _mean_rewards(chosen: torch.Tensor, rejected: torch.Tensor) -> Metrics:
    """NaN where there is none of a kind."""
    means = {"chosen_reward": float(chosen.mean()), "rejected_reward": float(rejected.mean())}
    return {"reward_margin": means["chosen_reward"] - means["rejected_reward"], **means}
