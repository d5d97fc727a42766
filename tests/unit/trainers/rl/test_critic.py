"""The units of the critic's values: those of the rewards, whatever the reward model's scores are like."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from test_credit import rl, rollouts, scorer
from tiny_models import rl_job

from rlhf_core.sampling.rewards import RewardNormalizer
from rlhf_core.trainers.rl.credit import ValueUnits, compute_advantages, value_units
from rlhf_core.trainers.rl.state import Progress


def calibrated(config, **components: list[float]) -> RewardNormalizer:
    normalizer = RewardNormalizer(config.reward)
    normalizer.calibrate({name: torch.tensor(scores) for name, scores in components.items()})
    return normalizer


def ppo(*scorers: dict, init: str = "reward_model"):
    return rl("ppo", **{"rl.ppo.critic_init": init, "rl.reward.scorers": list(scorers), "rl.reward.no_eos_penalty": 0.0})


def test_initial_normalisation_shifts_and_scales_values_as_it_does_scores():
    config = ppo(scorer(weight=3.0, normalization="initial"))
    units = value_units(config, calibrated(config, reward_model=[0.0, 4.0]))  # mean 2, deviation 2
    assert (units.scale, units.offset) == (1.5, -3.0)
    assert units(torch.tensor([2.0, 6.0])).tolist() == [0.0, 6.0]


def test_without_normalisation_values_are_weighted_scores_and_other_scorers_add_nothing():
    config = ppo(scorer(weight=0.5), scorer("short", weight=-1.0, normalization="initial"))
    assert value_units(config, calibrated(config, short=[0.0, 4.0])) == ValueUnits(0.5, 0.0)


def test_a_new_head_needs_no_units():
    scores = torch.tensor([0.1, 0.2])
    for init in ("sft", "reward_model_trunk"):
        config = ppo(scorer(normalization="initial"), init=init)
        units = value_units(config, calibrated(config, reward_model=[7.0, 19.0]))
        assert units(scores) is scores


@pytest.mark.parametrize(("scale", "offset"), [(10.0, 0.0), (1.0, 8.0), (0.1, -30.0)])
def test_the_same_reward_model_on_another_scale_gives_the_same_advantages(scale: float, offset: float):
    """Bradley-Terry leaves the offset free. A critic in raw scores would be off by it."""
    made = torch.Generator().manual_seed(0)
    start, scores, spoken = (torch.randn(shape, generator=made, dtype=torch.float64) for shape in (64, 8, (8, 3)))
    config, found = ppo(scorer(normalization="initial")), []
    for a, b in ((1.0, 0.0), (scale, offset)):
        normalizer = RewardNormalizer(config.reward)
        normalizer.calibrate({"reward_model": a * start + b})
        values = value_units(config, normalizer)(a * spoken + b)
        batch = rollouts({"reward_model": (a * scores + b).tolist()}, [3] * 8, values=values.float())
        train, _ = compute_advantages(batch, config, normalizer, kl_coef=0.0)
        found.append(train)
    torch.testing.assert_close(found[0].advantages, found[1].advantages, rtol=0, atol=3e-5)
    assert float(found[0].old_values.abs().max()) < 5


def test_a_resumed_run_has_the_same_units_bit_for_bit(tmp_path: Path):
    config = ppo(scorer(weight=0.7, normalization="initial"))
    before = calibrated(config, reward_model=torch.randn(37, generator=torch.Generator().manual_seed(1)).tolist())
    Progress.start(config).write(tmp_path / "driver.json", before)
    after = RewardNormalizer(config.reward)
    Progress.read(tmp_path / "driver.json", after)
    assert value_units(config, after) == value_units(config, before) != ValueUnits()


def test_a_job_whose_critic_starts_from_the_reward_models_trunk_needs_its_folder():
    job = rl_job(Path("sft"), Path("reward"), **{"rl.ppo.critic_init": "reward_model_trunk"})
    with pytest.raises(ValueError, match="reward_model: expected a folder for the critic to start from, got none"):
        type(job).model_validate_json(json.dumps(job.model_dump(mode="json") | {"reward_model": None}))
