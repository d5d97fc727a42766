"""Curves: one row per step in a CSV file, and TensorBoard or wandb where configured."""

from __future__ import annotations

import csv
import hashlib
from pathlib import Path

from rlhf_core.config import TrackingConfig

Row = dict[str, float | int | str]


class MetricsLog:
    """Appends rows to a CSV whose columns are fixed at the start, so that a resumed run goes on in the same file.

    Timings go to a file of their own: the curves are what DVC compares, and no two runs take the same time. Beside it, with the ending
    `.of`, stands the sha256 of the curves that they belong to (rlhf_core/report/inputs.py asks for it).

    Args:
        path: of the CSV file, in the scratch folder of the work.
        columns: of a row; "step" among them.
        timings: path of the CSV for timings, or None.
        tracking: where else the rows go.
        run_name: of the run in TensorBoard or wandb.
        first_step: rows from this step on are dropped from an existing file: the run resumes there.
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
        """Write one row of the curves. Columns without a value this time stay empty; an unknown column raises ValueError.

        Args:
            further: numbers whose names nobody knows in advance: for TensorBoard and wandb, which need no columns.
        """
        step = int(row["step"])
        self._curves.write(row)
        if self._timings is not None:
            self._timings.write({"step": step, **timings})
        numbers = {k: v for k, v in {**row, **timings, **(further or {})}.items() if k != "step" and not isinstance(v, str)}
        if self._tensorboard is not None:
            for name, value in numbers.items():
                self._tensorboard.add_scalar(name, value, step)
        if self._wandb is not None:
            self._wandb.log(numbers, step=step)

    def close(self) -> None:
        self._curves.close()
        if self._timings is not None:
            self._timings.close()
            self._timings.path.with_suffix(".of").write_text(hashlib.sha256(self._curves.path.read_bytes()).hexdigest(), encoding="ascii")
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()


class _Rows:
    """A CSV file that goes on at a given step; without columns they are taken from the first row.

    The rows that stay are written aside and renamed: a kill while a run resumes must not cost the curve so far.
    """

    def __init__(self, path: Path, columns: tuple[str, ...] | None, first_step: int):
        self.path = path
        kept = [row for row in _read(path) if int(row["step"]) < first_step]
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(path.name + ".tmp")
        self._file = aside.open("w", newline="", encoding="utf-8")
        self._fixed = columns is not None
        self._writer: csv.DictWriter | None = None
        if columns is not None or kept:
            self._start(columns or tuple(kept[0]))
            # Earlier rows may be of work with other columns, whose checkpoint was gone on from; and timings take what their first row has.
            self._writer.writerows({name: row.get(name, "") for name in self._writer.fieldnames} for row in kept)
            self._file.flush()
        aside.replace(path)

    def _start(self, columns: tuple[str, ...]) -> None:
        extra = "raise" if self._fixed else "ignore"
        self._writer = csv.DictWriter(self._file, columns, extrasaction=extra, lineterminator="\n")
        self._writer.writeheader()
        self._file.flush()

    def write(self, row: Row) -> None:
        if self._writer is None:
            self._start(tuple(row))
        self._writer.writerow({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()})
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _read(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        # A row that a crash cut short lacks columns.
        return [row for row in csv.DictReader(file) if None not in row.values()]
