"""Verifies a version's tag against the files of its commit: the lineage is computed again and must be the same.

A tag can contain any verdict. The commit also has the gate's verdict, the params and the hashes, and changing those makes another commit.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from flows.registry.objects import Object, read_objects
from flows.registry.tags import Version
from rlhf_core.config import MAX_BYTES, ConfigError, parse_json, read_yaml_text, shown
from rlhf_core.paths import GATE_METRICS, ROUNDS, ROUNDS_PIPELINE, STAGE_METRICS
from rlhf_core.provenance.lineage import lineage

LOCK, ROUNDS_LOCK, PARAMS, PIPELINE_FILE, GATE, CHECK = (
    "dvc.lock",
    str(ROUNDS_PIPELINE.with_suffix(".lock")),
    "params.yaml",
    "dvc.yaml",
    str(GATE_METRICS),
    str(STAGE_METRICS["check_model"]),
)
# Keys of a lineage and the file of the commit with the same value.
SAID_BY = {
    **{"md5": LOCK, "size": LOCK, "files": LOCK, "data": LOCK, "inputs": LOCK, "parents": LOCK, "stages": LOCK},
    **{"params": PARAMS, "gate": GATE, "decided": "the chain or the round", "services": CHECK},
}
_ROUND = re.compile(rf"{ROUNDS}/([1-9][0-9]*)/policy")


class _Form(BaseModel):
    model_config = ConfigDict(strict=True)


class _Entry(_Form):
    path: str
    md5: str
    size: int | None = None
    nfiles: int | None = None


class _Stage(_Form):
    params: dict[str, dict[str, Any]] = {}
    deps: list[_Entry] = []
    outs: list[_Entry] = []


class _Lock(_Form):
    """The parts of dvc.lock that are read."""

    stages: dict[str, _Stage]


def read_files(root: Path, commit: str, names: Iterable[str]) -> dict[str, str | None]:
    """Text files of a commit by name; None for a file that the commit doesn't have.

    Raises:
        ConfigError: the repository lacks the commit, or a file exceeds MAX_BYTES or isn't UTF-8.
    """
    names = list(names)
    itself, *found = read_objects(root, [commit, *(f"{commit}:{name}" for name in names)])
    if itself is None or itself.kind != "commit":
        raise ConfigError(f"commit {commit[:10]}: expected it in this repository, got nothing; `git fetch --tags` brings it")
    return {name: _text(content, f"{name} of commit {commit[:10]}") for name, content in zip(names, found, strict=True)}


def _text(found: Object | None, subject: str) -> str | None:
    if found is None or found.kind != "blob":
        return None
    if found.content is None:
        raise ConfigError(f"{subject}: expected at most {MAX_BYTES} bytes, got {found.size}; don't use that commit")
    try:
        return found.content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{subject}: expected UTF-8, got another byte at {error.start}; don't use that commit") from error


def read_locks(root: Path, commit: str) -> dict[str, Any]:
    """Return the content of dvc.lock in a commit, with the stages of its rounds of iterative DPO where it has any.

    Raises:
        ConfigError: there is no dvc.lock, or it isn't one.
    """
    return locks_of(read_files(root, commit, (LOCK, ROUNDS_LOCK)), commit)


def locks_of(files: dict[str, str | None], commit: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in (LOCK, ROUNDS_LOCK):
        if (text := files[name]) is not None:
            found |= _stages(text, f"{name} of commit {commit[:10]}")
    if not found:
        raise ConfigError(
            f"dvc.lock: expected it in commit {commit[:10]}, got none; run `dvc repro`, and commit dvc.lock, metrics and plots"
        )
    return {"stages": found}


def _stages(text: str, subject: str) -> dict[str, Any]:
    tree = read_yaml_text(text, subject)
    try:
        _Lock.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{subject}: expected what DVC writes, got another value of {shown(key)} ({shown(first['msg'])})") from error
    return tree["stages"]


def read_check(root: Path, commit: str) -> dict[str, Any] | None:
    """metrics/check_model.json of a commit; None: it has none."""
    return _json(read_files(root, commit, (CHECK,))[CHECK], commit, CHECK)


def check_version(root: Path, version: Version) -> None:
    """Verify a version's tag before a decision.

    Raises:
        ConfigError: the tag contradicts its commit; names both values.
    """
    subject = f"tag {version.artifact}@{version.version}"
    try:
        _check(root, version, subject)
    except ConfigError as error:
        raise error if str(error).startswith(subject) else ConfigError(f"{subject}: {error}") from error


def _check(root: Path, version: Version, subject: str) -> None:
    claimed, commit = version.lineage, version.commit
    files = read_files(root, commit, (LOCK, ROUNDS_LOCK, PARAMS, PIPELINE_FILE, GATE, CHECK))
    lock, gate = locks_of(files, commit), _json(files[GATE], commit, GATE)
    params = _yaml(files[PARAMS], commit, PARAMS)
    decided = _check_path(root, version, _yaml(files[PIPELINE_FILE], commit, PIPELINE_FILE))
    try:
        made = lineage(
            claimed["path"],
            commit=commit,
            run=claimed["run"],
            params=params,
            lock=lock,
            gate=gate,
            decided=decided,
            check=_json(files[CHECK], commit, CHECK),
        )
        made = json.loads(json.dumps(made))  # in the tag's form
    except (ValueError, TypeError) as error:
        raise ConfigError(f"expected what its commit {commit[:10]} says, got {shown(str(error))}; don't use it") from error
    for key, file in SAID_BY.items():
        if key in claimed and claimed[key] != made.get(key):
            where, wanted, got = _difference(key, made.get(key), claimed[key])
            raise ConfigError(
                f"{subject}: expected what {file} of its commit {commit[:10]} says, {where}: {wanted}, got {got}; don't use it"
            )
    if version.verdict == "passed" or (gate or {}).get("override"):
        _check_gate_is_of_this_model(version, lock, files[GATE] or "")


def decision(artifact: str) -> dict[str, Any] | None:
    """Return the stage that accepts a model of the chain, and its split; None if no stage does."""
    return {"by": "gate_reward", "split": "test"} if artifact == "reward-model" else None


def decision_of_round(number: int, verdict: dict[str, Any]) -> dict[str, Any]:
    """Return the decision that accepted a round's policy.

    verdict: the round's evaluate.json.
    """
    return {"by": f"evaluate_round@{number}", **verdict.get("promotion", {})}


def _check_path(root: Path, version: Version, pipeline: dict[str, Any]) -> dict[str, Any] | None:
    """Check that the model is the artifact of the commit's dvc.yaml or an accepted round's policy, and return the decision about it."""
    path = version.lineage["path"]
    artifacts = pipeline.get("artifacts")
    artifact = artifacts.get(version.artifact) if isinstance(artifacts, dict) else None
    declared = artifact.get("path") if isinstance(artifact, dict) else None
    if path == declared:
        return decision(version.artifact)
    found = _ROUND.fullmatch(path)
    if version.artifact != "policy" or not found:
        raise ConfigError(
            f"expected the model that dvc.yaml of its commit names, {shown(repr(declared))}, got {shown(repr(path))}; don't use it"
        )
    name = f"{path.removesuffix('/policy')}/metrics/evaluate.json"
    verdict = _json(read_files(root, version.commit, (name,))[name], version.commit, name)
    if not isinstance(verdict, dict) or verdict.get("accepted") is not True:
        raise ConfigError(f"expected the policy of an accepted round, got one that {name} of its commit doesn't accept; don't use it")
    return decision_of_round(int(found[1]), verdict)


def _check_gate_is_of_this_model(version: Version, lock: dict[str, Any], gate: str) -> None:
    """Check that dvc.lock has exactly this verdict as output of a stage that read exactly this model."""
    found = hashlib.md5(gate.encode(), usedforsecurity=False).hexdigest()
    stage = next((s for s in lock["stages"].values() if any(out["path"] == GATE for out in s.get("outs", []))), None)
    made = {} if stage is None else {entry["path"]: entry["md5"] for entry in (*stage.get("outs", []), *stage.get("deps", []))}
    if made.get(GATE) != found:
        raise ConfigError(f"expected dvc.lock of its commit to name {GATE} with md5 {found}, got {made.get(GATE, 'none')}; don't use it")
    path = version.lineage["path"]
    if version.artifact == "reward-model" and made.get(path) != version.md5:
        raise ConfigError(
            f"expected a verdict on md5 {version.md5}, got one on {made.get(path, 'another model')} by dvc.lock; don't use it"
        )


@dataclass(frozen=True)
class GateProblem:
    """A tag's verdict that contradicts its commit.

    short: text for a table.
    """

    message: str
    short: str


def gates(root: Path, versions: list[Version]) -> dict[str, GateProblem | None]:
    """Compare each tag's verdict with gate.json of its commit, reading all together; None for tags that agree.

    For tables: `check_version` verifies the whole tag.
    """
    found = read_objects(root, [f"{version.commit}:{GATE}" for version in versions])
    return {version.version: _gate_problem(version, content) for version, content in zip(versions, found, strict=True)}


def _gate_problem(version: Version, found: Object | None) -> GateProblem | None:
    subject = f"{GATE} of commit {version.commit[:10]}"
    try:
        text = _text(found, subject)
        gate = None if text is None else parse_json(text, subject)
    except ConfigError as error:
        return GateProblem(str(error), "commit's can't be read")
    claimed = version.lineage["gate"]
    if gate == claimed:
        return None
    where, wanted, got = _difference("gate", gate, claimed)
    problem = f"tag {version.artifact}@{version.version}: expected what {subject} says, {where}: {wanted}, got {got}; don't use it"
    if gate is None:
        return GateProblem(problem, "commit has none")
    passed = gate.get("passed") if isinstance(gate, dict) else None
    if not isinstance(passed, bool) or passed is (claimed or {}).get("passed"):
        return GateProblem(problem, "commit differs")
    return GateProblem(problem, f"commit says {'passed' if passed else 'rejected'}")


def _difference(key: str, wanted: Any, got: Any) -> tuple[str, str, str]:
    """Return the first place where two values differ, and both values there."""
    if isinstance(wanted, dict) and isinstance(got, dict):
        first = ("passed",) if key == "gate" else ()  # the most important key of a verdict
        for name in (*first, *sorted(wanted.keys() | got.keys())):
            if wanted.get(name) != got.get(name):
                return _difference(f"{key}.{name}", wanted.get(name), got.get(name))
    return shown(key), shown(json.dumps(wanted)), shown(json.dumps(got))


def _json(text: str | None, commit: str, name: str) -> Any:
    return None if text is None else parse_json(text, f"{name} of commit {commit[:10]}")


def _yaml(text: str | None, commit: str, name: str) -> dict[str, Any]:
    if text is None:
        raise ConfigError(f"expected {name} in its commit {commit[:10]}, got none; don't use it")
    return read_yaml_text(text, f"{name} of commit {commit[:10]}")
