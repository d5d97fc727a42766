"""The journal of a run (rl.rollout.schedule `free` and `recorded`): what engines, environments and scorers answered, step by step.

A step's batch is on the disk before it is trained on. A run that resumes trains on these batches again, without sampling, from its
checkpoint up to the last one; what the trainer computes from them has the same bits. So nothing that was trained on depends on how fast
engines, tools and services are, or on whether they would answer the same again.
"""

from __future__ import annotations

import gzip
import itertools
import json
import logging
import zlib
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import torch

from rlhf_core.checkpoint.manifest import fsync
from rlhf_core.checkpoint.store import SaveFailed
from rlhf_core.config import RlConfig
from rlhf_core.files import ASIDE, replacing
from rlhf_core.sampling.scoring import StepScores
from rlhf_core.stage.scratch import RECORDED, journal_of
from rlhf_core.trainers.rl.collect import Answers
from rlhf_core.trainers.rl.taught import Taught
from rlhf_core.types import Baseline, RewardComponents, Rollout

BATCH, EVALUATION, CALIBRATION = "batch", "evaluation", "calibration"
ENDING = ".json.gz"
ANSWERS = [field.name for field in fields(Answers)]
Answer = TypeVar("Answer")

log = logging.getLogger("rlhf")


@dataclass(frozen=True)
class Batch:
    """What a step trains on.

    difference: of engine and trainer, where only the engines could tell it (`check_engine`).
    ahead: the state of rollouts ahead (`RolloutsAhead.state`).
    """

    answers: Answers
    difference: float | None
    ahead: dict[str, Any] | None


class Journal:
    """The journal of one job.

    Args:
        folder: of the job.
    """

    def __init__(self, rl: RlConfig, folder: Path):
        self._on, self._keeps = rl.rollout.is_journaled, rl.rollout.schedule == "recorded"
        self._folder = journal_of(folder, kept=self._keeps)
        self._whole = self._folder / RECORDED

    def count(self, step: int) -> int:
        """How many batches in a row there are from a step on."""
        return next(n for n in itertools.count() if not (self._on and self._path(BATCH, step + n).exists()))

    def batch(self, step: int) -> Batch | None:
        """Return the batch of a step, counted from 0; None: it is still to be sampled, and what was noted of later steps is forgotten."""
        tree = self._read(BATCH, step) if self._on else None
        if tree is None:
            self.forget(step)
            return None
        return Batch(answers_of(tree["answers"]), tree["difference"], tree["ahead"])

    def forget(self, step: int) -> None:
        """Remove the batch of a step, counted from 0, and what was noted of later steps."""
        self._remove(lambda kind, of: of >= step if kind == BATCH else of > step)

    def note_batch(self, step: int, batch: Batch) -> None:
        """Write a batch. It is on the disk when this returns.

        Raises:
            SaveFailed: it can't be written.
        """
        if self._on:
            tree = {"answers": tree_of(batch.answers), "difference": batch.difference, "ahead": batch.ahead}
            self._write(BATCH, step, tree)

    def answer(self, kind: str, step: int, ask: Callable[[], Answer]) -> Answer:
        """Return the noted answer, as JSON has it, or else what `ask` returns, which is noted.

        Args:
            step: number of steps done.
        """
        if not self._on:
            return ask()
        if (noted := self._read(kind, step)) is not None:
            return noted
        self._write(kind, step, answer := ask())
        return answer

    def end(self) -> None:
        """Note that the run has ended, if it keeps its journal: it can be trained again without engines."""
        if self._keeps:
            self._folder.mkdir(parents=True, exist_ok=True)  # a run that resumed behind its last step has noted nothing
            self._whole.touch()
            fsync(self._folder)

    def trim(self, step: int) -> None:
        """Remove what was noted before so many steps were done, unless the run keeps its journal."""
        if not self._keeps and step > 0:
            self._remove(lambda kind, of: of < step)

    def _path(self, kind: str, step: int) -> Path:
        return self._folder / f"{kind}-{step:06d}{ENDING}"

    def _read(self, kind: str, step: int) -> Any:
        """None: there is none, or it is damaged.

        Raises:
            SaveFailed: the journal should have the whole run, which therefore has no engines.
        """
        path = self._path(kind, step)
        try:
            return json.loads(gzip.decompress(path.read_bytes()))
        except FileNotFoundError:
            pass
        except (OSError, EOFError, ValueError, zlib.error) as error:  # gzip has a checksum
            log.warning("rl: %s: expected a readable file of the journal, got %s: %s; sampled anew", path, type(error).__name__, error)
        if self._whole.exists():
            self._whole.unlink()
            raise SaveFailed(f"journal {path}: expected that of a whole run, got none or a damaged one; run the stage again with engines")
        return None

    def _write(self, kind: str, step: int, tree: Any) -> None:
        content = gzip.compress(json.dumps(tree, default=vars).encode(), compresslevel=1, mtime=0)
        path, is_new = self._path(kind, step), not self._folder.exists()
        try:
            with replacing(path) as aside:
                aside.write_bytes(content)
                fsync(aside)
            fsync(self._folder)
            if is_new:
                fsync(self._folder.parent)
        except OSError as error:
            raise SaveFailed(f"journal {path}: expected to be written, got {error}; make room, and run the stage again") from error

    def _remove(self, chosen: Callable[[str, int], bool]) -> None:
        for path in self._folder.glob(f"*{ENDING}"):
            kind, _, step = path.name.removesuffix(ENDING).partition("-")
            if chosen(kind, int(step)):
                path.unlink()
        for path in self._folder.glob(f"*{ASIDE}"):
            path.unlink()


