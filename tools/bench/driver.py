"""Runs an RL job's driver with a clock: python -m tools.bench.driver JOB.pkl WORK.json [--bare-engines]; the flag adds bare vLLM engines.

A machine's speed changes within minutes and with the recent load of its cores. So the job and the bare engines alternate: one rests while
the other works. Before the job starts, the bare engines also generate their batches without interruption.
Writes clock.json into the job's folder: the end times of the steps, {"ends": [...]}, and the bare engines' seconds per batch,
{"in_turn": [...], "in_a_row": [...]}.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_core.stage.job import Job, beat, pulse_file
from rlhf_core.trainers.rl.job import RlJob
from tools.bench.workload import Workload

if TYPE_CHECKING:
    from rlhf_core.trainers.rl.driver import Actors

CLOCK = "clock.json"
ANSWER_SECONDS = 300.0  # for a bare engine's answer, its start included


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("job", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--bare-engines", action="store_true")
    arguments = parser.parse_args()
    from rlhf_core.stage.driver import main as drive  # imports Ray, which a process must not do before it starts a head
    from rlhf_core.trainers.rl import driver

    job, work = Job.read(arguments.job), Workload(**json.loads(arguments.work.read_text()))
    clock: dict[str, list[float]] = {"ends": [], "in_a_row": [], "in_turn": []}
    with beat(pulse_file(job.work)):
        engines = BareEngines(work, threads=job.threads) if arguments.bare_engines else None
        if engines is not None:
            clock["in_a_row"] = [engines.generate(turn) for turn in range(work.steps)]

        def end_step() -> None:
            clock["ends"].append(time.perf_counter())
            if engines is not None:
                clock["in_turn"].append(engines.generate(len(clock["in_turn"])))

        driver.Actors = partial(start_actors, driver.Actors, end_step)
        sys.argv[1:] = [str(arguments.job)]
        code = drive()
    (arguments.job.parent / CLOCK).write_text(json.dumps(clock))
    return code


def start_actors(actors_class: type[Actors], end_step: Callable[[], None], job: RlJob, gpus: int) -> Actors:
    """Start the job's actors, in place of the driver's own call, so that `end_step` follows a step's last action."""
    actors = actors_class(job, gpus)
    from rlhf_core.trainers.rl import loop  # late, as in the driver: actors start during the import

    log_findings = loop.log_findings

    def log_and_end(found, settings) -> None:
        log_findings(found, settings)
        end_step()

    loop.log_findings = log_and_end
    return actors


class BareEngines:
    """As many vLLM engines as the job has, each in its own process with its share of threads and prompts."""

    def __init__(self, work: Workload, *, threads: int):
        processes, self._connections = multiprocessing.get_context("spawn"), []
        engines = work.params.rl.rollout.engines
        for part in range(engines):
            ours, theirs = processes.Pipe()
            of_engine = (theirs, work, part, engines, max(1, threads // engines))
            processes.Process(target=serve, args=of_engine, daemon=True).start()
            self._connections.append(ours)
        for connection in self._connections:
            self._answer(connection)

    def generate(self, turn: int) -> float:
        """Let every engine generate a batch, and return the seconds."""
        started = time.perf_counter()
        for connection in self._connections:
            connection.send(turn)
        for connection in self._connections:
            self._answer(connection)
        return time.perf_counter() - started

    @staticmethod
    def _answer(connection: Connection) -> None:
        if not connection.poll(ANSWER_SECONDS):
            raise RuntimeError(f"bare engine: expected an answer within {ANSWER_SECONDS:.0f} s, got none")
        connection.recv()


def serve(connection: Connection, work: Workload, part: int, engines: int, threads: int) -> None:
    """Run an engine's process: report that it has started, then generate on request."""
    os.environ["OMP_NUM_THREADS"] = str(threads)
    from rlhf_core.engines.rollout.requests import SamplingSettings, request_seeds
    from rlhf_core.engines.vllm.engine import VllmEngine
    from rlhf_core.models.tokenizer import encode_prompt, load_tokenizer, stop_ids
    from rlhf_core.process import collect_rarely, configure_process

    configure_process()
    collect_rarely()
    params = work.params
    loop, tokenizer = params.rl, load_tokenizer(work.model, trust_remote_code=False)
    prompts = [encode_prompt(tokenizer, row["messages"]) for row in work.read_rows()]
    engine = VllmEngine(
        work.model,
        max_length=params.model.max_length,
        dtype=params.model.dtype,
        kv_cache_gib=loop.rollout.kv_cache_gib,
        max_concurrent_sequences=loop.rollout.max_concurrent_sequences,
        threads=threads,
        seed=params.seed,
        trust_remote_code=False,
        gpu_memory_fraction=loop.rollout.gpu_memory_fraction,
    )
    sampling = SamplingSettings(loop.rollout.max_new_tokens, loop.rollout.temperature, min_new_tokens=loop.rollout.min_new_tokens)
    count, ends = work.batch_size // loop.group_size, stop_ids(tokenizer, work.model)
    connection.send("ready")
    while True:
        turn = connection.recv()
        first = turn * count % (len(prompts) - count)
        own = prompts[first : first + count][part::engines]
        engine.generate(own, request_seeds(0, turn, len(own)), sampling, stop_ids=ends, group_size=loop.group_size)
        connection.send(turn)


if __name__ == "__main__":
    sys.exit(main())
