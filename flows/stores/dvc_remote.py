"""Sends a commit's files to a DVC remote, and fetches them, in a process of its own: DVC's command line takes branches, but no commit.

Remotes and credentials are those of the checkout at `root`, never those in the commit's settings. An object counts as sent when the remote
lists it: DVC itself infers a folder's files from the folder's listing.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows.chain.stages import dvc_environment
from flows.chain.worktree import git, verify_remotes
from rlhf_core.config import ConfigError, read_yaml_text, shown
from rlhf_core.provenance.dvc_cache import cache_folder, missing

DEADLINE = 24 * 3600.0  # seconds, for files of any size
# What DVC's progress writes to standard error is shown; the result, or the error with its causes, is one line of JSON.
_PROGRAM = """
import json, sys
from contextlib import suppress
task = json.load(sys.stdin)

def objects(repo):
    if task["hashes"] is not None:
        from dvc_data.hashfile.hash_info import HashInfo
        return {None: {HashInfo("md5", md5) for md5 in task["hashes"]}}
    own = repo.config
    with repo.switch(task["commit"]):
        repo.__dict__["config"] = own  # else the commit's, which may name other addresses
        return repo.index.used_objs(remote=task["remote"], force=True, push=task["do"] == "push")

def reach(repo):
    odb = repo.cloud.get_remote_odb(task["remote"], task["do"].replace("fetch", "pull"))
    with suppress(FileNotFoundError):  # nothing is there yet
        odb.fs.info(odb.path)
    return odb

def push(repo):
    default, cache, sent, total = reach(repo), repo.cache.local, 0, 0
    for odb, found in objects(repo).items():
        sent += len(repo.cloud.push(found, remote=task["remote"], odb=odb).transferred)
        hashes = [one.value for one in found if one.name == "md5"]
        there = set((odb or default).oids_exist(hashes))
        for md5 in set(hashes) - there:  # it failed, or DVC had noted it as sent, and the remote has it no more
            sent += (odb or default).add(cache.oid_to_path(md5), cache.fs, md5)
        total += len(found)
    return {"sent": sent, "objects": total}

def fetch(repo):
    reach(repo)
    return {"fetched": sum(len(repo.cloud.pull(found, remote=task["remote"], odb=odb).transferred) for odb, found in objects(repo).items())}

try:
    from dvc.repo import Repo
    with Repo(".") as repo:
        result = {"push": push, "fetch": fetch}[task["do"]](repo)
except Exception as error:
    names, words = [], []
    while error is not None:
        names.append(type(error).__name__)
        words.append(" ".join(str(error).split()))
        error = error.__cause__ or error.__context__
    result = {"error": " ".join(names), "words": [word for word in words if word]}
print(json.dumps(result))
"""

NO_REMOTE = (
    "expected a remote for files, got none; `dvc remote add --default store ADDRESS` (s3://BUCKET/FOLDER, ssh://USER@HOST/FOLDER, or a "
    "folder that others reach), then commit .dvc/config; see docs/stores.md"
)
# Names of the errors that DVC or its clients raise, and what to do.
_ADVICE = {
    ("NoRemoteError",): NO_REMOTE,
    ("RemoteMissingDepsError", "MissingDependency", "ModuleNotFoundError"): (
        "expected its client, which isn't installed; `make setup EXTRAS=cpu,dev,s3` (or ssh; with a GPU gpu for cpu)"
    ),
    ("NoCredentialsError", "PartialCredentialsError", "PermissionError", "PermissionDenied", "AuthError", "InvalidAccessKeyId"): (
        "expected to be let in; S3: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE; SSH: load a key with ssh-add, or "
        "`dvc remote modify --local NAME keyfile PATH`"
    ),
    ("NoSuchBucket", "FileNotFoundError"): "expected its bucket or folder to exist; create it, or correct the address",
    (
        "ConnectError",
        "EndpointConnectionError",
        "ConnectionRefusedError",
        "ConnectionError",
        "gaierror",
        "TimeoutError",
        "ConnectTimeoutError",
    ): ("expected an answer; check address and network"),
}


@dataclass(frozen=True)
class Sent:
    """objects: of the commit; new: of these that the remote did not have."""

    objects: int
    new: int


def push_commit(root: Path, commit: str, remote: str | None) -> Sent:
    """Send the files of a commit to a remote, and check that the remote lists each.

    Raises:
        ConfigError: the cache lacks a file, or the remote can't be used.
    """
    check_complete(root, commit, "DVC's cache", "`dvc repro` makes it again, or fetch it from where it is")
    result = _run(root, "push", remote, commit=commit)
    if "error" in result:
        raise ConfigError(explained(result, remote))
    return Sent(result["objects"], result["sent"])


def fetch_commit(root: Path, commit: str, remote: str | None) -> int:
    """Fetch the files of a commit into the cache, each verified by its hash, and return how many were fetched.

    Raises:
        ConfigError: the remote can't be used, or lacks a file: names its stage.
    """
    verify_remotes(root)
    result = _run(root, "fetch", remote, commit=commit)
    if not _advice(result):
        check_complete(root, commit, "the remote", "`rlhf push` it where it was made; what was fetched is kept")
    if "error" in result:
        raise ConfigError(explained(result, remote))
    return result["fetched"]


def fetch_hashes(root: Path, hashes: list[str], remote: str | None = None) -> str:
    """Fetch objects by their hashes, and return why that failed; empty if it didn't."""
    if not hashes:
        return ""
    result = _run(root, "fetch", remote, hashes=hashes)
    return explained(result, remote) if "error" in result else ""


