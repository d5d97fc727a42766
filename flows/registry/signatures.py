"""Makes and verifies signatures of the registry's tags with git and SSH keys. A local file lists the allowed signers.

`promotion.allowed_signers` in the user's own params.yaml names the file. The params.yaml of a tag's commit is never read for it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from pydantic import ValidationError

from flows.chain.worktree import git
from flows.registry.objects import failure_text, run_git
from rlhf_core.config import ConfigError, RegistryConfig, read_yaml, shown

_GOOD = re.compile(r'Good "git" signature for (?P<signer>\S+) with \S+ key SHA256:\S+')
THREADS = 8  # that verify signatures


@dataclass(frozen=True)
class Signers:
    """The file of allowed signers, in ssh-keygen's format (ALLOWED SIGNERS), and the sha256 of its content."""

    path: Path
    sha256: str


@dataclass(frozen=True)
class Signature:
    """The signature of a tag.

    signer: the name in the file of allowed signers; None if there is no valid signature, for the reason in `problem`.
    """

    signer: str | None
    problem: str = ""


def allowed_signers(root: Path) -> Signers | None:
    """Return the file of allowed signers that the user's params.yaml names; None if it names none, or there is no params.yaml.

    Raises:
        ConfigError: the file is missing, or section `promotion` of params.yaml is invalid.
    """
    params = root / "params.yaml"
    if not params.is_file():
        params = Path(git(root, "rev-parse", "--show-toplevel")) / "params.yaml"
    wanted = _promotion(params).allowed_signers if params.is_file() else None
    if wanted is None:
        return None
    path = (params.parent / Path(wanted).expanduser()).resolve()
    try:
        return Signers(path, hashlib.sha256(path.read_bytes()).hexdigest())
    except OSError as error:
        raise ConfigError(
            f"promotion.allowed_signers: expected a file of allowed signers, got {error.strerror}: {path}; correct the path, since no tag "
            "can be verified without the file"
        ) from error


def _promotion(path: Path) -> RegistryConfig:
    """Return the section `promotion` alone, so that the registry can be read while another section is invalid."""
    try:
        return RegistryConfig.model_validate(read_yaml(path).get("promotion"))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(("promotion", *map(str, first["loc"])))
        raise ConfigError(f"{path}: {key}: expected as in the default params.yaml, got: {shown(first['msg'])}; correct it") from error


def verify(root: Path, tags: Sequence[str], signers: Signers) -> dict[str, Signature]:
    """Return the signature of each tag, by the hash of the tag's object."""
    with ThreadPoolExecutor(THREADS) as pool:
        return dict(zip(tags, pool.map(lambda tag: _verify(root, tag, signers), tags), strict=True))


@lru_cache(maxsize=4096)
def _verify(root: Path, tag: str, signers: Signers) -> Signature:
    """Return the signature of a tag. It is cached, since a flow reads the registry several times and each signature takes a call of git."""
    # Without PGP: a key in a keyring isn't an allowed signer.
    settings = (*_ssh(signers), "-c", "gpg.minTrustLevel=fully", "-c", "gpg.program=false", "-c", "gpg.x509.program=false")
    done = run_git(root, *settings, "verify-tag", "--raw", tag)
    found = _GOOD.match(done.stderr.decode(errors="backslashreplace"))
    if done.returncode == 0 and found is not None:
        return Signature(found["signer"])
    return Signature(None, shown(failure_text(done)) if done.stderr.strip() else "none")


def _ssh(signers: Signers) -> tuple[str, ...]:
    return ("-c", "gpg.format=ssh", "-c", f"gpg.ssh.allowedSignersFile={signers.path}")


def signing(signers: Signers | None) -> tuple[tuple[str, ...], str]:
    """git's settings and the option of `git tag` for a signed tag, or without signers for an unsigned one."""
    return (_ssh(signers), "--sign") if signers else (("-c", "tag.gpgSign=false"), "--annotate")
