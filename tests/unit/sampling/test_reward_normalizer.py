"""From raw scores to the weighted, clipped reward, on batches small enough to do by hand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import tiny_params

from rlhf_core.config import ScoreConfig
from rlhf_core.sampling.rewards import Moments, RewardNormalizer, weighted_score

NAN, INF = math.nan, math.inf


def scorer(name: str = "reward_model", *, weight: float = 1.0, normalization: str = "none") -> dict:
    kind = {"kind": "reward_model"} if name == "reward_model" else {"kind": "length", "target_length": 3}
    return {"name": name, "weight": weight, "normalization": normalization, **kind}


def score_config(*scorers: str | dict, clip: float | None = None) -> ScoreConfig:
    chosen = [s if isinstance(s, dict) else scorer(normalization=s) for s in scorers]
    return tiny_params(**{"rl.reward.scorers": chosen, "rl.reward.clip": clip}).rl.reward


def raw(*scores: float) -> dict[str, torch.Tensor]:
    return {"reward_model": torch.tensor(scores)}


@given(st.lists(st.lists(st.floats(-1e3, 1e3, width=32), max_size=8), max_size=6))
def test_moments_merged_part_by_part_equal_all_at_once(parts: list[list[float]]):
    merged = Moments()
    for part in parts:
        merged = merged.merge(torch.tensor([*part, NAN, INF, -INF]))
    everything = torch.tensor([x for part in parts for x in part], dtype=torch.float64)
    assert merged.count == len(everything)
    if len(everything):
        assert merged.mean == pytest.approx(float(everything.mean()), rel=1e-9, abs=1e-9)
        assert merged.std == pytest.approx(float(everything.std(correction=0)), rel=1e-6, abs=1e-6)
    else:
        assert (merged.mean, merged.std) == (0.0, 0.0)


def test_initial_normalisation_stays_with_the_first_samples():
    normalizer = RewardNormalizer(score_config("initial"))
    assert normalizer.needs_calibration
    normalizer.calibrate(raw(1.0, 3.0, NAN))  # mean 2, std 1
    assert normalizer(raw(2.0, 5.0, 0.5)).tolist() == [0.0, 3.0, -1.5]
    assert normalizer(raw(100.0)).tolist() == [98.0]


def test_running_normalisation_has_seen_the_batch_it_normalises():
    normalizer = RewardNormalizer(score_config("running"))
    assert not normalizer.needs_calibration
    assert normalizer(raw(1.0, 3.0)).tolist() == [-1.0, 1.0]
    # 1, 3, 5, 7: mean 4, variance (9 + 1 + 1 + 9) / 4 = 5
    torch.testing.assert_close(normalizer(raw(5.0, 7.0, NAN)), torch.tensor([1.0, 3.0, NAN]) / 5**0.5, equal_nan=True)
    assert normalizer(raw(4.0, 104.0), learn=False)[0] == 0.0
    assert normalizer.moments["reward_model"].count == 4


def test_no_normalisation_only_clips():
    normalizer = RewardNormalizer(score_config("none", clip=2.0))
    normalizer.calibrate(None)
    assert not normalizer.needs_calibration
    assert normalizer(raw(-7.0, 1.5, 2.5)).tolist() == [-2.0, 1.5, 2.0]


def test_clipping_comes_after_normalising():
    normalizer = RewardNormalizer(score_config("initial", clip=2.0))
    normalizer.calibrate(raw(10.0, 12.0))
    assert normalizer(raw(11.5, 20.0, 2.0)).tolist() == [0.5, 2.0, -2.0]


SEVERAL = (scorer(weight=2.0, normalization="initial"), scorer("short", weight=-1.0), scorer("seen", weight=0.0, normalization="initial"))


def test_each_scorer_is_normalised_then_weighted_and_the_sum_is_clipped():
    normalizer = RewardNormalizer(score_config(*SEVERAL, clip=3.0))
    normalizer.calibrate({**raw(0.0, 4.0), "short": torch.tensor([9.0, 9.0]), "seen": torch.tensor([NAN, NAN])})  # mean 2, std 2
    components = {**raw(4.0, 0.0, 12.0, 4.0), "short": torch.tensor([0.5, -1.0, 2.0, NAN]), "seen": torch.tensor([NAN, 50.0, INF, 0.0])}
    # 2 * 1 - 0.5;  2 * -1 + 1;  2 * 5 - 2 = 8 is more than 3;  a score that counts is missing
    torch.testing.assert_close(normalizer(components), torch.tensor([1.5, -1.0, 3.0, NAN]), equal_nan=True)
    assert normalizer.moments.keys() == {"reward_model"}


def test_weighted_score_is_raw():
    components = {**raw(4.0, -INF, 12.0), "short": torch.tensor([0.5, -1.0, NAN]), "seen": torch.tensor([NAN, 50.0, 1.0])}
    found = weighted_score(components, score_config(*SEVERAL, clip=3.0).scorers)
    torch.testing.assert_close(found, torch.tensor([2 * 4.0 - 0.5, NAN, NAN]), equal_nan=True)


def test_a_normaliser_resumes_its_moments():
    config = score_config(scorer(normalization="running"), scorer("short", normalization="running"))
    first, second = RewardNormalizer(config), RewardNormalizer(config)
    parts = [{name: torch.randn(5, generator=torch.Generator().manual_seed(k)) for name in ("reward_model", "short")} for k in range(2)]
    first(parts[0])
    second.moments = dict(first.moments)
    assert torch.equal(second(parts[1]), first(parts[1]))


def test_reward_failures_stay_unknown_and_are_never_a_number():
    for normalization in ("initial", "running", "none"):
        normalizer = RewardNormalizer(score_config(normalization, clip=5.0))
        normalizer.calibrate(raw(1.0, 3.0))
        assert normalizer(raw(NAN, INF, -INF, 1.0)).isnan().tolist() == [True, True, True, False]


def test_calibrating_on_nothing_but_failures_is_refused():
    with pytest.raises(ValueError, match="of reward_model: expected scores of the initial policy's 2 samples, got none that is finite"):
        RewardNormalizer(score_config("initial")).calibrate(raw(NAN, INF))
