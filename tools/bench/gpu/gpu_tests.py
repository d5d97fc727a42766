"""Records outcome and seconds of tests in tests/gpu: python -m tools.bench.gpu.gpu_tests --out FILE.json [-- PYTEST'S ARGUMENTS]"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import pytest

from tools.bench.gpu.processes import ROOT, begin
from tools.bench.gpu.record import Record

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


def run(record: Record, chosen: Sequence[str]) -> list[str]:
    """Run the tests and record them, with whole tracebacks in the output, and return the failures."""
    outcomes = Outcomes(record)
    which = list(chosen) if any("::" in name and not name.startswith("-") for name in chosen) else [str(ROOT / "tests" / "gpu"), *chosen]
    arguments = ["--rootdir", str(ROOT), "-p", "no:cacheprovider", "-vv", "--tb=long", f"--timeout={TEST_SECONDS}"]
    code = pytest.main([*which, *arguments], plugins=[outcomes])
    if code and not outcomes.failures:
        return [f"pytest: expected exit code 0, got {int(code)}"]
    return outcomes.failures


def main() -> int:
    arguments = begin(__doc__)
    failures = run(Record(arguments.out), arguments.arguments)
    print("\n".join(failures), file=sys.stderr, flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
