"""docs/tables/kills.csv has the kills that the matrix draws, and keeps those of runs that weren't made again."""

from __future__ import annotations

import csv
import random
from pathlib import Path

from tools.kill_matrix import TABLE, Kills, Row, write_table


def read(table: Path) -> list[dict[str, str]]:
    with table.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_the_table_has_the_kills_of_each_run_as_its_seed_draws_them():
    rows = read(TABLE)
    for schedule, seed, run in sorted({(row["schedule"], row["seed"], row["run"]) for row in rows}):
        drawn = Kills(random.Random(f"{seed} {schedule} {run}")).rows
        found = [(r["killed"], int(r["after row"])) for r in rows if (r["schedule"], r["seed"], r["run"]) == (schedule, seed, run)]
        assert found == drawn, (schedule, run)


def test_a_run_that_is_made_again_leaves_the_rows_of_the_others(tmp_path: Path):
    (table := tmp_path / "kills.csv").write_bytes(TABLE.read_bytes())
    write_table([Row("free", 0, "agent", 7, ["a weight differs"])], 0, table)
    written, made = read(table), ("free", "0", "0")
    assert [row["result"] for row in written if (row["schedule"], row["seed"], row["run"]) == made] == ["a weight differs"]
    others = [row for row in read(TABLE) if (row["schedule"], row["seed"], row["run"]) != made]
    assert len(others) > 30 and [row for row in written if (row["schedule"], row["seed"], row["run"]) != made] == others
