"""Gives each run a git worktree: `runs/<name>` on branch `run/<name>`, with its overrides committed and DVC's cache shared.

Worktrees keep runs apart. Runs share one run cache, and `git checkout run/<name> && dvc repro` rebuilds one.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
from configobj import ConfigObj, ConfigObjError

from flows.chain.children import session_members, stop_session
from rlhf_core.config import ConfigError, apply_overrides, shown
from rlhf_core.files import replacing
from rlhf_core.paths import RUNS
from rlhf_core.process import without_git_places
from rlhf_core.provenance.dvc_cache import cache_folder

log = logging.getLogger("rlhf.flows")

_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,79}$")
HOOK_SECONDS = 300.0  # for all hooks of one commit or worktree together
HOOK_GRACE = 5.0  # seconds for a hook to exit after SIGTERM
COMMAND_SECONDS = 600.0  # for other git and DVC commands, which run no user code
NO_HOOKS = "GIT_CONFIG_COUNT=1 GIT_CONFIG_KEY_0=core.hooksPath GIT_CONFIG_VALUE_0=/dev/null"
IDENTITY = ("-c", "user.name=rlhf pipeline", "-c", "user.email=rlhf@localhost")


def prepare_worktree(root: Path, name: str, overrides: dict[str, Any]) -> Path:
    """Make the worktree of a run or reuse it, and write the overrides to its params.yaml.

    Args:
        root: the checkout that the run starts from, at its last commit.
    Returns:
        The worktree's folder.
    Raises:
        ConfigError: the name is invalid, the folder isn't a worktree, or an override is refused.
    """
    path = worktree_path(root, name)
    with undone_on_failure(root, name):
        if not path.exists():
            add_worktree(root, path, name)
        elif Path(git(path, "rev-parse", "--show-toplevel")) != path.resolve():
            raise ConfigError(f"{RUNS}/{name}: expected a worktree of git, got another folder; move it away or choose another name")
        share_cache(root, path)
        if overrides:
            apply_overrides(path / "params.yaml", overrides)
        message = f"Run {name}: {json.dumps(overrides, sort_keys=True)}" if overrides else f"Run {name}: params as they were"
        if (refusal := commit(path, message, ["params.yaml"])) is not None:
            raise ConfigError(f"run {name}: {refusal}; correct what the hook names, or run with {NO_HOOKS}")
        _warn_of_newer_commits(root, path, name)
    return path


@contextmanager
def undone_on_failure(root: Path, name: str | None) -> Iterator[None]:
    """Remove the run's worktree and branch if the block makes them and fails. With name None the run works in `root`."""
    if name is None:
        yield
        return
    path, branch = worktree_path(root, name), f"run/{name}"
    there, known = path.exists(), git(root, "branch", "--list", branch) != ""
    try:
        yield
    except BaseException:
        if not there:
            with suppress(ConfigError):  # the worktree or the branch may not exist
                git(root, "worktree", "remove", "--force", str(path))
            with suppress(ConfigError):
                if not known:
                    git(root, "branch", "-D", branch)
            with suppress(OSError):
                path.parent.rmdir()  # if it is empty
        raise


def worktree_path(root: Path, name: str) -> Path:
    if not _NAME.match(name) or name.endswith((".lock", ".")) or ".." in name:
        raise ConfigError(
            f"run name: expected at most 80 letters, digits, '.', '_' and '-', a letter or digit first, got {name!r}; choose another"
        )
    return root / RUNS / name


def derive_name(root: Path, overrides: dict[str, Any], recipes: list[Path]) -> str:
    """Return a readable name, which is the same for the same overrides and commit."""
    parts = [r.stem for r in recipes] or [f"{key.rsplit('.', 1)[-1]}-{value}" for key, value in sorted(overrides.items())]
    identity = json.dumps([overrides, git(root, "rev-parse", "HEAD")], sort_keys=True)
    return f"{slug('-'.join(parts))}-{hashlib.sha256(identity.encode()).hexdigest()[:6]}"


def slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "-", text).strip("-")[:40].strip("-") or "run"


