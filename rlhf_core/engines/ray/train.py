"""Ranks by Ray Train: one process for each rank, placed together, with torch's process group between them.

Ray chooses nodes, devices, addresses and ports, and sets RANK, LOCAL_RANK and WORLD_SIZE.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray.exceptions import RayError
from ray.train import FailureConfig, LoggingConfig, RunConfig, ScalingConfig, TrainingFailedError, WorkerGroupError
from ray.train.torch import TorchConfig, TorchTrainer
from ray.train.torch.config import _TorchBackend

from rlhf_core.engines.ray.places import use_node_interface
from rlhf_core.environment import passed_on
from rlhf_core.process import STOPPED_BY_SIGNAL, beside, collect_rarely
from rlhf_core.storage.board import Board, open_board
from rlhf_core.storage.node import enter, job_storage

POLL_SECONDS = 0.5
PEER_SECONDS = 5.0  # that a rank waits with an error of communication, which a peer's death causes, until that death is known
START_MISSED = 75  # exit code of a driver whose ranks don't start; EX_TEMPFAIL of sysexits.h
# Parts of Ray Train: a working folder, metrics, a replacement of `print`, log files, and actors that look for reclaimed nodes and state.
_SWITCHED_OFF = (
    "RAY_CHDIR_TO_TRIAL_DIR",
    "RAY_TRAIN_METRICS_ENABLED",
    "RAY_TRAIN_ENABLE_PRINT_PATCH",
    "RAY_TRAIN_ENABLE_WORKER_STRUCTURED_LOGGING",
    "RAY_TRAIN_ENABLE_CONTROLLER_STRUCTURED_LOGGING",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER",
    "RAY_TRAIN_ENABLE_STATE_ACTOR_RECONCILIATION",
)

log = logging.getLogger("rlhf")


class RankFailed(RuntimeError):
    """A rank raised an error or died; the message names it.

    cause, traceback: of the rank's own exception; None and empty: its process is gone, or it never started.
    """

    def __init__(self, message: str, cause: BaseException | None = None, traceback: str = ""):
        super().__init__(message)
        self.cause, self.traceback = cause, traceback


@dataclass(frozen=True)
class RankGroup:
    """Which ranks are started, and how long they may take.

    gpus: whether each rank gets a GPU; without, each gets a CPU.
    threads: OMP_NUM_THREADS of each rank.
    folder: for files of the ranks; on a file system that every node sees, or, with a storage, a name in it.
    start_timeout: seconds for the cluster to have room for all ranks.
    rank_timeout: seconds that a rank waits for others: until all have started, in a collective.
    stop_requested: of this process; a rank that has started has a sign of its own.
    """

    size: int
    gpus: bool
    threads: int
    folder: Path
    start_timeout: float
    rank_timeout: float
    stop_requested: Callable[[], bool]


def run_on_ranks(function: str, argument: Any, group: RankGroup) -> None:
    """Call a function on every rank within a process group, and print what rank 0 prints. To be called in a Ray job's driver.

    Args:
        function: "module:name" of what is called with `argument`.
    Raises:
        RankFailed: a rank raised an error, died, or didn't start in time.
    """
    _configure(group)
    board = open_board(group.folder)
    board.clear()
    trainer = TorchTrainer(
        _run_rank,
        train_loop_config={"function": function, "argument": argument, "folder": str(group.folder)},
        torch_config=_NodeConfig(backend="nccl" if group.gpus else "gloo", timeout_s=max(1, int(group.rank_timeout))),
        scaling_config=ScalingConfig(
            num_workers=group.size,
            use_gpu=group.gpus,
            resources_per_worker={"CPU": 1, **({"GPU": 1} if group.gpus else {})},
        ),
        run_config=RunConfig(
            name="ranks",
            **_storage_of_ray(group.folder),
            failure_config=FailureConfig(max_failures=0, controller_failure_limit=0, max_preemption_failures=0),
            worker_runtime_env={"env_vars": {"OMP_NUM_THREADS": str(group.threads), **passed_on()}},
            logging_config=LoggingConfig(log_level="ERROR"),
        ),
    )
    with _passing_on(board), _watching_start(group, board):
        try:
            trainer.fit()
        except TrainingFailedError as error:
            raise _failure(error, group) from error


class _NodeBackend(_TorchBackend):
    """Chooses the network interface of each rank before torch does."""

    def on_start(self, worker_group: Any, backend_config: TorchConfig) -> None:
        worker_group.execute(use_node_interface)
        super().on_start(worker_group, backend_config)


@dataclass
class _NodeConfig(TorchConfig):
    @property
    def backend_cls(self) -> type[_NodeBackend]:
        return _NodeBackend


def _storage_of_ray(folder: Path) -> dict[str, Any]:
    """Where Ray Train writes its own state, which every node must see."""
    if (work := job_storage()) is None:
        return {"storage_path": str(folder)}
    return {"storage_path": f"{work.storage.folder}/{work.prefix_of(folder)}/ray", "storage_filesystem": work.storage.filesystem}


def _configure(group: RankGroup) -> None:
    """Settings that Ray Train reads from the driver's environment."""
    os.environ.update(dict.fromkeys(_SWITCHED_OFF, "0"))
    os.environ.update(
        RAY_TRAIN_HEALTH_CHECK_INTERVAL_S=str(POLL_SECONDS),
        RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S=str(group.start_timeout),
        RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S=str(group.rank_timeout),
    )


