"""Runs jobs on nodes that share no disk: python -m tools.faults.nodes_matrix [--only WORD ...] [--folder FOLDER] [--table FILE].

Trains the small chain's models on network namespaces of this machine (tools/faults/namespaces.py), with a folder as the storage address:
curves must be those of one machine, a lost node must end as docs/faults.md says, and a node that can't work must be refused. Writes
docs/tables/nodes.csv; docs/cluster.md describes it. Needs root. Exits with 1 if a cell has a problem.
"""

from __future__ import annotations

import argparse
import csv
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
from small_chain import (
    ACTOR_TITLES,
    PYTORCH_ROLLOUTS,
    SMALL,
    SMALL_CLERK,
    begin,
    change_params,
    copy_chain,
    log_of,
    make_chain,
    output_of,
    run,
)
from small_workspace import command_line, wait_until

from rlhf_core.stage.run import CRASHED
from tools.faults.namespaces import PYTHON, Nodes, unavailable
from tools.faults.transfer import Held, held_transfer

TABLE = Path(__file__).parents[2] / "docs/tables/nodes.csv"
FOLDER = Path(__file__).parents[2] / "scratch/nodes"
DEADLINE = 600.0
MAX_DIFFERENCE = 1e-3  # of a value of the curves, or of 1 where the values are smaller; they have six digits
SFT = {"sft": {"steps": 12, "checkpoint_every": 4, "zero_stage": 2, "ranks": 2, "pretrain": {"steps": 4}}}
RL = {"rl": {"steps": 6, "checkpoint_every": 2, "max_replacements": 2, "trainer": {"ranks": 2, "zero_stage": 2}}}
LONG = {"sft": {"steps": 80}}  # a node is lost in the middle
ENGINE, RANK = ACTOR_TITLES["rollout"], ACTOR_TITLES["trainer"]
ONE_RANK = {"rl": {"trainer": {"ranks": 1, "zero_stage": 0}, "steps": 30}}


@dataclass(frozen=True)
class Cell:
    """A cell of the matrix: a stage to train on nodes, and the expected result.

    changes: changes of the params of the stage `module`. alone: changes of the run on one machine. cpus: CPUs of each node.
    lose: the node with a process whose command line matches this expression is lost after a checkpoint, and with in_transfer between the
    first and the last layer of a weight transfer. ends: by then expected exit code.
    told: text that the stage's output must have.
    """

    name: str
    module: str
    changes: Sequence[dict[str, Any]]
    alone: Sequence[dict[str, Any]] = ()
    cpus: Sequence[int] = (1, 1)
    lose: str | None = None
    in_transfer: bool = False
    ends: int = 0
    told: str = ""
    missing: Sequence[Path] = ()


CELLS = (
    Cell("SFT: a rank on each of two nodes", "tasks.train_sft", [SFT], [{"sft": {"ranks": 1, "zero_stage": 0}}]),
    Cell("PPO: two ranks and an engine on three nodes", "tasks.train_rl", [RL], [], (1, 1, 1)),
    Cell("SFT: a rank's node is lost, and another one comes", "tasks.train_sft", [SFT, LONG], [], lose=ACTOR_TITLES["rank"], ends=CRASHED),
    Cell("PPO: the engine's node is lost, and another is free", "tasks.train_rl", [RL, ONE_RANK], [], (1, 1, 1), lose=ENGINE),
    Cell("PPO: the rank's node is lost, and another one comes", "tasks.train_rl", [RL, ONE_RANK], [], lose=RANK, ends=CRASHED),
    Cell(
        *("PPO: the engine's node is lost in a weight transfer, and another is free", "tasks.train_rl", [RL, ONE_RANK], [], (0, 1, 1, 1)),
        lose=ENGINE,
        in_transfer=True,
    ),
    Cell(
        *("PPO: the rank's node is lost in a weight transfer, and another one comes", "tasks.train_rl", [RL, ONE_RANK], [], (0, 1, 1)),
        lose=RANK,
        in_transfer=True,
        ends=CRASHED,
    ),
    Cell(
        *("a node lacks a package", "tasks.train_sft", [SFT]),
        ends=1,
        told="expected the packages of the stage's machine, got other ones: peft is missing",
        missing=[next(PYTHON.glob("lib/python*/site-packages/peft-*.dist-info")), next(PYTHON.glob("lib/python*/site-packages/peft"))],
    ),
    Cell(
        *("a node lacks the network interface", "tasks.train_sft", [SFT, {"cluster": {"network_interface": "eth7"}}]),
        ends=1,
        told="cluster.network_interface: expected one that every node has, got eth7, where node node",
    ),
)


