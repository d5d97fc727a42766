"""The GPU check's harness on parts made for it: one that hangs, one that crashes, one that is fine; and its table.

In a process of its own: the harness ends all processes that came of a part, and takes those in whose parents have died.
"""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import time

import psutil
import pytest
import torch

from tools.bench.gpu.__main__ import parse
from tools.bench.gpu.cases import ROOT, measure_apart
from tools.bench.gpu.harness import FAILED, NOT_RUN, PARTS, RAN, STOPPED, Result, read_result
from tools.bench.gpu.record import Figure, Record
from tools.bench.gpu.table import BEGIN, END, REHEARSAL, markdown, put_into

# Each leaves a figure first.
BEGINNING = """
import os, signal, subprocess, sys, time
from pathlib import Path
from tools.bench.gpu.record import Record
from tools.bench.gpu.shapes import argument_parser
arguments = argument_parser(None).parse_args()
Record(arguments.out).add("what it found", "s", [1.0, 3.0, 2.0], "a note")
"""
HANGS = """
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], start_new_session=True)
Path(os.environ["CHILD"]).write_text(str(child.pid))
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("about to hang", flush=True)
time.sleep(300)
"""
LEAVES = """
def leave(*_):
    Path(os.environ["CHILD"]).write_text("folders removed")
    sys.exit(1)
signal.signal(signal.SIGTERM, leave)
time.sleep(300)
"""
WAITS = """
Path(os.environ["CHILD"]).write_text(str(os.getpid()))
time.sleep(300)
"""
CRASHES = """
print("no such kernel", file=sys.stderr)
os._exit(3)
"""
RUN = """
import json, sys, time
from dataclasses import asdict
from pathlib import Path
from tools.bench.gpu.harness import Part, run_parts
parts = [Part(*given) for given in json.loads(sys.argv[1])]
out, seconds = Path(sys.argv[2]), float(sys.argv[3])
how = {"until": time.monotonic() + seconds, "rehearse": True, "models": out, "about": {"device": "CPU", "date": "today"}}
Path(sys.argv[4]).write_text(json.dumps([asdict(result) for result in run_parts(parts, out, **how)]))
"""


def run(tmp_path, monkeypatch, parts: list[list], *, seconds: float = 60.0) -> list[dict]:
    """Results of parts of (name, title, seconds that it needs, its limit, module)."""
    subprocess.run(command(tmp_path, monkeypatch, parts, seconds=seconds), cwd=ROOT, check=True, timeout=100)
    return json.loads((tmp_path / "found.json").read_text())


def command(tmp_path, monkeypatch, parts: list[list], *, seconds: float = 60.0) -> list[str]:
    bodies = {"fine": "", "hangs": HANGS, "crashes": CRASHES, "waits": WAITS, "leaves": LEAVES, "finds_nothing": "arguments.out.unlink()"}
    for name, body in bodies.items():
        (tmp_path / f"{name}.py").write_text(BEGINNING + textwrap.dedent(body))
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{tmp_path}")
    monkeypatch.setenv("CHILD", str(tmp_path / "child"))
    out, found = tmp_path / "out", tmp_path / "found.json"
    out.mkdir()
    return [sys.executable, "-c", RUN, json.dumps(parts), str(out), str(seconds), str(found)]


def test_a_part_that_hangs_is_killed_with_all_it_started_and_the_next_one_runs(tmp_path, monkeypatch):
    hung, fine = run(tmp_path, monkeypatch, [["hangs", "", 0, 4, "hangs"], ["fine", "", 0, 60, "fine"]])
    assert hung["outcome"] == STOPPED and hung["reason"].startswith("after 4 s") and "about to hang" in hung["reason"]
    assert fine["outcome"] == RAN and fine["seconds"] < 30
    assert hung["figures"] == fine["figures"] == [{"what": "what it found", "unit": "s", "values": [1.0, 3.0, 2.0], "note": "a note"}]
    assert not psutil.pid_exists(int((tmp_path / "child").read_text()))  # although it had a session of its own


