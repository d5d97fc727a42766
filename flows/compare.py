"""Compares RL algorithms or alignment methods over several seeds in one table, with learning curves of RL.

    rlhf sweep --params recipes/clerk.yaml [--algorithms ppo grpo ...] [--seeds 0 1 2] [--jobs 2] [--set key=value]
    rlhf sweep --params recipes/clerk.yaml --methods dpo dpo:ipo kto rejection_sampling ...

Each pair of algorithm or method and seed is a run with its own worktree, runs/compare-<name>-<seed>; recipes/compare.yaml is laid over the
recipes that are given. Stages that runs share (data, SFT and reward model of a seed) are computed once and restored from DVC's run cache. A
second call resumes where the first one ended.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from cyclopts import Group, Parameter
from cyclopts.validators import mutually_exclusive

from flows.chain.command_line import REFUSED
from flows.chain.locks import only_flow
from flows.chain.prepare import prepare_workspace
from flows.chain.stages import stage_environment
from flows.chain.worktree import commit_results, slug
from flows.runs.record import note
from flows.runs.results import input_paths, result_paths
from rlhf_core.algorithms.online import ALGORITHMS
from rlhf_core.commands import NONE_GIVEN, Count, Numbers, Overrides, Words, run_module
from rlhf_core.config import ConfigError, Method, load_params, parse_assignment, with_recipes
from rlhf_core.paths import EVALUATION_METRICS, REPORTS
from rlhf_core.process import end_with_parent, module_command
from rlhf_core.report.comparison import Run, draw, methods_table, table

RECIPE = Path("recipes/compare.yaml")
SHARED = "gate_reward"  # the last stage that the runs of a seed share
FIGURE, TABLE, METHODS_TABLE = REPORTS / "compare.svg", REPORTS / "compare.md", REPORTS / "compare_methods.md"
THREADS = "cluster.threads"  # the cores, divided by --jobs


_VARIANTS = Group("Variants", validator=mutually_exclusive)


@Parameter(name="*")
@dataclass(frozen=True)
class Options:
    """What to compare, and how.

    Args:
        algorithms: of rl.algorithm; by default all.
        methods: of alignment.method, with a loss as in dpo:ipo; compared by their evaluation.
        seeds: of each variant.
        jobs: runs at the same time; they share the machine's cores.
        update: change the params of runs that exist, which is refused otherwise.
    """

    algorithms: Annotated[tuple[Literal[tuple(ALGORITHMS)], ...], Parameter(consume_multiple=True, group=_VARIANTS)] = ()
    methods: Annotated[Words, Parameter(group=_VARIANTS)] = ()
    seeds: Numbers = (0, 1, 2)
    jobs: Count = 1
    given: Overrides = NONE_GIVEN
    update: bool = False


DEFAULTS = Options()


def start(*, options: Options = DEFAULTS) -> int:
    with ExitStack() as held:
        return compare(Path.cwd(), options, held)


def compare(root: Path, options: Options, held: ExitStack) -> int:
    """Run all variants, write the comparison, and return the exit code.

    held: stack that keeps the runs' locks until the caller exits it.
    """
    try:
        variants = {name: method_overrides(name) for name in options.methods} or {
            name: {"rl.algorithm": name} for name in options.algorithms or ALGORITHMS
        }
        threads = {THREADS: max(1, (os.cpu_count() or 1) // options.jobs)}
        common = with_recipes([*options.given.recipes, RECIPE], threads | dict(map(parse_assignment, options.given.assignments)))
        for seed in options.seeds:
            for name in variants:
                held.enter_context(only_flow(root, run_name(name, seed)))
        workspaces = {
            (name, seed): prepare_workspace(
                root, run_name(name, seed), {**common, **overrides, "seed": seed}, update=options.update, free=[THREADS]
            )
            for seed in options.seeds
            for name, overrides in variants.items()
        }
    except ConfigError as error:
        print(error, file=sys.stderr)
        return REFUSED
    first = [workspaces[next(iter(variants)), seed] for seed in options.seeds]
    last = "evaluate" if options.methods else "train_policy"
    with ThreadPoolExecutor(options.jobs) as pool:
        failed = [name for name in pool.map(lambda w: _repro(w, SHARED), first) if name]
        if not failed:
            failed = [name for name in pool.map(lambda w: _repro(w, last), workspaces.values()) if name]
    if failed:
        print(f"compare: expected every run to succeed, got failures in {', '.join(failed)}; see compare.log there", file=sys.stderr)
        return 1
    for workspace in workspaces.values():
        commit_results(workspace, f"Results of run {workspace.name}", result_paths(workspace), input_paths(workspace))
    FIGURE.parent.mkdir(exist_ok=True)
    confidence = load_params(next(iter(workspaces.values())) / "params.yaml").evaluation.confidence
    if options.methods:
        evaluations = [
            (name, seed, json.loads((workspace / EVALUATION_METRICS).read_text())) for (name, seed), workspace in workspaces.items()
        ]
        text = methods_table(evaluations, confidence)
        METHODS_TABLE.write_text(text, encoding="utf-8")
        print(f"{text}\nTable: {METHODS_TABLE}")
        return 0
    runs = [Run.read(workspace, algorithm, seed) for (algorithm, seed), workspace in workspaces.items()]
    draw(runs, FIGURE)
    TABLE.write_text(table(runs, confidence), encoding="utf-8")
    print(f"{table(runs, confidence)}\nFigure: {FIGURE}  table: {TABLE}")
    return 0


def method_overrides(name: str) -> dict[str, Any]:
    """Overrides for a method and its loss, such as `dpo:ipo`.

    Raises:
        ConfigError: the method is unknown, or its loss can't be chosen.
    """
    method, colon, loss = name.partition(":")
    if method not in get_args(Method) or (colon and method not in ("dpo", "kto")):
        raise ConfigError(
            f"--methods {name}: expected one of {', '.join(get_args(Method))}, and dpo or kto with a loss as in dpo:ipo; correct it"
        )
    return {"alignment.method": method} | ({f"{method}.loss": loss} if colon else {})


def run_name(variant: str, seed: int) -> str:
    """Return the name of the run of a variant with a seed."""
    return f"compare-{slug(f'{variant}-{seed}')}"


def _repro(workspace: Path, stage: str) -> str | None:
    """Run the stages up to `stage`, with output in the worktree's compare.log. Returns the run's name if a stage failed, else None."""
    print(f"{workspace.name}: {stage} ...", flush=True)
    note(workspace, outcome="running", stage=stage, message="", until=None)
    with (workspace / "compare.log").open("a") as log:
        done = subprocess.run(
            module_command("dvc", "repro", stage),
            cwd=workspace,
            env=stage_environment(workspace),
            stdout=log,
            stderr=subprocess.STDOUT,
            preexec_fn=partial(end_with_parent, os.getpid()),  # the parent thread lives until all runs have ended
            check=False,
        )
    failed = {"outcome": "failed", "message": "see compare.log in its folder"}
    note(workspace, **(failed if done.returncode else {"outcome": "done", "until": stage}))
    return workspace.name if done.returncode else None


main = partial(run_module, "sweep")

if __name__ == "__main__":
    sys.exit(main())
