"""The tables of the fault matrix and of the one on nodes, made from results of earlier runs."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

from tools.faults import nodes_matrix
from tools.faults.__main__ import write_table
from tools.faults.cells import all_cells

ROOT = Path(__file__).parents[3]


def test_a_table_without_results_is_refused(tmp_path):
    folder = tmp_path / "nothing"
    command = [sys.executable, "-m", "tools.faults", "--table", str(tmp_path / "table.csv"), "--folder", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert f"--table: expected results of earlier runs in {folder}/results.jsonl, got no such file; run cells first" in done.stderr
    assert not folder.exists() and not (tmp_path / "table.csv").exists()


def rows_of(table: Path) -> list[list[str]]:
    with table.open(newline="") as file:
        return list(csv.reader(file))[1:]


def test_new_results_take_the_place_of_their_rows_only(tmp_path):
    first, second = all_cells()[:2]
    results, table = tmp_path / "results.jsonl", tmp_path / "table.csv"

    def run(cell, printed: str) -> None:
        row = {"cell": cell.name, "stage": cell.stage, "process": cell.process, "fault": cell.fault, "exit_code": -9, "printed": printed}
        results.write_text(json.dumps(row | {"left": "nothing", "result": "the same", "problems": []}) + "\n")
        write_table(results, table, all_cells())

    run(second, "ended by process 77 on 10.0.0.1")
    run(first, "old")
    run(first, "new")
    assert [row[4] for row in rows_of(table)] == ["new", "ended by process N on HOST"]


def test_new_results_of_nodes_take_the_place_of_their_rows_only(tmp_path):
    first, second = nodes_matrix.CELLS[:2]
    for result in (
        nodes_matrix.Result(second, "0", 7.0),
        nodes_matrix.Result(first, "0", 8.0, ["it broke"]),
        nodes_matrix.Result(first, "0", 9.0),
    ):
        nodes_matrix.write_table(tmp_path / "table.csv", [result], nodes_matrix.CELLS)
    assert [row[0] for row in rows_of(tmp_path / "table.csv")] == [first.name, second.name]
    assert [row[3:] for row in rows_of(tmp_path / "table.csv")] == [["9", "passed"], ["7", "passed"]]
