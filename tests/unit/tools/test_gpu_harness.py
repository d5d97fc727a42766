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
from tools.bench.gpu.harness import CUT, FAILED, FIRST_TESTS, LOGS, NOT_RUN, PARTS, RAN, STOPPED, Check, Result, read_results, write_results
from tools.bench.gpu.processes import ROOT, measure_apart
from tools.bench.gpu.record import Figure
from tools.bench.gpu.table import BEGIN, END, REHEARSAL, markdown, put_into

# Each leaves a figure first.
BEGINNING = """
import os, signal, subprocess, sys, time
from pathlib import Path
from tools.bench.gpu.record import Record
from tools.bench.gpu.processes import begin
arguments = begin(None)
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
from pathlib import Path
from tools.bench.gpu.harness import Check, Part, run_parts, write_results
parts = [Part(*given) for given in json.loads(sys.argv[1])]
out, seconds = Path(sys.argv[2]), float(sys.argv[3])
check = Check(out, out, True, {"device": "CPU", "date": "today"}, time.monotonic() + seconds)
write_results(out, list(run_parts(parts, check, check.earlier())))
"""


def run(tmp_path, monkeypatch, parts: list[list], *, seconds: float = 60.0) -> list[Result]:
    """Results of parts of (name, title, seconds that it needs, its limit, module)."""
    subprocess.run(command(tmp_path, monkeypatch, parts, seconds=seconds), cwd=ROOT, check=True, timeout=100)
    return read_results(tmp_path / "out")


def command(tmp_path, monkeypatch, parts: list[list], *, seconds: float = 60.0) -> list[str]:
    bodies = {"fine": "", "hangs": HANGS, "crashes": CRASHES, "waits": WAITS, "leaves": LEAVES, "finds_nothing": "arguments.out.unlink()"}
    for name, body in bodies.items():
        (tmp_path / f"{name}.py").write_text(BEGINNING + textwrap.dedent(body))
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{tmp_path}")
    monkeypatch.setenv("CHILD", str(tmp_path / "child"))
    (tmp_path / "out").mkdir(exist_ok=True)
    return [sys.executable, "-c", RUN, json.dumps(parts), str(tmp_path / "out"), str(seconds)]


@pytest.mark.long
def test_a_part_that_hangs_is_killed_with_all_it_started_and_the_next_one_runs(tmp_path, monkeypatch):
    hung, fine = run(tmp_path, monkeypatch, [["hangs", "", 0, 4, "hangs"], ["fine", "", 0, 60, "fine"]])
    assert hung.outcome == STOPPED and hung.reason.startswith("after 4 s") and "about to hang" in hung.reason
    assert fine.outcome == RAN and fine.seconds < 30
    assert hung.figures == fine.figures == [Figure("what it found", "s", (1.0, 3.0, 2.0), "a note")]
    assert not psutil.pid_exists(int((tmp_path / "child").read_text()))  # although it had a session of its own


@pytest.mark.long
def test_a_part_at_its_limit_may_tidy_up_first(tmp_path, monkeypatch):
    (left,) = run(tmp_path, monkeypatch, [["leaves", "", 0, 4, "leaves"]])
    assert left.outcome == STOPPED and (tmp_path / "child").read_text() == "folders removed"


@pytest.mark.long
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
    assert crashed.outcome == FAILED and crashed.reason.startswith("exit code 3") and "no such kernel" in crashed.reason
    assert len(crashed.figures) == 1
    assert "##### crashes\n" in (log := (tmp_path / "out" / LOGS).read_text()) and "no such kernel\n" in log


@pytest.mark.long
def test_a_part_that_no_longer_fits_a_missing_one_and_an_empty_one_are_named(tmp_path, monkeypatch):
    parts = [
        ["large", "", 1000, 2000, "fine"],
        ["missing", "", 0, 60, "tools.bench.gpu.there_is_none"],
        ["empty", "", 0, 60, "finds_nothing"],
    ]
    large, missing, empty = run(tmp_path, monkeypatch, parts)
    assert large.outcome == NOT_RUN and large.reason.endswith("it needs 1000")
    assert not (tmp_path / "out" / "large.json").exists()
    assert missing.outcome == FAILED and "tools.bench.gpu.there_is_none" in missing.reason
    assert empty.outcome == FAILED and empty.reason == "it left no figures"


