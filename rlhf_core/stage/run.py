"""The frame of every stage: parameters, scratch folder, lock, signals and exit codes.

    def main() -> None:
        with Stage("train_sft") as stage:
            ...stage.params.sft..., stage.scratch, stage.stop_requested...

A rerun resumes a stage after SIGTERM (the stage writes a checkpoint and exits with 143), after its parent's death (the kernel then sends
SIGTERM) and after SIGKILL (it resumes from the last checkpoint).
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import logging
import math
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rlhf_core
from rlhf_core.checkpoint.manifest import MANIFEST
from rlhf_core.checkpoint.settings import Origin, StoreSettings
from rlhf_core.checkpoint.store import SaveFailed
from rlhf_core.config import ConfigError, Params, ScorerConfig, reordering_shown, with_usual_rates
from rlhf_core.environment import keep_visible, of_stage
from rlhf_core.files import lock_file
from rlhf_core.paths import CURVES, GATE_METRICS, PLOTS, POLICY_MODEL, REWARD_MODEL, SCRATCH, SOURCES, STAGE_METRICS, STATE_DIGESTS
from rlhf_core.process import STOPPED_BY_SIGNAL, Interrupted, beside, configure_process, end_with_parent, show_own_log
from rlhf_core.progress import name_stage
from rlhf_core.stage.files import publish_model, read_json, write_json
from rlhf_core.stage.reading import Reading
from rlhf_core.stage.rollouts import publish_rollouts
from rlhf_core.stage.scratch import check_dependencies, input_hashes, metrics_path, prepare_scratch, remove_checkpoints
from rlhf_core.stage.unlearned import REWARD, unlearned

if TYPE_CHECKING:
    from rlhf_core.models.card import CardFacts

# Exit codes. The flow retries all but the first: a retry would be refused again.
REFUSED = 1  # params, data or a model were refused
CRASHED = 70  # an unexpected error; EX_SOFTWARE of sysexits.h
DVC_STAGE = "DVC_STAGE"  # environment variable that DVC sets for a stage's command
TAIL = 20  # upper limit of the last steps over which final metrics are averaged
LOCK_DEADLINE = 60.0  # seconds; a stage that got SIGTERM may still be writing its checkpoint

log = logging.getLogger("rlhf")


def no_arguments(about: str | None) -> None:
    """Parse the command line of a stage without arguments: answer --help, and refuse anything else before the stage runs."""
    stage_arguments(about).parse_args()


def round_argument(about: str | None) -> int:
    """Parse the command line of a stage of rounds/dvc.yaml, and return the number of the round."""
    parser = stage_arguments(about)
    parser.add_argument("round", type=int, help="number of the round of iterative DPO, from 1")
    number = parser.parse_args().round
    if number < 1:
        parser.error(f"round: expected a number from 1, got {number}; see rounds/rounds.yaml")
    return number


def stage_arguments(about: str | None) -> argparse.ArgumentParser:
    """Return a parser with the docstring of the stage's module as help.

    Call it before large imports: exit functions run in reverse order, and those of the imports then come first.
    """
    atexit.register(_leave)
    module = sys.modules["__main__"].__spec__
    options = {"description": about, "epilog": "params.yaml has the stage's settings.", "allow_abbrev": False}
    name = None if module is None else f"python -m {module.name}"
    return argparse.ArgumentParser(prog=name, formatter_class=argparse.RawDescriptionHelpFormatter, **options)


def _leave() -> None:
    """Compare once more what a successful stage has read, and end the process at once.

    An exit function. The usual end of torch and other modules takes half a second, in which an edit would go unnoticed before DVC hashes
    the files.
    """
    if Stage.finished is None or hasattr(sys, "last_value"):  # or an exception followed
        return
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a stop that is raised from here on would leave the exit code at 0
    try:
        code = Stage.finished.refusal_of_changes()
    except Exception:  # the process's border: an exit function that fails would leave the exit code at 0, and DVC would record
        log.exception("%s: what it has read can't be compared with what is there; nothing is recorded", Stage.finished.name)
        code = CRASHED
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code or 0)


class StageRefused(RuntimeError):
    """The stage's result or input isn't acceptable, such as data that fails validation. Shown without a traceback."""


class JobCrashed(RuntimeError):
    """The stage's Ray job or its cluster died; a rerun resumes from the last checkpoint. Shown without a traceback."""