def test_a_part_at_its_limit_may_tidy_up_first(tmp_path, monkeypatch):
    (left,) = run(tmp_path, monkeypatch, [["leaves", "", 0, 4, "leaves"]])
    assert left["outcome"] == STOPPED and (tmp_path / "child").read_text() == "folders removed"


def test_a_part_ends_with_the_harness_however_that_ends(tmp_path, monkeypatch):
    seen = tmp_path / "child"
    harness = subprocess.Popen(command(tmp_path, monkeypatch, [["waits", "", 0, 60, "waits"]]), cwd=ROOT)
    until = time.monotonic() + 60
    while not (seen.exists() and seen.read_text()) and time.monotonic() < until:
        time.sleep(0.05)
    part = psutil.Process(int(seen.read_text()))
    harness.kill()
    harness.wait()
    part.wait(timeout=30)


def test_a_part_that_crashes_leaves_its_figures_and_its_reason(tmp_path, monkeypatch):
    (crashed,) = run(tmp_path, monkeypatch, [["crashes", "", 0, 60, "crashes"]])
    assert crashed["outcome"] == FAILED and crashed["reason"].startswith("exit code 3") and "no such kernel" in crashed["reason"]
    assert len(crashed["figures"]) == 1
    assert read_result(tmp_path / "out" / "crashes.json") == Result(
        **{**crashed, "figures": [Figure("what it found", "s", (1, 3, 2), "a note")]}
    )


def test_a_part_that_no_longer_fits_a_missing_one_and_an_empty_one_are_named(tmp_path, monkeypatch):
    parts = [
        ["large", "", 1000, 2000, "fine"],
        ["missing", "", 0, 60, "tools.bench.gpu.there_is_none"],
        ["empty", "", 0, 60, "finds_nothing"],
    ]
    large, missing, empty = run(tmp_path, monkeypatch, parts)
    assert large["outcome"] == NOT_RUN and large["reason"].endswith("it needs 1000")
    assert not (tmp_path / "out" / "large.json").exists()
    assert missing["outcome"] == FAILED and "tools.bench.gpu.there_is_none" in missing["reason"]
    assert empty["outcome"] == FAILED and empty["reason"] == "it left no figures"


def test_a_part_gets_no_more_time_than_is_left(tmp_path, monkeypatch):
    (waited,) = run(tmp_path, monkeypatch, [["waits", "", 0, 400, "waits"]], seconds=3.0)
    assert waited["outcome"] == STOPPED and waited["seconds"] < 30


def test_of_a_part_that_was_running_when_all_was_ended_its_figures_are_read(tmp_path):
    Record(tmp_path / "lora.json").add("steps", "tokens/s", [5.0])
    found = read_result(tmp_path / "lora.json")
    assert (found.part, found.outcome, found.figures) == ("lora", STOPPED, [Figure("steps", "tokens/s", (5.0,))])


def test_parts_have_limits_under_nine_minutes_and_are_registered_once():
    assert all(0 < part.needs < part.limit <= 540 for part in PARTS)
    names = ["tests", "training", "vllm", "rl", "trl", "turns", "transfer", "lora", "tensor_parallel", "memory"]
    assert [part.name for part in PARTS] == names


# A part's child


def test_cases_after_a_crash_have_its_reason_and_those_before_it_their_figures(tmp_path, monkeypatch):
    """Together in one child; a child each, the others are measured all the same."""
    child = """
    import os, sys
    from tools.bench.gpu.cases import measure_here
    def measure(case):
        if case["n"] == 1:
            print("out of memory", flush=True)
            os._exit(9)
        return {"twice": 2 * case["n"]}
    measure_here(sys.argv[2], measure)
    """
    (tmp_path / "doubling.py").write_text(textwrap.dedent(child))
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{tmp_path}")
    cases = [{"n": 0}, {"n": 1}, {"n": 2}]
    reason = "exit code 9: out of memory"
    assert [found for _, found in measure_apart("doubling", cases, seconds=60, together=True)] == [{"twice": 0}, reason, reason]
    assert [found for _, found in measure_apart("doubling", cases, seconds=60, together=False)] == [{"twice": 0}, reason, {"twice": 4}]


