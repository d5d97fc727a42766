"""Runs the resume matrix: python -m tools.resume_matrix [--only WORD ...] [--seed N] [--folder F] [--list]; docs/resume.md describes it.

Each cell runs a real training stage of a small chain twice: once undisturbed, and once killed by SIGKILL after a step that the seed draws
and then run again. All state digests, the final weights, curves and metrics of both must be the same. Stages on one rank are forked from
one process that has imported everything, and killed. Ray jobs (RL, other stages on two ranks) share one Ray head, and both runs of a cell
start at the same time; a stage that is killed has a head of its own, which ends with it. Exits with 1 when a cell fails.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import importlib
import json
import multiprocessing
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import psutil

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "integration"))
from small_chain import SMALL, SMALL_CLERK, change_params, make_chain, run

from rlhf_core.algorithms.online import ALGORITHMS
from rlhf_core.checkpoint.digest import differences, read_digest
from rlhf_core.paths import GATE_METRICS, POLICY_MODEL, REWARD_MODEL, SFT_MODEL, STATE_DIGESTS

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "docs/tables/resume.csv"
LIMIT = 600.0  # seconds for one run of a stage
CODE = ("rlhf_core", "tasks", "rewards", "flows", "rounds", "dvc.yaml")
OUTS = {"train_sft": str(SFT_MODEL), "train_reward": str(REWARD_MODEL), "train_policy": str(POLICY_MODEL)}
LORA = {"rank": 4, "alpha": 8.0, "dropout": 0.0, "target_modules": "all-linear"}
RL = {  # everything that has a state is on: an adaptive coefficient, running statistics, the best policy, monitors
    "steps": 6,
    "samples_per_step": 16,
    "minibatch_size": 8,
    "checkpoint_every": 2,
    "kl": {"target": 1.0, "horizon": 500},
    "reward": {"scorers": {0: {"normalization": "running"}}},
    "evaluation": {"every": 2, "prompts": 8, "keep_best": True},
}
SHORT = {"steps": 14, "batch_size": 8, "checkpoint_every": 3, "eval_every": 4}
PRETRAIN = {"pretrain": {"steps": 8, "batch_size": 8}}
AVERAGED = {"gradient_checkpointing": True, "ema_decay": 0.9, "keep_best": True}
LABELLED = {"label_by": "preference", "levels": 2, "wanted": 1}
SAMPLED = {"sampling": {"backend": "pytorch", "prompts": 64, "samples_per_prompt": 2, "max_new_tokens": 16}}
Victim = Literal["stage", "driver", "rank"]
JOB_PROCESSES = {"driver": r"-m rlhf_core\.stage\.driver ", "rank": "ray::(Rank|training[.])"}


@dataclass(frozen=True)
class Cell:
    """A training stage that is killed and run again.

    Args:
        changes: changes laid over the small chain's params.
        steps: number of rows of its curves.
        victim: process that is killed, at most `delay` seconds after a row: before, during or after a checkpoint.
        job: whether the stage is a Ray job.
    """

    name: str
    stage: str
    module: str
    changes: dict[str, Any]
    steps: int
    victim: Victim = "stage"
    delay: float = 0.1
    job: bool = False


@dataclass(frozen=True)
class Row:
    """The result of a cell.

    problems: empty if nothing differs.
    """

    cell: str
    killed: str
    killed_after: int
    resumed_from: str
    digests: int
    seconds: float
    problems: list[str] = field(default_factory=list)


def all_cells() -> list[Cell]:
    """All cells, those that cover most first."""
    supervised = []
    for zero in (0, 2, 3):
        section = {"zero_stage": zero}
        supervised.append(sft_cell(f"ZeRO {zero}", section))
        supervised.append(reward_cell(f"ZeRO {zero}", section))
        supervised += [policy_cell(method, f"ZeRO {zero}", section) for method in ("dpo", "kto")]
    lora = {"lora": LORA | {"dropout": 0.1}, "pretrain": {"steps": 4, "batch_size": 8}}
    supervised.append(replace(sft_cell("LoRA", lora), steps=18))
    supervised.append(sft_cell("recomputed layers, averaged weights, keep_best", AVERAGED))
    supervised.append(sft_cell("ZeRO 2, optimizer on the host", {"zero_stage": 2, "offload_optimizer": True}))
    ensemble, members = reward_cell("ensemble of 2", {"ensemble": 2}), {"rl": {"reward": {"scorers": {0: {"members": 2}}}}}
    supervised.append(replace(ensemble, changes=ensemble.changes | members, steps=2 * ensemble.steps))
    supervised.append(policy_cell("conditional_sft", "by preference", LABELLED))
    supervised.append(policy_cell("rejection_sampling", "keep_best", SAMPLED | {"keep_best": True}))
    scores = {"ppo": {"critic_init": "reward_model"}, "reward": {"scorers": {0: {"normalization": "initial"}}}}
    alone = rl_cell("ppo", 1, 0)
    rl = [rl_cell("ppo", 2, 2), rl_cell("grpo", 1, 0), alone, rl_cell("ppo", 2, 0), rl_cell("ppo", 2, 3)]
    rl += [rl_cell("grpo", 1, 0, lora=True), rl_cell("grpo", 2, 2), rl_cell("ppo", 1, 0, ahead=True)]
    rl += [replace(alone, name=f"{alone.name}, the critic from scores", changes={"rl": alone.changes["rl"] | scores})]
    rl += [rl_cell(name, 1 + number % 2, 0, backend="pytorch") for number, name in enumerate(list(ALGORITHMS)[2:])]
    rl += [rl_cell("grpo", 1, 3), rl_cell("ppo", 1, 2), rl_cell("grpo", 1, 0, ahead=True)]
    rl += [rl_cell(name, 1, 0, one_step=True, backend="pytorch") for name in ("grpo", "ppo")]
    rl += [rl_cell(name, 2 - number % 2, 0, backend="pytorch") for number, name in enumerate(list(ALGORITHMS)[2:])]
    rl += [rl_cell("grpo", 2, 0, backend="pytorch"), *rl_options()]
    return [*supervised, *on_two_ranks(), *rl]


def rl_options() -> list[Cell]:
    """Cells for rewards by two scorers, the losses that no other cell has, and a curriculum."""
    vowel = {"name": "vowel", "kind": "regex", "pattern": "[aeiou]", "weight": 0.5}
    both = {"scorers": [{"name": "reward_model", "kind": "reward_model", "normalization": "running"}, vowel]}
    curriculum = {"by": "success", "scorer": "vowel", "half_life": 2.0}
    again = {"samples_per_step": 128, "minibatch_size": 64, "grpo": {"group_size": 2}, "reward": both, "curriculum": curriculum}
    options = {
        "GDPO of two scorers": ("gdpo", {"reward": both}, False),
        "DPPO by total variation, one step off policy": ("grpo", {"policy_loss": "dppo_tv"}, True),
        "DPPO by KL": ("grpo", {"policy_loss": "dppo_kl"}, False),
        "SAPO": ("grpo", {"policy_loss": "sapo"}, False),
        "curriculum": ("grpo", again, False),
        "curriculum, one step off policy": ("grpo", again, True),
    }
    made = []
    for name, (algorithm, changes, ahead) in options.items():
        cell = rl_cell(algorithm, 1, 0, ahead=ahead, backend="pytorch")
        made.append(replace(cell, name=f"{name}, PyTorch's rollouts", changes={"rl": cell.changes["rl"] | changes}))
    return made


def on_two_ranks() -> list[Cell]:
    """Cells for supervised stages as Ray jobs; each process of a job is the victim in some."""
    zero = {number: {"ranks": 2, "zero_stage": number} for number in (0, 2, 3)}
    cells: list[tuple[Victim, Cell]] = [
        ("rank", sft_cell("ZeRO 0", zero[0])),
        ("driver", sft_cell("ZeRO 2", zero[2])),
        ("stage", sft_cell("ZeRO 3", zero[3])),
        ("rank", sft_cell("ZeRO 3, recomputed layers, averaged weights, keep_best", zero[3] | AVERAGED)),
        ("driver", sft_cell("ZeRO 3, optimizer on the host", zero[3] | {"offload_optimizer": True})),
        ("rank", sft_cell("ZeRO 2, shared sequences", zero[2] | {"sequence_parallel": 2})),
        ("stage", reward_cell("ZeRO 2", zero[2])),
        ("driver", policy_cell("dpo", "ZeRO 3", zero[3])),
        ("rank", policy_cell("kto", "ZeRO 2", zero[2])),
        ("stage", policy_cell("conditional_sft", "ZeRO 2", zero[2] | LABELLED)),
        ("rank", policy_cell("rejection_sampling", "ZeRO 3", zero[3] | SAMPLED)),
    ]
    return [replace(c, name=c.name.replace(", ", ", 2 ranks, ", 1), victim=victim, job=True) for victim, c in cells]


def sft_cell(name: str, section: dict[str, Any]) -> Cell:
    return Cell(f"sft, {name}", "train_sft", "train_sft", {"sft": SHORT | PRETRAIN | section}, 22)


def reward_cell(name: str, section: dict[str, Any]) -> Cell:
    """A cell of one epoch over the small chain's pairs."""
    changes = {"reward": {"epochs": 1.0, "checkpoint_every": 3, "eval_every": 4} | section}
    return Cell(f"reward, {name}", "train_reward", "train_reward", changes, 12)


