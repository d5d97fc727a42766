"""A candidate beside the incumbent, the anchor and the models that were judged on its pairs before it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gate_pairs import pairs, right_and_wrong
from gate_verdicts import gate_config, judge, verdicts

from rlhf_core.gate.looks import at_look
from rlhf_core.gate.pairs import compare


def against(candidate: int, other: int, n: int, *, version: str = "v1", md5: str = "0.dir", confidence: float = 0.95) -> dict[str, Any]:
    """The first `candidate` of n pairs right against the last `other`, so that they differ on as many pairs as they can."""
    points = [(np.arange(n) < candidate).astype(float), (np.arange(n)[::-1] < other).astype(float)]
    return {"version": version, "md5": md5, "not_scored": 0, **compare(*points, np.arange(n), confidence)}


def test_pairs_too_few_to_see_the_margin_decide_nothing():
    # 310 and 299 of 400: they differ on 101 and 90 pairs, by 0.0275. Half 0.067692 of the interval is more than the margin 0.02:
    # 400 * (0.067692 / 0.02)^2 = 4,583 pairs. With the margin 0.07 the same interval passes.
    found = against(310, 299, 400)
    assert (found["low"], found["high"]) == pytest.approx((-0.040313, 0.095071), abs=1e-6)
    gate = judge(pairs(right_and_wrong(310, 90)), gate_config(min_accuracy=0.5), incumbent=found)
    assert not gate["passed"] and "too few pairs to compare with the incumbent v1: half-width 0.0677" in gate["message"]
    assert "exceeds gate.max_regression=0.02 on 400 pairs; about 4,583 pairs are needed" in gate["message"]
    assert judge(pairs(right_and_wrong(310, 90)), gate_config(min_accuracy=0.5, max_regression=0.07), incumbent=found)["passed"]


def test_a_margin_wider_than_the_pairs_can_tell_passes_nobody_who_may_be_worse():
    # Old rule: -0.0154 is above -0.02, so it passed. The half-width is 0.0446.
    found = against(390, 378, 410) | {"low": -0.0154, "high": 0.0739, "difference": 0.0293}
    gate = judge(pairs(right_and_wrong(390, 20)), incumbent=found)
    assert verdicts(gate)["incumbent_difference"] is False and "too few pairs" in gate["message"]


def test_a_clearly_better_model_passes_with_few_pairs():
    found = against(390, 340, 410)
    assert (found["high"] - found["low"]) / 2 > 0.02 and found["low"] > 0
    assert judge(pairs(right_and_wrong(390, 20)), incumbent=found)["passed"]
    found = against(340, 390, 410)
    assert "the incumbent v1 wins" in judge(pairs(right_and_wrong(340, 70)), incumbent=found)["message"]


def test_no_margin_asks_for_a_candidate_that_is_no_worse():
    better, equal, unclear = against(950, 850, 1000), against(900, 900, 1000), against(905, 900, 1000)
    for found, passed in ((better, True), (equal, False), (unclear, False)):
        gate = judge(pairs(right_and_wrong(900, 100)), gate_config(max_regression=0.0), incumbent=found)
        assert gate["passed"] is passed and ("the incumbent v1 wins" in gate["message"]) is not passed


def test_one_prompt_tells_nothing_of_a_difference():
    found = {"version": "v1", "md5": "0.dir", "not_scored": 0, **compare(np.ones(300), np.ones(300), np.zeros(300, dtype=int), 0.95)}
    gate = judge(pairs([1.0] * 300), incumbent=found)
    assert not gate["passed"] and "pairs of more than one prompt are needed" in gate["message"]


def nested(candidate: int, other: int, n: int, **named: str) -> dict[str, Any]:
    points = [(np.arange(n) < right).astype(float) for right in (candidate, other)]
    return {"not_scored": 0, **compare(*points, np.arange(n), 0.95), **named}


def test_the_anchor_stops_what_the_incumbent_lets_slide():
    incumbent = nested(3440, 3460, 4000, version="v9", md5="9.dir")  # worse by 0.005
    anchor = nested(3440, 3520, 4000, version="v1", md5="1.dir")  # by 0.02
    rows = pairs(right_and_wrong(3440, 560))
    assert judge(rows, incumbent=incumbent)["passed"]
    gate = judge(rows, incumbent=incumbent, anchor=anchor)
    assert not gate["passed"] and verdicts(gate)["anchor_difference"] is False and verdicts(gate)["incumbent_difference"]
    assert "the anchor v1 wins" in gate["message"] and "roll back the anchor" in gate["message"]


def test_an_anchor_that_is_the_incumbent_is_judged_once():
    both = nested(3440, 3460, 4000, version="v9", md5="9.dir")
    gate = judge(pairs(right_and_wrong(3440, 560)), incumbent=both, anchor=both)
    assert "anchor_difference" not in verdicts(gate) and verdicts(gate)["incumbent_difference"]
    assert verdicts(judge(pairs(right_and_wrong(3440, 560)), anchor=both))["anchor_difference"]


def test_a_model_is_no_worse_than_itself_on_however_few_pairs():
    rows = pairs(right_and_wrong(280, 20))
    itself = against(280, 280, 300, md5="m", confidence=0.999)
    assert itself["low"] < -0.02
    assert verdicts(judge(rows, incumbent=itself, look=look(1)))["incumbent_difference"]
    assert not verdicts(judge(rows, incumbent=itself | {"md5": "another"}, look=look(1)))["incumbent_difference"]


def look(number: int, *accuracies: float) -> dict[str, Any]:
    known = {"model": "m", "run": "r", "passed": False, "confidence": 0.95}
    earlier = [{"number": k, "accuracy": a, **known} for k, a in enumerate(accuracies, start=1)]
    return {"number": number, "level": 0.0125, "split": "s", "model": "m", "earlier": earlier}


def test_a_later_look_needs_more_and_says_so():
    # 780 of 1000: the lower end is 0.7532 at 95%, and at 97.5% (z 2.2414) below 0.75: 0.75 + 2.2414 * sqrt(0.1875 / 1000) = 0.7807.
    rows = pairs(right_and_wrong(780, 220))
    assert judge(rows)["passed"]
    config = at_look(gate_config(), 2)
    gate = judge(rows, config, look=look(2, 0.81))
    assert not gate["passed"] and gate["confidence"] == pytest.approx(0.975)
    assert (
        "This is look 2 at pairs of the split, for which the intervals are those of 97.5%: accuracy 0.7807 is needed, 0.7768 at look 1."
        in gate["message"]
    )
    assert "worn out" not in gate["message"]  # a model with 0.81 has been seen
    worn_out = judge(rows, config, look=look(2, 0.7))
    assert "of all looks has 0.7800, which would have passed as look 1: the split is worn out. Hold out more pairs" in worn_out["message"]
    weak = judge(pairs(right_and_wrong(760, 240)), config, look=look(2, 0.7))
    assert "of all looks has 0.7600, which would not have passed as look 1 either: train a better reward model." in weak["message"]
    assert "worn out" not in weak["message"]
    passed = judge(pairs(right_and_wrong(900, 100)), config, look=look(2, 0.81))
    assert passed["passed"] and passed["message"].startswith("passed: ")
    assert passed["message"].endswith(" This is look 2 at pairs of the split, for which the intervals are those of 97.5%.")
    assert "look" not in judge(rows, look=look(1))["message"]
