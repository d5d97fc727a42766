"""The gate's error rate on edited splits by a small simulation: `python -m tools.simulate looks` is the large one."""

from __future__ import annotations

import numpy as np
import pytest

from tools.simulate.gate import settings
from tools.simulate.looks import EDITS, LAST, MOVING, edited, first_pass

REPLICATIONS = 150
LEFT_OUT = "one prompt left out, another each time"


@pytest.mark.long
@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_split_is_no_new_one(edit):
    assert edited(edit)[1] == list(range(1, LAST + 1))


def test_a_moving_split_counts_the_looks_that_share_its_prompts():
    """Thirds of the prompts are in the splits before and after, and in those two away."""
    (moving,) = MOVING
    assert edited(moving)[1] == [1, 2, *[3] * (LAST - 2)]


@pytest.mark.long
def test_ten_models_at_the_threshold_rarely_get_one_through_on_splits_with_a_prompt_less():
    """0.107 did with every edited split as a new one."""
    rng = np.random.default_rng(1)
    splits, numbers = edited(LEFT_OUT)
    hits = sum(first_pass(rng, settings(), splits[:10], numbers[:10]) < 10 for _ in range(REPLICATIONS))
    assert hits / REPLICATIONS <= 0.06
