"""Runs the fault matrix: python -m tools.faults [--only WORD ...] [--seed N] [--list]; docs/faults.md describes it.

Each cell is a separate small chain in which one stage is disturbed and then run again. Needs root for the small and read-only disks, and
gcc for the clock. Cells run one at a time. Exit code 1: a cell has a problem.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import logging
import random
import re
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from small_chain import DEADLINE, begin, change_params, log_of, output_of, run

from tools.faults.cells import Cell, all_cells
from tools.faults.lab import VARIANTS, Laboratory, Scene, Watch, leftovers, locks_held, same_result
from tools.faults.server import ServerCell, end_all, server_cells, try_out_server

log = logging.getLogger("faults")
EXCERPT = 220  # characters of a printed line


@dataclass(frozen=True)
class Row:
    """The result of a cell.

    printed: the expected message. left: leftovers. problems: empty if the cell passed.
    """

    cell: str
    stage: str
    process: str
    fault: str
    seed: int
    exit_code: int
    printed: str
    left: str
    result: str
    seconds: float
    problems: list[str]


def try_out(cell: Cell, laboratory: Laboratory, seed: int) -> Row:
    workspace = laboratory.workspace(cell.name, cell.stage, cell.variant) if cell.again else laboratory.copy(cell.name, cell.variant)
    if cell.timeout is not None:
        change_params(workspace, {"flow": {"stage_timeout": cell.timeout}})
    started, watch = time.monotonic(), Watch(workspace)
    repro = ("dvc", "repro", "--single-item", cell.stage)
    with watch.watching():
        with contextlib.ExitStack() as prepared:
            if cell.prepare:
                prepared.callback(cell.prepare(workspace, cell.stage))
            child = begin(workspace, *(("flows.full_pipeline",) if cell.flow else repro))
            prepared.callback(child.kill)
            undo = cell.strike(Scene(workspace, cell.stage, child, random.Random(f"{seed} {cell.name}")))
            code = child.wait(timeout=DEADLINE)
            if cell.ends_first:
                prepared.close()
            left = leftovers(workspace, watch)
            undo()
        again, _ = run(workspace, *repro)
    problems = [
        *([] if (code == 0) == cell.survives else [f"expected it to {'succeed' if cell.survives else 'fail'}, got exit code {code}"]),
        *(f"left: {line}" for line in left),
        *([] if again == 0 else [f"run again: exit code {again}"]),
        *(f"more than one {role} at once: {count}" for role, count in watch.trainers.items() if count > allowed(role, cell)),
        *(f"lock: {name}" for name in locks_held(workspace)),
        *([] if not leftovers(workspace, watch) else ["left after the second run"]),
    ]
    differs = same_result(workspace, laboratory.undisturbed(cell.variant), cell.stage)
    line = first_match(workspace, cell.message)
    problems += [differs] if differs else []
    problems += [] if line else [f"expected a line with {cell.message!r}"]
    result = "the same" if differs is None else differs
    return Row(
        *(cell.name, cell.stage, cell.process, cell.fault, seed, code, line or "", "; ".join(left) or "nothing", result),
        seconds=round(time.monotonic() - started, 1),
        problems=problems,
    )


def try_out_server_cell(cell: ServerCell, folder: Path, seed: int) -> Row:
    workspace, started = folder / cell.name, time.monotonic()
    shutil.rmtree(workspace, ignore_errors=True)
    log_of(workspace).unlink(missing_ok=True)
    try:
        outcome = try_out_server(cell, workspace)
    finally:
        end_all(workspace)
    line = first_match(workspace, cell.message) if cell.message else "nothing: it continues"
    problems = outcome.problems + ([] if line else [f"expected a line with {cell.message!r}"])
    result = "not the same" if any("models/sft" in p for p in problems) else "the same"
    left = "; ".join(outcome.left) or "nothing"
    seconds = round(time.monotonic() - started, 1)
    return Row(cell.name, cell.stage, cell.process, cell.fault, seed, outcome.exit_code, line or "", left, result, seconds, problems)


def allowed(role: str, cell: Cell) -> int:
    return 1 if role == "driver" else VARIANTS[cell.variant].ranks


def first_match(workspace: Path, pattern: str) -> str | None:
    """The first printed line that matches, without the workspace's path and colours."""
    for line in output_of(workspace).splitlines():
        if re.search(pattern, line):
            plain = line.replace(f"{workspace}/", "").replace(str(workspace), ".")
            return re.sub(r"\x1b\[[0-9;]*m", "", plain).strip()[:EXCERPT]
    return None


