"""Predicts the seconds of forward and backward passes, generation, and communication between GPUs."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_core.planning.hardware import Cluster, Efficiency
from rlhf_core.planning.memory import element_bytes, kv_bytes_per_token
from rlhf_core.planning.shape import ModelShape

ALL_REDUCE_START, ALL_REDUCE_HOP = 6.6e-6, 0.6e-6  # seconds, `reduce_seconds`
HOST_ADAM_BYTES = 28  # of host memory per parameter and step: gradient 4, weight and two moments read and written 24


def forward_flops(shape: ModelShape, tokens: float, context: float, *, head: bool) -> float:
    """Return the FLOP of a forward pass: 2 per matrix element and token, and 2 x layers x context x attention width per token for
    attention.

    Source: Kaplan et al. 2020, https://arxiv.org/abs/2001.08361, section 2.1
    Args:
        context: mean length of the tokens' sequences. The causal mask halves 4 x layers x context x width.
        head: whether the language-model head is computed.
    """
    matrices = shape.active_trunk + (shape.embedding if head else 0)
    return tokens * (2 * matrices + 2 * shape.layers * context * shape.attention_width)


def update_flops(forward: float, *, checkpointing: bool) -> float:
    """Return the FLOP of an update: a backward pass costs two forward passes (Kaplan et al. 2020: 6ND in all), checkpointing one more."""
    return forward * (4 if checkpointing else 3)


def compute_seconds(flops: float, gpus: int, cluster: Cluster, efficiency: Efficiency) -> float:
    return flops / (gpus * cluster.gpu.flops * efficiency.flops)


def gradient_traffic(parameters: int, *, ranks: int, zero_stage: int, micro_batches: int, dtype: str = "bfloat16") -> float:
    """Return the bytes that each GPU sends in one optimizer step.

    Up to stage 2 a reduce-scatter and an all-gather send all parameters each. Stage 3 gathers the weights before the forward and
    before the backward pass of each micro-batch, and reduces the gradients of each.
    Source: Rajbhandari et al. 2020, section 7: 2 and 3 times the parameters
    """
    if ranks == 1:
        return 0.0
    passes = 3 * micro_batches if zero_stage == 3 else 2
    return passes * parameters * element_bytes(dtype) * (ranks - 1) / ranks


def gather_traffic(parameters: int, *, ranks: int, zero_stage: int, micro_batches: int, dtype: str = "bfloat16") -> float:
    """Return the bytes that each GPU sends in forward passes: with stage 3 the weights once per micro-batch, otherwise none."""
    return micro_batches * parameters * element_bytes(dtype) * (ranks - 1) / ranks if zero_stage == 3 else 0.0


def exchange_traffic(shape: ModelShape, tokens: float, *, sequence_parallel: int, dtype: str = "bfloat16") -> float:
    """Return the bytes that each GPU sends in a forward pass over `tokens` of its own: queries, keys, values and attention's output of each
    layer, less its own part. A backward pass sends as many.

    Source: Jacobs et al. 2023 (Ulysses), https://arxiv.org/abs/2309.14509, section 3.2
    """
    width = 2 * shape.attention_width + 2 * shape.kv_width * max(1, sequence_parallel / shape.kv_heads)
    return shape.layers * tokens * width * element_bytes(dtype) * (sequence_parallel - 1) / sequence_parallel


def traffic_seconds(traffic: float, ranks: int, cluster: Cluster, efficiency: Efficiency) -> float:
    """Return the seconds of communication, without overlap with computation."""
    return traffic / (cluster.bandwidth_between(ranks) * efficiency.network)


def offload_seconds(parameters: int, ranks: int, cluster: Cluster, efficiency: Efficiency, dtype: str = "bfloat16") -> float:
    """Return the seconds of one optimizer step on the host: gradients to it, weights back, Adam at the speed of the host's memory.

    Source: Ren et al. 2021 (ZeRO-Offload), https://arxiv.org/abs/2101.06840, section 4; 2 + 2 bytes per parameter are sent in bfloat16
    """
    travel = parameters / ranks * 2 * element_bytes(dtype) / (cluster.host_link * efficiency.network)
    sharing = min(ranks, cluster.gpus_per_node)
    return travel + parameters / ranks * HOST_ADAM_BYTES * sharing / cluster.host_bandwidth


def reduce_seconds(
    shape: ModelShape, tokens: float, passes: float, cluster: Cluster, efficiency: Efficiency, *, tensor_parallel: int, dtype: str
) -> float:
    """Return the seconds of an engine's all-reduces on t GPUs: two per layer and pass, each latency + bytes * 2 (t - 1) / t / bandwidth.

    A ring takes 2 (t - 1) hops, so its latency is 6.6 us + 2 (t - 1) * 0.6 us over NVLink.
    Sources: Shoeybi et al. 2019 (Megatron-LM), https://arxiv.org/abs/1909.08053, section 3: two all-reduces a layer; NCCL at b647562,
    src/graph/tuning.cc, baseLat and hwLat of ring and LL: the latency
    Args:
        tokens: tokens of all passes together.
    """
    if tensor_parallel == 1:
        return 0.0
    hops = 2 * (tensor_parallel - 1)
    sent = tokens * shape.hidden * element_bytes(dtype) * hops / tensor_parallel
    latency = passes * (ALL_REDUCE_START + hops * ALL_REDUCE_HOP)
    return 2 * shape.layers * (latency + sent / (cluster.bandwidth_between(tensor_parallel) * efficiency.network))


@dataclass(frozen=True)
class Generation:
    """Generation by one engine: mean number of concurrent responses, and seconds of prefill and decoding."""

    concurrency: float
    prefill: float
    decode: float


@dataclass(frozen=True)
class Requests:
    """Requests to one engine in a step. Lengths are mean tokens, except `longest`. A prompt is computed once for all its samples."""

    prompts: float
    samples: float
    prompt_length: float
    response_length: float
    longest: float


def generation(
    shape: ModelShape,
    requests: Requests,
    cluster: Cluster,
    efficiency: Efficiency,
    *,
    tensor_parallel: int,
    concurrency: float,
    dtype: str = "bfloat16",
) -> Generation:
    """Return the time of an engine's requests. FLOP/s limit prefill; FLOP/s or memory bandwidth, whichever is slower, limits decoding.

    Each decoding step reads all weights once, with all experts of a mixture, and the keys and values of each running response. The number
    of steps is all tokens over the concurrency, and at least the longest response. Tensor parallelism splits bytes and FLOP, and adds two
    all-reduces per layer and
    pass: of [concurrency, hidden] in each decoding step, and of the prompts' tokens in prefill (`reduce_seconds`).
    Source: Pope et al. 2022, https://arxiv.org/abs/2211.05102, section 2; Shoeybi et al. 2019 (Megatron-LM), arXiv 1909.08053, section 3

    Args:
        concurrency: largest number of concurrent responses.
    """
    r, gpu = requests, cluster.gpu
    flops = gpu.flops * efficiency.flops * tensor_parallel
    prompt_tokens = r.prompts * r.prompt_length
    prefill = forward_flops(shape, prompt_tokens, r.prompt_length, head=False) / flops
    prefill += reduce_seconds(shape, prompt_tokens, 1, cluster, efficiency, tensor_parallel=tensor_parallel, dtype=dtype)
    tokens = r.samples * r.response_length
    at_a_time = min(concurrency, r.samples)
    steps = max(tokens / at_a_time, r.longest)
    context = r.prompt_length + r.response_length / 2
    weights = (shape.parameters - (0 if shape.tied else shape.embedding)) * element_bytes(dtype)
    read = steps * weights + tokens * context * kv_bytes_per_token(shape, dtype)
    computing = forward_flops(shape, tokens, 2 * context, head=True) / flops
    reading = read / (gpu.bandwidth * efficiency.bandwidth * tensor_parallel)
    reducing = reduce_seconds(shape, tokens, steps, cluster, efficiency, tensor_parallel=tensor_parallel, dtype=dtype)
    return Generation(tokens / steps, prefill, max(computing, reading) + reducing + steps * efficiency.decode_overhead)
