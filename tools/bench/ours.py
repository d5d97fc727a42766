"""Runs this project's side: the stages' trainers and loop on the DeepSpeed engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from rlhf_core.checkpoint.store import CheckpointStore
from rlhf_core.config import TrainingConfig
from rlhf_core.curves import MetricsLog, Row
from rlhf_core.engines.deepspeed.engine import EngineSettings, TrainEngine, join_world
from rlhf_core.models.build import load_language_model, load_scalar_model
from rlhf_core.models.forward import PolicyModule, ScalarModule
from rlhf_core.models.probe import can_share_prefixes
from rlhf_core.models.tokenizer import load_tokenizer
from rlhf_core.trainers.preference.train import PreferenceRun, train_on_pairs
from rlhf_core.trainers.reward.train import encode_comparisons, reward_phase
from rlhf_core.trainers.sft.train import sft_phase
from rlhf_core.trainers.supervised.demonstrations import encode_demonstrations
from rlhf_core.trainers.supervised.loop import TrainLoop, engine_settings, train_phase
from tools.bench import ours_online
from tools.bench.workload import Run, Workload


class Watch(MetricsLog):
    """Records a run's curves as they are written."""

    def __init__(self, work: Workload, folder: Path, run: Run):
        super().__init__(
            folder / "curves.csv",
            COLUMNS,
            timings=folder / "timings.csv",
            first_step=0,
        )
        self._run = run

    def log(self, row: Row, timings: Row, further: Row | None = None) -> None:
        super().log({name: value for name, value in row.items() if name in COLUMNS}, timings, further)
        self._run.losses.append(float(row["loss"]))


COLUMNS = ("step", "phase", "loss", "learning_rate", "grad_norm")


def train(work: Workload, folder: Path) -> Run:
    if work.is_online:
        return ours_online.train(work, folder, threads=torch.get_num_threads())
    join_world()
    run = Run()

    def end_step() -> bool:
        """The loop's stop callback: called once a step, before its checkpoint."""
        run.end_step()
        return False

    TRAINERS[work.method](work, folder, loop(work, folder, run, end_step))
    return run


def loop(work: Workload, folder: Path, run: Run, end_step: Callable[[], bool]) -> TrainLoop:
    """A loop of optimizer steps alone, without checkpoints and evaluation."""
    return TrainLoop(
        seed=work.params.seed,
        checkpoint_every=work.steps + 1,
        eval_every=work.steps + 1,
        first_step=0,
        checkpoints=lambda phase: CheckpointStore(folder / phase),
        metrics_log=lambda _: Watch(work, folder, run),
        stop_requested=end_step,
    )


def sft(work: Workload, folder: Path, loop: TrainLoop) -> None:
    params = work.params
    tokenizer = load_tokenizer(work.model, trust_remote_code=False)
    train, dropped = encode_demonstrations(work.read_rows(), tokenizer, max_length=params.model.max_length)
    assert not dropped
    phase = sft_phase("sft", train, [], **common(work, params.sft, tokenizer.pad_token_id))
    engine = TrainEngine(PolicyModule(load_language_model(work.model)), settings(work, params.sft))
    train_phase(engine, phase, loop)


def reward(work: Workload, folder: Path, loop: TrainLoop) -> None:
    params = work.params
    model = load_scalar_model(work.model)
    rows = [{"id": str(number), **row} for number, row in enumerate(work.read_rows())]
    comparisons, dropped = encode_comparisons(
        rows,
        load_tokenizer(work.model, trust_remote_code=False),
        max_length=params.model.max_length,
        max_shared_tokens=params.reward.microbatch_tokens if can_share_prefixes(model, max_length=params.model.max_length) else 0,
    )
    assert not dropped and len(comparisons) == len(rows)
    section = params.reward
    phase = reward_phase(
        comparisons, [], margin=section.margin, centering_coef=section.centering_coef, **common(work, section, model.config.pad_token_id)
    )
    engine = TrainEngine(ScalarModule(model), settings(work, section))
    train_phase(engine, phase, loop)


def dpo(work: Workload, folder: Path, loop: TrainLoop) -> None:
    params = work.params
    run = PreferenceRun(start=Path(work.model), steps=work.steps, model=params.model, scratch=folder, loop=loop)
    trained = train_on_pairs(work.read_rows(), [], params.dpo, run)
    assert not trained.metrics["dropped_too_long"]


def common(work: Workload, section: TrainingConfig, pad_id: int) -> dict[str, int]:
    return {"steps": work.steps, "batch_size": work.batch_size, "pad_id": pad_id, "microbatch_tokens": section.microbatch_tokens}


def settings(work: Workload, section: TrainingConfig) -> EngineSettings:
    params = work.params
    return engine_settings(section, steps=work.steps, learning_rate=section.learning_rate, dtype=params.model.dtype, seed=params.seed)


TRAINERS = {"sft": sft, "reward": reward, "dpo": dpo}
