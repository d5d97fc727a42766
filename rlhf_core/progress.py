"""Progress of a stage: a bar with a time estimate on a terminal, a plain line every few seconds elsewhere.

    with Bar("sft step", 250) as bar:
        bar.step(loss=1.93)      # train_sft: sft step 120/250 · loss 1.93 · 2 min 10 s left

Progress isn't written to files. Lines go through the stage's log; a reader that recognizes them (`is_progress`) can redraw the last one.
"""

from __future__ import annotations

import logging
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TextIO, TypeVar

from tqdm import tqdm

from rlhf_core.config import shown

LINE_SECONDS = 5.0  # between two lines without a terminal
DRAW_SECONDS = 0.1  # between two drawings of a bar
NARROW = 20  # minimum of a terminal's columns
MAX_LINE = 500  # characters; a longer line is not a progress line
_STAGE = re.compile(r"[\w@]+: ")
_CLEAR = "\r\x1b[2K"

Item = TypeVar("Item")
log = logging.getLogger("rlhf")


class StatusLine:
    """The last line of a terminal, redrawn in place. Nothing is drawn if the output isn't a terminal."""

    def __init__(self, out: TextIO | None = None):
        self._given = out
        self._shown = ""
        self._begun = ""  # start of a line whose end hasn't arrived

    @property
    def _out(self) -> TextIO:
        return self._given or sys.stdout

    @property
    def drawn(self) -> bool:
        """Whether the output is a terminal."""
        return self._out.isatty()

    def show(self, text: str) -> None:
        """Draw a progress line; one that is too wide loses its figures before its time estimate."""
        width = max(NARROW, shutil.get_terminal_size().columns) - 1
        parts = text.split(" · ")
        while len(" · ".join(parts)) > width and len(parts) > 2:
            del parts[-2]
        self._shown = " · ".join(parts)[:width]
        self._out.write(f"{_CLEAR}{self._shown}")
        self._out.flush()

    def clear(self) -> None:
        if self._shown:
            self._shown = ""
            self._out.write(_CLEAR)
            self._out.flush()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Remove the status line while other output is printed above it."""
        shown = self._shown
        self.clear()
        yield
        if shown:
            self.show(shown)

    def pass_on(self, text: str) -> None:
        """Print a chunk of another process's output, which may end within a line."""
        if not self.drawn:
            self._out.write(text)
            self._out.flush()
            return
        *lines, self._begun = (self._begun + text).split("\n")
        for line in lines:
            self.tell(line)

    def end(self) -> None:
        """Print the unfinished last line after the other process has ended."""
        if self._begun:
            self.tell(self._begun)
            self._begun = ""

    def tell(self, line: str) -> None:
        """Print a stage's line: on a terminal progress is redrawn in place, and other lines appear above it."""
        if self.drawn and is_progress(line):
            self.show(line)
            return
        if is_end(line):
            self.clear()
        with self.aside():
            print(line, file=self._out, flush=True)


STATUS = StatusLine()
_stage = ""


def name_stage(name: str) -> None:
    """Set the stage of this process. A process without one (a test, a benchmark) reports no progress."""
    global _stage
    _stage = name


def is_progress(line: str) -> bool:
    """Return whether a line reports progress, so that the next one may replace it."""
    return _tells(line, " left", " so far")


def is_end(line: str) -> bool:
    """Return whether a line is the last one of a bar."""
    return _tells(line, " in all")


def _tells(line: str, *ends: str) -> bool:
    return len(line) <= MAX_LINE and line.endswith(ends) and " · " in line and _STAGE.match(line) is not None


class Bar:
    """Progress of `total` items; None: the number is unknown. Several threads may report items.

    Args:
        what: name of an item, in the singular, such as sft step.
        done: items already done by an earlier start.
        clock: returns seconds.
    """

    def __init__(self, what: str, total: int | None, *, done: int = 0, clock: Callable[[], float] = time.monotonic):
        self._what, self._total, self._done, self._clock = what, total, done, clock
        self._stage = _stage
        self._begun = self._shown_at = clock()
        self._first: tuple[float, int] | None = None  # when the first item was done: start-up time before it doesn't count in the estimate
        self._figures: dict[str, float] = {}
        self._lock = threading.RLock()

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if STATUS.drawn:
            STATUS.clear()
        if error is None:
            self.close()

    def close(self) -> None:
        """Print the last line, of finished work."""
        if self._stage and self._done == (self._total or self._done):
            log.info("%s", self._line(f"{duration(self._clock() - self._begun)} in all"))

    def step(self, count: int = 1, **figures: float) -> None:
        """Count further items as done. figures: shown until replaced by new values."""
        with self._lock:
            self.reach(self._done + count, **figures)

    def reach(self, done: int, **figures: float) -> None:
        """Set the number of items done."""
        self._done = done
        self._figures |= figures
        now = self._clock()
        self._first = self._first or (now, done)
        if not self._stage or now - self._shown_at < (DRAW_SECONDS if STATUS.drawn else LINE_SECONDS):
            return
        if STATUS.drawn:
            self._shown_at = now
            STATUS.show(self._meter(now))
        elif (ahead := self._ahead(now)) is not None:
            self._shown_at = now
            log.info("%s", self._line(ahead))

    def _ahead(self, now: float) -> str | None:
        """Time left or, if the total is unknown, time so far; None: no estimate yet."""
        if self._total is None:
            return f"{duration(now - self._begun)} so far"
        since, done = self._first or (now, self._done)
        if self._done <= done or now <= since:
            return None
        return f"{duration((self._total - self._done) * (now - since) / (self._done - done))} left"

    def _line(self, time_told: str) -> str:
        of = "" if self._total is None else f"/{self._total:,}"
        return " · ".join([f"{self._stage}: {self._what} {self._done:,}{of}", *self._figures_told(), time_told])

    def _figures_told(self) -> list[str]:
        return [f"{name.replace('_', ' ')} {value:.3g}" for name, value in self._figures.items()]

    def _meter(self, now: float) -> str:
        return tqdm.format_meter(
            self._done,
            self._total,
            now - self._begun,
            ncols=max(NARROW, shutil.get_terminal_size().columns - 1),
            prefix=f"{self._stage}: {self._what}",
            postfix=", ".join(self._figures_told()),
        )


_drawing: list[Bar] = []


@contextmanager
def drawing(what: str, total: int | None) -> Iterator[Bar]:
    """A bar of responses sampled by an engine in this process, which reports them by `drawn`. Arguments as of `Bar`."""
    with Bar(what, total) as bar:
        _drawing.append(bar)
        try:
            yield bar
        finally:
            _drawing.remove(bar)


def drawn(count: int) -> None:
    """Report sampled responses."""
    if _drawing:
        _drawing[-1].step(count)


def counted(items: Iterable[Item], what: str) -> Iterator[Item]:
    """Iterate over the items and show their progress."""
    with Bar(what, None) as bar:
        for item in items:
            yield item
            bar.step()


def duration(seconds: float) -> str:
    """`45 s`, `2 min 10 s`, `1 h 05 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


class Reasons:
    """Logs each reason of one scorer once. Reasons are the same if their text up to the first colon is."""

    def __init__(self, name: str):
        self._name, self._said = name, set()

    def __call__(self, reason: str, *, count: int) -> None:
        kind = reason.partition(":")[0]
        if kind not in self._said:
            self._said.add(kind)
            log.warning("scorer %s: expected a score for every response, got none for %d; %s", self._name, count, shown(reason, 1000))
