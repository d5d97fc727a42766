"""How far a stage has come: lines at a decent rate, a bar in a terminal, and nothing where no stage is named."""

from __future__ import annotations

import io
import logging
import os
import pty
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from flows.chain import stages
from rlhf_core import progress
from rlhf_core.progress import Bar, StatusLine, counted, drawing, drawn, duration, is_end, is_progress

ROOT = Path(__file__).parents[2]


@pytest.fixture
def lines(monkeypatch, caplog) -> list[str]:
    monkeypatch.setattr(progress, "_stage", "train_sft")
    caplog.set_level(logging.INFO, logger="rlhf")

    class Lines(list):
        def __iter__(self):
            return iter([record.getMessage() for record in caplog.records])

    return Lines()


class Clock:
    """Seconds that pass only when told to."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_lines_come_every_few_seconds_with_the_time_left(lines):
    clock = Clock()
    with Bar("sft step", 400, clock=clock) as bar:
        clock.now = 30.0  # a start, which says nothing of the pace
        for _ in range(400):
            clock.now += 0.5
            bar.step(loss=1.934)
    reported = list(lines)
    # The first step is at 30.5 s. Later ones take 0.5 s each: 399 of them 199.5 s, and a line every 5 s.
    assert len(reported) == 41 and reported[-1] == "train_sft: sft step 400/400 · loss 1.93 · 3 min 50 s in all"
    assert reported[0] == "train_sft: sft step 2/400 · loss 1.93 · 3 min 19 s left"
    assert all(is_progress(line) for line in reported[:-1]) and not is_progress(reported[-1])


def test_what_an_earlier_start_has_done_is_no_pace(lines):
    clock = Clock()
    bar = Bar("sft step", 1000, done=900, clock=clock)
    for clock.now in (10.0, 20.0):
        bar.step()
    assert list(lines) == ["train_sft: sft step 902/1,000 · 16 min 20 s left"]  # 98 steps of 10 s


def test_work_that_fails_has_no_closing_line(lines):
    with pytest.raises(KeyError), Bar("sft step", 2) as bar:
        bar.step(2)
        raise KeyError
    assert list(lines) == []


def test_threads_tell_of_their_pieces_together(lines):
    with Bar("response", 40_000) as bar:
        threads = [threading.Thread(target=lambda: [bar.step() for _ in range(10_000)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert list(lines)[-1].startswith("train_sft: response 40,000/40,000 · ")


def test_items_of_an_unknown_number_are_counted(lines, monkeypatch):
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    assert list(counted(range(1200), "clerk row"))[-1] == 1199
    reported = list(lines)
    assert re.fullmatch(r"train_sft: clerk row 1,200 · \d+ s so far", reported[-2]) and is_progress(reported[-2])
    assert re.fullmatch(r"train_sft: clerk row 1,200 · \d+ s in all", reported[-1])


def test_an_engine_advances_its_callers_bar(lines):
    drawn(3)  # nobody listens
    with drawing("answer", 8) as bar:
        drawn(3)
        bar.reach(8)
    assert list(lines) == ["train_sft: answer 8/8 · 0 s in all"]


def test_nothing_is_printed_without_a_stage(monkeypatch, caplog):
    monkeypatch.setattr(progress, "_stage", "")
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    caplog.set_level(logging.INFO, logger="rlhf")
    with Bar("sft step", 2) as bar:
        bar.step(2)
    assert not caplog.records


@pytest.mark.parametrize(
    ("seconds", "reported"), [(0.4, "0 s"), (59.6, "1 min 00 s"), (130, "2 min 10 s"), (3599, "59 min 59 s"), (3900, "1 h 05 min")]
)
def test_durations_are_readable(seconds, reported):
    assert duration(seconds) == reported


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    def screen(self) -> list[str]:
        """What stands there in the end: each clearing takes the line it is on."""
        return [line.split("\x1b[2K")[-1] for line in self.getvalue().split("\n")]


def test_a_terminal_shows_the_last_progress_below_everything_else():
    terminal = Terminal()
    status = StatusLine(terminal)
    for line in ("Running stage", "a: step 1/9 · 8 s left", "a warning", "a: step 2/9 · 7 s left"):
        status.tell(line)
    assert terminal.screen() == ["Running stage", "a warning", "a: step 2/9 · 7 s left"]
    for line in ("a: step 9/9 · 9 s in all", "a: done"):
        status.tell(line)
    assert terminal.screen() == ["Running stage", "a warning", "a: step 9/9 · 9 s in all", "a: done", ""]


def test_partial_output_is_printed_by_lines_on_a_terminal_only():
    pieces = ["a war", "ning\na: step 1/9 · 8", " s left\na: step 2/9 · 7 s left\nb", "\n"]
    terminal, pipe = Terminal(), io.StringIO()
    for piece in pieces:
        StatusLine(pipe).pass_on(piece)
    status = StatusLine(terminal)
    for piece in pieces:
        status.pass_on(piece)
    assert pipe.getvalue() == "".join(pieces)
    assert terminal.screen() == ["a warning", "b", "a: step 2/9 · 7 s left"]
    status.pass_on("its last words")
    status.end()
    assert terminal.screen() == ["a warning", "b", "its last words", "a: step 2/9 · 7 s left"]


def test_a_long_printed_list_takes_no_time():
    numbers = ", ".join(str(n) for n in range(10_000, 22_000))
    began = time.monotonic()
    for line in (f"ValueError: got [{numbers}]", f"x: {'12,' * 20_000}", f"x: {'12,' * 60} left"):
        assert not is_progress(line) and not is_end(line)
    assert time.monotonic() - began < 1


def test_a_narrow_terminal_shows_the_time_before_the_figures(monkeypatch):
    monkeypatch.setenv("COLUMNS", "50")
    terminal = Terminal()
    StatusLine(terminal).show("train_sft: sft step 168/6,000 · loss 1.15 · heldout loss 1.21 · 2 min 55 s left")
    assert terminal.screen() == ["train_sft: sft step 168/6,000 · 2 min 55 s left"]


def test_without_a_terminal_every_line_stays():
    out = io.StringIO()
    status = StatusLine(out)
    for line in ("a: step 1/9 · 8 s left", "a: step 2/9 · 7 s left"):
        status.tell(line)
    assert out.getvalue() == "a: step 1/9 · 8 s left\na: step 2/9 · 7 s left\n"


PROGRAM = """
import logging, time
from rlhf_core.progress import Bar, name_stage
from rlhf_core.process import show_own_log
show_own_log()
name_stage("train_sft")
with Bar("sft step", 4) as bar:
    for _ in range(4):
        time.sleep(0.15)
        bar.step(loss=2.0)
    logging.getLogger("rlhf").info("a warning")
