"""The picture of a run's figures."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pandas as pd

from rlhf_core.report.sketch import sketch


def test_curves_are_scaled_to_their_panel():
    rows = pd.DataFrame({"step": [0, 1, 2], "loss": [4.0, 3.0, 2.0], "heldout_loss": [None, 2.5, None]})
    picture = sketch({}, {"train_sft": rows})
    assert ElementTree.fromstring(picture).tag.endswith("svg") and "SFT: loss" in picture and "RL" not in picture
    lines = re.findall(r'<polyline points="([^"]*)"', picture)
    # A panel is 320 by 190 with margins of 46, 12, 30, 26: x from 46 to 308, y from 30 (4.0) to 164 (2.0); 2.5 is at 30 + 134 * 0.75.
    assert lines == ["46.0,30.0 177.0,97.0 308.0,164.0", "177.0,130.5"]


def test_reliability_and_frontier_are_dots_and_nothing_is_nothing():
    curves = {"train_policy": pd.DataFrame({"step": [1, 2], "kl_mean": [0.0, 1.0], "score_mean": [0.5, 1.5]})}
    empty = {"n": 0, "confidence": None, "accuracy": None}
    bins = [{"n": 5, "confidence": 0.6, "accuracy": 0.7}, empty, {"n": 5, "confidence": 0.9, "accuracy": 0.8}]
    picture = sketch({"gate_reward": {"calibration": {"after": {"bins": bins}}}}, curves)
    assert picture.count("<circle") == 4 and 'stroke-dasharray="4"' in picture
    assert sketch({"gate_reward": {"calibration": None}}, {}) is None
