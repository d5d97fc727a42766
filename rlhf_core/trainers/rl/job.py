"""What the driver and the actors of an RL job need to know of the stage."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from rlhf_core.checkpoint.settings import StoreSettings
from rlhf_core.config import ModelConfig, RlConfig, Section

POLICY = "policy"  # in the storage, if there is one: the set of the exported policy's files
PLACEMENT = "placement.json"  # in the job's folder: shares of the cluster's GPUs, and what `auto` of rl.rollout has become


class RlJob(Section):
    """What RL's loop and actors know of the stage: the argument of the stage's `Job`.

    Paths are absolute, on a file system that every node sees; with a storage, those of each node's copy of the project's folder.

    prepared: folder of the canonical data.
    train_on, train_on_thoughts: of the section sft, for rl.ptx.
    rl: its `steps` are a number.
    sft_model: the initial policy and the reference.
    reward_model: the critic's initial model; None where it starts from the SFT model, or there is no critic.
    scorer_models: scorer's name -> folder, of each scorer of kind reward_model.
    teacher_models: folder of each teacher of rl.distillation that has one.
    source_judges: data source -> judge's name, of each source with a judge.
    work: folder of checkpoints and curves.    checkpoints: which checkpoints are kept and resumed from.
    output: the final policy's folder.
    timings: CSV file of seconds per phase; beside it is where the processes ran (paths.py: processes_file).
    """

    seed: int
    model: ModelConfig
    train_on: Literal["last_turn", "all_turns"]
    train_on_thoughts: bool
    rl: RlConfig
    threads: int
    prepared: str
    sft_model: str
    reward_model: str | None
    scorer_models: dict[str, str]
    teacher_models: list[str] = Field(default_factory=list)
    source_judges: dict[str, str]
    work: str
    checkpoints: StoreSettings
    output: str
    timings: str

    @property
    def load_options(self) -> dict[str, Any]:
        """Arguments that load the policy, or its tokenizer."""
        return {"trust_remote_code": self.model.trust_remote_code, "vision": self.model.vision}

    @model_validator(mode="after")
    def _models_are_named(self):
        if self.rl.steps is None:
            raise ValueError("rl.steps: expected the number of steps of rl.epochs, got null; see RlConfig.over_prompts")
        wanted = sorted(s.name for s in self.rl.reward.scorers if s.kind == "reward_model")
        if sorted(self.scorer_models) != wanted:
            raise ValueError(f"scorer_models: expected a folder for each of {wanted}, got {sorted(self.scorer_models)}; name each scorer's")
        teachers = [] if self.rl.distillation is None else [t for t in self.rl.distillation.teachers if t.path is not None]
        if len(self.teacher_models) != len(teachers):
            raise ValueError(f"teacher_models: expected {len(teachers)} folders, got {len(self.teacher_models)}; name each teacher's")
        if self.reward_model is None and self.rl.critic_starts_from_reward_model:
            raise ValueError("reward_model: expected a folder for the critic to start from, got none; set it or critic_init")
        return self
