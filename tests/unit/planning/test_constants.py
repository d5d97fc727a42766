"""The planner's copies of numbers that the code, DeepSpeed and vLLM's engine follow; the planner imports none of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlhf_core.engines.memory import gpu_memory
from rlhf_core.engines.vllm import start
from rlhf_core.models import head, lora
from rlhf_core.planning import memory, stages
from rlhf_core.planning.shape import SIZES
from rlhf_core.scorers.reward import model as reward_model

SHAPE = SIZES["llama3-8b"]


@pytest.mark.parametrize("vocabulary", [300, 32_000, 100_000, 152_000])
def test_the_head_projects_as_many_rows_as_the_planner_counts(vocabulary):
    assert memory.piece_rows(replace(SHAPE, vocab=vocabulary)) == head.rows_at_a_time(vocabulary)
    assert memory.KEPT_PROBABILITIES == head.KEPT_BYTES


def test_deepspeeds_buffers_have_the_sizes_that_the_planner_counts():
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    zero = DeepSpeedZeroConfig(stage=3)
    assert (zero.reduce_bucket_size, zero.max_live_parameters, zero.sub_group_size) == (
        memory.REDUCE_BUCKET,
        memory.LIVE_PARAMETERS,
        memory.SUB_GROUP,
    )


def test_engines_and_adapters_have_the_planners_numbers():
    assert memory.ENGINE_PROCESS == gpu_memory.OWN_BYTES and memory.ENGINE_LOGITS == gpu_memory.LOGIT_COPIES
    assert (stages.BATCHED_TOKENS, stages.BLOCK) == (start.BATCHED_TOKENS, gpu_memory.BLOCK)
    assert stages.SCORED_TOKENS == reward_model.MICROBATCH_TOKENS
    assert memory.NF4_BYTES == 0.5 + 4 / lora.BLOCK
