"""Fetches a folder by its hash from the project's DVC remote into its cache.

Only the hash comes from a tag. DVC reads the project's own settings, including the remote and its password, and never those of the tag's
commit, which could name any address.
"""

from __future__ import annotations

import configparser
import re
from pathlib import Path

from flows.chain.worktree import verify_remotes
from flows.registry.evidence import read_files
from flows.stores.dvc_remote import fetch_hashes
from rlhf_core.config import ConfigError, shown
from rlhf_core.provenance.dvc_cache import cache_folder, listing, missing

CONFIG, LOCAL = ".dvc/config", ".dvc/config.local"


def fetch_from_remote(root: Path, commit: str, path: str, md5: str, remote: str | None = None) -> None:
    """Fetch a folder's listing and its files from a remote of the project at `root`.

    Args:
        commit: the version's commit; path: the folder's path there; remote: its name, None: the default one.
    Raises:
        ConfigError: the remote is missing or incomplete, or the commit's settings name a remote that the project doesn't have.
    """
    check_remotes(root, commit)
    verify_remotes(root)
    cache = cache_folder(root)
    failure = fetch_hashes(root, [md5], remote)
    try:
        if (cache / md5[:2] / md5[2:]).is_file():  # the listing
            absent = [file for file in listing(md5, cache).values() if not (cache / file[:2] / file[2:]).is_file()]
            failure = fetch_hashes(root, absent, remote) or failure
        lost = missing(md5, cache)
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error
    if lost:
        raise ConfigError(
            f"{path}: expected it in DVC's cache or in the remote, got neither: {failure or shown(lost[0])}; `rlhf push` it where it "
            "was made, or set a remote with `dvc remote add --local`"
        )


def check_remotes(root: Path, commit: str) -> None:
    """Check that each remote in a commit's settings has the address of one of the project's remotes.

    Raises:
        ConfigError: a remote has another address. It wouldn't be used, but the user should know that the commit names another place.
    """
    known = {url for name in (CONFIG, LOCAL) for url in _remotes(_own(root / name), name).values() if url}
    theirs = read_files(root, commit, (CONFIG,))[CONFIG] or ""
    for name, url in _remotes(theirs, f"{CONFIG} of commit {commit[:10]}").items():
        if url and url not in known:
            ours = ", ".join(sorted(map(_public, known))) or "none"
            raise ConfigError(
                f"{CONFIG} of commit {commit[:10]}: expected the remotes of this project ({ours}), got {shown(repr(name))} at "
                f"{shown(_public(url))}; nothing was fetched. If it is yours: `dvc remote add --local {shown(name)} URL`"
            )


def _public(url: str) -> str:
    """Return the address without the user and password that it may contain."""
    return re.sub(r"//[^/@]*@", "//***@", url)


def _own(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def _remotes(text: str, subject: str) -> dict[str, str]:
    """Return the addresses of remotes by name."""
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    try:
        parser.read_string(text)
    except configparser.Error as error:
        raise ConfigError(f"{subject}: expected DVC's settings, got {shown(' '.join(str(error).split()))}; nothing was fetched") from error
    named = {section.strip("'\""): parser[section] for section in parser.sections()}
    return {
        name.removeprefix("remote").strip().strip('"'): s.get("url", "").strip("'\"")
        for name, s in named.items()
        if name.startswith("remote")
    }
