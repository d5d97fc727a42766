"""Registers a run's model as a version, and fetches a version's files by their hashes."""

from __future__ import annotations

import json
import logging
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flows.chain.stages import STATUS_DEADLINE, dvc_environment, with_something_to_do
from flows.chain.worktree import git, run_within, worktree_path
from flows.registry.decisions import add_version, registry_lock
from flows.registry.dvc_fetch import fetch_from_remote
from flows.registry.evidence import GATE, LOCK, ROUNDS_LOCK, check_version, decision, decision_of_round, read_check, read_locks
from flows.registry.figures import check_gate, check_round
from flows.registry.state import Registry, read_registry
from flows.registry.tags import Version
from rlhf_core.config import ConfigError, parse_json, read_yaml_text
from rlhf_core.paths import EVALUATION_METRICS, REWARD_MODEL, ROUNDS_PIPELINE, round_folder
from rlhf_core.process import module_command
from rlhf_core.provenance.dvc_cache import cache_folder, checkout, missing, verify
from rlhf_core.provenance.lineage import hashes_of_outs, history, lineage

LAST_STAGE = {"reward-model": "gate_reward", "policy": "train_policy"}  # the stages up to here must be up to date

log = logging.getLogger("rlhf.flows")


def register(root: Path, artifact: str, run: str | None, round_number: int | None = None) -> Version:
    """Make the model of a run's last commit a version.

    Args:
        run: name of the worktree, runs/<run>; None: the current folder.
        round_number: register the policy of this round of iterative DPO; None: the chain's own model.
    Raises:
        ConfigError: the commit doesn't reproduce the model, the round was not accepted, or the model isn't in DVC's cache.
    """
    workspace = root if run is None else worktree_path(root, run)
    if not (workspace / "dvc.yaml").is_file():
        raise ConfigError(f"{workspace.name}: expected the worktree of a run, got none; `rlhf runs list` shows them")
    check_committed(workspace)
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
        made_of = lineage(
            path, commit=commit, run=branch, params=params, lock=lock, gate=gate, decided=decided, check=read_check(workspace, commit)
        )
        made_of["sha256"] = _check_in_cache(workspace, lock, path)
    except ValueError as error:
        raise ConfigError(f"{artifact} of {branch}: {error}") from error
    _check_nothing_to_do(workspace, last)
    check_gate(workspace, lock, params, gate)
    if round_number is not None:
        check_round(workspace, round_number, params, _read(workspace, f"{round_folder(round_number)}/{EVALUATION_METRICS}"))
    known = {version.md5: version.version for version in read_registry(root, "reward-model").versions.values()}
    made_of["reward_model_version"] = known.get(made_of["parents"].get(str(REWARD_MODEL)))
    with registry_lock(root):
        return add_version(root, artifact, made_of)


def check_committed(workspace: Path) -> None:
    """Check that the results are committed. Other untracked files are ignored.

    Raises:
        ConfigError: a tracked file has changed, or the lock or the verdict is untracked; names these and other untracked results.
    """
    from flows.runs.results import result_paths  # imports pandas, which would delay the flow's command line

    changed = {line.split()[-1] for line in git(workspace, "status", "--porcelain", "--untracked-files=no").splitlines()}
    results = set(git(workspace, "ls-files", "--others", "--exclude-standard", "--", *result_paths(workspace)).splitlines())
    if changed or results & {LOCK, ROUNDS_LOCK, GATE}:
        files = sorted(changed | results)
        raise ConfigError(
            f"{workspace.name}: expected all committed, got changes in {', '.join(files)}; commit them (`git add {shlex.join(files)}`, "
            "`git commit`) in its folder, since a version belongs to a commit"
        )


def _of_round(workspace: Path, artifact: str, number: int) -> tuple[str, str, dict[str, Any]]:
    """Return the path of a round's policy, DVC's address of the round's last stage, and the decision that accepted the policy.

    Raises:
        ConfigError: there is no such round, or its policy was not accepted.
    """
    if artifact != "policy":
        raise ConfigError(f"{artifact}: expected the policy with a round, got another model; rounds train no reward model")
    folder = round_folder(number)
    verdict = _read(workspace, f"{folder}/{EVALUATION_METRICS}")
    if not verdict["accepted"]:
        raise ConfigError(f"round {number}: expected one whose policy was accepted, got one that wasn't: {verdict['reason']}")
    return f"{folder}/policy", f"{ROUNDS_PIPELINE}:evaluate_round@{number}", decision_of_round(number, verdict)


