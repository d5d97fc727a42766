"""How far a stage's work has come: a bar with an estimate in a terminal, a plain line every few seconds elsewhere.

    with Bar("sft step", 250) as bar:
        bar.step(loss=1.93)      # train_sft: sft step 120/250 · loss 1.93 · 2 min 10 s left

Nothing of it goes into a file. Lines go through the stage's log; whoever reads them (`is_progress`) can redraw the last one in place.
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

LINE_SECONDS = 5.0  # between two lines, where there is no terminal
DRAW_SECONDS = 0.1  # between two drawings of a bar
NARROW = 20  # columns of a terminal that doesn't say how wide it is, at least
MAX_LINE = 500  # characters of a line that tells progress
_STAGE = re.compile(r"[\w@]+: ")
_CLEAR = "\r\x1b[2K"

Item = TypeVar("Item")
log = logging.getLogger("rlhf")


class StatusLine:
    """The last line of a terminal, redrawn in place; where the output is no terminal nothing is drawn."""

    def __init__(self, out: TextIO | None = None):
        self._given = out
        self._shown = ""
        self._begun = ""  # of a line whose end has not come yet

    @property
    def _out(self) -> TextIO:
        return self._given or sys.stdout

    @property
    def drawn(self) -> bool:
        """Whether there is a terminal."""
        return self._out.isatty()

    def show(self, text: str) -> None:
        """Where a line of progress is too long, figures are left out before the time is."""
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
        """Other output appears above the status."""
        shown = self._shown
        self.clear()
        yield
        if shown:
            self.show(shown)

    def pass_on(self, text: str) -> None:
        """A piece of another process's output, which may end within a line."""
        if not self.drawn:
            self._out.write(text)
            self._out.flush()
            return
        *lines, self._begun = (self._begun + text).split("\n")
        for line in lines:
            self.tell(line)

    def end(self) -> None:
        """The other process has ended: what it began to write is shown too."""
        if self._begun:
            self.tell(self._begun)
            self._begun = ""

    def tell(self, line: str) -> None:
        """A line of a stage: progress in place where there is a terminal, everything else above it."""
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
    """Of this process; one without a stage (a test, a benchmark) tells nothing."""
    global _stage
    _stage = name


def is_progress(line: str) -> bool:
    """Whether a line says how far a stage has come, so that the next one may take its place."""
    return _tells(line, " left", " so far")


def is_end(line: str) -> bool:
    """Whether a line closes a stretch of work."""
    return _tells(line, " in all")


def _tells(line: str, *ends: str) -> bool:
    return len(line) <= MAX_LINE and line.endswith(ends) and " · " in line and _STAGE.match(line) is not None


class Bar:
    """A stretch of work of `total` pieces; None: nobody knows how many. Threads may tell of pieces together.

    Args:
        what: of what, in the singular: sft step.
        done: pieces that an earlier start has done.
        clock: seconds.
    """

    def __init__(self, what: str, total: int | None, *, done: int = 0, clock: Callable[[], float] = time.monotonic):
        self._what, self._total, self._done, self._clock = what, total, done, clock
        self._stage = _stage
        self._begun = self._told = clock()
        self._first: tuple[float, int] | None = None  # when the first piece was done: what comes before it is a start, and no pace
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
        """A last line, of work that has come to its end."""
        if self._stage and self._done == (self._total or self._done):
            log.info("%s", self._line(f"{duration(self._clock() - self._begun)} in all"))

    def step(self, count: int = 1, **figures: float) -> None:
        """So many further pieces are done. figures: shown beside them until they are given anew."""
        with self._lock:
            self.reach(self._done + count, **figures)

    def reach(self, done: int, **figures: float) -> None:
        """So many pieces are done."""
        self._done = done
        self._figures |= figures
        now = self._clock()
        self._first = self._first or (now, done)
        if not self._stage or now - self._told < (DRAW_SECONDS if STATUS.drawn else LINE_SECONDS):
            return
        if STATUS.drawn:
            self._told = now
            STATUS.show(self._meter(now))
        elif (ahead := self._ahead(now)) is not None:
            self._told = now
            log.info("%s", self._line(ahead))

    def _ahead(self, now: float) -> str | None:
        """How long it takes yet; of unknown work, how long it has taken; None: that can't be told."""
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
def drawing(what: str, total: int) -> Iterator[Bar]:
    """A bar of responses that an engine draws in this process: it tells of each by `drawn`."""
    with Bar(what, total) as bar:
        _drawing.append(bar)
        try:
            yield bar
        finally:
            _drawing.remove(bar)


def drawn(count: int) -> None:
    """An engine has drawn so many responses."""
    if _drawing:
        _drawing[-1].step(count)


def counted(items: Iterable[Item], what: str) -> Iterator[Item]:
    """The items, while their number is told."""
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
