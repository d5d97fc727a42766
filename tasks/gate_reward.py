"""Stage gate_reward: the reward model must earn its place before a policy is trained on it.

What is measured, and how it is judged, is in docs/gate.md. The verdict is always in metrics/gate.json, whatever it is; a
rejection ends the stage with an error after the file is written. Where no reward model is trained (`reward.enabled: false`)
the file says that none had to pass.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from rlhf_core.config import GateConfig, IncumbentConfig, Params
from rlhf_core.data.schema import read_rows, read_slices
from rlhf_core.gate.checks import all_checks, percent, sentences
from rlhf_core.gate.heldout import Heldout, distinct_responses, measure_ensemble, measure_judge, measure_scores, nothing_measured
from rlhf_core.gate.incumbent import compare
from rlhf_core.gate.looks import at_look, look_level, split_hash, take_look, write_result
from rlhf_core.gate.pairs import Pairs, pair_points
from rlhf_core.paths import METRICS, PREPARED, REWARD_HELDOUT, REWARD_MODEL
from rlhf_core.progress import Bar
from rlhf_core.rounds.pins import dvc_md5
from rlhf_core.stage.files import source_judges, write_json
from rlhf_core.stage.run import Stage, StageFailed, no_arguments

SPLIT = "test"  # never looked at during training, unlike validation
COLUMNS = (
    *("id", "source", "split", "chosen_score", "rejected_score", "chosen_tokens", "rejected_tokens"),
    *("prompt", "prompt_tokens", "chosen_std", "rejected_std"),
)
MAX_IDS = 10  # named in a message
NOT_NEEDED = "not needed: no reward model was trained, for reward.enabled is false."

log = logging.getLogger("rlhf")


class UnusableScores(ValueError):
    """The held-out scores can't be judged at all."""


def main() -> None:
    with Stage("gate_reward", resumable=False) as stage:
        config, needed = stage.params.gate, stage.params.reward.enabled
        try:
            gate = judge_model(stage) if needed else unjudged(config, NOT_NEEDED, needed=False)
        except (ValueError, FileNotFoundError) as error:  # of scores, the incumbent or external pairs: without them nothing is decided
            gate = unjudged(config, str(error), needed=True)
        gate = with_registry(gate, config)
        keep_result(gate)
        write_json(METRICS / "gate.json", gate)
        for line in explain(gate):
            log.info("gate_reward: %s", line)
        if needed and not gate["passed"] and gate["override"] is None:
            raise StageFailed(gate["message"])


def judge_model(stage: Stage) -> dict[str, Any]:
    """The content of gate.json."""
    params = stage.params
    test, validation = (read_heldout(REWARD_HELDOUT, split) for split in (SPLIT, "validation"))
    look = take_look(split_hash(test.rows), dvc_md5(REWARD_MODEL)) if len(test.pairs) else None
    config = params.gate if look is None else at_look(params.gate, look.number)
    gate = measure_scores(test, validation.pairs.margins, config)
    if look is not None:
        gate["look"] = {**asdict(look), "level": look_level(params.gate.confidence, look.number)}
        stage.use_threads()
        asked, members = ask_models(test, params, config, scratch=stage.scratch)
        gate |= asked
        gate["ensemble"] = {"members": members, **measure_ensemble(test)}
        gate["judge"] = measure_judge(test, source_judges(), config.confidence)
    return with_verdict(gate, config, exact_scores=params.model.dtype == "float32")


def keep_result(gate: dict[str, Any]) -> None:
    """Write the verdict into the ledger, beside the look."""
    if (look := gate["look"]) is not None:
        found = {key: gate[key] for key in ("passed", "accuracy", "confidence")}
        write_result(look["split"], look["model"], **found)