def _read(workspace: Path, name: str) -> Any:
    """Read a YAML or JSON file of the last commit.

    Raises:
        ConfigError: the commit doesn't have it.
    """
    try:
        text = git(workspace, "show", f"HEAD:{name}")
    except ConfigError:
        raise ConfigError(
            f"{workspace.name}: expected {name} in the last commit, got none; run `dvc repro`, and commit dvc.lock, metrics and plots"
        ) from None
    subject = f"{name} in {workspace.name}"
    return parse_json(text, subject) if name.endswith(".json") else read_yaml_text(text, subject)


def _check_nothing_to_do(workspace: Path, stage: str) -> None:
    """Check with DVC that params, code and data match dvc.lock.

    Raises:
        ConfigError: something doesn't match; names the outdated stages.
    """
    command = module_command("dvc", "status", "--json", "--with-deps", stage)
    done = run_within(STATUS_DEADLINE, command, workspace, dvc_environment(workspace))
    found = json.loads(done.stdout) if done.returncode == 0 else None
    found = None if found is None else with_something_to_do(workspace, found)
    if found is None:
        raise ConfigError(f"{workspace.name}: expected `dvc status` to succeed, got: {' '.join(done.stderr.split())}")
    if found:
        why = "; ".join(f"{name}: {', '.join(sorted(_changes(changes)))}" for name, changes in found.items())
        raise ConfigError(
            f"{workspace.name}: expected a commit whose dvc.lock matches its params, code and data, got other ones ({why}); run "
            f"`dvc repro {stage}` there, and commit the results"
        )


def _changes(changes: list[Any]) -> Iterator[str]:
    """The changes that `dvc status --json` lists for a stage, one text each."""
    for change in changes:
        if isinstance(change, str):
            yield change
            continue
        for entries in change.values():
            for path, detail in entries.items():
                yield from (f"{key} {state}" for key, state in detail.items()) if isinstance(detail, dict) else (f"{path} {detail}",)


def _check_in_cache(workspace: Path, lock: dict[str, Any], path: str) -> dict[str, str]:
    """Check that the model and everything that it was made from are in DVC's cache or in git, and that the model is intact.

    Returns:
        The sha256 of each file of the model, by name.
    Raises:
        ValueError: something is missing, or a file of the model has changed.
    """
    cache = cache_folder(workspace)
    made = dict(hashes_of_outs(lock, history(lock, path)))
    in_git = set(git(workspace, "ls-files").splitlines())
    for out, md5 in made.items():
        if out not in in_git and (lost := missing(md5, cache)):
            raise ValueError(f"{out}: expected all of it in DVC's cache, got nothing for {lost[0]}; `dvc pull` or `dvc repro` restores it")
    return verify(made[path], root=workspace)


def fetch(root: Path, registry: Registry, version: str | None, folder: Path, remote: str | None = None) -> tuple[Version, str]:
    """Fetch a version's files by their hashes from DVC's cache, or else from its remote, into `folder`.

    Args:
        version: None: the promoted one. remote: DVC's name of it; None: the default one.
    Returns:
        The version, and `cache` or `remote`.
    Raises:
        ConfigError: there is no such version, its tag contradicts its commit, or its files are in neither or differ from the tag's hashes.
    """
    if version is None:
        registry.check_decisions()
    chosen = registry.get(version)
    source = bring_into_cache(root, chosen, remote)
    try:
        checkout(chosen.md5, folder, root=root, sha256=chosen.lineage.get("sha256"))
    except ValueError as error:
        raise ConfigError(f"{chosen.artifact} {chosen.version}: {error}") from error
    return chosen, source


def bring_into_cache(root: Path, version: Version, remote: str | None = None) -> str:
    """Check a version's tag, and fetch its files from DVC's remote if DVC's cache lacks any. Returns `cache` or `remote`.

    Raises:
        ConfigError: the tag contradicts its commit, or the files are in neither.
    """
    check_version(root, version)
    try:
        if not missing(version.md5, cache_folder(root)):
            return "cache"
    except ValueError as error:
        raise ConfigError(f"{version.artifact} {version.version}: {error}") from error
    fetch_from_remote(root, version.commit, version.lineage["path"], version.md5, remote)
    return "remote"
