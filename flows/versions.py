"""Models as versions: what a run's commit must be like to become one, and getting a version's files back by their hash."""

from __future__ import annotations

import contextlib
import json
import logging
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from flows.registry import Registry, Version, add_version, read_registry, registry_lock
from flows.stages import stage_environment
from flows.worktree import git, share_cache, worktree_path
from rlhf_core.config import ConfigError
from rlhf_core.lineage import REWARD_MODEL, hashes_of_outs, history, lineage
from rlhf_core.quiet import quietly
from rlhf_core.registry import cache_folder, checkout, missing, verify
from rlhf_core.rounds import PIPELINE, round_folder

GATE = "metrics/gate.json"
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
    if changed := git(workspace, "status", "--porcelain", "--untracked-files=no"):
        files = ", ".join(line.split()[-1] for line in changed.splitlines())
        raise ConfigError(f"{workspace.name}: expected all committed, got changes in {files}; commit them, for a version is a commit's")
    commit, branch = git(workspace, "rev-parse", "HEAD"), git(workspace, "rev-parse", "--abbrev-ref", "HEAD")
    lock, gate = read_locks(workspace, commit), _read(workspace, GATE)
    if artifact == "reward-model" and not gate["needed"]:
        raise ConfigError(f"{artifact} of {branch}: expected a reward model, got none; reward.enabled is false there")
    if round_number is not None:
        path, last, decided = _of_round(workspace, artifact, round_number)
    else:
        decided = {"by": "gate_reward", "split": "test"} if artifact == "reward-model" else None
        path = _read(workspace, "dvc.yaml")["artifacts"][artifact]["path"]
        last = LAST_STAGE[artifact] if artifact != "reward-model" or gate["passed"] or gate["override"] else "train_reward"
    try:
        params = _read(workspace, "params.yaml")
        made_of = lineage(path, commit=commit, run=branch, params=params, lock=lock, gate=gate, decided=decided)
        _check_in_cache(workspace, lock, path)
    except ValueError as error:
        raise ConfigError(f"{artifact} of {branch}: {error}") from error
    _check_nothing_to_do(workspace, last)
    known = {version.md5: version.version for version in read_registry(root, "reward-model").versions.values()}
    made_of["reward_model_version"] = known.get(made_of["parents"].get(REWARD_MODEL))
    with registry_lock(root):
        return add_version(root, artifact, made_of)


def _of_round(workspace: Path, artifact: str, number: int) -> tuple[str, str, dict[str, Any]]:
    """Path of a round's policy, the last stage behind it, and what it was accepted by.

    Raises:
        ConfigError: there is no such round, or it kept the policy before.
    """
    if artifact != "policy":
        raise ConfigError(f"{artifact}: expected the policy with a round, got another model; rounds train no reward model")
    folder = round_folder(number)
    verdict = _read(workspace, f"{folder}/metrics/evaluate.json")
    if not verdict["accepted"]:
        raise ConfigError(f"round {number}: expected one whose policy was accepted, got one that wasn't: {verdict['reason']}")
    return f"{folder}/policy", f"{PIPELINE}:evaluate_round@{number}", {"by": f"evaluate_round@{number}", **verdict.get("promotion", {})}


def read_locks(root: Path, commit: str) -> dict[str, Any]:
    """dvc.lock of a commit, with the stages of its rounds of iterative DPO where it has any.

    Raises:
        ConfigError: there is no dvc.lock.
    """
    found: dict[str, Any] = {}
    for name in ("dvc.lock", str(PIPELINE.with_suffix(".lock"))):
        if git(root, "ls-tree", "--name-only", commit, name):
            found |= YAML(typ="safe", pure=True).load(git(root, "show", f"{commit}:{name}"))["stages"]
    if not found:
        raise ConfigError(
            f"{root.name}: expected dvc.lock in commit {commit[:10]}, got none; bring the chain up with `dvc repro`, and commit dvc.lock, "
            "metrics and plots"
        )
    return {"stages": found}


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
    return json.loads(text) if name.endswith(".json") else YAML(typ="safe", pure=True).load(text)


def _check_nothing_to_do(workspace: Path, stage: str) -> None:
    """DVC finds that params, code and data are those which dvc.lock names.

    Raises:
        ConfigError: naming the stages for which they aren't.
    """
    done = _dvc(workspace, "status", "--json", "--with-deps", stage)
    found = json.loads(done.stdout) if done.returncode == 0 else None
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


def _check_in_cache(workspace: Path, lock: dict[str, Any], path: str) -> None:
    """All that led to the model is in DVC's cache, or in git, and the model itself is whole.

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
    verify(made[path], root=workspace)


def fetch(root: Path, registry: Registry, version: str | None, folder: Path) -> tuple[Version, str]:
    """A version's files by its hash: from DVC's cache, or else from the remote, and laid out in `folder`.

    Returns:
        The version, and where it came from: cache or remote.
    Raises:
        ConfigError: there is no such version, or it is in neither, or isn't what its tag says.
    """
    chosen = registry.get(version)
    path, md5 = chosen.lineage["path"], chosen.md5
    locked = _locked_md5(root, chosen)
    if locked != md5:
        raise ConfigError(
            f"{chosen.artifact} {chosen.version}: expected dvc.lock of its commit to name md5 {md5}, got {locked}; don't use it"
        )
    source = "cache"
    try:
        if missing(md5, cache_folder(root)):
            source = "remote"
            _pull(root, chosen.commit, path, md5)
        checkout(md5, folder, root=root)
    except ValueError as error:
        raise ConfigError(f"{chosen.artifact} {chosen.version}: {error}") from error
    return chosen, source


def _locked_md5(root: Path, version: Version) -> str | None:
    lock = read_locks(root, version.commit)
    made = dict(hashes_of_outs(lock, list(lock["stages"])))
    return made.get(version.lineage["path"])


def _pull(root: Path, commit: str, path: str, md5: str) -> None:
    """This one output of a commit from DVC's remote into the cache; the checkout isn't touched.

    Raises:
        ConfigError: there is no remote, or it doesn't have it.
    """
    with _detached(root, commit) as worktree:
        done = _dvc(worktree, "fetch", path)
    if done.returncode or missing(md5, cache_folder(root)):
        said = " ".join((done.stderr or done.stdout).split())
        raise ConfigError(
            f"{path}: expected it in DVC's cache or in the remote, got neither: {said}; `dvc push` it where it was made, or set a remote "
            "with `dvc remote add`"
        )


@contextlib.contextmanager
def _detached(root: Path, commit: str) -> Iterator[Path]:
    """A worktree of a commit that shares DVC's cache, and goes in the end."""
    with tempfile.TemporaryDirectory() as folder:
        worktree = Path(folder) / "commit"
        git(root, "worktree", "add", "--quiet", "--detach", str(worktree), commit)
        try:
            share_cache(root, worktree)
            yield worktree
        finally:
            git(root, "worktree", "remove", "--force", str(worktree))


def _dvc(workspace: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    how = {"cwd": workspace, "env": stage_environment(workspace), "check": False}
    return subprocess.run(quietly("dvc", *arguments), capture_output=True, text=True, **how)
