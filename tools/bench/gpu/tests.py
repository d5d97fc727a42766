"""Part tests: outcome and seconds of each test of tests/gpu.

python -m tools.bench.gpu.tests --out FILE.json [--rehearse]
"""

from __future__ import annotations

import sys

import pytest

from rlhf_core.process import configure_process
from tools.bench.gpu.cases import ROOT, run_or_die
from tools.bench.gpu.record import Record
from tools.bench.gpu.shapes import argument_parser

REASON = 300  # characters
TEST_SECONDS = 200  # of a test: one that hangs leaves time for the others


class Outcomes:
    """A pytest plugin that records each test at its end, so that a crash keeps earlier results."""

    def __init__(self, record: Record):
        self._record = record
        self.failures: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid.rpartition("::")[2]
        if report.failed:
            lines = report.longreprtext.strip().splitlines() or [""]
            reason = " / ".join(line.strip() for line in lines if line.startswith("E"))[:REASON] or lines[-1][:REASON]
            self._record.add(name, "s", [], f"failed in its {report.when}: {reason}")
            self.failures.append(f"{name}: {reason}")
        elif report.skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            self._record.add(name, "s", [], reason.removeprefix("Skipped: ")[:REASON])
        elif report.when == "call":
            self._record.add(name, "s", [report.duration], "passed")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._record.add(report.nodeid, "s", [], f"can't be collected: {report.longreprtext[-REASON:]}")
            self.failures.append(f"{report.nodeid}: can't be collected")


def part(record: Record, *, rehearse: bool) -> list[str]:
    """Run and record. Returns the failures."""
    from tools.bench.gpu.device import require

    require(rehearse=rehearse)
    outcomes = Outcomes(record)
    how = ["--rootdir", str(ROOT), "-p", "no:cacheprovider", "--tb=short", f"--timeout={TEST_SECONDS}"]
    code = pytest.main([str(ROOT / "tests" / "gpu"), *how], plugins=[outcomes])
    if code and not outcomes.failures:
        return [f"pytest: expected exit code 0, got {int(code)}"]
    return outcomes.failures


def main() -> int:
    configure_process()
    arguments = argument_parser(__doc__).parse_args()
    return run_or_die(lambda: part(Record(arguments.out), rehearse=arguments.rehearse))


if __name__ == "__main__":
    sys.exit(main())
