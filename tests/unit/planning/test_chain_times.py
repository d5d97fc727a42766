"""Seconds of a chain's stages, from numbers derived by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rlhf_core.config import LoraConfig, Params, parse_params, read_yaml
from rlhf_core.planning.chain import Rows, rl_time, row_flops, stage_times, supervised_time, update_factor
from rlhf_core.planning.hardware import GPUS
from rlhf_core.planning.remedy import changed
from rlhf_core.planning.shape import ModelShape
from rlhf_core.planning.speed import Speed, measured_flops, of_gpus

# One layer without attention's length (width 1 x 1): trunk matrices 4 x 2 x 2 + 3 x 2 x 4 = 40, embedding 10 x 2 = 20.
SHAPE = ModelShape(1, 2, 4, 1, 1, 2, 10, tied=True)
ROWS = Rows(train=100, heldout=10, tokens=20, sequence=10, response=4)  # two sequences a row
SPEED = Speed(update=2.0, forward=5.0, decode=1.0, bandwidth=None, decode_step=0.0, start=7.0, basis="")


def params(**changes) -> Params:
    read = parse_params(read_yaml(Path(__file__).parents[3] / "params.yaml"), complete=False)
    return changed(read, {key.replace("__", "."): value for key, value in changes.items()})


def test_a_row_is_its_trunk_its_attention_and_the_head_at_its_responses():
    """Trunk 20 tokens x 2 x 40 = 1600, attention 20 x 2 x 1 layer x 10 tokens x width 2 = 800, head 2 x 4 tokens x 2 x 20 = 320."""
    assert SHAPE.active_trunk == 40 and SHAPE.embedding == 20
    assert row_flops(SHAPE, ROWS) == 1600 + 800 + 320


def test_adapters_save_the_gradients_of_frozen_weights():
    assert update_factor(None, checkpointing=False) == 3 and update_factor(None, checkpointing=True) == 4
    assert update_factor(LoraConfig(), checkpointing=False) == 2 and update_factor(LoraConfig(), checkpointing=True) == 3


def test_dpo_is_updates_evaluations_and_the_reference():
    """10 steps of 20 rows at 2720 FLOP: 200 x 2720 x 3 / 2 s. Evaluations after steps 4, 8 and 10, of 10 rows each, and the reference of
    110 rows: 140 x 2720 / 5 s. Start 7 s.
    """
    p = params(dpo__batch_size=20, dpo__epochs=2.0, dpo__eval_every=4)
    found = supervised_time("dpo", p, SHAPE, ROWS, SPEED, reference=True)
    assert found.steps == 10
    assert found.seconds == pytest.approx(7 + 200 * 2720 * 3 / 2 + 140 * 2720 / 5)


def test_a_step_of_rl_generates_scores_and_updates():
    """16 samples of 2 prompts of 10 tokens with 4 new ones, sequences of 14. Generation: 64 tokens x (2 x 60 + 2 x 14 x 2) at 1 FLOP/s, and
    20 prompt tokens x (2 x 40 + 2 x 10 x 2) at 5. A pass: 224 tokens x (80 + 2 x 14 x 2) and the head at 64 x 40.
    """
    p = params(rl__samples_per_step=16, rl__minibatch_size=16, rl__rollout__max_new_tokens=8, rl__epochs=1.0, sft__enabled=False)
    found = rl_time(p, SHAPE, ROWS, SPEED)
    forward = 224 * (80 + 56) + 64 * 40
    assert found.steps == 50 and found.parts["generate"] == pytest.approx(64 * (120 + 56) + 20 * (80 + 40) / 5)
    assert found.parts["update"] == pytest.approx(3 * forward / 2)
    assert found.parts["score"] == pytest.approx(forward / 5)  # the reference's; the old log-probabilities are the update's
    assert found.seconds == pytest.approx(2 * 7 + 50 * sum(found.parts.values()))


def test_stages_that_a_method_has_no_use_for_are_left_out():
    rows = {"preference": ROWS, "prompt": ROWS, "sft": ROWS}
    assert list(stage_times(params(alignment__method="dpo", sft__enabled=False), SHAPE, rows, SPEED)) == [
        *("check_model", "train_policy", "evaluate")
    ]
    assert "train_sft" in stage_times(params(alignment__method="kto", sft__enabled=True), SHAPE, rows, SPEED)


def test_decoding_is_bound_by_reading_the_weights_where_the_bandwidth_is_known():
    one, eight = of_gpus(GPUS["h100"], 1), of_gpus(GPUS["h100"], 8)
    assert replace(eight.of_one, basis=one.basis) == one and eight.update == 8 * one.update
    read = SHAPE.parameters * 2 * 8  # each of 8 tokens reads the weights in bfloat16
    p = params(evaluation__prompts=1, evaluation__max_new_tokens=8, model__dtype="bfloat16", cluster__inference_ranks=1)
    slow = Speed(1e30, 1e30, 1e30, bandwidth=2.0, decode_step=0.5, start=0.0, basis="")
    rows = {"prompt": Rows(10, 1, 10, 10, 0.0)}
    found = stage_times(p, SHAPE, rows, slow)["evaluate"]
    assert found.seconds == pytest.approx(read / 2.0 + 0.5 * 8)


def test_a_product_is_measured_on_one_core():
    assert 1e8 < measured_flops(64, 128, "float32") < 1e13
