"""Measures how time and memory grow: python -m tools.bench.growth [--parts data length model prompts] [--pairs 1000 10000 ...] [--lengths
...] ...

- data: the stages prepare_data and validate_data by the number of pairs, each with its own conversation;
- length: an SFT step by the tokens of a response, at a constant batch size;
- model: the same step by the parameters of the model;
- prompts: an RL step (RLOO, four responses of 24 tokens per prompt, PyTorch rollouts) by its responses.

Each point runs in its own process. The results are CPU time (per step, where there are steps), peak memory, and the exponent of both
between neighbouring points: 1 is linear. CPU time hardly depends on other work on the machine.
Writes growth.json, growth.md and growth.svg into --out.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from rlhf_core.config import set_key
from rlhf_core.process import configure_process
from tools.bench.workload import write_jsonl
from tools.clerk import clerk_params, clerk_tree

ROOT = Path(__file__).parents[2]
WORDS = 40  # of a conversation and of a response
BATCH, STEPS, WARMUP = 32, 12, 4
LENGTH, WIDTH = 32, 96  # where the other quantity varies
LAYERS, HEADS, VOCABULARY = 3, 4, 390
PARTS = ("data", "length", "model", "prompts")


@dataclass(frozen=True)
class Point:
    """A measured point.

    size: pairs, tokens of a response, or parameters. seconds: CPU time. gigabytes: peak resident set.
    """

    series: str
    size: int
    seconds: float
    gigabytes: float


def main() -> None:
    arguments = parse()
    configure_process()
    if arguments.step:
        print(json.dumps(training_step(*arguments.step)))
        return
    if arguments.rl_step:
        from tools.bench.rl_step import rl_step

        print(json.dumps(rl_step(arguments.rl_step)))
        return
    points: list[Point] = []
    for part in arguments.parts:
        for size in sizes(part, arguments):
            for point in MEASURES[part](size):
                points.append(point)
                print(f"{point.series} {point.size}: {point.seconds:.3g} s, {point.gigabytes:.2f} GB", flush=True)
    write(arguments.out, points)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--pairs", nargs="+", type=int, default=[1_000, 10_000, 100_000, 1_000_000])
    parser.add_argument("--lengths", nargs="+", type=int, default=[16, 32, 64, 128, 256, 512])
    parser.add_argument("--widths", nargs="+", type=int, default=[64, 128, 256, 512], help="of the hidden layers; 3 layers each")
    parser.add_argument("--prompts", nargs="+", type=int, default=[16, 32, 64, 128, 256, 512], help="of an RL step")
    parser.add_argument("--out", type=Path, default=ROOT / "reports" / "bench")
    parser.add_argument("--step", nargs=2, type=int, metavar=("LENGTH", "WIDTH"), help=argparse.SUPPRESS)  # in a process of its own
    parser.add_argument("--rl-step", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def sizes(part: str, arguments: argparse.Namespace) -> list[int]:
    return {"data": arguments.pairs, "length": arguments.lengths, "model": arguments.widths, "prompts": arguments.prompts}[part]


# The measures


def measure_data(pairs: int) -> list[Point]:
    with tempfile.TemporaryDirectory() as folder:
        workspace = Path(folder)
        make_workspace(workspace, pairs)
        return [stage(workspace, name, pairs) for name in ("prepare_data", "validate_data")]


def make_workspace(workspace: Path, pairs: int) -> None:
    """Make a workspace with params of one source, a file of pairs."""
    chance = random.Random(0)
    words = [f"{a}{b}{c}" for a in "bdfgklmnprst" for b in "aeiou" for c in "bdgklmnprst"]

    def text() -> str:
        return " ".join(chance.choices(words, k=WORDS))

    with (workspace / "pairs.jsonl").open("w", encoding="utf-8") as file:
        for number in range(pairs):
            row = {"prompt": f"{number} {text()}", "chosen": text(), "rejected": text()}
            file.write(json.dumps(row) + "\n")
    tree = clerk_tree()
    source = {"name": "pairs", "kind": "file", "path": "pairs.jsonl", "format": "preference", "uses": ["sft", "preference", "prompt"]}
    set_key(tree, "data.sources", [source | {"weight": 1.0}])
    set_key(tree, "model.max_length", 4 * WORDS * 4)
    (workspace / "params.yaml").write_text(json.dumps(tree), encoding="utf-8")  # JSON is YAML
    for name in ("dvc.yaml", "tasks", "rlhf_core", "rewards"):  # a stage reads its dependencies there
        (workspace / name).symlink_to(ROOT / name)


def stage(workspace: Path, name: str, pairs: int) -> Point:
    """Run a stage."""
    with (workspace / "log").open("w+") as log:
        command = [sys.executable, "-m", f"tasks.{name}"]
        child = subprocess.Popen(command, cwd=workspace, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=log, stderr=log)
        _, status, used = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        if child.returncode:
            log.seek(0)
            raise RuntimeError(f"{name}: expected exit code 0, got {child.returncode}:\n{log.read()[-3000:]}")
    return Point(name, pairs, used.ru_utime + used.ru_stime, used.ru_maxrss / 2**20)


def measure_length(length: int) -> list[Point]:
    seconds, gigabytes, _ = _in_process("--step", length, WIDTH)
    return [Point("SFT step by response tokens", length, seconds, gigabytes)]


def measure_model(width: int) -> list[Point]:
    seconds, gigabytes, parameters = _in_process("--step", LENGTH, width)
    return [Point("SFT step by parameters", parameters, seconds, gigabytes)]


def measure_prompts(prompts: int) -> list[Point]:
    seconds, gigabytes, responses = _in_process("--rl-step", prompts)
    return [Point("RL step by responses", responses, seconds, gigabytes)]


MEASURES: dict[str, Callable[[int], list[Point]]] = {
    "data": measure_data,
    "length": measure_length,
    "model": measure_model,
    "prompts": measure_prompts,
}


def _in_process(*arguments: str | int) -> tuple[float, float, int]:
    command = [sys.executable, "-m", "tools.bench.growth", *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: expected a result, got exit code {done.returncode}:\n{done.stderr[-3000:]}")
    return tuple(json.loads(done.stdout.splitlines()[-1]))


def training_step(length: int, width: int) -> tuple[float, float, int]:
    """Return median CPU seconds of a step in the stage's own loop, peak resident set in GB, and number of parameters."""
    import resource

    from rlhf_core.config import ArchitectureConfig
    from rlhf_core.models.build import new_language_model, save_model
    from rlhf_core.models.tokenizer import build_tokenizer
    from tools.bench import ours
    from tools.bench.workload import Run, Workload

    class Longer(Workload):
        @property
        def params(self):
            params = super().params
            return params.model_copy(update={"model": params.model.model_copy(update={"max_length": 64 + 2 * length})})

    chance, letters = random.Random(0), "abcdefghijklmnopqrstuvwxyz"
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = build_tokenizer([letters], vocab_size=VOCABULARY)
        shape = ArchitectureConfig(hidden_size=width, intermediate_size=8 * width // 3, layers=LAYERS, heads=HEADS, vocab_size=VOCABULARY)
        changes = {"architecture": shape, "path": None, "max_length": 64 + 2 * length}
        config = clerk_params().model.model_copy(update=changes)
        model = new_language_model(config, tokenizer, seed=0)
        parameters = sum(p.numel() for p in model.parameters())
        save_model(model, model.state_dict(), tokenizer, Path(folder) / "model")

        def text() -> str:  # a token per letter, and the end token
            return "".join(chance.choices(letters, k=length - 1))

        rows = [{"messages": [{"role": "user", "content": text()[:16]}], "response": text()} for _ in range(4 * BATCH)]
        work = Longer("sft", str(Path(folder) / "model"), write_jsonl(Path(folder) / "rows.jsonl", rows), STEPS, BATCH)
        run: Run = ours.train(work, Path(folder))
    steps = [after - before for before, after in pairwise(run.cpu_ends)][WARMUP:]
    return statistics.median(steps), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, parameters


# What is written


def write(out: Path, points: list[Point]) -> None:
    import torch

    about = {"date": time.strftime("%Y-%m-%d"), "torch": torch.__version__, "cores": os.cpu_count(), "batch": BATCH, "words": WORDS}
    out.mkdir(parents=True, exist_ok=True)
    (out / "growth.json").write_text(json.dumps({"about": about, "points": [asdict(p) for p in points]}, indent=2) + "\n")
    text = "\n".join([*table(points), "", ", ".join(f"{k} {v}" for k, v in about.items()) + "."])
    (out / "growth.md").write_text(text + "\n")
    draw(points, out / "growth.svg")
    print(text)


def table(points: list[Point]) -> list[str]:
    lines = ["| what | size | computing time, s | memory, GB | exponent of time | of memory |", "|---|---|---|---|---|---|"]
    for series in dict.fromkeys(p.series for p in points):
        of_series = [p for p in points if p.series == series]
        for before, point in zip([None, *of_series], of_series, strict=False):
            exponents = ["", ""] if before is None else [f"{exponent(before, point, of):.2f}" for of in ("seconds", "gigabytes")]
            lines.append(f"| {series} | {point.size:,} | {point.seconds:.3g} | {point.gigabytes:.2f} | {' | '.join(exponents)} |")
    return lines


def exponent(before: Point, after: Point, of: str) -> float:
    """Return the k with which the value grows as size**k between two points."""
    return math.log(getattr(after, of) / getattr(before, of)) / math.log(after.size / before.size)


def draw(points: list[Point], path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    groups: dict[str, list[str]] = {}
    for p in points:
        name = "pairs" if p.series in ("prepare_data", "validate_data") else p.series.split(" step by ")[-1]
        groups.setdefault(name, [])
        groups[name] += [p.series] if p.series not in groups[name] else []
    figure, axes = plt.subplots(2, len(groups), figsize=(4 * len(groups), 6), squeeze=False, layout="constrained")
    for column, (name, series) in enumerate(groups.items()):
        for row, (of, unit) in enumerate((("seconds", "computing time, s"), ("gigabytes", "memory, GB"))):
            axis: Any = axes[row][column]
            for one in series:
                of_series = [p for p in points if p.series == one]
                axis.plot([p.size for p in of_series], [getattr(p, of) for p in of_series], marker="o", label=one)
            axis.set(xscale="log", yscale="log" if of == "seconds" else "linear", xlabel=name, ylabel=unit)
            if of == "gigabytes":
                axis.set_ylim(bottom=0)
            marks = sorted({p.size for p in points if p.series in series})
            axis.set_xticks(marks, labels=[_short(mark) for mark in marks])
            axis.minorticks_off()
            axis.legend(fontsize=8)
    with matplotlib.rc_context({"svg.hashsalt": "growth"}):
        figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def _short(size: int) -> str:
    return f"{size / 1e6:.3g}M" if size >= 10**6 else f"{size / 1e3:.3g}k" if size >= 1000 else str(size)


if __name__ == "__main__":
    main()
