"""Pairs for the gate's tests, with fillers for everything that a test doesn't name; and slices of rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rlhf_core.data.schema import SLICES_SCHEMA, RowWriter
from rlhf_core.gate.pairs import Pairs


def pairs(
    margins: Sequence[float],
    *,
    prompts: Sequence[object] | None = None,
    sources: Sequence[str] | None = None,
    chosen_tokens: Sequence[int] | None = None,
    rejected_tokens: Sequence[int] | None = None,
    prompt_tokens: Sequence[int] | None = None,
    **labels: Sequence[str | None],
) -> Pairs:
    """Rejected scores are 0; each pair has its own prompt by default."""
    n = len(margins)
    return Pairs(
        chosen=np.array(margins, dtype=float),
        rejected=np.zeros(n),
        chosen_tokens=np.array(chosen_tokens if chosen_tokens is not None else [5] * n),
        rejected_tokens=np.array(rejected_tokens if rejected_tokens is not None else [6] * n),
        prompt_tokens=np.array(prompt_tokens if prompt_tokens is not None else [4] * n),
        prompts=np.array([str(p) for p in (prompts if prompts is not None else range(n))], dtype=object),
        sources=np.array(sources if sources is not None else ["clerk"] * n, dtype=object),
        labels={name: np.array(values, dtype=object) for name, values in labels.items()},
    )


def right_and_wrong(right: int, wrong: int, ties: int = 0) -> list[float]:
    return [1.0] * right + [-1.0] * wrong + [0.0] * ties


def write_slices(folder: Path, slices: dict[str, dict[str, str]]) -> None:
    """Write id -> column -> value, as prepare_data does."""
    with RowWriter(folder / "slices.parquet", SLICES_SCHEMA) as file:
        for row_id, of_row in slices.items():
            for column, value in of_row.items():
                file.add({"id": row_id, "column": column, "value": value})
