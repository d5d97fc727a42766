"""The device isn't waited for between the micro-batches of an optimizer step: losses are read after the last backward pass."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from supervised_ranks import rows
from tiny_models import (
    PAD,
    demonstrations,
    policy_engine,
    rl_job,
    scalar_engine,
    sequences,
    tiny_params,
    tiny_tokenizer,
    train_batch,
    whole,
)
from torch.utils._python_dispatch import TorchDispatchMode

from rlhf_core.engines.deepspeed.engine import TrainEngine
from rlhf_core.trainers.preference.objectives import PairObjective, ResponseForward, no_reference
from rlhf_core.trainers.preference.train import begin_pairs
from rlhf_core.trainers.reward.train import Comparison, reward_phase
from rlhf_core.trainers.rl.rank import TrainerRank
from rlhf_core.trainers.sft.train import sft_phase

pytestmark = pytest.mark.usefixtures("world")


class Reads(TorchDispatchMode):
    """Counts the floating-point numbers that Python reads from tensors."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.count += function is torch.ops.aten._local_scalar_dense.default and args[0].is_floating_point()
        return function(*args, **(kwargs or {}))


def reads_before_the_last_backward(engine: TrainEngine, step: Callable[[], object]) -> int:
    backward, seen = engine.backward, []

    def noted(loss: torch.Tensor) -> None:
        backward(loss)
        seen.append(reads.count)

    engine.backward = noted
    with Reads() as reads:
        step()
    assert len(seen) > 1
    return seen[-1]


def test_supervised_steps_read_losses_in_the_end(sft_folder: Path, reward_folder: Path):
    policy, reward = policy_engine(sft_folder), scalar_engine(reward_folder)
    examples = demonstrations(12, seed=0)
    phase = sft_phase("sft", examples, [], steps=1, batch_size=12, pad_id=PAD, microbatch_tokens=40)
    assert reads_before_the_last_backward(policy, lambda: phase.train_batch(policy, list(range(12)))) == 0

    pairs, _ = begin_pairs(rows(6), tiny_tokenizer(), max_length=200)()
    objective = PairObjective(tiny_params().dpo, ResponseForward(PAD, False, 150), no_reference)
    assert reads_before_the_last_backward(policy, lambda: objective.train_batch(policy, list(pairs))) == 0

    comparisons = [Comparison(0, sequences(2, seed=k), [(0, 1)], [str(k)]) for k in range(6)]
    how = {"margin": 0.0, "centering_coef": 0.01, "microbatch_tokens": 40}
    phase = reward_phase(comparisons, [], steps=1, batch_size=6, pad_id=PAD, **how)
    assert reads_before_the_last_backward(reward, lambda: phase.train_batch(reward, list(range(6)))) == 0


@pytest.mark.parametrize("role", ["policy", "critic"])
def test_updates_of_rl_read_losses_in_the_end(model_folders: tuple[Path, Path], role: str):
    settings = {"rl.algorithm": "ppo", "rl.trainer.zero_stage": 1, "rl.trainer.microbatch_tokens": 40}
    rank = TrainerRank(0, 1, rl_job(*model_folders, **settings))
    rank.connect(None)
    minibatch, trains_policy = whole(train_batch(8)), role == "policy"
    engine = getattr(rank.roles, role)
    assert reads_before_the_last_backward(engine, lambda: rank.update([minibatch], kl_coef=0.1, train_policy=trains_policy)) == 0
