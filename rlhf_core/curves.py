"""Curves: one row per step in a CSV file, from which reports are drawn and trackers are filled (flows/trackers)."""

from __future__ import annotations

import csv
import hashlib
import math
from pathlib import Path

from rlhf_core.files import replacing

Row = dict[str, float | int | str]


class MetricsLog:
    """Appends rows to a CSV file with fixed columns, so that a resumed run continues the same file.

    Timings have a separate file, since they differ between runs and DVC compares the curves. Next to it a file with the suffix `.of`
    holds the sha256 of the curves that the timings belong to, which rlhf_core/report/inputs.py checks.

    Args:
        path: of the CSV file, in the work's scratch folder.
        columns: of a row, including "step".
        timings: path of the CSV for timings, or None.
        first_step: the step at which the run resumes; an existing file loses its rows from there on.
    """

    def __init__(self, path: Path, columns: tuple[str, ...], *, timings: Path | None, first_step: int):
        self._curves = _Rows(path, columns, first_step)
        self._timings = None if timings is None else _Rows(timings, None, first_step)

    def log(self, row: Row, timings: Row) -> None:
        """Write one row of the curves. Columns without a value, NaN included, stay empty; an unknown column raises ValueError."""
        self._curves.write(row)
        if self._timings is not None:
            self._timings.write({"step": int(row["step"]), **timings})

    def close(self) -> None:
        self._curves.close()
        if self._timings is not None:
            self._timings.close()
            self._timings.path.with_suffix(".of").write_text(hashlib.sha256(self._curves.path.read_bytes()).hexdigest(), encoding="ascii")


class NoLog:
    """A log that keeps nothing, for the ranks that don't write curves."""

    def log(self, row: Row, timings: Row) -> None:
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


def _text(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.6g}"


def _read(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        # A row truncated by a crash lacks columns.
        return [row for row in csv.DictReader(file) if None not in row.values()]
