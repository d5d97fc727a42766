"""An RL job's driver beside bare vLLM engines, which have a turn after each of its steps: python -m bench.turns JOB.json WORK.json

The machine's speed changes within minutes, and with what its cores did just before; so the job and engines that do nothing else take turns,
one at rest while the other works. Before the job starts the bare engines generate one batch after the other, as nobody does who trains.
Writes the bare engines' seconds into bare.json in the job's folder: {"in_turn": [...], "in_a_row": [...]}, a batch for each step.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

from bench.work import Work

TURN_SECONDS = 300.0  # for an engine's answer; its start is among them


def main() -> int:
    job, work = Path(sys.argv[1]), Work(**json.loads(Path(sys.argv[2]).read_text()))
    engines = BareEngines(work)
    seconds = {"in_a_row": [engines.generate(turn) for turn in range(work.steps)], "in_turn": []}

    from rlhf_core.trainers import rl, rl_driver

    def tell_and_give_way(found, settings) -> None:
        """Instead of the last thing that the loop does in a step, when its clock has stopped."""
        tell(found, settings)
        seconds["in_turn"].append(engines.generate(len(seconds["in_turn"])))
        (job.parent / "bare.json").write_text(json.dumps(seconds))

    tell, rl.tell = rl.tell, tell_and_give_way
    return rl_driver.main()


class BareEngines:
    """As many vLLM engines as a job has, each in a process with a thread, and with its share of the prompts."""

    def __init__(self, work: Work):
        processes, self._connections = multiprocessing.get_context("spawn"), []
        engines = work.params.rl.rollout.engines
        for part in range(engines):
            ours, theirs = processes.Pipe()
            processes.Process(target=serve, args=(theirs, work, part, engines), daemon=True).start()
            self._connections.append(ours)
        for connection in self._connections:
            self._answer(connection)

    def generate(self, turn: int) -> float:
        """Seconds until all have generated a batch."""
        started = time.perf_counter()
        for connection in self._connections:
            connection.send(turn)
        for connection in self._connections:
            self._answer(connection)
        return time.perf_counter() - started

    @staticmethod
    def _answer(connection: Connection) -> None:
        if not connection.poll(TURN_SECONDS):
            raise RuntimeError(f"bare engine: expected an answer within {TURN_SECONDS:.0f} s, got none")
        connection.recv()


def serve(connection: Connection, work: Work, part: int, engines: int) -> None:
    """An engine's process: it says that it is there, then generates when it is told to."""
    os.environ["OMP_NUM_THREADS"] = "1"
    from rlhf_core.engines.vllm_engine import VllmEngine
    from rlhf_core.models.tokenizer import encode_prompt, load_tokenizer
    from rlhf_core.quiet import be_quiet, collect_rarely
    from rlhf_core.sampling import SamplingSettings, request_seeds

    be_quiet()
    collect_rarely()
    params = work.params
    rl, tokenizer = params.rl, load_tokenizer(work.model, trust_remote_code=False)
    prompts = [encode_prompt(tokenizer, row["messages"]) for row in work.read_rows()]
    engine = VllmEngine(
        work.model,
        max_length=params.model.max_length,
        dtype=params.model.dtype,
        kv_cache_gib=rl.rollout.kv_cache_gib,
        max_concurrent_sequences=rl.rollout.max_concurrent_sequences,
        threads=1,
        seed=params.seed,
        trust_remote_code=False,
        gpu_memory_fraction=rl.rollout.gpu_memory_fraction,
    )
    sampling = SamplingSettings(rl.rollout.max_new_tokens, rl.rollout.temperature, min_new_tokens=rl.rollout.min_new_tokens)
    count = work.batch_size // rl.group_size
    connection.send("ready")
    while True:
        turn = connection.recv()
        first = turn * count % (len(prompts) - count)
        own = prompts[first : first + count][part::engines]
        engine.generate(own, request_seeds(0, turn, len(own)), sampling, eos_id=tokenizer.eos_token_id, group_size=rl.group_size)
        connection.send(turn)


if __name__ == "__main__":
    sys.exit(main())
