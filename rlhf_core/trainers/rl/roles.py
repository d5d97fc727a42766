"""The models of a trainer rank by role: policy and critic are trained, reference and reward models are frozen."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_core.algorithms.schedules import learning_rate_factor
from rlhf_core.checkpoint.saving import without_crc32
from rlhf_core.config import RlConfig
from rlhf_core.engines.deepspeed.engine import EngineSettings, TrainEngine, device
from rlhf_core.engines.deepspeed.frozen import FrozenModel
from rlhf_core.engines.deepspeed.universal import convert_engines, load_converted
from rlhf_core.engines.memory.offload import Stays
from rlhf_core.models.build import load_language_model, load_scalar_model, new_scalar_model, scalar_head
from rlhf_core.models.forward import PolicyModule, ScalarModule
from rlhf_core.models.lora import add_adapters
from rlhf_core.models.probe import shares_prefixes
from rlhf_core.models.vision import freeze_vision, undrawn_ids
from rlhf_core.scorers.reward.members import member_folders
from rlhf_core.scorers.reward.model import load_member
from rlhf_core.trainers.rl.job import RlJob
from rlhf_core.trainers.rl.teachers import Teacher
from rlhf_core.trainers.supervised.loop import load_random_state, random_state_of, save_random_state

REFERENCE = "reference.pt"  # in a checkpoint


class HostedRoles:
    """Every rank of the process group builds the same roles at the same time.

    language_model: the policy's, before it is wrapped. policy, critic, reference: None where they aren't hosted.
    computes_reference: whether the reference is hosted; with adapters it may be the policy without them, and `reference` is None.
    scorers: scorer's name -> the members of its reward model.
    teachers: of rl.distillation, with their shares of all weights.
    experts_per_token: of a policy with experts whose load is balanced; None: no load balancing.
    undrawn: tokens that a policy that sees never draws.
    shares_prompts: a prompt's samples are computed together.
    """

    def __init__(self, hosted: Collection[str], job: RlJob, tokenizer: PreTrainedTokenizerBase):
        self._job, rl = job, job.rl
        self.language_model: PreTrainedModel | None = None
        self.policy: TrainEngine | None = None
        self.critic: TrainEngine | None = None
        self.reference: FrozenModel | None = None
        self.experts_per_token: int | None = None
        self.undrawn: tuple[int, ...] = ()
        self._sharing: list[bool] = []
        load_options = {**job.load_options, "training_dtype": job.model.dtype}
        scalar_options = {name: value for name, value in load_options.items() if name != "vision"}
        self.computes_reference = "reference" in hosted
        if "policy" in hosted:
            self.language_model = load_language_model(job.sft_model, **load_options)
            self._inspect(self.language_model)
            add_adapters(self.language_model, rl.lora, seed=job.seed)
            settings = engine_settings(job, rl.learning_rate, steps=rl.policy_steps, ema_decay=rl.ema_decay)
            self.policy = TrainEngine(PolicyModule(self.language_model), settings)
        if "critic" in hosted:
            critic = ScalarModule(initial_critic(job, tokenizer, scalar_options))
            remedy = "set it to sft, or rl.algorithm to one without a critic, such as rloo"
            critic.check_scores_tokens(f"rl.{rl.algorithm}.critic_init {rl.critic.critic_init}", remedy)
            self.critic = TrainEngine(critic, engine_settings(job, rl.critic.critic_learning_rate, steps=rl.optimizer_steps))
        # With adapters, the policy without them is the SFT model: no second copy is needed, unless the reference is refreshed.
        if self.computes_reference and (rl.lora is None or self._reference_moves or self.policy is None):
            reference = load_language_model(job.sft_model, **load_options)
            if self.policy is None:
                self._inspect(reference)
            self.reference = self._frozen(PolicyModule(reference))
            if rl.starts_rounded and self.policy is not None:
                self.reference.load(self.policy.weights())
        self.scorers = self._reward_models(scalar_options) if "reward_models" in hosted else {}
        self.teachers = self._load_teachers(load_options) if "teachers" in hosted else []

    def _inspect(self, model: PreTrainedModel) -> None:
        self.experts_per_token = balanced_experts(model, self._job.rl.moe_aux_coef)
        self.undrawn = () if self._job.model.vision is None else undrawn_ids(model.config)
        self._note_sharing(model)

    def _note_sharing(self, model: PreTrainedModel) -> None:
        """A prompt's samples are computed together if every model of this rank can."""
        rl = self._job.rl
        # A critic sees every sequence of its own, and the load of experts counts every sample.
        groups = rl.group_size > 1 and rl.critic is None and not rl.moe_aux_coef and self._job.model.vision is None
        self._sharing.append(groups and shares_prefixes(model, device=device(), max_length=self._job.model.max_length))

    @property
    def shares_prompts(self) -> bool:
        return bool(self._sharing) and all(self._sharing)

    def _load_teachers(self, load_options: dict[str, Any]) -> list[Teacher]:
        configs, found = self._job.rl.distillation.teachers, []
        here = [config for config in configs if config.path is not None]
        for config, folder in zip(here, self._job.teacher_models, strict=True):
            model = load_language_model(folder, **load_options)
            self._note_sharing(model)
            found.append(Teacher(self._frozen(PolicyModule(model)), config.weight / sum(c.weight for c in configs)))
        return found

    def _reward_models(self, load_options: dict[str, Any]) -> dict[str, list[FrozenModel]]:
        configs = {s.name: s for s in self._job.rl.reward.scorers}
        return {
            name: [
                self._frozen(load_member(folder, configs[name].label, **load_options))
                for folder in member_folders(Path(path))[: configs[name].members]
            ]
            for name, path in self._job.scorer_models.items()
        }

    def _frozen(self, module: torch.nn.Module) -> FrozenModel:
        trainer = self._job.rl.trainer
        return FrozenModel(module, dtype=self._job.model.dtype, zero_stage=trainer.zero_stage, offload=trainer.offload_frozen)

    def keep(self, stays: Stays) -> None:
        """Keep all, the policy's weights or nothing on the device, and the rest on the host."""
        for engine in self.learning.values():
            engine.keep(stays if engine is self.policy or stays == "all" else "nothing")
        for model in self.frozen:
            model.keep("all" if stays == "all" else "nothing")

    @property
    def frozen(self) -> list[FrozenModel]:
        reference = [] if self.reference is None else [self.reference]
        teachers = (teacher.model for teacher in self.teachers)
        return [*reference, *(member for members in self.scorers.values() for member in members), *teachers]

    @property
    def learning(self) -> dict[str, TrainEngine]:
        return {name: engine for name, engine in (("policy", self.policy), ("critic", self.critic)) if engine is not None}

    @property
    def _reference_moves(self) -> bool:
        return self.computes_reference and self._job.rl.kl.refresh_reference_every is not None

    # State

    def save(self, folder: Path, rank: int) -> list[str]:
        """Write the state that training resumes from. Returns the names of this rank's files and folders."""
        for name, engine in self.learning.items():
            engine.save(folder, name)
        names = [*self.learning]
        if self._reference_moves:
            reference = self.reference.state_dict()
            if rank == 0:
                with without_crc32():
                    torch.save(reference, folder / REFERENCE)
                names.append(REFERENCE)
        if self.learning:
            save_random_state(folder / f"{self._generators}-{rank}.pt")
            names.append(f"{self._generators}-{rank}.pt")
        return names

    def load(self, folder: Path, rank: int, universal: Path | None = None) -> None:
        """Load what `save` wrote.

        Args:
            universal: of `convert`, for a checkpoint of another number of ranks. A rank without saved generators takes those of rank 0.
        """
        for name, engine in self.learning.items():
            if universal is None:
                engine.load(folder, name)
            else:
                load_converted(engine, folder, name, universal)
        if self._reference_moves and (folder / REFERENCE).exists():  # without it the reference has been the SFT model so far
            self.reference.load(torch.load(folder / REFERENCE, map_location="cpu", mmap=True, weights_only=True).items())
        if self.learning:
            load_random_state(random_state_of(folder, rank, self._generators))

    def convert(self, folder: Path, universal: Path, rank: int) -> None:
        """Convert the checkpoint of another number of ranks, on rank 0, to one that any number of ranks can load."""
        for engine in self.learning.values():
            engine.check_redistributable()
        if rank == 0:
            convert_engines(folder, self.learning, universal)

    @property
    def _generators(self) -> str:
        """The name of the files with the random generators, which is that of the policy where there is one."""
        return "rng" if self.policy is not None else "rng-critic"


def engine_settings(job: RlJob, learning_rate: float, *, steps: int, ema_decay: float | None = None) -> EngineSettings:
    """Return how a model of the job is trained.

    Args:
        steps: optimizer steps of the whole run.
    """
    rl: RlConfig = job.rl
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
        dtype=job.model.dtype,
        seed=job.seed,
        disable_dropout=True,  # ratio, KL and the engines' log-probabilities are those of the model without dropout
    )


def initial_critic(job: RlJob, tokenizer: PreTrainedTokenizerBase, load_options: dict[str, Any]) -> PreTrainedModel:
    """Return the critic by critic_init; the weights of a new head are 0.

    Args:
        tokenizer: of the policy.
        load_options: arguments of the loaders.
    """
    init = job.rl.critic.critic_init
    if init == "reward_model":
        model = load_scalar_model(job.reward_model, **load_options)
    else:
        model = new_scalar_model(Path(job.sft_model if init == "sft" else job.reward_model), tokenizer, **load_options)
        if (bias := scalar_head(model).bias) is not None:
            torch.nn.init.zeros_(bias)
    if job.model.vision == "frozen":
        freeze_vision(model)
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
