"""The table of `make test-long`: one row for each file of tests, with the date of its newest run, so that it can run in parts."""

from __future__ import annotations

import csv
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

import pytest

COLUMNS = ("file", "passed", "failed", "skipped", "minutes", "date")


class LongResults:
    """A plugin that writes what became of the tests of this run to a table, in which other files' rows stay."""

    def __init__(self, table: Path):
        self.table = table
        self.outcomes: dict[str, Counter[str]] = {}
        self.seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = report.nodeid.partition("::")[0]
        self.seconds[file] += report.duration
        if report.when == "call" or not report.passed:  # a fixture that failed, or a mark that skips
            self.outcomes.setdefault(file, Counter())[report.outcome] += 1

    def pytest_sessionfinish(self) -> None:
        rows = {}
        if self.table.exists():
            with self.table.open(newline="") as file:
                rows = {row["file"]: row for row in csv.DictReader(file)}
        today = datetime.now(UTC).date().isoformat()
        for name, found in self.outcomes.items():
            counts = {outcome: found[outcome] for outcome in ("passed", "failed", "skipped")}
            rows[name] = {"file": name, **counts, "minutes": f"{self.seconds[name] / 60:.1f}", "date": today}
        with self.table.open("w", newline="") as file:
            table = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            table.writeheader()
            table.writerows(rows[name] for name in sorted(rows))
