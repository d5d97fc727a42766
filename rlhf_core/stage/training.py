"""Work of a stage on any number of ranks, training or sampling and scoring: one in the stage's own process, several in a Ray job.

Every rank calls the same function with a `TrainRun`. In training all of them read the same rows and know each whole batch; a rank computes
its share of the micro-batches (rlhf_core/engines/ranks.py). Only rank 0 writes curves, models and results.
"""

from __future__ import annotations

import importlib
import json
import os
import pickle
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_core.checkpoint.store import StoreSettings
from rlhf_core.config import Params, TrainingConfig, number_of
from rlhf_core.environment import keep_visible, of_stage
from rlhf_core.files import replace_text, replacing
from rlhf_core.paths import TIMINGS
from rlhf_core.process import Interrupted, configure_process, show_own_log
from rlhf_core.progress import name_stage
from rlhf_core.stage.run import Stage, StageRefused
from rlhf_core.stage.setup import training_setup
from rlhf_core.storage.node import enter
from rlhf_core.storage.work import DONE, OUTPUTS, STOP, RemoteNote

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


Metrics = dict[str, Any]


@dataclass(frozen=True)
class TrainJob:
    """What the ranks need to know of the stage. Paths are relative to `root`, which every node sees under this path, or, with a storage, to
    each node's copy of it (rlhf_core/storage/node.py).

    function: "module:name", called on every rank with a TrainRun and `arguments`, which are pickled.
    work: the stage's scratch folder, for checkpoints, curves and the trained model.
    threads: CPU cores of all ranks together.
    sequence_parallel: ranks that share each sequence.
    """

    stage: str
    function: str
    arguments: tuple[Any, ...]
    params: Params
    ranks: int
    root: Path
    work: Path
    run_name: str
    checkpoints: StoreSettings
    threads: int
    sequence_parallel: int = 1

    @property
    def threads_of_rank(self) -> int:
        return max(1, self.threads // self.ranks)

    @property
    def stop_file(self) -> Path:
        """Exists once the ranks are to stop."""
        return self.work / "stop"

    @property
    def result_file(self) -> Path:
        """The training function's result on rank 0."""
        return self.work / "result.json"

    def write(self, path: Path) -> None:
        """Also while the ranks of a live job read it, which the stage then follows."""
        with replacing(path) as aside:
            aside.write_bytes(pickle.dumps(self))

    @staticmethod
    def read(path: Path) -> TrainJob:
        return pickle.loads(path.read_bytes())


@dataclass(frozen=True)
class TrainRun:
    """A training function's view of its stage, on one rank.

    stop_requested: whether the stage received a signal to stop; on ranks other than 0 always False.
    """

    job: TrainJob
    stop_requested: Callable[[], bool]

    @property
    def params(self) -> Params:
        return self.job.params

    @property
    def scratch(self) -> Path:
        return self.job.work

    def check_stop(self) -> None:
        """Raise Interrupted on every rank once the stage has received a signal to stop. With several ranks a collective."""
        from rlhf_core.engines.ranks import on_any

        if on_any(self.stop_requested()):
            raise Interrupted

    def save_model(self, model: PreTrainedModel, weights: dict[str, Any], tokenizer: PreTrainedTokenizerBase, part: str = "") -> None:
        """Write a trained model to the folder that the stage publishes, or to its subfolder `part`; on ranks other than 0 do nothing."""
        from rlhf_core.engines.ranks import is_first
        from rlhf_core.models.build import save_model

        if is_first():
            folder = self.scratch / "model" / part
            shutil.rmtree(folder, ignore_errors=True)
            save_model(model, weights, tokenizer, folder)


def train(stage: Stage, config: TrainingConfig, function: Callable[..., Metrics], *arguments: Any) -> Metrics:
    """Call `function(run, *arguments)` on `config.ranks` ranks.

    Returns:
        The result of rank 0, which JSON can hold, and how it was trained as `setup`.
    Raises:
        Interrupted: a stop was requested; the state is saved.
    """
    job = _job(stage, function, arguments, ranks=config.ranks, zero_stage=config.zero_stage, sequence_parallel=config.sequence_parallel)
    if config.ranks == 1:
        _join(job)
        metrics = function(TrainRun(job, lambda: stage.stop_requested), *arguments)
    else:
        metrics = _run_on_ray(stage, job, subject=f"training on {number_of(job.ranks, 'rank')}")
    return metrics | {"setup": training_setup(config)}


def infer(stage: Stage, function: Callable[..., Metrics], *arguments: Any) -> Metrics:
    """Call `function(run, *arguments)`, which samples or scores, on `cluster.inference_ranks` ranks.

    Every rank calls the function with the same arguments; `in_shares` of rlhf_core/engines/ranks.py splits its work.

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


def _job(
    stage: Stage,
    function: Callable[..., Metrics],
    arguments: tuple[Any, ...],
    *,
    ranks: int,
    zero_stage: int = 0,
    sequence_parallel: int = 1,
) -> TrainJob:
    module = sys.modules["__main__"].__spec__.name if function.__module__ == "__main__" else function.__module__
    return TrainJob(
        stage=stage.name,
        function=f"{module}:{function.__qualname__}",
        arguments=arguments,
        params=stage.params,
        ranks=ranks,
        root=Path.cwd(),
        work=stage.scratch,
        run_name=f"{stage.name}-{stage.fingerprint[:8]}",
        checkpoints=stage.store_settings(zero_stage=zero_stage, world_size=ranks),
        threads=stage.params.cluster.threads,
        sequence_parallel=sequence_parallel,
    )


def _join(job: TrainJob) -> None:
    import torch

    from rlhf_core.engines.deepspeed_engine import join_world
    from rlhf_core.engines.sequence_parallel import share_sequences

    torch.set_num_threads(job.threads_of_rank)
    join_world()
    share_sequences(job.sequence_parallel)


def _run_on_ray(stage: Stage, job: TrainJob, *, subject: str, part: str = "") -> Metrics:
    from rlhf_core.stage.job_inputs import JobInputs
    from rlhf_core.stage.ray_job import submit_job
    from rlhf_core.stage.stored_job import uses_storage

    inputs = JobInputs()
    if uses_storage(stage.params):
        judged = {i: inputs.judges_on_node(a) for i, a in enumerate(job.arguments) if isinstance(a, dict)}
        arguments = tuple(judged.get(i, inputs.on_node(a)) for i, a in enumerate(job.arguments))
        job = replace(job, params=inputs.on_node(job.params), arguments=arguments)
    description = job.work / f"job{part}.pkl"
    job.write(description)
    driver = "rlhf_core.stage.training_driver"
    submit_job(stage, subject=subject, driver=driver, description=description, cpus=job.ranks, inputs=inputs)
    return json.loads(job.result_file.read_text(encoding="utf-8"))


def run_rank(description: str) -> None:
    """One rank of the job described in a file; its process group exists. A stop leaves no result."""
    from rlhf_core.engines.ranks import is_first

    stored = enter()
    job = TrainJob.read(Path(description))
    enter(job.root)
    configure_process()
    keep_visible(of_stage(job.params, job.stage, os.environ), named=job.params.flow.environment)
    _join(job)
    if is_first():
        show_own_log()
        name_stage(job.stage)
    if stored is not None and is_first():
        stored.outputs[:] = [job.work, TIMINGS]
        stored.pull(OUTPUTS)  # curves up to the last checkpoint, from whichever node wrote it
    stop = RemoteNote(stored, STOP) if stored is not None else job.stop_file
    module, _, name = job.function.partition(":")
    function = getattr(importlib.import_module(module), name)
    run = TrainRun(job, lambda: is_first() and stop.exists())
    try:
        run.check_stop()  # before the model is loaded
        result = function(run, *job.arguments)
    except Interrupted:
        if stored is not None and is_first():
            stored.push_outputs()
        return
    if is_first():
        replace_text(job.result_file, json.dumps(result))
        if stored is not None:
            stored.push_outputs(job.work / "model")
            stored.put_note(DONE, b"")
