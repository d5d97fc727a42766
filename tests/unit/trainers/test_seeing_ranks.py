"""Ranks of which only one has a picture train a vision tower as one rank does."""

from __future__ import annotations

from pathlib import Path

import pytest
from seeing_models import save_seeing_model, store
from seeing_ranks import Case, trained
from supervised_ranks import run_ranks
from tiny_models import assert_weights_agree

pytestmark = pytest.mark.usefixtures("world")


@pytest.mark.long
def test_ranks_without_a_picture_agree_with_one_rank(tmp_path: Path):
    model, pictures = save_seeing_model(tmp_path / "model", "llava"), store(tmp_path, 6)
    settings = [(0, "trained"), (1, "trained"), (0, "frozen"), (2, "frozen")]
    cases = [Case(stage, pictures, vision, reward) for stage, vision in settings for reward in (False, True)]
    expected = {key: trained(Case(0, pictures, *key), model) for key in {(case.vision, case.reward) for case in cases}}
    for of_rank in run_ranks(2, model, cases, tmp_path / "out", run=trained):
        for case, weights in zip(cases, of_rank, strict=True):
            assert_weights_agree(weights, expected[case.vision, case.reward])
