"""One data-parallel rank of RL training: policy, critic, reference and reward models in one process.

It computes on what it is handed; batches, denominators and credit are the driver's.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_core.data.batching import even_microbatches
from rlhf_core.engines.deepspeed_engine import EngineSettings, TrainEngine, device, equal_count, join_world
from rlhf_core.engines.universal import convert_to_universal, is_sharded
from rlhf_core.engines.weights import PackedTensor, pack
from rlhf_core.models.batch import TokenBatch, collate_branches, collate_tokens, continue_prefix, group_by_prefix
from rlhf_core.models.build import (
    checkpoint_names,
    frozen,
    load_language_model,
    load_scalar_model,
    new_scalar_model,
    save_model,
    scalar_head,
)
from rlhf_core.models.forward import PolicyModule, PolicyOutput, ScalarModule
from rlhf_core.models.lora import add_adapters, without_adapters
from rlhf_core.models.tokenizer import load_tokenizer
from rlhf_core.process import collect_by_default
from rlhf_core.scorers.reward_model import load_members, score_by_members
from rlhf_core.trainers.rl.advantages import ValueUnits
from rlhf_core.trainers.rl.fast_paths import balanced_experts, can_share_prompts, rank_backend
from rlhf_core.trainers.rl.job import RlJob
from rlhf_core.trainers.rl.minibatch import Minibatch
from rlhf_core.trainers.rl.update import Kept, RlUpdate, before, policy_arguments
from rlhf_core.trainers.supervised import load_random_state, save_random_state, seed_generators

REFERENCE = "reference.pt"  # in a checkpoint


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
            timeout = timedelta(seconds=self._job.rl.deadlines.start)
            store = dist.TCPStore(host, port, self._world_size, is_master=self._rank == 0, timeout=timeout)
        join_world(rank=self._rank, world_size=self._world_size, store=store)
        job = self._job
        how = {"trust_remote_code": job.model.trust_remote_code, "training_dtype": job.model.dtype}
        self._device = device()
        self._language_model = load_language_model(job.sft_model, **how)
        self._experts_per_token = balanced_experts(self._language_model, job.rl.moe_aux_coef)
        self._shares_prompts = can_share_prompts(job, self._language_model, experts_per_token=self._experts_per_token)
        add_adapters(self._language_model, job.rl.lora, seed=job.seed)
        self._policy = TrainEngine(PolicyModule(self._language_model), self._settings(job.rl.learning_rate))
        self._critic = None
        if job.rl.algorithm == "ppo":
            critic = ScalarModule(initial_critic(job, self._tokenizer, how))
            remedy = "set it to sft, or rl.algorithm to one without a critic, such as rloo"
            critic.check_scores_tokens(f"rl.ppo.critic_init {job.rl.ppo.critic_init}", remedy)
            self._critic = TrainEngine(critic, self._settings(job.rl.ppo.critic_learning_rate))
        self._reference = None
        if job.rl.kl.keeps_reference and not self._adapters_off_is_the_reference:
            self._reference = self._frozen(PolicyModule(load_language_model(job.sft_model, **how)))
            if job.rl.starts_rounded:
                self.refresh_reference()
        self._scorers = self._reward_models(how)
        learning = [engine.module for engine in self._engines.values()]
        self._backend = rank_backend(job, self._world_size, learning + [self._reference] * (self._reference is not None))
        # The sampler's distribution takes the sorted logits of all tokens, which are too large to keep.
        self._keeps = rank_backend(job, self._world_size, learning).keeps_graphs and job.rl.rollout.samples_any_token
        self._kept: list[Kept] = []  # for the next update
        self._value_units = ValueUnits()
        seed_generators(job.seed + self._rank)
        collect_by_default()

    def _reward_models(self, how: dict[str, Any]) -> dict[str, list[ScalarModule]]:
        """Name of a scorer -> the members of its reward model."""
        configs, place = {s.name: s for s in self._job.rl.reward.scorers}, {"device": self._device, "dtype": self._dtype}
        return {
            name: load_members(Path(path), count=configs[name].members, label=configs[name].label, **place, **how)
            for name, path in self._job.scorer_models.items()
        }

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
            disable_dropout=True,  # the ratio, the KL and the engines' log-probabilities are of the model without
        )

    def _frozen(self, module: torch.nn.Module) -> torch.nn.Module:
        return frozen(module, device=self._device, dtype=self._dtype)

    @property
    def _dtype(self) -> torch.dtype:
        return getattr(torch, self._job.model.dtype)

    def set_value_units(self, units: ValueUnits) -> None:
        """What the critic's output means from now on. It isn't part of the saved state: it follows from the reward normaliser's."""
        self._value_units = units

    # Before the update

    def score_sequences(self, name: str, sequences: list[list[int] | None]) -> torch.Tensor:
        """Raw scores [N, members] of this rank's sequences by a scorer of kind reward_model; NaN where there is none."""
        tokens = self._job.rl.trainer.microbatch_tokens
        # The ids are those of the scorer's own tokenizer. Any of its ids can pad, and 0 always is one.
        return score_by_members(self._scorers[name], sequences, pad_id=0, microbatch_tokens=tokens, device=self._device)

    @torch.no_grad()
    def forward(
        self, sequences: list[list[int]], starts: list[int], *, recomputed: int | None = None, learn: bool = False
    ) -> dict[str, torch.Tensor]:
        """Of each token from `starts[i]` on, sequence after sequence, flat [N]: old_logprobs, sampler_logprobs, ref_logprobs and values.

        sampler_logprobs, ref_logprobs and values are absent where there is no top-k or top-p, no reference, or no critic.

        Args:
            recomputed: only of the first so many sequences are old_logprobs computed; None: of all.
            learn: the next update has all of these in one optimizer step: it goes on from these passes, where that is possible.
        """
        recomputed = len(sequences) if recomputed is None else recomputed
        found: dict[str, dict[int, torch.Tensor]] = {}
        keep = learn and self._keeps and recomputed in (0, len(sequences))
        kept = self._see(sequences[:recomputed], starts[:recomputed], found, first=0, with_policy=True, keep=keep)
        kept += self._see(sequences[recomputed:], starts[recomputed:], found, first=recomputed, with_policy=False, keep=keep)
        self._kept = kept if learn else self._kept
        return {name: torch.cat([values[i] for i in sorted(values)]) for name, values in found.items()}

    def _see(
        self,
        sequences: list[list[int]],
        starts: list[int],
        found: dict[str, dict[int, torch.Tensor]],
        *,
        first: int,
        with_policy: bool,
        keep: bool,
    ) -> list[Kept]:
        """What the models say of some sequences, into `found` by name and number; `first`: the number of the first one.

        Args:
            keep: return what policy and critic say with its graphs, unless these are more tokens than of two micro-batches.
        """
        if not sequences or not (with_policy or self._job.rl.kl.keeps_reference or self._critic is not None):
            return []
        tokens = self._job.rl.trainer.microbatch_tokens
        groups = [[i] for i in range(len(sequences))]
        if self._shares_prompts:
            groups = group_by_prefix(sequences, starts, max_tokens=tokens)
        rows = [continue_prefix(sequences[g[0]][: starts[g[0]]], [sequences[i][starts[i] :] for i in g]) for g in groups]
        longest = [max(map(len, r)) for r in rows]
        keep = keep and sum(len(row) for group in rows for row in group) <= 2 * tokens

        def look(part: list[int]) -> Kept:
            batch = collate_branches([row for g in part for row in rows[g]], pad_id=self._pad_id, every_token=True).to(self._device)
            members = [i for g in part for i in groups[g]]
            sizes = [len(sequences[i]) - starts[i] for i in members]
            seen, policy, values = self._look(batch, with_policy=with_policy, learn=keep)
            numbers = [first + i for i in members]
            for name, flat in seen.items():
                found.setdefault(name, {}).update(zip(numbers, flat.detach().float().cpu().split(sizes), strict=True))
            return Kept(numbers, sizes, policy, values)

        counts, multiple = [len(r) for r in rows], 2 if keep else self._backend.workers
        parts = equal_count(even_microbatches(longest, max_tokens=tokens, multiple=multiple, rows=counts))
        kept = self._backend.map(look, parts)
        return kept if keep else []

    def _look(
        self, batch: TokenBatch, *, with_policy: bool, learn: bool
    ) -> tuple[dict[str, torch.Tensor], PolicyOutput | None, torch.Tensor | None]:
        """What the models say, by name; then once more the policy's and the critic's, whose graphs are there if they learn from it."""
        rl, seen, policy, values = self._job.rl, {}, None, None
        filters = {"top_k": rl.rollout.top_k, "top_p": rl.rollout.top_p}
        with torch.set_grad_enabled(learn):
            if with_policy:
                policy = self._policy(batch, **policy_arguments(rl) if learn else {"temperature": rl.rollout.temperature}, **filters)
                seen["old_logprobs"] = policy.logprobs
                if policy.sampler_logprobs is not None:
                    seen["sampler_logprobs"] = policy.sampler_logprobs
            if self._critic is not None:
                seen["values"] = values = self._value_units(self._critic(before(batch)))
        if rl.kl.keeps_reference:
            seen["ref_logprobs"] = self._reference_logprobs(batch)
        return seen, policy, values

    def _reference_logprobs(self, batch: TokenBatch) -> torch.Tensor:
        temperature = self._job.rl.rollout.temperature
        if self._reference is not None:
            return self._reference(batch, temperature=temperature).logprobs
        with without_adapters(self._policy.module):
            return self._policy(batch, temperature=temperature).logprobs

    @property
    def _adapters_off_is_the_reference(self) -> bool:
        """The policy without its adapters is the SFT model, so that no second copy is needed, unless the reference is to move."""
        return self._job.rl.lora is not None and not self._reference_moves

    @property
    def _pad_id(self) -> int:
        return self._tokenizer.pad_token_id

    # The update

    def update(self, minibatches: list[Minibatch], *, kl_coef: float, train_policy: bool, on_policy: bool = False) -> dict[str, float]:
        """One optimizer step for each minibatch; see RlUpdate."""
        kept, self._kept = self._kept, []
        self._last_update = RlUpdate(
            rl=self._job.rl,
            policy=self._policy,
            critic=self._critic,
            value_units=self._value_units,
            pad_id=self._pad_id,
            device=self._device,
            kl_coef=kl_coef,
            train_policy=train_policy,
            on_policy=on_policy,
            experts_per_token=self._experts_per_token,
            shares_prompts=self._shares_prompts,
            backend=self._backend,
            kept=kept,
        )
        return self._last_update.run(minibatches)

    def updated_logprobs(self) -> torch.Tensor:
        """The old log-probabilities [B, R] of the only minibatch of the last update, which was on policy; zeros where masked."""
        return self._last_update.seen_logprobs()

    def refresh_reference(self) -> None:
        """The reference becomes the current policy."""
        self._reference.model.load_state_dict(self._policy.state_dict())

    # Weights and state

    @torch.no_grad()
    def probe(self, ids: list[int]) -> list[float]:
        """The policy's log-probability of each token but the first, at temperature 1. Every rank calls it: it is a collective."""
        batch = collate_tokens([ids], [1], pad_id=self._pad_id).to(self._device)
        return self._policy(batch).logprobs.float().cpu().tolist()

    def weights(self) -> dict[str, torch.Tensor] | None:
        """The policy's full weights on rank 0, under the names that its Hugging Face folder has; None on the others."""
        state = self._policy.state_dict()
        return checkpoint_names(self._language_model, state) if self._rank == 0 else None

    def packed_weights(self) -> dict[str, PackedTensor] | None:
        """The same for another process."""
        weights = self.weights()
        return None if weights is None else pack(weights)

    def export(self, folder: str) -> None:
        """Write the policy as a Hugging Face folder."""
        state = self._policy.state_dict()
        if self._rank == 0:
            save_model(self._language_model, state, self._tokenizer, Path(folder))

    def save(self, folder: str) -> None:
        """All that training needs to go on. Every rank calls it."""
        for name, engine in self._engines.items():
            engine.save(Path(folder), name)
        if self._reference_moves and self._rank == 0:
            torch.save(self._reference.model.state_dict(), Path(folder) / REFERENCE)
        save_random_state(Path(folder) / f"rng-{self._rank}.pt")

    def load(self, folder: str) -> None:
        """What `save` wrote."""
        for name, engine in self._engines.items():
            engine.load(Path(folder), name)
        self._load_reference(Path(folder))
        load_random_state(Path(folder) / f"rng-{self._rank}.pt")

    def convert(self, folder: str, universal: str) -> None:
        """Make what another number of ranks saved into one that any number can load. Rank 0 does it."""
        for name in self._engines if self._rank == 0 else ():
            if is_sharded(Path(folder) / name):
                convert_to_universal(Path(folder) / name, Path(universal) / name)

    def load_converted(self, folder: str, universal: str) -> None:
        """What another number of ranks saved, after `convert`. Ranks that it has no generators of take those of rank 0."""
        for name, engine in self._engines.items():
            if (Path(universal) / name).exists():
                engine.load_universal(Path(universal), name)
            else:
                engine.load(Path(folder), name)
        self._load_reference(Path(folder))
        mine = Path(folder) / f"rng-{self._rank}.pt"
        load_random_state(mine if mine.exists() else mine.with_name("rng-0.pt"))

    @property
    def _engines(self) -> dict[str, TrainEngine]:
        return {"policy": self._policy} | ({} if self._critic is None else {"critic": self._critic})

    def _load_reference(self, folder: Path) -> None:
        if self._reference_moves:
            self._reference.model.load_state_dict(torch.load(folder / REFERENCE, map_location="cpu", weights_only=True))

    @property
    def _reference_moves(self) -> bool:
        return self._job.rl.kl.refresh_reference_every is not None


def initial_critic(job: RlJob, tokenizer: PreTrainedTokenizerBase, how: dict[str, Any]) -> PreTrainedModel:
    """The model that rl.ppo.critic_init names; a new head starts at 0.

    Args:
        tokenizer: the policy's.
        how: arguments of the loaders.
    """
    init = job.rl.ppo.critic_init
    if init == "reward_model":
        return load_scalar_model(job.reward_model, **how)
    model = new_scalar_model(Path(job.sft_model if init == "sft" else job.reward_model), tokenizer, **how)
    if (bias := scalar_head(model).bias) is not None:
        torch.nn.init.zeros_(bias)
    return model
