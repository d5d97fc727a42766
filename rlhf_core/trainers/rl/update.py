"""The update of RL training on one rank: the losses of policy and critic, and the optimizer steps."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from rlhf_core.algorithms.distillation import sampled_reverse_kl
from rlhf_core.algorithms.kl import kl_loss_term
from rlhf_core.algorithms.policy_losses import POLICY_LOSSES, aggregate, expert_counts, load_balancing_loss, value_loss
from rlhf_core.config import RlConfig
from rlhf_core.data.batching import microbatches
from rlhf_core.engines.deepspeed.engine import TrainEngine, equal_count, sum_over_ranks
from rlhf_core.engines.deepspeed.ranks import summed, total
from rlhf_core.models.backend import Backend
from rlhf_core.models.batch import Branches, TokenBatch
from rlhf_core.models.divergence import Divergence
from rlhf_core.models.forward import PolicyOutput
from rlhf_core.models.vision import Sight, with_sight
from rlhf_core.trainers.rl.credit import ValueUnits
from rlhf_core.trainers.rl.minibatch import (
    Minibatch,
    Totals,
    add_totals,
    before,
    prompt_rows,
    real_tokens,
    token_batch,
    unflatten,
)
from rlhf_core.trainers.rl.teachers import Teaching, divergence_of_top
from rlhf_core.trainers.supervised.demonstrations import collate_demonstrations
from rlhf_core.types import TrainBatch


@dataclass(frozen=True)
class ForwardGraphs:
    """Outputs of a micro-batch before the update, with the graphs that lead to the parameters.

    rows: positions in the batch of all rollouts.    sizes: response tokens of each row.
    policy, values: of every response token, flat [N]; None where the policy was not computed, and where there is no critic.
    """

    rows: list[int]
    sizes: list[int]
    policy: PolicyOutput | None
    values: torch.Tensor | None


@dataclass(frozen=True)
class Microbatch:
    """rows: positions in the minibatch.    branches: their sequences, as rows that may share a prompt.
    graphs: outputs that the update continues from; None: the update computes its own.
    """

    rows: list[int]
    branches: list[Branches]
    graphs: ForwardGraphs | None = None


@dataclass(frozen=True)
class PolicyGradients:
    """Results of the policy's passes over a minibatch, apart from the gradients.

    losses: shares of the step's losses.    statistics: sums over tokens.
    logprobs: [B, R], before the optimizer step, 0 where masked; None where the batch has old log-probabilities.
    """

    losses: Totals
    statistics: Totals
    logprobs: torch.Tensor | None


@dataclass(frozen=True)
class RankUpdate:
    """totals: sums over this rank's tokens, norms over all ranks.
    logprobs: [B, R] of the only minibatch, from the policy before the optimizer step, 0 where masked; None where the batch has old ones.
    """

    totals: Totals
    logprobs: torch.Tensor | None


@dataclass(frozen=True)
class RlUpdate:
    """Optimizer steps of policy and critic, or of one of them.

    value_units: of the critic's output.
    kl_coef: of the KL in the loss; unused where the KL is part of the reward.
    train_policy: False: only the critic is trained, if there is one.
    experts_per_token: of a policy with experts whose load is balanced; None: no load balancing.
    shares_prompts: the prompt of a group is computed once.
    sight: of a model that sees.    undrawn: tokens that it never draws.
    backend: may compute the gradients of policy and critic at the same time.
    graphs: forward passes of the only minibatch, where they have been kept; the update empties the list.
    teaching: the teachers whose whole distributions the policy learns; None without.
    """

    rl: RlConfig
    policy: TrainEngine | None
    critic: TrainEngine | None
    value_units: ValueUnits
    pad_id: int
    device: torch.device
    kl_coef: float
    train_policy: bool
    experts_per_token: int | None
    shares_prompts: bool
    backend: Backend
    graphs: list[ForwardGraphs]
    teaching: Teaching | None = None
    sight: Sight | None = None
    undrawn: tuple[int, ...] = ()

    def run(self, minibatches: list[Minibatch]) -> RankUpdate:
        """One optimizer step for each minibatch, until the policy is further than rl.max_approx_kl from the sampling policy.

        A minibatch whose responses are all masked, on every rank, is skipped: momentum, weight decay and schedule would otherwise move.
        A minibatch beyond rl.max_approx_kl counts in the statistics (so that its approx_kl shows), but not in losses and norms.
        """
        totals: Totals = defaultdict(float, optimizer_steps=0, stopped_early=0, skipped_steps=0)
        logprobs = None
        for minibatch in minibatches:
            if not minibatch.num_loss_tokens:
                totals["skipped_steps"] += 1
                logprobs = torch.zeros(minibatch.batch.response_mask.shape) if minibatch.batch.old_logprobs is None else None
                self.graphs.clear()
                continue
            policy, critic_losses = self._backward(minibatch)
            self.graphs.clear()
            totals["tokens"] += int(minibatch.batch.response_mask.sum())
            losses = dict(critic_losses)
            if policy is not None:
                add_totals(totals, policy.statistics)
                logprobs = policy.logprobs
                if self._too_far(policy.statistics["approx_kl_sum"], minibatch.num_loss_tokens):
                    self.policy.discard()
                    if self.critic is not None:
                        self.critic.discard()
                    totals["stopped_early"] = 1
                    break
                losses |= policy.losses | self._ptx_backward(minibatch)
                losses["grad_norm"] = self.policy.step()
            if self.critic is not None:
                losses["critic_grad_norm"] = self.critic.step()
            add_totals(totals, losses)
            totals["optimizer_steps"] += 1
        return RankUpdate(dict(totals), logprobs)

    def _backward(self, minibatch: Minibatch) -> tuple[PolicyGradients | None, Totals]:
        """Gradients of a whole optimizer step. Returns what the policy gives, if it is trained, and the critic's losses."""
        parts = self._microbatches(minibatch.batch)
        place = {row: position for position, row in enumerate(minibatch.rows)}
        kept = [Microbatch([place[row] for row in graphs.rows], [], graphs) for graphs in self.graphs]
        policy_parts = kept if kept and kept[0].graphs.policy is not None else parts
        work = []
        if self.train_policy:
            counts = self._expert_counts(minibatch, parts) if self.experts_per_token is not None else None
            work.append(partial(self._policy_gradients, minibatch, policy_parts, counts))
        if self.critic is not None:
            work.append(partial(self._critic_gradients, minibatch, kept or parts))
        results = self.backend.map(lambda gradients: gradients(), work)
        return results[0] if self.train_policy else None, results[-1] if self.critic is not None else {}

    def _microbatches(self, batch: TrainBatch) -> list[Microbatch]:
        """Micro-batches of at most microbatch_tokens; samples of a shared prompt stay together."""
        tokens = self.rl.trainer.microbatch_tokens
        groups, rows = prompt_rows(batch.sequences, max_tokens=tokens, shared=self.shares_prompts)
        longest = [max(map(len, r)) + self._further_tokens(batch, group) for group, r in zip(groups, rows, strict=True)]
        chosen = equal_count(microbatches(longest, max_tokens=tokens, rows=[len(r) for r in rows]))
        return [Microbatch([i for g in part for i in groups[g]], [row for g in part for row in rows[g]]) for part in chosen]

    def _further_tokens(self, batch: TrainBatch, rows: list[int]) -> int:
        """Tokens that teachers read in the update beyond the policy's."""
        if self.teaching is None or batch.teacher_sequences is None:
            return 0
        return max(0, int((batch.teacher_sequences.lengths - batch.sequences.lengths)[rows].max()))

    def _tokens(self, part: Microbatch, minibatch: Minibatch) -> TokenBatch:
        """Return the sequences of a micro-batch, its trained tokens selected in the order of its rows."""
        tokens = token_batch(part.branches, minibatch.batch.response_mask[part.rows], pad_id=self.pad_id)
        return with_sight(tokens, self.sight, minibatch.batch.sequences.pictures_of(part.rows)).to(self.device)

    # Policy

    def _policy_gradients(self, minibatch: Minibatch, parts: list[Microbatch], counts: torch.Tensor | None) -> PolicyGradients:
        """Accumulate the gradients of the policy loss over the micro-batches.

        Args:
            counts: [experts], tokens of the step that each expert gets; None: no load balancing.
        """
        losses: Totals = defaultdict(float)
        statistics: Totals = {}
        found: list[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]] = []  # losses and statistics of each micro-batch
        by_row: dict[int, torch.Tensor] = {}  # with from_update
        for part in parts:
            batch = minibatch.batch.select(part.rows).to(self.device)
            output = self._policy_output(part, batch, minibatch, routed=counts is not None)
            logprobs = unflatten(output.logprobs.float(), batch.response_mask)
            loss, stats = self._policy_loss(batch, logprobs, output, minibatch)
            of_part = {"policy_loss": loss.detach()}
            if counts is not None:
                balance = load_balancing_loss(output.router_logits, counts, top_k=self.experts_per_token)
                of_part["moe_aux_loss"] = balance.detach()
                loss = loss + self.rl.moe_aux_coef * balance
            self.policy.backward(loss)
            found.append((of_part, stats))
            if batch.old_logprobs is None:
                by_row.update(zip(part.rows, logprobs.detach().cpu(), strict=True))
        for of_part, stats in found:
            add_totals(losses, numbers(of_part))
            add_totals(statistics, numbers(stats))
        in_order = [by_row[row] for row in sorted(by_row)]
        return PolicyGradients(losses, statistics, pad_sequence(in_order, batch_first=True) if in_order else None)

    def _policy_output(self, part: Microbatch, batch: TrainBatch, minibatch: Minibatch, *, routed: bool) -> PolicyOutput:
        """Return the policy's output for the trained tokens, flat [N].

        Args:
            batch: the micro-batch's rows of the minibatch.
            routed: also the router logits of all tokens but padding.
        """
        if part.graphs is not None:
            trained, policy = trained_tokens(part.graphs, batch), part.graphs.policy
            return PolicyOutput(policy.logprobs[trained], policy.entropy[trained], None, None)
        tokens = self._tokens(part, minibatch)
        divergence = self._teachers_divergence(batch, tokens)
        further = {"forbidden": self.undrawn} | ({} if divergence is None else {"divergence": divergence})
        return self.policy(tokens, **policy_arguments(self.rl), routed=self._routed(part, tokens) if routed else None, **further)

    def _teachers_divergence(self, batch: TrainBatch, tokens: TokenBatch) -> Divergence | None:
        """Return what compares the policy with its teachers' distributions at a micro-batch's trained tokens; None without any."""
        if batch.teacher_top_ids is not None:
            return divergence_of_top(batch, self.rl.distillation)
        if self.teaching is None:
            return None
        if batch.teacher_sequences is not None:
            _, rows = prompt_rows(batch.teacher_sequences, max_tokens=self.rl.trainer.microbatch_tokens, shared=self.shares_prompts)
            flat = [row for group in rows for row in group]
            tokens = token_batch(flat, batch.response_mask.cpu(), pad_id=self.pad_id).to(self.device)
        return self.teaching.divergence(tokens)

    def _routed(self, part: Microbatch, tokens: TokenBatch) -> torch.Tensor:
        return real_tokens(part.branches, tokens.input_ids.shape[1]).to(self.device)

    def _policy_loss(
        self, batch: TrainBatch, logprobs: torch.Tensor, output: PolicyOutput, minibatch: Minibatch
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return a micro-batch's share of the step's policy loss, KL and entropy terms included; and sums over its tokens."""
        rl, mask = self.rl, batch.response_mask
        old_logprobs = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
        token_loss, stats = POLICY_LOSSES[rl.policy_loss](logprobs, old_logprobs, batch.advantages, mask, **bounds(rl))
        token_loss = token_loss * batch.importance_weights.where(mask, 0.0)
        if rl.kl.placement == "loss" and self.kl_coef:
            kl = kl_loss_term(logprobs, old_logprobs, batch.ref_logprobs, mask, estimator=rl.kl.estimator)
            token_loss = token_loss + self.kl_coef * kl
        if rl.entropy_coef:
            token_loss = token_loss - rl.entropy_coef * unflatten(output.entropy.float(), mask)
        of_teachers = {}
        if rl.distillation is not None:
            divergence = self._divergence(batch, logprobs, old_logprobs, output)
            token_loss = token_loss + rl.distillation.coef * divergence
            of_teachers["distillation_loss_sum"] = divergence.detach().sum()
        return self._aggregate(token_loss, batch, minibatch), {
            **of_teachers,
            "entropy_sum": output.entropy.detach().sum(),
            "clip_frac_sum": stats["clip_frac_sum"],
            "approx_kl_sum": stats["approx_kl_sum"],
            "policy_ratio_max": stats["ratio_max"],
            "policy_ratio_min": stats["ratio_min"],
        }

    def _divergence(self, batch: TrainBatch, logprobs: torch.Tensor, old_logprobs: torch.Tensor, output: PolicyOutput) -> torch.Tensor:
        """The policy's divergence from the teachers at each token [B, R]; that of sampled tokens alone has the correction's weights."""
        mask = batch.response_mask
        if output.divergence is not None:
            return unflatten(output.divergence.float(), mask)
        return sampled_reverse_kl(logprobs, old_logprobs, batch.teacher_logprobs, mask) * batch.importance_weights.where(mask, 0.0)

    def _too_far(self, approx_kl_sum: float, num_loss_tokens: int) -> bool:
        """Return whether the minibatch's mean of KL(sampling policy || policy), over all ranks' tokens, is above rl.max_approx_kl."""
        limit = self.rl.max_approx_kl
        if limit is None:
            return False
        (all_gather,) = summed(approx_kl_sum)
        return not all_gather / max(num_loss_tokens, 1) <= limit

    @torch.no_grad()
    def _expert_counts(self, minibatch: Minibatch, parts: list[Microbatch]) -> torch.Tensor:
        """Tokens that the current policy sends to each expert, over the whole optimizer step: a forward pass before the gradients."""
        counts = 0.0
        for part in parts:
            tokens = self._tokens(part, minibatch)
            router_logits = self.policy(tokens, routed=self._routed(part, tokens)).router_logits
            counts = counts + expert_counts(router_logits, top_k=self.experts_per_token)
        return sum_over_ranks(counts)

    def _ptx_backward(self, minibatch: Minibatch) -> Totals:
        """Gradients of the SFT loss of demonstrations at temperature 1: minus the mean log-probability over all ranks' tokens.

        Source: Ouyang et al. 2022 (InstructGPT), https://arxiv.org/abs/2203.02155, equation 2.
        """
        if not self.rl.ptx.coef:
            return {}
        found, examples = [], minibatch.ptx
        for rows in equal_count(microbatches([len(e.ids) for e in examples], max_tokens=self.rl.trainer.microbatch_tokens)):
            batch = collate_demonstrations([examples[i] for i in rows], pad_id=self.pad_id, sight=self.sight)
            loss = -self.policy(batch.to(self.device)).logprobs.float().sum() / max(minibatch.num_ptx_tokens, 1)
            self.policy.backward(self.rl.ptx.coef * loss)
            found.append(loss.detach())
        return {"ptx_loss": total(found)} if found else {}

    # Critic

    def _critic_gradients(self, minibatch: Minibatch, parts: list[Microbatch]) -> Totals:
        """Accumulate the gradients of the value loss over the micro-batches."""
        critic, found = self.rl.critic, []
        for part in parts:
            batch = minibatch.batch.select(part.rows).to(self.device)
            if part.graphs is not None:
                flat = part.graphs.values[trained_tokens(part.graphs, batch)]
            else:
                flat = self.value_units(self.critic(before(self._tokens(part, minibatch))))
            values = unflatten(flat, batch.response_mask)
            token_loss = value_loss(values, batch.old_values, batch.returns, batch.response_mask, value_clip=critic.value_clip)
            loss = critic.value_coef * self._aggregate(token_loss, batch, minibatch)
            self.critic.backward(loss)
            found.append(loss.detach())
        return {"value_loss": total(found)} if found else {}

    def _aggregate(self, token_loss: torch.Tensor, batch: TrainBatch, minibatch: Minibatch) -> torch.Tensor:
        return aggregate(
            token_loss,
            batch.response_mask,
            mode=self.rl.aggregation,
            num_loss_tokens=minibatch.num_loss_tokens,
            num_sequences=minibatch.num_sequences,
            horizon=self.rl.rollout.max_new_tokens,
        )


def numbers(values: dict[str, torch.Tensor]) -> Totals:
    return {name: float(value) for name, value in values.items()}


def bounds(rl: RlConfig) -> dict[str, float | None]:
    """Return the arguments of the policy loss that say how far the policy may go from the old one."""
    if rl.policy_loss == "sapo":
        return rl.sapo.model_dump()
    clip = {"clip_low": rl.clip_low, "clip_high": rl.clip_high}
    return clip | {"dual_clip": rl.dual_clip} if rl.policy_loss == "ppo_clip" else clip


def policy_arguments(rl: RlConfig) -> dict[str, Any]:
    """Arguments of the policy's forward pass for an update."""
    return {"temperature": rl.rollout.temperature, "with_entropy": True, "learn_entropy": bool(rl.entropy_coef)}


def trained_tokens(graphs: ForwardGraphs, batch: TrainBatch) -> torch.Tensor:
    """[N] bool, which of the response tokens in the graphs are trained on.

    Args:
        batch: the rows of the graphs, in their order.
    """
    missing = max(0, max(graphs.sizes) - batch.response_mask.shape[1])
    mask = pad(batch.response_mask, (0, missing))
    return mask[torch.arange(mask.shape[1]) < torch.tensor(graphs.sizes)[:, None]]
