"""Pins the registry's state in a run's params when the run starts, so that no stage reads the registry.

`gate.incumbent` is the promoted reward model, `gate.anchor` the first promoted one, or the last that clearly beat the anchor before it,
`gate.rolled_back` the models that were rolled back, and `reward.pinned` the version that `reward.path` names. A run keeps its first
incumbent, anchor and named version, unless `reward.path` changes; `gate.rolled_back` is updated at each start.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from flows.registry.evidence import check_version
from flows.registry.state import read_for_decision
from flows.registry.tags import Version
from flows.registry.versions import bring_into_cache, fetch
from rlhf_core.config import ConfigError, RewardConfig, ScorerConfig, apply_overrides, load_params, shown
from rlhf_core.models.folder import SEPARATOR_KEY, check_kind, count_members
from rlhf_core.paths import PROMOTED, REWARD_MODEL
from rlhf_core.provenance.dvc_cache import cache_folder, listing, missing, read_cached
from rlhf_core.provenance.file_hashes import dvc_md5

INCUMBENT, ANCHOR, ROLLED_BACK = "gate.incumbent", "gate.anchor", "gate.rolled_back"
NAMED = "reward.pinned"

log = logging.getLogger("rlhf.flows")


def registry_params(root: Path) -> dict[str, Any]:
    """Return the current state of the registry as overrides of params.yaml.

    Raises:
        ConfigError: a tag was changed, or contradicts its commit.
    """
    found = read_for_decision(root, "reward-model")
    promoted = {INCUMBENT: found.current, ANCHOR: found.anchor}
    for name in dict.fromkeys([*(v.version for v in promoted.values() if v), *found.rolled_back]):
        check_version(root, found.versions[name])
    rolled_back = [{**_pin(found.versions[version]), "reason": event.reason} for version, event in found.rolled_back.items()]
    return {key: version and _pin(version) for key, version in promoted.items()} | {ROLLED_BACK: rolled_back}


def _pin(version: Version) -> dict[str, Any]:
    return {"version": version.version, "md5": version.md5, "sha256": version.sha256}


def pin_registry(root: Path, workspace: Path, *, chosen: dict[str, Any], fresh: bool) -> bool:
    """Write the registry's state to a workspace's params.yaml if it changed.

    Args:
        chosen: the user's overrides, whose keys aren't changed.
        fresh: whether the run is new and takes the current incumbent and anchor.
    Returns:
        Whether anything was written.
    """
    params = load_params(workspace / "params.yaml")
    gate = params.gate.model_dump()
    wanted = {
        key: value
        for key, value in registry_params(root).items()
        if key not in chosen and gate[key.partition(".")[2]] != value and (fresh or key == ROLLED_BACK)
    }
    named, before = named_reward_model(root, params.reward, fresh=fresh), params.reward.pinned
    if NAMED not in chosen and named != (before and before.model_dump()):
        wanted[NAMED] = named
    if wanted:
        apply_overrides(workspace / "params.yaml", wanted)
        log.info("params.yaml: %s updated from the registry", " and ".join(wanted))
    return bool(wanted)


def named_reward_model(root: Path, reward: RewardConfig, *, fresh: bool) -> dict[str, Any] | None:
    """Return the version that `reward.path` names, after bringing its files into DVC's cache; None if it names no version.

    Args:
        fresh: `registry` means the version that is promoted now; otherwise the version that the run has pinned, if any.
    Raises:
        ConfigError: there is no such version, it is an ensemble, or its files are neither in the cache nor in the remote.
    """
    if not reward.enabled or not reward.is_registered:
        return None
    name = None if reward.path == "registry" else reward.path
    if reward.pinned is not None and not fresh and name in (None, reward.pinned.version):
        name = reward.pinned.version
    version = read_for_decision(root, "reward-model").get(name)
    bring_into_cache(root, version)
    if (members := count_members(listing(version.md5, cache_folder(root)))) > 1:
        raise ConfigError(
            f"reward.path: expected a version with one model, got {version.version}, an ensemble of {members}; name another version, or a "
            "folder with one of its members"
        )
    return _pin(version)


def check_scorers(root: Path, workspace: Path) -> None:
    """Check that no reward model in a run's scorers was rolled back, unless gate.override has a reason.

    The gate checks the chain's own model.

    Raises:
        ConfigError: a reward model was rolled back.
    """
    params = load_params(workspace / "params.yaml")
    if params.gate.override is None and params.method_scorers is not None:
        check_not_rolled_back(root, workspace, [s for s in params.method_scorers[1] if s.path is not None])


def check_promoted(root: Path, workspace: Path) -> None:
    """Check that the promoted reward models are of the kind that the run's gate judges, unless gate.override has a reason.

    The gate says so of a model that DVC's cache lacks.

    Raises:
        ConfigError: one scores whole responses, and the run's model steps, or the other way round; or its files in the cache are damaged.
    """
    params, cache = load_params(workspace / "params.yaml"), cache_folder(root)
    if not params.reward.enabled or params.gate.override is not None:
        return
    for role, promoted in (("incumbent", params.gate.incumbent), ("anchor", params.gate.anchor)):
        if promoted is None:
            continue
        try:
            if not missing(promoted.md5, cache):
                own = json.loads(read_cached(promoted.md5, "config.json", cache)).get(SEPARATOR_KEY)
                check_kind(f"gate.{role} {promoted.version}", own, of_steps=params.reward.step_separator is not None)
        except ValueError as error:
            raise ConfigError(str(error)) from error


def check_not_rolled_back(root: Path, workspace: Path, scorers: list[ScorerConfig]) -> None:
    """Check that no scorer's reward model was rolled back.

    Raises:
        ConfigError: a reward model was rolled back.
    """
    found = read_for_decision(root, "reward-model")
    taken_back = {found.versions[version].md5: (version, event) for version, event in found.rolled_back.items()}
    for scorer in scorers if taken_back else ():
        folder = workspace / (scorer.path or REWARD_MODEL)
        if scorer.kind != "reward_model" or not folder.exists() or (md5 := dvc_md5(folder)) not in taken_back:
            continue
        version, event = taken_back[md5]
        raise ConfigError(
            f"scorer {scorer.name}: expected a reward model that was not rolled back, got {version}, which was, "
            f"{shown(f'{event.who}: {event.reason}', 1000)}; take another one, or write a reason to use it into gate.override of a new run"
        )


def start_from_registry(root: Path, workspace: Path, version: str | None) -> Path:
    """Fetch a policy version into a workspace, and return its folder.

    Args:
        version: name of the version; None: the promoted one.
    Raises:
        ConfigError: there is no such version, or its files are neither in the cache nor in the remote.
    """
    found = read_for_decision(root, "policy")
    chosen = found.get(version)
    folder = PROMOTED / f"policy-{chosen.version}"
    fetch(root, found, chosen.version, workspace / folder)
    return folder


def promoted_version(path: str) -> str | None:
    """Return the version in a path made by `start_from_registry`, or None for another path."""
    name = Path(path).name
    return name.removeprefix("policy-") if Path(path).parent == PROMOTED and name.startswith("policy-") else None