def tree_of(answers: Answers) -> dict[str, Any]:
    """Return the answers as JSON has them, but for rollouts, which `json` gets by `vars`."""
    baseline, drawn = answers.baseline, answers.drawn
    is_plain = len(drawn) == 1 and drawn[0][0] is answers.rollouts
    return {name: getattr(answers, name) for name in ANSWERS} | {
        "components": _lists(answers.components),
        "drawn": None if is_plain else [[rollouts, _lists(components)] for rollouts, components in drawn],
        "baseline": baseline and {**_lists(_tensors(baseline)), "components": _lists(baseline.components)},
    }


def answers_of(tree: dict[str, Any]) -> Answers:
    """Return the inverse of `tree_of`, of what JSON made of it."""
    rollouts, components, baseline = _rollouts(tree["rollouts"]), components_of(tree["components"]), tree["baseline"]
    drawn = [(rollouts, components)]
    if tree["drawn"] is not None:
        drawn = [(_rollouts(of_round), components_of(scores)) for of_round, scores in tree["drawn"]]
    if baseline is not None:
        rest = {name: torch.tensor(values) for name, values in baseline.items() if name != "components"}
        baseline = Baseline(components=components_of(baseline["components"]), **rest)
    steps = {name: StepScores(**of_scorer) for name, of_scorer in tree["steps"].items()}
    taught = tree["taught"] and Taught(**tree["taught"])
    known = {"rollouts": rollouts, "components": components, "steps": steps, "drawn": drawn, "baseline": baseline, "taught": taught}
    return Answers(**tree | known)


def _rollouts(trees: list[dict[str, Any]]) -> list[Rollout]:
    return list(map(Rollout.of_tree, trees))


def components_of(lists: dict[str, list[float]]) -> RewardComponents:
    return {name: torch.tensor(scores, dtype=torch.float32) for name, scores in lists.items()}


def _lists(tensors: dict[str, torch.Tensor]) -> dict[str, list]:
    return {name: tensor.tolist() for name, tensor in tensors.items()}


def _tensors(baseline: Baseline) -> dict[str, torch.Tensor]:
    return {f.name: getattr(baseline, f.name) for f in fields(baseline) if f.name != "components"}