def commit(path: Path, message: str, files: list[str]) -> str | None:
    """Commit these files if one changed, and no other file, staged or not. This works without a git identity.

    The user's hooks run with a deadline and can refuse. A hook's changes of the files are reverted, since dvc.lock has their hashes;
    a commit that contains such a change is undone. Commits aren't signed, since a key may need a passphrase.

    Returns:
        Why there is no commit, or None if it was made or there was nothing to commit.
    """
    listed = git(path, "ls-files", "--cached", "--others", "--exclude-standard", "-z", "--", *files)
    present = sorted({file for file in listed.split("\0") if file})
    if not present or git(path, "status", "--porcelain", "--", *present) == "":
        return None
    git(path, "add", "--all", "--", *present)
    head = git(path, "rev-parse", "HEAD")
    before = {file: (path / file).read_bytes() for file in present if (path / file).is_file()}
    identity = () if has_identity(path) else IDENTITY
    refusal = _run_with_hooks(
        path, [*identity, "commit", "--quiet", "--no-gpg-sign", "-m", message, "--only", "--", *present], "git commit"
    )
    changed = [file for file, content in before.items() if not (path / file).is_file() or (path / file).read_bytes() != content]
    for file in changed:
        (path / file).write_bytes(before[file])
    if changed:
        log.warning("git commit: a hook changed %s, whose hashes are in dvc.lock; reverted", ", ".join(changed))
    if refusal is None and (other := git(path, "diff", "--name-only", "HEAD", "--", *present)):
        git(path, "update-ref", "HEAD", head, git(path, "rev-parse", "HEAD"))
        git(path, "add", "--all", "--", *present)
        names = shown(", ".join(other.splitlines()))
        return f"git commit: expected the repository's hooks to leave the files as they are, got another content of {names} in the commit"
    return refusal


def _run_with_hooks(path: Path, arguments: list[str], what: str) -> str | None:
    """Run git, and return why it failed: the hooks' last output, or a timeout.

    Hooks are ended before git, so that git removes its locks.
    """
    with tempfile.TemporaryFile() as output:
        options = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT, "start_new_session": True}
        child = subprocess.Popen(["git", *arguments], cwd=path, env=git_environment(), **options)
        late = False
        try:
            child.wait(HOOK_SECONDS)
        except subprocess.TimeoutExpired:
            late = True
            for number in (signal.SIGTERM, signal.SIGKILL):
                _signal_hooks(child, number)
                with suppress(subprocess.TimeoutExpired):
                    child.wait(HOOK_GRACE)
                    break
        finally:
            stop_session(child, HOOK_GRACE)
        if child.returncode == 0:
            return None
        output.seek(0)
        words = shown(" ".join(output.read().decode(errors="replace").split()[-60:]), 600)
        got = f"none within {HOOK_SECONDS:.0f} s" if late else f"exit code {child.returncode}"
        return f"{what}: expected the repository's hooks to accept it, got {got}: {words or 'no output'}"


def _signal_hooks(git_process: subprocess.Popen, number: int) -> None:
    for process in session_members(git_process.pid):
        if process.pid != git_process.pid:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)


def commit_results(path: Path, message: str, files: list[str], inputs: list[str]) -> None:
    """Commit a run's results. A refusal is logged; the files stay, and the end of the next run tries again.

    Args:
        inputs: dependencies of stages. A warning names those that differ from git, without which the commit can't be rebuilt.
    """
    try:
        refusal = commit(path, message, files)
    except ConfigError as error:  # another git holds the index, or the disk is full
        refusal = str(error)
    if refusal is not None:
        log.warning("%s: not committed; its files are there. %s", path.name, refusal)
    listed = git(path, "ls-files", "--modified", "--others", "--exclude-standard", "-z", "--", *inputs) if inputs else ""
    changed = sorted({file for file in listed.split("\0") if file and file not in files})
    if changed:
        names = shown(", ".join(changed[:5]))
        more = f" and {len(changed) - 5} more" if len(changed) > 5 else ""
        log.warning(
            "%s: stages have read %s%s, whose current content is in no commit; commit them to make the run reproducible",
            path.name,
            names,
            more,
        )


def add_worktree(root: Path, path: Path, name: str) -> None:
    """Make the worktree. Raises ConfigError if git or a hook refuses."""
    branch = f"run/{name}"
    git(root, "worktree", "prune")
    known = bool(git(root, "branch", "--list", branch))
    if not known and git(root, "status", "--porcelain", "--untracked-files=no"):
        log.warning("%s: starts from the last commit, without uncommitted changes", branch)
    place = [str(path), branch] if known else ["-b", branch, str(path), "HEAD"]
    if (refusal := _run_with_hooks(root, ["worktree", "add", "--quiet", *place], "git worktree add")) is not None:
        raise ConfigError(f"run {name}: {refusal}; correct what it names, or run with {NO_HOOKS}")