def _run_rank(config: dict[str, Any]) -> None:
    """On each rank, in a thread of its process."""
    from ray.train import get_context

    enter()
    rank, board = get_context().get_world_rank(), open_board(Path(config["folder"]))
    board.write(f"started-{rank}", "")
    collect_rarely()
    output = board.open_output() if rank == 0 else None
    if output is not None:
        sys.stdout = output
    module, _, name = config["function"].partition(":")
    try:
        getattr(importlib.import_module(module), name)(config["argument"])
    except Exception as error:  # of any kind: its traceback is kept and it is raised again
        with contextlib.suppress(OSError):
            board.write(f"traceback-{rank}", traceback.format_exc())
        if isinstance(error, RuntimeError):
            time.sleep(PEER_SECONDS)
        raise
    finally:
        if output is not None:
            sys.stdout = sys.__stdout__
            output.close()


def _failure(error: TrainingFailedError, group: RankGroup) -> RankFailed:
    """What happened first, as far as the ranks' errors show it: a refusal, then a death, which makes other ranks fail, then any other."""
    if not isinstance(error, WorkerGroupError):
        cause = getattr(error, "controller_failure", error)
        if type(cause).__name__ == "WorkerGroupStartupFailedError":
            told = f"got a dead process ({_first_line(cause)})"
            return RankFailed(f"ranks: expected all {group.size} to start, {told}; run the stage again")
        return RankFailed(
            f"ranks: expected room for {group.size} of them within cluster.start_timeout={group.start_timeout:.0f} s and all of them to "
            f"start, got {type(cause).__name__}: {_first_line(cause)}; lower the number of ranks or add nodes"
        )
    failures = error.worker_failures
    silent = sorted(rank for rank, failure in failures.items() if type(failure).__name__ == "WorkerHealthCheckTimeoutError")
    own = {rank: failure for rank, failure in failures.items() if not isinstance(failure, RayError) and not _is_death(failure)}
    refused = {rank: failure for rank, failure in own.items() if not isinstance(failure, RuntimeError)}
    dead = sorted(failures.keys() - own.keys() - set(silent))
    if (dead or silent) and not refused:
        which = ", ".join(map(str, dead or silent))
        late = f"no answer within cluster.rank_timeout={group.rank_timeout:.0f} s; it was stopped, or its node is overloaded"
        return RankFailed(f"rank {which}: expected to finish its work, got {'a dead process' if dead else late}; run the stage again")
    rank, cause = min((refused or own).items())
    told = open_board(group.folder).read(f"traceback-{rank}") or ""
    return RankFailed(f"rank {rank}: expected to finish its work, got {type(cause).__name__}: {_first_line(cause)}", cause, told)


def _is_death(failure: BaseException) -> bool:
    return type(failure).__name__ in ("WorkerHealthCheckFailedError", "WorkerHealthCheckTimeoutError")


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "")


@contextlib.contextmanager
def _passing_on(board: Board) -> Iterator[None]:
    """Print what rank 0 prints, from a thread."""

    def run(done: threading.Event) -> None:
        ended = False
        while not ended:
            ended = done.wait(POLL_SECONDS)  # the output is read once more after the end
            with contextlib.suppress(OSError):
                sys.stdout.write(board.new_output())
                sys.stdout.flush()

    with beside(run):
        yield


@contextlib.contextmanager
def _watching_start(group: RankGroup, board: Board) -> Iterator[None]:
    """End this process, which ends the job, unless every rank starts in time, or if a stop is requested before any has: between placing and
    starting, Ray Train has no deadline and can't be interrupted.
    """
    done = threading.Event()
    seconds = group.start_timeout + group.rank_timeout
    until = time.monotonic() + seconds

    def run() -> None:
        late = started = False
        while not late and not done.wait(POLL_SECONDS):
            late, stopped = time.monotonic() > until, group.stop_requested() and not started
            if not late and not stopped:
                continue
            try:
                missing = [rank for rank in range(group.size) if board.read(f"started-{rank}") is None]
            except OSError as error:  # the storage fails; at the deadline this counts as no sign
                log.warning("ranks: %s", error)
                missing = list(range(group.size)) if late else []
            started = len(missing) < group.size
            if late and missing:
                log.error("rank %s: expected to start within %.0f s, got no sign of it", ", ".join(map(str, missing)), seconds)
                os._exit(START_MISSED)
            if stopped and not started:
                log.info("ranks: stopped before any has started, no state changed")
                os._exit(STOPPED_BY_SIGNAL)

    threading.Thread(target=run, daemon=True).start()
    try:
        yield
    finally:
        done.set()
