"""What a tracker gets of a run, read from the run's files: params, lineage, curves, figures, samples and the report."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from flows.chain.stages import read_stages
from flows.chain.worktree import git
from flows.registry.state import ARTIFACTS, read_registry
from flows.runs.record import GATE_REJECTED, read_record
from rlhf_core.config import UNTRACKED_SECTIONS, ConfigError, Params, credential_in, read_yaml
from rlhf_core.paths import CURVES, EVALUATION_SAMPLES, INPUTS, REPORT, ROLLOUTS, ROUNDS, SCRATCH, STAGE_METRICS, STOPPED_REPORT, TIMINGS
from rlhf_core.provenance.lineage import named_inputs, package_versions
from rlhf_core.stage.rollouts import step_files

Value = float | int | str | bool | None
Rows = list[dict[str, Any]]
Point = tuple[int, dict[str, float]]  # step, names and values
MAX_SAMPLES = 1000  # rows of a table
MAX_TEXT = 1000  # characters of a figure that is a text, such as the gate's message
WITHHELD = "withheld: it looks like a credential"
RUNNING = "running"  # outcome of a run that goes on


@dataclass(frozen=True)
class Part:
    """A stage of the chain or of a round, and the files of its results."""

    name: str
    curves: Path | None
    metrics: Path | None


@dataclass(frozen=True)
class Curve:
    """The rows of a stage's curves, with a hash of the first n rows for each n, by which other work's rows are recognised."""

    points: Sequence[Point]
    digests: Sequence[str]


class RunFiles:
    """The files of a run's folder.

    Args:
        since: the time in seconds from which unfinished curves are this run's; an older scratch folder may be of abandoned work.
    """

    def __init__(self, workspace: Path, params: Params, since: float = 0.0):
        self.workspace, self.params, self._since = workspace, params, since
        self._read: dict[Path, tuple[tuple[int, int], Curve]] = {}  # curves of finished stages by path, with their file's time and size

    @property
    def outcome(self) -> str:
        """The outcome in the run's record; `done` for a folder that no flow has worked in."""
        return read_record(self.workspace).get("outcome", "done")

    @cached_property
    def _chain(self) -> list[Part]:
        return [Part(name, CURVES.get(name), STAGE_METRICS.get(name)) for name in read_stages(self.workspace)]

    def parts(self) -> list[Part]:
        """All stages in order, those of rounds behind the chain's."""
        numbers = sorted(int(p.name) for p in (self.workspace / ROUNDS).glob("[0-9]*") if p.name.isdigit())
        return self._chain + [part for number in numbers for part in _round(number)]

    @property
    def progress(self) -> tuple[Any, Any]:
        """Changes with each stage that begins, and at the end."""
        record = read_record(self.workspace)
        return record.get("stage"), record.get("outcome")

    def reached(self) -> tuple[list[Part], Part | None]:
        """The stages that are done, and the one at work or at which the run ended early."""
        record, parts = read_record(self.workspace), self.parts()
        names = [part.name for part in parts]
        if record.get("outcome", "done") == "done":
            last = record.get("until")
            return (parts[: names.index(last) + 1] if last in names else parts), None
        stage = record.get("stage")
        return (parts[: names.index(stage)], parts[names.index(stage)]) if stage in names else ([], None)

    def curves(self) -> Iterator[tuple[str, Curve]]:
        done, at_work = self.reached()
        for part in done:
            if part.curves is not None and (path := self.workspace / part.curves).is_file():
                yield part.name, self._finished(part.name, path)
        if at_work is not None and (folder := self._scratch(at_work.name)) is not None:
            yield at_work.name, read_curve(folder / "curves.csv", self._timings(at_work.name, None))

    def _finished(self, stage: str, path: Path) -> Curve:
        now = (path.stat().st_mtime_ns, path.stat().st_size)
        if path not in self._read or self._read[path][0] != now:
            self._read[path] = (now, read_curve(path, self._timings(stage, path)))
        return self._read[path][1]

    def _scratch(self, stage: str) -> Path | None:
        """The newest scratch folder of an unfinished stage that has curves of this run."""
        found = [(path.stat().st_mtime, path) for path in (self.workspace / SCRATCH / stage).glob("*/curves.csv")]
        newest = max(found, default=(0.0, None))
        return newest[1].parent if newest[1] is not None and newest[0] >= self._since else None

    def _timings(self, stage: str, curves: Path | None) -> dict[int, dict[str, float]]:
        """Timings by step; empty where they are another run's, which DVC restores curves without."""
        path = self.workspace / TIMINGS / f"{stage}.csv"
        if not path.is_file():
            return {}
        of = path.with_suffix(".of")
        mine = path.stat().st_mtime >= self._since if curves is None else of.is_file() and of.read_text("ascii") == _sha256(curves)
        return dict(read_curve(path, {}).points) if mine else {}

    def figures(self) -> dict[str, Value]:
        """The figures of all finished stages and the gate's verdict, `results/STAGE/NAME` -> number or text."""
        done, at_work = self.reached()
        ended = [*done, *([at_work] if at_work is not None and self.outcome == GATE_REJECTED else [])]
        found: dict[str, Value] = {}
        for part in ended:
            if part.metrics is not None and (path := self.workspace / part.metrics).is_file():
                found |= {f"results/{part.name}/{name}": value for name, value in flat(json.loads(path.read_text("utf-8")), "/").items()}
        return shareable({name: _short(value) for name, value in found.items() if value is not None})

    def settings(self) -> dict[str, Any]:
        """All params with their defaults, without the sections that change no result."""
        tree = self.params.model_dump(mode="json", exclude=set(UNTRACKED_SECTIONS))
        return {key: value for key, value in tree.items() if value is not None}

    def lineage(self) -> dict[str, str]:
        """What the run was made from, and which versions it is: commit, hashes of inputs, data and models, registry, packages."""
        found = {
            "run": self.workspace.name,
            "commit": _git(self.workspace, "rev-parse", "HEAD"),
            "branch": _git(self.workspace, "rev-parse", "--abbrev-ref", "HEAD"),
            **{f"input.{key}": f"{place} {hashed}".strip() for key, place, hashed in named_inputs(self._json(INPUTS))},
            **{f"md5.{path}": md5 for path, md5 in self._outs().items()},
            **self._versions(),
            **{f"package.{name}": version for name, version in package_versions().items()},
        }
        return {name: str(value) for name, value in shareable(found).items()}

    def _json(self, path: Path) -> dict[str, Any]:
        return json.loads((self.workspace / path).read_text("utf-8")) if (self.workspace / path).is_file() else {}

    def _outs(self) -> dict[str, str]:
        lock = self.workspace / "dvc.lock"
        stages = read_yaml(lock)["stages"] if lock.is_file() else {}
        outs = {out["path"]: out["md5"] for stage in stages.values() for out in stage.get("outs", [])}
        return {path: md5 for path, md5 in outs.items() if path.startswith(("data/prepared", "models/"))}

    def _versions(self) -> dict[str, str]:
        """The promoted version of each model, and the version that each model of this run is registered as."""
        found, outs = {}, {md5: path for path, md5 in self._outs().items()}
        for artifact in ARTIFACTS:
            with suppress(ConfigError):
                registry = read_registry(self.workspace, artifact)
                own = [v.version for v in registry.versions.values() if v.md5 in outs]
                promoted = registry.current
                found |= {f"registry.{artifact}.promoted": promoted.version} if promoted else {}
                found |= {f"registry.{artifact}.this_run": ", ".join(own)} if own else {}
        return found

    def new_rollouts(self) -> Iterator[tuple[int, Callable[[], Rows]]]:
        """The steps of RL under way whose rollouts are saved, and what reads them."""
        _, at_work = self.reached()
        if at_work is not None and at_work.name == "train_policy" and (folder := self._scratch(at_work.name)) is not None:
            yield from ((step, partial(_rollout_rows, path, MAX_SAMPLES)) for step, path in step_files(folder).items())

    def tables(self) -> Iterator[tuple[str, int, Rows]]:
        """Name, step and rows of each table of samples: the rollouts of a step of RL, and the evaluation's answers at step 0."""
        names = {part.name for part in self.reached()[0]}
        if "train_policy" in names and (path := self.workspace / ROLLOUTS).is_file():
            yield from _by_step(_rollout_rows(path))
        if "evaluate" in names and (path := self.workspace / EVALUATION_SAMPLES).is_file():
            yield "evaluation_samples", 0, _rows(path)

    def report(self) -> Path | None:
        """The report of a run that has ended."""
        outcome = self.outcome
        page = self.workspace / (REPORT if outcome == "done" else STOPPED_REPORT)
        ended = outcome != RUNNING and not (outcome == "done" and read_record(self.workspace).get("until"))
        return page if ended and page.is_file() else None