"""


def test_a_stage_draws_a_bar_in_a_terminal_and_lines_in_a_pipe():
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "100", "TERM": "xterm"}
    command = [sys.executable, "-c", PROGRAM]
    ours, theirs = pty.openpty()
    subprocess.run(command, env=environment, stdout=theirs, check=True, timeout=60)
    os.close(theirs)
    shown = b""
    while len(shown) < 100_000:
        try:
            part = os.read(ours, 10_000)
        except OSError:  # the other side is closed, and all of it read
            break
        shown += part
    text = shown.decode()
    assert "train_sft: sft step:  75%|" in text and "loss 2" in text and "\x1b[2K" in text
    assert text.endswith("train_sft: sft step 4/4 · loss 2 · 1 s in all\r\n")
    piped = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60).stdout
    assert piped == "a warning\ntrain_sft: sft step 4/4 · loss 2 · 1 s in all\n"


def test_how_far_a_stage_had_come_is_no_reason_for_its_end():
    message = stages._ReproOutput()
    for line in (
        "train_sft: sft step 2/9 · 7 s left",
        "Killed",
        "ERROR: failed to reproduce 'train_sft': failed to run: x, exited with -9",
    ):
        message.listen(line)
    assert str(message.failure("train_sft", 255)) == "train_sft: exited with -9: Killed"
