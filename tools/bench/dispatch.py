"""Compares prompts handed out as engines become free with equal shares: python -m tools.bench.dispatch [--engines N] [--prompts N]
[--rounds N]

vLLM engines on a Ray head of this machine sample responses of very different lengths from a small random model, alternating both ways. The
ideal is the engines' CPU time, added up and divided by their number. Needs as many free cores as engines.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rlhf_core.process import configure_process
from rlhf_core.stage.job import beat

END, VOCABULARY, LONGEST, AT_A_TIME = 1, 256, 640, 16


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.dispatch", description=__doc__)
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=768)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pulse", type=Path, help=argparse.SUPPRESS)  # of the Ray job, which runs this program again
    given = parser.parse_args()
    if given.pulse is not None:
        with beat(given.pulse):
            measure(given.engines, given.prompts, given.rounds)
        return 0
    configure_process()
    from rlhf_core.engines.ray.cluster import local_head, run_job

    root = Path(__file__).parents[2]
    with tempfile.TemporaryDirectory() as folder, local_head(cpus=given.engines + 1, start_timeout=120) as address:
        pulse = Path(folder) / "pulse"
        return run_job(
            address,
            shlex.join([sys.executable, "-m", "tools.bench.dispatch", *sys.argv[1:], "--pulse", str(pulse)]),
            name="dispatch",
            environment={"PYTHONPATH": str(root)},
            start_timeout=120,
            silence_timeout=120,
            pulse=pulse,
            on_output=sys.stdout.write,
            stop_requested=lambda: False,
        )


def measure(engines: int, prompts: int, rounds: int) -> None:
    """Start the engines, and compare on them. Runs in the Ray job."""
    from rlhf_core.engines.ray.actors import ActorGroup
    from rlhf_core.engines.ray.places import join_cluster, leave_cluster

    join_cluster(output=False)
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder))
        settings = {
            "backend": "vllm", "model_path": folder, "max_length": LONGEST, "dtype": "float32", "kv_cache_gib": 1, "threads": 1, "seed": 0,
            "max_concurrent_sequences": AT_A_TIME, "trust_remote_code": False, "gpu_memory_fraction": 0.3,
        }  # fmt: skip
        group = ActorGroup(
            "rollout", "rlhf_core.engines.rollout.open:RolloutActor", engines, cpus=1, threads=1, start_deadline=180,
            kwargs=settings, together=False,
        )  # fmt: skip
        try:
            group.wait_ready()
            compare(group, prompts, rounds)
        finally:
            group.close()
            leave_cluster()


def save_model(folder: Path) -> None:
    """Save a random model whose probability to end a response depends on what it has sampled so far."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=4,
        max_position_embeddings=LONGEST, eos_token_id=END, pad_token_id=0, initializer_range=0.2, dtype="float32",
    )  # fmt: skip
    LlamaForCausalLM(config).eval().save_pretrained(folder)


def compare(engines, count: int, rounds: int) -> None:
    """Print the seconds of each round, and their ratio to the ideal."""
    from rlhf_core.engines.rollout.requests import SamplingSettings, request_seeds
    from rlhf_core.trainers.rl.dispatch import Dispatcher, Requests

    def refuse(lost: Exception) -> None:
        raise lost

    prompts = [ids.tolist() for ids in np.random.default_rng(0).integers(2, VOCABULARY, size=(count, 12))]
    options = {"settings": SamplingSettings(LONGEST - 16, 1.0), "stop_ids": (END,), "group_size": 1}
    ratios: dict[str, list[float]] = {"equal": [], "dynamic": []}
    for k in range(rounds + 1):
        seeds = request_seeds(0, k, count)
        shards = [list(range(count))[rank :: len(engines)] for rank in range(len(engines))]
        per_rank = [([prompts[i] for i in s], [seeds[i] for i in s], options["settings"]) for s in shards]
        further = {"stop_ids": options["stop_ids"], "group_size": options["group_size"]}
        ways = {
            "equal": lambda p=per_rank, f=further: engines.call("generate", p, deadline=600, **f),
            "dynamic": lambda s=seeds: Dispatcher(
                engines, refuse, Requests(prompts, s, options), at_a_time=AT_A_TIME, joins=True, deadline=600
            ).run(),
        }
        seconds, work = {}, {}
        for name, generate in ways.items():
            before, began = busy(engines), time.perf_counter()
            generate()
            seconds[name] = time.perf_counter() - began
            work[name] = sum(busy(engines)) - sum(before)
        ideal = min(work.values()) / len(engines)
        for name in ways if k else ():  # the first round warms up
            ratios[name].append(seconds[name] / ideal)
            print(f"round {k}, {name}: {seconds[name]:.2f} s, ideal {ideal:.2f} s, {seconds[name] / ideal:.3f}", flush=True)
    for name, values in ratios.items():
        print(f"{name}: median {statistics.median(values):.3f} of the ideal ({min(values):.3f} to {max(values):.3f})")


def busy(engines) -> list[float]:
    """Return the CPU seconds that each engine's process has used so far."""
    import ray

    return ray.get([actor.__ray_call__.remote(lambda _: time.process_time()) for actor in engines.actors], timeout=60)


if __name__ == "__main__":
    sys.exit(main())