def policy_cell(method: str, name: str, section: dict[str, Any]) -> Cell:
    changes = {"alignment": {"method": method}, method: SHORT | section}
    return Cell(f"{method}, {name}", "train_policy", f"train_{method}", changes, SHORT["steps"])


def rl_cell(
    algorithm: str, ranks: int, zero: int, *, lora: bool = False, ahead: bool = False, one_step: bool = False, backend: str = "vllm"
) -> Cell:
    changes = RL | {"algorithm": algorithm, "trainer": {"ranks": ranks, "zero_stage": zero}, "lora": LORA if lora else None}
    changes["rollout"] = {"max_lag": int(ahead), "backend": backend}
    if one_step:
        changes["minibatch_size"] = RL["samples_per_step"]
    name = f"{algorithm}, {ranks} rank{'s' * (ranks > 1)}, ZeRO {zero}{', LoRA' * lora}{', one step off policy' * ahead}"
    name += ", one optimizer step a batch" * one_step + ", PyTorch's rollouts" * (backend == "pytorch")
    delay = 1.0 if backend == "vllm" else 0.2  # a step takes so long
    return Cell(name, "train_policy", "train_rl", {"rl": changes}, RL["steps"], victim="driver", delay=delay, job=True)


# A run of a stage


def make_workspace(base: Path, folder: Path, cell: Cell, address: str | None) -> Path:
    """A workspace with links to this checkout's code and the finished chain's data and models, and folders for the stage's own outs."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    shutil.copy(base / "params.yaml", folder)
    change_params(folder, cell.changes, {"checkpoints": {"keep_last": 1000}, "cluster": {"address": address, "threads": 1}})
    for path in (*(ROOT / name for name in CODE), base / "baselines.json"):
        (folder / path.name).symlink_to(path)
    for top in ("data", "checks", "models", "metrics"):
        (folder / top).mkdir()
        for path in (base / top).iterdir():
            if f"{top}/{path.name}" != OUTS[cell.stage] and path.stem != cell.stage:
                (folder / top / path.name).symlink_to(path)
    return folder


def run_stage(workspace: Path, cell: Cell, watch: Callable[[Path], bool] = lambda _: False) -> int:
    """Run a stage until it ends, or until `watch` returns True, which kills it. Return its exit code, or minus the signal's number.

    A Ray job starts a fresh process, because the client of a Ray head doesn't survive a fork.
    """
    if cell.job:
        with (workspace / "log").open("a") as log:
            command = [sys.executable, "-m", f"tasks.{cell.module}"]
            child = subprocess.Popen(command, cwd=workspace, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
    else:
        child = multiprocessing.get_context("fork").Process(target=_be_stage, args=(workspace, cell.module))
        child.start()
    until = time.monotonic() + LIMIT
    while True:
        code = child.poll() if isinstance(child, subprocess.Popen) else child.exitcode
        if code is not None:
            return code
        if time.monotonic() > until or watch(workspace):
            child.kill()
        time.sleep(0.004)


def _be_stage(workspace: Path, module: str) -> None:
    code = 99
    try:
        os.chdir(workspace)
        with open("log", "a") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        importlib.import_module(f"tasks.{module}").main()
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:  # of a forked process, which must not return
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def rows_done(workspace: Path) -> int:
    return max((path.read_bytes().count(b"\n") - 1 for path in workspace.glob("scratch/*/*/curves.csv")), default=0)


class Killer:
    """Kills a process of the stage `delay` seconds after row `after` of the curves.

    chance: random generator that chooses a rank.
    """

    def __init__(self, victim: Victim, after: int, delay: float, chance: random.Random):
        self._victim, self._after, self._delay, self._chance = victim, after, delay, chance
        self._at: float | None = None
        self.done = False

    def __call__(self, workspace: Path) -> bool:
        if self.done:
            return False
        if self._at is None and rows_done(workspace) >= self._after:
            self._at = time.monotonic() + self._delay
        if self._at is None or time.monotonic() < self._at:
            return False
        if self._victim != "stage":
            found = job_processes(workspace, JOB_PROCESSES[self._victim])
            if not found:  # the job has just ended, and the stage will
                return False
            self._chance.choice(found).kill()
        self.done = True
        return self._victim == "stage"


def job_processes(workspace: Path, pattern: str) -> list[psutil.Process]:
    """The processes of a workspace's job whose command line matches."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if re.search(pattern, " ".join(process.cmdline())) and process.cwd() == str(workspace):
                found.append(process)
    return found


