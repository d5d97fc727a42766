"""Updates towards a teacher's whole distribution on one rank and on two, processes of this machine with gloo between them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rank_processes import CLEAN, run_processes
from tiny_models import rl_job, share, train_batch

from rlhf_core.trainers.rl.rank import TrainerRank

Address = tuple[str, int] | None
STAGES = (0, 3)
DEADLINE = 280  # seconds; two processes import torch and deepspeed on a machine that may be busy
OPTIONS = {
    **{"rl.algorithm": "grpo", "rl.reward.scorers": [], "rl.kl.coef": 0.0, "rl.kl.placement": "loss", "rl.kl.estimator": "k3"},
    "rl.trainer.microbatch_tokens": 20,
}


def taught(
    models: tuple[Path, Path], teacher: Path, *, stage: int, rank: int, ranks: int, agree: Callable[[Address], Address] = lambda own: own
) -> dict[str, Any]:
    """A rank's totals of three updates, and the policy's weights after them, on rank 0."""
    options = {"rl.distillation": {"teachers": [{"path": str(teacher)}], "loss": "jsd"}, "rl.trainer.zero_stage": stage}
    trainer = TrainerRank(rank, ranks, rl_job(*models, **OPTIONS, **options, **{"rl.trainer.ranks": ranks}))
    trainer.connect(agree(trainer.address()))
    batches = [train_batch(8, seed=seed, unscored=(1, 3, 5) if seed == 1 else (6,)) for seed in range(3)]
    plans = [share(batch, [], rank=rank, ranks=ranks) for batch in batches]
    return {
        "totals": [trainer.update([plan], kl_coef=0.0, train_policy=True).totals for plan in plans],
        "weights": trainer.weights(),
    }


def rank_main(rank: int, addresses: Any, models: tuple[Path, Path], teacher: Path, out: Path) -> None:
    def agree(address: Address) -> Address:
        if rank == 0:
            addresses.put(address)
            return address
        return addresses.get(timeout=DEADLINE)

    found = {stage: taught(models, teacher, stage=stage, rank=rank, ranks=2, agree=agree) for stage in STAGES}
    torch.save(found, out / f"taught-{rank}.pt")


def run_two_ranks(models: tuple[Path, Path], teacher: Path, out: Path) -> list[dict[int, dict[str, Any]]]:
    addresses = CLEAN.Queue()
    run_processes(rank_main, [(rank, addresses, models, teacher, out) for rank in range(2)], deadline=DEADLINE)
    return [torch.load(out / f"taught-{rank}.pt", weights_only=True) for rank in range(2)]