class Stage:
    """Runs the work of one stage; the module's docstring shows its use.

    Args:
        resumable: whether the work polls `stop_requested` and writes checkpoints. False: SIGTERM ends it at once.
        round_number: number of the round, for a stage of rounds/dvc.yaml; None: a stage of dvc.yaml.
    Attributes:
        params: all of params.yaml, checked.
        work: the stage's command, params and hashes of its dependencies.
        resumed_from: other work whose checkpoints this work took over (checkpoints.resume_from), oldest first.
        scratch: folder of this work alone, outside the stage's outputs, which DVC deletes; removed when the stage succeeds.
        finished: the stage of this process that has succeeded; None: none has.
    """

    finished: Stage | None = None

    def __init__(self, name: str, *, resumable: bool = True, round_number: int | None = None):
        self.name = name if round_number is None else f"{name}@{round_number}"
        self._round_number = round_number
        self._resumable = resumable
        self._stop = threading.Event()
        self._at_success: list[Callable[[], None]] = []
        self._watching = contextlib.ExitStack()
        configure_process()
        show_own_log()

    def __enter__(self) -> Stage:
        if (got := foreign_code()) is not None:
            self._exit(f"code: expected rlhf_core of this folder, got {got}; unset PYTHONSAFEPATH and PYTHONPATH, or run in that folder")
        end_with_parent()  # `exec` in dvc.yaml makes DVC the parent, not a shell
        signal.signal(signal.SIGTERM, self._on_stop)
        try:
            self._reading = Reading(self.name, self._round_number)
            if DVC_STAGE in os.environ:  # a stage that is run by hand may follow others that are in no dvc.lock
                check_dependencies(self._reading.inputs, self.name, self._round_number)
        except ConfigError as error:
            self._exit(str(error))
        self.params: Params = self._reading.params
        self.inputs = self._reading.inputs
        self._hide_secrets()
        name_stage(self.name)
        self.scratch = SCRATCH / self.name / self.inputs.folder_name
        self.scratch.parent.mkdir(parents=True, exist_ok=True)
        self._lock = (self.scratch.parent / "lock").open("a+")
        self._acquire()
        try:  # after the lock: its last holder may have removed the folder
            self.resumed_from = prepare_scratch(self.scratch, self.inputs, self.params.checkpoints, self.name)
        except ConfigError as error:
            self._exit(str(error))
        self._started = time.monotonic()
        self._check_memory()
        self._watching.enter_context(beside(self._reading.watch))
        return self

    def __exit__(self, kind, error, traceback) -> None:
        self._watching.close()
        if error is None:
            if (code := self.refusal_of_changes()) is not None:
                self._lock.close()
                sys.exit(code)
            self._note_where_it_began()
            self._keep_digests()
            for call in self._at_success:
                call()
            shutil.rmtree(self.scratch, ignore_errors=True)
            self._reading.record()
            Stage.finished = self
        self._lock.close()
        if error is None:
            log.info("%s: done in %.1f s", self.name, time.monotonic() - self._started)
        elif isinstance(error, Interrupted) or (self.stop_requested and isinstance(error, BaseExceptionGroup)):  # asyncio's tasks group it
            log.info("%s: stopped by a signal; run it again%s", self.name, " to resume from its checkpoint" * self._has_checkpoint())
            sys.exit(STOPPED_BY_SIGNAL)
        elif isinstance(error, StageRefused | ValueError | FileNotFoundError):
            log.debug("traceback", exc_info=error)
            self._exit(str(error))
        elif isinstance(error, SaveFailed | JobCrashed):  # retried: space may be freed meanwhile, or a node come back
            log.debug("traceback", exc_info=error)
            log.error("%s: %s", self.name, error)
            sys.exit(CRASHED)
        elif isinstance(error, Exception):
            log.error("%s: crashed", self.name, exc_info=error)
            sys.exit(CRASHED)

    def _has_checkpoint(self) -> bool:
        return any(self.scratch.glob(f"*/step-*/{MANIFEST}"))

    def refusal_of_changes(self) -> int | None:
        """Report params, code or data that changed since the start, and return the exit code; None if nothing changed.

        DVC would record the changed files as those that the stage has read.
        """
        changes = self._reading.changes()
        if not (found := changes.shown()):
            return None
        if changes.files or changes.written:
            remove_checkpoints(self.scratch, since=self._reading.clean_until)
        again = "run it again" + ", which resumes from the checkpoint" * self._has_checkpoint()
        if not changes.lines:  # a retry may succeed
            log.error("%s: expected nobody to write what the stage reads, got: %s; nothing is recorded, %s", self.name, found, again)
            return CRASHED
        self._tell(
            f"expected params, code and data as at the stage's start, got changes: {found}; nothing is recorded. To get these results, "
            f"undo that and {again}. To use what is there now, only run it again. A named run (--run) has a folder in which nobody edits"
        )
        return REFUSED

    def _hide_secrets(self) -> None:
        """Remove environment variables that the stage may not see: the shell that starts DVC may hold secrets."""
        wanted = self.params.environment
        if missing := [name for name in wanted if name not in os.environ]:
            log.warning("environment: expected %s to be set, got no such environment variable", ", ".join(missing))
        keep_visible(of_stage(self.params, self.name, os.environ), named=wanted)

    def _check_memory(self) -> None:
        """Refuse the stage before anything is loaded if its models can't fit. On another cluster the job's driver checks this."""
        from rlhf_core.planning.preflight import preflight, runs_elsewhere

        if not runs_elsewhere(self.name, self.params) and (refusal := preflight(self.name.partition("@")[0], self.params)) is not None:
            self._exit(refusal)

    def _on_stop(self, *_: object) -> None:
        self._stop.set()
        if not self._resumable:
            raise Interrupted

    @property
    def stop_requested(self) -> bool:
        """Whether SIGTERM was received; the work then writes a checkpoint and raises Interrupted."""
        return self._stop.is_set()

    def check_stop(self) -> None:
        """Raise Interrupted after SIGTERM; for work that has no checkpoint to write."""
        if self.stop_requested:
            raise Interrupted

    def at_success(self, call: Callable[[], None]) -> None:
        """Register a function to be called when the stage has succeeded."""
        self._at_success.append(call)

    @property
    def fingerprint(self) -> str:
        return self.inputs.fingerprint

    @property
    def lock_descriptor(self) -> int:
        """File descriptor of the stage's lock. While a process that inherits it lives, no other run of the stage starts."""
        return self._lock.fileno()

    def use_threads(self) -> None:
        """Let torch use the cores of `cluster.threads` in this process."""
        import torch

        torch.set_num_threads(self.params.cluster.threads)

    def store_settings(self, *, zero_stage: int, world_size: int = 1) -> StoreSettings:
        """Return how many checkpoints are kept, their origin, and the origins from which the stage may resume."""
        wanted = self.params.checkpoints
        accepted = tuple(Origin(**entry["origin"]) for entry in self.resumed_from)
        return StoreSettings(
            keep_last=wanted.keep_last,
            keep_best=wanted.keep_best,
            origin=self.inputs.origin,
            accepted=accepted,
            begun_anew=tuple(tuple(entry.get("begun_anew", ())) for entry in self.resumed_from),
            world_size=world_size,
            zero_stage=zero_stage,
            save_timeout=wanted.save_timeout,
        )

    def recent_mean(self, column: str) -> float:
        """Return the mean of a column of the training curves over the last steps (`steps_at_the_end`)."""
        import pandas as pd

        rows = pd.read_csv(self.scratch / "curves.csv")
        return float(rows[column].tail(steps_at_the_end(len(rows))).mean())

    def card(self, kind: str, method: str, metrics: Mapping[str, Any], *, gate: Mapping[str, Any] | None = None):
        """Return the contents of the card of the model that this stage trained.

        Args:
            kind: one of KINDS in rlhf_core/models/card.py. metrics: the stage's metrics, of which the card has the held-out ones.
            gate: metrics of gate_reward; None: the method uses no reward model.
        """
        from rlhf_core.models.card import CardFacts

        inputs = input_hashes(self.inputs, self.name, self._round_number)
        if kind == "policy" and gate is None:
            inputs = {path: md5 for path, md5 in inputs.items() if path != REWARD_MODEL.as_posix()}
        params = with_usual_rates({name: value for name, value in self.inputs.params.items() if ":" not in name})
        if kind == "given":
            params |= {"sft": {"enabled": False}}
        elif kind == "reward" and (path := self.params.reward.path) is not None:
            params |= {"reward": {"path": path}}
        figures = {name: value for name, value in metrics.items() if name.startswith("heldout_") and isinstance(value, float)}
        notes = []
        if metrics.get("ended_by") == "max_minutes":
            steps = f"{metrics['steps']} of {metrics['planned_steps']} steps"
            notes.append(f"Training ended by `max_minutes` after {steps}, so it can't be rebuilt to the bit.")
        resumed = "Training resumed from a checkpoint of other work (`checkpoints.resume_from`)."
        return CardFacts(
            kind=kind,
            method=method,
            base=self._base_of(kind),
            params=params,
            sources=read_json(SOURCES),
            inputs=inputs,
            gate=gate,
            judges=self._verdicts_of_judges() if kind == "policy" else [],
            figures=figures,
            notes=[*notes, *[resumed] * bool(self.resumed_from)],
        )

    def _verdicts_of_judges(self) -> list[dict[str, Any]]:
        """Return the gate's entries of the language models that the policy learns from."""
        key, scorers = self.params.method_scorers or ("", [])
        judges = [f"{key}.{scorer.name}" for scorer in scorers if scorer.is_rewarded_judge]
        if self._round_number is not None or not judges:
            return []
        gate = read_json(GATE_METRICS)
        return [judge | {"override": gate["override"]} for judge in gate["llm_judges"] if judge["key"] in judges]

    def _base_of(self, kind: str) -> str | None:
        """Return the model that the stage's model was made from."""
        params = self.params
        policy = params.external.path if params.alignment.method == "external" else None
        return {"reward": params.reward.path, "policy": policy}.get(kind) or params.model.path

    def _note_where_it_began(self) -> None:
        """Add the other work that the stage resumed from to the stage's metrics; no other file records it."""
        path = metrics_path(self.name, self._round_number)
        if self.resumed_from and path is not None:
            began = [{name: entry[name] for name in ("of", "step", "differences")} for entry in self.resumed_from]
            write_json(path, read_json(path) | {"resumed_from": began})

    def _keep_digests(self) -> None:
        folder = STATE_DIGESTS / self.name
        shutil.rmtree(folder, ignore_errors=True)
        for path in self.scratch.glob("*/step-*/digest.json"):
            kept = folder / path.parent.parent.name / path.parent.name
            kept.mkdir(parents=True)
            shutil.copy(path, kept)

    def _acquire(self) -> None:
        try:
            lock_file(self._lock, LOCK_DEADLINE)
        except TimeoutError:
            self._lock.seek(0)
            other = self._lock.read().strip() or "unknown"
            self._exit(
                f"expected to be the only run in this workspace, got another one, process {other}, "
                f"still at work after {LOCK_DEADLINE:.0f} s; wait for it or stop it"
            )
        self._lock.truncate(0)
        self._lock.write(str(os.getpid()))
        self._lock.flush()

    def _exit(self, message: str) -> None:
        self._tell(message)
        sys.exit(REFUSED)

    def _tell(self, message: str) -> None:
        for line in message.splitlines():
            print(f"{self.name}: {reordering_shown(line)}", file=sys.stderr, flush=True)


