"""The average of the policy's weights in RL: exported, saved and resumed, while rollouts and probes see the current policy."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import largest_difference, rl_job, train_batch, whole

from rlhf_core.models.build import load_language_model
from rlhf_core.trainers.rl.rank import TrainerRank

pytestmark = pytest.mark.usefixtures("world")
DECAY = 0.5
PROBE = [7, 30, 99, 12, 41]


def rank_of(folders: tuple[Path, Path], **overrides) -> TrainerRank:
    rank = TrainerRank(0, 1, rl_job(*folders, **{"rl.ema_decay": DECAY, "rl.warmup_steps": 0, **overrides}))
    rank.connect(rank.address())
    return rank


def update(rank: TrainerRank, seed: int) -> None:
    rank.update([whole(train_batch(seed=seed))], kl_coef=0.2, train_policy=True)


def exported(rank: TrainerRank, folder: Path) -> dict[str, torch.Tensor]:
    rank.export(str(folder))
    return load_language_model(folder).state_dict()


@pytest.mark.parametrize("zero_stage", [0, 3])
def test_the_exported_policy_is_the_average_and_all_else_the_current_one(model_folders, tmp_path: Path, zero_stage: int):
    rank = rank_of(model_folders, **{"rl.trainer.zero_stage": zero_stage})
    after = []
    for seed in range(3):
        update(rank, seed)
        after.append(rank.weights())
    probe = rank.probe(PROBE)
    shares = [DECAY**2, DECAY, 1.0]
    expected = {n: sum(s * w[n] for s, w in zip(shares, after, strict=True)) / sum(shares) for n in after[0]}
    found = exported(rank, tmp_path / "policy")
    assert largest_difference(found, expected) < 1e-6
    assert largest_difference(found, after[-1]) > 1e-5
    assert largest_difference(rank.weights(), after[-1]) == 0 and rank.probe(PROBE) == probe


@pytest.mark.parametrize("zero_stage", [0, 3])
def test_a_resumed_average_equals_an_uninterrupted_one(model_folders, tmp_path: Path, zero_stage: int):
    stage = {"rl.trainer.zero_stage": zero_stage}
    undisturbed, first = rank_of(model_folders, **stage), rank_of(model_folders, **stage)
    for seed in range(4):
        update(undisturbed, seed)
    for seed in range(2):
        update(first, seed)
    (tmp_path / "saved").mkdir()
    first.save(str(tmp_path / "saved"))
    resumed = rank_of(model_folders, **stage)
    resumed.load(str(tmp_path / "saved"))
    for seed in (2, 3):
        update(resumed, seed)
    assert largest_difference(exported(resumed, tmp_path / "a"), exported(undisturbed, tmp_path / "b")) == 0


@pytest.mark.parametrize(
    ("overrides", "refused"),
    [
        ({"rl.trainer.zero_stage": 2}, True),
        ({"rl.trainer.zero_stage": 2, "rl.ema_decay": None, "rl.optimizer": "lion"}, True),
        ({"rl.trainer.zero_stage": 2, "rl.ema_decay": None}, False),
        ({"rl.trainer.zero_stage": 0}, False),
    ],
)
def test_a_checkpoint_that_no_other_number_of_ranks_can_load_is_refused(model_folders, tmp_path: Path, overrides: dict, refused: bool):
    rank = rank_of(model_folders, **overrides)
    update(rank, 0)
    (tmp_path / "saved").mkdir()
    rank.save(str(tmp_path / "saved"))
    if refused:
        with pytest.raises(ValueError, match="expected as many ranks as it was saved with, because with ZeRO only adamw without ema_decay"):
            rank.convert(str(tmp_path / "saved"), str(tmp_path / "universal"))
    else:
        rank.convert(str(tmp_path / "saved"), str(tmp_path / "universal"))
        rank.load(str(tmp_path / "saved"), str(tmp_path / "universal"))
