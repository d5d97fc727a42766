"""Schedules, optimizers and averages as settings: what fits together, and what reaches the engines."""

from __future__ import annotations

from pathlib import Path

import pytest
from clerk_params import CLERK_PARAMS
from tiny_models import rl_job, tiny_params

from rlhf_core.config import ConfigError, overridden
from rlhf_core.config.model import LengthConfig
from rlhf_core.engines.deepspeed.engine import EngineSettings
from rlhf_core.trainers.rl.rank import TrainerRank
from rlhf_core.trainers.supervised.loop import engine_settings

DEFAULT = CLERK_PARAMS


def settings_of(section: str = "sft", steps: int = 10, **overrides) -> EngineSettings:
    config = getattr(tiny_params(**{f"{section}.{key}": value for key, value in overrides.items()}), section)
    return engine_settings(config, steps=steps, learning_rate=1e-3, dtype="float32", seed=0)


def rl_settings(folders: tuple[Path, Path], **overrides) -> tuple[EngineSettings, EngineSettings]:
    """Of policy and critic."""
    rank = TrainerRank(0, 1, rl_job(*folders, **{f"rl.{key}": value for key, value in overrides.items()}))
    rank.connect(rank.address())
    return rank.roles.policy._settings, rank.roles.critic._settings


def test_the_defaults_are_adamw_and_a_cosine():
    made = settings_of()
    assert (made.optimizer, made.betas, made.eps, made.ema_decay) == ("adamw", (0.9, 0.95), 1e-8, None)
    assert [made.schedule(s) for s in (0, 5, 10)] == pytest.approx([1.0, 0.607483, 0.05])  # 0.05 + 0.475 * (1 + cos(4 pi / 9))


def test_every_setting_reaches_the_engine():
    given = {"optimizer": "lion", "betas": [0.95, 0.98], "eps": 1e-6, "ema_decay": 0.99, "weight_decay": 0.3, "max_grad_norm": 2.0}
    made = settings_of(**given)
    assert {name: getattr(made, name) for name in given} == {**given, "betas": (0.95, 0.98)}
    made = settings_of(schedule="wsd_linear", decay_fraction=0.5, warmup_fraction=0.2, min_learning_rate_fraction=0.0)
    assert [made.schedule(s) for s in (0, 1, 4, 5, 6, 10)] == pytest.approx([0.5, 1.0, 1.0, 1.0, 0.8, 0.0])


def test_in_rl_the_schedule_is_over_the_steps_that_train_the_model(model_folders: tuple[Path, Path]):
    """4 steps of 2 epochs of 2 minibatches; the policy isn't trained in the first one: 12 and 16 optimizer steps."""
    sizes = {"steps": 4, "ppo_epochs": 2, "samples_per_step": 8, "minibatch_size": 4, "warmup_steps": 1, "ppo.critic_warmup_steps": 1}
    policy, critic = rl_settings(model_folders, schedule="linear", min_learning_rate_fraction=0.5, ema_decay=0.9, **sizes)
    assert [policy.schedule(s) for s in (0, 1, 12, 16)] == pytest.approx([1.0, 1.0, 0.5, 0.5])
    assert [critic.schedule(s) for s in (1, 16)] == pytest.approx([1.0, 0.5]) and critic.schedule(12) > 0.6
    assert (policy.ema_decay, critic.ema_decay) == (0.9, None)


def test_in_rl_the_learning_rate_stays_after_the_warmup_by_default(model_folders: tuple[Path, Path]):
    policy, _ = rl_settings(model_folders, warmup_steps=2)
    assert [policy.schedule(s) for s in (0, 1, 2, 500)] == [0.5, 1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"training.schedule": "wsd", "training.decay_fraction": 0.97},
            "sft.decay_fraction: expected at most 0.95 with schedule wsd, which is the share of the steps after warmup_fraction, got 0.97",
        ),
        (
            {"rl.schedule": "wsd_linear", "rl.warmup_steps": 30, "rl.decay_fraction": 0.6},
            "rl.decay_fraction: expected at most 0.5 with schedule wsd_linear, which is the share of the steps after warmup_steps, got 0.6",
        ),
        (
            {"training.optimizer": "adamw_8bit", "training.offload_optimizer": True},
            "sft.optimizer: expected adamw or lion with offload_optimizer, got adamw_8bit",
        ),
        (
            {"rl.optimizer": "adamw_8bit", "rl.trainer.offload_optimizer": True},
            "rl.optimizer: expected adamw or lion with trainer.offload_optimizer, got adamw_8bit",
        ),
        ({"dpo.optimizer": "adafactor"}, "dpo.optimizer: expected 'adamw', 'adamw_8bit' or 'lion', got 'adafactor'"),
        ({"sft.schedule": "wsdd"}, "did you mean wsd?"),
        ({"sft.betas": [0.9, 1.0]}, "sft.betas.1: expected less than 1, got 1.0"),
        ({"sft.betas": [0.9]}, "sft.betas: "),
        ({"sft.ema_decay": 1.0}, "sft.ema_decay: expected less than 1, got 1.0"),
        ({"sft.eps": 0.0}, "sft.eps: expected greater than 0, got 0.0"),
    ],
)
def test_values_that_do_not_fit_are_refused(overrides: dict, message: str):
    with pytest.raises(ConfigError) as error:
        overridden(DEFAULT.read_text(), overrides, subject="params.yaml")
    assert message in str(error.value)


@pytest.mark.parametrize(("rows", "per_step", "epochs", "steps"), [
    (100, 10, 1.0, 10),
    (101, 10, 1.0, 11),
    (30, 3, 0.1, 1),
    (10, 10, 0.3, 1),
    (1000, 3, 0.3, 100),  # exact, as a decimal number
    (4120, 16, 2.5, 644),
    (0, 4, 1.0, 1),
])  # fmt: skip
def test_epochs_give_a_number_of_steps_unless_there_is_one(rows: int, per_step: int, epochs: float, steps: int):
    assert LengthConfig(epochs=epochs).steps_over(rows, per_step=per_step) == steps
    assert LengthConfig(epochs=epochs, steps=7).steps_over(rows, per_step=per_step) == 7
