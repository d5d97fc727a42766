"""A part's cases, each measured in its own process, so that memory is freed and a crash ends one case only.

A case is a dict of JSON values. The child prints a line per measured case; in a rehearsal one child measures all cases.
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
TAIL = 6  # last lines of a failed child's output


def measure_here(cases: str, measure: Callable[[Case], Case]) -> None:
    """In the child: measure the cases of a JSON list until one fails."""
    for case in json.loads(cases):
        print("\n" + RESULT + json.dumps(measure(case)), flush=True)  # a progress bar may precede it in the line


def measure_apart(module: str, cases: list[Case], *, seconds: float, together: bool) -> Iterator[tuple[Case, Case | str]]:
    """Yield each case with its result or the reason of its failure.

    Args:
        module: the part's, which takes --cases.
        seconds: limit of a child.
        together: one child for all cases.
    """
    for chosen in [cases] if together else [[case] for case in cases]:
        found, reason = _child(module, chosen, seconds)
        for number, case in enumerate(chosen):
            yield case, found[number] if number < len(found) else reason


def _child(module: str, cases: list[Case], seconds: float) -> tuple[list[Case], str]:
    """Results of the measured cases, and the reason why the others have none."""
    command = [sys.executable, "-m", module, "--cases", json.dumps(cases)]
    with tempfile.TemporaryFile("w+", errors="replace") as output:  # not a pipe, which a process of the child could keep open
        with subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, preexec_fn=KILL_WITH_PARENT) as child:
            try:
                reason = f"exit code {child.wait(timeout=seconds)}"
            except subprocess.TimeoutExpired:
                child.kill()
                reason = f"stopped after {seconds:.0f} s"
        output.seek(0)
        lines = output.read().splitlines()
    found = [json.loads(line.removeprefix(RESULT)) for line in lines if line.startswith(RESULT)]
    printed = [line for line in lines if line.strip() and not line.startswith(RESULT)]
    if len(found) < len(cases):
        print("\n".join(printed[-40:]), file=sys.stderr, flush=True)
    return found, f"{reason}: {' / '.join(printed[-TAIL:])[-600:]}"


def run_or_die(part: Callable[[], list[str]]) -> int:
    """A part's exit code: 1, with reasons on stderr, if something failed."""
    try:
        failures = part()
    except Exception:  # the program's border: report and exit
        traceback.print_exc()
        return 1
    for failure in failures:
        print(failure, file=sys.stderr, flush=True)
    return 1 if failures else 0
