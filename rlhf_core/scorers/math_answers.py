"""Equality of two mathematical answers, by math-verify (https://github.com/huggingface/Math-Verify) in a child process.

A response such as 10^{10^{10}} can make the comparison endless or exhaust the memory, and a process can't always stop itself. An alarm
and a memory limit kill the child instead. That response then has no score, and the next one gets a new child.

    python -m rlhf_core.scorers.math_answers    the child: reads a JSON line per comparison, writes a JSON line per result
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

SECONDS = 5  # for one comparison
MEMORY = 4 * 2**30  # bytes of the child's address space


class MathComparer:
    """The parent's side of the comparison. The child starts at the first comparison and ends with its parent."""

    def __init__(self):
        self._child: subprocess.Popen[str] | None = None

    def same(self, response: str, label: str) -> bool:
        """Whether the answers of response and label are equal. An answer is the last LaTeX in $...$ or \\boxed{...}, or else the last plain
        expression.

        Raises:
            ValueError: the label has no answer, or the comparison failed or took longer than SECONDS.
            RuntimeError: the child can't be started.
        """
        if self._child is None:
            self._child = _start()
        child = self._child
        try:
            child.stdin.write(json.dumps({"response": response, "label": label}) + "\n")
            child.stdin.flush()
            answer = child.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            self._child = None
            with contextlib.suppress(BrokenPipeError):  # closing flushes what could not be written
                child.stdin.close()
            child.stdout.close()
            raise ValueError(f"the comparison took longer than {SECONDS} s or too much memory: its process ended with code {child.wait()}")
        found = json.loads(answer)
        if "error" in found:
            raise ValueError(found["error"])
        return found["same"]


def _start() -> subprocess.Popen[str]:
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "rlhf_core.scorers.math_answers"]
    child = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8", env={**os.environ, "PYTHONPATH": path}
    )
    if child.stdout.readline().strip() != "ready":
        raise RuntimeError(f"math scorer: expected its process to start, got exit code {child.wait()}; is math-verify installed?")
    return child


def serve() -> None:
    """Compare until the input ends. This is the child's side."""
    import logging

    import math_verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # silences a warning that its own timeouts are off
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    print("ready", flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        label, response = question["label"], question["response"]
        signal.alarm(SECONDS)  # unhandled, so the kernel ends the process
        try:
            expected = _read(math_verify, f"\\boxed{{{label}}}") or _read(math_verify, label)
            if expected:
                given = _read(math_verify, response)
                answer = {"same": math_verify.verify(expected, given, timeout_seconds=None, raise_on_error=True)}
            else:
                answer = {"error": f"the label has no mathematical answer to compare with: {label!r}"}
        except Exception as error:  # a parser may raise anything on a model's text
            answer = {"error": f"the comparison failed with {type(error).__name__}: {error}"[:300]}
        signal.alarm(0)
        print(json.dumps(answer), flush=True)


def _read(math_verify, text: str) -> list:
    return math_verify.parse(text, parsing_timeout=None)


if __name__ == "__main__":
    serve()
