"""Two models on the same pairs."""

from __future__ import annotations

import numpy as np
import pytest

from rlhf_core.gate.incumbent import compare, mcnemar_exact


def test_mcnemar():
    # 7 against 2: 2 * (1 + 9 + 36) / 2^9 = 92 / 512. Even numbers: the sum over both tails is above 1.
    assert mcnemar_exact(7, 2) == mcnemar_exact(2, 7) == pytest.approx(92 / 512)
    assert mcnemar_exact(4, 4) == mcnemar_exact(0, 0) == 1.0
    assert mcnemar_exact(0, 10) == pytest.approx(2 / 1024)


def test_difference_over_prompts():
    # Differences 0, 1 | -1, 0.5: mean 0.125; residuals of the prompts 0.75 and -0.75, v = 2 * 1.125 / 16 = 0.140625, sqrt 0.375;
    # t with 1 degree of freedom 12.706205: 0.125 -+ 4.764827.
    found = compare(np.array([1, 1, 0, 0.5]), np.array([1, 0, 1, 0.0]), np.array([0, 0, 1, 1]), 0.95)
    assert (found["candidate_accuracy"], found["accuracy"], found["difference"], found["n"]) == (0.625, 0.5, 0.125, 4)
    assert (found["low"], found["high"]) == pytest.approx((-4.639827, 4.889827), abs=1e-5)
    assert (found["candidate_only"], found["incumbent_only"], found["p_value"]) == (2, 1, 1.0)


def test_a_model_against_itself():
    points = np.array([1, 0, 1, 1.0])
    found = compare(points, points, np.arange(4), 0.95)
    assert (found["difference"], found["low"], found["high"], found["p_value"]) == (0, 0, 0, 1.0)
