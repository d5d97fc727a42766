"""Learning-rate schedules against numbers by hand, and against transformers' own after the warm-up."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch
from transformers import get_scheduler

from rlhf_core.algorithms.schedules import SCHEDULES, learning_rate_factor
from rlhf_core.config.model import Schedule


def factor(step: int, schedule: str, **changes) -> float:
    return learning_rate_factor(step, schedule=schedule, **{"total": 10, "warmup": 2, "floor": 0.1, "decay_fraction": 0.4, **changes})


def test_every_schedule_of_the_configuration_is_there_and_no_other():
    assert set(SCHEDULES) == set(get_args(Schedule))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_warmup_is_linear_from_its_first_step_and_reaches_the_peak(schedule: str):
    assert [factor(s, schedule, warmup=4) for s in (0, 1, 2, 3, 4)] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])


def test_cosine_by_hand():
    # progress 0 -> 1, 4/8 -> 0.1 + 0.9 * 0.5, 2/8 -> 0.1 + 0.45 * (1 + cos(pi/4)), the end and after it
    assert [factor(s, "cosine") for s in (2, 6, 4, 10, 25)] == pytest.approx([1.0, 0.55, 0.8681980515, 0.1, 0.1])


def test_linear_by_hand():
    # 1 - progress is 1, 6/8, 1/2, 0: 0.1 + 0.9 * that
    assert [factor(s, "linear") for s in (2, 4, 6, 10, 25)] == pytest.approx([1.0, 0.775, 0.55, 0.1, 0.1])


def test_constant_ignores_the_floor():
    assert [factor(s, "constant") for s in (2, 9, 10, 25)] == [1.0] * 4


def test_warmup_stable_decay_by_hand():
    """The decay takes the last 4 of 10 steps: after step 6 its share is 1/4, 1/2, 3/4, 1."""
    assert [factor(s, "wsd") for s in (2, 5, 6)] == [1.0, 1.0, 1.0]
    expected = [0.1 + 0.9 * (1 - math.sqrt(q)) for q in (0.25, 0.5, 0.75, 1.0)]
    assert [factor(s, "wsd") for s in (7, 8, 9, 10)] == pytest.approx(expected)
    assert [factor(s, "wsd_linear") for s in (6, 7, 8, 9, 10, 25)] == pytest.approx([1.0, 0.775, 0.55, 0.325, 0.1, 0.1])


def test_a_decay_over_all_steps_after_the_warmup_is_linear():
    for step in range(2, 11):
        assert factor(step, "wsd_linear", decay_fraction=0.8) == pytest.approx(factor(step, "linear"))


@pytest.mark.parametrize(
    ("schedule", "name", "options", "floor"),
    [
        ("cosine", "cosine", {}, 0.0),
        ("cosine", "cosine_with_min_lr", {"min_lr_rate": 0.1}, 0.1),
        ("linear", "linear", {}, 0.0),
        ("constant", "constant_with_warmup", {}, 0.1),
        ("wsd_linear", "warmup_stable_decay", {"num_decay_steps": 8, "min_lr_ratio": 0.1, "decay_type": "linear"}, 0.1),
        ("wsd", "warmup_stable_decay", {"num_decay_steps": 8, "min_lr_ratio": 0.1, "decay_type": "1-sqrt"}, 0.1),
    ],
)
def test_after_the_warmup_schedules_equal_those_of_transformers(schedule: str, name: str, options: dict, floor: float):
    """Their warm-up begins at 0, which makes the first step none; ours begins at 1/warmup."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = get_scheduler(name, optimizer, num_warmup_steps=3, num_training_steps=20, scheduler_specific_kwargs=options)
    for step in range(21):
        if step >= 3:
            mine = factor(step, schedule, total=20, warmup=3, floor=floor, decay_fraction=0.4)
            assert mine == pytest.approx(theirs.get_last_lr()[0], abs=1e-12)
        optimizer.step()
        theirs.step()