def foreign_code() -> Path | None:
    """Return the folder of the running code if the working folder has code of its own, whose hashes DVC would record; otherwise None."""
    here, running = Path("rlhf_core/__init__.py"), Path(rlhf_core.__file__)
    return running.parent if here.exists() and not here.samefile(running) else None


def steps_at_the_end(steps: int) -> int:
    """Return the number of last steps over which final metrics are averaged: a third of the training, at most TAIL."""
    return min(TAIL, math.ceil(steps / 3))


def check_gate(gate: dict[str, Any]) -> str | None:
    """Check that the chain's own reward model passed the gate or has an override.

    Returns:
        The override's reason (gate.override) if the model didn't pass, for the stage's metrics.
    Raises:
        StageRefused: the model didn't pass, or was rolled back, and gate.override is empty.
    """
    if gate["passed"]:
        return None
    if gate["override"] is None:
        raise StageRefused(
            f"reward model: expected one that passed the gate, got one that didn't; {gate['message']} Train a better one, or, to use this "
            "one anyway, write the reason into gate.override"
        )
    log.warning("reward model: used although it did not pass the gate; the reason given: %s", gate["override"])
    return gate["override"]


def check_gate_of_judges(gate: dict[str, Any], key: str, scorers: Sequence[ScorerConfig]) -> str | None:
    """Return the same for the rewarded language models that judge among the scorers at `key`."""
    names = [f"{key}.{scorer.name}" for scorer in scorers if scorer.is_rewarded_judge]
    verdicts = {judge["key"]: judge for judge in gate["llm_judges"]} if names else {}
    for name in names:
        if name not in verdicts:
            raise StageRefused(f"judge {name}: expected the gate's verdict in {GATE_METRICS}, got none; run gate_reward again")
        if not verdicts[name]["passed"] and gate["override"] is None:
            raise StageRefused(
                f"judge {name}: expected one that passed the gate, got one that didn't; {verdicts[name]['message']} Take a better one, or, "
                "to use this one anyway, write the reason into gate.override"
            )
        if not verdicts[name]["passed"]:
            log.warning("judge %s: used although it did not pass the gate; the reason given: %s", name, gate["override"])
            return gate["override"]
    return None