def _round(number: int) -> list[Part]:
    folder = ROUNDS / str(number)
    names = {"sample_round": "sample", "validate_round": "validation", "train_round": "train", "evaluate_round": "evaluate"}
    return [
        Part(f"{stage}@{number}", folder / "plots/train.csv" if stage == "train_round" else None, folder / f"metrics/{file}.json")
        for stage, file in names.items()
    ]


def read_curve(path: Path, timings: dict[int, dict[str, float]]) -> Curve:
    """The whole rows of a CSV file of curves. While the timings lag behind, the last rows wait for them."""
    try:
        lines = list(csv.DictReader(io.StringIO(path.read_text("utf-8", errors="replace"))))
    except OSError:  # a stage that ends moves its file
        lines = []
    points, digests, sofar = [], [], hashlib.sha256()
    last_timed = max(timings, default=math.inf)
    for line in lines:
        if None in line.values() or None in line or not line["step"]:
            break  # a row that is being written
        step = int(line["step"])
        if step > last_timed:
            break
        sofar.update(repr(sorted((name, value) for name, value in line.items() if value)).encode())
        points.append((step, _numbers(line) | timings.get(step, {})))
        digests.append(sofar.hexdigest())
    return Curve(points, digests)


def _numbers(line: dict[str, str]) -> dict[str, float]:
    """The finite numbers of a row, with those that reward functions and services measure, whose names vary."""
    found = json.loads(line["scorer_metrics"]) if line.get("scorer_metrics") else {}
    for name, text in line.items():
        with suppress(ValueError):
            found[name] = float(text)
    return {name: float(value) for name, value in found.items() if name != "step" and value is not None and math.isfinite(value)}


