"""A vLLM engine over two processes in a Ray actor: log-probabilities, new weights, prefix cache, and the death of a process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import divided_engine_probe
from small_workspace import ROOT

pytestmark = [pytest.mark.timeout(600), pytest.mark.long]
BUDGET = 1e-4  # nats; measured: 1e-5


@pytest.fixture(scope="module")
def seen(tmp_path_factory) -> dict:
    return probe(tmp_path_factory.mktemp("model"))


def probe(folder: Path, *arguments: str) -> dict:
    command = [sys.executable, divided_engine_probe.__file__, str(folder), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=550, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_each_process_holds_half_of_the_embedding_and_all_norms(seen):
    # The embedding of 101 words is padded to 128. Linear layers aren't among the parameters: vLLM packs them on a CPU.
    assert seen["weights"] == [4 * (128 * 64 // 2 + 5 * 64)] * 2
    assert seen["memory"] == {}  # of a GPU, which neither uses


def test_log_probabilities_are_the_trainers_in_both_processes(seen):
    assert max(seen["started"]) < BUDGET


def test_new_weights_reach_both_processes(seen):
    assert seen["version"] == 7
    assert max(seen["synced"]) < BUDGET and max(seen["back"]) < BUDGET
    assert seen["old_after_sync"] > 0.1


def test_changes_sent_alone_reach_both_processes(seen):
    difference, moved, share = seen["changes"]
    assert difference < BUDGET and moved > 0.1 and share < 0.3


def test_adapters_sent_alone_reach_both_processes(seen):
    merged, plain = seen["adapters"]
    assert merged < BUDGET and plain > 0.1


def test_prompts_are_taken_from_the_cache_but_never_after_new_weights(seen):
    assert seen["cached"] == divided_engine_probe.BLOCK
    probe, sampled = seen["kept_cache"]  # without the reset
    assert probe < BUDGET and sampled > 0.1


def test_an_engine_that_loses_a_process_is_lost_as_a_whole(seen):
    lost = seen["lost_worker"]
    assert lost["workers"] == 2 and lost["left"] == 0
    assert lost["message"].startswith("rollout rank 0: expected probe to finish, got a dead process")


def test_a_lost_engine_is_replaced_and_its_processes_end_with_their_actor(tmp_path):
    seen = probe(tmp_path, "--replace")
    assert seen["replaced"] < BUDGET and seen["left_after_a_kill"] == 0