@dataclass
class Result:
    cell: Cell
    curve_difference: str = ""
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)


class Lab:
    """The small chain up to the gate, made once in a folder, and copies of it."""

    def __init__(self, folder: Path):
        self._folder, self._chain = folder, folder / "chain"
        if not (self._chain / "metrics/gate.json").exists():
            shutil.rmtree(self._chain, ignore_errors=True)
            make_chain(self._chain, SMALL, PYTORCH_ROLLOUTS, {"data": {"sources": {0: {"clerk": SMALL_CLERK}}}})
            code, printed = run(self._chain, "dvc", "repro", "gate_reward", deadline=2 * DEADLINE)
            if code:
                raise RuntimeError(f"small chain: expected to end with 0, got {code}:\n{printed[-3000:]}")

    def copy(self, name: str, *changes: dict[str, Any]) -> Path:
        workspace = self._folder / name
        shutil.rmtree(workspace, ignore_errors=True)
        log_of(workspace).unlink(missing_ok=True)
        copy_chain(self._chain, workspace)
        change_params(workspace, *changes)
        return workspace

    @contextmanager
    def nodes(self, cell: Cell) -> Iterator[Nodes]:
        folder = self._folder / "nodes"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        nodes = Nodes(folder, cell.cpus, hidden=[self._folder], missing=cell.missing)
        before = {name: os.environ.get(name) for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH")}
        try:
            nodes.start()
            os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(nodes.folder / "token"))
            yield nodes
        finally:
            nodes.stop()
            for name, value in before.items():
                os.environ.pop(name)
                os.environ.update({name: value} if value is not None else {})


def of_cluster(workspace: Path, nodes: Nodes) -> None:
    """Set a workspace's params so that its jobs run on the nodes."""
    change_params(workspace, {"cluster": {"address": "ADDRESS", "storage": f"file://{nodes.storage.resolve()}"}})
    params = workspace / "params.yaml"
    params.write_text(params.read_text().replace("ADDRESS", json.dumps(nodes.address)))  # DVC needs quotes around a colon


def try_out(cell: Cell, lab: Lab) -> Result:
    result, began = Result(cell), time.monotonic()
    workspace = lab.copy("cluster", *cell.changes)
    with lab.nodes(cell) as nodes:
        of_cluster(workspace, nodes)
        if cell.lose is not None:
            lose(cell, nodes, workspace, result)
        elif (code := run(workspace, cell.module, deadline=DEADLINE)[0]) != cell.ends:
            result.problems.append(f"expected exit code {cell.ends}, got {code}")
        if cell.told and cell.told not in output_of(workspace):
            result.problems.append(f"expected to be told: {cell.told}")
        left = [path for path in nodes.storage.glob("*/*") if path.parts[-2].startswith("train_")]
        if not cell.told and left:
            result.problems.append(f"expected an empty storage but for inputs, got {left[0]}")
    if not cell.told and not result.problems:
        alone = lab.copy("alone", *cell.changes, *cell.alone)
        if run(alone, cell.module, deadline=DEADLINE)[0]:
            result.problems.append("the run on one machine failed")
        else:
            compare(workspace, alone, cell, result)
    result.seconds = time.monotonic() - began
    if result.problems:
        print(output_of(workspace)[-4000:], flush=True)
    return result


