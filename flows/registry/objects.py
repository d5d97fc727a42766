"""Git's objects by their names, many with one call, and none larger than a limit: a commit's or a tag's content is anybody's."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flows.chain.worktree import git_environment
from rlhf_core.config import MAX_BYTES, ConfigError

DEADLINE = 120.0  # seconds for one call of git; a signature may ask a person for a passphrase


@dataclass(frozen=True)
class Object:
    """kind: blob, tag, commit or tree; size in bytes; content: None where it is larger than the limit."""

    kind: str
    size: int
    content: bytes | None


def read_objects(root: Path, names: Sequence[str], limit: int = MAX_BYTES) -> list[Object | None]:
    """Two calls of git, however many objects.

    Args:
        names: hashes, or `<commit>:<path>`; without line breaks.
        limit: in bytes; of a larger object only kind and size are read.
    Returns:
        As names; None: there is no such object.
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
    """Kind and size; None: what git says of an object that it doesn't have."""
    kind, _, size = line.decode(errors="backslashreplace").rpartition(" ")
    return (kind, int(size)) if size.isdecimal() and kind in ("blob", "tag", "commit", "tree") else None


def _ask(root: Path, how: str, names: Sequence[str]) -> bytes:
    done = run_git(root, "cat-file", how, content="".join(f"{name}\n" for name in names).encode(errors="surrogateescape"))
    if done.returncode:
        raise ConfigError(f"git cat-file: expected to succeed in this checkout, got: {failure_text(done)}; `git fsck` says more")
    return done.stdout


def run_git(root: Path, *arguments: str, content: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """A call of git with something on its standard input; its messages are English.

    Raises:
        ConfigError: it took too long.
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
    """What a call of git wrote of its failure, on one line."""
    return " ".join(done.stderr.decode(errors="backslashreplace").split()) or f"exit code {done.returncode}"
