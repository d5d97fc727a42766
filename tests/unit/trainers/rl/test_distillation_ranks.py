"""Teachers on two ranks, whole on each and sharded: the same losses and weights as on one."""

from __future__ import annotations

from pathlib import Path

import pytest
from taught_ranks import STAGES, run_two_ranks, taught
from tiny_models import assert_weights_agree, save_tiny_models

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("world")]


def test_updates_towards_a_teacher_on_two_ranks_equal_those_on_one(model_folders: tuple[Path, Path], tokenizer, tmp_path: Path):
    """In the second step one rank has a quarter of the trained rows."""
    teacher = save_tiny_models(tmp_path / "teacher", tokenizer, seed=5, hidden_size=32)[0]
    expected = taught(model_folders, teacher, stage=0, rank=0, ranks=1)
    first, second = run_two_ranks(model_folders, teacher, tmp_path)
    for stage in STAGES:
        for mine, others, both in zip(first[stage]["totals"], second[stage]["totals"], expected["totals"], strict=True):
            assert mine["distillation_loss_sum"] + others["distillation_loss_sum"] == pytest.approx(both["distillation_loss_sum"], rel=1e-4)
            assert mine["grad_norm"] == others["grad_norm"] == pytest.approx(both["grad_norm"], rel=1e-4)
        assert_weights_agree(first[stage]["weights"], expected["weights"])