def _rows(path: Path) -> Rows:
    import pyarrow.parquet as pq

    return pq.read_table(path).slice(0, MAX_SAMPLES).to_pylist()


def _rollout_rows(path: Path, limit: int | None = None) -> Rows:
    """Rollouts without their lists by token: the advantage is the mean over the tokens, and `tokens` their number."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pq.read_table(path).slice(0, limit)
    if "version" not in table.column_names:  # another method's, without rows
        return []
    lengths = [len(of_one) - of_one.count(None) for of_one in table["version"].to_pylist()]
    advantages = [[a for a in of_one if a is not None] for of_one in table["advantage"].to_pylist()]
    plain = table.drop_columns([f.name for f in table.schema if pa.types.is_list(f.type)] + ["rollouts"]).to_pylist()
    means = [sum(of_one) / len(of_one) if of_one else None for of_one in advantages]
    return [row | {"advantage": mean, "tokens": n} for row, mean, n in zip(plain, means, lengths, strict=True)]


def _by_step(rows: Rows) -> Iterator[tuple[str, int, Rows]]:
    for step in dict.fromkeys(row["step"] for row in rows):
        yield "rollouts", step, [row for row in rows if row["step"] == step][:MAX_SAMPLES]


def flat(tree: dict[str, Any], separator: str = ".", prefix: str = "", *, records: bool = False) -> dict[str, Value]:
    """A tree of dicts as one dict, with the path to each value as its name; lists of plain values are texts, others only with `records`."""
    found: dict[str, Value] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            found |= flat(value, separator, f"{prefix}{key}{separator}", records=records)
        elif not isinstance(value, list):
            found[f"{prefix}{key}"] = value
        elif records or not any(isinstance(item, dict | list) for item in value):
            found[f"{prefix}{key}"] = json.dumps(value, ensure_ascii=False)
    return found


def shareable(facts: dict[str, Value]) -> dict[str, Value]:
    """The facts, without texts that look like credentials. Params are refused with such a text; messages of libraries may have one."""
    return {name: WITHHELD if isinstance(value, str) and credential_in(value, name) else value for name, value in facts.items()}


def _short(value: Value) -> Value:
    return value if not isinstance(value, str) or len(value) <= MAX_TEXT else value[: MAX_TEXT - 1] + "…"


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _git(workspace: Path, *arguments: str) -> str:
    try:
        return git(workspace, *arguments)
    except ConfigError:
        return "unknown"