def lose(cell: Cell, nodes: Nodes, workspace: Path, result: Result) -> None:
    """Lose a node in the middle, and run the stage again if that ended it."""
    phase = "sft" if cell.module.endswith("sft") else "checkpoints"
    stage = begin(workspace, cell.module)
    try:
        manifests = lambda: list(nodes.storage.glob(f"train_*/*/scratch/*/*/{phase}/step-*/manifest.json"))  # noqa: E731
        wait_until(lambda: bool(manifests()) or stage.poll() is not None, DEADLINE, "a checkpoint")
        with in_transfer(nodes, stage) if cell.in_transfer else nullcontext():
            number = next(n for n in range(1, len(cell.cpus)) if processes(nodes, cell.lose, [n]))
            nodes.lose(number)
        if (code := stage.wait(DEADLINE)) != cell.ends:
            result.problems.append(f"expected exit code {cell.ends} after the loss, got {code}")
    finally:
        stage.kill()
    if cell.ends:
        nodes.replace(number)
        if (code := run(workspace, cell.module, deadline=DEADLINE)[0]) != 0:
            result.problems.append(f"expected exit code 0 of the second run, got {code}")
        if "resuming from the checkpoint" not in output_of(workspace):
            result.problems.append("expected to resume from the storage's checkpoint")


def in_transfer(nodes: Nodes, stage: subprocess.Popen) -> AbstractContextManager[Held]:
    """Return a context that holds the stage's next weight transfer in the middle."""
    everywhere = range(len(nodes.cpus))
    return held_transfer(
        lambda role: processes(nodes, ACTOR_TITLES[role], everywhere), ended=lambda: stage.poll() is not None, deadline=DEADLINE
    )


def processes(nodes: Nodes, expression: str, numbers: Iterable[int]) -> list[psutil.Process]:
    """The processes on some nodes whose command lines match."""
    found = []
    for pid in (pid for number in numbers for pid in nodes.pids(number)):
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            if re.search(expression, " ".join(command_line(process))):
                found.append(process)
    return found


def compare(workspace: Path, alone: Path, cell: Cell, result: Result) -> None:
    name = f"plots/{'train_sft' if cell.module.endswith('sft') else 'train_policy'}.csv"
    mine, theirs = (pd.read_csv(folder / name).select_dtypes("number") for folder in (workspace, alone))
    if mine["step"].tolist() != theirs["step"].tolist():
        result.problems.append(f"expected steps {theirs['step'].tolist()}, got {mine['step'].tolist()}")
        return
    difference = float(((mine - theirs).abs() / theirs.abs().clip(lower=1.0)).max().max())
    result.curve_difference = f"{difference:.2g}"
    if not difference <= MAX_DIFFERENCE:
        result.problems.append(f"expected curves within {MAX_DIFFERENCE}, got a difference of {difference:.2g}")


def write_table(path: Path, results: Sequence[Result], cells: Sequence[Cell]) -> None:
    """Write the results as rows in the order of `cells`; a cell without a result keeps its row in the table."""
    rows: dict[str, list[str]] = {}
    if path.exists():
        with path.open(newline="", encoding="utf-8") as file:
            rows = {row[0]: row for row in csv.reader(file)}
    for r in results:
        told = "; ".join(r.problems) or "passed"
        rows[r.cell.name] = [r.cell.name, str(len(r.cell.cpus)), r.curve_difference, f"{r.seconds:.0f}", told]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["cell", "nodes", "curve_difference", "seconds", "result"])
        writer.writerows(rows[cell.name] for cell in cells if cell.name in rows)


def main(arguments: Sequence[str] | None = None, *, cells: Sequence[Cell] = CELLS, show: Callable[[str], None] = print) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--only", nargs="+", metavar="WORD", help="cells whose name has one of these words")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="of all files; default: scratch/nodes")
    parser.add_argument("--table", type=Path, help=f"write the results there, such as {TABLE}; other rows stay")
    chosen = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    if (reason := unavailable()) is not None:
        parser.error(f"this machine: expected network namespaces, got none: {reason}")
    lab, results = Lab(chosen.folder), []
    for cell in cells:
        if not chosen.only or any(word in cell.name for word in chosen.only):
            results.append(try_out(cell, lab))
            show(f"{cell.name}: {'; '.join(results[-1].problems) or 'passed'} {results[-1].curve_difference} ({results[-1].seconds:.0f} s)")
    if chosen.table is not None:
        write_table(chosen.table, results, cells)
    return int(any(r.problems for r in results))


if __name__ == "__main__":
    sys.exit(main())
