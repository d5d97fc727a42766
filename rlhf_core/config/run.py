"""Settings of evaluation and report, and sections that change no result: checkpoints, cluster, tracking, flow and promotion."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field

from rlhf_core.config.base import RolloutBackend, Section, StopStrings, shown
from rlhf_core.config.scorers import ScorerConfig, name_conflicts


class HarnessConfig(Section):
    """Tasks of lm-evaluation-harness, on which the SFT model and the policy are compared.

    tasks: names of tasks, groups or tags. num_fewshot: examples before each question; None: as each task says.
    limit: documents of each task. include_path: folder with further tasks, in YAML.
    chat_template: requests are conversations in the model's template, with the examples as earlier turns.
    max_length: tokens of a request and its answer together; None: model.max_length.
    """

    tasks: list[Annotated[str, Field(min_length=1)]] = Field(min_length=1)
    num_fewshot: int | None = Field(default=None, ge=0)
    limit: int | None = Field(default=None, ge=1)
    include_path: str | None = Field(default=None, min_length=1)
    chat_template: bool = False
    max_length: int | None = Field(default=None, ge=2)

    def conflicts(self) -> Iterator[str]:
        if twice := sorted({name for name in self.tasks if self.tasks.count(name) > 1}):
            yield f"tasks: expected each name once, got {', '.join(map(shown, twice))} several times; remove the others"


class EvaluationConfig(Section):
    """Settings of the evaluation.

    harness: null: no tasks of lm-evaluation-harness.
    scorers, backend, stop: null: as in RL (`Params.evaluation_scorers`, `evaluation_backend`, `evaluation_stop`).
    """

    scorers: list[ScorerConfig] | None
    backend: RolloutBackend | None
    stop: StopStrings | None
    harness: HarnessConfig | None
    prompts: int = Field(gt=0)  # test prompts that both models answer
    max_new_tokens: int = Field(gt=0)  # of an answer, which is cut off there
    temperature: float = Field(gt=0)  # of the sampled answers; each prompt has a greedy one too
    confidence: float = Field(gt=0, lt=1)  # of the intervals in evaluation and report
    table_rows: int = Field(default=40, gt=0)  # prompts whose answers the report shows
    gpu_memory_fraction: float = Field(default=0.5, gt=0, lt=1)  # of a GPU, for vLLM's weights and cache

    def conflicts(self) -> Iterator[str]:
        yield from name_conflicts(self.scorers or [])


class ReportConfig(Section):
    title: str  # of the report


class CheckpointsConfig(Section):
    """Settings of the checkpoints of unfinished training, in scratch/.

    keep_best: further checkpoints, the best by the held-out loss, in rl by rl.evaluation.metric.
    keep_abandoned: scratch folders of unfinished work whose params, data or code have changed since.
    resume_from: `<stage>/<name of a scratch folder>`, whose checkpoint the stage resumes from.
    save_timeout: seconds until a checkpoint must be written by all ranks, and as many again until it must be on the disk.
    """

    keep_last: int = Field(ge=2)
    keep_best: int = Field(default=0, ge=0)
    keep_abandoned: int = Field(default=2, ge=0)
    resume_from: str | None = Field(pattern=r"^train_\w+(@\d+)?/[0-9a-f]{16}$")
    save_timeout: float = Field(default=1800.0, gt=0)


class ClusterConfig(Section):
    """Settings of the Ray cluster for RL and every stage on several ranks.

    address: of Ray's dashboard, such as http://127.0.0.1:8265; null: a job starts a Ray head of its own on this machine.
    start_timeout: seconds. silence_timeout: seconds without a sign of life after which Ray's head or a job's driver counts as lost.
    rank_timeout: seconds that a rank waits for the others, at the start, in a step, for a checkpoint or for their share of samples.
    inference_ranks: processes, with a GPU each where there are some, among which gate, evaluation, rejection sampling, rounds and
        conditional SFT divide what they sample and score.
    inference_ranks_per_model: so many consecutive ones of them, on one node, hold a policy together: a vLLM engine over their GPUs, and for
        log-probabilities a part of the weights each.
    network_interface: of the connections between ranks, for NCCL and gloo; null: NCCL chooses one, and gloo that of the node's address.
    storage: address through which inputs, checkpoints and outputs travel, such as s3://bucket/prefix; null: a folder that all nodes
        see at the same path has the project. A local folder must exist on every node. storage_timeout: seconds for a transfer.
    node_folder, node_gib: where a node keeps what it has fetched (null: its folder for temporary files), and how much of it.
    """

    address: str | None
    start_timeout: float = Field(default=120.0, gt=0)
    silence_timeout: float = Field(default=60.0, gt=0)
    rank_timeout: float = Field(default=1800.0, ge=1)
    network_interface: str | None = Field(default=None, pattern=r"^[\w.:@-]+$")
    storage: str | None = Field(default=None, pattern=r"^[a-z][a-z0-9+.-]*://\S+$")
    storage_timeout: float = Field(default=1800.0, ge=1)
    node_folder: str | None = Field(default=None, pattern=r"^/")
    node_gib: float = Field(default=200.0, gt=0)
    threads: int = Field(gt=0)
    inference_ranks: int = Field(default=1, ge=1)
    inference_ranks_per_model: int = Field(default=1, ge=1)

    def conflicts(self) -> Iterator[str]:
        if self.address is not None and not _is_web_address(self.address):
            yield (
                f"address: expected http://HOST:PORT or https://HOST:PORT of Ray's dashboard, such as http://127.0.0.1:8265, got "
                f"{shown(self.address)}; correct it, or set it to null to run jobs on this machine"
            )
        if self.inference_ranks % self.inference_ranks_per_model:
            yield (
                f"inference_ranks: expected a multiple of inference_ranks_per_model={self.inference_ranks_per_model}, got "
                f"{self.inference_ranks}; change one of them"
            )
        if self.storage is not None and self.address is None:
            yield f"storage: expected null with address: null, which runs jobs on this machine, got {self.storage}; set address"


def _is_web_address(text: str) -> bool:
    try:
        found = urlsplit(text)
        return found.scheme in ("http", "https") and bool(found.hostname) and found.port != 0 and not any(map(str.isspace, text))
    except ValueError:  # such as a port that is no number
        return False


class TrackingConfig(Section):
    """Settings of the trackers (flows/trackers).

    mlflow_uri: of a server or a database, such as http://127.0.0.1:5000 or sqlite:///mlflow.db.
    texts: whether samples and the report, which have prompts and answers, are sent too.
    """

    tensorboard_dir: str | None = Field(min_length=1)  # folder for TensorBoard's curves; null: none
    wandb_project: str | None = Field(min_length=1)  # project of Weights & Biases; null: none
    mlflow_uri: str | None = Field(default=None, min_length=1)
    texts: bool = True


class FlowConfig(Section):
    """Settings with which the flow runs stages.

    retry_delay, stage_timeout: seconds.
    stop_grace: seconds from SIGTERM to SIGKILL of a stage, for its checkpoint; a supervisor must give the flow 5 more.
    environment: names of variables that stages see in addition to those of rlhf_core/environment.py.
    preflight: what a stage does that needs more memory than there is (rlhf_core/planning/preflight.py); off: it isn't checked.
    """

    retries: int = Field(ge=0)
    retry_delay: float = Field(default=5.0, ge=0)
    stage_timeout: float = Field(default=86_400.0, gt=0)
    stop_grace: float = Field(ge=10)
    preflight: Literal["refuse", "warn", "off"] = "refuse"
    environment: list[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]] = Field(default_factory=list)


class RegistryConfig(Section):
    """Settings of promotion in the model registry, by the flow `promote`.

    approval_timeout: seconds. allowed_signers: file of the people whose signed tags count; None: tags need no signature.
    """

    require_approval: bool
    approval_timeout: int = Field(gt=0)
    allowed_signers: str | None = Field(min_length=1)
