"""One rank of RL training: policy, critic, reference and reward models in one process.

Batches, denominators and advantages come from the driver.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_core.algorithms.schedules import learning_rate_factor
from rlhf_core.checkpoint.manifest import damage
from rlhf_core.checkpoint.parts import hand_in
from rlhf_core.checkpoint.saving import without_crc32
from rlhf_core.data.batching import even_microbatches
from rlhf_core.engines.deepspeed_engine import EngineSettings, TrainEngine, device, equal_count, join_world, most_over_ranks
from rlhf_core.engines.frozen import FrozenModel
from rlhf_core.engines.rendezvous import join_store, open_store
from rlhf_core.engines.sequence_parallel import share_sequences
from rlhf_core.engines.universal import convert_engines, load_converted
from rlhf_core.engines.weights import PackedTensor, pack
from rlhf_core.models.backend import Backend
from rlhf_core.models.batch import Branches, TokenBatch, collate_branches, collate_tokens, continue_prefix, group_by_prefix
from rlhf_core.models.build import (
    checkpoint_names,
    load_language_model,
    load_scalar_model,
    new_scalar_model,
    save_model,
    scalar_head,
)
from rlhf_core.models.forward import GENERAL, PolicyModule, ScalarModule, common_backend
from rlhf_core.models.lora import add_adapters, without_adapters
from rlhf_core.models.probe import shares_prefixes
from rlhf_core.models.tokenizer import load_tokenizer
from rlhf_core.process import collect_by_default
from rlhf_core.scorers.members import member_folders
from rlhf_core.scorers.reward_model import load_member, score_sequences
from rlhf_core.trainers.rl.advantages import ValueUnits
from rlhf_core.trainers.rl.job import RlJob
from rlhf_core.trainers.rl.minibatch import Minibatch, before
from rlhf_core.trainers.rl.update import ForwardGraphs, RankUpdate, RlUpdate, policy_arguments
from rlhf_core.trainers.supervised import load_random_state, random_state_of, save_random_state, seed_generators

REFERENCE = "reference.pt"  # in a checkpoint


@dataclass(frozen=True)
class ForwardPart:
    """A micro-batch of `TrainerRank.forward`.

    rows: positions of its sequences.    sizes: response tokens of each.    branches: the sequences, with shared prompts.
    """

    rows: list[int]
    sizes: list[int]
    branches: list[Branches]


class TrainerRank:
    """Models and optimizers of one rank. `connect` is called on every rank before anything else."""

    def __init__(self, rank: int, world_size: int, job: RlJob):
        self._rank, self._world_size, self._job = rank, world_size, job
        self._tokenizer = load_tokenizer(job.sft_model, trust_remote_code=job.model.trust_remote_code)
        self._store: dist.TCPStore | None = None

    def address(self) -> tuple[str, int] | None:
        """Host and port of the store at which several ranks meet, on rank 0; None on other ranks, and for one alone."""
        if self._world_size == 1 or self._rank:
            return None
        self._store = open_store(self._world_size, timeout=self._job.rl.deadlines.start)
        return self._store.host, self._store.port

    def connect(self, address: tuple[str, int] | None) -> None:
        """Join the other ranks and build the models.

        Args:
            address: of rank 0; None for one rank.
        """
        if address is not None and self._store is None:
            self._store = join_store(*address, self._world_size, timeout=self._job.rl.deadlines.start)
        join_world(rank=self._rank, world_size=self._world_size, store=self._store)
        job = self._job
        share_sequences(job.rl.trainer.sequence_parallel)
        how = {"trust_remote_code": job.model.trust_remote_code, "training_dtype": job.model.dtype}
        self._device = device()
        self._language_model = load_language_model(job.sft_model, **how)
        self._experts_per_token = balanced_experts(self._language_model, job.rl.moe_aux_coef)
        # A critic sees every sequence of its own, and the load of experts counts every sample.
        groups = job.rl.group_size > 1 and job.rl.algorithm != "ppo" and self._experts_per_token is None
        self._shares_prompts = groups and shares_prefixes(self._language_model, device=self._device, max_length=job.model.max_length)
        add_adapters(self._language_model, job.rl.lora, seed=job.seed)
        settings = self._settings(job.rl.learning_rate, steps=job.rl.policy_steps, ema_decay=job.rl.ema_decay)
        self._policy = TrainEngine(PolicyModule(self._language_model), settings)
        self._critic = None
        if job.rl.algorithm == "ppo":
            critic = ScalarModule(initial_critic(job, self._tokenizer, how))
            remedy = "set it to sft, or rl.algorithm to one without a critic, such as rloo"
            critic.check_scores_tokens(f"rl.ppo.critic_init {job.rl.ppo.critic_init}", remedy)
            self._critic = TrainEngine(critic, self._settings(job.rl.ppo.critic_learning_rate, steps=job.rl.optimizer_steps))
        self._reference: FrozenModel | None = None
        # With adapters, the policy without them is the SFT model: no second copy is needed, unless the reference is refreshed.
        if job.rl.kl.keeps_reference and (job.rl.lora is None or self._reference_moves):
            self._reference = self._frozen(PolicyModule(load_language_model(job.sft_model, **how)))
            if job.rl.starts_rounded:
                self.refresh_reference()
        self._scorers = self._reward_models(how)
        learning = [engine.module for engine in self._engines.values()]
        self._backend = self._common_backend([*learning, *([self._reference.module] if self._reference is not None else [])])
        # The sampler's distribution takes the sorted logits of all tokens, which are too large to keep.
        self._can_keep_graphs = self._common_backend(learning).keeps_graphs and job.rl.rollout.samples_any_token
        self._graphs: list[ForwardGraphs] = []  # for the next update
        self._value_units = ValueUnits()
        seed_generators(job.seed + self._rank)
        collect_by_default()

    def _reward_models(self, how: dict[str, Any]) -> dict[str, list[FrozenModel]]:
        """Scorer's name -> the members of its reward model."""
        configs = {s.name: s for s in self._job.rl.reward.scorers}
        return {
            name: [
                self._frozen(load_member(folder, configs[name].label, **how))
                for folder in member_folders(Path(path))[: configs[name].members]
            ]
            for name, path in self._job.scorer_models.items()
        }

    def _common_backend(self, modules: list[PolicyModule | ScalarModule]) -> Backend:
        """What computes all of these modules. The general backend with other ranks or ZeRO, where the order of collectives counts."""
        alone = self._world_size == 1 and self._job.rl.trainer.zero_stage == 0
        return common_backend(*modules) if alone else GENERAL

    def _settings(self, learning_rate: float, *, steps: int, ema_decay: float | None = None) -> EngineSettings:
        """
        Args:
            steps: optimizer steps of the whole run.
        """
        rl, model = self._job.rl, self._job.model
        return EngineSettings(
            learning_rate=learning_rate,
            schedule=partial(
                learning_rate_factor,
                schedule=rl.schedule,
                total=steps,
                warmup=max(1, rl.warmup_steps),
                floor=rl.min_learning_rate_fraction,
                decay_fraction=rl.decay_fraction,
            ),
            optimizer=rl.optimizer,
            betas=(rl.betas[0], rl.betas[1]),
            eps=rl.eps,
            ema_decay=ema_decay,
            weight_decay=rl.weight_decay,
            max_grad_norm=rl.max_grad_norm,
            zero_stage=rl.trainer.zero_stage,
            offload_optimizer=rl.trainer.offload_optimizer,
            offload_parameters=rl.trainer.offload_parameters,
            gradient_checkpointing=rl.trainer.gradient_checkpointing,
            dtype=model.dtype,
            seed=self._job.seed,
            disable_dropout=True,  # ratio, KL and the engines' log-probabilities are those of the model without dropout
        )

    def _frozen(self, module: torch.nn.Module) -> FrozenModel:
        trainer = self._job.rl.trainer
        return FrozenModel(module, dtype=self._job.model.dtype, zero_stage=trainer.zero_stage, offload=trainer.offload_frozen)

    def set_value_units(self, units: ValueUnits) -> None:
        """Set the units of the critic's output. They follow from the reward normalizer, and aren't saved."""
        self._value_units = units

    # Before the update

    def score_by_reward_model(self, name: str, sequences: list[list[int] | None]) -> torch.Tensor:
        """Raw scores [N, members] of this rank's sequences by a scorer of kind reward_model; NaN where there is none. A collective if the
        model is sharded.
        """
        tokens, columns = self._job.rl.trainer.microbatch_tokens, []
        for member in self._scorers[name]:
            passes = most_over_ranks if member.sharded else None
            with member.in_use() as module:
                # The ids are those of the scorer's own tokenizer. Any of its ids can pad, and 0 always is one.
                how = {"pad_id": 0, "microbatch_tokens": tokens, "device": self._device, "passes": passes}
                columns.append(score_sequences(module, sequences, **how))
        return torch.stack(columns, 1)

    @torch.no_grad()
    def forward(
        self, sequences: list[list[int]], starts: list[int], *, recomputed: int | None = None, keep_graphs: bool = False
    ) -> dict[str, torch.Tensor]:
        """Outputs of the models for each token from `starts[i]` on, sequence after sequence, flat [N].

        Args:
            recomputed: the policy is computed for the first so many sequences only; None: for all.
            keep_graphs: the next update takes all of these sequences in one optimizer step, and continues from these passes if it can.
        Returns:
            old_logprobs; sampler_logprobs with top-k or top-p; ref_logprobs with a reference; values with a critic.
        """
        recomputed = len(sequences) if recomputed is None else recomputed
        keep = keep_graphs and self._can_keep_graphs and recomputed in (0, len(sequences))
        found: dict[str, dict[int, torch.Tensor]] = {}
        graphs: list[ForwardGraphs] = []
        with nullcontext() if self._reference is None else self._reference.in_use():
            for numbers in (range(recomputed), range(recomputed, len(sequences))):
                with_policy = numbers.start == 0 and recomputed > 0
                if numbers and (with_policy or self._job.rl.kl.keeps_reference or self._critic is not None):
                    parts, keep = self._forward_parts(sequences, starts, numbers, keep=keep)
                    passes = self._backend.map(partial(self._forward_part, with_policy=with_policy, keep=keep), parts)
                    for part, (outputs, kept) in zip(parts, passes, strict=True):
                        graphs += [kept] if keep else []
                        for name, flat in outputs.items():
                            found.setdefault(name, {}).update(zip(part.rows, flat.split(part.sizes), strict=True))
        if keep_graphs:
            self._graphs = graphs
        return {name: torch.cat([values[i] for i in sorted(values)]) for name, values in found.items()}

    def _forward_parts(
        self, sequences: list[list[int]], starts: list[int], numbers: range, *, keep: bool
    ) -> tuple[list[ForwardPart], bool]:
        """Micro-batches of the sequences with these numbers; and whether their graphs are kept, which takes at most two micro-batches."""
        tokens, groups = self._job.rl.trainer.microbatch_tokens, [[i] for i in numbers]
        if self._shares_prompts:
            within = group_by_prefix([sequences[i] for i in numbers], [starts[i] for i in numbers], max_tokens=tokens)
            groups = [[numbers[k] for k in group] for group in within]
        rows = [continue_prefix(sequences[g[0]][: starts[g[0]]], [sequences[i][starts[i] :] for i in g]) for g in groups]
        keep = keep and sum(len(row) for group in rows for row in group) <= 2 * tokens
        chosen = even_microbatches(
            [max(map(len, r)) for r in rows],
            max_tokens=tokens,
            multiple=2 if keep else self._backend.workers,
            rows=[len(r) for r in rows],
        )
        parts = []
        for part in equal_count(chosen):
            members = [i for g in part for i in groups[g]]
            parts.append(ForwardPart(members, [len(sequences[i]) - starts[i] for i in members], [row for g in part for row in rows[g]]))
        return parts, keep

    def _forward_part(self, part: ForwardPart, *, with_policy: bool, keep: bool) -> tuple[dict[str, torch.Tensor], ForwardGraphs]:
        """Outputs by name, on the CPU; and policy and critic once more, with their graphs if these are kept."""
        rl, outputs, policy, values = self._job.rl, {}, None, None
        batch = collate_branches(part.branches, pad_id=self._pad_id, every_token=True).to(self._device)
        with torch.set_grad_enabled(keep):
            if with_policy:
                how = policy_arguments(rl) if keep else {"temperature": rl.rollout.temperature}
                policy = self._policy(batch, **how, top_k=rl.rollout.top_k, top_p=rl.rollout.top_p)
                outputs["old_logprobs"] = policy.logprobs
                if policy.sampler_logprobs is not None:
                    outputs["sampler_logprobs"] = policy.sampler_logprobs
            if self._critic is not None:
                outputs["values"] = values = self._value_units(self._critic(before(batch)))
        if rl.kl.keeps_reference:
            outputs["ref_logprobs"] = self._reference_logprobs(batch)
        return {name: x.detach().float().cpu() for name, x in outputs.items()}, ForwardGraphs(part.rows, part.sizes, policy, values)

    def _reference_logprobs(self, batch: TokenBatch) -> torch.Tensor:
        temperature = self._job.rl.rollout.temperature
        if self._reference is not None:
            return self._reference.module(batch, temperature=temperature).logprobs
        with without_adapters(self._policy.module):
            return self._policy(batch, temperature=temperature).logprobs

    @property
    def _pad_id(self) -> int:
        return self._tokenizer.pad_token_id

    # The update

    def update(self, minibatches: list[Minibatch], *, kl_coef: float, train_policy: bool) -> RankUpdate:
        """One optimizer step for each minibatch; see RlUpdate."""
        graphs, self._graphs = self._graphs, []
        update = RlUpdate(
            rl=self._job.rl,
            policy=self._policy,
            critic=self._critic,
            value_units=self._value_units,
            pad_id=self._pad_id,
            device=self._device,
            kl_coef=kl_coef,
            train_policy=train_policy,
            experts_per_token=self._experts_per_token,
            shares_prompts=self._shares_prompts,
            backend=self._backend,
            graphs=graphs,
        )
        return update.run(minibatches)

    def refresh_reference(self) -> None:
        """The current policy becomes the reference."""
        self._reference.load(self._policy.weights())

    # Weights and state

    @torch.no_grad()
    def probe(self, ids: list[int]) -> list[float]:
        """The policy's log-probability of each token but the first, at temperature 1. A collective with ZeRO: every rank calls it."""
        batch = collate_tokens([ids], [1], pad_id=self._pad_id).to(self._device)
        return self._policy(batch).logprobs.float().cpu().tolist()

    def weights(self) -> dict[str, torch.Tensor] | None:
        """The policy's full weights under the names of its Hugging Face folder, on rank 0; None on other ranks."""
        state = self._policy.state_dict()
        return checkpoint_names(self._language_model, state) if self._rank == 0 else None

    def packed_weights(self) -> dict[str, PackedTensor] | None:
        """The same, packed for another process."""
        weights = self.weights()
        return None if weights is None else pack(weights)

    def export(self, folder: str) -> None:
        """Write the policy as a Hugging Face folder; with rl.ema_decay the average of its weights."""
        with self._policy.averaged():
            state = self._policy.state_dict()
        if self._rank == 0:
            save_model(self._language_model, state, self._tokenizer, Path(folder))

    def save(self, folder: str) -> None:
        """Write the state that training resumes from. Every rank calls it, and of several ranks each begins to hash its own files."""
        for name, engine in self._engines.items():
            engine.save(Path(folder), name)
        if self._reference_moves:
            reference = self._reference.state_dict()
            if self._rank == 0:
                with without_crc32():
                    torch.save(reference, Path(folder) / REFERENCE)
        save_random_state(Path(folder) / f"rng-{self._rank}.pt")
        if self._world_size > 1:
            hand_in(Path(folder), self._rank, [*self._engines, f"rng-{self._rank}.pt", *([REFERENCE] if self._rank == 0 else [])])

    def damage(self, folder: str) -> str | None:
        """What is wrong with this rank's share of a checkpoint's files, or None."""
        return damage(Path(folder), rank=self._rank, ranks=self._world_size)

    def load(self, folder: str) -> None:
        """Load what `save` wrote."""
        for name, engine in self._engines.items():
            engine.load(Path(folder), name)
        self._load_reference(Path(folder))
        load_random_state(Path(folder) / f"rng-{self._rank}.pt")

    def convert(self, folder: str, universal: str) -> None:
        """Convert the checkpoint of another number of ranks, on rank 0, to one that any number of ranks can load."""
        for engine in self._engines.values():
            engine.check_redistributable()
        if self._rank == 0:
            convert_engines(Path(folder), self._engines, Path(universal))

    def load_converted(self, folder: str, universal: str) -> None:
        """Load the checkpoint of another number of ranks, after `convert`. A rank without saved generators takes those of rank 0."""
        for name, engine in self._engines.items():
            load_converted(engine, Path(folder), name, Path(universal))
        self._load_reference(Path(folder))
        load_random_state(random_state_of(Path(folder), self._rank))

    @property
    def _engines(self) -> dict[str, TrainEngine]:
        return {"policy": self._policy} | ({} if self._critic is None else {"critic": self._critic})

    def _load_reference(self, folder: Path) -> None:
        if self._reference_moves:
            self._reference.load(torch.load(folder / REFERENCE, map_location="cpu", mmap=True, weights_only=True).items())

    @property
    def _reference_moves(self) -> bool:
        return self._job.rl.kl.refresh_reference_every is not None


def initial_critic(job: RlJob, tokenizer: PreTrainedTokenizerBase, how: dict[str, Any]) -> PreTrainedModel:
    """The critic by rl.ppo.critic_init; the weights of a new head are 0.

    Args:
        tokenizer: of the policy.
        how: arguments of the loaders.
    """
    init = job.rl.ppo.critic_init
    if init == "reward_model":
        return load_scalar_model(job.reward_model, **how)
    model = new_scalar_model(Path(job.sft_model if init == "sft" else job.reward_model), tokenizer, **how)
    if (bias := scalar_head(model).bias) is not None:
        torch.nn.init.zeros_(bias)
    return model


def balanced_experts(model: PreTrainedModel, coef: float) -> int | None:
    """Experts per token of a model whose experts' load is balanced; None: no load balancing.

    Args:
        coef: rl.moe_aux_coef.
    Raises:
        ValueError: the model has no experts, or none with this loss.
    """
    config = model.config.get_text_config()
    if not coef:
        return None
    if not hasattr(config, "output_router_logits"):
        raise ValueError(
            f"rl.moe_aux_coef: expected 0 with a model without experts that are balanced by a loss, got {coef} with "
            f"{type(model).__name__}; set it to 0"
        )
    return config.num_experts_per_tok
