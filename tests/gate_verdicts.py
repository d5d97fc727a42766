"""gate.json from pairs alone, for the gate's tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from clerk_params import CLERK_PARAMS

from rlhf_core.config import GateConfig, load_params
from rlhf_core.gate.heldout import Heldout, measure_scores
from rlhf_core.gate.pairs import Pairs
from rlhf_core.gate.verdict import with_verdict

ROOT = Path(__file__).parents[1]


def heldout(rows: Pairs, *, texts: list[tuple[str, str]] | None = None) -> Heldout:
    """Held-out pairs with texts of chosen and rejected; by default all responses differ."""
    message = texts or [(f"c{i}", f"r{i}") for i in range(len(rows))]
    prepared = [
        {"messages": [{"role": "user", "content": p}], "chosen": a, "rejected": b} for p, (a, b) in zip(rows.prompts, message, strict=True)
    ]
    return Heldout(rows, prepared, np.zeros(len(rows)), np.zeros(len(rows)))


def judge(rows: Pairs, config: GateConfig | None = None, **found: Any) -> dict[str, Any]:
    """gate.json from scores, and the other results."""
    config = config or load_params(CLERK_PARAMS).gate
    return with_verdict({**measure_scores(heldout(rows), np.array([2.0, 2.0, -2.0]), config), **found}, config, exact_scores=True)


def gate_config(**changes: Any) -> GateConfig:
    return load_params(CLERK_PARAMS).gate.model_copy(update=changes)


def verdicts(gate: dict[str, Any]) -> dict[str, bool | None]:
    return {check["name"]: check["passed"] for check in gate["checks"]}
