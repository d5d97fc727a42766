"""Accuracy by slice: where a reward model that is good on the whole is bad."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlhf_core.gate.pairs import Pairs, summarize

PARTS = 3  # of lengths


def slice_values(pairs: Pairs, column: str) -> np.ndarray | None:
    """[N] the value of each pair in a column, None where it has none; None: no pair has this column.

    source; prompt_length, response_length (of the pair's longer one): thirds of the pairs, named by their tokens; length_order: which
    response is longer; anything else is a column of the data.
    """
    if column == "source":
        return pairs.sources
    if column == "prompt_length":
        return thirds(pairs.prompt_tokens)
    if column == "response_length":
        return thirds(np.maximum(pairs.chosen_tokens, pairs.rejected_tokens))
    if column == "length_order":
        return _length_order(pairs)
    return pairs.labels.get(column)


def thirds(tokens: np.ndarray) -> np.ndarray:
    """[N] names such as "5 to 9 tokens": three parts of about as many pairs, equal lengths together; fewer where lengths hardly differ."""
    borders = np.unique(np.quantile(tokens, [k / PARTS for k in range(1, PARTS)], method="lower")) if len(tokens) else np.array([])
    part = np.searchsorted(borders, tokens, side="left")
    names = np.empty(len(tokens), dtype=object)
    for k in np.unique(part):
        inside = tokens[part == k]
        low, high = int(inside.min()), int(inside.max())
        names[part == k] = f"{low} to {high} tokens" if low < high else f"{low} tokens"
    return names


def _length_order(pairs: Pairs) -> np.ndarray:
    order = np.sign(pairs.chosen_tokens - pairs.rejected_tokens)
    return np.array(["chosen shorter", "same length", "chosen longer"], dtype=object)[order + 1]


def slice_accuracies(pairs: Pairs, columns: list[str], *, confidence: float, min_pairs: int) -> list[dict[str, Any]]:
    """Of every value of every column that the pairs have, in the columns' order; lengths ascending, other values by name."""
    found = []
    for column in columns:
        values = slice_values(pairs, column)
        if values is None:
            continue
        named = sorted({v for v in values if v is not None}, key=lambda v: (_first_number(v) if "length" in column else 0, str(v)))
        for value in named:
            measured = summarize(pairs.select(values == value), confidence)
            kept = {key: measured[key] for key in ("accuracy", "low", "high", "ties", "n", "prompts")}
            found.append({"column": column, "value": str(value), **kept, "judged": measured["n"] >= min_pairs})
    return found


def _first_number(name: str) -> int:
    first = name.split(" ", 1)[0]
    return int(first) if first.isdigit() else 0


def worst_slice(slices: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The lowest accuracy among the slices that are judged; of equal ones the first."""
    return min((s for s in slices if s["judged"]), key=lambda s: s["accuracy"], default=None)