def check_complete(root: Path, commit: str, place: str, remedy: str) -> None:
    """Check that DVC's cache has every output in the lock files of a commit.

    Raises:
        ConfigError: names what is missing, and the stage that makes it.
    """
    cache, in_git = cache_folder(root), set(git(root, "ls-tree", "-r", "--name-only", commit).splitlines())
    lost = []
    for lock in sorted(in_git & {"dvc.lock", "rounds/dvc.lock"}):
        stages = read_yaml_text(git(root, "show", f"{commit}:{lock}"), f"{lock} of commit {commit[:10]}").get("stages") or {}
        for stage, entry in stages.items():
            outs = {out["path"]: out["md5"] for out in entry.get("outs", [])}
            lost += [f"{path} (stage {stage})" for path, md5 in outs.items() if path not in in_git and _lacks(md5, cache)]
    if lost:
        more = f" and {len(lost) - 5} more" if len(lost) > 5 else ""
        raise ConfigError(f"commit {commit[:10]}: expected all files in {place}, got none for {', '.join(lost[:5])}{more}; {remedy}")


def _lacks(md5: str, cache: Path) -> bool:
    try:
        return bool(missing(md5, cache))
    except ValueError:  # the listing is damaged
        return True


def _run(root: Path, do: str, remote: str | None, *, commit: str | None = None, hashes: list[str] | None = None) -> dict[str, Any]:
    """Run the program for a commit, or for these hashes, and return its result.

    Raises:
        ConfigError: it exceeded DEADLINE.
    """
    task = json.dumps({"do": do, "remote": remote, "commit": commit, "hashes": hashes})
    process_options = {"cwd": root, "env": dvc_environment(root), "input": task, "timeout": DEADLINE}
    try:
        done = subprocess.run([sys.executable, "-P", "-c", _PROGRAM], stdout=subprocess.PIPE, text=True, check=False, **process_options)
    except subprocess.TimeoutExpired:
        raise ConfigError(f"DVC's remote: expected all files within {DEADLINE:.0f} s, got none; see `dvc remote list`") from None
    lines = done.stdout.splitlines()
    return json.loads(lines[-1]) if lines else {"error": "Ended", "words": [f"its process ended with code {done.returncode}"]}


def explained(result: dict[str, Any], remote: str | None) -> str:
    """Return an error of the program with what to do."""
    subject = f"DVC remote {remote}" if remote else "DVC remote"
    words = shown("; ".join(dict.fromkeys(result["words"])) or result["error"], 500)
    advice = _advice(result) or f"expected to succeed, got: {words}; `dvc remote list` shows its address"
    return f"{subject}: {advice}" if advice in (NO_REMOTE,) or words in advice else f"{subject}: {advice} ({words})"


def _advice(result: dict[str, Any]) -> str | None:
    """Return what to do about a known error, such as a missing password; None: nothing failed, or files are missing."""
    names = set(result.get("error", "").split())
    if any("authentication fail" in word.lower() for word in result.get("words", [])):  # an SSH server's way to say so
        names.add("PermissionDenied")
    return next((text for kinds, text in _ADVICE.items() if names & set(kinds)), None)
