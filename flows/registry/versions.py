"""Models as versions: what a run's commit must be like to become one, and getting a version's files back by their hashes."""

from __future__ import annotations

import json
import logging
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flows.chain.stages import STATUS_DEADLINE, dvc_environment, with_something_to_do
from flows.chain.worktree import git, run_within, worktree_path
from flows.registry.decisions import add_version, registry_lock
from flows.registry.dvc_fetch import fetch_from_remote
from flows.registry.evidence import GATE, LOCK, ROUNDS_LOCK, check_version, decision, decision_of_round, read_locks
from flows.registry.state import Registry, read_registry
from flows.registry.tags import Version
from rlhf_core.config import ConfigError, parse_json, read_yaml_text
from rlhf_core.paths import EVALUATION_METRICS, REWARD_MODEL, ROUNDS_PIPELINE, round_folder
from rlhf_core.process import module_command
from rlhf_core.provenance.cached_model import cache_folder, checkout, missing, verify
from rlhf_core.provenance.lineage import hashes_of_outs, history, lineage

LAST_STAGE = {"reward-model": "gate_reward", "policy": "train_policy"}  # up to here DVC must find nothing to do

log = logging.getLogger("rlhf.flows")


def register(root: Path, artifact: str, run: str | None, round_number: int | None = None) -> Version:
    """Make the model of a run's last commit a version.

    Args:
        run: whose worktree, runs/<run>; None: the current folder.
        round_number: of a series of iterative DPO, whose policy it is then; None: the chain's own model.
    Raises:
        ConfigError: the commit isn't what made the model, the round was not accepted, or the model isn't in DVC's cache.
    """
    workspace = root if run is None else worktree_path(root, run)
    if not (workspace / "dvc.yaml").is_file():
        raise ConfigError(f"{workspace.name}: expected the worktree of a run, got none; `git worktree list` shows them")
    _check_committed(workspace)
    commit, branch = git(workspace, "rev-parse", "HEAD"), git(workspace, "rev-parse", "--abbrev-ref", "HEAD")
    lock, gate = read_locks(workspace, commit), _read(workspace, GATE)
    if artifact == "reward-model" and not gate["needed"]:
        raise ConfigError(f"{artifact} of {branch}: expected a reward model, got none; reward.enabled is false there")
    if round_number is not None:
        path, last, decided = _of_round(workspace, artifact, round_number)
    else:
        decided = decision(artifact)
        path = _read(workspace, "dvc.yaml")["artifacts"][artifact]["path"]
        last = LAST_STAGE[artifact] if artifact != "reward-model" or gate["passed"] or gate["override"] else "train_reward"
    try:
        params = _read(workspace, "params.yaml")
        made_of = lineage(path, commit=commit, run=branch, params=params, lock=lock, gate=gate, decided=decided)
        made_of["sha256"] = _check_in_cache(workspace, lock, path)
    except ValueError as error:
        raise ConfigError(f"{artifact} of {branch}: {error}") from error
    _check_nothing_to_do(workspace, last)
    known = {version.md5: version.version for version in read_registry(root, "reward-model").versions.values()}
    made_of["reward_model_version"] = known.get(made_of["parents"].get(str(REWARD_MODEL)))
    with registry_lock(root):
        return add_version(root, artifact, made_of)


def _check_committed(workspace: Path) -> None:
    """A version is a commit's. What else lies there untracked may stay.

    Raises:
        ConfigError: git has another content of a file, or not yet the lock or the verdict; naming those and the results beside them.
    """
    from flows.runs.results import result_paths  # pandas comes with it, which the flow's command line is not to wait for

    changed = {line.split()[-1] for line in git(workspace, "status", "--porcelain", "--untracked-files=no").splitlines()}
    results = set(git(workspace, "ls-files", "--others", "--exclude-standard", "--", *result_paths(workspace)).splitlines())
    if changed or results & {LOCK, ROUNDS_LOCK, GATE}:
        files = sorted(changed | results)
        raise ConfigError(
            f"{workspace.name}: expected all committed, got changes in {', '.join(files)}; commit them (`git add {shlex.join(files)}`, "
            "`git commit`) in its folder, for a version is a commit's"
        )


