"""Tags of the registry written by git itself, in GTO's form: GTO, by which they are read elsewhere too, can't sign what it writes."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

from flows.chain.worktree import IDENTITY, git, has_identity
from flows.registry.objects import run_git, said
from flows.registry.signatures import allowed_signers, signing, verify
from rlhf_core.config import MAX_BYTES, ConfigError

_NUMBER = re.compile(r"#([1-9][0-9]{0,8})$")
MAX_NUMBER = 999_999_999
PATIENCE = 3.0  # seconds


def next_number(root: Path, artifact: str) -> int:
    """Of the next assignment: one more than the highest of all stages, as GTO counts.

    Raises:
        ConfigError: a tag has the last number that there is.
    """
    names = git(root, "for-each-ref", "--format=%(refname:strip=2)", f"refs/tags/{artifact}#*").splitlines()
    numbered = {int(found[1]): name for name in names if (found := _NUMBER.search(name))}
    last = max(numbered, default=0)
    if last == MAX_NUMBER:
        raise ConfigError(
            f"tag {numbered[last]}: expected a number with one above it, got the last one, which nothing here gives; look with `show` and "
            "`history` what is promoted, remove the tag, and look whether that is still so"
        )
    return last + 1


def write_tag(root: Path, name: str, commit: str, head: str, content: dict[str, Any], *, after: int) -> int:
    """An annotated tag; signed, where `promotion.allowed_signers` asks for it.

    Args:
        head: a line for people; content: becomes JSON.
        after: seconds since 1970 of the artifact's newest tag. GTO and DVC order tags by their second, so this one gets a later one, unless
            the clock is far behind.
    Returns:
        The second of the tag.
    Raises:
        ConfigError: git can't write or sign it, or the key is none of an allowed signer; there is no tag then.
    """
    try:
        text = json.dumps(content, indent=1, sort_keys=True, allow_nan=False)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"tag {name}: expected content that JSON can hold, got {error}; correct it in the commit") from error
    message = f"{head}\n\n{text}\n".encode()
    if len(message) > MAX_BYTES // 2:  # a signature and headers come to it
        raise ConfigError(f"tag {name}: expected at most {MAX_BYTES // 2} bytes, got {len(message)}; has the model that many files?")
    signers = allowed_signers(root)
    settings, how = signing(signers)
    identity = () if has_identity(root) else IDENTITY
    _wait_for_next_second(after)
    done = run_git(root, *identity, *settings, "tag", how, "--cleanup=verbatim", "--file=-", name, commit, content=message)
    if done.returncode:
        key = "; name your key with `git config user.signingKey FILE`" if signers else ""
        raise ConfigError(f"tag {name}: expected git to write it, got: {said(done)}{key}")
    oid, second = git(root, "for-each-ref", "--format=%(objectname) %(taggerdate:unix)", f"refs/tags/{name}").split()
    if signers is not None and (signature := verify(root, [oid], signers)[oid]).signer is None:
        git(root, "update-ref", "-d", f"refs/tags/{name}", oid)
        raise ConfigError(
            f"tag {name}: expected your key to sign it and to be one of {signers.path.name}, got {signature.problem}; nothing was written. "
            "`git config user.signingKey FILE` names your key"
        )
    return int(second)


def _wait_for_next_second(after: int) -> None:
    until = time.monotonic() + PATIENCE
    while time.time() < after + 1 and time.monotonic() < until:
        time.sleep(0.02)
