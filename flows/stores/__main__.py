"""Shares runs and registered versions: rlhf push, rlhf pull, or python -m flows.stores push | pull.

Exit codes: 0 done, 2 refused, with the reason.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from flows.chain.locks import only_flow
from flows.chain.stages import dvc_environment
from flows.chain.worktree import add_worktree, git, run_within, share_cache, undone_on_failure, worktree_path
from flows.registry import versions
from flows.registry.evidence import check_version
from flows.registry.state import ARTIFACTS, read_registry
from flows.registry.tags import Version
from flows.runs.state import read_runs
from flows.stores.dvc_remote import DEADLINE, Sent, fetch_commit, push_commit
from flows.stores.git_remote import ORIGIN, fetch_branch, fetch_tags, push_branch, push_tags
from rlhf_core.commands import main, printed
from rlhf_core.config import ConfigError, number_of, read_yaml, shown
from rlhf_core.paths import PROMOTED, RUNS
from rlhf_core.process import module_command


@Parameter(name="*")
@dataclass(frozen=True)
class Places:
    """Where to share.

    Args:
        git: the git remote, for commits and tags.
        remote: the DVC remote, for files; by default DVC's default one.
    """

    git: str = ORIGIN
    remote: str | None = None


DEFAULT = Places()
What = Annotated[str, Parameter(help="A run's name, or a version: policy@v1.0.0, or policy for the promoted one.")]


@printed()
def push(what: What, /, *, places: Places = DEFAULT) -> str:
    """Send a run, or a version with the tags of its registry. What a remote has is not sent again."""
    root = Path.cwd()
    artifact, version = _as_version(what)
    if artifact is None:
        return _push_run(root, what, places)
    found = read_registry(root, artifact)
    if version is None:
        found.check_decisions()
    chosen = found.get(version)
    check_version(root, chosen)
    sent = push_commit(root, chosen.commit, places.remote)
    push_tags(root, places.git, artifact)
    return f"{_sent(_name(chosen), sent, places)}; tags of {artifact} at {places.git}\nElsewhere: rlhf pull {_name(chosen)}"


def _push_run(root: Path, name: str, places: Places) -> str:
    (state,) = read_runs(root, [name], sizes=False)
    if state.branch is None:
        raise ConfigError(f"{name}: expected a run with a branch, got one without; `git -C {RUNS}/{name} switch -c run/{name}` makes it")
    if state.folder is not None:
        versions.check_committed(root / state.folder)
    commit = git(root, "rev-parse", f"refs/heads/{state.branch}")
    sent = push_commit(root, commit, places.remote)
    push_branch(root, places.git, state.branch)
    return f"{_sent(f'run {name}', sent, places)}; branch {state.branch} at {places.git}\nElsewhere: rlhf pull {name}"


def _sent(what: str, sent: Sent, places: Places) -> str:
    return f"{what}: {number_of(sent.objects, 'file')} at DVC's {places.remote or 'default remote'}, {sent.new} of them new"


@printed()
def pull(what: What, /, *, places: Places = DEFAULT) -> str:
    """Fetch a run into runs/NAME, or a version into models/promoted. Each file is verified by its hash."""
    root = Path.cwd()
    artifact, version = _as_version(what)
    if artifact is None:
        return _pull_run(root, what, places)
    fetch_tags(root, places.git, artifact)
    found = read_registry(root, artifact)
    if version is None:
        found.check_decisions()
    name = found.get(version).version
    folder = PROMOTED / f"{artifact}-{name}"
    chosen, source = versions.fetch(root, found, name, folder, places.remote)
    use = f"rlhf chat --version {_name(chosen)}" if artifact == "policy" else f"rlhf serve --version {_name(chosen)}"
    return (
        f"{_name(chosen)}: {chosen.lineage['files']} files from DVC's {source} in {folder}, {chosen.identity}, all checked\nUse it: {use}"
    )


def _pull_run(root: Path, name: str, places: Places) -> str:
    path = worktree_path(root, name)
    commit = fetch_branch(root, places.git, f"run/{name}")
    fetched = fetch_commit(root, commit, places.remote)
    with only_flow(root, name), undone_on_failure(root, name):
        _set_branch(root, path, name, commit)
        if not path.exists():
            add_worktree(root, path, name)
        share_cache(root, path)
        _checkout(path)
    return f"run {name}: {number_of(fetched, 'file')} fetched, {RUNS}/{name} at {commit[:10]}\nLook at it: rlhf runs show {name}"


def _set_branch(root: Path, path: Path, name: str, commit: str) -> None:
    """Make the run's branch, or move it forward to this commit, with its worktree if there is one.

    Raises:
        ConfigError: the branch has commits of its own, or the worktree has changes that this would lose.
    """
    branch = f"run/{name}"
    if not git(root, "branch", "--list", branch):
        git(root, "branch", "--no-track", branch, commit)
        return
    if git(root, "rev-list", "--count", f"{commit}..{branch}") != "0":
        raise ConfigError(
            f"{branch}: expected no commits that the remote lacks, got some; `rlhf push {name}` sends them if the remote's branch has none "
            "of its own"
        )
    if path.exists():
        git(path, "merge", "--ff-only", "--quiet", commit)
    else:
        git(root, "branch", "--force", "--no-track", branch, commit)


def _checkout(path: Path) -> None:
    """Lay out the files of the worktree's commit from DVC's cache.

    Raises:
        ConfigError: DVC refuses, for example because an output was changed here.
    """
    # By stage: of a run that hasn't ended DVC would miss the outputs of the others.
    locks = [lock for lock in (Path("dvc.lock"), Path("rounds/dvc.lock")) if (path / lock).is_file()]
    stages = [f"{lock.with_suffix('.yaml')}:{stage}" for lock in locks for stage in read_yaml(path / lock).get("stages") or {}]
    own = git(path, "ls-files", "*.dvc").splitlines()
    if not (targets := [*stages, *own]):
        return
    done = run_within(DEADLINE, module_command("dvc", "checkout", *targets), path, dvc_environment(path))
    if done.returncode:
        raise ConfigError(f"{path.name}: expected `dvc checkout` to succeed, got: {shown(' '.join(done.stderr.split()), 1000)}")


def _as_version(what: str) -> tuple[str | None, str | None]:
    """Return artifact and version, which is None for the promoted one; (None, None): it is a run's name."""
    artifact, _, version = what.partition("@")
    if artifact not in ARTIFACTS:
        if "@" in what:
            raise ConfigError(f"{shown(what)}: expected a run, or a version of {' or '.join(ARTIFACTS)}; correct the name before the @")
        return None, None
    return artifact, None if version in ("", "promoted") else version


def _name(version: Version) -> str:
    return f"{version.artifact}@{version.version}"


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
