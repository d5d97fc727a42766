"""Evaluation, report, and what changes no result: checkpoints, cluster, tracking, flow and promotion."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rlhf_core.config.base import Section


class EvaluationConfig(Section):
    prompts: int = Field(gt=0)
    max_new_tokens: int = Field(gt=0)
    temperature: float = Field(gt=0)
    confidence: float = Field(gt=0, lt=1)
    table_rows: int = Field(gt=0)
    gpu_memory_fraction: float = Field(gt=0, lt=1)


class ReportConfig(Section):
    title: str


class CheckpointsConfig(Section):
    """Of the step checkpoints in scratch/; resume_from is `<stage>/<name of a scratch folder>`."""

    keep_last: int = Field(ge=2)
    keep_best: int = Field(ge=0)
    keep_abandoned: int = Field(ge=0)
    resume_from: str | None = Field(pattern=r"^train_\w+(@\d+)?/[0-9a-f]{16}$")


class ClusterConfig(Section):
    address: str | None
    start_timeout: float = Field(gt=0)
    silence_timeout: float = Field(gt=0)
    threads: int = Field(gt=0)


class TrackingConfig(Section):
    tensorboard_dir: str | None
    wandb_project: str | None


class FlowConfig(Section):
    """stop_grace: seconds that a stage has for its checkpoint when it is told to stop; whoever runs flows must give them 5 more.

    environment: names of variables that stages see beside those of rlhf_core/environment.py.
    """

    retries: int = Field(ge=0)
    retry_delay: float = Field(ge=0)
    stage_timeout: float = Field(gt=0)
    stop_grace: float = Field(ge=10)
    environment: list[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]] = Field(default_factory=list)


class RegistryConfig(Section):
    """Promotion of a version in the registry of models: approval by the flow `promote`, approval_timeout in seconds; allowed_signers: the
    file of those whose signed tags count, None: tags need no signature.
    """

    require_approval: bool
    approval_timeout: int = Field(gt=0)
    allowed_signers: str | None = Field(min_length=1)