@pytest.mark.long
def test_another_call_goes_on_where_the_time_was_up(tmp_path, monkeypatch):
    """A part at its own limit, or that failed, isn't run again; one that the check's end cut off is, with the time that is left."""
    parts = [["crashes", "", 0, 60, "crashes"], ["leaves", "", 0, 3, "leaves"], ["waits", "", 0, 400, "waits"], ["fine", "", 5, 60, "fine"]]
    crashed, left, waited, fine = run(tmp_path, monkeypatch, parts, seconds=9.0)
    assert (crashed.outcome, left.outcome, waited.outcome, fine.outcome) == (FAILED, STOPPED, CUT, NOT_RUN)
    assert waited.seconds < 30 and len(waited.figures) == 1
    parts[2][4] = "fine"
    again = run(tmp_path, monkeypatch, parts)
    assert again[:2] == [crashed, left] and [result.outcome for result in again[2:]] == [RAN, RAN]
    assert (tmp_path / "out" / LOGS).read_text().count("##### crashes") == 1


def test_results_of_another_device_or_of_a_rehearsal_are_not_gone_on_with(tmp_path):
    about = {"device": "A GPU", "torch": "2.11", "date": "2026-01-02"}
    write_results(tmp_path, [Result("sft", RAN, about=about), Result("dpo", RAN, about={**about, "torch": "2.12"})])

    def earlier(*, rehearse: bool = False, **changes: str) -> set[str]:
        return set(Check(tmp_path, tmp_path, rehearse, {**about, **changes}, 0.0).earlier())

    assert earlier() == earlier(date="2026-01-03") == {"sft"} and earlier(torch="2.12") == {"dpo"}
    assert not earlier(device="Another") and not earlier(rehearse=True)


def test_parts_have_limits_under_nine_minutes_and_are_registered_once():
    assert all(0 < part.needs < part.limit <= 540 for part in PARTS)
    names = ["default_job", "ipc", "logprobs", "turns", "sft", "dpo", "reward", "tests", "transfer", "ppo", "lora", "memory"]
    assert [part.name for part in PARTS] == [*names, "fp8", "tensor_parallel"]


@pytest.mark.long
def test_the_first_parts_are_tests_that_exist_and_every_test_says_what_it_needs():
    def collect(*arguments: str) -> list[str]:
        command = [sys.executable, "-m", "pytest", "tests/gpu", "--collect-only", "-p", "no:cacheprovider", *arguments]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
        return [line for line in done.stdout.splitlines() if "::" in line]

    tests = collect()
    assert set(FIRST_TESTS) < set(tests) and len(tests) > 30
    assert not collect("-m", "not (torch or vllm or ray)")


# A part's child


@pytest.mark.long
def test_a_measurement_apart_ends_with_its_result_or_names_its_failure(tmp_path, monkeypatch, capfd):
    child = """
    import os
    from tools.bench.gpu.processes import measure_here
    def measure(case):
        if case["n"] == 1:
            print("out of memory", flush=True)
            os._exit(9)
        return {"twice": 2 * case["n"]}
    assert measure_here(measure)
    """
    (tmp_path / "doubling.py").write_text(textwrap.dedent(child))
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{tmp_path}")
    assert measure_apart("doubling", {"n": 2}, seconds=60) == {"twice": 4}
    with pytest.raises(RuntimeError, match="doubling: expected exit code 0, got 9"):
        measure_apart("doubling", {"n": 1}, seconds=60)
    assert "out of memory" in capfd.readouterr().out  # streamed


# The table


def result(**changes) -> Result:
    figures = [Figure("SFT | steps", "tokens/s", (12000.0, 10000.0, 13000.0), "a note"), Figure("memory", "GiB", ())]
    return Result(
        **{
            "part": "sft",
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
    assert "Outcome: ran, nothing measured, 60 s" in markdown([result(part="tests", figures=skipped)])
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
    with pytest.raises(ValueError, match="expected results of a GPU, got a rehearsal's of sft"):
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


@pytest.mark.long
def test_the_command_line_refuses_what_it_does_not_know_and_a_machine_without_a_gpu(tmp_path, monkeypatch):
    def check(*arguments: str) -> subprocess.CompletedProcess:
        return subprocess.run([sys.executable, "-m", "tools.bench.gpu", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=100)

    unknown = check("--parts", "tests,rollouts")
    assert unknown.returncode == 2 and "expected some of default_job, ipc" in unknown.stderr and "got rollouts" in unknown.stderr
    for parts in (["tests", "sft"], ["tests,sft"], ["tests,", "sft"]):
        monkeypatch.setattr(sys, "argv", ["__main__.py", "--parts", *parts])
        assert parse().parts == ["tests", "sft"]
    assert "usage: python -m tools.bench.gpu [" in check("--help").stdout
    empty = check("--write", str(tmp_path))
    assert empty.returncode == 2 and "expected a folder with results" in empty.stderr
    if not torch.cuda.is_available():
        refused = check("--out", str(tmp_path / "out"))
        assert refused.returncode == 2 and refused.stderr.startswith("device: expected a CUDA device, got none by ")
        assert not (tmp_path / "out").exists()
