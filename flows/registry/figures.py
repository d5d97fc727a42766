"""Computes again the figures on which a registration rests: metrics in a commit are texts, and so is dvc.lock with their hashes.

The gate's verdict follows from the held-out scores, whose hash is in the model's lineage, and its look from the ledger. A round's verdict
follows from its counts of prompts, and its error budget is in the ledger of comparisons. Scores and answers are made by models and aren't
made again: whoever can write a DVC cache with matching hashes in dvc.lock can still forge those.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from flows.registry.tags import Version
from rlhf_core.config import ConfigError, Params, parse_json, parse_params, shown
from rlhf_core.paths import EVALUATION_METRICS, GATE_METRICS, PREPARED, REWARD_HELDOUT, REWARD_MODEL, ROUNDS_FILE, round_folder
from rlhf_core.provenance.dvc_cache import cache_folder, link_verified, missing
from rlhf_core.rounds.pins import read_rounds
from rlhf_core.rounds.promotion import verdict
from rlhf_core.rounds.spending import check_rounds, outcome_of
from rlhf_core.stage.files import finite

PAIRS = ("preference.parquet", "stepwise.parquet", "slices.parquet")  # of the prepared data, which the gate reads
AGAIN = "run `dvc repro --single-item --force gate_reward` there, and commit what it writes"


def check_gate(workspace: Path, lock: dict[str, Any], params: dict[str, Any], gate: dict[str, Any]) -> None:
    """Compute the verdict of a commit's gate.json again from the scores that its dvc.lock names, and compare its look with the ledger.

    Args:
        workspace: the run's folder. lock, params, gate: its dvc.lock, params.yaml and gate.json.
    Raises:
        ConfigError: a figure or the look differs, or the scores aren't in DVC's cache.
    """
    try:
        if not gate["needed"]:
            return
        if gate["look"] is None:  # nothing was measured, for the reason in its message
            if gate["passed"] or gate["accuracy"] is not None:
                raise ConfigError(f"{GATE_METRICS}: expected a verdict with its look at the test pairs, got none; {AGAIN}")
            return
        _check_look(workspace, lock, gate)
        again = _judged_again(workspace, lock, _typed(params), gate)
    except (KeyError, TypeError, AttributeError, IndexError) as error:  # gate.json can hold anything
        got = shown(f"{type(error).__name__}: {error}")
        raise ConfigError(f"{GATE_METRICS}: expected what gate_reward writes, got another form ({got}); {AGAIN}") from error
    _compare(str(GATE_METRICS), again, gate, f"{REWARD_HELDOUT} of dvc.lock", AGAIN)


def _check_look(workspace: Path, lock: dict[str, Any], gate: dict[str, Any]) -> None:
    from rlhf_core.gate.looks import check_ledger

    judged, model = gate["look"]["model"], _hash_of(lock, str(REWARD_MODEL))
    if judged != model:
        raise ConfigError(
            f"{GATE_METRICS}: expected a verdict on the model of dvc.lock, md5 {model}, got one on {shown(str(judged))}; {AGAIN}"
        )
    check_ledger(gate, workspace)


def _judged_again(workspace: Path, lock: dict[str, Any], params: Params, gate: dict[str, Any]) -> dict[str, Any]:
    from rlhf_core.gate.again import judged_again

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            link_verified(_hash_of(lock, str(REWARD_HELDOUT)), folder / "heldout", root=workspace)
            link_verified(_hash_of(lock, str(PREPARED)), folder / "prepared", root=workspace, names=PAIRS)
            found = judged_again(
                gate, params, heldout=folder / "heldout", prepared=folder / "prepared", model=_hash_of(lock, str(REWARD_MODEL))
            )
        except ValueError as error:
            raise ConfigError(f"{GATE_METRICS}: expected scores from which to compute it again, got: {error}") from error
    return finite(found)


def check_accuracy(root: Path, version: Version) -> bool:
    """Compute a version's accuracy again from the scores that its lineage names. Other versions of the gate compute it alike.

    Returns:
        False: DVC's cache doesn't have the scores, or the version has no accuracy.
    Raises:
        ConfigError: the tag has another accuracy.
    """
    from rlhf_core.gate.again import accuracy_again, same

    made = {path: md5 for stage in (version.lineage.get("stages") or {}).values() for path, md5 in stage["outs"].items()}
    md5 = made.get(str(REWARD_HELDOUT))
    if version.gate_accuracy is None or md5 is None or missing(md5, cache_folder(root)):
        return False
    with tempfile.TemporaryDirectory() as name:
        heldout = Path(name) / "heldout"
        try:
            link_verified(md5, heldout, root=root)
        except ValueError as error:
            raise ConfigError(f"{version.artifact} {version.version}: {error}") from error
        found = accuracy_again(heldout)
    if not same(found, version.gate_accuracy):
        raise ConfigError(
            f"{version.artifact} {version.version}: expected the accuracy of its held-out scores, {found}, got {version.gate_accuracy} in "
            "its tag; don't use it"
        )
    return True


def check_round(workspace: Path, number: int, params: dict[str, Any], evaluated: dict[str, Any]) -> None:
    """Compute a round's verdict again from its counts, and compare budgets and outcomes up to it with the ledger of comparisons.

    Args:
        evaluated: the round's evaluate.json. The other files are those of the workspace, in which all is committed.
    Raises:
        ConfigError: a figure differs.
    """
    name, typed = f"{round_folder(number)}/{EVALUATION_METRICS}", _typed(params)
    remedy = "restore it with git, or run its stage again"
    rounds = read_rounds(workspace)
    if number not in rounds:
        raise ConfigError(f"{ROUNDS_FILE}: expected an entry for round {number}, got {list(rounds) or 'none'}; restore it with git")
    earlier = {k: _read_verdict(workspace, k) for k in range(1, number)}
    try:
        again = verdict(evaluated, typed.iterative.promotion, rounds[number].budget)
        _compare(name, finite(again), {key: evaluated.get(key) for key in again}, "its own counts", remedy)
        made = [(k, rounds[k].budget, outcome_of(found)) for k, found in {**earlier, number: evaluated}.items()]
        check_rounds(workspace.name, made, workspace)
    except (KeyError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise ConfigError(f"{name}: expected what evaluate_round writes, got another form ({shown(str(error))}); {remedy}") from error


def _read_verdict(workspace: Path, number: int) -> dict[str, Any] | None:
    path = workspace / round_folder(number) / EVALUATION_METRICS
    return parse_json(path.read_text(encoding="utf-8"), str(path)) if path.is_file() else None


def _compare(name: str, wanted: dict[str, Any], got: dict[str, Any], source: str, remedy: str) -> None:
    from rlhf_core.gate.again import differences

    found = list(differences(wanted, got))
    if found:
        first = ("accepted", "passed", "accuracy")  # the most important ones
        key, one, other = next((entry for name in first for entry in found if entry[0] == name), found[0])
        more = f", and {len(found) - 1} more differ" if len(found) > 1 else ""
        raise ConfigError(
            f"{name}: expected {shown(key)} as computed again from {source}, {shown(json.dumps(one))}, got {shown(json.dumps(other))}"
            f"{more}; someone edited it, or other code wrote it: {remedy}"
        )


def _hash_of(lock: dict[str, Any], path: str) -> str:
    for stage in lock["stages"].values():
        for out in stage.get("outs", []):
            if out["path"] == path:
                return out["md5"]
    raise ConfigError(
        f"dvc.lock: expected a stage that makes {path}, from which the gate's verdict is computed again, got none; run `dvc repro`"
    )


def _typed(tree: dict[str, Any]) -> Params:
    try:
        return parse_params(tree)
    except (ConfigError, ValidationError) as error:
        raise ConfigError(
            f"params.yaml of the run: expected one that this code reads, got: {error}; register with the run's own code"
        ) from error