# A cell


def try_out(cell: Cell, base: Path, folder: Path, seed: int, address: str | None) -> Row:
    """Run a cell undisturbed and killed, and return the row.

    Args:
        address: address of the head that jobs share.
    """
    started, drawn = time.monotonic(), random.Random(f"{seed} {cell.name}")
    whole = make_workspace(base, folder / "whole", cell, address)
    killed = make_workspace(base, folder / "killed", cell, None if cell.victim == "stage" else address)
    after = drawn.randrange(1, cell.steps)
    killer = Killer(cell.victim, after, drawn.uniform(0, cell.delay), drawn)
    with ThreadPoolExecutor() as aside:
        undisturbed = aside.submit(run_stage, whole, cell).result if cell.job else lambda: run_stage(whole, cell)
        problems = ["the stage ended before it was killed"] if run_stage(killed, cell, killer) == 0 else []
        reached = rows_done(killed)
        problems += [f"run again: exit code {code}"] if (code := run_stage(killed, cell)) else []
        problems += [f"undisturbed: exit code {code}"] if (code := undisturbed()) else []
    printed = (killed / "log").read_text(errors="replace") if (killed / "log").exists() else ""
    resumed = re.findall(r"(\w+): resuming from the checkpoint of step (\d+)", printed)
    number, differing = (0, []) if problems else compare(whole, killed, cell.stage)
    where = f"{resumed[-1][0]} {resumed[-1][1]}" if resumed else "the start"
    seconds = round(time.monotonic() - started)
    return Row(cell.name, cell.victim, reached, where, number, seconds, problems + differing)


