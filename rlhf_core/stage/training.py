"""Runs a stage's work, which trains or samples and scores, on any number of ranks: one in the stage's own process, several in a Ray job.

Every rank calls the same function with a `TrainRun`. In training all ranks read the same rows and know each whole batch, and each computes
its share of the micro-batches (rlhf_core/engines/deepspeed/ranks.py). Only rank 0 writes curves, models and results.
"""

from __future__ import annotations

import json
import logging
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_core.config import Params, TrainingConfig, number_of
from rlhf_core.environment import keep_visible
from rlhf_core.files import replace_text
from rlhf_core.paths import TIMINGS
from rlhf_core.process import STOPPED_BY_SIGNAL, Interrupted, Stop, configure_process, show_own_log
from rlhf_core.progress import name_stage
from rlhf_core.stage.job import Job, named_object
from rlhf_core.stage.run import Stage, StageRefused
from rlhf_core.stage.setup import training_setup
from rlhf_core.storage.node import enter, job_storage
from rlhf_core.storage.work import OUTPUTS

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

log = logging.getLogger("rlhf")

Metrics = dict[str, Any]


@dataclass(frozen=True)
class TrainRun:
    """A training function's view of its stage, on one rank.

    stop_requested: whether the stage received a signal to stop; on ranks other than 0 always False.
    """

    job: Job
    stop_requested: Callable[[], bool]

    @property
    def params(self) -> Params:
        return self.job.params

    @property
    def scratch(self) -> Path:
        return self.job.work

    def check_stop(self) -> None:
        """Raise Interrupted on every rank once the stage has received a signal to stop. With several ranks this is a collective."""
        from rlhf_core.engines.deepspeed.ranks import on_any

        if on_any(self.stop_requested()):
            raise Interrupted

    def save_model(self, model: PreTrainedModel, weights: dict[str, Any], tokenizer: PreTrainedTokenizerBase, part: str = "") -> None:
        """Write a trained model to the folder that the stage publishes, or to its subfolder `part`; on ranks other than 0 do nothing."""
        from rlhf_core.engines.deepspeed.ranks import is_first
        from rlhf_core.models.build import save_model

        if is_first():
            folder = self.scratch / "model" / part
            shutil.rmtree(folder, ignore_errors=True)
            save_model(model, weights, tokenizer, folder)


def train(stage: Stage, config: TrainingConfig, function: Callable[..., Metrics], *arguments: Any) -> Metrics:
    """Call `function(run, *arguments)` on `config.ranks` ranks.

    Returns:
        The result of rank 0, which JSON can hold, with `setup`: how it was trained.
    Raises:
        Interrupted: a stop was requested; the state is saved.
    """
    job = _job(stage, function, arguments, ranks=config.ranks, zero_stage=config.zero_stage, sequence_parallel=config.sequence_parallel)
    if config.ranks == 1:
        _join_alone(job)
        metrics = function(TrainRun(job, lambda: stage.stop_requested), *arguments)
    else:
        metrics = _run_on_ray(stage, job, subject=f"training on {number_of(job.ranks, 'rank')}")
    return metrics | {"setup": training_setup(config)}


def infer(stage: Stage, function: Callable[..., Metrics], *arguments: Any) -> Metrics:
    """Call `function(run, *arguments)`, which samples or scores, on `cluster.inference_ranks` ranks.

    Every rank calls the function with the same arguments; `in_shares` of rlhf_core/engines/deepspeed/ranks.py splits its work.

    Returns:
        The result of rank 0, which JSON can hold.
    Raises:
        Interrupted: a stop was requested.
        ValueError: the function refused its input.
    """
    job = _job(stage, function, arguments, ranks=stage.params.cluster.inference_ranks)
    if job.ranks == 1:
        return function(TrainRun(job, lambda: stage.stop_requested), *arguments)
    try:
        return _run_on_ray(stage, job, subject=f"sampling and scoring on {number_of(job.ranks, 'rank')}", part="-inference")
    except StageRefused as refusal:
        raise ValueError(str(refusal)) from refusal


def _join_alone(job: Job) -> None:
    import torch

    from rlhf_core.engines.deepspeed.engine import join_world
    from rlhf_core.engines.deepspeed.sequence_parallel import share_sequences

    torch.set_num_threads(job.threads_of_rank)
    join_world()
    share_sequences(job.sequence_parallel)


