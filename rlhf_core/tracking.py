"""Curves: one row per step in a CSV file, and TensorBoard or wandb where configured."""

from __future__ import annotations

import csv
import hashlib
import math
import re
from pathlib import Path

from rlhf_core.config import TrackingConfig
from rlhf_core.files import replacing

Row = dict[str, float | int | str]
TENSORBOARD_ROWS = 16  # of a table
_MARKS = re.compile(r"[^\w\s.,;]")  # characters that may mean something in Markdown or HTML


class MetricsLog:
    """Appends rows to a CSV file with fixed columns, so that a resumed run continues the same file.

    Timings have a separate file, since they differ between runs and DVC compares the curves. Next to it a file with the suffix `.of`
    holds the sha256 of the curves that the timings belong to, which rlhf_core/report/inputs.py checks.

    Args:
        path: of the CSV file, in the work's scratch folder.
        columns: of a row, including "step".
        timings: path of the CSV for timings, or None.
        tracking: settings of TensorBoard and wandb.
        run_name: of the run in TensorBoard or wandb.
        first_step: the step at which the run resumes; an existing file loses its rows from there on.
    """

    def __init__(
        self, path: Path, columns: tuple[str, ...], *, timings: Path | None, tracking: TrackingConfig, run_name: str, first_step: int
    ):
        self._curves = _Rows(path, columns, first_step)
        self._timings = None if timings is None else _Rows(timings, None, first_step)
        self._tensorboard = None
        self._wandb = None
        if tracking.tensorboard_dir is not None:
            from torch.utils.tensorboard import SummaryWriter

            self._tensorboard = SummaryWriter(str(Path(tracking.tensorboard_dir) / run_name), purge_step=first_step)
        if tracking.wandb_project is not None:
            import wandb

            self._wandb = wandb.init(project=tracking.wandb_project, name=run_name, id=run_name, resume="allow")

    def log(self, row: Row, timings: Row, further: Row | None = None) -> None:
        """Write one row of the curves. Columns without a value, NaN included, stay empty; an unknown column raises ValueError.

        Args:
            further: numbers with names that vary, for TensorBoard and wandb only.
        """
        step = int(row["step"])
        self._curves.write(row)
        if self._timings is not None:
            self._timings.write({"step": step, **timings})
        values = {**row, **timings, **(further or {})}
        numbers = {k: v for k, v in values.items() if k != "step" and not isinstance(v, str) and not math.isnan(v)}
        if self._tensorboard is not None:
            for name, value in numbers.items():
                self._tensorboard.add_scalar(name, value, step)
        if self._wandb is not None:
            self._wandb.log(numbers, step=step)

    def log_table(self, name: str, rows: list[Row], *, step: int) -> None:
        """Show a table in wandb, and its first rows as text in TensorBoard. Its columns are those of the first row; None: no value."""
        if not rows:
            return
        if self._tensorboard is not None:
            self._tensorboard.add_text(name, _markdown(rows[:TENSORBOARD_ROWS]), step)
        if self._wandb is not None:
            import wandb

            self._wandb.log({name: wandb.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])}, step=step)

    def close(self) -> None:
        self._curves.close()
        if self._timings is not None:
            self._timings.close()
            self._timings.path.with_suffix(".of").write_text(hashlib.sha256(self._curves.path.read_bytes()).hexdigest(), encoding="ascii")
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()


class NoLog:
    """A log that keeps nothing, for the ranks that don't write curves."""

    def log(self, row: Row, timings: Row, further: Row | None = None) -> None:
        pass

    def close(self) -> None:
        pass


class _Rows:
    """A CSV file that continues at a given step; without columns the first row defines them.

    The kept rows replace the file atomically, so that a kill during a resume doesn't lose the curve.
    """

    def __init__(self, path: Path, columns: tuple[str, ...] | None, first_step: int):
        self.path = path
        kept = [row for row in _read(path) if int(row["step"]) < first_step]
        self._fixed = columns is not None
        self._writer: csv.DictWriter | None = None
        with replacing(path) as aside:
            self._file = aside.open("w", newline="", encoding="utf-8")
            if columns is not None or kept:
                self._start(columns or tuple(kept[0]))
                # Earlier rows may come from other work that this run resumed from, with other columns; timings get theirs from the first
                # row.
                self._writer.writerows({name: row.get(name, "") for name in self._writer.fieldnames} for row in kept)
                self._file.flush()

    def _start(self, columns: tuple[str, ...]) -> None:
        extra = "raise" if self._fixed else "ignore"
        self._writer = csv.DictWriter(self._file, columns, extrasaction=extra, lineterminator="\n")
        self._writer.writeheader()
        self._file.flush()

    def write(self, row: Row) -> None:
        if self._writer is None:
            self._start(tuple(row))
        self._writer.writerow({k: _text(v) if isinstance(v, float) else v for k, v in row.items()})
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _markdown(rows: list[Row]) -> str:
    """Return a Markdown table in which texts are neither Markdown nor HTML."""

    def cell(value: object) -> str:
        text = "" if value is None else _text(value) if isinstance(value, float) else str(value)
        return _MARKS.sub(lambda found: f"&#{ord(found[0])};", text).replace("\n", "<br>")

    heads = [" | ".join(rows[0]), " | ".join("---" for _ in rows[0])]
    return "\n".join([*heads, *(" | ".join(map(cell, row.values())) for row in rows)])


def _text(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.6g}"


def _read(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        # A row truncated by a crash lacks columns.
        return [row for row in csv.DictReader(file) if None not in row.values()]