def compare(whole: Path, killed: Path, stage: str) -> tuple[int, list[str]]:
    """The number of state digests, and the differences between the runs' digests, weights, curves and metrics."""
    found, problems = state_digests(whole, stage), []
    if found.keys() != state_digests(killed, stage).keys():
        problems.append(f"state digests of {sorted(found)} and of {sorted(state_digests(killed, stage))}")
    else:
        for name, path in found.items():
            differing = differences(read_digest(path), read_digest(state_digests(killed, stage)[name]))
            problems += [f"{name}: {differing[0]}"] if differing else []
    for name in (OUTS[stage], f"plots/{stage}.csv", f"metrics/{stage}.json"):
        if content(whole / name) != content(killed / name):
            problems.append(f"{name} differs")
    return len(found), problems


def state_digests(workspace: Path, stage: str) -> dict[str, Path]:
    top = workspace / STATE_DIGESTS / stage
    return {str(path.parent.relative_to(top)): path for path in sorted(top.rglob("digest.json"))}


def content(path: Path) -> dict[str, str]:
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    return {str(p.relative_to(path)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


# All of them


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.resume_matrix", description=__doc__)
    parser.add_argument("--only", nargs="*", default=[], help="words that a cell's name must have")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="of the chain and the results; kept, and continued if it exists")
    parser.add_argument("--list", action="store_true")
    chosen = parser.parse_args()
    cells = [cell for cell in all_cells() if all(word in cell.name for word in chosen.only)]
    if chosen.list:
        sys.stdout.write("\n".join(cell.name for cell in cells) + "\n")
        return 0
    with tempfile.TemporaryDirectory(prefix="rlm") as temporary:
        folder = (chosen.folder or Path(temporary)).resolve()
        results = folder / "results.json"
        rows = {row["cell"]: Row(**row) for row in json.loads(results.read_text())} if results.exists() else {}
        base = prepare(folder / "base")
        with ExitStack() as stack:
            address = None
            for cell in (c for c in cells if c.name not in rows):
                if cell.job and address is None:
                    from rlhf_core.engines.ray.cluster import local_head

                    address = stack.enter_context(local_head(cpus=16, start_timeout=120))
                place = folder / "cells" / cell.name.replace(", ", "-").replace(" ", "")
                row = try_out(cell, base, place, chosen.seed, address)
                rows[cell.name] = row
                results.write_text(json.dumps([asdict(r) for r in rows.values()], indent=1))
                sys.stdout.write(f"{row.cell}: {'; '.join(row.problems) or 'the same'} ({row.seconds:.0f} s)\n")
                sys.stdout.flush()
        write_table(rows, chosen.seed)
    return 1 if any(rows[cell.name].problems for cell in cells) else 0


def prepare(base: Path) -> Path:
    """Run the small chain up to the gate, and import what the stages need."""
    if not (base / GATE_METRICS).exists():
        shutil.rmtree(base, ignore_errors=True)
        base.mkdir(parents=True)
        code, printed = run(
            make_chain(base, SMALL, {"data": {"sources": {0: {"clerk": SMALL_CLERK}}}}), "dvc", "repro", "gate_reward", deadline=LIMIT
        )
        if code:
            raise RuntimeError(f"small chain: expected to reach the gate, got exit code {code}:\n{printed[-3000:]}")
    for name in (
        "deepspeed",
        "pandas",
        "transformers",
        "rlhf_core.trainers.preference.train",
        "rlhf_core.trainers.reward.train",
        "rlhf_core.trainers.sft.train",
    ):
        importlib.import_module(name)
    return base


def write_table(rows: dict[str, Row], seed: int) -> None:
    """Write one row for each cell, in the order of `all_cells`; a cell that wasn't run keeps its row."""
    with TABLE.open(encoding="utf-8", newline="") as file:
        written = {row[0]: row for row in csv.reader(file)}
    for row in rows.values():
        result = "; ".join(row.problems) or "same bits"
        written[row.cell] = [row.cell, str(seed), row.killed, str(row.killed_after), row.resumed_from, str(row.digests), result]
    with TABLE.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["cell", "seed", "killed", "after row", "resumed from", "digests compared", "result"])
        writer.writerows(written[cell.name] for cell in all_cells() if cell.name in written)


if __name__ == "__main__":
    sys.exit(main())
