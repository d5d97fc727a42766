"""Sends a run's files to a tracker, each row once, and keeps a note of what was sent beside the run's record.

The note has the id by which the tracker continues the run. Training that resumes from a checkpoint writes some rows again, which are the
same, and aren't sent again. Other params, rows that differ, or a tracker that lost the run begin a new run in the tracker.
"""

from __future__ import annotations

import hashlib
import json
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from flows.chain.worktree import slug
from flows.trackers.contents import RUNNING, Curve, RunFiles, Value
from flows.trackers.sinks import SINKS, Sink
from rlhf_core.config import TrackingConfig
from rlhf_core.files import replace_text


@dataclass
class Note:
    """What a tracker has of a run.

    params: hash of the run's params. position: number of log calls so far. curves: stage -> rows sent and their hash.
    pending: stage, first and last row and time of rows that were being sent; after a kill they are sent in the same way, and a tracker
        that has got them keeps one copy.
    figures: the figures that were sent. others: settings, tables and the report -> hash of what was sent.
    ended: the outcome with which the run was closed. project: of wandb, to which a run's id belongs.
    """

    id: str
    params: str
    position: int = 0
    curves: dict[str, tuple[int, str]] = field(default_factory=dict)
    pending: tuple[str, int, int, float] | None = None
    figures: dict[str, Value] = field(default_factory=dict)
    others: dict[str, str] = field(default_factory=dict)
    ended: str | None = None
    project: str | None = None


class Sender:
    """Sends what a tracker lacks of a run.

    Args:
        files: of the run, whose folder's name is its name in the tracker. tracker: a key of SINKS.
    """

    def __init__(self, files: RunFiles, tracker: str, config: TrackingConfig):
        self._files, self._config, self._tracker = files, config, tracker
        self._project = config.wandb_project if tracker == "wandb" else None
        self._params = _hash(files.settings())
        self._path = note_path(files.workspace, tracker)
        self._note = self._read()
        self._sink: Sink | None = None
        self._seen: Any = None  # progress of the run up to which the others were sent
        if self._changed() or (self._path.is_file() and SINKS[tracker].lost(config, self._note.id)):
            self._note = self._new()

    def _read(self) -> Note:
        try:
            return Note(**json.loads(self._path.read_text("utf-8")))
        except (OSError, ValueError, TypeError):
            return self._new()

    def _new(self) -> Note:
        return Note(f"{slug(self._files.workspace.name)}-{uuid.uuid4().hex[:8]}", self._params, project=self._project)

    def _changed(self) -> bool:
        """Whether the run is another one than that of the note: its params differ, or rows that were sent."""
        sent = self._note.curves
        moved = self._note.project not in (None, self._project)
        return (
            moved
            or self._note.params != self._params
            or any(
                stage in sent and len(curve.points) >= sent[stage][0] > 0 and curve.digests[sent[stage][0] - 1] != sent[stage][1]
                for stage, curve in self._files.curves()
            )
        )

    def send(self) -> None:
        """Send what is there and wasn't sent. An exception of the tracker's leaves the note at what it has surely got."""
        if self._changed():
            self.close(ended=False)
            self._note, self._seen = self._new(), None
        for stage, curve in self._files.curves():
            self._points(stage, curve)
        if self._config.texts:
            for step, rows in self._files.new_rollouts():
                self._once(f"rollouts {step}", step, lambda s=step, read=rows: self._table("rollouts", s, read()))
        if (progress := self._files.progress) != self._seen:
            self._others()
            self._seen = progress

    def _points(self, stage: str, curve: Curve) -> None:
        note, start = self._note, self._note.curves.get(stage, (0, ""))[0]
        end, at = len(curve.points), time.time()
        if note.pending is not None and (*note.pending[:2],) == (stage, start) and note.pending[2] <= end:
            end, at = note.pending[2:]
        if end <= start:
            return
        sink = self.sink
        self._keep(pending=(stage, start, end, at))
        sink.points(stage, curve.points[start:end], note.position, at)
        note.curves[stage] = (end, curve.digests[end - 1])
        self._keep(pending=None, position=note.position + end - start)

    def _others(self) -> None:
        settings, lineage, figures = self._files.settings(), self._files.lineage(), self._files.figures()
        self._once("settings", [settings, lineage], lambda: self.sink.settings(settings, lineage))
        if new := {name: value for name, value in figures.items() if self._note.figures.get(name) != value}:
            self.sink.figures(new)
            self._keep(figures=figures)
        if not self._config.texts:
            return
        for name, step, rows in self._files.tables():
            self._once(f"{name} {step}", step if name == "rollouts" else rows, partial(self._table, name, step, rows))
        if (page := self._files.report()) is not None:
            self._once("report", hashlib.sha256(page.read_bytes()).hexdigest(), lambda: self.sink.file(page))

    def _table(self, name: str, step: int, rows: list[dict[str, Any]]) -> None:
        if rows:
            self.sink.table(name, step, rows, self._note.position)
            self._note.position += 1

    def _once(self, what: str, content: Any, send: Callable[[], None]) -> None:
        if self._note.others.get(what) != (found := _hash(content)):
            send()
            self._note.others[what] = found
            self._keep()

    @property
    def sink(self) -> Sink:
        if self._sink is None:
            self._sink = SINKS[self._tracker](self._config, self._files.workspace.name, self._note.id)
            self._keep(id=self._sink.id, ended=None)
        return self._sink

    def _keep(self, **fields: Any) -> None:
        """Write the note, with these fields changed."""
        for name, value in fields.items():
            setattr(self._note, name, value)
        replace_text(self._path, json.dumps(asdict(self._note)))

    def close(self, *, ended: bool | None = None) -> None:
        """Close the tracker, and tell it how the run ended, if it has."""
        outcome = self._files.outcome
        ended = outcome != RUNNING if ended is None else ended
        if self._sink is None and (not ended or self._note.ended == outcome):
            return
        self.sink.close(ended=ended, good=outcome == "done")
        self._sink = None
        self._keep(ended=outcome if ended else None)


def note_path(workspace: Path, tracker: str) -> Path:
    return workspace / f".dvc/tmp/tracker-{tracker}.json"


def _hash(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()
