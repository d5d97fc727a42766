"""The description of an RL job, a JSON file that driver and actors read, and the driver's stop signal."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pydantic import model_validator

from rlhf_core.checkpoint.store import StoreSettings
from rlhf_core.config import ModelConfig, RlConfig, Section, TrackingConfig
from rlhf_core.stage.job import pulse_file

POLICY = "policy"  # in the storage, if there is one: the set of the exported policy's files
PLACEMENT = "placement.json"  # in the job's folder: shares of the cluster's GPUs, and what `auto` of rl.rollout has become


class RlJob(Section):
    """Paths are absolute, on a file system that every node sees; with a storage, those of each node's copy of the project's folder.

    prepared: folder of the canonical data.
    train_on, train_on_thoughts: of the section sft, for rl.ptx.
    rl: its `steps` are a number.
    sft_model: the initial policy and the reference.
    reward_model: the critic's initial model; None where it starts from the SFT model, or there is no critic.
    scorer_models: scorer's name -> folder, of each scorer of kind reward_model.
    source_judges: data source -> judge's name, of each source with a judge.
    work: folder of checkpoints and curves.    checkpoints: which checkpoints are kept and resumed from.
    output: the final policy's folder.
    timings: CSV file of seconds per phase; beside it is where the processes ran (paths.py: processes_file).
    checks_cluster: the driver checks that the models fit the cluster's memory; False: the stage has.
    """

    seed: int
    model: ModelConfig
    train_on: Literal["last_turn", "all_turns"]
    train_on_thoughts: bool
    rl: RlConfig
    tracking: TrackingConfig
    threads: int
    run_name: str
    prepared: str
    sft_model: str
    reward_model: str | None
    scorer_models: dict[str, str]
    source_judges: dict[str, str]
    work: str
    checkpoints: StoreSettings
    output: str
    timings: str
    checks_cluster: bool = False

    @model_validator(mode="after")
    def _models_are_named(self):
        if self.rl.steps is None:
            raise ValueError("rl.steps: expected the number of steps of rl.epochs, got null; see RlConfig.over_prompts")
        wanted = sorted(s.name for s in self.rl.reward.scorers if s.kind == "reward_model")
        if sorted(self.scorer_models) != wanted:
            raise ValueError(f"scorer_models: expected a folder for each of {wanted}, got {sorted(self.scorer_models)}; name each scorer's")
        if self.reward_model is None and self.rl.critic_starts_from_reward_model:
            raise ValueError("reward_model: expected a folder for the critic to start from, got none; set it or critic_init")
        return self

    @property
    def pulse(self) -> Path:
        """File of the driver's heartbeat."""
        return pulse_file(Path(self.work))

    def write(self, path: Path) -> None:
        path.write_text(self.model_dump_json(indent=1), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> RlJob:
        return cls.model_validate_json(path.read_text(encoding="utf-8"))


class StepAbandoned(Exception):
    """SIGTERM arrived before the step, or the start of the actors, had changed any state."""


class Stop:
    """SIGTERM's handler. While actors start or rollouts are collected, SIGTERM ends that at once; otherwise the step is completed first."""

    def __init__(self):
        self._requested = self._interruptible = False

    def request(self, *_: object) -> None:
        """The signal handler."""
        self._requested = True
        if self._interruptible:
            self._interruptible = False
            raise StepAbandoned

    def is_set(self) -> bool:
        return self._requested

    @contextlib.contextmanager
    def interrupts(self) -> Iterator[None]:
        """A block that SIGTERM abandons.

        Raises:
            StepAbandoned: SIGTERM arrived, now or before.
        """
        if self._requested:
            raise StepAbandoned
        self._interruptible = True
        try:
            yield
        except KeyboardInterrupt:  # what Ray makes of an exception that a handler raises within a call into Ray
            raise (StepAbandoned if self._requested else KeyboardInterrupt) from None
        finally:
            self._interruptible = False
