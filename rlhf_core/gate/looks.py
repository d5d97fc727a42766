"""The ledger of looks: which models were judged on a held-out split, in which order, and the significance level of each look.

If models are judged on the same pairs until one passes, one passes by chance. The ledger counts the models of a split, and the level
decreases with their number.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, Literal

from pydantic import Field, ValidationError

from rlhf_core.config import ConfigError, GateConfig, Section, shown
from rlhf_core.process import without_git_places
from rlhf_core.stage.files import lock_file

LEDGER = "rlhf-gate-looks.jsonl"
LOCK_DEADLINE = 60.0  # seconds


def look_level(confidence: float, number: int) -> float:
    """The one-sided level of a split's look `number`, from 1.

    alpha = (1 - confidence) / 2,  level_1 = alpha,  level_k = alpha / (k (k - 1)) for k > 1
    The levels of all later looks sum to alpha, since 1 / (k (k - 1)) = 1 / (k - 1) - 1 / k. So the chance that any of any number of
    models below the threshold passes is at most 2 alpha, whatever the dependence of their results.
    Source: alpha-spending, Tian and Ramdas 2021, https://arxiv.org/abs/1910.04900
    """
    alpha = (1 - confidence) / 2
    return alpha if number == 1 else alpha / (number * (number - 1))


def at_look(config: GateConfig, number: int) -> GateConfig:
    """The gate's settings with the two-sided confidence of a look's one-sided level."""
    return config if number == 1 else config.model_copy(update={"confidence": 1 - 2 * look_level(config.confidence, number)})


def split_hash(rows: Sequence[dict[str, Any]]) -> str:
    """sha256 of the texts of held-out pairs (messages, chosen, rejected), independent of their order."""
    texts = sorted(json.dumps([row[key] for key in ("messages", "chosen", "rejected")], sort_keys=True) for row in rows)
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()


class _Line(Section):
    """A line of the ledger. kind: look, a model begins to be judged on a split; or result, its outcome.

    split: of `split_hash`. model: md5 of its folder, as in dvc.lock. run: branch, or folder without git. at: ISO 8601.
    confidence: of the intervals that decided.
    """

    kind: Literal["look", "result"]
    split: str = Field(pattern=r"^[0-9a-f]{64}$")
    model: str = Field(pattern=r"^[0-9a-f]{32}\.dir$")
    run: str
    at: str
    passed: bool | None = None
    accuracy: float | None = None
    confidence: float | None = None


@dataclass(frozen=True)
class Look:
    """number: from 1, in the order in which models were judged on the split; earlier: the looks before it, as in gate.json."""

    number: int
    split: str
    model: str
    earlier: list[dict[str, Any]]


def ledger_path(root: Path) -> Path:
    """The ledger in git's common folder, which all worktrees share; without git, in `root`.

    Raises:
        ConfigError: git fails.
    """
    done = _git(root, "rev-parse", "--path-format=absolute", "--git-common-dir")
    if done is None:
        return root / LEDGER
    if done.returncode == 0:
        return Path(done.stdout.strip()) / LEDGER
    if "not a git repository" in done.stderr:
        return root / LEDGER
    raise ConfigError(
        f"{LEDGER}: expected git to name the repository's common folder, got: {' '.join(done.stderr.split())}; repair the repository first"
    )


def take_look(split: str, model: str, root: Path = Path()) -> Look:
    """The look of a model at a split. A new look is appended; a repeated one keeps its number.

    Call this before any measurement, so that an interrupted run counts as a look. Earlier looks are returned as known when this look began,
    so that a repeated stage gets the same answer whatever runs in parallel.

    Raises:
        ConfigError: the ledger can't be read or written.
    """
    with _opened(root) as file:
        lines = _read(file)
        at = next((i for i, line in enumerate(lines) if (line.kind, line.split, line.model) == ("look", split, model)), len(lines))
        if at == len(lines):
            _append(file, _Line(kind="look", split=split, model=model, run=run_name(root), at=_now()))
    before = [line for line in lines[:at] if line.split == split]
    looks, results = [line for line in before if line.kind == "look"], _first_results(before)
    earlier = [_shown(k, line, results.get(line.model)) for k, line in enumerate(looks, start=1)]
    return Look(len(earlier) + 1, split, model, earlier)


def write_result(split: str, model: str, *, passed: bool, accuracy: float | None, confidence: float, root: Path = Path()) -> None:
    """Append the result of a look, unless it is the last one of that look.

    Raises:
        ConfigError: the ledger can't be read or written.
    """
    found = {"passed": passed, "accuracy": None if accuracy is None else round(accuracy, 6), "confidence": confidence}
    line = _Line(kind="result", split=split, model=model, run=run_name(root), at=_now(), **found)
    with _opened(root) as file:
        of_look = [x for x in _read(file) if (x.kind, x.split, x.model) == ("result", split, model)]
        if not of_look or of_look[-1].model_dump(include=set(found)) != found:
            _append(file, line)


def check_ledger(gate: dict[str, Any], root: Path = Path()) -> None:
    """Compare gate.json with the ledger's lines about its look: the model, the number of looks before it, the verdict and the accuracy.

    Raises:
        ConfigError: they differ, or the ledger has no such look.
    """
    look, again = gate["look"], "rerun it where its model is registered, `dvc repro --single-item --force gate_reward`"
    with _opened(root) as file:
        lines = [line for line in _read(file) if line.split == look["split"]]
    at = next((i for i, line in enumerate(lines) if (line.kind, line.model) == ("look", look["model"])), None)
    results = [line for line in lines if (line.kind, line.model) == ("result", look["model"])]
    if at is None or not results:
        raise ConfigError(
            f"gate.json: expected the look of its model, md5 {look['model']}, in this repository's {LEDGER}, got none; the gate ran "
            f"elsewhere: {again}"
        )
    earlier = sum(line.kind == "look" for line in lines[:at])
    if look["number"] <= earlier or len(look["earlier"]) != look["number"] - 1:
        raise ConfigError(f"gate.json: expected look {earlier + 1} at its pairs or a later one by {LEDGER}, got {look['number']}; {again}")
    accuracy = None if gate["accuracy"] is None else round(gate["accuracy"], 6)
    if (gate["passed"], accuracy) not in [(line.passed, line.accuracy) for line in results]:
        known = results[-1]
        raise ConfigError(
            f"gate.json: expected what {LEDGER} says of its model, passed {known.passed} with accuracy {known.accuracy}, got passed "
            f"{gate['passed']} with accuracy {accuracy}; {again}"
        )


def run_name(root: Path) -> str:
    """The checked-out branch, or the folder's name without one."""
    done = _git(root, "symbolic-ref", "--short", "--quiet", "HEAD")
    return root.resolve().name if done is None or done.returncode else done.stdout.strip()


