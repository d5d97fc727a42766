"""The gate's error rates by a small simulation: `python -m tools.simulate gate` is the large one."""

from __future__ import annotations

import numpy as np
import pytest

from tools.simulate.gate import MARGIN, START, STEP, any_passes, chain, power, settings

REPLICATIONS = 120


@pytest.mark.long
@pytest.mark.parametrize(("counted", "lowest", "highest"), [(False, 0.12, 0.40), (True, 0.0, 0.10)])
def test_ten_models_at_the_threshold_rarely_get_one_through_where_looks_are_counted(counted, lowest, highest):
    """1 - 0.975^10 = 0.22 without counting; 0.0475 with, and 0.10 is 2.7 standard errors above that."""
    rng = np.random.default_rng(1)
    hits = sum(any_passes(rng, settings(), tries=10, counted=counted, same_pairs=False) for _ in range(REPLICATIONS))
    assert lowest <= hits / REPLICATIONS <= highest


def test_a_chain_of_promotions_does_not_slide_below_the_margin():
    rng = np.random.default_rng(2)
    ends = [chain(rng, settings(), guarded=True) for _ in range(10)]
    assert min(ends) >= START - MARGIN
    assert max(chain(rng, settings(), guarded=False) for _ in range(5)) < START - 3 * MARGIN  # the incumbent alone holds nothing


@pytest.mark.long
def test_a_chain_on_other_pairs_every_night_rarely_slides_below_the_margin():
    """With the most accurate model as anchor, each measured on its own night's pairs, 0.19 of the chains did."""
    rng = np.random.default_rng(4)
    ends = [chain(rng, settings(), guarded=True, fresh=True) for _ in range(30)]
    assert sum(end < START - MARGIN - STEP / 2 for end in ends) <= 1


def test_a_good_model_still_passes_at_the_tenth_look():
    rng = np.random.default_rng(3)
    found = [power(rng, settings(), 10) for _ in range(40)]
    assert np.mean([beside_others for _, beside_others in found]) > 0.5
