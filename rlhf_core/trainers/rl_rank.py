"""One data-parallel rank of RL training: policy, critic, reference and reward model in one process.

It computes on what it is handed; batches, denominators and credit are the driver's.
"""

from __future__ import annotations

import socket
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from rlhf_core.algorithms.aggregation import aggregate
from rlhf_core.algorithms.kl import kl_loss_term
from rlhf_core.algorithms.policy_losses import ppo_clip, value_loss
from rlhf_core.data.batching import microbatches
from rlhf_core.engines.deepspeed_engine import RENDEZVOUS_SECONDS, EngineSettings, TrainEngine, device, equal_count, join_world
from rlhf_core.models.build import load_language_model, load_scalar_model, save_model
from rlhf_core.models.tokenizer import load_tokenizer
from rlhf_core.models.wrappers import PolicyModule, ScalarModule, TokenBatch, collate_tokens
from rlhf_core.scorers.reward_model import score_sequences
from rlhf_core.trainers.rl_job import RlJob
from rlhf_core.trainers.supervised import load_random_state, save_random_state
from rlhf_core.types import TrainBatch


@dataclass(frozen=True)
class Minibatch:
    """This rank's rows of one optimizer step's batch, and the denominators of the whole step, all ranks together."""

    batch: TrainBatch
    num_loss_tokens: int
    num_sequences: int


