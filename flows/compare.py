"""Learning curves of several RL algorithms on several seeds, in one figure and one table.

    python -m flows.compare [--algorithms ppo grpo ...] [--seeds 0 1 2] [--jobs 2] [--set key=value]

Each pair of algorithm and seed is a run in a worktree of its own, runs/compare-<algorithm>-<seed>, with recipes/compare.yaml laid over
params.yaml. What runs have in common (data, SFT and reward model of a seed) is computed once and restored from DVC's run cache. A
second call goes on where the first one ended.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, get_args

from flows.overrides import check, parse_assignment, read_recipe
from flows.stages import stage_environment
from flows.worktree import prepare_worktree
from rlhf_core.config import Algorithm, ConfigError
from rlhf_core.report.comparison import Run, draw, table

RECIPE = Path("recipes/compare.yaml")
SHARED = "gate_reward"  # up to here the runs of a seed are the same
FIGURE, TABLE = Path("reports/compare.svg"), Path("reports/compare.md")


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m flows.compare", description="Compare RL algorithms on several seeds.")
    parser.add_argument("--algorithms", nargs="+", choices=get_args(Algorithm), default=list(get_args(Algorithm)), metavar="NAME")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], metavar="SEED")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time; they share the machine's cores")
    parser.add_argument("--set", dest="assignments", action="append", default=[], metavar="KEY=VALUE", help="for all runs")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    asked = parse_arguments(arguments)
    root = Path.cwd()
    try:
        common = read_recipe(RECIPE) | {"cluster.threads": max(1, (os.cpu_count() or 1) // asked.jobs)}
        common |= dict(map(parse_assignment, asked.assignments))
        workspaces = {
            (algorithm, seed): _workspace(root, {**common, "rl.algorithm": algorithm, "seed": seed})
            for seed in asked.seeds
            for algorithm in asked.algorithms
        }
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    first = [workspaces[asked.algorithms[0], seed] for seed in asked.seeds]
    with ThreadPoolExecutor(asked.jobs) as pool:
        failed = [name for name in pool.map(lambda w: _repro(w, SHARED), first) if name]
        if not failed:
            failed = [name for name in pool.map(lambda w: _repro(w, "train_policy"), workspaces.values()) if name]
    if failed:
        print(f"compare: expected every run to end well, got failures in {', '.join(failed)}; see compare.log there", file=sys.stderr)
        return 1
    runs = [Run.read(workspace, algorithm, seed) for (algorithm, seed), workspace in workspaces.items()]
    FIGURE.parent.mkdir(exist_ok=True)
    draw(runs, FIGURE)
    TABLE.write_text(table(runs), encoding="utf-8")
    print(f"{table(runs)}\nFigure: {FIGURE}  table: {TABLE}")
    return 0


def _workspace(root: Path, overrides: dict[str, Any]) -> Path:
    check(root / "params.yaml", overrides)
    return prepare_worktree(root, f"compare-{overrides['rl.algorithm'].replace('_', '-')}-{overrides['seed']}", overrides)


def _repro(workspace: Path, stage: str) -> str | None:
    """Bring a run up to a stage; its output goes to compare.log in its worktree. Returns the run's name if that failed."""
    print(f"{workspace.name}: {stage} ...", flush=True)
    with (workspace / "compare.log").open("a") as log:
        command = [sys.executable, "-m", "dvc", "repro", stage]
        done = subprocess.run(command, cwd=workspace, env=stage_environment(workspace), stdout=log, stderr=subprocess.STDOUT, check=False)
    return workspace.name if done.returncode else None


if __name__ == "__main__":
    sys.exit(main())
