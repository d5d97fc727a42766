"""A rollout engine in a separate process, for a stage that also uses other models.

On a GPU vLLM can't share a process with other models: only the end of its process reliably frees its GPU memory, and it marks transformers'
model classes for compilation, after which other code in the process can't make such a model.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_core.engines.transfer.weights import pack, unpack
from rlhf_core.process import configure_process, end_with_parent, show_own_log

if TYPE_CHECKING:
    import torch

    from rlhf_core.engines.rollout.requests import Sample

OF_RANKS = ("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # the engine is no rank
ANSWER_SECONDS = 24 * 3600.0  # long: flow.stage_timeout limits the stage, and a dead process is noticed at once
END_SECONDS = 60.0

log = logging.getLogger("rlhf")


class EngineLost(RuntimeError):
    """The engine's process has exited or doesn't answer."""


class EngineProcess:
    """An engine that `open_here` opens in a process of its own, which ends with `close` or with this process.

    Args:
        open_here: function of a module that opens the engine in the new process.
        gpus: number of GPUs that the engine sees on one of several ranks, from the rank's own on.
        settings: arguments of `open_here`.
    Raises:
        ValueError: the engine refuses the model or the settings.
        EngineLost: the process has ended.
    """

    def __init__(self, open_here: Callable[..., Any], *, gpus: int = 1, **settings: Any):
        started = multiprocessing.get_context("spawn")  # a process that has used CUDA can't be forked
        self._pipe, theirs = started.Pipe()
        self._process = started.Process(
            target=_serve, args=(theirs, os.getpid(), own_gpus(gpus), open_here, settings), name="rollout engine"
        )
        self._process.start()
        atexit.register(self._process.kill)  # otherwise a stage that fails before `close` and this process would wait for each other
        theirs.close()
        self.version = 0
        try:
            self._answer()
        except BaseException:  # also an interrupt leaves no process behind
            self.close()
            raise

    def generate(self, *args: Any, **kwargs: Any) -> list[list[Sample]]:
        """Call the engine's `generate`."""
        return self._call("generate", *args, **kwargs)

    def probe(self, ids: Sequence[int]) -> list[float]:
        """Call the engine's `probe`."""
        return self._call("probe", ids)

    def load_folder(self, folder: str | Path, version: int) -> int:
        """Call the engine's `load_folder`."""
        self.version = self._call("load_folder", str(folder), version)
        return self.version

    def load_weights(self, state_dict: dict[str, torch.Tensor], version: int) -> int:
        """Call the engine's `load_weights`. Weights are sent one at a time."""
        self._send(("load_weights", (len(state_dict), version), {}))
        for name, packed in pack(state_dict).items():
            self._send((name, packed))
        self.version = self._answer()
        return self.version

    def close(self) -> None:
        """End the process and free all its memory."""
        with contextlib.suppress(OSError, EngineLost):
            self._send(None)
        self._process.join(END_SECONDS)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(END_SECONDS)
        atexit.unregister(self._process.kill)
        self._pipe.close()

    def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        self._send((method, args, kwargs))
        return self._answer()

    def _send(self, message: Any) -> None:
        try:
            self._pipe.send(message)
        except OSError as error:
            raise self._lost() from error

    def _answer(self) -> Any:
        if self._pipe not in wait([self._pipe, self._process.sentinel], timeout=ANSWER_SECONDS):
            raise self._lost()
        try:
            refusal, answer = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise self._lost() from error
        if refusal is not None:
            raise refusal
        return answer

    def _lost(self) -> EngineLost:
        self._process.join(1.0)
        code = self._process.exitcode
        got = f"none within {ANSWER_SECONDS:.0f} s" if code is None else f"the end of its process with exit code {code}"
        return EngineLost(f"rollout engine: expected an answer, got {got}; see its output above")


class EngineOfOtherRank:
    """Takes the place of an engine on a rank whose share the engine of another rank samples."""

    version = 0

    def load_folder(self, folder: str | Path, version: int) -> int:
        self.version = version
        return version

    def close(self) -> None: ...


def own_gpus(count: int) -> str | None:
    """Return the GPUs of this rank and of the ranks after it, `count` in all, as CUDA_VISIBLE_DEVICES names them.

    None if this is the only rank or there is no GPU: the engine may then see what this process sees. Ray shows a rank all GPUs of its
    node's ranks.
    """
    import torch
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_world_size() == 1 or not torch.cuda.is_available():
        return None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    current = torch.cuda.current_device()
    chosen = visible.split(",")[current : current + count] if visible else map(str, range(current, current + count))
    return ",".join(chosen)


def _serve(pipe: Connection, parent: int, gpus: str | None, open_here: Callable[..., Any], settings: dict[str, Any]) -> None:
    """Run the engine's process: answer each message with (refusal, answer), until an empty message or the end of the parent."""
    for name in OF_RANKS:
        os.environ.pop(name, None)
    if gpus is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus  # CUDA isn't initialised yet
    for number in (signal.SIGTERM, signal.SIGINT):  # the stage gets the signal too and ends the engine when done
        signal.signal(number, signal.SIG_IGN)
    end_with_parent(parent, signal.SIGKILL)  # frees the GPU if the parent is killed
    show_own_log()
    configure_process()
    with contextlib.suppress(EOFError, OSError):
        engine = _answered(pipe, partial(open_here, **settings), tell=False)
        while engine is not None and (message := pipe.recv()) is not None:
            _answered(pipe, partial(_do, engine, message, pipe))


def _answered(pipe: Connection, work: Callable[[], Any], *, tell: bool = True) -> Any:
    """Do some work and send its result, or None unless `tell`; send the refusal if it fails. Return the result, or None on failure."""
    try:
        found = work()
    except ValueError as error:
        pipe.send((ValueError(str(error)), None))
        return None
    except Exception as error:  # of any kind: the caller waits for an answer
        log.exception("rollout engine")
        pipe.send((RuntimeError(f"rollout engine: {type(error).__name__}: {error}"), None))
        return None
    pipe.send((None, found if tell else None))
    return found


def _do(engine: Any, message: Any, pipe: Connection) -> Any:
    method, args, kwargs = message
    if method == "load_weights":
        count, version = args
        return engine.load_weights(unpack(dict(pipe.recv() for _ in range(count))), version)
    return getattr(engine, method)(*args, **kwargs)