class TrainerRank:
    """See the module. `connect` must be called on every rank before anything else."""

    def __init__(self, rank: int, world_size: int, job: RlJob):
        self._rank, self._world_size, self._job = rank, world_size, job
        self._tokenizer = load_tokenizer(job.sft_model, trust_remote_code=job.model.trust_remote_code)

    def address(self) -> tuple[str, int]:
        """Host and a free port of this rank, for the rendezvous of all."""
        with socket.socket() as s:
            s.bind(("", 0))
            return socket.gethostbyname(socket.gethostname()) if self._world_size > 1 else "127.0.0.1", s.getsockname()[1]

    def connect(self, host: str, port: int) -> None:
        """Join the other ranks and build the models."""
        store = None
        if self._world_size > 1:
            store = dist.TCPStore(host, port, self._world_size, is_master=self._rank == 0, timeout=timedelta(seconds=RENDEZVOUS_SECONDS))
        join_world(rank=self._rank, world_size=self._world_size, store=store)
        job = self._job
        how = {"trust_remote_code": job.model.trust_remote_code, "training_dtype": job.model.dtype}
        self._device = device()
        self._language_model = load_language_model(job.sft_model, **how)
        self._policy = TrainEngine(PolicyModule(self._language_model), self._settings(job.rl.learning_rate))
        self._critic = None
        if job.rl.algorithm == "ppo":
            critic = ScalarModule(load_scalar_model(job.reward_model, **how))
            self._critic = TrainEngine(critic, self._settings(job.rl.ppo.critic_learning_rate))
        self._reference = self._frozen(PolicyModule(load_language_model(job.sft_model, **how))) if job.rl.kl.coef else None
        self._reward = self._frozen(ScalarModule(load_scalar_model(job.reward_model, **how)))

    def _settings(self, learning_rate: float) -> EngineSettings:
        rl, model = self._job.rl, self._job.model
        warmup = max(1, rl.warmup_steps)
        return EngineSettings(
            learning_rate=learning_rate,
            schedule=lambda step: min(1.0, (step + 1) / warmup),
            weight_decay=rl.weight_decay,
            max_grad_norm=rl.max_grad_norm,
            zero_stage=rl.trainer.zero_stage,
            offload_optimizer=rl.trainer.offload_optimizer,
            dtype=model.dtype,
            seed=self._job.seed,
        )

    def _frozen(self, module: torch.nn.Module) -> torch.nn.Module:
        return module.to(device=self._device, dtype=getattr(torch, self._job.model.dtype)).eval().requires_grad_(False)

    # Before the update

    def score(self, sequences: list[list[int] | None]) -> torch.Tensor:
        """Raw reward-model scores of this rank's sequences; NaN where there is none."""
        return score_sequences(
            self._reward, sequences, pad_id=self._pad_id, microbatch_tokens=self._job.rl.trainer.microbatch_tokens, device=self._device
        )

    @torch.no_grad()
    def forward(self, sequences: list[list[int]], starts: list[int]) -> dict[str, torch.Tensor]:
        """Of each token from `starts[i]` on, sequence after sequence, flat [N]: old_logprobs, ref_logprobs and values.

        ref_logprobs and values are absent where there is no reference or no critic.
        """
        temperature = self._job.rl.rollout.temperature
        models: dict[str, Callable[[TokenBatch], torch.Tensor]] = {"old_logprobs": lambda b: self._policy(b, temperature=temperature)[0]}
        if self._reference is not None:
            models["ref_logprobs"] = lambda b: self._reference(b, temperature=temperature)[0]
        if self._critic is not None:
            models["values"] = lambda b: self._critic(_before(b))
        found: dict[str, list[torch.Tensor | None]] = {name: [None] * len(sequences) for name in models}
        for part in equal_count(microbatches([len(s) for s in sequences], max_tokens=self._job.rl.trainer.microbatch_tokens)):
            batch = collate_tokens([sequences[i] for i in part], [starts[i] for i in part], pad_id=self._pad_id).to(self._device)
            sizes = [len(sequences[i]) - starts[i] for i in part]
            for name, model in models.items():
                for i, values in zip(part, model(batch).float().cpu().split(sizes), strict=True):
                    found[name][i] = values
        return {name: torch.cat(parts) for name, parts in found.items()}

    @property
    def _pad_id(self) -> int:
        return self._tokenizer.pad_token_id

    # The update

    def update(self, minibatches: list[Minibatch]) -> dict[str, float]:
        """One optimizer step for each minibatch. Returns sums over this rank's tokens, and norms over all."""
        totals: dict[str, float] = defaultdict(float)
        for minibatch in minibatches:
            batch = minibatch.batch
            lengths = (batch.prompt_mask.sum(1) + batch.response_mask.sum(1)).tolist()
            for rows in equal_count(microbatches(lengths, max_tokens=self._job.rl.trainer.microbatch_tokens)):
                part = batch.select(rows).to(self._device)
                tokens = _contiguous(part)
                self._policy_backward(part, tokens, minibatch, totals)
                if self._critic is not None:
                    self._critic_backward(part, tokens, minibatch, totals)
            totals["grad_norm"] += self._policy.step()
            if self._critic is not None:
                totals["critic_grad_norm"] += self._critic.step()
        totals["optimizer_steps"] = len(minibatches)
        return dict(totals)

    def _policy_backward(self, part: TrainBatch, tokens: TokenBatch, minibatch: Minibatch, totals: dict[str, float]) -> None:
        rl = self._job.rl
        flat_logprobs, flat_entropy = self._policy(tokens, temperature=rl.rollout.temperature, with_entropy=True)
        logprobs = _unflatten(flat_logprobs.float(), part.response_mask)
        entropy = _unflatten(flat_entropy.float(), part.response_mask)
        token_loss, stats = ppo_clip(
            logprobs, part.old_logprobs, part.advantages, part.response_mask, clip_low=rl.clip_low, clip_high=rl.clip_high
        )
        if rl.kl.placement == "loss" and rl.kl.coef:
            token_loss = token_loss + rl.kl.coef * kl_loss_term(
                logprobs, part.old_logprobs, part.ref_logprobs, part.response_mask, estimator=rl.kl.estimator
            )
        if rl.entropy_coef:
            token_loss = token_loss - rl.entropy_coef * entropy
        loss = self._aggregate(token_loss, part, minibatch)
        self._policy.backward(loss)
        totals["policy_loss"] += float(loss.detach())
        totals["entropy_sum"] += float(flat_entropy.detach().sum())
        totals["tokens"] += int(part.response_mask.sum())
        for name in ("clip_frac_sum", "approx_kl_sum"):
            totals[name] += float(stats[name])

    def _critic_backward(self, part: TrainBatch, tokens: TokenBatch, minibatch: Minibatch, totals: dict[str, float]) -> None:
        ppo = self._job.rl.ppo
        values = _unflatten(self._critic(_before(tokens)), part.response_mask)
        token_loss = value_loss(values, part.old_values, part.returns, part.response_mask, value_clip=ppo.value_clip)
        loss = ppo.value_coef * self._aggregate(token_loss, part, minibatch)
        self._critic.backward(loss)
        totals["value_loss"] += float(loss.detach())

    def _aggregate(self, token_loss: torch.Tensor, part: TrainBatch, minibatch: Minibatch) -> torch.Tensor:
        return aggregate(
            token_loss,
            part.response_mask,
            mode=self._job.rl.loss_aggregation,
            num_loss_tokens=minibatch.num_loss_tokens,
            num_sequences=minibatch.num_sequences,
        )

    # Weights and state

    def weights(self) -> dict[str, torch.Tensor] | None:
        """The policy's full weights on rank 0, under their Hugging Face names; None on the others."""
        state = self._policy.state_dict()
        return state if self._rank == 0 else None

    def export(self, folder: str) -> None:
        """Write the policy as a Hugging Face folder."""
        state = self._policy.state_dict()
        if self._rank == 0:
            save_model(self._language_model, state, self._tokenizer, Path(folder))

    def save(self, folder: str) -> None:
        self._policy.save(Path(folder), "policy")
        if self._critic is not None:
            self._critic.save(Path(folder), "critic")
        save_random_state(Path(folder) / f"rng-{self._rank}.pt")

    def load(self, folder: str) -> None:
        self._policy.load(Path(folder), "policy")
        if self._critic is not None:
            self._critic.load(Path(folder), "critic")
        load_random_state(Path(folder) / f"rng-{self._rank}.pt")


def _before(batch: TokenBatch) -> TokenBatch:
    """The positions just before the selected ones: what the critic sees when a token is about to be taken."""
    selected = torch.zeros_like(batch.selected)
    selected[:, :-1] = batch.selected[:, 1:]
    return TokenBatch(batch.input_ids, selected)


def _contiguous(batch: TrainBatch) -> TokenBatch:
    """Left-padded prompts and right-padded responses as right-padded sequences [B, T], response tokens selected."""
    ids = torch.cat([batch.prompt_ids, batch.response_ids], dim=1)
    selected = torch.cat([torch.zeros_like(batch.prompt_mask), batch.response_mask], dim=1)
    padding = (~batch.prompt_mask).sum(1, keepdim=True)
    source = (torch.arange(ids.shape[1], device=ids.device) + padding).clamp(max=ids.shape[1] - 1)
    beyond = torch.arange(ids.shape[1], device=ids.device) + padding >= ids.shape[1]
    return TokenBatch(ids.gather(1, source), selected.gather(1, source) & ~beyond)


def _unflatten(flat: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Flat values [N] at the True positions of a mask [B, R], zeros elsewhere; gradients flow."""
    return torch.zeros(mask.shape, dtype=flat.dtype, device=flat.device).masked_scatter(mask, flat)
