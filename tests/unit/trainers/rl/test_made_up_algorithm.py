"""One entry in ALGORITHMS is all that an algorithm needs: keys of params.yaml, plan, advantages and update follow from it.

The entry is made before the configuration is imported, so the work is that of a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[4]


def test_an_entry_makes_a_whole_algorithm(model_folders: tuple[Path, Path]):
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "tests")))
    command = [sys.executable, __file__, *map(str, model_folders)]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "trained"


def above_greedy(rewards, baseline_rewards, response_mask, *, share):
    """Reward less a share of the greedy response's."""
    return (rewards - share * baseline_rewards)[:, None].where(response_mask, 0.0)


def main(sft: Path, reward: Path) -> None:
    from rlhf_core.algorithms.online import ALGORITHMS, Algorithm

    entry = Algorithm(f"{__name__}:above_greedy", group_size=4, smallest_group=2, settings={"share": 0.5}, greedy_baseline=True)
    ALGORITHMS["above_greedy"] = entry

    import pytest
    import torch
    from one_rl_rank import connected, update
    from test_credit import advantages_of, rl, rollouts
    from tiny_models import largest_difference, whole

    from rlhf_core.config import ConfigError
    from rlhf_core.engines.deepspeed.engine import join_world
    from rlhf_core.stage.carried import row_of

    config = rl("above_greedy", **{"rl.above_greedy.share": 0.25})
    assert (config.group_size, config.rollout_batch_size, config.critic) == (4, 64, None)
    assert "critic" not in config.roles and config.aggregation == "token_mean" and row_of("rl.above_greedy.share") == "rl.above_greedy"
    for key, value, message in (
        ("rl.above_greedy.share", 1.5, "rl.above_greedy.share: expected less than or equal to 1"),
        ("rl.above_greedy.group_size", 1, "rl.above_greedy.group_size: expected greater than or equal to 2"),
        ("rl.above_greedy.gamma", 1.0, "rl.above_greedy.gamma"),
    ):
        with pytest.raises(ConfigError, match=message):
            rl("above_greedy", **{key: value})

    batch = rollouts([3.0, 1.0], [2, 3], groups=[0, 0], baseline=[4.0, 4.0])
    train, _ = advantages_of(batch, config)  # 3 - 4 / 4 and 1 - 4 / 4
    assert train.advantages.tolist() == [[2.0, 2.0, 0.0], [0.0, 0.0, 0.0]]

    join_world()
    rank = connected((sft, reward), **{"rl.algorithm": "above_greedy", "rl.warmup_steps": 0})
    before = {name: weight.clone() for name, weight in rank.weights().items()}
    totals = update(rank, [whole(train)])
    assert "value_loss" not in totals and largest_difference(before, rank.weights()) > 0
    torch.distributed.destroy_process_group()
    print("trained")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
