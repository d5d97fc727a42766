"""The score of a response by the tests that its program passes in the sandbox."""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from rlhf_core.config import ScorerConfig
from rlhf_core.progress import Reasons
from rlhf_core.scorers.code.cases import Asserts, InputOutput, decoded, read_cases
from rlhf_core.scorers.sandbox.box import Limits, Outcome, Sandbox, SandboxFailure, check_sandbox

SECONDS = 2.0
MEMORY_MIB = 256
MAX_VALUES = 1 << 18  # characters of the values that a program's functions return
_BLOCK = re.compile(r"^(`{3,}|~{3,})[^\n`]*\n(.*?)^\1[ \t\r]*$", re.DOTALL | re.MULTILINE)
_DRIVER = Path(__file__).with_name("driver.py").read_text(encoding="utf-8")


@dataclass(frozen=True)
class Verdict:
    """passed: share of the tests. timed_out: the program was killed at its time."""

    passed: float
    timed_out: bool = False


def program_of(response: str) -> str | None:
    """Return the content of the last fenced code block; None: it has none that is closed."""
    blocks = _BLOCK.findall(response)
    return blocks[-1][1] if blocks else None


class CodeScorer:
    """Scores of responses by their programs, on all cores.

    Args:
        in_time: what isn't run within the scorer's timeout has no score; otherwise only programs have limits.
    Raises:
        ValueError: the sandbox doesn't work here.
    """

    def __init__(self, config: ScorerConfig, report: Reasons, *, in_time: bool = False):
        self._limits = Limits(config.seconds or SECONDS, config.memory_mib or MEMORY_MIB)
        check_sandbox(f"scorer {config.name}", self._limits)
        self._all = config.reward == "all"
        self._report, self._seconds = report, config.timeout if in_time else math.inf
        self._count = len(os.sched_getaffinity(0))
        self._idle: SimpleQueue[Sandbox] = SimpleQueue()

    def __call__(self, items: list[Any]) -> tuple[list[float], dict[str, float]]:
        """One score per item, NaN where it has no test or the sandbox failed; and shares of responses without program or out of time."""
        until = time.monotonic() + self._seconds
        programs = [(program_of(item.response), item.label) for item in items]
        distinct = list(dict.fromkeys(programs))
        with ThreadPoolExecutor(self._count) as threads:
            found = dict(zip(distinct, threads.map(lambda pair: self._judged(*pair, until), distinct), strict=True))
        verdicts = [found[pair] for pair in programs]
        reasons = [verdict for verdict in verdicts if isinstance(verdict, str)]
        for reason in dict.fromkeys(reasons):
            self._report(reason, count=reasons.count(reason))
        scores = [math.nan if isinstance(verdict, str) else self._score(verdict) for verdict in verdicts]
        timed_out = sum(isinstance(verdict, Verdict) and verdict.timed_out for verdict in verdicts)
        missing = sum(program is None for program, _ in programs)
        return scores, {"no_program": missing / len(items), "timed_out": timed_out / len(items)} if items else {}

    def _score(self, verdict: Verdict) -> float:
        return float(verdict.passed == 1) if self._all else verdict.passed

    def _judged(self, program: str | None, label: str | None, until: float) -> Verdict | str:
        """Return a verdict, or why there is none."""
        if label is None:
            return "the prompt has no label with tests"
        try:
            cases = read_cases(label)
        except ValueError as error:
            return f"the label's tests can't be read: {error}"
        if program is None:
            return Verdict(0.0)
        try:
            with self._sandbox() as sandbox:
                return self._verdict(program, cases, sandbox, until)
        except SandboxFailure as failure:
            return str(failure)
        except TimeoutError:
            return f"the programs of all responses took longer than the scorer's timeout, {self._seconds:g} s: raise it, or lower seconds"

    @contextmanager
    def _sandbox(self) -> Iterator[Sandbox]:
        """One that no other thread uses."""
        try:
            sandbox = self._idle.get_nowait()
        except Empty:
            sandbox = Sandbox()
        try:
            yield sandbox
        finally:
            self._idle.put(sandbox)

    def _verdict(self, program: str, cases: tuple[InputOutput, ...] | Asserts, sandbox: Sandbox, until: float) -> Verdict:
        def run(files: dict[str, str], stdin: str = "") -> Outcome:
            left = until - time.monotonic()
            if left <= 0:
                raise TimeoutError
            try:
                return sandbox.run(files, [next(iter(files))], limits=self._limits, stdin=stdin, most=left)
            except SandboxFailure:
                if time.monotonic() >= until:
                    raise TimeoutError from None
                raise

        return _by_asserts(program, cases, run) if isinstance(cases, Asserts) else self._by_outputs(program, cases, run)

    def _by_outputs(self, program: str, cases: tuple[InputOutput, ...], run: Callable[..., Outcome]) -> Verdict:
        """Return one run for each input; after a run that takes too long the rest fail."""
        passed = 0
        for case in cases:
            outcome = run({"program.py": program}, case.stdin)
            right = outcome.ok and outcome.stdout.split() == case.stdout.split()
            passed += right
            if outcome.timed_out or (self._all and not right):
                return Verdict(passed / len(cases), outcome.timed_out)
        return Verdict(passed / len(cases))


def _by_asserts(program: str, cases: Asserts, run: Callable[..., Outcome]) -> Verdict:
    """Return one run for all of them."""
    expressions = json.dumps([cases.setup, cases.expressions()])
    outcome = run({"driver.py": _DRIVER, "program.py": program, "expressions.json": expressions})
    values = {}
    for line in outcome.stdout.splitlines() if len(outcome.stdout) <= MAX_VALUES else ():
        try:
            expression, value = json.loads(line)
            values[expression] = decoded(value)
        except (ValueError, TypeError, KeyError, RecursionError):  # the program wrote it
            continue
    passed = cases.passed(values)
    return Verdict(sum(passed) / len(passed), outcome.timed_out)
