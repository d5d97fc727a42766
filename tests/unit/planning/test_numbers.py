"""Sizes, bytes and seconds against numbers derived by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import get_args

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rlhf_core.config import ArchitectureConfig
from rlhf_core.config.model import Optimizer
from rlhf_core.planning.hardware import Cluster, Efficiency, Gpu
from rlhf_core.planning.memory import (
    OPTIMIZER_BYTES,
    Training,
    frozen_model,
    head_forward,
    head_training,
    kv_bytes_per_token,
    kv_capacity,
    piece_rows,
    training_states,
    trunk_activations,
)
from rlhf_core.planning.shape import REPOSITORIES, SIZES, ModelShape, from_architecture, from_folder, named_shape
from rlhf_core.planning.timing import (
    Requests,
    exchange_traffic,
    forward_flops,
    gather_traffic,
    generation,
    gradient_traffic,
    offload_seconds,
    reduce_seconds,
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


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        # Of the models' cards and of the safetensors files' headers.
        ("qwen2.5-0.5b", 0.494),
        ("qwen2.5-1.5b", 1.544),
        ("qwen2.5-7b", 7.616),
        ("qwen2.5-14b", 14.77),
        ("qwen2.5-32b", 32.76),
        ("qwen2.5-72b", 72.71),
        ("qwen3-0.6b", 0.596),
        ("qwen3-1.7b", 1.721),
        ("qwen3-4b", 4.022),
        ("qwen3-8b", 8.191),
        ("qwen3-32b", 32.76),
    ],
)
def test_parameters_of_qwen_are_the_published_ones(name, billions):
    assert SIZES[name].parameters / 1e9 == pytest.approx(billions, rel=0.001)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b"),
        ("Qwen/Qwen3-0.6B-Base", "qwen3-0.6b"),
        ("meta-llama/Llama-3.1-8B-Instruct", "llama3-8b"),
        ("meta-llama/Llama-2-7b-chat-hf", "llama2-7b"),
    ],
)
def test_repositories_on_the_hub_have_the_shape_of_their_size(name, size):
    assert named_shape(name) == SIZES[size]
    assert all(named_shape(repository) == SIZES[of] for of, repositories in REPOSITORIES.items() for repository in repositories)
    assert named_shape("Qwen/Qwen2.5-7B-Math") is None and set(REPOSITORIES) == set(SIZES)


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


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("qwen2", {}),
        ("qwen3", {"head_dim": 16}),
        ("qwen3", {"head_dim": 16, "attention_bias": True}),
        ("llama", {}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("mistral", {}),
    ],
)
def test_every_parameter_of_transformers_decoders_is_counted(tmp_path, family, more):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = AutoConfig.for_model(family, vocab_size=50, tie_word_embeddings=False, **sizes, **more)
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert from_folder(tmp_path).parameters == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("content", ["", "[]", '{"n_layer": 2}', '{"num_hidden_layers": 0}'])
def test_a_folder_without_a_decoder_is_refused(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=r"config\.json: expected"):
        from_folder(tmp_path)


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120.0), (1, 31.40625), (2, 16.640625), (3, 1.875)])
def test_states_are_those_of_the_zero_paper(stage, gigabytes):
    """Its figure 1: 7.5 billion parameters on 64 GPUs. 16 * 7.5; 4 * 7.5 + 90/64; 2 * 7.5 + 105/64; 120/64."""
    states = training_states(7_500_000_000, Training(ranks=64, zero_stage=stage))
    assert states.weights + states.master + states.optimizer + states.gradients == gigabytes * 1e9


CPU = Training(on_gpu=False)


@pytest.mark.parametrize(
    ("how", "resident", "step", "passing", "reducing"),
    [
        # 100 parameters: weights 2, masters 4, Adam 8, gradients 2; in the step gradients in float32
        (CPU, 1600, 400, 0, 0),
        # on 4 ranks: weights and gradients 400, masters and Adam 1200 / 4; the bucket of all gradients, 200, is more than 50 + 100
        (replace(CPU, ranks=4, zero_stage=1), 700, 200, 0, 0),
        # gradients 200 / 4; in the step 25 parameters' gradients flat and in float32; all gradients fill the bucket
        (replace(CPU, ranks=4, zero_stage=2), 550, 150, 0, 200),
        # 1600 / 4 and the bucket; gathered weights 200; the bucket and a quarter of it
        (replace(CPU, ranks=4, zero_stage=3), 600, 150, 200, 250),
        # float32: weights, Adam and gradients 4 + 8 + 4; the flat gradients
        (replace(CPU, dtype="float32"), 1600, 400, 0, 0),
        # weights and gradients 800, masters 100, Adam 200
        (replace(CPU, dtype="float32", ranks=4, zero_stage=1), 1100, 400, 0, 0),
        (replace(CPU, dtype="float32", ranks=4, zero_stage=3), 100 + 100 + 200 + 100 + 400, 100, 400, 500),
    ],
)
def test_states_beside_the_papers_are_those_that_deepspeed_allocates(how, resident, step, passing, reducing):
    states = training_states(100, how)
    assert (states.resident, states.step, states.passing, states.reducing) == (resident, step, passing, reducing)


def test_on_a_gpu_buckets_are_allocated_in_full():
    assert training_states(100, Training(ranks=2, zero_stage=2)).passing == 2 * 2 * 500_000_000
    assert training_states(100, Training(zero_stage=3)).buffers == 2 * 500_000_000


def test_offload_moves_masters_and_the_optimizer_and_gradients_to_the_host():
    states = training_states(100, Training(ranks=4, zero_stage=2, offload_optimizer=True))
    assert (states.weights, states.master, states.optimizer, states.gradients) == (200, 0, 0, 0)
    assert states.host == 25 * (4 + 8 + 4 + 2 + 2)
    everything = training_states(100, Training(ranks=4, zero_stage=3, offload_optimizer=True, offload_parameters=True))
    assert everything.weights == 0 and everything.host == 25 * 18 + 50


def test_every_optimizer_has_its_bytes():
    assert set(OPTIMIZER_BYTES) == set(get_args(Optimizer))


def test_optimizer_average_and_adapters():
    assert training_states(100, replace(CPU, optimizer="lion")).optimizer == 400
    assert training_states(100, replace(CPU, average=True)).optimizer == 1200
    adapted = training_states(100, replace(CPU, adapters=10))
    assert (adapted.weights, adapted.master, adapted.optimizer, adapted.gradients) == (220, 40, 80, 20)
    # 80 of the 100 parameters at 0.5625 bytes, whole on each rank
    quantized = training_states(100, replace(CPU, adapters=10, quantized=True, ranks=2, zero_stage=3), linear=80)
    assert quantized.weights == 80 * 0.5625 + 2 * (20 + 10) / 2


def test_frozen_models_are_split_by_zero_3_or_kept_on_the_host():
    assert frozen_model(100, Training(ranks=4, zero_stage=2)) == (200, 0, 0)
    assert frozen_model(100, Training(ranks=4, zero_stage=3)) == (50, 200, 0)
    assert frozen_model(100, Training(), offload=True) == (0, 200, 200)


def test_activations_with_and_without_checkpointing():
    # bfloat16: per token and layer 8 * 4 + 2 * 4 + 2 * 2 + 4 * 8 = 76 elements of 2 bytes; 3 tokens, 2 layers; backward 3 * 8 * 2 * 3
    assert trunk_activations(TINY, 3, CPU) == 2 * 3 * 152 + 144
    # 4 ranks that share 12 tokens have 4 copies of the one head of keys and values: 6 * 2 more elements a token
    assert trunk_activations(TINY, 3, replace(CPU, ranks=4, sequence_parallel=4)) == 2 * 3 * (152 + 24) + 144
    # each layer's input 3 * 4 * 2 bytes, and one layer whole
    assert trunk_activations(TINY, 3, replace(CPU, gradient_checkpointing=True)) == 2 * 24 + 456 + 144
    # float32: 6 * 4 in place of 8 * 4, 4 bytes each
    assert trunk_activations(TINY, 3, replace(CPU, dtype="float32")) == 2 * 3 * 272 + 288
    # packed: 2 * 4 + 3 * 4 + 2 * 2 + 2 * 8 = 40 elements a token, and the weights of queries, keys and values 2 * 4 * (4 + 4)
    assert trunk_activations(TINY, 3, replace(CPU, dtype="float32", packed=True)) == 2 * 4 * (3 * 40 + 64)
    # in bfloat16 attention's output once; in the pass 3 * 8 elements of the MLP's width and 6 of 4 bytes of the hidden one
    assert trunk_activations(TINY, 3, replace(CPU, packed=True)) == 2 * 2 * (3 * 36 + 64) + 144 + 24 * 3 * 4


def test_the_head_projects_some_rows_at_a_time():
    wide = replace(TINY, vocab=152_064)
    assert piece_rows(TINY) == 1024 and piece_rows(wide) == 512
    # 600 rows of 2^18 words: probabilities of 0.6 GiB are kept, 512 rows of logits exist, 10 bytes each; the weight's gradient
    widest = replace(TINY, vocab=1 << 18)
    kept, logits = 600 * 4 << 18, 512 * 10 << 18
    assert head_training(widest, 600, CPU) == 2 * 600 * 4 + kept + logits + (6 * 4 << 18)
    assert head_training(widest, 2000, CPU) == 2 * 2000 * 4 + 2 * logits + (6 * 4 << 18)  # 1.95 GiB are not kept
    # one piece: the forward pass's 8 bytes, or the backward pass's 6 and the weight's gradient
    assert head_training(widest, 500, CPU) == 2 * 500 * 4 + (500 * (4 + 8) << 18)
    assert head_training(widest, 5, CPU) == 2 * 5 * 4 + (5 * (4 + 6) << 18) + (6 * 4 << 18)
    recomputed = replace(CPU, gradient_checkpointing=True)
    assert head_training(widest, 500, recomputed) == 2 * 500 * 4 + (500 * 12 << 18) + (6 * 4 << 18)  # one piece
    assert head_training(widest, 600, replace(recomputed, dtype="float32")) == 4 * 600 * 4 + (512 * 16 << 18) + (8 * 4 << 18)
    assert head_training(widest, 600, replace(CPU, adapters=5)) == 2 * 600 * 4 + kept + logits


def test_logits_and_cache():
    assert head_forward(TINY, 3) == 3 * 10 * (2 + 8)
    assert kv_bytes_per_token(SIZES["llama2-7b"]) == 2 * 32 * 4096 * 2 == 524_288
    # 2 GPUs of 1000 bytes, weights 776 in all, cache 2 * 2 * 2 * 2 = 16 a token, whose only head is on both: (1000 - 388) / 16
    assert kv_capacity(TINY, 1000, tensor_parallel=2) == 38.25
    two = replace(TINY, kv_heads=2)  # a head on each GPU: half of 2 * 2 * 4 * 2 = 32 a token, and of 2 bytes a weight
    assert kv_capacity(two, 1000, tensor_parallel=2) == (1000 - two.parameters) / 16
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
    # 2 layers, 3 tokens; queries and output 2 * 4, keys and values 2 * 2, which two ranks copy; 2 bytes; the other half is sent
    assert exchange_traffic(TINY, 3, sequence_parallel=2) == 2 * 3 * (8 + 8) * 2 / 2
    assert exchange_traffic(TINY, 3, sequence_parallel=1) == 0
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


def test_engines_on_several_gpus_reduce_twice_a_layer_and_pass():
    cluster = Cluster(Gpu("fast", 1e9, flops=1e12, bandwidth=1e12, link=5), gpus=2)
    requests = Requests(prompts=4, samples=4, prompt_length=6, response_length=8, longest=8)
    alone, two = (generation(TINY, requests, cluster, PEAK, tensor_parallel=size, concurrency=2) for size in (1, 2))
    # 2 layers, 2 of each: 6.6 us and two hops of 0.6 us; a token has 4 elements of 2 bytes, of which each GPU sends 2 * 1/2, at 5 bytes/s
    passes = {"prefill": (1, 24), "decode": (16, 32)}
    for phase, (count, tokens) in passes.items():
        assert getattr(two, phase) - getattr(alone, phase) == pytest.approx(2 * 2 * (count * 7.8e-6 + tokens * 8 / 5), rel=1e-6)
    # over a link that takes no time the latency is left, which eight GPUs have more of
    quick = replace(cluster, gpu=replace(cluster.gpu, link=1e15))
    assert reduce_seconds(TINY, 32, 16, quick, PEAK, tensor_parallel=8, dtype="bfloat16") == pytest.approx(2 * 2 * 16 * 15e-6)


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
    assert times.prefill == pytest.approx(6 * (2 * 288 + 2 * 2 * 6 * 4) / 200, abs=1e-4)  # and 31 us of all-reduces
    # 32 tokens that look back on 6 + 4 in the mean: 4 * layers * 10 * width
    assert times.decode == pytest.approx(32 * (2 * 328 + 4 * 2 * 10 * 4) / 200, abs=1e-3)  # and 0.25 ms
