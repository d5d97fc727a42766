"""Evaluation and report, and the sections that change no result: checkpoints, cluster, tracking, flow and promotion."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rlhf_core.config.base import Section


class EvaluationConfig(Section):
    prompts: int = Field(gt=0)
    max_new_tokens: int = Field(gt=0)
    temperature: float = Field(gt=0)
    confidence: float = Field(gt=0, lt=1)
    table_rows: int = Field(default=40, gt=0)
    gpu_memory_fraction: float = Field(default=0.5, gt=0, lt=1)


class ReportConfig(Section):
    title: str


class CheckpointsConfig(Section):
    """Checkpoints of unfinished training, in scratch/.

    keep_best: further checkpoints, the best by the held-out loss, in rl by rl.evaluation.metric.
    keep_abandoned: scratch folders of unfinished work whose params, data or code have changed since.
    resume_from: `<stage>/<name of a scratch folder>`, whose checkpoint the stage resumes from.
    """

    keep_last: int = Field(ge=2)
    keep_best: int = Field(default=0, ge=0)
    keep_abandoned: int = Field(default=2, ge=0)
    resume_from: str | None = Field(pattern=r"^train_\w+(@\d+)?/[0-9a-f]{16}$")


class ClusterConfig(Section):
    """The Ray cluster of an RL job.

    start_timeout: seconds. silence_timeout: seconds without a sign of life after which Ray's head or the RL job's driver counts as lost.
    """

    address: str | None
    start_timeout: float = Field(default=120.0, gt=0)
    silence_timeout: float = Field(default=60.0, gt=0)
    threads: int = Field(gt=0)


class TrackingConfig(Section):
    tensorboard_dir: str | None
    wandb_project: str | None


class FlowConfig(Section):
    """How the flow runs stages.

    retry_delay, stage_timeout: seconds.
    stop_grace: seconds from SIGTERM to SIGKILL of a stage, for its checkpoint; a supervisor must give the flow 5 more.
    environment: names of variables that stages see beside those of rlhf_core/environment.py.
    """

    retries: int = Field(ge=0)
    retry_delay: float = Field(default=5.0, ge=0)
    stage_timeout: float = Field(default=86_400.0, gt=0)
    stop_grace: float = Field(ge=10)
    environment: list[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]] = Field(default_factory=list)


class RegistryConfig(Section):
    """Promotion of a version in the model registry by the flow `promote`.

    approval_timeout: seconds. allowed_signers: file of the people whose signed tags count; None: tags need no signature.
    """

    require_approval: bool
    approval_timeout: int = Field(gt=0)
    allowed_signers: str | None = Field(min_length=1)
