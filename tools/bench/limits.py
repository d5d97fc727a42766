"""Compares speed with this machine's limits: python -m tools.bench.limits [--models small medium] [--rounds N] ...

Comparisons, each in a fresh process:

- rollouts: tokens per second of `generate` in a GRPO job (vLLM or PyTorch) beside the same number of bare vLLM engines on prompts of the
  same data, in turn after each step (tools/bench/driver.py) and without interruption;
- training: SFT in the stage's own loop beside bare PyTorch on the same batches, alternating steps in one process;
- the phases of a GRPO step;
- the start of such a job to its first step beside its parts alone: Ray's head and an empty job, then the engines and a trainer's imports;
- matrix products that fit the cache, the bound of everything else.

Writes limits.json and limits.md into --out.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, get_args

from rlhf_core.config import RolloutBackend
from rlhf_core.process import configure_process
from tools.bench.peers import MODELS, ROOT, Inputs, at_least_one, make_inputs
from tools.bench.workload import RESPONSE_TOKENS, Workload

WORKING_PHASES = ("generate", "score", "forward", "update")
MATRIX = 768
SFT_BATCH = 64
TRAINER_IMPORTS = "import torch, transformers, deepspeed"


def main() -> None:
    arguments = parse()
    configure_process()
    if arguments.measure:
        work = Workload(**json.loads(arguments.work)) if arguments.work else None
        print(json.dumps(MEASURES[arguments.measure](work, arguments)))
        return
    with tempfile.TemporaryDirectory() as folder:
        inputs = make_inputs(Path(folder), arguments.models)
        found = {"matmul_gflops": child("matmul", None, arguments), **{m: of_model(inputs, m, arguments) for m in arguments.models}}
    write(arguments, found)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["small"])
    parser.add_argument("--rounds", type=int, default=3, help="runs of each side")
    parser.add_argument("--steps", type=int, default=15, help="steps that are timed")
    parser.add_argument("--warmup", type=at_least_one, default=5, help="steps before them")
    parser.add_argument("--samples", type=int, default=256, help="responses per step")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--backend", choices=get_args(RolloutBackend), default="vllm", help="of the job, beside bare vLLM")
    parser.add_argument("--out", type=Path, default=ROOT / "reports" / "bench")
    parser.add_argument("--measure", choices=MEASURES, help=argparse.SUPPRESS)  # one measure, in its own process
    parser.add_argument("--work", help=argparse.SUPPRESS)
    return parser.parse_args()


def of_model(inputs: Inputs, model: str, arguments: argparse.Namespace) -> dict[str, Any]:
    steps = arguments.warmup + arguments.steps
    grpo = inputs.work("grpo", model, steps=steps, batch_size=arguments.samples)
    job = replace(grpo, overrides={**grpo.overrides, "rollout.backend": arguments.backend})
    sft = inputs.work("sft", model, steps=steps, batch_size=SFT_BATCH)
    rounds: dict[str, list[Any]] = {"step": [], "train": [], "start": [], "bare_start": []}
    for _ in range(arguments.rounds):
        rounds["train"].append(child("train", sft, arguments))
        rounds["step"].append(child("step", job, arguments))
        for side in ("start", "bare_start"):
            rounds[side].append(child(side, replace(job, steps=1), arguments))
    return rounds


def child(measure: str, work: Workload | None, arguments: argparse.Namespace) -> Any:
    """Run a measure in its own process."""
    command = [sys.executable, "-m", "tools.bench.limits", "--measure", measure]
    if work is not None:
        command += ["--work", json.dumps(asdict(work))]
    for name in ("steps", "warmup", "threads"):
        command += [f"--{name}", str(getattr(arguments, name))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{measure}: expected a result, got exit code {done.returncode}:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


# The measures


def matmul(_: None, arguments: argparse.Namespace) -> float:
    """The best GFLOP/s of float32 matrix products."""
    import torch

    torch.set_num_threads(arguments.threads)
    a, b = torch.rand(MATRIX, MATRIX), torch.rand(MATRIX, MATRIX)
    best = float("inf")
    for _ in range(200):
        started = time.perf_counter()
        torch.mm(a, b)
        best = min(best, time.perf_counter() - started)
    return 2 * MATRIX**3 / best / 1e9


def step(work: Workload, arguments: argparse.Namespace) -> dict[str, float]:
    """Return median seconds of a job's timed steps: the whole step, each phase, and bare engines' batches."""
    from tools.bench.ours_online import read_clock, timings

    with tempfile.TemporaryDirectory() as folder:
        rows = timings(work, Path(folder), "--bare-engines", threads=arguments.threads)
        clock = read_clock(Path(folder))
    of = {name: [row[name] for row in rows] for name in rows[0]} | {name: clock[name] for name in ("in_turn", "in_a_row")}
    return {name: statistics.median(values[arguments.warmup :]) for name, values in of.items()}


def start(work: Workload, arguments: argparse.Namespace) -> float:
    """Seconds from a process's start to the job's first step."""
    from tools.bench.ours_online import timings

    with tempfile.TemporaryDirectory() as folder:
        began = time.time()
        (first,) = timings(work, Path(folder), threads=arguments.threads)
        return (Path(folder) / "timings.csv").stat().st_mtime - began - first["seconds"]  # the row is written at the end of its step


def bare_start(work: Workload, arguments: argparse.Namespace) -> float:
    """Seconds of Ray's head and an empty job, then of the job's engines to their first answer, beside a trainer's imports."""
    from tools.bench.driver import BareEngines
    from tools.bench.ours_online import submit

    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, submit(work, Path(folder), [sys.executable, "-c", ""], threads=arguments.threads):
        with subprocess.Popen([sys.executable, "-c", TRAINER_IMPORTS], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as trainer:
            if work.params.rl.rollout.backend == "vllm":
                BareEngines(work, threads=arguments.threads).generate(0)
        if trainer.returncode:
            raise RuntimeError(f"a trainer's imports: expected exit code 0, got {trainer.returncode}")
        return time.perf_counter() - began


def train(work: Workload, arguments: argparse.Namespace) -> dict[str, float]:
    """Tokens per second of the stage's loop and of bare PyTorch, which has no engine, logs or curves."""
    import torch

    from rlhf_core.engines.deepspeed.engine import join_world
    from tools.bench import ours

    torch.set_num_threads(arguments.threads)
    join_world()
    bare = BareSft(work)
    stage_seconds, bare_seconds, tokens = [], [], []
    left = time.perf_counter()

    def end_step() -> bool:
        """Called once a step by the loop; a step's time is the interval between two calls."""
        nonlocal left
        called = time.perf_counter()
        stage_seconds.append(called - left)
        tokens.append(bare.step(len(tokens)))
        left = time.perf_counter()
        bare_seconds.append(left - called)
        return False

    with tempfile.TemporaryDirectory() as folder:
        ours.sft(work, Path(folder), ours.loop(work, Path(folder), ours.Run(), end_step))
    chosen = slice(arguments.warmup, None)
    of = sum(tokens[chosen])
    return {"stage": of / sum(stage_seconds[chosen]), "bare": of / sum(bare_seconds[chosen])}


class BareSft:
    """The module, batches and optimizer of `tools.bench.ours.sft` in bare PyTorch."""

    def __init__(self, work: Workload):
        import torch

        from rlhf_core.models.build import load_language_model
        from rlhf_core.models.forward import PolicyModule
        from rlhf_core.models.tokenizer import load_tokenizer
        from rlhf_core.trainers.supervised.demonstrations import encode_demonstrations

        self._work, tokenizer = work, load_tokenizer(work.model, trust_remote_code=False)
        self._examples, _ = encode_demonstrations(work.read_rows(), tokenizer, max_length=work.params.model.max_length)
        self._pad_id = tokenizer.pad_token_id
        self._module = PolicyModule(load_language_model(work.model)).train()
        self._optimizer = torch.optim.AdamW(self._module.parameters(), lr=work.params.sft.learning_rate, betas=(0.9, 0.95), fused=True)

    def step(self, number: int) -> int:
        """Train on one batch, and return its number of tokens."""
        import torch

        from rlhf_core.data.batching import batch_indices
        from rlhf_core.models.batch import collate_tokens

        drawn = batch_indices(number, batch_size=self._work.batch_size, num_examples=len(self._examples), seed=self._work.params.seed)
        examples = [self._examples[i] for i in drawn]
        batch = collate_tokens([e.ids for e in examples], [e.start for e in examples], pad_id=self._pad_id)
        self._module(batch).logprobs.mean().neg().backward()
        torch.nn.utils.clip_grad_norm_(self._module.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return sum(len(e.ids) for e in examples)


MEASURES = {"matmul": matmul, "step": step, "start": start, "bare_start": bare_start, "train": train}


def write(arguments: argparse.Namespace, found: dict[str, Any]) -> None:
    import torch

    settings = ("rounds", "steps", "warmup", "samples", "threads", "backend")
    about = {"torch": torch.__version__, "cores": os.cpu_count(), **{name: getattr(arguments, name) for name in settings}}
    lines = [f"Matrix products of {MATRIX}: {found['matmul_gflops']:.0f} GFLOP/s.", "", *table(arguments, found)]
    lines += ["", f"Medians of {arguments.rounds} runs; {', '.join(f'{k} {v}' for k, v in about.items())}."]
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "limits.json").write_text(json.dumps({"about": about, "results": found}, indent=2) + "\n")
    (arguments.out / "limits.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


def table(arguments: argparse.Namespace, found: dict[str, Any]) -> list[str]:
    lines = ["| model | what | ours | limit | share |", "|---|---|---|---|---|"]
    for model in arguments.models:
        rounds = found[model]
        phases = {name: statistics.median(step[name] for step in rounds["step"]) for name in rounds["step"][0]}
        for limit, name in (("in_turn", "rollouts beside bare vLLM in turn"), ("in_a_row", "the same, one batch after the other")):
            ours, bare = (arguments.samples * RESPONSE_TOKENS / phases[of] for of in ("seconds_generate", limit))
            lines.append(f"| {model} | {name}, tokens/s | {ours:.0f} | {bare:.0f} | {ours / bare:.2f} |")
        ours, limit = (statistics.median(run[side] for run in rounds["train"]) for side in ("stage", "bare"))
        lines.append(f"| {model} | SFT, tokens/s | {ours:.0f} | {limit:.0f} | {ours / limit:.2f} |")
        ours, limit = (statistics.median(rounds[side]) for side in ("start", "bare_start"))
        lines.append(f"| {model} | start of an RL job to its first step, s | {ours:.1f} | {limit:.1f} | {limit / ours:.2f} |")
        total = phases["seconds"]
        working = sum(phases[f"seconds_{name}"] for name in WORKING_PHASES)
        sync = phases["seconds_sync"]
        lines.append(f"| {model} | GRPO step: weight sync, s | {sync:.3f} | {total:.3f} | {sync / total:.3f} |")
        rest = total - working - sync
        lines.append(f"| {model} | GRPO step: neither work nor sync, s | {rest:.3f} | {total:.3f} | {rest / total:.3f} |")
        lines += [
            f"| {model} | GRPO step: {name}, s | {phases[f'seconds_{name}']:.3f} | {total:.3f} | {phases[f'seconds_{name}'] / total:.2f} |"
            for name in WORKING_PHASES
        ]
    return lines


if __name__ == "__main__":
    main()
