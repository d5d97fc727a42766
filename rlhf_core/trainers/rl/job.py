"""The description of an RL job: all that the Ray job's driver and its actors need to know, as one JSON file."""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pydantic import model_validator

from rlhf_core.checkpoint.store import StoreSettings
from rlhf_core.config import ModelConfig, RlConfig, Section, TrackingConfig

log = logging.getLogger("rlhf")

# The job's exit codes. Any other is a crash, worth another try.
REFUSED = 65  # the same again would end the same; EX_DATAERR of sysexits.h
LOST = 75  # an actor that can't be replaced died or is late; the same again goes on from the last checkpoint. EX_TEMPFAIL of sysexits.h
FULL = 74  # no room for a checkpoint; EX_IOERR
STOPPED = 143  # after SIGTERM, the checkpoint written
BEAT_SECONDS = 2.0
PLACEMENT = "placement.json"  # in the job's folder, where the cluster has GPUs


class RlJob(Section):
    """Paths are absolute; on a cluster they are on a file system that every node sees.

    prepared: folder of the canonical data. train_on, train_on_thoughts: of the section sft, for rl.ptx. sft_model: where the policy starts
    and what the reference is. reward_model: where PPO's critic starts, or None where it starts elsewhere. scorer_models: the folder of
    each scorer of kind reward_model, by name. source_judges: of each data source that has a judge, the judge's name. work: checkpoints
    and curves. checkpoints: which of them stay, and are gone on from. output: the final policy's folder.
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

    @model_validator(mode="after")
    def _models_are_named(self):
        wanted = sorted(s.name for s in self.rl.reward.scorers if s.kind == "reward_model")
        if sorted(self.scorer_models) != wanted:
            raise ValueError(f"scorer_models: expected a folder for each of {wanted}, got {sorted(self.scorer_models)}; name each scorer's")
        if self.reward_model is None and self.rl.algorithm == "ppo" and self.rl.ppo.starts_from_reward_model:
            raise ValueError("reward_model: expected a folder for the critic to start from, got none; set it or rl.ppo.critic_init")
        return self

    @property
    def pulse(self) -> Path:
        """The file by which the driver shows that it lives."""
        return Path(self.work) / "pulse"

    def write(self, path: Path) -> None:
        path.write_text(self.model_dump_json(indent=1), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> RlJob:
        return cls.model_validate_json(path.read_text(encoding="utf-8"))


def refuse(job: RlJob, error: Exception) -> int:
    """Log why the job can't be done, and leave it for the stage, which tells it last. Returns the exit code."""
    log.error("%s", error)
    with contextlib.suppress(OSError):  # the log has it
        _refusal_file(job).write_text(" ".join(str(error).split()), encoding="utf-8")
    return REFUSED


def forget_refusal(job: RlJob) -> None:
    """Of a driver before this one."""
    with contextlib.suppress(OSError):
        _refusal_file(job).unlink(missing_ok=True)


def refusal_of(job: RlJob) -> str:
    """Why a driver that ended with REFUSED did so, on one line."""
    with contextlib.suppress(OSError):
        if told := _refusal_file(job).read_text(encoding="utf-8"):
            return told
    return "expected to be able to train, got a refusal in its output; change what that names"


def _refusal_file(job: RlJob) -> Path:
    return Path(job.work) / "refusal.txt"


@contextlib.contextmanager
def beat(path: Path) -> Iterator[None]:
    """Change a file every BEAT_SECONDS, from a thread: a driver that waits goes on with it, one that is stopped or gone doesn't."""
    done = threading.Event()

    def run() -> None:
        for count in itertools.count():
            with contextlib.suppress(OSError):  # a full disk is for others to complain about
                path.write_text(str(count))
            if done.wait(BEAT_SECONDS):
                return

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


class StepAbandoned(Exception):
    """A stop was asked for while a step had changed nothing yet."""


class Stop:
    """Handles SIGTERM."""

    def __init__(self):
        self._asked = self._interruptible = False

    def ask(self, *_: object) -> None:
        """The signal's handler."""
        self._asked = True
        if self._interruptible:
            self._interruptible = False
            raise StepAbandoned

    def is_set(self) -> bool:
        return self._asked

    @contextlib.contextmanager
    def interrupts(self) -> Iterator[None]:
        """What happens in here is given up when a stop is asked for, or was.

        Raises:
            StepAbandoned: it was.
        """
        if self._asked:
            raise StepAbandoned
        self._interruptible = True
        try:
            yield
        except KeyboardInterrupt:  # what becomes of an exception that a handler raises within a call into Ray
            raise (StepAbandoned if self._asked else KeyboardInterrupt) from None
        finally:
            self._interruptible = False
