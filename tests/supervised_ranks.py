"""Supervised training of tiny models on any number of ranks: processes of this machine with gloo between them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from rank_processes import run_processes
from tiny_models import tiny_params

from rlhf_core.checkpoint.digest import write_digest
from rlhf_core.checkpoint.settings import StoreSettings
from rlhf_core.checkpoint.store import CheckpointStore
from rlhf_core.engines.deepspeed.engine import join_world
from rlhf_core.engines.deepspeed.rank_store import RankStore
from rlhf_core.engines.deepspeed.ranks import is_first, rank, wait_for_all, world_size
from rlhf_core.engines.deepspeed.sequence_parallel import share_sequences
from rlhf_core.engines.ports import free_ports
from rlhf_core.models.build import load_language_model
from rlhf_core.models.tokenizer import load_tokenizer
from rlhf_core.process import Interrupted
from rlhf_core.trainers.preference.train import PreferenceRun, train_on_examples, train_on_pairs
from rlhf_core.trainers.reward.ensemble import train_ensemble
from rlhf_core.trainers.sft.train import begin_demonstrations, train_on_demonstrations
from rlhf_core.trainers.supervised import loop as supervised
from rlhf_core.trainers.supervised.loop import TrainLoop

DEADLINE = 240  # seconds
STEPS = 4
QUESTIONS = ["Please sort 41.", "Quick, the largest of 309.", "Please sort 7.", "Quick, 9.", "Sort 5528, will you?"]
SIZES = {"batch_size": 7, "learning_rate": 3e-3, "microbatch_tokens": 100}


def rows(count: int, *, first: int = 0) -> list[dict[str, Any]]:
    """Pairs of several conversations; some conversations have more than one."""
    return [
        {
            "id": str(i),
            "source": "tiny",
            "messages": [{"role": "user", "content": QUESTIONS[i * i % 5]}],
            "chosen": f"Certainly: {i}." + " Yes." * (i % 3),
            "rejected": f"{i}{i} no",
        }
        for i in range(first, first + count)
    ]


def labelled(row: dict[str, Any]) -> dict[str, Any]:
    """A pair as a response in two or three steps with labels."""
    steps = [row["chosen"], row["rejected"], "No."][: 2 + int(row["id"]) % 2]
    return {"id": row["id"], "source": row["source"], "messages": row["messages"]} | {
        "response": "\n".join(steps),
        "labels": [1, -1 if int(row["id"]) % 3 else 1, 0][: len(steps)],
    }


@dataclass
class Curves:
    """The rows of a training's curves, in memory."""

    rows: list[dict[str, Any]] = field(default_factory=list)

    def log(self, row: dict[str, Any], timings: dict[str, Any], further: object = None) -> None:
        self.rows.append(row)

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class Case:
    """One training: its kind (sft, reward, steps, dpo, kto; store: none, but `store_outcomes`), the section of params.yaml, and its folder.

    changes: of the section; with max_minutes each rank's clock moves by itself, rank 0's by a minute and others' by an hour a reading.
    heldout: rows of held-out data. stop_after: steps after which rank 0 asks for a stop.
    """

    kind: str
    scratch: str
    changes: dict[str, Any] = field(default_factory=dict)
    heldout: int = 5
    stop_after: int | None = None

    @property
    def config(self) -> Any:
        of_reward = {"epochs": 4.0, "batch_size": 4}
        own = {"reward": of_reward, "steps": of_reward | {"step_separator": "\n"}, "kto": {"batch_size": 8}, "dpo": {"nll_coef": 0.2}}
        values = {**SIZES, "steps": None if self.kind in ("reward", "steps") else STEPS, **own.get(self.kind, {}), **self.changes}
        return getattr(tiny_params(), {"steps": "reward"}.get(self.kind, self.kind)).model_copy(update=values)


def ticking(seconds: float) -> SimpleNamespace:
    """A module `time` whose monotonic clock moves by so much with each reading."""
    return SimpleNamespace(monotonic=partial(next, itertools.count(step=seconds)), perf_counter=time.perf_counter)


def run_case(case: Case, start: Path) -> dict[str, Any]:
    """On every rank. Returns its curves, metrics and full weights; without weights if it was stopped."""
    config, curves, steps_seen = case.config, Curves(), []
    share_sequences(config.sequence_parallel)
    store = StoreSettings(world_size=world_size(), zero_stage=config.zero_stage)

    def stop_requested() -> bool:
        steps_seen.append(1)
        return is_first() and len(steps_seen) == case.stop_after

    def loop(*, first_step: int = 0, seed: int = 0) -> TrainLoop:
        scratch = Path(case.scratch)
        return TrainLoop(
            seed=seed,
            checkpoint_every=100,
            eval_every=2,
            first_step=first_step,
            checkpoints=lambda phase: CheckpointStore(scratch / phase, store, write_digest=write_digest),
            metrics_log=lambda step: curves,
            stop_requested=stop_requested,
            keep_best=config.keep_best,
            max_minutes=config.max_minutes,
        )

    saved: dict[str, torch.Tensor] = {}
    clock = time if config.max_minutes is None else ticking(60 if is_first() else 3600)
    try:
        with mock.patch.object(supervised, "time", clock):
            metrics = TRAINERS[case.kind](case, config, start, loop, saved)
    except Interrupted:
        return {"curves": curves.rows}
    return {"curves": curves.rows, "metrics": metrics, "weights": saved}