def publish_policy(stage: Stage, metrics: dict[str, Any], *, gate: dict[str, Any] | None = None, untrained: Sequence[str] = ()) -> None:
    """Publish the policy that `TrainRun.save_model` wrote, with the stage's curves and metrics.

    Args:
        gate: as for `Stage.card`. untrained: as for `publish_training`.
    """
    card = stage.card("policy", metrics["method"], metrics, gate=gate)
    publish_rollouts(stage.scratch)
    publish_training(stage, stage.scratch / "model", POLICY_MODEL, card, metrics, untrained=untrained)


def write_curves(stage: Stage, untrained: Sequence[str]) -> None:
    """Write the curves of the stage's training, or only the header line `untrained`."""
    PLOTS.mkdir(exist_ok=True)
    if untrained:
        CURVES[stage.name].write_text(",".join(untrained) + "\n")
    else:
        shutil.copy(stage.scratch / "curves.csv", CURVES[stage.name])


def publish_training(
    stage: Stage, aside: Path, final: Path, card: CardFacts, metrics: dict[str, Any], *, untrained: Sequence[str] = ()
) -> None:
    """Publish a saved model with its card, and write the stage's curves and metrics.

    Args:
        untrained: columns of the curves, for a stage that trained nothing and has no curves.
    """
    publish_model(aside, final, card)
    write_curves(stage, untrained)
    if (warning := unlearned(metrics.get("method", REWARD), metrics, stage.params)) is not None:
        log.warning("%s", warning)
        metrics = {**metrics, "warning": warning}
    write_json(STAGE_METRICS[stage.name], metrics)
