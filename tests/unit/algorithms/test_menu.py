"""What the configuration offers is there, and docs/algorithms.md says what proves it."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest

from rlhf_core.algorithms.kl import KL_ESTIMATORS
from rlhf_core.algorithms.online import ALGORITHMS
from rlhf_core.algorithms.policy_losses import POLICY_LOSSES
from rlhf_core.config import CorrectionConfig, DpoConfig, KlConfig, KtoConfig, RlConfig

ROOT = Path(__file__).resolve().parents[3]
GUIDE = (ROOT / "docs" / "algorithms.md").read_text()


def choices(section, field: str) -> tuple[str, ...]:
    return section.model_fields[field].annotation.__args__


def test_every_algorithm_has_an_estimator_that_cites_its_source():
    for name, spec in ALGORITHMS.items():
        for by_turn in (False, True) if spec.turn_estimator else (False,):
            assert "Source:" in inspect.getdoc(spec.estimate(by_turn=by_turn)), name


def test_every_policy_loss_and_kl_estimator_of_the_configuration_is_there_and_no_other():
    assert set(POLICY_LOSSES) == set(choices(RlConfig, "policy_loss"))
    assert set(KL_ESTIMATORS) == set(choices(KlConfig, "estimator"))


@pytest.mark.parametrize(
    "names",
    [
        ALGORITHMS,
        choices(RlConfig, "policy_loss"),
        choices(RlConfig, "loss_aggregation"),
        choices(KlConfig, "estimator"),
        choices(CorrectionConfig, "kind"),
        choices(DpoConfig, "loss"),
        choices(KtoConfig, "loss"),
    ],
    ids=["algorithm", "policy_loss", "loss_aggregation", "estimator", "correction", "dpo", "kto"],
)
def test_the_guide_has_every_name_of_the_configuration(names):
    assert [n for n in names if f"`{n}`" not in GUIDE] == []


def test_every_test_that_the_guide_names_exists():
    named = set(re.findall(r"`(test_\w+)`", GUIDE))
    assert len(named) > 30
    defined = {
        node.name
        for path in (ROOT / "tests" / "unit").rglob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
    }
    assert sorted(named - defined) == []
    assert not re.findall(r"`test_\w*\.\.\.", GUIDE), "name the whole test"
