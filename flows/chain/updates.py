"""Guards changes of an existing run's params. A run's name stands for its params and results, so only `--update` changes them."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import reduce
from pathlib import Path
from types import MappingProxyType
from typing import Any

from flows.chain.overrides import check
from flows.chain.worktree import git, worktree_path
from flows.registry.state import ARTIFACTS
from flows.runs.record import RECORD
from rlhf_core.config import ConfigError, Params, SharedTrainingConfig, overridden, read_text, shown

MAX_KEYS = 20  # shown in a message
SHARING_TRAINING = tuple(
    f"{name}."
    for name, field in Params.model_fields.items()
    if name != "training" and isinstance(field.annotation, type) and issubclass(field.annotation, SharedTrainingConfig)
)
REGISTRY_KEYS = ("gate.incumbent", "gate.anchor", "gate.rolled_back", "reward.pinned")  # by flows/chain/pins.py, at a run's start

log = logging.getLogger("rlhf.flows")


def check_update(
    root: Path, name: str, before: Params, after: Params, overrides: dict[str, Any], *, update: bool, free: Iterable[str] = ()
) -> None:
    """Check that overrides don't change an existing run, unless `update` allows it.

    Args:
        before: the run's own params. after: the params with the overrides.
        update: whether changes are allowed. free: keys that affect no result and may always change.
    Raises:
        ConfigError: the overrides change the run; names each key with both values.
    """
    if not overrides:
        return
    changes = [change for change in differences(before, after) if change[0] not in free]
    if not changes:
        _log_kept_params(root, name, before, overrides)
    elif update:
        log.warning("run %s: changed: %s", name, _change_list(changes))
    else:
        raise ConfigError(
            f"run {name}: expected its own params, got: {_change_list(changes)}; add --update (a deployment's parameter `update`) "
            "to change this run, or give the new one another name"
        )


def run_params(root: Path, name: str) -> str | None:
    """Return the text of a run's params.yaml from its worktree or, if that was removed, from its branch; None if there is no such run."""
    path = worktree_path(root, name)
    if path.exists():
        return read_text(path / "params.yaml")
    if not branch_exists(root, name):
        return None
    return git(root, "show", f"refs/heads/run/{name}:params.yaml")


def branch_exists(root: Path, name: str) -> bool:
    return git(root, "for-each-ref", f"refs/heads/run/{name}") != ""


def has_begun(root: Path, name: str) -> bool:
    """Return whether a run of this name exists; False if it was killed before its params were written."""
    path, branch = worktree_path(root, name), f"refs/heads/run/{name}"
    if path.exists() and ((path / RECORD).exists() or git(path, "status", "--porcelain")):
        return True
    if not branch_exists(root, name):
        return path.exists()  # a user's folder, or a worktree with another branch checked out
    if git(root, "rev-list", "--max-count=1", f"HEAD..{branch}"):
        return True
    words = [f"--grep=Run {name}:", f"--grep=Results of run {name}"]  # of a merged branch
    return git(root, "log", "--max-count=1", "--fixed-strings", *words, "--format=%H", branch) != ""


def check_run(root: Path, name: str | None, overrides: dict[str, Any], *, rounds: bool = False) -> tuple[Params | None, Params]:
    """Return the params of a run before (None: it is new) and after the overrides. A new run has those of the current folder.

    Args:
        rounds: whether the run is a series of rounds of iterative DPO.
    Raises:
        ConfigError: as `check`; a new run has a name by which `rlhf push` and `rlhf pull` know a model of the registry.
    """
    text = None if name is None else run_params(root, name)
    if text is None:
        if name in ARTIFACTS:
            raise ConfigError(f"run name: expected another than {' or '.join(ARTIFACTS)}, got {name}; choose another")
        return None, check(root / "params.yaml", overrides, rounds=rounds)
    subject = f"params.yaml of run {name}"
    after = overridden(text, overrides, subject=subject, rounds=rounds)[1]
    return overridden(text, {}, subject=subject)[1] if has_begun(root, name) else None, after


