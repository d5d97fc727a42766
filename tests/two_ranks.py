"""The same training on one rank and on two: what each rank does, and two processes that do it over gloo."""

from __future__ import annotations

import multiprocessing
import socket
from pathlib import Path

import torch
from tiny_models import negative_logprob_step, policy_engine, rl_job, sequences, train_batch

from rlhf_core.engines.deepspeed_engine import TrainEngine, equal_count
from rlhf_core.trainers.rl_rank import Minibatch, TrainerRank

STAGES = (0, 2, 3)
DEADLINE = 240  # seconds; two processes import torch and deepspeed on a machine that may be busy
BATCHES = [sequences(8, seed=k) for k in range(4)]
FORWARD, STARTS = sequences(6, seed=11), [1, 2, 3, 1, 2, 3]


def sft_steps(engine: TrainEngine, batches: list[list[list[int]]], *, rank: int, ranks: int) -> list[tuple[float, float]]:
    """Loss share and gradient norm of each step; the denominators are those of all ranks."""
    return [
        negative_logprob_step(engine, ids[rank::ranks], num_loss_tokens=sum(len(s) - 1 for s in ids), microbatch_tokens=30)
        for ids in batches
    ]


def rl_steps(trainer: TrainerRank, *, rank: int, ranks: int) -> dict[str, float]:
    minibatches = []
    for seed in range(3):
        batch = train_batch(8, seed=seed, unscored=(1, 3, 5, 7) if seed == 2 else (6,))  # in the last step, all that rank 1 of 2 has
        mask = batch.response_mask
        minibatches.append(Minibatch(batch.select(list(range(8))[rank::ranks]), int(mask.sum()), int(mask.any(1).sum())))
    return trainer.update(minibatches)


def rank_main(rank: int, ports: list[int], folders: tuple[Path, Path], out: Path) -> None:
    """One of two ranks; leaves its results in `out`."""
    results: dict = {"rl": {}, "sft": {}, "resumed": {}}
    for stage, port in zip(STAGES, ports, strict=True):
        trainer = TrainerRank(rank, 2, rl_job(*folders, **{"rl.trainer.zero_stage": stage, "rl.trainer.microbatch_tokens": 30}))
        trainer.connect("127.0.0.1", port)
        forward = trainer.forward(FORWARD[3 * rank : 3 * rank + 3], STARTS[3 * rank : 3 * rank + 3])
        results["rl"][stage] = {"forward": forward, "totals": rl_steps(trainer, rank=rank, ranks=2), "weights": trainer.weights()}
        engine = policy_engine(folders[0], zero_stage=stage)
        steps = sft_steps(engine, BATCHES[:2], rank=rank, ranks=2)
        engine.save(out, f"stage-{stage}")
        steps += sft_steps(engine, BATCHES[2:], rank=rank, ranks=2)
        results["sft"][stage] = (steps, engine.state_dict())
        again = policy_engine(folders[0], zero_stage=stage)
        again.load(out, f"stage-{stage}")
        results["resumed"][stage] = (sft_steps(again, BATCHES[2:], rank=rank, ranks=2), again.state_dict())
    results["equal_count"] = equal_count([[0, 1, 2, 3, 4]] if rank == 0 else [[0], [1], [2]])
    try:
        equal_count([[0]] if rank == 0 else [[0], [1]])
    except ValueError as error:
        results["too few"] = str(error)
    torch.save(results, out / f"rank-{rank}.pt")


def run_two_ranks(folders: tuple[Path, Path], out: Path) -> list[dict]:
    """The results of both ranks.

    Raises:
        RuntimeError: a rank failed, or is still at work after DEADLINE seconds.
    """
    spawn = multiprocessing.get_context("spawn")
    ports = free_ports(len(STAGES))
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


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [s.getsockname()[1] for s in sockets]
    finally:
        for s in sockets:
            s.close()
