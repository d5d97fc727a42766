"""Measures weight transfer over gloo: python -m tools.bench.transfer [--models medium large] [--steps N] [--rounds N] [--table FILE]
or, of a model's folder in bfloat16 whole and by changes: --folder FOLDER --learning-rates 1e-6 1e-5 [--rounds N]

Two measurements for models of 5 and 50 million parameters in float32: bytes per second from one process to another one, a layer at a time,
beside copies of the same layers in memory (memcpy), and in bfloat16 whole and by changes; and the share of the weight sync in a step of a
GRPO job with one vLLM engine.
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

COLUMNS = ("model", "megabytes", "gloo_mb_s", "memcpy_mb_s", "whole_mb_s", "changes_mb_s", "seconds_step", "seconds_sync", "share")
STEPS_BEFORE = 1  # warm-up
TIMEOUT = 60.0
CHANGED = 0.01  # of the numbers, between two transfers of changes


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.transfer", description=__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["medium", "large"])
    parser.add_argument("--rounds", type=at_least_one, default=5, help="transfers without a job")
    parser.add_argument("--steps", type=at_least_one, default=4, help="timed steps of a job")
    parser.add_argument("--samples", type=int, default=256, help="responses per step")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--table", type=Path, help="CSV file of the results")
    parser.add_argument("--folder", help="a model whose updates are sent, instead of all else")
    parser.add_argument("--learning-rates", nargs="+", type=float, default=[1e-6, 1e-5], help="of these updates")
    given = parser.parse_args()
    configure_process()
    if given.folder is not None:
        for rate in given.learning_rates:
            print(*(f"{name} {value}" for name, value in of_updates(given.folder, rate, given.rounds).items()), sep="  ", flush=True)
        return
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
    """Median speeds in 10^6 bytes of weights per second: to another process, with send_changes where 1% of them have changed, and of plain
    copies. The speed with changes is that of the same model in bfloat16, beside the speed of it whole.
    """
    import torch

    from rlhf_core.engines.ray.rendezvous import open_store
    from rlhf_core.engines.transfer.changes import SentLayers
    from rlhf_core.engines.transfer.gloo import GlooLink, pack_layer
    from rlhf_core.engines.transfer.source import PolicySource
    from rlhf_core.models.build import load_language_model
    from rlhf_core.models.weights import checkpoint_names

    model = load_language_model(folder)
    store, found, copied = open_store(None, timeout=TIMEOUT), {}, []
    for case, dtype, latest in (("gloo", torch.float32, None), ("whole", torch.bfloat16, None), ("changes", torch.bfloat16, SentLayers())):
        model.to(dtype)
        source = PolicySource(torch.nn.ModuleDict({"model": model}), partial(checkpoint_names, model))
        link = GlooLink(store, case, source, workers=1, timeout=TIMEOUT, latest=latest)
        process = multiprocessing.get_context("spawn").Process(target=receive, args=(link.info, folder, rounds + 1), daemon=True)
        process.start()
        link.open()
        size, seconds = sum(spec.nbytes for layer in source.specs for spec in layer), []
        for _ in range(rounds + 1):
            flip_bits(model, share=CHANGED)
            began = time.perf_counter()
            send_layers(link, source)
            seconds.append(time.perf_counter() - began)
        found[case] = size / statistics.median(seconds[1:]) / 1e6  # the first one is whole
        process.join(TIMEOUT)
        for _ in range(rounds if case == "gloo" else 0):
            began = time.perf_counter()
            for layer in source.layers():
                pack_layer(layer)
            copied.append(size / (time.perf_counter() - began) / 1e6)
    speeds = {"gloo": found["gloo"], "memcpy": statistics.median(copied), "whole": found["whole"], "changes": found["changes"]}
    megabytes = sum(parameter.nbytes for parameter in model.parameters()) * 2 / 1e6
    return {"megabytes": f"{megabytes:.1f}", **{f"{name}_mb_s": f"{speed:.0f}" for name, speed in speeds.items()}}


def of_updates(folder: str, rate: float, rounds: int) -> dict[str, str]:
    """Median seconds in which updates of a model in bfloat16 reach another process, whole and by changes, in turn after each update.

    An update is AdamW's, of float32 weights, on the log-probability of random tokens. The first one counts in neither.
    """
    import torch

    from rlhf_core.engines.ray.rendezvous import open_store
    from rlhf_core.engines.transfer.changes import SentLayers
    from rlhf_core.engines.transfer.gloo import GlooLink
    from rlhf_core.engines.transfer.source import PolicySource
    from rlhf_core.models.build import checkpoint_names, load_language_model

    trained, model = load_language_model(folder).float(), load_language_model(folder).to(torch.bfloat16)
    optimizer, store = (
        torch.optim.AdamW(trained.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.0),
        open_store(None, timeout=TIMEOUT),
    )
    source = PolicySource(torch.nn.ModuleDict({"model": model}), partial(checkpoint_names, model))
    latest, links, processes = SentLayers(), {}, []
    for case, known in (("whole", None), ("changes", latest)):
        links[case] = GlooLink(store, case, source, workers=1, timeout=TIMEOUT, latest=known)
        arguments = (links[case].info, folder, rounds + 1)
        processes.append(multiprocessing.get_context("spawn").Process(target=receive, args=arguments, daemon=True))
        processes[-1].start()
        links[case].open()
    seconds: dict[str, list[float]] = {case: [] for case in links}
    changed, numbers, generator = [], sum(p.numel() for p in model.parameters()), torch.Generator().manual_seed(0)
    for _ in range(rounds + 1):
        update(trained, optimizer, generator)
        with torch.no_grad():
            before = [own.clone() for own in model.parameters()]
            for own, master in zip(model.parameters(), trained.parameters(), strict=True):
                own.copy_(master)
            changed.append(sum(int((a != b).sum()) for a, b in zip(before, model.parameters(), strict=True)) / numbers)
        for case, link in links.items():
            began = time.perf_counter()
            send_layers(link, source)
            seconds[case].append(time.perf_counter() - began)
    for process in processes:
        process.join(TIMEOUT)
    whole, by_changes = (statistics.median(seconds[case][1:]) for case in ("whole", "changes"))
    found = {"learning_rate": f"{rate:g}", "changed": f"{statistics.median(changed[1:]):.4f}"}
    return found | {"seconds_whole": f"{whole:.3f}", "seconds_changes": f"{by_changes:.3f}", "ratio": f"{by_changes / whole:.2f}"}


def update(model: Any, optimizer: Any, generator: Any) -> None:
    """One step of the optimizer on four texts of random tokens."""
    import torch

    ids = torch.randint(model.config.vocab_size, (4, 64), generator=generator)
    optimizer.zero_grad()
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()


def flip_bits(model: Any, *, share: float) -> None:
    """Flip the last bit of a random share of the numbers of two bytes."""
    import torch

    with torch.no_grad():
        for parameter in model.parameters():
            numbers = parameter.view(torch.int16)
            numbers ^= (torch.rand(numbers.shape) < share).to(torch.int16)


def send_layers(link: Any, source: Any) -> None:
    sending = None
    for number, layer in enumerate(source.layers()):
        packed = link.pack(number, layer)
        while sending is not None and not sending.wait(TIMEOUT):
            pass
        sending = link.send(packed)
    while not sending.wait(TIMEOUT):
        pass


def receive(info: dict[str, Any], folder: str, rounds: int) -> None:
    from rlhf_core.engines.transfer.gloo import GlooReceiver

    receiver = GlooReceiver(info, worker=0, folder=folder)
    for number in list(range(len(receiver.specs))) * rounds:
        receiver.receive(number)


if __name__ == "__main__":
    main()
