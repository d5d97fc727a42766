"""A rank of RL training in bfloat16, as on a GPU: every call of the loop, and numbers near those of float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import demonstrations, rl_job, sequences, train_batch, whole

from rlhf_core.trainers.rl.rank import TrainerRank
from rlhf_core.types import Sequences

pytestmark = pytest.mark.usefixtures("world")
PPO = {"rl.algorithm": "ppo", "rl.ppo.critic_init": "reward_model_trunk"}
GRPO = {"rl.algorithm": "grpo", "rl.grpo.group_size": 4, "rl.kl.placement": "loss", "rl.kl.estimator": "k2"}
ADAPTERS = {"rl.lora": {"rank": 2, "alpha": 4.0, "dropout": 0.0, "target_modules": "all-linear"}}
CASES = {
    "ppo": PPO,
    "ppo_zero_1": PPO | {"rl.trainer.zero_stage": 1},
    "ppo_zero_2": PPO | {"rl.trainer.zero_stage": 2},
    "grpo_top_p": GRPO | {"rl.rollout.top_p": 0.9},
    "grpo_entropy": GRPO | {"rl.entropy_coef": 0.01, "rl.ptx.coef": 0.1, "rl.ptx.batch_size": 4},
    "reference_moves": GRPO | {"rl.kl.refresh_reference_every": 2, "rl.trainer.zero_stage": 1},
    "adapters": GRPO | ADAPTERS,
}


def connected(folders: tuple[Path, Path], changes: dict, dtype: str) -> TrainerRank:
    rank = TrainerRank(0, 1, rl_job(*folders, **changes | {"model.dtype": dtype}))
    rank.connect(rank.address())
    return rank


def message(rank: TrainerRank, changes: dict) -> dict[str, torch.Tensor]:
    """What a rank says before an update, of the update itself, and of the weights after it."""
    requested = sequences(6, seed=3)
    found = rank.forward(Sequences.of(requested, [2] * len(requested)))
    found["score"] = rank.score_by_reward_model("reward_model", [*requested, None])[:-1].flatten()
    batch = train_batch(8)
    minibatch = whole(batch, demonstrations(4, seed=1)) if "rl.ptx.coef" in changes else whole(batch)
    metrics = rank.update([minibatch], kl_coef=0.1, train_policy=True).totals
    assert all(torch.tensor(value).isfinite() for value in metrics.values())
    found["probe"] = torch.tensor(rank.probe(requested[0]))
    return found


@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
def test_a_rank_computes_in_bfloat16_what_it_does_in_float32_up_to_its_precision(model_folders, tmp_path, changes):
    rank = connected(model_folders, changes, "bfloat16")
    half, full = message(rank, changes), message(connected(model_folders, changes, "float32"), changes)
    assert half.keys() == full.keys()
    for name in half:
        assert half[name].dtype == full[name].dtype, name
        torch.testing.assert_close(half[name].float(), full[name].float(), rtol=0.05, atol=0.1, msg=lambda m, name=name: f"{name}: {m}")
    weights = rank.weights()
    assert {t.dtype for t in weights.values()} == {torch.bfloat16}
    before = torch.tensor(rank.probe(sequences(1, seed=5)[0]))
    rank.save(str(tmp_path))
    again = connected(model_folders, changes, "bfloat16")
    again.load(str(tmp_path))
    assert torch.equal(torch.tensor(again.probe(sequences(1, seed=5)[0])), before)
    if "rl.kl.refresh_reference_every" in changes:
        again.refresh_reference()
    again.export(str(tmp_path / "policy"))
