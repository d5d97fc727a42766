"""Measures weight transfer over gloo: python -m tools.bench.transfer [--models medium large] [--steps N] [--rounds N] [--table FILE]

Two measurements for models of 5 and 50 million parameters in float32: bytes per second from one process to another one, a layer at a time,
beside copies of the same layers in memory (memcpy); and the share of the weight sync in a step of a GRPO job with one vLLM engine.
"""

from __future__ import annotations

import argparse
import csv
import multiprocessing
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rlhf_core.process import configure_process
from tools.bench.peers import MODELS, at_least_one, make_inputs

COLUMNS = ("model", "megabytes", "gloo_mb_s", "memcpy_mb_s", "seconds_step", "seconds_sync", "share")
STEPS_BEFORE = 1  # warm-up
TIMEOUT = 60.0


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.transfer", description=__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["medium", "large"])
    parser.add_argument("--rounds", type=at_least_one, default=5, help="transfers without a job")
    parser.add_argument("--steps", type=at_least_one, default=4, help="timed steps of a job")
    parser.add_argument("--samples", type=int, default=256, help="responses per step")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--table", type=Path, help="CSV file of the results")
    given = parser.parse_args()
    configure_process()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        inputs = make_inputs(Path(folder), given.models)
        for model in given.models:
            work = inputs.work("grpo", model, steps=STEPS_BEFORE + given.steps, batch_size=given.samples)
            with ProcessPoolExecutor(
                1, mp_context=multiprocessing.get_context("spawn")
            ) as apart:  # a job's Ray is imported with other settings
                speeds = apart.submit(bandwidth, work.model, given.rounds).result()
            rows.append({"model": model, **speeds, **share(work, given.threads)})
            print(*(f"{name} {value}" for name, value in rows[-1].items()), sep="  ", flush=True)
    if given.table is not None:
        with given.table.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


def share(work: Any, threads: int) -> dict[str, str]:
    """Median seconds of a job's step and of its weight sync."""
    from tools.bench.ours_online import timings

    with tempfile.TemporaryDirectory() as folder:
        rows = timings(replace(work, overrides={**work.overrides, "rollout.engines": 1}), Path(folder), threads=threads)[STEPS_BEFORE:]
    step, sync = (statistics.median(row[name] for row in rows) for name in ("seconds", "seconds_sync"))
    return {"seconds_step": f"{step:.3f}", "seconds_sync": f"{sync:.3f}", "share": f"{sync / step:.4f}"}


def bandwidth(folder: str, rounds: int) -> dict[str, str]:
    """Median speeds in 10^6 bytes per second, to another process and of plain copies."""
    import torch

    from rlhf_core.engines.ray.rendezvous import open_store
    from rlhf_core.engines.transfer.gloo import GlooLink, pack_layer
    from rlhf_core.engines.transfer.source import PolicySource
    from rlhf_core.models.build import checkpoint_names, load_language_model

    model = load_language_model(folder)
    source = PolicySource(torch.nn.ModuleDict({"model": model}), partial(checkpoint_names, model))
    store = open_store(None, timeout=TIMEOUT)
    link = GlooLink(store, "bench", source, workers=1, timeout=TIMEOUT)
    process = multiprocessing.get_context("spawn").Process(target=receive, args=(link.info, folder, rounds), daemon=True)
    process.start()
    link.open()
    size = sum(spec.nbytes for layer in source.specs for spec in layer)
    sent, copied = [], []
    with torch.no_grad():
        for _ in range(rounds):
            began, sending = time.perf_counter(), None
            for layer in source.layers():
                flat = pack_layer(layer)
                while sending is not None and not sending.wait(TIMEOUT):
                    pass
                sending = link.send(flat)
            sending.wait(TIMEOUT)
            sent.append(time.perf_counter() - began)
            began = time.perf_counter()
            for layer in source.layers():
                pack_layer(layer)
            copied.append(time.perf_counter() - began)
    process.join(TIMEOUT)
    speeds = {f"{name}_mb_s": f"{size / statistics.median(s) / 1e6:.0f}" for name, s in (("gloo", sent), ("memcpy", copied))}
    return {"megabytes": f"{size / 1e6:.1f}", **speeds}


def receive(info: dict[str, Any], folder: str, rounds: int) -> None:
    from rlhf_core.engines.transfer.gloo import GlooReceiver

    receiver = GlooReceiver(info, worker=0, folder=folder)
    for number in list(range(len(receiver.specs))) * rounds:
        receiver.receive(number)


if __name__ == "__main__":
    main()
