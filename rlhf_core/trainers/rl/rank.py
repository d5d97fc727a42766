"""One rank of RL training: the process of a group of roles, such as policy and reference.

Batches, denominators and advantages come from the driver.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from rlhf_core.checkpoint.parts import save_part
from rlhf_core.checkpoint.stored import check_checkpoint, download_folder, upload_folder
from rlhf_core.data.batching import even_microbatches
from rlhf_core.data.pictures import Picture
from rlhf_core.engines.deepspeed.engine import device, equal_count, join_world, most_over_ranks
from rlhf_core.engines.deepspeed.sequence_parallel import share_sequences
from rlhf_core.engines.memory.gpu_memory import memory_in_use
from rlhf_core.engines.memory.offload import Stays
from rlhf_core.engines.ray.rendezvous import join_store, open_store
from rlhf_core.engines.transfer.adapter_source import AdapterSource
from rlhf_core.engines.transfer.sender import Sent, Target, WeightSender
from rlhf_core.engines.transfer.source import KeptSource, PolicySource, TensorSpec
from rlhf_core.engines.transfer.weights import PackedTensor, pack, unpack
from rlhf_core.models.backend import Backend
from rlhf_core.models.batch import Branches, TokenBatch, collate_branches, collate_tokens
from rlhf_core.models.build import save_model, vocabulary_size
from rlhf_core.models.forward import GENERAL, PolicyModule, ScalarModule, common_backend
from rlhf_core.models.lora import has_adapters, without_adapters
from rlhf_core.models.tokenizer import load_tokenizer
from rlhf_core.models.vision import Sight, sight, with_sight
from rlhf_core.models.weights import checkpoint_names
from rlhf_core.process import collect_by_default
from rlhf_core.scorers.reward.model import score_sequences
from rlhf_core.storage.node import job_storage
from rlhf_core.trainers.rl.credit import ValueUnits
from rlhf_core.trainers.rl.job import POLICY, RlJob
from rlhf_core.trainers.rl.minibatch import Minibatch, before, prompt_rows
from rlhf_core.trainers.rl.roles import HostedRoles
from rlhf_core.trainers.rl.teachers import EarlyTeaching, Teaching, in_use
from rlhf_core.trainers.rl.update import ForwardGraphs, RankUpdate, RlUpdate, policy_arguments
from rlhf_core.trainers.supervised.loop import seed_generators
from rlhf_core.types import Sequences

if TYPE_CHECKING:
    from rlhf_core.engines.transfer.gpu import IpcBuffer

GIVE_UP = 3.0  # an engine that takes no weights is given up after this part of rl.deadlines.step, in which the rank must answer


@dataclass(frozen=True)
class ForwardPart:
    """A micro-batch of `TrainerRank.forward`.

    rows: positions of its sequences.    sizes: response tokens of each.    branches: the sequences, with shared prompts.
    pictures: of all sequences, in order.
    """

    rows: list[int]
    sizes: list[int]
    branches: list[Branches]
    pictures: list[Picture]


class TrainerRank:
    """`connect` is called on every rank of the group before anything else.

    Args:
        rank, world_size: in the group.
        roles: of the group; None: all of the run.
        adapters_alone: of the policy's weights only those that are trained are sent to the engines, which all get them by gloo.
    """

    def __init__(self, rank: int, world_size: int, job: RlJob, roles: Sequence[str] | None = None, *, adapters_alone: bool = False):
        self._rank, self._world_size, self._job, self._adapters_alone = rank, world_size, job, adapters_alone
        self._hosted = job.rl.roles if roles is None else roles
        self._tokenizer = load_tokenizer(job.sft_model, **job.load_options)
        self._sight = sight(self._tokenizer, Path(job.prepared))
        self._scorer_sights = {
            name: self._sight_of(folder) for name, folder in job.scorer_models.items() if "reward_models" in self._hosted
        }
        self._store: dist.TCPStore | None = None
        seconds, send_changes = job.rl.deadlines.step, job.rl.rollout.send_changes
        self._sender = WeightSender(partial(open_store, None, timeout=seconds), timeout=seconds / GIVE_UP, send_changes=send_changes)
        self._kept = KeptSource()
        self._shared: IpcBuffer | None = None

    def _sight_of(self, reward_model: str) -> Sight | None:
        """Return what sees for a reward model, whose pictures may have other sizes than the policy's."""
        if self._sight is None:
            return None
        return sight(load_tokenizer(reward_model, scores=True, **self._job.load_options), Path(self._job.prepared))

    def address(self) -> tuple[str, int] | None:
        """Host and port of the store at which several ranks meet, on rank 0; None on other ranks, and for one alone."""
        if self._world_size == 1 or self._rank:
            return None
        self._store = open_store(self._world_size, timeout=self._job.rl.deadlines.start)
        return self._store.host, self._store.port

    def connect(self, address: tuple[str, int] | None) -> None:
        """Join the other ranks of the group and build the models.

        Args:
            address: of rank 0; None for one rank.
        """
        job = self._job
        if address is not None and self._store is None:
            self._store = join_store(*address, self._world_size, timeout=job.rl.deadlines.start)
        join_world(rank=self._rank, world_size=self._world_size, store=self._store)
        share_sequences(job.rl.trainer.sequence_parallel)
        self._device = device()
        self.roles = HostedRoles(self._hosted, job, self._tokenizer)
        learning = [engine.module for engine in self.roles.learning.values()]
        self._in_forward = [] if self.roles.reference is None else [self.roles.reference]
        self._teachers = [] if job.rl.teaches_whole_distributions else self.roles.teachers  # the others compute in the update
        self._in_forward += [teacher.model for teacher in self._teachers]
        self._backend = self._common_backend([*learning, *(model.module for model in self._in_forward)])
        # The sampler's distribution takes the sorted logits of all tokens, which are too large to keep.
        keeps_graphs = job.rl.rollout.samples_any_token and not job.rl.teaches_distributions
        self._can_keep_graphs = keeps_graphs and bool(learning) and self._common_backend(learning).keeps_graphs
        self._graphs: list[ForwardGraphs] = []  # for the next update
        if self.roles.policy is not None:
            policy = self.roles.policy.module, self._engine_names
            self._source = AdapterSource(*policy, job.sft_model) if self._adapters_alone else PolicySource(*policy)
        self._value_units = ValueUnits()
        seed_generators(job.seed + self._rank)
        collect_by_default()

    def _common_backend(self, modules: list[PolicyModule | ScalarModule]) -> Backend:
        """What computes all of these modules, two passes at a time where it can. The general backend takes them in turn: with other ranks
        or ZeRO, where the order of collectives counts, and with adapters, which are switched off for the reference.
        """
        alone = self._world_size == 1 and self._job.rl.trainer.zero_stage == 0 and bool(modules) and not any(map(has_adapters, modules))
        return common_backend(*modules) if alone else GENERAL

    def keep(self, stays: Stays) -> dict[str, int]:
        """See `HostedRoles.keep`. Returns the memory in use on the GPU afterwards."""
        self.roles.keep(stays)
        return memory_in_use()

    def set_value_units(self, units: ValueUnits) -> None:
        """Set the units of the critic's output. They follow from the reward normalizer, and aren't saved."""
        self._value_units = units

    # Before the update

    def score_by_reward_model(self, name: str, sequences: list[list[int] | None], ends: torch.Tensor | None = None) -> torch.Tensor:
        """Raw scores [N, members] of this rank's sequences by a scorer of kind reward_model; NaN where there is none. A collective if the
        model is sharded.

        Args:
            ends: of steps, as for `score_sequences`: the scores are theirs, [N, members, S].
        """
        tokens, columns, seeing = self._job.rl.trainer.microbatch_tokens, [], self._scorer_sights[name]
        for member in self.roles.scorers[name]:
            passes = most_over_ranks if member.sharded else None
            with member.in_use() as module:
                # The ids are those of the scorer's own tokenizer. Any of its ids can pad, and 0 always is one.
                options = {"pad_id": 0, "microbatch_tokens": tokens, "device": self._device, "sight": seeing}
                columns.append(score_sequences(module, sequences, passes=passes, ends=ends, **options))
        return torch.stack(columns, 1)

    @torch.no_grad()
    def forward(
        self, sequences: Sequences, taught: Sequences | None = None, *, recomputed: int | None = None, keep_graphs: bool = False
    ) -> dict[str, torch.Tensor]:
        """Outputs of the models for each response token, sequence after sequence, flat [N].

        Args:
            taught: what teachers read: other prompts with the same responses; None: the same.
            recomputed: the policy is computed for the first so many sequences only; None: for all.
            keep_graphs: the next update takes all of these sequences in one optimizer step, and continues from these passes if it can.
        Returns:
            Of the roles that are hosted: old_logprobs; sampler_logprobs with top-k or top-p; ref_logprobs; values; and, unless the
            teachers compute in the update, the outputs of `EarlyTeaching`.
        """
        roles = self.roles
        recomputed = 0 if roles.policy is None else len(sequences) if recomputed is None else recomputed
        keep = keep_graphs and self._can_keep_graphs and recomputed in (0, len(sequences))
        found: dict[str, dict[int, torch.Tensor]] = {}
        graphs: list[ForwardGraphs] = []
        teaches = bool(self._teachers) and taught is None
        without_policy = roles.computes_reference or roles.critic is not None or teaches
        with in_use(self._in_forward):
            teaching = self._early_teaching()
            for numbers in (range(recomputed), range(recomputed, len(sequences))):
                with_policy = numbers.start == 0 and recomputed > 0
                if numbers and (with_policy or without_policy):
                    parts, keep = self._forward_parts(sequences, numbers, keep=keep)
                    how = {"with_policy": with_policy, "keep": keep, "teaching": teaching if teaches else None}
                    passes = self._backend.map(partial(self._forward_part, **how), parts)
                    for part, (outputs, kept) in zip(parts, passes, strict=True):
                        graphs += [kept] if keep else []
                        for name, flat in outputs.items():
                            found.setdefault(name, {}).update(zip(part.rows, flat.split(part.sizes), strict=True))
            for name, by_row in ({} if teaching is None or teaches else self._taught_outputs(taught, teaching)).items():
                found[name] = by_row
        if keep_graphs:
            self._graphs = graphs
        return {name: torch.cat([values[i] for i in sorted(values)]) for name, values in found.items()}

    def _early_teaching(self) -> EarlyTeaching | None:
        rl = self._job.rl
        if not self._teachers:
            return None
        vocabulary = vocabulary_size(self._job.sft_model, trust_remote_code=self._job.model.trust_remote_code)
        return EarlyTeaching(self._teachers, rl.distillation.top_k, vocabulary=vocabulary, temperature=rl.rollout.temperature)

    def _taught_outputs(self, taught: Sequences, teaching: EarlyTeaching) -> dict[str, dict[int, torch.Tensor]]:
        """Outputs of teachers that read other prompts than the policy, by name and row."""
        parts, _ = self._forward_parts(taught, range(len(taught)), keep=False)
        found: dict[str, dict[int, torch.Tensor]] = {}
        for part in parts:
            batch = collate_branches(part.branches, pad_id=self._pad_id, every_token=True).to(self._device)
            for name, flat in teaching.outputs(batch).items():
                found.setdefault(name, {}).update(zip(part.rows, flat.cpu().split(part.sizes), strict=True))
        return found

    def _forward_parts(self, sequences: Sequences, numbers: range, *, keep: bool) -> tuple[list[ForwardPart], bool]:
        """Micro-batches of the sequences with these numbers; and whether their graphs are kept, which takes at most two micro-batches."""
        tokens, sizes = self._job.rl.trainer.microbatch_tokens, (sequences.lengths - sequences.starts).tolist()
        groups, rows = prompt_rows(sequences.select(list(numbers)), max_tokens=tokens, shared=self.roles.shares_prompts)
        keep = keep and sum(len(row) for group in rows for row in group) <= 2 * tokens
        chosen = even_microbatches(
            [max(map(len, r)) for r in rows],
            max_tokens=tokens,
            multiple=2 if keep else self._backend.workers,
            rows=[len(r) for r in rows],
        )
        parts = []
        for part in equal_count(chosen):
            members = [numbers[k] for g in part for k in groups[g]]
            branches = [row for g in part for row in rows[g]]
            parts.append(ForwardPart(members, [sizes[i] for i in members], branches, sequences.pictures_of(members)))
        return parts, keep

    def _forward_part(
        self, part: ForwardPart, *, with_policy: bool, keep: bool, teaching: EarlyTeaching | None
    ) -> tuple[dict[str, torch.Tensor], ForwardGraphs]:
        """Outputs by name, on the CPU; and policy and critic once more, with their graphs if these are kept."""
        rl, roles, outputs, policy, values = self._job.rl, self.roles, {}, None, None
        batch = collate_branches(part.branches, pad_id=self._pad_id, every_token=True)
        batch = with_sight(batch, self._sight, part.pictures).to(self._device)
        with torch.set_grad_enabled(keep):
            if with_policy:
                arguments = policy_arguments(rl) if keep else {"temperature": rl.rollout.temperature}
                arguments["forbidden"] = roles.undrawn
                policy = roles.policy(batch, **arguments, top_k=rl.rollout.top_k, top_p=rl.rollout.top_p)
                outputs["old_logprobs"] = policy.logprobs
                if policy.sampler_logprobs is not None:
                    outputs["sampler_logprobs"] = policy.sampler_logprobs
            if roles.critic is not None:
                outputs["values"] = values = self._value_units(roles.critic(before(batch)))
        if roles.computes_reference:
            outputs["ref_logprobs"] = self._reference_logprobs(batch)
        if teaching is not None:
            outputs |= teaching.outputs(batch)
        outputs = {name: x.detach().float().cpu() if x.is_floating_point() else x.cpu() for name, x in outputs.items()}
        return outputs, ForwardGraphs(part.rows, part.sizes, policy, values)

    def _reference_logprobs(self, batch: TokenBatch) -> torch.Tensor:
        arguments = {"temperature": self._job.rl.rollout.temperature, "forbidden": self.roles.undrawn}
        if self.roles.reference is not None:
            return self.roles.reference.module(batch, **arguments).logprobs
        with without_adapters(self.roles.policy.module):
            return self.roles.policy(batch, **arguments).logprobs

    @property
    def _pad_id(self) -> int:
        return self._tokenizer.pad_token_id

    # The update

    def update(self, minibatches: list[Minibatch], *, kl_coef: float, train_policy: bool) -> RankUpdate:
        """Return one optimizer step for each minibatch; see RlUpdate."""
        graphs, self._graphs = self._graphs, []
        rl, teachers = self._job.rl, self.roles.teachers if self._job.rl.teaches_whole_distributions and train_policy else []
        with in_use([teacher.model for teacher in teachers]):
            teaching = Teaching(teachers, rl.distillation) if teachers else None
            return self._update(graphs, teaching, kl_coef=kl_coef, train_policy=train_policy).run(minibatches)

    def _update(self, graphs: list[ForwardGraphs], teaching: Teaching | None, *, kl_coef: float, train_policy: bool) -> RlUpdate:
        return RlUpdate(
            rl=self._job.rl,
            policy=self.roles.policy,
            critic=self.roles.critic,
            value_units=self._value_units,
            pad_id=self._pad_id,
            device=self._device,
            kl_coef=kl_coef,
            train_policy=train_policy and self.roles.policy is not None,
            experts_per_token=self.roles.experts_per_token,
            shares_prompts=self.roles.shares_prompts,
            sight=self._sight,
            undrawn=self.roles.undrawn,
            backend=self._backend,
            graphs=graphs,
            teaching=teaching,
        )

    def refresh_reference(self, weights: dict[str, PackedTensor] | None = None) -> None:
        """The current policy becomes the reference.

        Args:
            weights: the policy's by `policy_weights`; None: it is hosted too.
        """
        self.roles.reference.load(self.roles.policy.weights() if weights is None else unpack(weights).items())

    # Weights and state

    @torch.no_grad()
    def probe(self, ids: list[int]) -> list[float]:
        """The policy's log-probability of each token but the first, at temperature 1. A collective with ZeRO: every rank calls it."""
        batch = collate_tokens([ids], [1], pad_id=self._pad_id).to(self._device)
        return self.roles.policy(batch).logprobs.float().cpu().tolist()

    def weights(self) -> dict[str, torch.Tensor] | None:
        """Return the policy's full weights under the names of its Hugging Face folder, on rank 0; None on other ranks."""
        state = self.roles.policy.state_dict()
        return checkpoint_names(self.roles.language_model, state) if self._rank == 0 else None

    @torch.no_grad()
    def send_weights(self, targets: list[Target], *, version: int, ids: list[int], engines_probe: bool = True, kept: bool = False) -> Sent:
        """Send the policy's weights to rollout engines. Every rank calls it; rank 0 sends.

        Args:
            ids: of the probe.
            engines_probe: engines compute the probe too.
            kept: send what was sent last, of which a copy is kept where rollouts are ahead.
        """
        sends, by_ipc = self._rank == 0, any(target.backend == "ipc" for target in targets)
        source = self._kept if kept else self._source
        specs = source.specs
        transfer = self._sender.begin(targets, source, version=version, ids=ids if engines_probe else []) if sends else None
        if not kept:
            self._kept = KeptSource(source)
        keeps = sends and not kept and self._job.rl.rollout.max_lag > 0
        shared = self._shared_buffer(specs) if by_ipc else None
        for layer in source.layers(needed=sends or by_ipc):
            update = None
            if shared is not None and layer:
                update = shared.fill(layer, before=transfer and transfer.flush)
            if transfer is not None:
                transfer.send(layer, update)
            if keeps:
                self._kept.keep(layer)
        if transfer is not None:
            transfer.flush()
        probe = self.probe(ids)
        if transfer is None:
            return Sent()
        answers, lost = transfer.answers()
        self._sender.forget(lost)
        return Sent(probe, answers, lost, transfer.traffic)

    def _shared_buffer(self, specs: list[list[TensorSpec]]) -> IpcBuffer:
        from rlhf_core.engines.transfer.gpu import IpcBuffer

        if self._shared is None:
            self._shared = IpcBuffer(specs)
        self._shared.export()
        return self._shared

    def _engine_names(self, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Weights under the names by which rollout engines know them: those of the Hugging Face folder, or for PyTorch's engine, which has
        the same model, the model's own.
        """
        model = self.roles.language_model
        if self._job.rl.rollout.backend == "pytorch":
            return {name: tensor for name, tensor in weights.items() if name not in model.all_tied_weights_keys}
        return checkpoint_names(model, weights)

    def policy_weights(self) -> dict[str, PackedTensor] | None:
        """Return the policy's full weights under the model's own names, packed for a reference elsewhere; None on ranks other than 0."""
        state, tied = self.roles.policy.state_dict(), self.roles.language_model.all_tied_weights_keys
        return pack({name: tensor for name, tensor in state.items() if name not in tied}) if self._rank == 0 else None

    def export(self, folder: str) -> None:
        """Write the policy as a Hugging Face folder; with rl.ema_decay the average of its weights."""
        with self.roles.policy.averaged():
            state = self.roles.policy.state_dict()
        if self._rank == 0:
            save_model(self.roles.language_model, state, self._tokenizer, Path(folder))
            if (work := job_storage()) is not None:
                work.push(POLICY, [Path(folder)])

    def save(self, folder: str, part: int | None = None) -> None:
        """Write the state that training resumes from. Every rank calls it.

        Args:
            part: the number of this rank's part in the checkpoint, whose hashes it begins to compute; None: the driver hashes all.
        """
        Path(folder).mkdir(parents=True, exist_ok=True)  # another node's, where ranks share no disk
        names = self.roles.save(Path(folder), self._rank)
        if part is not None:
            save_part(Path(folder), self._rank, names, part=part)

    def damage(self, folder: str, part: int = 0, parts: int = 1) -> str | None:
        """What is wrong with this rank's share of a checkpoint's files, or None."""
        return check_checkpoint(Path(folder), rank=part, ranks=parts)

    def load(self, folder: str, universal: str | None = None) -> None:
        """Load what `save` wrote; see `HostedRoles.load`."""
        if universal is not None:
            download_folder(Path(universal))
        self.roles.load(Path(folder), self._rank, None if universal is None else Path(universal))

    def convert(self, folder: str, universal: str) -> None:
        """See `HostedRoles.convert`."""
        self.roles.convert(Path(folder), Path(universal), self._rank)
        if self._rank == 0:
            upload_folder(Path(universal))