def _job(
    stage: Stage,
    function: Callable[..., Metrics],
    arguments: tuple[Any, ...],
    *,
    ranks: int,
    zero_stage: int = 0,
    sequence_parallel: int = 1,
) -> Job:
    module = sys.modules["__main__"].__spec__.name if function.__module__ == "__main__" else function.__module__
    return Job(
        stage=stage.name,
        launch="rlhf_core.stage.training:launch_ranks",
        function=f"{module}:{function.__qualname__}",
        arguments=arguments,
        params=stage.params,
        ranks=ranks,
        root=Path.cwd(),
        work=stage.scratch,
        checkpoints=stage.store_settings(zero_stage=zero_stage, world_size=ranks),
        threads=stage.params.cluster.threads,
        sequence_parallel=sequence_parallel,
    )


def _run_on_ray(stage: Stage, job: Job, *, subject: str, part: str = "") -> Metrics:
    from rlhf_core.stage.job_inputs import JobInputs
    from rlhf_core.stage.ray_job import submit_job
    from rlhf_core.stage.stored_job import uses_storage

    inputs = JobInputs()
    if uses_storage(stage.params):
        judged = {i: inputs.judges_on_node(a) for i, a in enumerate(job.arguments) if isinstance(a, dict)}
        arguments = tuple(judged.get(i, inputs.on_node(a)) for i, a in enumerate(job.arguments))
        job = replace(job, params=inputs.on_node(job.params), arguments=arguments)
    submit_job(stage, job, subject=subject, description=job.work / f"job{part}.pkl", cpus=job.ranks, inputs=inputs)
    return json.loads(job.result_file.read_text(encoding="utf-8"))


def launch_ranks(job: Job, gpus: int, stop: Stop) -> int:
    """Call the job's function on its ranks, from the job's driver, and return the exit code.

    Raises:
        ValueError: the cluster has fewer GPUs than ranks.
        RankFailed, RoleLost, StepAbandoned: see `run_on_ranks`.
    """
    from rlhf_core.engines.ray.ranks import RankSettings, run_on_ranks

    if 0 < gpus < job.ranks:
        raise ValueError(
            f"ranks (training.ranks, cluster.inference_ranks): expected at most the cluster's {number_of(gpus, 'GPU')}, one for each rank, "
            f"got {job.ranks}; lower it or add nodes"
        )
    job.result_file.unlink(missing_ok=True)
    settings = RankSettings(
        job.ranks,
        gpus=gpus > 0,
        threads=job.threads_of_rank,
        visible=job.visible,
        start_timeout=job.params.cluster.start_timeout,
        rank_timeout=job.params.cluster.rank_timeout,
    )
    log.info("%s: starting %d ranks; waiting until all have joined, then each loads its model", job.stage, job.ranks)
    finished = run_on_ranks("rlhf_core.stage.training:run_rank", job, settings, stop)
    return 0 if finished else STOPPED_BY_SIGNAL


def run_rank(job: Job, stop_requested: Callable[[], bool]) -> bool:
    """Run one rank of a job, whose process group exists. Return whether the work is done; after a stop there is no result."""
    import torch

    from rlhf_core.engines.deepspeed.ranks import is_first
    from rlhf_core.engines.deepspeed.sequence_parallel import share_sequences

    enter(job.root)
    configure_process()
    keep_visible(job.visible, named=job.params.environment)
    torch.set_num_threads(job.threads_of_rank)
    share_sequences(job.sequence_parallel)
    stored = job_storage() if is_first() else None
    if is_first():
        show_own_log()
        name_stage(job.stage)
    if stored is not None:
        stored.outputs[:] = [job.work, TIMINGS]
        stored.pull(OUTPUTS)  # curves up to the last checkpoint, from whichever node wrote it
    run = TrainRun(job, lambda: is_first() and stop_requested())
    try:
        run.check_stop()  # before the model is loaded
        result = named_object(job.function)(run, *job.arguments)
    except Interrupted:
        if stored is not None:
            stored.push_outputs()
        return False
    if is_first():
        replace_text(job.result_file, json.dumps(result))
    if stored is not None:
        stored.push_outputs(job.work / "model")
    return True
