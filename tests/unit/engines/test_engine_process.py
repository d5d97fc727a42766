"""A rollout engine in a process of its own: the same answers, its refusals, and an end that leaves nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import psutil
import pytest
from clerk_params import CLERK_PARAMS

from rlhf_core.config import load_params
from rlhf_core.engines.rollout.open import open_here
from rlhf_core.engines.rollout.process import EngineLost, EngineProcess
from rlhf_core.engines.rollout.requests import SamplingSettings
from rlhf_core.models.build import new_language_model, save_model
from rlhf_core.models.tokenizer import build_tokenizer
from rlhf_core.models.weights import read_state_dict

HOW = {"backend": "pytorch", "max_length": 64, "dtype": "float32", "max_concurrent_sequences": 8, "threads": 1, "seed": 0}
HOW |= {"trust_remote_code": False, "gpu_memory_fraction": 0.5}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two models with one tokenizer."""
    paths = [tmp_path_factory.mktemp("model") for _ in range(2)]
    tokenizer = build_tokenizer([f"Sort {n}." for n in range(100, 200)], vocab_size=390)
    for seed, path in enumerate(paths):
        model = new_language_model(load_params(CLERK_PARAMS).model, tokenizer, seed=seed)
        save_model(model, model.state_dict(), tokenizer, path)
    return paths


def answers(engine) -> list:
    message = engine.generate([[5, 6, 7], [8, 9]], [1, 2], SamplingSettings(6, 1.0), stop_ids=(1,), group_size=2)
    return [message, engine.probe([5, 6, 7, 8])]


def test_an_engine_apart_answers_as_one_here_before_and_after_new_weights_and_its_death_is_an_error_and_not_a_wait(folders):
    here, apart = open_here(model_path=str(folders[0]), **HOW), EngineProcess(open_here, model_path=str(folders[0]), **HOW)
    try:
        first = answers(here)
        assert answers(apart) == first
        weights = read_state_dict(folders[1])
        assert (here.load_weights(weights, 3), apart.load_weights(weights, 3), apart.version) == (3, 3, 3)
        assert answers(apart) == answers(here) != first
        with pytest.raises(ValueError, match=r"expected fewer tokens than model\.max_length=64"):  # and it goes on
            apart.generate([[5] * 64], [0], SamplingSettings(6, 1.0), stop_ids=(1,), group_size=1)
        assert apart.probe([5, 6]) == here.probe([5, 6])
        os.kill(apart._process.pid, signal.SIGKILL)
        with pytest.raises(EngineLost, match="the end of its process with exit code -9"):
            apart.probe([5, 6, 7])
    finally:
        apart.close()


def test_an_engine_that_is_closed_leaves_no_process():
    apart = EngineProcess(SimpleNamespace)
    apart.close()
    assert not psutil.pid_exists(apart._process.pid)


@pytest.mark.long
def test_what_the_engine_refuses_is_refused_here_and_no_process_stays(tmp_path):
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(ValueError, match=r"expected a config.json|expected a folder|config\.json"):
        EngineProcess(open_here, model_path=str(tmp_path), **HOW)
    left = [p for p in psutil.Process().children(recursive=True) if p not in before and "resource_tracker" not in " ".join(p.cmdline())]
    assert left == []


HOLDER = """
import time
from types import SimpleNamespace
from rlhf_core.engines.rollout.process import EngineProcess
if __name__ == "__main__":
    engine = EngineProcess(SimpleNamespace)
    print(engine._process.pid, flush=True)
    time.sleep(60)
"""


def test_the_engine_ends_with_a_stage_that_is_killed(tmp_path):
    script = tmp_path / "holder.py"
    script.write_text(HOLDER)
    holder = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    pid = int(holder.stdout.readline())
    engine = psutil.Process(pid)
    engine.send_signal(signal.SIGTERM)  # as the whole group gets it: the stage decides
    time.sleep(0.3)
    assert engine.is_running() and engine.status() != psutil.STATUS_ZOMBIE
    holder.kill()
    holder.wait()
    gone, _ = psutil.wait_procs([engine], timeout=10)
    assert gone or engine.status() == psutil.STATUS_ZOMBIE


FAILING = """
from types import SimpleNamespace
from rlhf_core.engines.rollout.process import EngineProcess
if __name__ == "__main__":
    engine = EngineProcess(SimpleNamespace)
    raise SystemExit(3)
"""


@pytest.mark.long
def test_a_stage_that_fails_before_it_has_closed_the_engine_ends(tmp_path):
    script = tmp_path / "failing.py"
    script.write_text(FAILING)
    assert subprocess.run([sys.executable, str(script)], timeout=60, check=False).returncode == 3
