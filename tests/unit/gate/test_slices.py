"""Slices by values and by lengths."""

from __future__ import annotations

import numpy as np
from gate_pairs import pairs, right_and_wrong

from rlhf_core.gate.pairs import slice_accuracies, slice_values, thirds, worst_slice


def test_thirds_of_lengths():
    # Lower quantiles of 1 to 9 at 1/3 and 2/3 are 3 and 6.
    assert (
        thirds(np.array([9, 1, 2, 3, 4, 5, 6, 7, 8])).tolist()
        == ["7 to 9 tokens", *["1 to 3 tokens"] * 3, *["4 to 6 tokens"] * 3] + ["7 to 9 tokens"] * 2
    )
    assert set(thirds(np.array([4] * 5))) == {"4 tokens"}
    assert set(thirds(np.array([4] * 9 + [7]))) == {"4 tokens", "7 tokens"}
    assert len(thirds(np.array([], dtype=int))) == 0


def test_response_length_is_the_longer_ones_and_order_says_which():
    p = pairs([1, 1, 1], chosen_tokens=[3, 9, 5], rejected_tokens=[8, 2, 5])
    assert slice_values(p, "response_length").tolist() == ["8 tokens", "9 tokens", "5 tokens"]
    assert slice_values(p, "length_order").tolist() == ["chosen shorter", "chosen longer", "same length"]
    assert slice_values(p, "category") is None


def test_each_value_has_its_accuracy_and_small_ones_are_not_judged():
    # 30 pairs of "sort", 24 right; 10 of "largest", 5 right, too few to judge; 2 without a category are in no slice.
    margins = right_and_wrong(24, 6) + right_and_wrong(5, 5) + right_and_wrong(0, 2)
    p = pairs(margins, category=["sort"] * 30 + ["largest"] * 10 + [None] * 2)
    found = slice_accuracies(p, ["category", "missing"], confidence=0.95, min_pairs=20)
    assert [(s["value"], s["accuracy"], s["n"], s["judged"]) for s in found] == [("largest", 0.5, 10, False), ("sort", 0.8, 30, True)]
    assert worst_slice(found)["value"] == "sort" and worst_slice(found[:1]) is None


def test_lengths_are_in_their_order_not_the_alphabets():
    p = pairs([1] * 3, prompt_tokens=[100, 20, 3])
    assert [s["value"] for s in slice_accuracies(p, ["prompt_length"], confidence=0.95, min_pairs=1)] == [
        "3 tokens",
        "20 tokens",
        "100 tokens",
    ]
