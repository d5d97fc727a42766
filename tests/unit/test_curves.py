"""CORRECTNESS, resume: the curves of a resumed run are those of an uninterrupted one, and lose no row to a kill."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from rlhf_core.curves import MetricsLog

COLUMNS = ("step", "phase", "loss", "heldout_loss")


def opened(folder: Path, first_step: int = 0) -> MetricsLog:
    return MetricsLog(folder / "curves.csv", COLUMNS, timings=folder / "timings.csv", first_step=first_step)


def log_steps(curves: MetricsLog, steps: range) -> None:
    for step in steps:
        row = {"step": step, "phase": "sft", "loss": 1.23456789 / (step + 1)}
        curves.log(row | ({"heldout_loss": float(step)} if step % 2 else {}), {"seconds": 0.5 + step})


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_rows_as_they_are_written(tmp_path: Path):
    curves = opened(tmp_path)
    log_steps(curves, range(2))
    curves.close()
    assert (tmp_path / "curves.csv").read_text() == "step,phase,loss,heldout_loss\n0,sft,1.23457,\n1,sft,0.617284,1\n"
    assert (tmp_path / "timings.csv").read_text() == "step,seconds\n0,0.5\n1,1.5\n"


def test_a_value_that_is_missing_is_an_empty_cell_however_it_is_missing(tmp_path: Path):
    curves = opened(tmp_path)
    curves.log({"step": 0, "phase": "rl", "loss": float("nan"), "heldout_loss": float("inf")}, {"seconds": float("nan")})
    curves.close()
    assert (tmp_path / "curves.csv").read_text() == "step,phase,loss,heldout_loss\n0,rl,,inf\n"
    assert (tmp_path / "timings.csv").read_text() == "step,seconds\n0,\n"


def test_a_resumed_file_equals_an_uninterrupted_one(tmp_path: Path):
    for folder, parts in (("whole", [range(6)]), ("resumed", [range(4), range(3, 6)])):
        for part in parts:
            curves = opened(tmp_path / folder, first_step=part.start)
            log_steps(curves, part)
            curves.close()
    for name in ("curves.csv", "timings.csv"):
        assert (tmp_path / "resumed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_a_kill_right_after_resuming_loses_no_row(tmp_path: Path):
    curves = opened(tmp_path)
    log_steps(curves, range(4))
    curves.close()
    reopened = opened(tmp_path, first_step=3)  # nothing is written or closed: the process is killed here
    assert [r["step"] for r in rows(tmp_path / "curves.csv")] == ["0", "1", "2"]
    assert [r["step"] for r in rows(tmp_path / "timings.csv")] == ["0", "1", "2"]
    reopened.close()


def test_every_row_is_on_disk_at_once(tmp_path: Path):
    curves = opened(tmp_path)
    log_steps(curves, range(1))
    assert len(rows(tmp_path / "curves.csv")) == len(rows(tmp_path / "timings.csv")) == 1
    curves.close()


def test_a_torn_last_row_is_dropped(tmp_path: Path):
    curves = opened(tmp_path)
    log_steps(curves, range(13))
    curves.close()
    text = (tmp_path / "curves.csv").read_text()
    (tmp_path / "curves.csv").write_text(text[: text.index("12,sft") + 1])  # a "1" is left of row 12
    opened(tmp_path, first_step=12).close()
    assert [r["step"] for r in rows(tmp_path / "curves.csv")] == [str(s) for s in range(12)]


def test_an_unknown_column_is_refused(tmp_path: Path):
    curves = opened(tmp_path)
    with pytest.raises(ValueError, match="'los'"):
        curves.log({"step": 0, "los": 1.0}, {})
    curves.close()


def test_timings_are_nowhere_if_nobody_wants_them(tmp_path: Path):
    curves = MetricsLog(tmp_path / "curves.csv", COLUMNS, timings=None, first_step=0)
    log_steps(curves, range(2))
    curves.close()
    assert [p.name for p in tmp_path.iterdir()] == ["curves.csv"]