# The table


def result(**changes) -> Result:
    figures = [Figure("SFT | steps", "tokens/s", (12000.0, 10000.0, 13000.0), "a note"), Figure("memory", "GiB", ())]
    return Result(
        **{
            "part": "training",
            "outcome": RAN,
            "seconds": 60.0,
            "about": {"device": "A GPU", "date": "2026-01-02"},
            "figures": figures,
            **changes,
        }
    )


def test_parts_without_a_result_say_that_they_were_not_run():
    written = markdown([])
    for part in PARTS:
        assert f"### {part.name}: {part.title}\n\nOutcome: not run.\n" in written
    assert "|" not in written and REHEARSAL not in written


def test_tests_that_were_all_skipped_are_no_check():
    skipped = [Figure("test_a", "s", (), "there is no second GPU"), Figure("test_b", "s", (), "there is no vLLM")]
    assert "Outcome: ran, all skipped, 60 s" in markdown([result(part="tests", figures=skipped)])
    passed = Figure("test_c", "s", (1.0,), "passed")
    assert "Outcome: ran, 60 s" in markdown([result(part="tests", figures=[*skipped, passed])])
    assert "Outcome: failed, 60 s" in markdown([result(part="tests", outcome=FAILED, figures=skipped)])


def test_a_figure_has_its_median_and_spread_and_one_without_values_none():
    written = markdown([result()])
    assert "| SFT \\| steps | 12,000 | 10,000 to 13,000 | tokens/s | a note |" in written
    assert "| memory | none |  | GiB |  |" in written
    assert "Outcome: ran, 60 s on A GPU, 2026-01-02." in written
    assert "device A GPU; date 2026-01-02." in written


def test_figures_of_a_rehearsal_are_marked_and_stay_out_of_the_document(tmp_path):
    document = tmp_path / "gpu.md"
    document.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    assert markdown([result(rehearsal=True)]).startswith(REHEARSAL)
    with pytest.raises(ValueError, match="expected results of a GPU, got a rehearsal's of training"):
        put_into(document, [result(rehearsal=True)])
    assert "old" in document.read_text()
    put_into(document, [result()])
    assert document.read_text() == f"before\n{BEGIN}\n\n{markdown([result()])}\n{END}\nafter\n"


def test_the_document_has_a_place_for_every_part():
    text = (ROOT / "docs" / "gpu.md").read_text()
    section = text[text.index(BEGIN) : text.index(END)]
    for part in PARTS:
        assert f"### {part.name}: {part.title}" in section
    with pytest.raises(ValueError, match="expected the lines"):
        put_into(ROOT / "README.md", [])


def test_the_command_line_refuses_what_it_does_not_know_and_a_machine_without_a_gpu(tmp_path, monkeypatch):
    def check(*arguments: str) -> subprocess.CompletedProcess:
        return subprocess.run([sys.executable, "-m", "tools.bench.gpu", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=100)

    unknown = check("--parts", "tests,rollouts")
    assert unknown.returncode == 2 and "expected some of tests, training" in unknown.stderr and "got rollouts" in unknown.stderr
    for parts in (["tests", "training"], ["tests,training"], ["tests,", "training"]):
        monkeypatch.setattr(sys, "argv", ["__main__.py", "--parts", *parts])
        assert parse().parts == ["tests", "training"]
    assert "usage: python -m tools.bench.gpu [" in check("--help").stdout
    empty = check("--write", str(tmp_path))
    assert empty.returncode == 2 and "expected a folder with results" in empty.stderr
    if not torch.cuda.is_available():
        refused = check("--out", str(tmp_path / "out"))
        assert refused.returncode == 2 and refused.stderr.startswith("device: expected a CUDA device, got none by ")
        assert not (tmp_path / "out").exists()
