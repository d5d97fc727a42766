"""CORRECTNESS, resume: the curves of a resumed run are those of an uninterrupted one, and lose no row to a kill."""

from __future__ import annotations

import csv
import html
import json
import re
from pathlib import Path

import pytest

from rlhf_core.config import TrackingConfig
from rlhf_core.tracking import TENSORBOARD_ROWS, MetricsLog

COLUMNS = ("step", "phase", "loss", "heldout_loss")
NOWHERE = TrackingConfig(tensorboard_dir=None, wandb_project=None)


def opened(folder: Path, first_step: int = 0, tracking: TrackingConfig = NOWHERE) -> MetricsLog:
    return MetricsLog(
        folder / "curves.csv", COLUMNS, timings=folder / "timings.csv", tracking=tracking, run_name="run", first_step=first_step
    )


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
    curves = MetricsLog(tmp_path / "curves.csv", COLUMNS, timings=None, tracking=NOWHERE, run_name="run", first_step=0)
    log_steps(curves, range(2))
    curves.close()
    assert [p.name for p in tmp_path.iterdir()] == ["curves.csv"]


def test_tensorboard_gets_the_numbers_and_forgets_what_is_done_again(tmp_path: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracking = TrackingConfig(tensorboard_dir=str(tmp_path / "events"), wandb_project=None)
    for part in (range(4), range(2, 5)):
        curves = opened(tmp_path, first_step=part.start, tracking=tracking)
        log_steps(curves, part)
        curves.close()
    events = EventAccumulator(str(tmp_path / "events" / "run")).Reload()
    assert set(events.Tags()["scalars"]) == {"loss", "heldout_loss", "seconds"}
    assert [(e.step, e.value) for e in events.Scalars("seconds")] == [(s, 0.5 + s) for s in range(5)]


TABLE = [
    {"step": 3, "prompt": "Sort | 4172.", "response": "<img src=x> *1247*\n[no](x)", "finished": True, "score": 0.5, "label": None},
    {"step": 3, "prompt": "Again", "response": "", "finished": False, "score": None, "label": "1"},
]


def test_tensorboard_gets_a_table_as_text_that_is_no_markdown(tmp_path: Path):
    from markdown import markdown
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    curves = opened(tmp_path, tracking=TrackingConfig(tensorboard_dir=str(tmp_path / "events"), wandb_project=None))
    curves.log_table("rollouts", TABLE * 20, step=3)
    curves.close()
    (event,) = EventAccumulator(str(tmp_path / "events" / "run")).Reload().Tensors("rollouts/text_summary")
    page = markdown(event.tensor_proto.string_val[0].decode(), extensions=["markdown.extensions.tables"])  # as TensorBoard does
    assert event.step == 3 and page.count("<tr>") == 1 + TENSORBOARD_ROWS
    assert "<img" not in page and "<em>" not in page and "<a " not in page
    cells = [html.unescape(cell) for cell in re.findall("<td>(.*?)</td>", page)[:6]]
    assert cells == ["3", "Sort | 4172.", "<img src=x> *1247*<br>[no](x)", "True", "0.5", ""]


def test_wandb_gets_a_table_of_each_step(tmp_path: Path, monkeypatch):
    for name, value in {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true"}.items():
        monkeypatch.setenv(name, value)
    curves = opened(tmp_path, tracking=TrackingConfig(tensorboard_dir=None, wandb_project="made"))
    for step in (3, 4):
        curves.log({"step": step, "phase": "rl", "loss": 0.5}, {"seconds": 1.0})
        curves.log_table("rollouts", [row | {"step": step} for row in TABLE], step=step)
    curves.close()
    written = [json.loads(path.read_text()) for path in tmp_path.rglob("*.table.json")]
    assert sorted(table["data"][0][0] for table in written) == [3, 4]
    assert all(table["columns"] == list(TABLE[0]) and len(table["data"]) == 2 for table in written)
    assert next(table["data"] for table in written if table["data"][0][0] == 3) == [list(row.values()) for row in TABLE]
