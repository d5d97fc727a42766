"""CORRECTNESS, token-mean loss and resume: two data-parallel ranks do what one does, with and without ZeRO."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import largest_difference, policy_engine, rl_job
from two_ranks import BATCHES, FORWARD, STAGES, STARTS, rl_steps, run_two_ranks, sft_steps

from rlhf_core.trainers.rl_rank import TrainerRank

pytestmark = pytest.mark.usefixtures("world")
at_every_stage = pytest.mark.parametrize("stage", STAGES)


@pytest.fixture(scope="module")
def ranks(model_folders: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    return run_two_ranks(model_folders, tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def alone(model_folders: tuple[Path, Path]) -> dict:
    """What a single rank gets, without ZeRO."""
    trainer = TrainerRank(0, 1, rl_job(*model_folders, **{"rl.trainer.microbatch_tokens": 30}))
    trainer.connect(*trainer.address())
    forward = trainer.forward(FORWARD, STARTS)
    engine = policy_engine(model_folders[0])
    return {
        "rl": {"forward": forward, "totals": rl_steps(trainer, rank=0, ranks=1), "weights": trainer.weights()},
        "sft": (sft_steps(engine, BATCHES, rank=0, ranks=1), engine.state_dict()),
    }


@at_every_stage
def test_token_mean_loss_and_weights_of_two_ranks_equal_those_of_one(ranks: list[dict], alone: dict, stage: int):
    expected, weights = alone["sft"]
    (first, first_weights), (second, second_weights) = (rank["sft"][stage] for rank in ranks)
    for step, (loss, norm) in enumerate(expected):
        assert first[step][0] + second[step][0] == pytest.approx(loss, rel=1e-5)
        assert first[step][1] == pytest.approx(norm, rel=1e-4)
        assert second[step][1] == first[step][1]
    assert largest_difference(first_weights, weights) < 2e-6
    assert largest_difference(first_weights, second_weights) == 0


@at_every_stage
def test_an_rl_update_on_two_ranks_equals_that_on_one(ranks: list[dict], alone: dict, stage: int):
    """Also where one rank has nothing but unscored rows."""
    first, second = (rank["rl"][stage] for rank in ranks)
    for name, values in alone["rl"]["forward"].items():
        torch.testing.assert_close(torch.cat([first["forward"][name], second["forward"][name]]), values, rtol=0, atol=3e-6)
    expected = alone["rl"]["totals"]
    for name, value in expected.items():
        if name == "optimizer_steps" or name.endswith("grad_norm"):
            assert first["totals"][name] == second["totals"][name] == pytest.approx(value, rel=1e-4)
        else:
            assert first["totals"][name] + second["totals"][name] == pytest.approx(value, rel=1e-4, abs=1e-6)
    assert largest_difference(first["weights"], alone["rl"]["weights"]) < 2e-6
    assert second["weights"] is None


@at_every_stage
def test_resume_on_two_ranks_equals_an_uninterrupted_run_bit_for_bit(ranks: list[dict], stage: int):
    for rank in ranks:
        steps, weights = rank["sft"][stage]
        resumed_steps, resumed_weights = rank["resumed"][stage]
        assert resumed_steps == steps[2:]
        assert largest_difference(resumed_weights, weights) == 0


def test_every_rank_gets_as_many_microbatches(ranks: list[dict]):
    first, second = (rank["equal_count"] for rank in ranks)
    assert len(first) == len(second) == 3
    assert sorted(i for part in first for i in part) == [0, 1, 2, 3, 4]
    assert "expected at least 2 examples on each rank" in ranks[0]["too few"]
    assert "too few" not in ranks[1]
