"""Sizes, bytes and seconds against numbers derived by hand."""

from __future__ import annotations

import json

import pytest

from rlhf_core.config import ArchitectureConfig
from tools.planning.hardware import Cluster, Efficiency, Gpu
from tools.planning.memory import activations, frozen_weights, kv_bytes_per_token, kv_capacity, logits, training_states
from tools.planning.shape import SIZES, ModelShape, from_architecture, from_folder
from tools.planning.timing import (
    Requests,
    forward_flops,
    gather_traffic,
    generation,
    gradient_traffic,
    offload_seconds,
    traffic_seconds,
    update_flops,
)

TINY = ModelShape(layers=2, hidden=4, intermediate=8, heads=2, kv_heads=1, head_width=2, vocab=10)
ROUND = Gpu("round", memory=1000, flops=100, bandwidth=10, link=5)
PEAK = Efficiency(flops=1, bandwidth=1, network=1)


def test_parameters_of_a_tiny_model():
    # attention: queries and output 2 * 4 * 4, keys and values 2 * 4 * 2 = 48; MLP 3 * 4 * 8 = 96; norms 8: 152 a layer
    # trunk 2 * 152 + 4 = 308; embedding and head 2 * 10 * 4 = 80
    assert TINY.trunk == 308
    assert TINY.parameters == 388
    assert TINY.scalar_parameters == 308 + 40 + 4
    assert TINY.active_trunk == 2 * (48 + 96)


def test_parameters_of_llama_2_7b():
    # layer: 4 * 4096^2 + 3 * 4096 * 11008 + 2 * 4096 = 202,383,360; 32 of them, a norm of 4096 and 2 * 32000 * 4096
    assert SIZES["llama2-7b"].parameters == 32 * 202_383_360 + 4096 + 262_144_000 == 6_738_415_616


def test_a_mixture_holds_all_experts_and_computes_with_some():
    mixture = ModelShape(1, 4, 8, 2, 2, 2, 10, experts=4, active_experts=2)
    # attention 4 * 16 = 64, experts 4 * 96, router 4 * 4, norms 8, last norm 4
    assert mixture.trunk == 64 + 384 + 16 + 8 + 4
    assert mixture.active_trunk == 64 + 192 + 16


def test_shape_of_params_and_of_a_folder(tmp_path):
    shape = from_architecture(ArchitectureConfig(hidden_size=96, intermediate_size=256, layers=3, heads=3, vocab_size=390))
    # layer 4 * 96^2 + 3 * 96 * 256 + 192 = 110,784; three, 96, and 2 * 390 * 96
    assert shape.parameters == 332_352 + 96 + 74_880
    config = {
        "num_hidden_layers": 2,
        "hidden_size": 4,
        "intermediate_size": 8,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 10,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert from_folder(tmp_path) == TINY


@pytest.mark.parametrize("content", ["", "[]", '{"n_layer": 2}', '{"num_hidden_layers": 0}'])
def test_a_folder_without_a_decoder_is_refused(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=r"config\.json: expected"):
        from_folder(tmp_path)


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120.0), (1, 31.40625), (2, 16.640625), (3, 1.875)])
def test_states_are_those_of_the_zero_paper(stage, gigabytes):
    """Its figure 1: 7.5 billion parameters on 64 GPUs. 16 * 7.5; 4 * 7.5 + 90/64; 2 * 7.5 + 105/64; 120/64."""
    states = training_states(7_500_000_000, ranks=64, zero_stage=stage)
    assert sum(states[:3]) == gigabytes * 1e9


def test_offload_moves_the_optimizer_and_float32_needs_no_copy():
    states = training_states(100, ranks=4, zero_stage=2, offload=True)
    assert tuple(states) == (200, 50, 0, 300)  # 12 * 100 / 4 on the host
    assert tuple(training_states(100, ranks=1, zero_stage=0, dtype="float32")) == (400, 400, 800, 0)
    assert frozen_weights(100, ranks=4, zero_stage=2) == 200
    assert frozen_weights(100, ranks=4, zero_stage=3) == 50


def test_activations_with_and_without_checkpointing():
    # per token and layer 4 * 4 + 2 * 4 + 2 * 2 + 4 * 8 = 60 elements of 2 bytes; 3 tokens, 2 layers
    assert activations(TINY, 3, checkpointing=False) == 2 * 3 * 120
    # each layer's input 3 * 4 * 2 bytes, and one layer whole
    assert activations(TINY, 3, checkpointing=True) == 2 * 24 + 360