def _sft(case: Case, config: Any, start: Path, loop: Callable[..., TrainLoop], saved: dict[str, torch.Tensor]) -> dict[str, Any]:
    data = [{**row, "response": row["chosen"]} for row in rows(16 + case.heldout)]
    model, tokenizer = load_language_model(start), load_tokenizer(str(start), trust_remote_code=False)
    how = tiny_params().model
    begun = [begin_demonstrations(part, tokenizer, config, max_length=how.max_length) for part in (data[:16], data[16:])]
    engine, metrics = train_on_demonstrations(model, tokenizer, begun, config, model_config=how, loop=loop())
    saved.update(engine.state_dict(every_rank=True))
    return metrics


def _reward(case: Case, config: Any, start: Path, loop: Callable[..., TrainLoop], saved: dict[str, torch.Tensor]) -> dict[str, Any]:
    splits = {"train": rows(16), "validation": rows(case.heldout, first=16), "test": rows(1, first=40)}
    if case.kind == "steps":
        splits = {split: [labelled(row) for row in of_split] for split, of_split in splits.items()}

    def save(model: object, weights: dict[str, torch.Tensor], tokenizer: object, part: str) -> None:
        saved.update({f"{part}{name}": tensor for name, tensor in weights.items()})

    metrics, table = train_ensemble(
        start,
        splits.__getitem__,
        load_tokenizer(str(start), trust_remote_code=False),
        config,
        model=tiny_params().model,
        seed=0,
        loop=loop,
        save=save,
    )
    assert (table is not None) == is_first()
    if table is None:
        return metrics
    if case.kind == "steps":
        return metrics | {"scores": [score for of_row in table["scores"] for score in of_row]}
    return metrics | {"scores": table[["chosen_score", "rejected_score"]].to_numpy().ravel().tolist()}


def _preference(case: Case, config: Any, start: Path, loop: Callable[..., TrainLoop], saved: dict[str, torch.Tensor]) -> dict[str, Any]:
    train = {"dpo": train_on_pairs, "kto": train_on_examples}[case.kind]
    run = PreferenceRun(start, tiny_params().model, Path(case.scratch), loop())
    trained = train(rows(16), rows(case.heldout, first=16), config, run)
    saved.update(trained.engine.state_dict(every_rank=True))
    return trained.metrics


Run = Callable[[Case, Path], dict[str, Any]]
TRAINERS = {"sft": _sft, "reward": _reward, "steps": _reward, "dpo": _preference, "kto": _preference}


def store_outcomes(folder: Path) -> list[str]:
    """On every rank: what a checkpoint's failures look like there, and which checkpoint is found in the end."""
    settings, outcomes = StoreSettings(world_size=world_size()), []
    store = RankStore(lambda: CheckpointStore(folder, settings))

    def save(aside: Path, failing: int | None = None) -> list[str]:
        if rank() == failing:
            raise OSError(f"no answer from the disk of rank {rank()}")
        name = f"rng-{rank()}.pt"
        torch.save({"torch": torch.full((3,), rank())}, aside / name)
        return [name]

    def attempt(call: Callable[[], None]) -> None:
        try:
            call()
        except (OSError, RuntimeError) as error:
            outcomes.append(f"{type(error).__name__}: {error}")

    for step, failing in ((1, None), (2, 1), (3, 0), (4, None)):
        attempt(lambda step=step, failing=failing: store.write(step, lambda aside: save(aside, failing)))
        store.publish()
        store.wait()
    if is_first():
        (folder / "step-4" / "rng-1.pt").write_bytes(bytes(100))
    wait_for_all()
    outcomes.append(f"step {store.latest().step}")
    full = RankStore(lambda: CheckpointStore(folder, settings, free=lambda _: 1))
    attempt(lambda: full.write(5, save))
    store.close()
    return outcomes


def _rank_main(number: int, ranks: int, port: int, start: Path, cases: Sequence[Case], out: Path, run: Run) -> None:
    torch.set_num_threads(1)
    join_world(
        rank=number,
        world_size=ranks,
        store=dist.TCPStore("127.0.0.1", port, ranks, is_master=number == 0, timeout=timedelta(seconds=DEADLINE)),
    )
    results = []
    for case in cases:
        try:
            results.append({"outcomes": store_outcomes(Path(case.scratch))} if case.kind == "store" else run(case, start))
        except ValueError as error:
            results.append({"refused": str(error)})
    torch.save(results, out / f"rank-{number}.pt")


def run_ranks(
    ranks: int, start: Path, cases: Sequence[Case], out: Path, *, deadline: float = DEADLINE, run: Run = run_case
) -> list[list[dict[str, Any]]]:
    """The results of the cases, one after the other, on each rank.

    Raises:
        RuntimeError: a rank failed, or exceeded `deadline` seconds.
    """
    out.mkdir(parents=True, exist_ok=True)
    (port,) = free_ports(1)
    run_processes(_rank_main, [(rank, ranks, port, start, cases, out, run) for rank in range(ranks)], deadline=deadline)
    return [torch.load(out / f"rank-{rank}.pt", weights_only=True) for rank in range(ranks)]


def loss_difference(first: list[dict[str, Any]], second: list[dict[str, Any]]) -> float:
    """Largest relative difference of two curves' losses, held-out losses and gradient norms; the curves have the same length."""
    names = ("loss", "heldout_loss", "grad_norm")
    return max(abs(a[name] - b[name]) / max(abs(a[name]), 1e-6) for a, b in zip(first, second, strict=True) for name in names if name in a)
