"""The update of RL training on one rank: losses of policy and critic, and what else goes into an optimizer step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from rlhf_core.algorithms.aggregation import aggregate
from rlhf_core.algorithms.kl import kl_loss_term
from rlhf_core.algorithms.load_balancing import expert_counts, load_balancing_loss
from rlhf_core.algorithms.policy_losses import POLICY_LOSSES, value_loss
from rlhf_core.config import RlConfig
from rlhf_core.data.batching import microbatches
from rlhf_core.engines.deepspeed_engine import TrainEngine, equal_count, sum_over_ranks
from rlhf_core.models.backend import Backend
from rlhf_core.models.batch import Branches, TokenBatch, collate_branches, continue_prefix, group_by_prefix
from rlhf_core.models.forward import PolicyOutput
from rlhf_core.trainers.demonstrations import collate_demonstrations
from rlhf_core.trainers.rl.advantages import ValueUnits
from rlhf_core.trainers.rl.minibatch import Minibatch, Totals, gather
from rlhf_core.types import TrainBatch


@dataclass(frozen=True)
class Part:
    """A micro-batch: positions in the minibatch, and what goes through the model where prompts are shared."""

    rows: list[int]
    branches: list[Branches] | None


@dataclass(frozen=True)
class Kept:
    """What policy and critic said of a micro-batch before the update, with the graphs that lead to their parameters.

    rows: the rollouts, by their places in the batch of all.
    sizes: tokens of each one's response.
    policy, values: of every response token, flat [N]; None: wasn't asked.
    """

    rows: list[int]
    sizes: list[int]
    policy: PolicyOutput | None
    values: torch.Tensor | None


@dataclass(frozen=True)
class RlUpdate:
    """Optimizer steps of policy and critic.

    value_units: of the critic's output.
    kl_coef: of the KL in the loss; unused where it is part of the reward.
    train_policy: False: only the critic learns.
    on_policy: the minibatch is the only one of its rollouts, so that the policy of now is the one that sampled them: its log-probabilities
        are the old ones, whatever the batch has.
    experts_per_token: of a policy with experts whose load is to be balanced; None: no load balancing.
    shares_prompts: compute the prompt of a group's samples once; not with a critic, and not with experts, whose load counts every sample.
    backend: may compute gradients of policy and critic at the same time.
    kept: the passes of the only minibatch, where they have been made; whoever wasn't asked then makes them now. Given back in the end.
    """

    rl: RlConfig
    policy: TrainEngine
    critic: TrainEngine | None
    value_units: ValueUnits
    pad_id: int
    device: torch.device
    kl_coef: float
    train_policy: bool
    on_policy: bool
    experts_per_token: int | None
    shares_prompts: bool
    backend: Backend
    kept: list[Kept] = field(default_factory=list)
    _seen: dict[int, torch.Tensor] = field(default_factory=dict, init=False)  # on policy: row of the minibatch -> its log-probabilities [R]

    def run(self, minibatches: list[Minibatch]) -> Totals:
        """One optimizer step for each minibatch from which there is something to learn, until one is too far from the sampling policy.

        Where all responses of a minibatch are masked, on every rank, neither model takes a step: momentum, weight decay and schedule
        would move on. Returns sums over this rank's tokens, and norms over all ranks. The tokens of a minibatch that was too far count
        (so that its approx_kl shows), its losses and norms don't: nothing was stepped.
        """
        totals: Totals = defaultdict(float, optimizer_steps=0, stopped_early=0, skipped_steps=0)
        for minibatch in minibatches:
            if not minibatch.num_loss_tokens:
                totals["skipped_steps"] += 1
                self._skip(minibatch)
                continue
            losses: Totals = defaultdict(float)
            in_bounds = self._backward(minibatch, losses, totals)
            self.kept.clear()
            if not in_bounds:
                totals["stopped_early"] = 1
                break
            if self.train_policy:
                losses["grad_norm"] = self.policy.step()
            if self.critic is not None:
                losses["critic_grad_norm"] = self.critic.step()
            gather(totals, losses)
            totals["optimizer_steps"] += 1
        return dict(totals)

    def _skip(self, minibatch: Minibatch) -> None:
        """Nothing is computed; on policy there are no log-probabilities, but zeros where masked, which is everywhere."""
        self.kept.clear()
        if self.on_policy:
            self._seen.update(enumerate(torch.zeros(minibatch.batch.response_mask.shape)))

    def _backward(self, minibatch: Minibatch, losses: Totals, totals: Totals) -> bool:
        """Gradients of a whole optimizer step. False: it is too far from the sampling policy, and the gradients are dropped."""
        parts = self._parts(minibatch.batch)
        counts = self._expert_counts(minibatch.batch, parts) if self.train_policy and self.experts_per_token is not None else None
        seen: Totals = {}
        totals["tokens"] += int(minibatch.batch.response_mask.sum())

        def policy() -> None:
            for rows, part, output in self._policy_outputs(minibatch, parts, counts):
                stats, logprobs = self._policy_backward(part, output, minibatch, counts, losses)
                gather(seen, stats)
                if self.on_policy:
                    self._seen.update(zip(rows, logprobs.cpu(), strict=True))

        def critic() -> None:
            for part, values in self._values(minibatch, parts):
                self._critic_backward(part, values, minibatch, losses)

        wanted = [policy] * self.train_policy + [critic] * (self.critic is not None)
        self.backend.map(lambda backward: backward(), wanted)
        gather(totals, seen)
        if self.train_policy and self._too_far(seen["approx_kl_sum"], minibatch.num_loss_tokens):
            self.policy.discard()
            if self.critic is not None:
                self.critic.discard()
            return False
        if self.train_policy and self.rl.ptx.coef:
            self._ptx_backward(minibatch, losses)
        return True

    def seen_logprobs(self) -> torch.Tensor:
        """[B, R], in the order of the minibatch; zeros where masked. Of an update that was on policy."""
        return pad_sequence([self._seen[row] for row in range(len(self._seen))], batch_first=True)

    def _parts(self, batch: TrainBatch) -> list[Part]:
        """Micro-batches; with shared prompts the samples of one stay together."""
        tokens = self.rl.trainer.microbatch_tokens
        if not self.shares_prompts:
            lengths = (batch.prompt_mask.sum(1) + batch.response_mask.sum(1)).tolist()
            return [Part(rows, None) for rows in equal_count(microbatches(lengths, max_tokens=tokens))]
        groups, rows = prompt_rows(batch, max_tokens=tokens)
        longest = [max(map(len, r)) for r in rows]
        chosen = equal_count(microbatches(longest, max_tokens=tokens, rows=[len(r) for r in rows]))
        return [Part([i for g in part for i in groups[g]], [row for g in part for row in rows[g]]) for part in chosen]

    def _kept_parts(self, minibatch: Minibatch) -> Iterator[tuple[Kept, list[int], TrainBatch, torch.Tensor]]:
        """Of each kept micro-batch also the rows of the minibatch, their batch, and which of its response tokens are trained on."""
        place = {row: position for position, row in enumerate(minibatch.rows)}
        for kept in self.kept:
            rows = [place[row] for row in kept.rows]
            part = minibatch.batch.select(rows)
            missing = max(0, max(kept.sizes) - part.response_mask.shape[1])
            mask = pad(part.response_mask, (0, missing))
            yield kept, rows, part, mask[torch.arange(mask.shape[1]) < torch.tensor(kept.sizes)[:, None]]

    def _policy_outputs(
        self, minibatch: Minibatch, parts: list[Part], counts: torch.Tensor | None
    ) -> Iterator[tuple[list[int], TrainBatch, PolicyOutput]]:
        """Micro-batch by micro-batch: its rows in the minibatch, their batch, and what the policy says of the tokens trained on."""
        if self.kept and self.kept[0].policy is not None:
            for kept, rows, part, trained in self._kept_parts(minibatch):
                yield rows, part, PolicyOutput(kept.policy.logprobs[trained], kept.policy.entropy[trained], None, None)
            return
        for positions in parts:
            part = minibatch.batch.select(positions.rows).to(self.device)
            routed = None if counts is None else real_tokens(part)
            yield positions.rows, part, self.policy(self._tokens(positions, part), **policy_arguments(self.rl), routed=routed)

    def _values(self, minibatch: Minibatch, parts: list[Part]) -> Iterator[tuple[TrainBatch, torch.Tensor]]:
        """Micro-batch by micro-batch: its batch, and the critic's values [N] before the tokens trained on."""
        if self.kept:
            for kept, _, part, trained in self._kept_parts(minibatch):
                yield part, kept.values[trained]
            return
        for positions in parts:
            part = minibatch.batch.select(positions.rows).to(self.device)
            yield part, self.value_units(self.critic(before(self._tokens(positions, part))))

    def _tokens(self, part: Part, batch: TrainBatch) -> TokenBatch:
        """The sequences of a micro-batch, whose rows `batch` holds, response tokens selected in its order."""
        return contiguous(batch) if part.branches is None else shared(part.branches, batch, pad_id=self.pad_id).to(self.device)

    def _too_far(self, approx_kl_sum: float, num_loss_tokens: int) -> bool:
        """Whether the minibatch's mean of KL(sampling policy || policy), over all ranks' tokens, is above rl.max_approx_kl."""
        limit = self.rl.max_approx_kl
        if limit is None:
            return False
        total = sum_over_ranks(torch.tensor(approx_kl_sum, dtype=torch.float64))
        return not float(total) / max(num_loss_tokens, 1) <= limit

    # Policy

    def _policy_backward(
        self, part: TrainBatch, output: PolicyOutput, minibatch: Minibatch, counts: torch.Tensor | None, losses: Totals
    ) -> tuple[Totals, torch.Tensor]:
        """Figures of a micro-batch, and the policy's log-probabilities [B, R] before the step."""
        rl, mask = self.rl, part.response_mask
        logprobs = _unflatten(output.logprobs.float(), mask)
        old_logprobs = logprobs.detach() if self.on_policy else part.old_logprobs
        bounds = {"clip_low": rl.clip_low, "clip_high": rl.clip_high}
        if rl.policy_loss == "ppo_clip":
            bounds["dual_clip"] = rl.dual_clip
        token_loss, stats = POLICY_LOSSES[rl.policy_loss](logprobs, old_logprobs, part.advantages, mask, **bounds)
        token_loss = token_loss * part.importance_weights.where(mask, 0.0)
        if rl.kl.placement == "loss" and self.kl_coef:
            token_loss = token_loss + self.kl_coef * kl_loss_term(
                logprobs, old_logprobs, part.ref_logprobs, mask, estimator=rl.kl.estimator
            )
        if rl.entropy_coef:
            token_loss = token_loss - rl.entropy_coef * _unflatten(output.entropy.float(), mask)
        loss = self._aggregate(token_loss, part, minibatch)
        losses["policy_loss"] += float(loss.detach())
        if counts is not None:
            balance = load_balancing_loss(output.router_logits, counts, top_k=self.experts_per_token)
            losses["moe_aux_loss"] += float(balance.detach())
            loss = loss + rl.moe_aux_coef * balance
        self.policy.backward(loss)
        stats = {
            "entropy_sum": float(output.entropy.detach().sum()),
            "clip_frac_sum": float(stats["clip_frac_sum"]),
            "approx_kl_sum": float(stats["approx_kl_sum"]),
            "policy_ratio_max": float(stats["ratio_max"]),
            "policy_ratio_min": float(stats["ratio_min"]),
        }
        return stats, logprobs.detach()

    @torch.no_grad()
    def _expert_counts(self, batch: TrainBatch, parts: list[Part]) -> torch.Tensor:
        """How often the current policy chooses each expert, over the whole optimizer step; a forward pass ahead of the gradients."""
        counts = 0.0
        for positions in parts:
            part = batch.select(positions.rows).to(self.device)
            router_logits = self.policy(contiguous(part), routed=real_tokens(part)).router_logits
            counts = counts + expert_counts(router_logits, top_k=self.experts_per_token)
        return sum_over_ranks(counts)

    def _ptx_backward(self, minibatch: Minibatch, losses: Totals) -> None:
        """The SFT loss of demonstrations, at temperature 1: minus the mean log-probability over all ranks' tokens.

        Source: Ouyang et al. 2022 (InstructGPT), https://arxiv.org/abs/2203.02155, equation 2.
        """
        examples = minibatch.ptx
        for rows in equal_count(microbatches([len(e.ids) for e in examples], max_tokens=self.rl.trainer.microbatch_tokens)):
            batch = collate_demonstrations([examples[i] for i in rows], pad_id=self.pad_id)
            loss = -self.policy(batch.to(self.device)).logprobs.float().sum() / max(minibatch.num_ptx_tokens, 1)
            self.policy.backward(self.rl.ptx.coef * loss)
            losses["ptx_loss"] += float(loss.detach())

    # Critic

    def _critic_backward(self, part: TrainBatch, values: torch.Tensor, minibatch: Minibatch, losses: Totals) -> None:
        ppo = self.rl.ppo
        values = _unflatten(values, part.response_mask)
        token_loss = value_loss(values, part.old_values, part.returns, part.response_mask, value_clip=ppo.value_clip)
        loss = ppo.value_coef * self._aggregate(token_loss, part, minibatch)
        self.critic.backward(loss)
        losses["value_loss"] += float(loss.detach())

    def _aggregate(self, token_loss: torch.Tensor, part: TrainBatch, minibatch: Minibatch) -> torch.Tensor:
        return aggregate(
            token_loss,
            part.response_mask,
            mode=self.rl.aggregation,
            num_loss_tokens=minibatch.num_loss_tokens,
            num_sequences=minibatch.num_sequences,
            horizon=self.rl.rollout.max_new_tokens,
        )


