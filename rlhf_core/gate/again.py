"""Computes the gate's verdict again from stored scores, for the registry, because anyone can edit gate.json.

Figures that need models are taken from the given gate.json: probes, external pairs, incumbent, anchor, judges and the number of members.
The checks on them are computed again, but for those of judges.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from rlhf_core.config import Params
from rlhf_core.gate.heldout import measure_ensemble, measure_scores
from rlhf_core.gate.looks import at_look, look_level
from rlhf_core.gate.pairs import pair_points
from rlhf_core.gate.steps import first_error_points, measure_disagreement, measure_steps, read_steps
from rlhf_core.gate.verdict import read_heldout, with_registry, with_verdict

BY_MODEL = ("probes", "external", "incumbent", "anchor", "judge", "llm_judges")
ROUNDING = 1e-5  # of metrics, which have six decimals or six significant digits
MESSAGES = ("message", "reason")  # made from figures before they were rounded
SHOWN = 2e-3  # of a number in such a message
_NUMBER = re.compile(r"[0-9]+(?:\.[0-9]+)?(?:e-?[0-9]+)?")


def judged_again(recorded: dict[str, Any], params: Params, *, heldout: Path, prepared: Path, model: str) -> dict[str, Any]:
    """gate.json as the stored scores of a model determine it.

    Args:
        recorded: gate.json. heldout: reward_heldout.parquet. prepared: folder with the prepared tables.
        model: md5 of the model's folder, as in dvc.lock.
    Raises:
        ValueError: the scores aren't finite or don't belong to the prepared pairs.
    """
    number = recorded["look"]["number"]
    config = at_look(params.gate, number)
    if params.reward.step_separator is None:
        test, validation = (read_heldout(heldout, prepared, split) for split in ("test", "validation"))
        gate, disagreement = measure_scores(test, validation.pairs.margins, config), measure_ensemble(test)
    else:
        steps, others = (read_steps(heldout, prepared, split) for split in ("test", "validation"))
        gate, disagreement = measure_steps(steps, others.step_margins, config), measure_disagreement(steps)
    gate |= {key: recorded[key] for key in BY_MODEL}
    gate["look"] = {**recorded["look"], "model": model, "level": look_level(params.gate.confidence, number)}
    gate["ensemble"] = {"members": recorded["ensemble"]["members"], **disagreement}
    again = with_registry(with_verdict(gate, config, exact_scores=params.model.dtype == "float32"), params.gate, model)
    if recorded["passed"] is False:  # a rounded figure may meet a threshold that the exact one missed
        failed = {check["name"] for check in recorded["checks"] if check["passed"] is False}
        again["checks"] = [{**check, "passed": False} if check["name"] in failed else check for check in again["checks"]]
        again |= {key: recorded[key] for key in ("passed", "message", "override")}
    return again


def accuracy_again(heldout: Path) -> float | None:
    """Accuracy on the test rows of reward_heldout.parquet, which every version of the gate computes alike; None without test rows."""
    if "labels" in pq.read_schema(heldout).names:
        rows = pq.read_table(heldout, columns=["labels", "scores"], filters=[("split", "=", "test")]).to_pylist()
        points = first_error_points(*([np.array(row[name]) for row in rows] for name in ("labels", "scores")))
        return float(points.mean()) if len(points) else None
    columns = ["chosen_score", "rejected_score"]
    table = pq.read_table(heldout, columns=columns, filters=[("split", "=", "test")])
    chosen, rejected = (table[name].to_numpy().astype(float) for name in columns)
    return float(pair_points(chosen, rejected).mean()) if len(chosen) else None


def differences(wanted: Any, got: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Each value that differs between two JSON trees by more than rounding, as (key, wanted, got)."""
    if isinstance(wanted, dict) and isinstance(got, dict):
        for name in sorted(wanted.keys() | got.keys()):
            yield from differences(wanted.get(name), got.get(name), f"{key}.{name}" if key else name)
    elif isinstance(wanted, list) and isinstance(got, list) and len(wanted) == len(got):
        for number, (one, other) in enumerate(zip(wanted, got, strict=True)):
            yield from differences(one, other, f"{key}.{number}")
    elif not (_same_words(wanted, got) if key in MESSAGES and isinstance(wanted, str) else same(wanted, got)):
        yield key, wanted, got


def same(a: Any, b: Any) -> bool:
    """Return whether two values of JSON are equal, numbers up to rounding."""
    if all(isinstance(value, float | int) and not isinstance(value, bool) for value in (a, b)):
        return math.isclose(a, b, rel_tol=ROUNDING, abs_tol=ROUNDING)
    return type(a) is type(b) and a == b


def _same_words(a: str, b: Any) -> bool:
    """Return whether two messages are equal up to the last shown digit of their numbers."""
    if not isinstance(b, str) or _NUMBER.sub("0", a) != _NUMBER.sub("0", b):
        return False
    numbers = zip(*(map(float, _NUMBER.findall(text)) for text in (a, b)), strict=True)
    return all(math.isclose(one, other, rel_tol=SHOWN, abs_tol=SHOWN) for one, other in numbers)