def verify_remotes(root: Path) -> None:
    """Set `verify` in the local settings for each DVC remote without that setting: DVC would take such a remote's bytes unread."""
    options = {"encoding": "utf-8", "interpolation": False}  # `dvc config` writes ASCII only
    try:
        shared, local = (ConfigObj(str(root / ".dvc" / name), **options) for name in ("config", "config.local"))
    except (ConfigObjError, OSError, UnicodeDecodeError):  # DVC's own commands report it
        return
    remotes = dict.fromkeys(name for name in [*shared, *local] if name.startswith('remote "'))
    unsaid = [name for name in remotes if not any("verify" in settings.get(name, {}) for settings in (shared, local))]
    for name in unsaid:
        local.setdefault(name, {})["verify"] = "true"
    if unsaid:
        local.write()


def share_cache(root: Path, path: Path) -> None:
    """Copy the main checkout's local DVC settings (remotes, credentials) and use its cache."""
    verify_remotes(root)
    local = path / ".dvc" / "config.local"
    if local.exists():
        return
    with replacing(local) as aside:
        if (root / ".dvc" / "config.local").exists():
            shutil.copy2(root / ".dvc" / "config.local", aside)
        settings = ConfigObj(str(aside), encoding="utf-8", interpolation=False)
        settings.setdefault("cache", {})["dir"] = str(cache_folder(root).parents[1].resolve())
        _share_remotes(root, settings)
        settings.write()


def _share_remotes(root: Path, settings: ConfigObj) -> None:
    """Add the main checkout's remotes to settings: the run's commit may be older than they are, and relative paths begin at their file."""
    shared = ConfigObj(str(root / ".dvc" / "config"), encoding="utf-8", interpolation=False)
    for name, remote in shared.items():
        if name.startswith('remote "'):
            settings[name] = {**remote, **settings.get(name, {})}
    for name, remote in settings.items():
        if name.startswith('remote "') and "://" not in (url := remote.get("url", "://")):
            remote["url"] = str((root / ".dvc" / Path(url).expanduser()).resolve())
    if default := shared.get("core", {}).get("remote"):
        settings.setdefault("core", {}).setdefault("remote", default)


def _warn_of_newer_commits(root: Path, path: Path, name: str) -> None:
    base = git(path, "merge-base", "HEAD", git(root, "rev-parse", "HEAD"))
    behind = git(root, "rev-list", "--count", f"{base}..HEAD")
    if behind != "0":
        log.warning(
            "run/%s: was made %s commits ago and keeps its code; choose another name for a fresh one, or remove this one with "
            "`git worktree remove --force %s/%s` and `git branch -D run/%s`",
            *(name, behind, RUNS, name, name),
        )


def has_identity(path: Path) -> bool:
    return run_within(COMMAND_SECONDS, ["git", "var", "GIT_COMMITTER_IDENT"], path, git_environment()).returncode == 0


def git_environment() -> dict[str, str]:
    """Return git's environment, without Prefect's settings, which git's hooks would see."""
    return {name: value for name, value in without_git_places().items() if not name.startswith("PREFECT_")}


def git(path: Path, *arguments: str) -> str:
    return _run(["git", *arguments], path, git_environment())


def _run(command: list[str], folder: Path, environment: dict[str, str]) -> str:
    """Run a git command, and return its output.

    Raises:
        ConfigError: the command failed, or didn't end within COMMAND_SECONDS.
    """
    done = run_within(COMMAND_SECONDS, command, folder, environment)
    if done.returncode:
        words = shown(" ".join(done.stderr.split()[-60:]), 600) or f"exit code {done.returncode}"
        raise ConfigError(f"{' '.join(command[:4])}: expected to succeed in {folder}, got: {words}; correct what it names")
    return done.stdout.strip()


def run_within(seconds: float, command: list[str], folder: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a command and return its output as text.

    The output goes to files: reading a pipe would wait for background processes of the command that hold it open.

    Raises:
        ConfigError: the command exceeded the deadline; its session was ended.
    """
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        options = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": errors, "start_new_session": True}
        child = subprocess.Popen(command, cwd=folder, env=environment, **options)
        try:
            child.wait(seconds)
        except BaseException as error:  # a signal too: the session must not outlive this call
            stop_session(child, HOOK_GRACE)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            subject = " ".join(command[:6])
            raise ConfigError(f"{subject}: expected an end within {seconds:g} s, got none; look whether disk and network answer") from error
        texts = []
        for file in (output, errors):
            file.seek(0)
            texts.append(file.read().decode("utf-8", errors="backslashreplace"))
    return subprocess.CompletedProcess(command, child.returncode, *texts)
