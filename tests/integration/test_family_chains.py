"""vLLM on the CPU with models of several families: log-probabilities after weight updates, long prompts, what it can't run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import families_probe
from small_workspace import ROOT

pytestmark = [pytest.mark.timeout(600), pytest.mark.long]
BUDGET = 1e-4  # nats; measured: 1.2e-5
ADAPTED_BUDGET = 1e-3


@pytest.fixture(scope="module")
def seen(tmp_path_factory) -> dict:
    command = [sys.executable, str(Path(families_probe.__file__)), str(tmp_path_factory.mktemp("models"))]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("family", families_probe.FAMILIES)
def test_after_each_update_the_engine_computes_what_transformers_does(seen: dict, family: str):
    assert max(seen[family]["differences"]) < BUDGET
    assert min(seen[family]["apart"]) > 1.0  # weights that stay would show
    assert seen[family]["version"] == 2


@pytest.mark.parametrize("family", families_probe.FAMILIES)
def test_weights_sent_a_layer_at_a_time_compute_as_those_loaded_at_once(seen: dict, family: str):
    assert seen[family]["same_as_loaded"]


@pytest.mark.parametrize("family", families_probe.FAMILIES)
def test_changes_sent_alone_compute_as_all_weights(seen: dict, family: str):
    assert seen[family]["changes_arrive"] and seen[family]["changes_share"] < 0.3


@pytest.mark.parametrize("family", families_probe.FAMILIES)
def test_adapters_sent_alone_compute_as_merged_weights(seen: dict, family: str):
    """Though the engine has weights of another policy, all of which are replaced."""
    assert seen[family]["same_as_merged"] and seen[family]["adapters_difference"] < ADAPTED_BUDGET
    assert seen[family]["adapters_share"] < 0.15


def test_seeded_prompts_beyond_one_forward_pass_are_drawn_by_their_seeds(seen: dict):
    assert seen["long_prompts"] == {"same": True, "several": True}


def test_heads_that_the_cpu_build_lacks_are_refused_with_its_reason(seen: dict):
    assert seen["refusal"].startswith(
        "rollout.backend: expected a model that vLLM's CPU build can run, got LlamaForCausalLM with RuntimeError: Unsupported CPU attention"
    )
    assert "head_dim=8" in seen["refusal"] and seen["refusal"].endswith("; set rollout.backend to pytorch")


def test_experts_that_a_reload_passes_over_are_refused_at_the_start(seen: dict):
    assert seen["not_reloaded"].startswith("rollout.backend: expected a model whose weights vLLM can update, got GptOssForCausalLM, whose")
