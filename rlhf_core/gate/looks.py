"""The ledger of looks: which models were judged on a held-out split, in which order, and the significance level of each look.

If models are judged on the same pairs until one passes, one passes by chance. The ledger counts the models that were judged on a split, or
on one that shares at least SHARED of its pairs, and the level decreases with their number.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, Literal

from pydantic import Field, ValidationError, model_validator

from rlhf_core.config import ConfigError, GateConfig, Section, shown
from rlhf_core.gate.overlap import SplitKeys, read_sketch, write_sketch
from rlhf_core.stage.files import lock_file

LEDGER = "rlhf-gate-looks.jsonl"
LOCK_DEADLINE = 60.0  # seconds
SHARED = 0.1  # of a split's pairs, from which on the looks at another split count for it
_GIT_ASIDE = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE")  # set in a git hook; they could name another repository


def look_level(confidence: float, number: int) -> float:
    """The one-sided level of a split's look `number`, from 1.

    alpha = (1 - confidence) / 2,  level_1 = alpha,  level_k = alpha / (k (k - 1)) for k > 1
    The levels of all later looks sum to alpha, since 1 / (k (k - 1)) = 1 / (k - 1) - 1 / k. So the chance that any of any number of
    models below the threshold passes, on splits that all share pairs, is at most 2 alpha, whatever the dependence of their results.
    Source: alpha-spending, Tian and Ramdas 2021, https://arxiv.org/abs/1910.04900
    """
    alpha = (1 - confidence) / 2
    return alpha if number == 1 else alpha / (number * (number - 1))


def at_look(config: GateConfig, number: int) -> GateConfig:
    """The gate's settings with the two-sided confidence of a look's one-sided level."""
    return config if number == 1 else config.model_copy(update={"confidence": 1 - 2 * look_level(config.confidence, number)})


class _Line(Section):
    """A line of the ledger. kind: split, sketches of its texts before its first look; look, a model begins to be judged on a split; or
    result, its outcome.

    split: of `split_hash`. model: md5 of its folder, as in dvc.lock. run: branch, or folder without git. at: ISO 8601.
    confidence: of the intervals that decided. prompts, responses: of `write_sketch`.
    """

    kind: Literal["split", "look", "result"]
    split: str = Field(pattern=r"^[0-9a-f]{64}$")
    model: str | None = Field(default=None, pattern=r"^[0-9a-f]{32}\.dir$")
    run: str
    at: str
    passed: bool | None = None
    accuracy: float | None = None
    confidence: float | None = None
    prompts: str | None = None
    responses: str | None = None

    @model_validator(mode="after")
    def _whole(self) -> _Line:
        if (self.model is None) != (self.kind == "split"):
            raise ValueError("a look without its model, or a split with one")
        if self.kind == "split":
            read_sketch(self.prompts or "nothing")
            read_sketch("nothing" if self.responses is None else self.responses)
        return self


@dataclass(frozen=True)
class Look:
    """number: from 1, in the order in which models were judged on the split or on one that shares its pairs; earlier: the looks before it,
    as in gate.json.
    """

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


def take_look(keys: SplitKeys, model: str, root: Path = Path()) -> Look:
    """The look of a model at a split. A new look is appended; a repeated one keeps its number.

    Looks at another split count if at least SHARED of this one's pairs were in it. Lines of older versions have no sketches of their
    splits: they count for exactly the same pairs.

    Call this before any measurement, so that an interrupted run counts as a look. Earlier looks are returned as known when this look began,
    so that a repeated stage gets the same answer whatever runs in parallel.

    Raises:
        ConfigError: the ledger can't be read or written.
    """
    split = keys.sha256
    with _opened(root) as file:
        lines = _read(file)
        at = next((i for i, line in enumerate(lines) if (line.kind, line.split, line.model) == ("look", split, model)), len(lines))
        if at == len(lines):
            begun = {"split": split, "run": run_name(root), "at": _now()}
            sketches = {"prompts": write_sketch(keys.prompts), "responses": write_sketch(keys.responses)}
            known = any((line.kind, line.split) == ("split", split) for line in lines)
            _append(file, *([] if known else [_Line(kind="split", **begun, **sketches)]), _Line(kind="look", model=model, **begun))
    before = lines[:at]
    shares = {line.split: keys.share_in(read_sketch(line.prompts), read_sketch(line.responses)) for line in before if line.kind == "split"}
    shares = {name: share for name, share in shares.items() if share >= SHARED} | {split: 1.0}
    looks, results = [line for line in before if line.kind == "look" and line.split in shares], _first_results(before)
    earlier = [
        {**_shown(k, line, results.get((line.split, line.model))), "shared": round(shares[line.split], 3)}
        for k, line in enumerate(looks, start=1)
    ]
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


def run_name(root: Path) -> str:
    """The checked-out branch, or the folder's name without one."""
    done = _git(root, "symbolic-ref", "--short", "--quiet", "HEAD")
    return root.resolve().name if done is None or done.returncode else done.stdout.strip()


def _git(root: Path, *arguments: str) -> subprocess.CompletedProcess[str] | None:
    """None: git is not installed."""
    environment = {key: value for key, value in os.environ.items() if key not in _GIT_ASIDE} | {"LC_ALL": "C"}
    try:
        return subprocess.run(["git", *arguments], cwd=root, env=environment, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None


def _first_results(lines: list[_Line]) -> dict[tuple[str, str | None], _Line]:
    """First result of each look. Later ones with other thresholds are left out, so that gate.json's earlier looks don't change."""
    return {(line.split, line.model): line for line in reversed(lines) if line.kind == "result"}


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


def _append(file: IO[bytes], *lines: _Line) -> None:
    """Append lines durably, or nothing."""
    end = file.seek(0, os.SEEK_END)
    try:
        file.write(b"".join(line.model_dump_json(exclude_none=True).encode() + b"\n" for line in lines))
        file.flush()
        os.fsync(file.fileno())
    except OSError as error:
        with contextlib.suppress(OSError):
            os.ftruncate(file.fileno(), end)
        raise ConfigError(f"{file.name}: expected to write a look there, got: {error.strerror}; make room") from error
