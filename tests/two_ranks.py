"""The same training on one rank and on two: each rank's work, and two processes that do it over gloo."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import torch
from tiny_models import demonstrations, negative_logprob_step, policy_engine, rl_job, sequences, share, train_batch

from rlhf_core.engines.deepspeed_engine import TrainEngine, equal_count, sum_over_ranks
from rlhf_core.engines.ports import free_ports
from rlhf_core.engines.universal import convert_to_universal, is_sharded
from rlhf_core.trainers.rl.minibatch import Minibatch
from rlhf_core.trainers.rl.rank import TrainerRank

STAGES = (0, 2, 3)
DEADLINE = 240  # seconds; two processes import torch and deepspeed on a machine that may be busy
BATCHES = [sequences(8, seed=k) for k in range(4)]
# Every policy loss, aggregation, and part of an optimizer step; "experts" has a model of its own, and "ppo" ends its first step early.
CASES = {
    "ppo": {"rl.max_approx_kl": 1.0, "rl.ptx.coef": 0.5, "rl.ppo.critic_init": "reward_model"},
    "gspo": {"rl.algorithm": "rloo", "rl.policy_loss": "gspo", "rl.clip_low": 0.9, "rl.clip_high": 3.0},
    "experts": {
        "rl.algorithm": "rloo",
        "rl.policy_loss": "cispo",
        "rl.loss_aggregation": "constant_horizon",
        "rl.moe_aux_coef": 0.5,
        "rl.kl.placement": "loss",
        "rl.kl.estimator": "k3",
    },
}
FORWARD, STARTS = sequences(6, seed=11), [1, 2, 3, 1, 2, 3]


def sft_steps(engine: TrainEngine, batches: list[list[list[int]]], *, rank: int, ranks: int) -> list[tuple[float, float]]:
    """Loss share and gradient norm of each step, with denominators over all ranks."""
    return [
        negative_logprob_step(engine, ids[rank::ranks], num_loss_tokens=sum(len(s) - 1 for s in ids), microbatch_tokens=30)
        for ids in batches
    ]


def rl_case(case: str, folders: tuple[Path, Path, Path], *, stage: int, rank: int, ranks: int, port: int) -> dict:
    """A rank's results of a forward pass and two updates, and its weights after them."""
    sft, reward, experts = folders
    options = {"rl.trainer.zero_stage": stage, "rl.trainer.microbatch_tokens": 30, **CASES[case]}
    trainer = TrainerRank(rank, ranks, rl_job(experts if case == "experts" else sft, reward, **options))
    trainer.connect("127.0.0.1", port)
    size = len(FORWARD) // ranks
    mine = slice(size * rank, size * (rank + 1))
    forward = trainer.forward(FORWARD[mine], STARTS[mine])
    totals = [trainer.update(minibatches, kl_coef=0.2, train_policy=True).totals for minibatches in rl_steps(case, rank=rank, ranks=ranks)]
    return {"forward": forward, "totals": totals, "weights": trainer.weights()}


def rl_steps(case: str, *, rank: int, ranks: int) -> list[list[Minibatch]]:
    """Steps of two and three minibatches. In the fourth minibatch all rows of rank 1 are unscored, in the fifth all rows; in case ppo the
    second ends its step.
    """
    unscored = {3: (1, 3, 5, 7), 4: tuple(range(8))}
    minibatches = []
    for seed in range(5):
        batch = train_batch(8, seed=seed, unscored=unscored.get(seed, (6,)))
        if case == "ppo" and seed == 1:
            batch.old_logprobs[::2] -= 3.0  # by rank 0 alone; rank 1's own tokens would not end the step
        minibatches.append(share(batch, demonstrations(6, seed=seed), rank=rank, ranks=ranks))
    return [minibatches[:2], minibatches[2:]]


def saved_by_one_rank(sft: Path, folder: Path) -> None:
    """The engine after two batches on one rank, for two ranks to resume from: as it is, and as a universal checkpoint."""
    for stage in STAGES:
        engine = policy_engine(sft, zero_stage=stage)
        sft_steps(engine, BATCHES[:2], rank=0, ranks=1)
        engine.save(folder, f"stage-{stage}")
        if is_sharded(folder / f"stage-{stage}"):
            convert_to_universal(folder / f"stage-{stage}", folder / "universal" / f"stage-{stage}")


def load_of_other_ranks(engine: TrainEngine, folder: Path, name: str) -> None:
    if (folder / "universal" / name).exists():
        engine.load_universal(folder / "universal", name)
    else:
        engine.load(folder, name)


def rank_main(rank: int, ports: list[int], folders: tuple[Path, Path, Path], out: Path) -> None:
    """Run one of two ranks; writes its results to `out`."""
    results: dict = {"rl": {}, "sft": {}, "resumed": {}, "grown": {}}
    unused = iter(ports)
    for stage in STAGES:
        results["rl"][stage] = {case: rl_case(case, folders, stage=stage, rank=rank, ranks=2, port=next(unused)) for case in CASES}
        engine = policy_engine(folders[0], zero_stage=stage)
        steps = sft_steps(engine, BATCHES[:2], rank=rank, ranks=2)
        engine.save(out / "engines", f"stage-{stage}")
        steps += sft_steps(engine, BATCHES[2:], rank=rank, ranks=2)
        results["sft"][stage] = (steps, engine.state_dict())
        again = policy_engine(folders[0], zero_stage=stage)
        again.load(out / "engines", f"stage-{stage}")
        again.save(out / "again", f"stage-{stage}")
        results["resumed"][stage] = (sft_steps(again, BATCHES[2:], rank=rank, ranks=2), again.state_dict())
        grown = policy_engine(folders[0], zero_stage=stage)
        load_of_other_ranks(grown, out / "one", f"stage-{stage}")
        results["grown"][stage] = (sft_steps(grown, BATCHES[2:], rank=rank, ranks=2), grown.state_dict())
    results["equal_count"] = equal_count([[0, 1, 2, 3, 4]] if rank == 0 else [[0], [1], [2]])
    try:
        equal_count([[0]] if rank == 0 else [[0], [1]])
    except ValueError as error:
        results["too few"] = str(error)
    results["sum"] = sum_over_ranks(torch.tensor([1.0, 10.0]) * (rank + 1))
    torch.save(results, out / f"rank-{rank}.pt")


def run_two_ranks(folders: tuple[Path, Path, Path], out: Path) -> list[dict]:
    """The results of both ranks.

    Raises:
        RuntimeError: a rank failed, or exceeded DEADLINE seconds.
    """
    spawn = multiprocessing.get_context("spawn")
    ports = free_ports(len(STAGES) * len(CASES))
    ranks = [spawn.Process(target=rank_main, args=(rank, ports, folders, out)) for rank in range(2)]
    for process in ranks:
        process.start()
    try:
        for process in ranks:
            process.join(DEADLINE)
        codes = [process.exitcode for process in ranks]
        if codes != [0, 0]:
            raise RuntimeError(f"two ranks: expected both to end with 0 within {DEADLINE} s, got {codes}; their tracebacks are above")
    finally:
        for process in ranks:
            process.kill()
            process.join()
    return [torch.load(out / f"rank-{rank}.pt", weights_only=True) for rank in range(2)]
