"""One run, one git worktree: `runs/<name>` on branch `run/<name>`, with its overrides committed and DVC's cache shared.

Runs in worktrees don't meet, restore from one run cache, and are rebuilt by `git checkout run/<name> && dvc repro`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from flows.chain.children import session_members, stop_session
from flows.chain.stages import dvc_environment
from rlhf_core.config import ConfigError, apply_overrides, shown
from rlhf_core.paths import RUNS
from rlhf_core.process import module_command
from rlhf_core.provenance.cached_model import cache_folder

log = logging.getLogger("rlhf.flows")

_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,79}$")
HOOK_SECONDS = 300.0  # for all hooks of a commit, or of a worktree, together
HOOK_GRACE = 5.0  # seconds, for a hook that was told to end
COMMAND_SECONDS = 600.0  # for any other command of git or DVC that runs nothing of the user's
NO_HOOKS = "GIT_CONFIG_COUNT=1 GIT_CONFIG_KEY_0=core.hooksPath GIT_CONFIG_VALUE_0=/dev/null"
IDENTITY = ("-c", "user.name=rlhf pipeline", "-c", "user.email=rlhf@localhost")


def prepare_worktree(root: Path, name: str, overrides: dict[str, Any]) -> Path:
    """Make the worktree of a run, or find it again, and put the overrides into its params.yaml.

    Args:
        root: the checkout that the run starts from; its last commit is what runs.
    Returns:
        The worktree's folder.
    Raises:
        ConfigError: the name can't be one, the folder is something else, or an override is refused.
    """
    path = worktree_path(root, name)
    if not path.exists():
        _add(root, path, name)
    elif Path(git(path, "rev-parse", "--show-toplevel")) != path.resolve():
        raise ConfigError(f"{RUNS}/{name}: expected a worktree of git, got another folder; move it away or choose another name")
    share_cache(root, path)
    if overrides:
        apply_overrides(path / "params.yaml", overrides)
    message = f"Run {name}: {json.dumps(overrides, sort_keys=True)}" if overrides else f"Run {name}: params as they were"
    if (refusal := commit(path, message, ["params.yaml"])) is not None:
        raise ConfigError(f"run {name}: {refusal}; correct what the hook names, or run with {NO_HOOKS}")
    _say_what_differs(root, path, name)
    return path


def worktree_path(root: Path, name: str) -> Path:
    if not _NAME.match(name) or name.endswith((".lock", ".")) or ".." in name:
        raise ConfigError(
            f"run name: expected at most 80 letters, digits, '.', '_' and '-', a letter or digit first, got {name!r}; choose another"
        )
    return root / RUNS / name


def derive_name(root: Path, overrides: dict[str, Any], recipes: list[Path]) -> str:
    """A readable name that the same overrides of the same commit get again."""
    parts = [r.stem for r in recipes] or [f"{key.rsplit('.', 1)[-1]}-{value}" for key, value in sorted(overrides.items())]
    identity = json.dumps([overrides, git(root, "rev-parse", "HEAD")], sort_keys=True)
    return f"{slug('-'.join(parts))}-{hashlib.sha256(identity.encode()).hexdigest()[:6]}"


def slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "-", text).strip("-")[:40].strip("-") or "run"


def commit(path: Path, message: str, files: list[str]) -> str | None:
    """Commit these files, and nothing else that lies there or is staged, where one changed. Works without a git identity.

    The user's hooks run, with a deadline, and can refuse; what a hook makes of the files is taken back, since dvc.lock has their hashes,
    and a commit that has it is none. Commits are not signed: that may ask for a passphrase.

    Returns:
        Why there is no commit; None: there is one, or nothing to commit.
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
        log.warning("git commit: a hook changed %s, whose hashes dvc.lock has; put back", ", ".join(changed))
    if refusal is None and (other := git(path, "diff", "--name-only", "HEAD", "--", *present)):
        git(path, "update-ref", "HEAD", head, git(path, "rev-parse", "HEAD"))
        git(path, "add", "--all", "--", *present)
        names = shown(", ".join(other.splitlines()))
        return f"git commit: expected the repository's hooks to leave the files as they are, got another content of {names} in the commit"
    return refusal


def _run_with_hooks(path: Path, arguments: list[str], what: str) -> str | None:
    """Why git has not done it: the hooks' last words, or that one didn't end. Hooks are ended first, so that git takes its locks away."""
    with tempfile.TemporaryFile() as output:
        how = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT, "start_new_session": True}
        child = subprocess.Popen(["git", *arguments], cwd=path, env=git_environment(), **how)
        late = False
        try:
            child.wait(HOOK_SECONDS)
        except subprocess.TimeoutExpired:
            late = True
            for number in (signal.SIGTERM, signal.SIGKILL):
                _tell_hooks(child, number)
                with suppress(subprocess.TimeoutExpired):
                    child.wait(HOOK_GRACE)
                    break
        finally:
            stop_session(child, HOOK_GRACE)
        if child.returncode == 0:
            return None
        output.seek(0)
        said = shown(" ".join(output.read().decode(errors="replace").split()[-60:]), 600)
        got = f"none within {HOOK_SECONDS:.0f} s" if late else f"exit code {child.returncode}"
        return f"{what}: expected the repository's hooks to accept it, got {got}: {said or 'no output'}"