def policy_arguments(rl: RlConfig) -> dict[str, Any]:
    """How the policy is asked for what its update needs."""
    return {"temperature": rl.rollout.temperature, "with_entropy": True, "learn_entropy": bool(rl.entropy_coef)}


def before(batch: TokenBatch) -> TokenBatch:
    """The positions just before the selected ones: what the critic sees when a token is about to be taken."""
    selected = torch.zeros_like(batch.selected)
    selected[:, :-1] = batch.selected[:, 1:]
    return TokenBatch(batch.input_ids, selected)


def contiguous(batch: TrainBatch) -> TokenBatch:
    """Left-padded prompts and right-padded responses as right-padded sequences [B, T], response tokens selected."""
    ids = torch.cat([batch.prompt_ids, batch.response_ids], dim=1)
    selected = torch.cat([torch.zeros_like(batch.prompt_mask), batch.response_mask], dim=1)
    padding = (~batch.prompt_mask).sum(1, keepdim=True)
    source = (torch.arange(ids.shape[1], device=ids.device) + padding).clamp(max=ids.shape[1] - 1)
    beyond = torch.arange(ids.shape[1], device=ids.device) + padding >= ids.shape[1]
    return TokenBatch(ids.gather(1, source), selected.gather(1, source) & ~beyond)


