"""Reads held-out scores and gives the gate's verdict on figures, without loading a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from rlhf_core.config import GateConfig
from rlhf_core.data.heldout import HELDOUT_COLUMNS
from rlhf_core.data.schema import read_rows, read_slices
from rlhf_core.gate.checks import all_checks, sentences
from rlhf_core.gate.heldout import Heldout, nothing_measured
from rlhf_core.gate.pairs import Pairs

COLUMNS = tuple(HELDOUT_COLUMNS)
MAX_IDS = 10  # named in a message


def read_heldout(path: Path, prepared: Path, split: str) -> Heldout:
    """Return the scored pairs of a split.

    Raises:
        ValueError: a column is missing, a score isn't finite, or a pair isn't in the prepared data.
    """
    present = pq.read_schema(path).names
    missing = [c for c in COLUMNS if c not in present]
    if missing:
        raise ValueError(f"{path}: expected the columns {', '.join(COLUMNS)}, got none named {', '.join(missing)}; run train_reward again")
    table = pq.read_table(path, columns=list(COLUMNS), filters=[("split", "=", split)])
    scores = {c: table[c].to_numpy(zero_copy_only=False) for c in COLUMNS}
    finite = np.isfinite(scores["chosen_score"].astype(float)) & np.isfinite(scores["rejected_score"].astype(float))
    if not finite.all():
        ids = scores["id"][~finite]
        named = ", ".join(map(str, ids[:MAX_IDS])) + (" and more" if len(ids) > MAX_IDS else "")
        raise ValueError(
            f"{path}: expected finite scores, got NaN or infinity in {len(ids)} of {len(finite)} {split} pairs: {named}; "
            "the reward model has diverged or these pairs break it"
        )
    rows = {row["id"]: row for row in read_rows(prepared, "preference", split)}
    if unknown := [i for i in scores["id"] if i not in rows]:
        raise ValueError(
            f"{path}: expected pairs of {prepared}, got {len(unknown)} that are not there, {unknown[0]} the first; run train_reward again"
        )
    slices = read_slices(prepared)
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


def unjudged(config: GateConfig, message: str, *, needed: bool) -> dict[str, Any]:
    """gate.json for a gate that judged no model and therefore didn't pass.

    needed: a model was expected.
    """
    return {"needed": needed, "passed": False, **nothing_measured(config), "message": message}


def with_verdict(gate: dict[str, Any], config: GateConfig, *, exact_scores: bool) -> dict[str, Any]:
    """Return the measured gate with its checks, whether it passed, and the message.

    exact_scores: see `all_checks`.
    """
    checks = all_checks(gate, config, exact_scores=exact_scores)
    passed = all(check.passed is not False for check in checks)
    message = " ".join(sentences(gate, checks, config))
    return {"needed": True, **gate, "passed": passed, "checks": [check.as_json() for check in checks], "message": message}


def with_registry(gate: dict[str, Any], config: GateConfig, model: str) -> dict[str, Any]:
    """Return the gate with the override applied, and rejected if the registry has rolled this model back.

    model: md5 of its folder, as in dvc.lock.

    A rollback of another model doesn't change gate.json, since a change would make DVC rerun every later stage.
    """
    if gate["needed"]:
        for entry in config.rolled_back:
            if entry.md5 != model:
                continue
            check = {"name": "rolled_back", "value": 1, "low": None, "high": None, "threshold": 0, "n": 1, "passed": False}
            gate = {**gate, "checks": [*gate["checks"], check]}
            message = f"rejected: version {entry.version} was rolled back ({entry.reason}), and this is the same model."
            otherwise = f"Without that it would have {gate['message']}" if gate["passed"] else gate["message"]
            gate |= {"passed": False, "message": f"{message} {otherwise}"}
    accepted = (gate["passed"] or not gate["needed"]) and all(judge["passed"] for judge in gate["llm_judges"])
    return {**gate, "override": None if accepted else config.override}