def _tell_hooks(git_process: subprocess.Popen, number: int) -> None:
    for process in session_members(git_process.pid):
        if process.pid != git_process.pid:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)


def commit_results(path: Path, message: str, files: list[str], inputs: list[str]) -> None:
    """Commit what a run has shown. A refusal is said, and loses nothing: the files stay, and the next run's end tries again.

    Args:
        inputs: what stages depend on; those that git doesn't have as they are here are named, since the commit can't be rebuilt without.
    """
    try:
        refusal = commit(path, message, files)
    except ConfigError as error:  # another git has the index, or there is no room
        refusal = str(error)
    if refusal is not None:
        log.warning("%s: not committed; its files are there. %s", path.name, refusal)
    listed = git(path, "ls-files", "--modified", "--others", "--exclude-standard", "-z", "--", *inputs) if inputs else ""
    changed = sorted({file for file in listed.split("\0") if file and file not in files})
    if changed:
        names = shown(", ".join(changed[:5]))
        more = f" and {len(changed) - 5} more" if len(changed) > 5 else ""
        log.warning(
            "%s: stages have read %s%s, which no commit has as here; commit them if the run is to be rebuilt", path.name, names, more
        )


def _add(root: Path, path: Path, name: str) -> None:
    """Raises ConfigError where git or a hook refuses; nothing is left of it then."""
    branch = f"run/{name}"
    git(root, "worktree", "prune")
    known = bool(git(root, "branch", "--list", branch))
    if not known and git(root, "status", "--porcelain", "--untracked-files=no"):
        log.warning("%s: starts from the last commit; changes that aren't committed take no part", branch)
    how = [str(path), branch] if known else ["-b", branch, str(path), "HEAD"]
    if (refusal := _run_with_hooks(root, ["worktree", "add", "--quiet", *how], "git worktree add")) is not None:
        with suppress(ConfigError):  # it may not have come to a worktree or a branch
            git(root, "worktree", "remove", "--force", str(path))
        with suppress(ConfigError):
            if not known:
                git(root, "branch", "-D", branch)
        raise ConfigError(f"run {name}: {refusal}; correct what it names, or run with {NO_HOOKS}")


def share_cache(root: Path, path: Path) -> None:
    """Local DVC settings as in the main checkout (remotes, credentials), with its cache."""
    local = path / ".dvc" / "config.local"
    if local.exists():
        return
    if (root / ".dvc" / "config.local").exists():
        shutil.copy2(root / ".dvc" / "config.local", local)
    cache = cache_folder(root).parents[1].resolve()
    _run(module_command("dvc", "cache", "dir", "--local", str(cache)), path)


def _say_what_differs(root: Path, path: Path, name: str) -> None:
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
    hidden = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE")
    return {k: v for k, v in os.environ.items() if k not in hidden and not k.startswith("PREFECT_")}


def git(path: Path, *arguments: str) -> str:
    return _run(["git", *arguments], path, git_environment())


def _run(command: list[str], folder: Path, environment: dict[str, str] | None = None) -> str:
    """What a command of git or DVC prints.

    Raises:
        ConfigError: it failed, or didn't end within COMMAND_SECONDS.
    """
    done = run_within(COMMAND_SECONDS, command, folder, environment or dvc_environment(folder))
    if done.returncode:
        said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise ConfigError(f"{' '.join(command[:4])}: expected to succeed in this checkout, got: {said}")
    return done.stdout.strip()


def run_within(seconds: float, command: list[str], folder: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """A command to its end, its output as text.

    Files take the output: a pipe would be waited for as long as any process that the command has left behind holds it.

    Raises:
        ConfigError: its time was up; it and what it had started are ended.
    """
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        how = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": errors, "start_new_session": True}
        child = subprocess.Popen(command, cwd=folder, env=environment, **how)
        try:
            child.wait(seconds)
        except BaseException as error:
            stop_session(child, HOOK_GRACE)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            subject = " ".join(command[:4])
            raise ConfigError(f"{subject}: expected an end within {seconds:g} s, got none; look whether the disk answers") from error
        said = []
        for file in (output, errors):
            file.seek(0)
            said.append(file.read().decode("utf-8", errors="backslashreplace"))
    return subprocess.CompletedProcess(command, child.returncode, *said)
