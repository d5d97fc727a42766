"""Two models on the same pairs."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import binom

from rlhf_core.gate.looks import look_level
from rlhf_core.gate.pairs import compare, mcnemar_exact
from rlhf_core.statistics.intervals import paired_interval


def test_mcnemar():
    # 7 against 2: 2 * (1 + 9 + 36) / 2^9 = 92 / 512. Even numbers: the sum over both tails is above 1.
    assert mcnemar_exact(7, 2) == mcnemar_exact(2, 7) == pytest.approx(92 / 512)
    assert mcnemar_exact(4, 4) == mcnemar_exact(0, 0) == 1.0
    assert mcnemar_exact(0, 10) == pytest.approx(2 / 1024)


def test_difference_over_prompts():
    # Differences 0, 1 | -1, 0.5: mean 0.125, variance 2.1875 / 4 = 0.546875, alone 0.13671875; residuals of the prompts 0.75 and -0.75,
    # v = 2 * 1.125 / 16 = 0.140625, 1.0285714 times as much; t with 1 degree of freedom is 6.4828704 z: n_effective 0.0925337.
    found = compare(np.array([1, 1, 0, 0.5]), np.array([1, 0, 1, 0.0]), np.array([0, 0, 1, 1]), 0.95)
    assert (found["candidate_accuracy"], found["accuracy"], found["difference"], found["n"]) == (0.625, 0.5, 0.125, 4)
    n = 4 / (0.140625 / 0.13671875) * (1.959964 / 12.706205) ** 2
    assert (found["low"], found["high"]) == pytest.approx(paired_interval(1.5 * n / 4, n / 4, n, 0.95), abs=1e-6)
    assert (found["candidate_only"], found["incumbent_only"], found["p_value"]) == (2, 1, 1.0)


def test_a_pair_a_prompt_has_the_interval_of_paired_shares():
    candidate, incumbent = np.array([1, 1, 1, 0, 1, 0, 1, 1.0]), np.array([1, 0, 0, 1, 1, 0, 1, 1.0])
    found = compare(candidate, incumbent, np.arange(8), 0.95)
    assert (found["low"], found["high"]) == paired_interval(2, 1, 8, 0.95)


def test_models_that_agree_on_every_pair_are_not_known_to_be_equal():
    points = np.repeat([1, 0, 1, 1.0], 5)
    found = compare(points, points, np.repeat(np.arange(4), 5), 0.95)
    assert (found["difference"], found["p_value"]) == (0, 1.0)
    assert (found["low"], found["high"]) == paired_interval(0, 0, 4, 0.95)  # as many trials as prompts


@pytest.mark.parametrize("prompts", [200, 720])
@pytest.mark.parametrize("number", [1, 3, 10])
def test_a_model_that_only_loses_by_the_margin_passes_at_most_at_the_level_of_the_look(prompts, number):
    """Exactly, over the number of lost pairs; by Student's interval 200 prompts let it pass with 0.089 at looks 1 and 3."""
    margin, level = 0.02, look_level(0.95, number)
    right, passed = np.ones(prompts), 0.0
    for lost in range(20):
        candidate = np.where(np.arange(prompts) < lost, 0.0, 1.0)
        if compare(candidate, right, np.arange(prompts), 1 - 2 * level)["low"] >= -margin:
            passed += float(binom.pmf(lost, prompts, margin))
    assert passed <= level