def read_heldout(path: Path, split: str) -> Heldout:
    """The pairs of a split.

    Raises:
        UnusableScores: a column is missing, a score is missing, NaN or infinite, or a pair is none of the prepared data's.
    """
    present = pq.read_schema(path).names
    missing = [c for c in COLUMNS if c not in present]
    if missing:
        raise UnusableScores(
            f"{path}: expected the columns {', '.join(COLUMNS)}, got none named {', '.join(missing)}; run train_reward again"
        )
    table = pq.read_table(path, columns=list(COLUMNS), filters=[("split", "=", split)])
    scores = {c: table[c].to_numpy(zero_copy_only=False) for c in COLUMNS}
    check_finite(path, scores, split)
    rows = {row["id"]: row for row in read_rows(PREPARED, "preference", split)}
    if unknown := [i for i in scores["id"] if i not in rows]:
        raise UnusableScores(
            f"{path}: expected pairs of {PREPARED}, got {len(unknown)} that are not there, {unknown[0]} the first; run train_reward again"
        )
    slices = read_slices(PREPARED)
    columns = sorted({column for i in scores["id"] for column in slices.get(i, {})})
    pairs = Pairs(
        chosen=scores["chosen_score"].astype(float),
        rejected=scores["rejected_score"].astype(float),
        chosen_tokens=scores["chosen_tokens"] - scores["prompt_tokens"],
        rejected_tokens=scores["rejected_tokens"] - scores["prompt_tokens"],
        prompt_tokens=scores["prompt_tokens"],
        prompts=scores["prompt"],
        sources=scores["source"],
        labels={c: np.array([slices.get(i, {}).get(c) for i in scores["id"]], dtype=object) for c in columns},
    )
    return Heldout(pairs, [rows[i] for i in scores["id"]], scores["chosen_std"], scores["rejected_std"])


def check_finite(path: Path, scores: dict[str, np.ndarray], split: str) -> None:
    finite = np.isfinite(scores["chosen_score"].astype(float)) & np.isfinite(scores["rejected_score"].astype(float))
    if not finite.all():
        ids = scores["id"][~finite]
        named = ", ".join(map(str, ids[:MAX_IDS])) + (" and more" if len(ids) > MAX_IDS else "")
        raise UnusableScores(
            f"{path}: expected finite scores, got NaN or infinity in {len(ids)} of {len(finite)} {split} pairs: {named}; "
            "the reward model has diverged or these pairs break it"
        )


def with_registry(gate: dict[str, Any], config: GateConfig) -> dict[str, Any]:
    """The verdict with what the registry knew when the run began: a model that was taken back doesn't pass; and with the override."""
    if gate["needed"] and config.rolled_back:
        found = dvc_md5(REWARD_MODEL)
        for entry in config.rolled_back:  # of another model nothing is written: what comes after the gate would run again for nothing
            if entry.md5 != found:
                continue
            check = {"name": "rolled_back", "value": 1, "low": None, "high": None, "threshold": 0, "n": 1, "passed": False}
            gate = {**gate, "checks": [*gate["checks"], check]}
            message = f"rejected: version {entry.version} was rolled back ({entry.reason}), and this is the same model."
            beside = f"Without that it would have {gate['message']}" if gate["passed"] else gate["message"]
            gate |= {"passed": False, "message": f"{message} {beside}"}
    return {**gate, "override": None if gate["passed"] or not gate["needed"] else config.override}


def ask_models(test: Heldout, params: Params, config: GateConfig, *, scratch: Path) -> tuple[dict[str, Any], int]:
    """What only the model itself can tell, or promoted ones: keys of gate.json; and how many members the model has.

    Args:
        config: of the look, which says how wide intervals are.
    """
    from rlhf_core.gate.external import score_external
    from rlhf_core.gate.probes import format_shifts, invariance
    from rlhf_core.gate.scoring import LoadedModel

    about = params.model
    how = {"max_length": about.max_length, "trust_remote_code": about.trust_remote_code, "template_date": about.template_date}
    model = LoadedModel.load(REWARD_MODEL, **how)
    responses, which = distinct_responses(test)
    scores = np.concatenate([test.pairs.chosen, test.pairs.rejected])
    stored, prompts = scores[which], np.tile(test.pairs.prompts, 2)[which]
    some = np.unique(np.linspace(0, len(which) - 1, min(2 * config.probe_pairs, len(which))).astype(int))
    asked = [responses[i] for i in some]
    bar = Bar("question", 2 + len(config.external) + sum(promoted is not None for promoted in (config.incumbent, config.anchor)))
    shifts = format_shifts(model, asked, prompts[some], scale=float(stored.std()) or 1.0, confidence=config.confidence)
    bar.step()
    probes = {**invariance(model, asked, stored[some]), **{f"format: {name}": shift for name, shift in shifts.items()}}
    bar.step()
    measured: dict[str, Any] = {"probes": probes, "external": []}
    for external in config.external:
        measured["external"].append(score_external(external, model, confidence=config.confidence))
        bar.step()
    members = len(model.members)
    del model  # there may be no room for both
    found: dict[str, dict[str, Any]] = {}  # by md5: incumbent and anchor may be one model
    for role, promoted in (("incumbent", config.incumbent), ("anchor", config.anchor)):
        if promoted is None:
            continue
        if promoted.md5 not in found:
            found[promoted.md5] = measure_promoted(test, role, promoted, confidence=config.confidence, scratch=scratch, how=how)
        measured[role] = {**found[promoted.md5], "version": promoted.version}
        bar.step()
    bar.close()
    return measured, members


