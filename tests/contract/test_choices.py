"""Comments of params.yaml and docs/rl.md that list the choices of a key list all of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

from rlhf_core.config import CorrectionConfig, DpoConfig, KlConfig, KtoConfig, RlConfig, ScorerConfig, SharedTrainingConfig
from rlhf_core.config.alignment import AlignmentConfig

ROOT = Path(__file__).parents[2]
CHOICES = {
    "alignment.method": AlignmentConfig.model_fields["method"],
    "rl.algorithm": RlConfig.model_fields["algorithm"],
    "rl.policy_loss": RlConfig.model_fields["policy_loss"],
    "rl.loss_aggregation": RlConfig.model_fields["loss_aggregation"],
    "rl.kl.estimator": KlConfig.model_fields["estimator"],
    "rl.correction.kind": CorrectionConfig.model_fields["kind"],
    "rl.reward.scorers.kind": ScorerConfig.model_fields["kind"],
    "training.schedule": SharedTrainingConfig.model_fields["schedule"],
    "training.optimizer": SharedTrainingConfig.model_fields["optimizer"],
    "dpo.loss": DpoConfig.model_fields["loss"],
    "kto.loss": KtoConfig.model_fields["loss"],
}


@pytest.mark.parametrize("key", CHOICES)
def test_params_yaml_lists_every_choice(key):
    comments = re.findall(r"#(.*)", (ROOT / "params.yaml").read_text())
    listed = [set(run.split(" | ")) for comment in comments for run in re.findall(r"\w+(?: \| \w+)+", comment)]
    choices = get_args(CHOICES[key].annotation)
    assert set(choices) in listed, f"params.yaml: no comment reads '{' | '.join(choices)}'"


@pytest.mark.parametrize("key", ["algorithm", "policy_loss"])
def test_the_page_of_rl_lists_every_choice(key):
    (row,) = re.findall(rf"^\| `{key}` \|(.*)\|$", (ROOT / "docs/rl.md").read_text(), re.MULTILINE)
    named = set(re.findall(r"`(\w+)`", row))
    assert set(get_args(CHOICES[f"rl.{key}"].annotation)) <= named
