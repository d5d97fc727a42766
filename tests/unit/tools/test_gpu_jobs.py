"""What the GPU check's RL jobs, engines and TRL's trainer run, and how their output becomes figures."""

from __future__ import annotations

import fcntl
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from tools.bench.gpu.job import sizes
from tools.bench.gpu.jobs import GRPO, REHEARSED, add, cases
from tools.bench.gpu.online import PHASES, Outcome, weight_bytes
from tools.bench.gpu.processes import Budget, Peaks, noted, role_of
from tools.bench.gpu.record import Record, read
from tools.bench.gpu.shapes import TINY, model_folder, norm_weight
from tools.bench.gpu.trl_side import arguments

EVERY = [*cases(GRPO, rehearse=False).values(), *cases(REHEARSED, rehearse=True).values()]


@pytest.mark.parametrize("case", EVERY, ids=lambda case: case.name)
def test_a_case_is_a_job_of_one_engine_and_one_rank_with_room_for_its_sequences(case):
    params = case.params
    assert params.rl.rollout.engines == params.rl.trainer.ranks == 1
    assert params.rl.rollout.gpus_per_engine + params.rl.trainer.gpus_per_rank == 1.0
    assert params.rl.samples_per_step == params.rl.minibatch_size == case.prompts * case.group
    assert params.model.dtype == case.dtype and params.model.max_length == case.prompt[1] + 8 + case.response
    rows = case.rows()
    assert len({row["messages"][0]["content"] for row in rows}) == len(rows) == case.steps * case.prompts
    assert case.warmup < case.steps


@pytest.mark.long
def test_trl_gets_the_same_batch_in_micro_batches_of_whole_groups():
    for case in (GRPO, REHEARSED):
        requested = arguments(case)
        size = requested["per_device_train_batch_size"]
        assert size * requested["gradient_accumulation_steps"] == case.samples and size % case.group == 0
        assert size * case.max_length <= case.microbatch_tokens
        assert (requested["num_generations"], requested["max_completion_length"], requested["beta"]) == (
            case.group,
            case.response,
            case.params.rl.kl.coef,
        )
    assert arguments(GRPO)["per_device_train_batch_size"] == 8  # of 256 + 8 + 256 tokens


def test_sizes_of_differences_are_of_their_absolute_values():
    found = sizes(torch.tensor([-0.04, 0.0, 0.01, 0.03]))
    assert found == pytest.approx({"mean": 0.02, "p50": 0.03, "p99": 0.04, "p999": 0.04, "max": 0.04})
    thousands = sizes(torch.arange(2000, dtype=torch.float64))
    assert (thousands["p50"], thousands["p99"], thousands["p999"], thousands["max"]) == (1000, 1980, 1998, 1999)


def test_float32_weights_are_twice_as_many_bytes():
    case = GRPO  # 1,544 million parameters, https://huggingface.co/Qwen/Qwen2.5-1.5B
    assert weight_bytes(case) == pytest.approx(2 * 1544e6, rel=1e-3)
    assert weight_bytes(replace(case, dtype="float32")) == 2 * weight_bytes(case)


@pytest.mark.long
def test_a_random_model_has_the_requested_spread_of_logits(tmp_path):
    from safetensors.torch import load_file

    assert norm_weight(1536) == pytest.approx(3.0 / (0.02 * 39.19), rel=1e-3)
    weights = load_file(model_folder(TINY, tmp_path) / "model.safetensors")
    assert set(weights["model.norm.weight"].tolist()) == {5.0}  # the most
    assert set(load_file(model_folder(TINY, tmp_path, "reward") / "model.safetensors")["model.norm.weight"].tolist()) == {5.0}


def test_a_model_that_another_process_writes_is_waited_for(tmp_path):
    folder = tmp_path / f"{TINY}-language"
    with (tmp_path / f"{TINY}-language.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with ThreadPoolExecutor() as pool:
            waiting = pool.submit(model_folder, TINY, tmp_path)
            time.sleep(1)
            folder.mkdir()
            fcntl.flock(lock, fcntl.LOCK_UN)
            assert waiting.result(timeout=60) == folder and not list(folder.iterdir())


def test_warm_up_steps_do_not_count(tmp_path):
    case = replace(REHEARSED, steps=3, warmup=1)
    row = {name: 0.5 for name in ("seconds_checkpoint", *(f"seconds_{phase}" for phase in PHASES))}
    seconds = [{"seconds": s, **row} for s in (9.0, 2.0, 4.0)]
    apart = [{"mean": 0.1, "max": 0.2}] * 3
    peaks = Peaks(host={"trainer": 2 << 30}, device={"engine": 3 << 30}, whole=5 << 30)
    add(Record(tmp_path / "found.json"), case, Outcome(1.0, seconds, [90.0, 80.0, 40.0], [7.0] * 3, apart, peaks, []), 7)
    found = {figure.what.removeprefix(f"{case.name}: "): figure for figure in read(tmp_path / "found.json")}
    assert found["a step"].values == (2.0, 4.0)
    assert found["samples"].values == (8.0, 4.0)  # 16 samples in 2 and 4 s
    assert found["generated tokens over the whole step"].values == (40.0, 10.0)
    assert found["generated tokens while it generates"].values == (160.0, 80.0)
    assert found["log-probabilities of engine and trainer apart, max"].values == (0.2, 0.2, 0.2)
    assert found["most GPU memory of the engine"].values == (3.0,) and found["most resident set of the trainer"].values == (2.0,)
    assert found["most GPU memory of all processes"].values == (5.0,)


def test_roles_follow_from_rays_process_names():
    assert role_of("ray::RolloutActor.__init__   ") == role_of("ray::RolloutActor") == "engine"
    assert role_of("ray::TrainerRank") == "trainer"
    assert role_of("ray::TextScorers") is role_of("python -m tools.bench.gpu.jobs TrainerRank") is None


def test_a_failure_keeps_its_reason_and_the_rest_continues(tmp_path):
    record, failures = Record(tmp_path / "found.json"), []
    with noted(record, "this", failures):
        raise RuntimeError("first\nand last")
    with noted(record, "that", failures):
        record.add("that", "s", [1.0])
    this, that = read(tmp_path / "found.json")
    assert this.values == () and "and last" in this.note and that.values == (1.0,) and failures == ["this: first\nand last"]


def test_a_budget_runs_out():
    budget = Budget(0.01)
    time.sleep(0.02)
    assert budget.left < 0 < Budget(60.0).left