def _of_round(workspace: Path, artifact: str, number: int) -> tuple[str, str, dict[str, Any]]:
    """Path of a round's policy, the last stage behind it, and what it was accepted by.

    Raises:
        ConfigError: there is no such round, or it kept the policy before.
    """
    if artifact != "policy":
        raise ConfigError(f"{artifact}: expected the policy with a round, got another model; rounds train no reward model")
    folder = round_folder(number)
    verdict = _read(workspace, f"{folder}/{EVALUATION_METRICS}")
    if not verdict["accepted"]:
        raise ConfigError(f"round {number}: expected one whose policy was accepted, got one that wasn't: {verdict['reason']}")
    return f"{folder}/policy", f"{ROUNDS_PIPELINE}:evaluate_round@{number}", decision_of_round(number, verdict)


def _read(workspace: Path, name: str) -> Any:
    """A YAML or JSON file as the last commit has it.

    Raises:
        ConfigError: it isn't in the commit.
    """
    try:
        text = git(workspace, "show", f"HEAD:{name}")
    except ConfigError:
        raise ConfigError(
            f"{workspace.name}: expected {name} in the last commit, got none; bring the chain up with `dvc repro`, and commit dvc.lock, "
            "metrics and plots"
        ) from None
    subject = f"{name} in {workspace.name}"
    return parse_json(text, subject) if name.endswith(".json") else read_yaml_text(text, subject)


def _check_nothing_to_do(workspace: Path, stage: str) -> None:
    """DVC finds that params, code and data are those which dvc.lock names.

    Raises:
        ConfigError: naming the stages for which they aren't.
    """
    done = _dvc(workspace, "status", "--json", "--with-deps", stage)
    found = json.loads(done.stdout) if done.returncode == 0 else None
    found = None if found is None else with_something_to_do(workspace, found)
    if found is None:
        raise ConfigError(f"{workspace.name}: expected `dvc status` to succeed, got: {' '.join(done.stderr.split())}")
    if found:
        why = "; ".join(f"{name}: {', '.join(sorted(_changes(changes)))}" for name, changes in found.items())
        raise ConfigError(
            f"{workspace.name}: expected a commit whose dvc.lock matches its params, code and data, got other ones ({why}); run "
            f"`dvc repro {stage}` there, and commit what it made"
        )


def _changes(changes: list[Any]) -> Iterator[str]:
    """Names of what `dvc status --json` says of a stage."""
    for change in changes:
        if isinstance(change, str):
            yield change
            continue
        for entries in change.values():
            for path, detail in entries.items():
                yield from (f"{key} {state}" for key, state in detail.items()) if isinstance(detail, dict) else (f"{path} {detail}",)


def _check_in_cache(workspace: Path, lock: dict[str, Any], path: str) -> dict[str, str]:
    """All that led to the model is in DVC's cache, or in git, and the model itself is whole.

    Returns:
        The sha256 of each of the model's files, by its name.
    Raises:
        ValueError: something is missing, or a file of the model was changed.
    """
    cache = cache_folder(workspace)
    made = dict(hashes_of_outs(lock, history(lock, path)))
    in_git = set(git(workspace, "ls-files").splitlines())
    for out, md5 in made.items():
        if out not in in_git and (lost := missing(md5, cache)):
            raise ValueError(
                f"{out}: expected all of it in DVC's cache, got nothing for {lost[0]}; `dvc pull` or `dvc repro` brings it back"
            )
    return verify(made[path], root=workspace)


def fetch(root: Path, registry: Registry, version: str | None, folder: Path) -> tuple[Version, str]:
    """A version's files by its hashes: from DVC's cache, or else from the remote, and laid out in `folder`.

    Args:
        version: None: the promoted one.
    Returns:
        The version, and where it came from: cache or remote.
    Raises:
        ConfigError: there is no such version, or its tag isn't what its commit says, or the files are in neither or aren't the tag's.
    """
    if version is None:
        registry.check_decisions()
    chosen = registry.get(version)
    check_version(root, chosen)
    source = "cache"
    try:
        if missing(chosen.md5, cache_folder(root)):
            source = "remote"
            fetch_from_remote(root, chosen.commit, chosen.lineage["path"], chosen.md5)
        checkout(chosen.md5, folder, root=root, sha256=chosen.lineage.get("sha256"))
    except ValueError as error:
        raise ConfigError(f"{chosen.artifact} {chosen.version}: {error}") from error
    return chosen, source


def _dvc(workspace: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_within(STATUS_DEADLINE, module_command("dvc", *arguments), workspace, dvc_environment(workspace))
