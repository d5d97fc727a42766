"""Measures the transfer of a trainer rank's weights to a vLLM engine on the same GPU, by CUDA IPC and by gloo.

python -m tools.bench.gpu.transfer --out FILE.json [--rehearse]
"""

from __future__ import annotations

import sys
import tempfile
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from rlhf_core.engines.rollout.process import EngineProcess
from rlhf_core.planning.hardware import GIB
from tools.bench.gpu.jobs import GRPO, REHEARSED
from tools.bench.gpu.processes import Case, begin, measure_apart, measure_here, noted
from tools.bench.gpu.record import Record
from tools.bench.gpu.shapes import models_folder, shape_name

CASE_SECONDS = 90.0
WAYS = ("ipc", "gloo")
ROUNDS = 5  # after the first, which also connects
IDS = list(range(5, 37))  # of the probe


def main() -> None:
    if measure_here(measure):
        return
    arguments = begin(__doc__)
    record, failures = Record(arguments.out), []
    job = REHEARSED if arguments.rehearse else GRPO
    with models_folder(arguments.models) as models:
        for way in WAYS:
            name = f"weights by {way}, {shape_name(job.shape)}, {job.dtype}"
            if way == "ipc" and arguments.rehearse and not torch.cuda.is_available():
                record.add(name, "s", [], "left out: no GPU here")
                continue
            with noted(record, name, failures):
                case = {"way": way, "models": str(models), "rehearse": arguments.rehearse}
                add(record, name, measure_apart("tools.bench.gpu.transfer", case, seconds=CASE_SECONDS))
    sys.exit("\n".join(failures) or 0)


def add(record: Record, name: str, found: Case) -> None:
    first, *seconds = found["seconds"]
    record.add(f"{name}: first sync, which connects", "s", [first])
    record.add(f"{name}: a sync", "s", seconds)
    record.add(f"{name}: speed", "MB/s", [found["bytes"] / 1e6 / s for s in seconds], f"of {found['bytes'] / 1e6:.4g} MB")
    for role, size in found["grown"].items():
        record.add(f"{name}: most resident set of the {role} above that before the first sync", "GiB", [size / GIB])
    for size in ("mean", "max"):
        note = "of the probe, after the last sync"
        record.add(f"{name}: log-probabilities of engine and trainer apart, {size}", "nats", [found["apart"][size]], note)


def measure(case: Case) -> Case:
    """Measure a case in the child process. Return seconds and bytes of each sync, each process's growth in bytes, and the probe at the end.

    Each sync sends other weights, by the calls of an RL job.

    Raises:
        RuntimeError: there is no GPU (except in a rehearsal), or the weights didn't arrive.
    """
    from rlhf_core.engines.transfer.sender import Target
    from tools.bench.gpu.device import require
    from tools.bench.gpu.job import sizes
    from tools.bench.gpu.steps import synchronize

    require(rehearse=case["rehearse"])
    seconds = []
    with tempfile.TemporaryDirectory(prefix="transfer-", dir=case["models"]) as folder:
        engine, rank = start(case, Path(folder))
        processes = {"trainer": "self", "engine": str(engine.pid)}
        before = {role: restart_peak(process) for role, process in processes.items()}
        for version in range(1, 2 + ROUNDS):
            change(rank.roles.policy.module)
            synchronize()
            began = time.perf_counter()
            sent = rank.send_weights([Target(0, engine, case["way"], 1)], version=version, ids=IDS, engines_probe=False)
            seconds.append(time.perf_counter() - began)
            if sent.answers != {0: (version, [])}:
                raise RuntimeError(
                    f"weights by {case['way']}: expected them to arrive as version {version}, got {sent.answers} {sent.lost}"
                )
        grown = {role: memory(process, "VmHWM") - before[role] for role, process in processes.items()}
        apart = sizes(torch.tensor(engine.probe(IDS)) - torch.tensor(sent.probe))
        engine.close()
    return {"seconds": seconds, "bytes": sent.traffic.nbytes, "grown": grown, "apart": apart}


class PeerEngine(EngineProcess):
    """A rollout engine in its own process, as a trainer rank calls it: a `transfer.sender.Peer`."""

    key = "engine"

    def __init__(self, **settings: Any):
        from rlhf_core.engines.rollout.open import RolloutActor

        self._calls = ThreadPoolExecutor(1)
        super().__init__(RolloutActor, rank=0, **settings)

    @property
    def pid(self) -> int:
        return self._process.pid

    def submit(self, method: str, *args: Any) -> Future:
        return self._calls.submit(self._call, method, *args)

    def answer(self, call: Future, timeout: float) -> Any:
        return call.result(timeout)


def start(case: Case, folder: Path) -> tuple[PeerEngine, Any]:
    """Start an engine, which measures the GPU's free memory and so comes first, and a trainer rank with the policy."""
    from rlhf_core.trainers.rl.rank import TrainerRank
    from tools.bench.gpu.online import ENGINE_MEMORY
    from tools.bench.gpu.shapes import model_folder
    from tools.bench.ours_online import describe

    config = replace(REHEARSED if case["rehearse"] else GRPO, transfer=case["way"])
    model = str(model_folder(config.shape, Path(case["models"])))
    settings = {"max_length": config.max_length, "max_concurrent_sequences": config.samples, "threads": config.threads, "seed": 0}
    engine = PeerEngine(
        backend=config.backend,
        model_path=model,
        dtype=config.dtype,
        gpu_memory_fraction=ENGINE_MEMORY,
        shares_gpu=True,
        trust_remote_code=False,
        weight_transfer=[case["way"]],
        **settings,
    )
    job = describe(config.params, config.rows(), folder, model=model, name="transfer", threads=config.threads)
    rank = TrainerRank(0, 1, job, ["policy"])
    rank.connect(rank.address())
    return engine, rank


@torch.no_grad()
def change(module: torch.nn.Module) -> None:
    """Permute the rows of all weights, so that stale ones give other probabilities."""
    for parameter in module.parameters():
        parameter.copy_(parameter.roll(1, 0))


def restart_peak(process: str) -> int:
    """Reset the peak of a process's resident set, and return the bytes from which it counts."""
    Path(f"/proc/{process}/clear_refs").write_text("5")
    return memory(process, "VmRSS")


def memory(process: str, name: str) -> int:
    """Return the bytes of this name in a process's status."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024


if __name__ == "__main__":
    main()