def write_table(results: Path, table: Path, cells: Sequence[Cell | ServerCell]) -> None:
    """Write the newest row of each cell, in the order of `cells`; a cell without results keeps its row in the table.

    Process, host and job ids differ from run to run and are replaced.
    """
    newest = {row["cell"]: row for row in map(json.loads, results.read_text().splitlines())}
    rows: dict[tuple[str, ...], list[str]] = {}
    if table.exists():
        with table.open(encoding="utf-8", newline="") as file:
            rows = {tuple(row[:3]): row for row in csv.reader(file)}
    for row in newest.values():
        printed = re.sub(r"process \d+ on [0-9.]+", "process N on HOST", re.sub(r"rlhf-[0-9a-f]{12}-[0-9a-f]{8}", "ID", row["printed"]))
        shown = (row["stage"], row["process"], row["fault"])
        rows[shown] = [*shown, str(row["exit_code"]), printed, row["left"], row["result"], "; ".join(row["problems"])]
    with table.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["stage", "process or file", "fault", "exit code", "printed", "left", "next run", "problems"])
        writer.writerows(row for cell in cells if (row := rows.get((cell.stage, cell.process, cell.fault))))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.faults", description="Run the fault matrix.")
    parser.add_argument("--only", nargs="*", default=[], metavar="WORD", help="cells whose name has each of these words")
    parser.add_argument("--seed", type=int, default=0, help="decides when a fault happens, and in which of several processes")
    parser.add_argument("--list", action="store_true", help="print the cells' names and end")
    parser.add_argument("--folder", type=Path, default=Path("scratch/faults"), help="for the workspaces (default: %(default)s)")
    parser.add_argument("--table", type=Path, help="run no cell; write the newest results in --folder into this CSV file; other rows stay")
    parser.add_argument("--keep", action="store_true", help="keep the workspaces of cells that passed")
    arguments = parser.parse_args()
    cells = [cell for cell in [*all_cells(), *server_cells()] if all(word in cell.name for word in arguments.only)]
    if not cells:
        parser.error(f"--only: expected words of a cell's name, got {' '.join(arguments.only)}; see --list")
    if arguments.list:
        sys.stdout.write("\n".join(cell.name for cell in cells) + "\n")
        return 0
    results = arguments.folder.resolve() / "results.jsonl"
    if arguments.table and not results.is_file():
        parser.error(f"--table: expected results of earlier runs in {results}, got no such file; run cells first, without --table")
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    folder = arguments.folder.resolve()
    laboratory, failed = Laboratory(folder), 0
    for cell in [] if arguments.table else cells:
        try:
            if isinstance(cell, ServerCell):
                row = try_out_server_cell(cell, folder, arguments.seed)
            else:
                row = try_out(cell, laboratory, arguments.seed)
        except Exception as error:  # a failure of this harness; the next cell may run
            log.error("%s: could not be run", cell.name, exc_info=error)
            failed += 1
            continue
        with (folder / "results.jsonl").open("a") as file:
            file.write(json.dumps(asdict(row)) + "\n")
        failed += bool(row.problems)
        log.info("%s: %s (%.0f s)%s", cell.name, "NOT OK" if row.problems else "ok", row.seconds, "".join(f"\n  {p}" for p in row.problems))
        if not row.problems and not arguments.keep:
            shutil.rmtree(folder / cell.name)
    if arguments.table:
        write_table(folder / "results.jsonl", arguments.table, [*all_cells(), *server_cells()])
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
