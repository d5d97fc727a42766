"""Reads git objects by name, many in one call, each up to a size limit, since the content of a commit or tag is untrusted."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flows.chain.worktree import git_environment
from rlhf_core.config import MAX_BYTES, ConfigError

DEADLINE = 120.0  # seconds for one call of git, which may prompt for the passphrase of a signing key


@dataclass(frozen=True)
class Object:
    """A git object.

    kind: blob, tag, commit or tree; size: bytes; content: None if larger than the limit.
    """

    kind: str
    size: int
    content: bytes | None


def read_objects(root: Path, names: Sequence[str], limit: int = MAX_BYTES) -> list[Object | None]:
    """Read objects with two calls of git, whatever their number.

    Args:
        names: hashes or `<commit>:<path>`, without line breaks.
        limit: bytes; of a larger object only kind and size are read.
    Returns:
        One object per name, in order; None: there is no such object.
    """
    if not names:
        return []
    heads = [_head(line) for line in _ask(root, "--batch-check=%(objecttype) %(objectsize)", names).splitlines()]
    wanted = [name for name, head in zip(names, heads, strict=True) if head is not None and head[1] <= limit]
    content = _ask(root, "--batch", wanted) if wanted else b""
    found: list[Object | None] = []
    at = 0
    for head in heads:
        if head is None or head[1] > limit:
            found.append(head and Object(*head, None))
            continue
        start = content.index(b"\n", at) + 1
        at = start + head[1] + 1
        found.append(Object(*head, content[start : at - 1]))
    return found


def _head(line: bytes) -> tuple[str, int] | None:
    """Kind and size from a line of `git cat-file --batch-check`; None if git doesn't have the object."""
    kind, _, size = line.decode(errors="backslashreplace").rpartition(" ")
    return (kind, int(size)) if size.isdecimal() and kind in ("blob", "tag", "commit", "tree") else None


def _ask(root: Path, mode: str, names: Sequence[str]) -> bytes:
    done = run_git(root, "cat-file", mode, content="".join(f"{name}\n" for name in names).encode(errors="surrogateescape"))
    if done.returncode:
        raise ConfigError(f"git cat-file: expected to succeed in this checkout, got: {failure_text(done)}; `git fsck` says more")
    return done.stdout


def run_git(root: Path, *arguments: str, content: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """Run git with `content` as standard input and English messages.

    Raises:
        ConfigError: it exceeded DEADLINE.
    """
    settings = {"cwd": root, "env": {**git_environment(), "LC_ALL": "C"}, "input": content, "timeout": DEADLINE}
    try:
        return subprocess.run(["git", *arguments], capture_output=True, check=False, **settings)
    except subprocess.TimeoutExpired:
        command = next((word for word in arguments if word != "-c" and "=" not in word), "")
        raise ConfigError(
            f"git {command}: expected an end within {DEADLINE:.0f} s, got none; a key with a passphrase needs an agent (ssh-add)"
        ) from None


def failure_text(done: subprocess.CompletedProcess[bytes]) -> str:
    """git's error output on one line, or its exit code."""
    return " ".join(done.stderr.decode(errors="backslashreplace").split()) or f"exit code {done.returncode}"
