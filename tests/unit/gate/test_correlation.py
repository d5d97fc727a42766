"""Rank correlations by hand and against SciPy's, and what is said of length."""

from __future__ import annotations

import math

import numpy as np
import pytest
from gate_pairs import pairs
from scipy.stats import kendalltau, spearmanr

from rlhf_core.gate.heldout import against_judge, kendall, length_bias, mean_ranks, spearman


def test_by_hand():
    # Ranks differ by 0, 1, 1, 0: 1 - 6 * 2 / (4 * 15) = 0.8; one of six pairs is discordant: (5 - 1) / 6.
    a, b = np.array([1, 2, 3, 4.0]), np.array([10, 30, 20, 40.0])
    assert spearman(a, b) == pytest.approx(0.8) and kendall(a, b) == pytest.approx(4 / 6)
    # One tie in b: two concordant pairs, three differ in a and two in b: 2 / sqrt 6.
    assert kendall(np.array([1, 2, 3.0]), np.array([1, 1, 2.0])) == pytest.approx(2 / math.sqrt(6))
    assert mean_ranks(np.array([5, 1, 5, 7])).tolist() == [2.5, 1, 2.5, 4]


def test_with_many_ties_as_scipy():
    rng = np.random.default_rng(3)
    a, b = rng.integers(0, 12, 300).astype(float), rng.integers(0, 4, 300).astype(float)
    assert spearman(a, b) == pytest.approx(spearmanr(a, b).statistic)
    assert kendall(a, b) == pytest.approx(kendalltau(a, b, variant="b").statistic)


def test_nothing_varies():
    assert math.isnan(spearman(np.ones(4), np.arange(4.0))) and math.isnan(kendall(np.ones(4), np.arange(4.0)))


def test_judge_in_perfect_order():
    found = against_judge(np.arange(40.0), np.arange(40) // 10 / 4, np.repeat(np.arange(20), 2), 0.95)
    # Kendall: of 780 pairs 4 * 45 are tied for the judge, all others concordant: 600 / sqrt(780 * 600).
    assert found["kendall"] == pytest.approx(600 / math.sqrt(780 * 600)) and (found["n"], found["prompts"]) == (40, 20)
    assert found["spearman"] == pytest.approx(spearmanr(np.arange(40), np.arange(40) // 10).statistic)
    assert 0.9 < found["spearman_low"] < found["spearman_high"] <= 1.0


def test_length():
    # Chosen shorter: pairs 0 to 3, of which three are right. Longer: pair 4 (right) and 5 (wrong). Pair 6 has equal lengths.
    # Of the six that differ the chosen one is longer in 2; the higher score is the longer one's in pairs 3 (wrong) and 4: 2 of 6.
    p = pairs([1, 1, 1, -1, 1, -1, 1], chosen_tokens=[2, 2, 2, 2, 8, 8, 5], rejected_tokens=[5] * 7)
    scores, tokens = np.concatenate([p.chosen, p.rejected]), np.concatenate([p.chosen_tokens, p.rejected_tokens])
    found = length_bias(p, scores, tokens, np.tile(p.clusters, 2), 0.95)
    assert found["shorter"]["accuracy"] == 0.75 and found["shorter"]["n"] == 4
    assert (found["chosen_longer"], found["preferred_longer"]) == pytest.approx((2 / 6, 2 / 6))
    assert found["correlation"]["value"] == pytest.approx(spearmanr(scores, tokens).statistic)
