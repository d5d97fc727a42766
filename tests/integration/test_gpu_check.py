"""A rehearsal of the GPU check: its parts run on the CPU with a tiny shape and have plausible figures."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from rlhf_core.engines.ray.cluster import MARK
from tools.bench.gpu.harness import PARTS, RAN, Result, read_results
from tools.bench.gpu.processes import ROOT
from tools.bench.gpu.record import Figure
from tools.bench.gpu.table import REHEARSAL

MOST_SECONDS = 1500  # two minutes of CPU time, on cores shared with other tests
BUDGET = 1e-4  # nats
JOB = "PPO, a tiny shape, float32, 16 samples a step of 16 tokens, by turns"
# part: prefix of a figure's name, and how many such figures have a value
FIGURES = {
    "default_job": ("test_the_default_job", 0),
    "tests": ("test_", 0),
    "dpo": ("DPO, a tiny shape, bfloat16: our speed over TRL's", 1),
    "reward": ("reward model, a tiny shape, bfloat16, TRL", 1),
    "ppo": (f"{JOB}: offload", 1),
    "transfer": ("weights by gloo, a tiny shape, float32: speed", 1),
    "lora": ("SFT with QLoRA, a tiny shape", 1),
    "memory": ("PPO trainer, a tiny shape, bfloat16: policy: gradients", 1),
    "fp8": ("GRPO, a tiny shape", 1),
    "tensor_parallel": ("GRPO, a tiny shape", 1),
}

pytestmark = [pytest.mark.timeout(MOST_SECONDS + 60), pytest.mark.long]


@dataclass(frozen=True)
class Rehearsal:
    """The command's output. results: by part; files: all files of its folder."""

    printed: str
    table: str
    results: dict[str, Result]
    files: list[Path]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory, models: Path) -> Rehearsal:
    """Of a part with an RL job."""
    return rehearse(tmp_path_factory.mktemp("rehearsal") / "out", models, ["ppo"])


@pytest.fixture(scope="module")
def whole(tmp_path_factory, models: Path) -> Rehearsal:
    return rehearse(tmp_path_factory.mktemp("whole") / "out", models, [part.name for part in PARTS])


def rehearse(out: Path, models: Path, parts: list[str]) -> Rehearsal:
    command = [sys.executable, "-m", "tools.bench.gpu", "--rehearse", "--minutes", "24", "--out", str(out), "--models", str(models)]
    done = subprocess.run([*command, "--parts", *parts], cwd=ROOT, capture_output=True, text=True, timeout=MOST_SECONDS)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    results = {result.part: result for result in read_results(out)}
    assert set(results) == set(parts)
    return Rehearsal(done.stdout, (out / "gpu.md").read_text(), results, list(out.iterdir()))


def test_every_part_runs_and_the_table_has_them_all(whole):
    assert whole.table.startswith(REHEARSAL) and whole.table in whole.printed
    for part in PARTS:
        result = whole.results[part.name]
        assert result.rehearsal and result.outcome == RAN, result.reason
        assert f"### {part.name}: {part.title}" in whole.table and result.figures[0].what in whole.table
    for name, (beginning, least) in FIGURES.items():
        figures = [f for f in whole.results[name].figures if f.what.startswith(beginning)]
        assert figures and sum(bool(f.values) for f in figures) >= least, name
    assert {file.name for file in whole.files} == {"results.json", "gpu.md", "logs.txt"}
    assert whole.results["tests"].about["torch"]


def values(figures: list[Figure], *words: str) -> list[float]:
    """Values of the figures whose names have all words; at least one."""
    chosen = [figure for figure in figures if all(word in figure.what for word in words)]
    assert chosen and all(figure.values for figure in chosen), words
    return [value for figure in chosen for value in figure.values]


def test_the_table_says_that_it_is_a_rehearsal(rehearsal):
    assert rehearsal.table.startswith(REHEARSAL) and rehearsal.table in rehearsal.printed
    result = rehearsal.results["ppo"]
    assert result.rehearsal and result.outcome == RAN, result.reason


def test_log_probabilities_of_engine_and_trainer_agree(rehearsal):
    figures = rehearsal.results["ppo"].figures
    apart = values(figures, JOB, "log-probabilities", ", max")
    assert len(apart) == 2 and max(apart) < BUDGET
    assert max(values(figures, JOB, "log-probabilities", ", mean")) <= max(apart)
    assert max(values(figures, JOB, "entropy")) < 7.3, "of 2,048 tokens with the same probability it is 7.6: any two models agree"


def test_phases_are_parts_of_a_step_and_samples_follow_from_it(rehearsal):
    figures = rehearsal.results["ppo"].figures
    (step,) = values(figures, JOB, ": a step")
    phases = [values(figures, JOB, f": {name}")[0] for name in ("score", "forward", "update", "sync")]
    assert min(phases) > 0 and sum(phases) < step
    assert values(figures, JOB, ": samples") == pytest.approx([16 / step])
    assert values(figures, JOB, ": start")[0] > 1.0
    held = values(figures, JOB, ": most resident set")
    assert len(held) == 2 and min(held) > 0.1  # both actors with their libraries


def test_trl_does_the_same_steps(whole):
    figures = whole.results["turns"].figures
    ours, theirs = (values(figures, f"generated tokens over the whole step{by}") for by in ("", " by TRL"))
    assert values(figures, "our speed over TRL's") == pytest.approx([ours[0] / theirs[0]])
    for method in ("sft", "dpo", "reward"):
        figures = whole.results[method].figures
        (ratio,) = values(figures, "our speed over TRL's")
        assert 0.05 < ratio < 20


def test_weights_by_gloo_are_timed_and_the_engine_computes_with_them(whole):
    figures = whole.results["transfer"].figures
    seconds, speeds = values(figures, "by gloo", ": a sync"), values(figures, "by gloo", ": speed")
    assert len(seconds) == 5 and min(seconds) > 0
    assert 0.4 < speeds[0] * seconds[0] == pytest.approx(speeds[1] * seconds[1])  # MB: 100,000 weights of float32, and more
    assert values(figures, "by gloo", "apart, max")[0] < BUDGET
    (ipc,) = (figure for figure in figures if "by ipc" in figure.what and not figure.values)
    assert ipc.note == "left out: no GPU here"


def test_a_part_that_is_killed_with_its_group_leaves_no_process_of_its_head(tmp_path, models, rehearsal):
    """The head has its own session, which the signal doesn't reach."""
    command = [
        sys.executable,
        "-m",
        "tools.bench.gpu.jobs",
        "--out",
        str(tmp_path / "jobs.json"),
        "--models",
        str(models),
        "--rehearse",
        "ppo",
    ]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "start_new_session": True}
    with subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, **quiet) as process:
        until = time.monotonic() + 120
        while len(came := descendants(process.pid)) < 8 and time.monotonic() < until:
            time.sleep(0.2)
        os.killpg(process.pid, signal.SIGKILL)
    assert len(came) >= 8 and any(MARK in environment(p) for p in came)
    _, alive = psutil.wait_procs(came, timeout=30)
    assert not [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def descendants(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def environment(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except psutil.Error:
        return {}