def prompt_rows(batch: TrainBatch, *, max_tokens: int) -> tuple[list[list[int]], list[list[Branches]]]:
    """Groups of consecutive samples of one prompt, as positions in the batch; and the rows of each, with the prompt once where that pays.

    Responses end at their last trained token, and have one token at least. A shared row has at most `max_tokens` tokens.
    """
    columns = torch.arange(1, batch.response_mask.shape[1] + 1)
    lengths = (batch.response_mask * columns).amax(1).clamp(min=1).tolist()
    prompts = [ids[mask].tolist() for ids, mask in zip(batch.prompt_ids, batch.prompt_mask, strict=True)]
    responses = [ids[:n] for ids, n in zip(batch.response_ids.tolist(), lengths, strict=True)]
    sequences, starts = [p + r for p, r in zip(prompts, responses, strict=True)], [len(p) for p in prompts]
    groups = group_by_prefix(sequences, starts, max_tokens=max_tokens)
    return groups, [continue_prefix(prompts[group[0]], [responses[i] for i in group]) for group in groups]


def shared(rows: list[Branches], batch: TrainBatch, *, pad_id: int) -> TokenBatch:
    """Rows [B, T] in which the response tokens that `batch` trains on are selected, in its order."""
    tokens = collate_branches(rows, pad_id=pad_id, every_token=True)
    lengths = [len(branch) for row in rows for branch in row.branches]
    trained = torch.cat([mask[:n] for mask, n in zip(batch.response_mask.cpu(), lengths, strict=True)])
    return replace(tokens, selected=tokens.selected.masked_scatter(tokens.selected, trained))


def real_tokens(batch: TrainBatch) -> torch.Tensor:
    """The positions [B, T] in `contiguous` of the prompt and of the response up to its last trained token; bool."""
    columns = torch.arange(1, batch.response_mask.shape[1] + 1, device=batch.response_mask.device)
    lengths = batch.prompt_mask.sum(1) + (batch.response_mask * columns).amax(1)
    width = batch.prompt_mask.shape[1] + batch.response_mask.shape[1]
    return torch.arange(width, device=lengths.device) < lengths[:, None]


def _unflatten(flat: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Flat values [N] at the True positions of a mask [B, R], zeros elsewhere; gradients flow."""
    return torch.zeros(mask.shape, dtype=flat.dtype, device=flat.device).masked_scatter(mask, flat)
