"""A part's cases, each measured in a process of its own, so that none's memory lingers and none's end is the end of the others.

A case is a dict of JSON values. The child prints one line for each case that it has measured; in a rehearsal one child measures them all.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from rlhf_core.process import end_with_parent

Case = dict[str, Any]
ROOT = Path(__file__).parents[3]
RESULT = "RESULT "
KILL_WITH_PARENT = partial(end_with_parent, number=signal.SIGKILL)  # a child that outlives its parent would keep the device
TAIL = 6  # lines of a child's output that say why it failed


def measure_here(cases: str, measure: Callable[[Case], Case]) -> None:
    """The child: measures the cases of a JSON list. The first that fails ends it."""
    for case in json.loads(cases):
        print("\n" + RESULT + json.dumps(measure(case)), flush=True)  # a bar of progress may be in the line


def measure_apart(module: str, cases: list[Case], *, seconds: float, together: bool) -> Iterator[tuple[Case, Case | str]]:
    """Each case with what was measured, or with why nothing was, as it comes.

    Args:
        module: of the part, which takes --cases.
        seconds: for a child.
        together: one child for all.
    """
    for chosen in [cases] if together else [[case] for case in cases]:
        found, reason = _child(module, chosen, seconds)
        for number, case in enumerate(chosen):
            yield case, found[number] if number < len(found) else reason


def _child(module: str, cases: list[Case], seconds: float) -> tuple[list[Case], str]:
    """What was measured of the first cases, and why nothing was of the others."""
    command = [sys.executable, "-m", module, "--cases", json.dumps(cases)]
    with tempfile.TemporaryFile("w+", errors="replace") as output:  # no pipe, which a process of the child's could keep open
        with subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, preexec_fn=KILL_WITH_PARENT) as child:
            try:
                reason = f"exit code {child.wait(timeout=seconds)}"
            except subprocess.TimeoutExpired:
                child.kill()
                reason = f"stopped after {seconds:.0f} s"
        output.seek(0)
        lines = output.read().splitlines()
    found = [json.loads(line.removeprefix(RESULT)) for line in lines if line.startswith(RESULT)]
    said = [line for line in lines if line.strip() and not line.startswith(RESULT)]
    if len(found) < len(cases):
        print("\n".join(said[-40:]), file=sys.stderr, flush=True)
    return found, f"{reason}: {' / '.join(said[-TAIL:])[-600:]}"


def run_or_die(part: Callable[[], list[str]]) -> int:
    """A part's exit code: 1 with the reasons on stderr where something of it failed."""
    try:
        failures = part()
    except Exception:  # at the border of a program: said, and an exit code
        traceback.print_exc()
        return 1
    for failure in failures:
        print(failure, file=sys.stderr, flush=True)
    return 1 if failures else 0