def _git(root: Path, *arguments: str) -> subprocess.CompletedProcess[str] | None:
    """None: git is not installed."""
    environment = without_git_places() | {"LC_ALL": "C"}
    try:
        return subprocess.run(["git", *arguments], cwd=root, env=environment, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None


def _first_results(lines: list[_Line]) -> dict[str, _Line]:
    """First result of each model. Later ones with other thresholds are left out, so that gate.json's earlier looks don't change."""
    return {line.model: line for line in reversed(lines) if line.kind == "result"}


def _shown(number: int, line: _Line, result: _Line | None) -> dict[str, Any]:
    known = {key: getattr(result, key, None) for key in ("passed", "accuracy", "confidence")}
    return {"number": number, "model": line.model, "run": line.run, **known}


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


@contextlib.contextmanager
def _opened(root: Path) -> Iterator[IO[bytes]]:
    """The ledger, exclusively locked."""
    path = ledger_path(root)
    try:
        file = path.open("a+b")
    except OSError as error:
        raise ConfigError(
            f"{path}: expected to be able to write the gate's looks there, got: {error.strerror}; change its rights"
        ) from error
    with file:
        try:
            lock_file(file, LOCK_DEADLINE)
        except TimeoutError as error:
            raise ConfigError(f"{path}: {error}; wait for it") from error
        yield file


def _read(file: IO[bytes]) -> list[_Line]:
    file.seek(0)
    found = []
    for number, text in enumerate(file.read().splitlines(), start=1):
        try:
            found.append(_Line.model_validate_json(text))
        except ValidationError as error:
            got = shown(text.decode(errors="replace"))
            raise ConfigError(
                f"{file.name}, line {number}: expected one that the gate wrote, got {got!r}; correct or remove that line"
            ) from error
    return found


def _append(file: IO[bytes], line: _Line) -> None:
    """Append one line durably, or nothing."""
    end = file.seek(0, os.SEEK_END)
    try:
        file.write(line.model_dump_json(exclude_none=True).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
    except OSError as error:
        with contextlib.suppress(OSError):
            os.ftruncate(file.fileno(), end)
        raise ConfigError(f"{file.name}: expected to write a look there, got: {error.strerror}; make room") from error
