"""What a run that exists would be changed in. A run's name stands for its params and results, so only `--update` changes one."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from flows.chain.overrides import check
from flows.chain.worktree import git, worktree_path
from flows.runs.record import RECORD
from rlhf_core.config import ConfigError, Params, overridden, read_text, shown

MAX_KEYS = 20  # named in a message
OF_THE_REGISTRY = ("gate.incumbent", "gate.anchor", "gate.rolled_back")  # written when a run is started, by flows/chain/pins.py

log = logging.getLogger("rlhf.flows")


def check_update(root: Path, name: str, overrides: dict[str, Any], *, update: bool, free: Iterable[str] = ()) -> None:
    """Overrides leave a run that has begun as it is, or are meant to change it.

    Args:
        update: the user wants the change. free: keys that no result depends on, and which change unasked.
    Raises:
        ConfigError: they would change it unasked; each key with both values.
    """
    text = run_params(root, name) if overrides and has_begun(root, name) else None
    if text is None:
        return
    subject = f"params.yaml of run {name}"
    before, after = (overridden(text, given, subject=subject)[1] for given in ({}, overrides))
    changes = [change for change in differences(before, after) if change[0] not in free]
    if not changes:
        _say_what_it_keeps(root, name, before, overrides)
    elif update:
        log.warning("run %s: changed: %s", name, _told(changes))
    else:
        raise ConfigError(
            f"run {name}: expected the params that it has, got others: {_told(changes)}; add --update (a deployment's parameter `update`) "
            "to change this run, or give the new one another name"
        )


def run_params(root: Path, name: str) -> str | None:
    """The text of a run's params.yaml, from its worktree or, where that was removed, from its branch; None: there is no such run."""
    path = worktree_path(root, name)
    if path.exists():
        return read_text(path / "params.yaml")
    if not branch_exists(root, name):
        return None
    return git(root, "show", f"refs/heads/run/{name}:params.yaml")


def branch_exists(root: Path, name: str) -> bool:
    return git(root, "for-each-ref", f"refs/heads/run/{name}") != ""


def has_begun(root: Path, name: str) -> bool:
    """Whether anything stands under the run's name; not so for one that was killed before its params were written."""
    path, branch = worktree_path(root, name), f"refs/heads/run/{name}"
    if path.exists() and ((path / RECORD).exists() or git(path, "status", "--porcelain")):
        return True
    if not branch_exists(root, name):
        return path.exists()  # a folder of the user's, or a worktree in which another branch was checked out
    if git(root, "rev-list", "--max-count=1", f"HEAD..{branch}"):
        return True
    words = [f"--grep=Run {name}:", f"--grep=Results of run {name}"]  # of one that was merged
    return git(root, "log", "--max-count=1", "--fixed-strings", *words, "--format=%H", branch) != ""


def check_run(root: Path, name: str | None, overrides: dict[str, Any], *, rounds: bool = False) -> Params:
    """The params that a run would have: its own or, where it isn't made yet, those of the current folder, with the overrides.

    Args:
        rounds: for a series of rounds of iterative DPO.
    Raises:
        ConfigError: as `check`.
    """
    text = None if name is None else run_params(root, name)
    if text is None:
        return check(root / "params.yaml", overrides, rounds=rounds)
    return overridden(text, overrides, subject=f"params.yaml of run {name}", rounds=rounds)[1]


def differences(before: Params, after: Params) -> list[tuple[str, Any, Any]]:
    """(dotted key, value before, value after); None where there is no such key."""
    one, other = (dict(_flat(params.model_dump(mode="json"))) for params in (before, after))
    return [(key, one.get(key), other.get(key)) for key in {**one, **other} if one.get(key) != other.get(key)]


def _flat(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    entries = node.items() if isinstance(node, dict) else enumerate(node)
    for key, value in entries:
        if (isinstance(value, dict) and value) or (isinstance(value, list) and any(isinstance(item, dict) for item in value)):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _told(changes: list[tuple[str, Any, Any]]) -> str:
    said = [f"{key} {_value(old)} -> {_value(new)}" for key, old, new in changes[:MAX_KEYS]]
    return ", ".join(said) + (f" and {len(changes) - MAX_KEYS} more" if len(changes) > MAX_KEYS else "")


def _value(value: Any) -> str:
    return shown(json.dumps(value, ensure_ascii=False), 60)


def own_params(root: Path, name: str, params: Params) -> list[tuple[str, Any, Any]]:
    """(key, value of the commit that the run was made from, value of the run), without what the registry says.

    Raises:
        ConfigError: that commit's params can't be read by this code.
    """
    base = _made_from(root, name)
    made_from = overridden(git(root, "show", f"{base}:params.yaml"), {}, subject=f"params.yaml of {base[:9]}")[1]
    return [change for change in differences(made_from, params) if not change[0].startswith(OF_THE_REGISTRY)]


def _made_from(root: Path, name: str) -> str:
    """The commit; of a branch that was merged since, the one before its first params."""
    branch = f"refs/heads/run/{name}"
    if not git(root, "rev-list", "--max-count=1", f"HEAD..{branch}"):
        own = git(root, "log", "--fixed-strings", f"--grep=Run {name}: ", "--format=%H", branch).splitlines()
        if own:
            return git(root, "rev-parse", f"{own[-1]}^")
    return git(root, "merge-base", "HEAD", branch)


def _say_what_it_keeps(root: Path, name: str, params: Params, overrides: dict[str, Any]) -> None:
    """What a recipe had when the run was made, and has no more, say."""
    with suppress(ConfigError):
        given = tuple(overrides)
        kept = [change for change in own_params(root, name, params) if not f"{change[0]}.".startswith(tuple(f"{key}." for key in given))]
        if kept:
            log.info("run %s: goes on, and keeps what was not given: %s", name, _told(kept))