def measure_promoted(
    test: Heldout, role: str, promoted: IncumbentConfig, *, confidence: float, scratch: Path, how: dict[str, Any]
) -> dict[str, Any]:
    """The candidate and a promoted model on the pairs that the latter can score.

    Raises:
        ValueError: the promoted one isn't in DVC's cache as its md5 and sha256 say, or can't score a single pair.
    """
    from rlhf_core.gate.scoring import LoadedModel
    from rlhf_core.provenance.cached_model import checkout

    folder = scratch / role
    checkout(promoted.md5, folder, root=Path(), sha256=promoted.sha256)
    other = LoadedModel.load(folder, **how)
    chosen, rejected = (other.score_texts([(row["messages"], row[side]) for row in test.rows]) for side in ("chosen", "rejected"))
    known = np.isfinite(chosen) & np.isfinite(rejected)
    if not known.any():
        raise ValueError(f"gate.{role} {promoted.version}: expected a model that can score these pairs, got a score for none")
    pairs = test.pairs.select(known)
    compared = compare(pairs.points, pair_points(chosen[known], rejected[known]), pairs.clusters, confidence)
    return {"version": promoted.version, "md5": promoted.md5, "not_scored": int((~known).sum()), **compared}


def unjudged(config: GateConfig, message: str, *, needed: bool) -> dict[str, Any]:
    """gate.json of a gate that stays shut because there is nothing it could judge; needed: there should have been."""
    return {"needed": needed, "passed": False, **nothing_measured(config), "message": message}


def with_verdict(gate: dict[str, Any], config: GateConfig, *, exact_scores: bool) -> dict[str, Any]:
    checks = all_checks(gate, config, exact_scores=exact_scores)
    passed = all(check.passed is not False for check in checks)
    message = " ".join(sentences(gate, checks, config))
    return {"needed": True, **gate, "passed": passed, "checks": [check.as_json() for check in checks], "message": message}


def explain(gate: dict[str, Any]) -> Iterator[str]:
    """What the terminal shows besides a rejection's message."""
    if (look := gate["look"]) is not None:
        yield f"look {look['number']} at this split's {gate['n']} test pairs: intervals of {percent(gate['confidence'])}"
    for s in gate["slices"]:
        few = "" if s["judged"] else " (too few to judge)"
        yield f"{s['column']}={s['value']}: accuracy {s['accuracy']:.4f} ({s['low']:.4f} to {s['high']:.4f}) on {s['n']} pairs{few}"
    if gate["worst_slice"] is not None:
        worst = gate["worst_slice"]
        yield f"worst slice: {worst['column']}={worst['value']}, accuracy {worst['accuracy']:.4f}"
    for external in gate["external"]:
        found = "no pair got a score" if not external["n"] else f"accuracy {external['accuracy']:.4f} on {external['n']} pairs"
        yield f"external {external['name']}: {found}"
    for role in ("incumbent", "anchor"):
        if (other := gate[role]) is not None:
            difference = f"{other['difference']:+.4f} ({other['low']:+.4f} to {other['high']:+.4f})"
            yield f"{role} {other['version']}: accuracy {other['accuracy']:.4f} on {other['n']} pairs; this model's is {difference} from it"
    if gate["passed"] or not gate["needed"]:
        yield gate["message"]
    elif gate["override"] is not None:
        yield f"{gate['message']} Used all the same, for gate.override says: {gate['override']}"


if __name__ == "__main__":
    no_arguments(__doc__)
    main()