def test_logits_and_cache():
    assert logits(TINY, 3, training=True) == 3 * 10 * (2 + 4 + 4)
    assert logits(TINY, 3, training=False) == 3 * 10 * (2 + 4)
    assert kv_bytes_per_token(SIZES["llama2-7b"]) == 2 * 32 * 4096 * 2 == 524_288
    # 2 GPUs of 1000 bytes, weights 776 in all, cache 2 * 2 * 2 * 2 = 16 a token: (2000 - 776) / 16
    assert kv_capacity(TINY, 1000, tensor_parallel=2) == 76.5
    assert kv_capacity(TINY, 100, tensor_parallel=1) == 0


def test_flops_of_passes():
    # matrices 288 + head 40; attention 2 * 2 layers * context 5 * width 4 = 80
    assert forward_flops(TINY, 3, 5, head=True) == 3 * (2 * 328 + 80)
    assert forward_flops(TINY, 3, 5, head=False) == 3 * (2 * 288 + 80)
    assert update_flops(10, checkpointing=False) == 30
    assert update_flops(10, checkpointing=True) == 40


def test_update_is_6nd_where_attention_is_small():
    """Kaplan et al. 2020: 6 N D. At 1,024 tokens the attention of 7B adds 2 * 32 * 1024 * 4096 / (2 * 6.6e9) = 2%."""
    shape = SIZES["llama2-7b"]
    matrices = shape.parameters - shape.embedding
    flops = update_flops(forward_flops(shape, 1e6, 1024, head=True), checkpointing=False)
    assert flops / (6 * matrices * 1e6) == pytest.approx(1.02, abs=0.002)


def test_traffic_of_the_stages():
    # 100 parameters of 2 bytes on 4 ranks: each sends 3/4 of them in a reduce-scatter, and as much in an all-gather
    assert gradient_traffic(100, ranks=4, zero_stage=0, micro_batches=7) == 2 * 150
    assert gradient_traffic(100, ranks=4, zero_stage=3, micro_batches=2) == 3 * 2 * 150
    assert gradient_traffic(100, ranks=1, zero_stage=3, micro_batches=2) == 0
    assert gather_traffic(100, ranks=4, zero_stage=3, micro_batches=2) == 2 * 150
    assert gather_traffic(100, ranks=4, zero_stage=2, micro_batches=2) == 0


def test_traffic_beyond_a_node_takes_the_network():
    cluster = Cluster(ROUND, gpus=16, gpus_per_node=8, network=2)
    assert traffic_seconds(10, 8, cluster, PEAK) == 2
    assert traffic_seconds(10, 9, cluster, PEAK) == 5
    assert traffic_seconds(10, 9, cluster, Efficiency(1, 1, 0.5)) == 10


def test_offload_travels_and_steps_on_the_host():
    cluster = Cluster(ROUND, gpus=4, gpus_per_node=2, host_link=10, host_bandwidth=70)
    # 100 / 4 parameters: 4 bytes each over 10 bytes/s; 28 bytes each of a memory that two GPUs share: 25 * 28 * 2 / 70
    assert offload_seconds(100, 4, cluster, PEAK) == 10 + 20


def test_decoding_is_bound_by_memory():
    cluster = Cluster(Gpu("wide", 1e9, flops=1e12, bandwidth=10, link=5), gpus=1)
    requests = Requests(prompts=4, samples=4, prompt_length=6, response_length=8, longest=8)
    times = generation(TINY, requests, cluster, PEAK, tensor_parallel=1, concurrency=2)
    # 32 tokens, 2 at a time: 16 steps, each reads (388 - 40) * 2 bytes of weights;
    # each token reads 6 + 4 tokens of cache, 16 bytes each
    assert times.decode == pytest.approx((16 * 696 + 32 * 10 * 16) / 10)
    assert times.concurrency == 2


def test_the_longest_response_is_waited_for():
    cluster = Cluster(Gpu("wide", 1e9, flops=1e12, bandwidth=10, link=5), gpus=1)
    requests = Requests(4, 4, 6, 8, longest=30)
    times = generation(TINY, requests, cluster, Efficiency(1, 1, 1, decode_overhead=2), tensor_parallel=1, concurrency=4)
    assert times.decode == pytest.approx((30 * 696 + 32 * 160) / 10 + 30 * 2)
    assert times.concurrency == pytest.approx(32 / 30)


def test_decoding_is_bound_by_flops_and_prefill_by_them_too():
    cluster = Cluster(Gpu("fast memory", 1e9, flops=100, bandwidth=1e12, link=1e12), gpus=2)
    times = generation(TINY, Requests(1, 4, 6, 8, 8), cluster, PEAK, tensor_parallel=2, concurrency=4)
    # a prompt once for its four samples: 6 tokens, no head; on two GPUs of 100 FLOP/s
    assert times.prefill == pytest.approx(6 * (2 * 288 + 2 * 2 * 6 * 4) / 200)
    # 32 tokens that look back on 6 + 4 in the mean: 4 * layers * 10 * width
    assert times.decode == pytest.approx(32 * (2 * 328 + 4 * 2 * 10 * 4) / 200)
