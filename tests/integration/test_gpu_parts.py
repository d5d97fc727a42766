"""The parts of the GPU check that have engines and Ray heads, rehearsed once each on tiny shapes: what they find makes sense."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from small_workspace import ROOT

from bench.gpu.record import Figure, read
from rlhf_core.engines.ray_cluster import MARK

pytestmark = pytest.mark.timeout(600)
PARTS = ("rollouts", "rl", "peer")
BUDGET = 1e-4  # nats, rl.rollout.max_logprob_difference of params.yaml
JOBS = ("GRPO, a tiny shape", "PPO, a tiny shape")


def begin(part: str, out: Path, models: Path) -> subprocess.Popen:
    command = [sys.executable, "-m", f"bench.gpu.{part}", "--out", str(out), "--models", str(models), "--rehearse"]
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "start_new_session": True}
    return subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, **how)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def found(tmp_path_factory, models: Path) -> dict[str, list[Figure]]:
    """The figures of each part."""
    folder, figures = tmp_path_factory.mktemp("found"), {}
    for part in PARTS:
        with begin(part, folder / f"{part}.json", models) as process:
            said, _ = process.communicate(timeout=300)
        assert process.returncode == 0, f"{part}: {said[-3000:]}"
        figures[part] = read(folder / f"{part}.json")
    return figures


def values(figures: list[Figure], *words: str) -> list[float]:
    """Of the figures whose names have all of the words; there is one at least."""
    chosen = [figure for figure in figures if all(word in figure.what for word in words)]
    assert chosen and all(figure.values for figure in chosen), words
    return [value for figure in chosen for value in figure.values]


def test_log_probabilities_of_engine_and_trainer_agree_in_every_job(found):
    for job in JOBS:
        apart = values(found["rl"], job, "log-probabilities", ", max")
        assert len(apart) == 2 and max(apart) < BUDGET, job
        assert max(values(found["rl"], job, "log-probabilities", ", mean")) <= max(apart)


def test_phases_are_parts_of_a_step_and_samples_follow_from_it(found):
    for job in JOBS:
        (step,) = values(found["rl"], job, ": a step")
        phases = [values(found["rl"], job, f": {name}")[0] for name in ("score", "forward", "update", "sync")]
        assert min(phases) > 0 and sum(phases) < step
        assert values(found["rl"], job, ": samples") == pytest.approx([16 / step])
        assert values(found["rl"], job, ": start")[0] > 1.0
        assert min(values(found["rl"], job, ": most resident set")) > 0.1  # of both actors, with their libraries
        assert len(values(found["rl"], job, ": most resident set")) == 2


def test_our_engine_is_measured_beside_vllm_and_its_new_weights_are_those_it_was_given(found):
    figures = found["rollouts"]
    assert min(values(figures, "generated tokens by")) > 0
    ratios = values(figures, "our engine's speed over that of vLLM alone", "8 prompts")
    assert len(ratios) == 4 and all(0.05 < ratio < 20 for ratio in ratios)
    assert max(values(figures, "after load_weights", ", max")) < BUDGET
    assert values(figures, "bytes of load_weights")[0] > 4 * 100_000


def test_trl_does_the_same_steps(found):
    figures = found["peer"]
    assert len(values(figures, "tokens by ours")) == len(values(figures, "tokens by TRL")) == 1
    (ratio,) = values(figures, "our speed over TRL's")
    assert ratio == pytest.approx(values(figures, "tokens by ours")[0] / values(figures, "tokens by TRL")[0])


def test_a_part_that_is_killed_with_its_group_leaves_no_process_of_its_head(tmp_path, models, found):
    """The head has a session of its own, which the signal doesn't reach."""
    with begin("rl", tmp_path / "rl.json", models) as process:
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