def differences(before: Params, after: Params) -> list[tuple[str, Any, Any]]:
    """Return (dotted key, value before, value after) for each difference; None stands for a missing key.

    A list or mapping that is empty on one side is one change.
    """
    trees = [params.model_dump(mode="json") for params in (before, after)]
    one, other = (dict(_flat(tree)) for tree in trees)
    keys = {**one, **other}
    filled = [key for key, value in keys.items() if value in ([], {}) and any(below.startswith(f"{key}.") for below in keys)]
    within = tuple(f"{key}." for key in filled)
    changes = [(key, one.get(key), other.get(key)) for key in keys if not f"{key}.".startswith(within)]
    changes += [(key, *(reduce(_item, key.split("."), tree) for tree in trees)) for key in filled]
    return [change for change in changes if change[1] != change[2]]


def _item(node: Any, part: str) -> Any:
    return node[int(part)] if isinstance(node, list) else node[part]


def _flat(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    entries = node.items() if isinstance(node, dict) else enumerate(node)
    for key, value in entries:
        if (isinstance(value, dict) and value) or (isinstance(value, list) and any(isinstance(item, dict) for item in value)):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _change_list(changes: list[tuple[str, Any, Any]]) -> str:
    """Return changes as text. A change of `training` also stands for the same change of each section that takes it over."""
    shared = {(key.partition(".")[2], str(old), str(new)) for key, old, new in changes if key.startswith("training.")}
    changes = [c for c in changes if not (c[0].startswith(SHARING_TRAINING) and (c[0].partition(".")[2], str(c[1]), str(c[2])) in shared)]
    parts = [f"{key} {_value(old)} -> {_value(new)}" for key, old, new in changes[:MAX_KEYS]]
    return ", ".join(parts) + (f" and {len(changes) - MAX_KEYS} more" if len(changes) > MAX_KEYS else "")


def _value(value: Any) -> str:
    return shown(json.dumps(value, ensure_ascii=False), 60)


def own_params(root: Path, name: str, params: Params, given: Mapping[str, Any] = MappingProxyType({})) -> list[tuple[str, Any, Any]]:
    """Return (key, value in the run's base commit, value in the run) for each difference, without the keys pinned from the registry.

    Args:
        given: overrides of the base commit's params, whose values don't count as the run's own.
    Raises:
        ConfigError: this code can't read that commit's params, or they lack a given key.
    """
    base = _made_from(root, name)
    text = git(root, "show", f"{base}:params.yaml")
    made_from = overridden(text, dict(given), subject=f"params.yaml of {base[:9]}", complete=False)[1]
    return [change for change in differences(made_from, params) if not change[0].startswith(REGISTRY_KEYS)]


def _made_from(root: Path, name: str) -> str:
    """Return the base commit of a run; for a merged branch this is the parent of its first commit."""
    branch = f"refs/heads/run/{name}"
    if not git(root, "rev-list", "--max-count=1", f"HEAD..{branch}"):
        own = git(root, "log", "--fixed-strings", f"--grep=Run {name}: ", "--format=%H", branch).splitlines()
        if own:
            return git(root, "rev-parse", f"{own[-1]}^")
    return git(root, "merge-base", "HEAD", branch)


def _log_kept_params(root: Path, name: str, params: Params, overrides: dict[str, Any]) -> None:
    """Log params that the run keeps although they aren't given this time, for example because a recipe changed."""
    with suppress(ConfigError):
        try:
            kept = own_params(root, name, params, overrides)
        except ConfigError:  # the given values fit only together with others of the run
            given = tuple(f"{key}." for key in overrides)
            kept = [change for change in own_params(root, name, params) if not f"{change[0]}.".startswith(given)]
        if kept:
            log.info("run %s: resumes and keeps params that were not given: %s", name, _change_list(kept))
