"""vLLM against the trainer on the same weights: log-probabilities, weight sync, seeds, ends. One engine per kind of model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import rollout_probe
from small_workspace import ROOT

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]
BUDGET = 1e-4  # nats; measured: 1e-5


@pytest.fixture(scope="module")
def probe(tmp_path_factory) -> dict[str, dict]:
    command = [sys.executable, str(Path(rollout_probe.__file__)), str(tmp_path_factory.mktemp("models")), *rollout_probe.HEADS]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(params=rollout_probe.HEADS)
def seen(request, probe) -> dict:
    return probe[request.param]


def test_log_probabilities_are_the_trainers_at_the_sampling_temperature(seen):
    assert seen["at_1"] < BUDGET and seen["at_0.7"] < BUDGET
    assert seen["at_1_taken_for_0.7"] > 0.1  # the comparison can tell


@pytest.mark.parametrize("name", ["top_p", "top_k", "both_cool"])
def test_of_a_filtered_sampler_they_are_those_within_the_tokens_that_are_left(seen, name):
    filtered, unfiltered = seen[name]
    assert filtered < BUDGET
    assert unfiltered > 0.1  # the mass that the filter took away


def test_before_the_fewest_tokens_the_end_is_forbidden_and_only_there_log_probabilities_differ(seen):
    assert min(seen["min_lengths"]) >= 6 and min(len(ids) for ids, _, _ in seen["samples"]) < 6
    before, after = seen["before_and_after_min"]
    assert after < BUDGET < 1e-3 < before


def test_each_of_the_stop_tokens_ends_a_response_and_none_comes_before_the_fewest_tokens(seen):
    ends = {rollout_probe.EOS, seen["other_end"]}
    assert any(ids[-1] == seen["other_end"] for ids, _ in seen["two_ends"])
    assert all(finished == (ids[-1] in ends) and not {*ids[:-1]} & ends for ids, finished in seen["two_ends"])
    assert not any({*first} & ends for first in seen["late_ends"])


def test_responses_in_flight_are_continued_with_new_weights(seen):
    parts, finished = seen["parts"], seen["parts_finished"]
    assert seen["parts_differ"] < BUDGET and seen["parts_again"]
    assert seen["parts_taken_for_others"] > 0.1  # the comparison can tell
    assert sum([version for version, _ in spans] == [0, 1, 2] for spans in parts) >= 8
    assert all(size <= 7 for spans in parts for version, size in spans if version < 2)
    assert all(done or sum(size for _, size in spans) == 24 for spans, done in zip(parts, finished, strict=True))
    assert any(spans[0][0] > 0 for spans in parts)  # of 48 requests 32 have room


def test_new_weights_replace_the_old_ones(seen):
    assert seen["version"] == [0, 7, 7]
    assert seen["synced"] < BUDGET
    assert seen["old_after_sync"] > 0.1


def test_replaced_weights_give_the_samples_that_vllms_own_reload_gives(seen):
    assert seen["reloaded"] and seen["replaced"]
    assert seen["replaced_as_reloaded"] == [True, 9, True]


def test_weights_that_are_not_the_models_are_left_to_vllm(seen):
    assert seen["unknown_weights"] == [False, False, False]
    assert seen["unknown_changed_nothing"]


def test_weights_from_a_file_bring_the_first_samples_back(seen):
    assert seen["back"]


def test_stale_weights_are_noticed_by_the_loops_check(seen):
    assert seen["check_in_sync"] == "passed"
    assert seen["check_stale"].startswith("step 3: expected the rollout engine's and the trainer's log-probabilities of the same tokens to")


def test_nothing_is_compiled(seen):
    """It would take 3 s at the first answer, 13 on a fresh machine."""
    assert seen["compiled_graphs"] == 0


def test_the_seed_alone_decides_what_is_drawn(seen):
    assert seen["again"]
    assert all(seen["alone"]), "expected the same samples whatever else is in the batch"
    assert seen["siblings_differ"] >= len(rollout_probe.PROMPTS) - 1  # two of one prompt are two draws


def test_prompts_that_join_a_running_batch_get_the_same_samples(seen):
    assert seen["in_parts"]


def test_an_engine_without_a_prompt_has_no_samples(seen):
    assert seen["of_nothing"] == []


def test_temperature_zero_takes_the_most_likely_token(seen):
    assert seen["greedy_is_argmax"]


def test_a_response_ends_with_the_end_token_or_is_truncated(seen):
    for response_ids, finished, num_logprobs in seen["samples"]:
        assert num_logprobs == len(response_ids) <= rollout_probe.NEW
        assert finished == (response_ids[-1] == rollout_probe.EOS)
        assert finished or len(response_ids) == rollout_probe.NEW
        assert rollout_probe.EOS not in response_ids[:-1]
    ends = {finished for _, finished, _ in seen["samples"]}
    assert ends == {True, False}
