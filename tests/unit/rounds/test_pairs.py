"""Pairs from scored responses."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rlhf_core.rounds.data import Group, build_pairs

MESSAGES = [{"role": "user", "content": "Sort 21."}]


@dataclass(frozen=True)
class Scored:
    text: str
    score: float
    finished: bool = True


def pairs(*groups: list[Scored], min_margin: float = 0.5):
    return build_pairs([Group("clerk", MESSAGES, group) for group in groups], min_margin=min_margin)


def test_the_best_goes_against_the_worst():
    made = pairs([Scored("b", 1.0), Scored("a", 2.0), Scored("c", -1.0)])
    (row,) = made.rows
    assert (row["chosen"], row["rejected"]) == ("a", "c")
    assert {key: row[key] for key in ("source", "split", "messages")} == {"source": "clerk", "split": "train", "messages": MESSAGES}
    assert (made.chosen, made.rejected) == ([1], [2])
    assert made.counts == {"pairs": 1, "too_few_responses": 0, "ties": 0, "below_margin": 0}


def test_truncated_unscored_or_empty_responses_are_in_no_pair():
    unusable = [Scored("cut", 9.0, finished=False), Scored("nan", math.nan), Scored("inf", math.inf), Scored(" \n", -9.0)]
    made = pairs([*unusable, Scored("good", 1.0), Scored("bad", 0.0)], [*unusable, Scored("alone", 1.0)], unusable)
    assert [(row["chosen"], row["rejected"]) for row in made.rows] == [("good", "bad")]
    assert made.counts["too_few_responses"] == 2
    assert made.chosen == [4, None, None]


def test_ties_are_dropped_even_without_a_margin():
    equal_scores = [Scored("a", 1.0), Scored("b", 1.0)]
    equal_texts = [Scored("a ", 1.0), Scored("a", 0.0)]
    made = pairs(equal_scores, equal_texts, min_margin=0.0)
    assert made.rows == [] and made.counts["ties"] == 2


def test_the_margin_is_reached_or_the_pair_is_dropped():
    made = pairs([Scored("a", 0.5), Scored("b", 0.0)], [Scored("a", 0.49), Scored("b", 0.0)])
    assert made.counts == {"pairs": 1, "too_few_responses": 0, "ties": 0, "below_margin": 1}


def test_of_equal_ones_the_first_is_taken():
    made = pairs([Scored("a", 1.0), Scored("b", 1.0), Scored("c", 0.0), Scored("d", 0.0)])
    assert (made.chosen, made.rejected) == ([0], [2])


def test_texts_keep_their_white_space_and_ids_are_those_of_the_content():
    made = pairs([Scored(" a\n", 1.0), Scored("b", 0.0)], [Scored(" a\n", 3.0), Scored("b", 0.0)], [Scored("a", 3.0), Scored("b", 0.0)])
    assert made.rows[0]["chosen"] == " a\n"
    assert made.rows[0]["id"] == made.rows[1]["id"] != made.rows[2]["id"]
