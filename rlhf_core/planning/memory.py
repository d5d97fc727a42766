"""Counts the bytes of a model in training, of a frozen model, and of a rollout engine, as the code allocates them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from rlhf_core.planning.hardware import GIB
from rlhf_core.planning.shape import ModelShape

ELEMENT_BYTES = {"bfloat16": 2, "float32": 4}
# A trained parameter: the moments, in float32, or of adamw_8bit in 8 bits with a scale for 256 (rlhf_core/engines/deepspeed/optimizers.py).
OPTIMIZER_BYTES = {"adamw": 8.0, "lion": 4.0, "adamw_8bit": 2 + 2 * 4 / 256}
NF4_BYTES = 0.5 + 4 / 64  # a rounded number and its share of a block's float32 scale (rlhf_core/models/lora.py)

# DeepSpeed 0.19.8, runtime/zero/config.py: elements of a bucket of gradients, of gathered parameters that stay, and of ZeRO 3's optimizer
# step at a time.
REDUCE_BUCKET = 500_000_000
LIVE_PARAMETERS = 1_000_000_000
SUB_GROUP = 1_000_000_000

# rlhf_core/models/head.py: bytes of probabilities that are kept for the backward pass, and rows that are projected at a time.
KEPT_PROBABILITIES = 1 << 30
PIECE_BYTES, FEWEST_ROWS, MOST_ROWS = 1 << 28, 512, 1024


def element_bytes(dtype: str) -> int:
    """Return the bytes of one weight or activation."""
    return ELEMENT_BYTES[dtype]


@dataclass(frozen=True)
class Training:
    """How an engine trains.

    ranks: number of ranks that share a model by ZeRO. sequence_parallel: how many of them share each sequence.
    on_gpu: on a GPU buffers are allocated in full; on a CPU only what is written to takes memory.
    packed: whether the CPU backend for plain Llamas computes the trunk (rlhf_core/models/cpu).
    adapters: trained parameters of LoRA; None: all parameters are trained. quantized: whether linear layers are rounded to 4 bits.
    """

    dtype: str = "bfloat16"
    ranks: int = 1
    sequence_parallel: int = 1
    zero_stage: int = 0
    offload_optimizer: bool = False
    offload_parameters: bool = False
    gradient_checkpointing: bool = False
    optimizer: str = "adamw"
    average: bool = False
    on_gpu: bool = True
    packed: bool = False
    adapters: int | None = None
    quantized: bool = False

    @property
    def element(self) -> int:
        return element_bytes(self.dtype)

    def split(self, count: float, *, from_stage: int) -> float:
        """Return each rank's part of something that ZeRO splits from this stage on."""
        return count / self.ranks if self.zero_stage >= from_stage else count

    def bucket(self, elements: float) -> float:
        """Return the bytes of a bucket in which gradients are reduced."""
        return self.element * (REDUCE_BUCKET if self.on_gpu else min(elements, REDUCE_BUCKET))


class States(NamedTuple):
    """Bytes on a rank's device.

    weights, master (float32 copies that the optimizer steps), optimizer, gradients and buffers exist all the time.
    step: further bytes while the optimizer steps. passing: further bytes of a forward or backward pass, without activations.
    reducing: further bytes at the end of a backward pass, when its activations are gone. host: bytes in the rank's host memory.
    """

    weights: float
    master: float
    optimizer: float
    gradients: float
    buffers: float
    step: float
    passing: float
    reducing: float
    host: float

    @property
    def resident(self) -> float:
        return self.weights + self.master + self.optimizer + self.gradients + self.buffers

    def one_pass(self, activations: float) -> float:
        """Return the bytes of a forward and backward pass besides the resident ones."""
        return self.passing + max(activations, self.reducing)


def training_states(parameters: float, setup: Training, *, linear: float = 0.0) -> States:
    """Return what DeepSpeed 0.19.8 allocates for an engine, with P parameters of e bytes, T of them trained, on n ranks:

    weights     e P; ZeRO 3: e P / n; with nf4 the linear layers take 0.5625 bytes a parameter, whole on each rank
    master      bfloat16: 4 T, from ZeRO 1 on 4 T / n. float32: from ZeRO 1 on a copy of the partition, 4 T / n
    optimizer   8 T (adamw), 4 T (lion) or 2 T (adamw_8bit), 4 T more with an average of the weights; from ZeRO 1 on divided by n
    gradients   e T; from ZeRO 2 on e T / n
    buffers     ZeRO 3: a bucket for gradients
    step        ZeRO 0: the gradients once more, flat for the reduction (float32) or in float32 (bfloat16). ZeRO 1 to 3: the partition's
                gradients flat, and in bfloat16 also in float32; with ZeRO 1 at least the bucket that they are reduced in
    passing     ZeRO 2 on GPUs: two buckets. ZeRO 3: gathered parameters, at most 10^9 of them
    reducing    ZeRO 2 on a CPU: a bucket. ZeRO 3: the bucket once more, and its part of it

    Sources: runtime/engine.py, runtime/fp16/unfused_optimizer.py (bfloat16 with ZeRO 0), runtime/zero/stage_1_and_2.py and stage3.py;
    the stages: Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054, section 3.1
    Args:
        linear: parameters of the linear layers that `quantized` rounds.
    """
    e, n, stage = setup.element, setup.ranks, setup.zero_stage
    trained = parameters if setup.adapters is None else setup.adapters
    frozen = 0.0 if setup.adapters is None else parameters
    quantized = linear * NF4_BYTES if setup.quantized else 0.0
    weights = setup.split(e * (frozen - (linear if setup.quantized else 0.0) + trained), from_stage=3)
    part = setup.split(trained, from_stage=1)
    master = 4 * part if setup.dtype == "bfloat16" or stage else 0.0
    optimizer = (OPTIMIZER_BYTES[setup.optimizer] + 4 * setup.average) * part
    gradients = setup.split(e * trained, from_stage=2)
    widened = 4 * min(part, SUB_GROUP) if setup.dtype == "bfloat16" else 0.0
    filled = e * min(trained, REDUCE_BUCKET)
    buffers = passing = reducing = host = 0.0
    if stage == 0:
        step = max(widened, filled)
    else:
        step = e * min(part, SUB_GROUP) + widened
        if stage == 1:
            step = max(step, setup.bucket(trained))
    if stage == 2 and setup.on_gpu:  # overlapping communication fills one bucket while another is sent
        passing = setup.bucket(trained) * (2 if n > 1 else 1)
    elif stage == 2:
        reducing = filled
    if stage == 3:
        buffers, reducing = setup.bucket(trained), filled * (1 + 1 / n)
        passing = e * min(parameters, LIVE_PARAMETERS) if n > 1 or setup.offload_parameters else 0.0
    if setup.offload_optimizer:
        host += master + optimizer + (4 + e) * part  # and the partition's gradients
        host += e * part if stage < 3 else 0.0  # weights on their way back
        master = optimizer = 0.0
        gradients = gradients if stage == 1 else 0.0
        step = setup.bucket(trained) if stage == 1 else 0.0
    if setup.offload_parameters:
        host += weights
        weights = 0.0
    return States(weights + quantized, master, optimizer, gradients, buffers, step, passing, reducing, host)


class Frozen(NamedTuple):
    """Bytes of a model that isn't trained.

    weights: on the device all the time. passing: further bytes while the model computes. host: offloaded bytes.
    """

    weights: float
    passing: float
    host: float


def frozen_model(parameters: float, setup: Training, *, offload: bool = False) -> Frozen:
    """Return the bytes of a model with weights of e bytes; ZeRO 3 splits them and gathers at most 10^9 parameters while the model computes.

    Args:
        offload: the weights are on the host while the model isn't used, and with ZeRO 3 all the time.
    """
    size = setup.element * parameters
    if setup.zero_stage == 3:
        part, gathered = size / setup.ranks, setup.element * min(parameters, LIVE_PARAMETERS)
        return Frozen(0.0, gathered, part) if offload else Frozen(part, gathered if setup.ranks > 1 else 0.0, 0.0)
    return Frozen(0.0, size, size) if offload else Frozen(size, 0.0, 0.0)


def layer_activations(shape: ModelShape, tokens: float, dtype: str = "bfloat16", *, sequence_parallel: int = 1) -> float:
    """Return the bytes that one layer of transformers' Llama stores for its backward pass.

    Elements per token: for the two norms the output, the normalized input and the input (with bfloat16 the input in float32: 8 hidden in
    all; with float32 6 hidden); for attention queries and output (2 attention widths), keys and values (2 kv widths); for each active
    expert gate, its activation, up and their product (4 intermediate). Attention scores aren't stored (flash attention recomputes them),
    and there is no dropout.
    Source: the count of Korthikanti et al. 2022, https://arxiv.org/abs/2205.05198, section 4.1, adapted from GPT
    Args:
        tokens: tokens of this rank. sequence_parallel: ranks that share each sequence; if there are fewer heads of keys and values, ranks
            have copies of them.
    """
    norms = 8 if dtype == "bfloat16" else 6
    kv_width = shape.kv_width * max(1, sequence_parallel / shape.kv_heads)
    elements = norms * shape.hidden + 2 * shape.attention_width + 2 * kv_width + 4 * shape.active_experts * shape.intermediate
    return tokens * elements * element_bytes(dtype)


def packed_layer_activations(shape: ModelShape, tokens: float, dtype: str = "float32") -> float:
    """Return the bytes that one layer stores for its backward pass in the CPU backend (rlhf_core/models/cpu/packed.py).

    Stored per token: both normalized inputs, queries, keys and values, attention's output (in float32 twice), gate and up. For each layer
    the weights of queries, keys and values are joined and multiplied by their norm's weight; both copies are kept.
    """
    a, kv, h, m = shape.attention_width, shape.kv_width, shape.hidden, shape.intermediate
    outputs = 2 if dtype == "float32" else 1
    return element_bytes(dtype) * (tokens * (2 * h + (1 + outputs) * a + 2 * kv + 2 * m) + 2 * h * (a + 2 * kv))


def trunk_activations(shape: ModelShape, tokens: float, setup: Training) -> float:
    """Return the bytes that all layers store for a backward pass, with the largest temporary ones of a layer's backward pass.

    With gradient checkpointing each layer stores its input, and one layer at a time is recomputed.
    Source: Korthikanti et al. 2022, section 5 (full recomputation)
    Args:
        tokens: tokens of this rank.
    """
    backward = setup.element * tokens * 3 * shape.active_experts * shape.intermediate  # gradients of up, of gate and of its activation
    one = layer_activations(shape, tokens, setup.dtype, sequence_parallel=setup.sequence_parallel)
    if setup.gradient_checkpointing:
        return shape.layers * tokens * shape.hidden * setup.element + one + backward
    if setup.packed:
        wide = 0.0 if setup.dtype == "float32" else backward + 24 * tokens * shape.hidden  # of the pass: residuals and norms in float32
        return shape.layers * packed_layer_activations(shape, tokens, setup.dtype) + wide
    return shape.layers * one + backward


def piece_rows(shape: ModelShape) -> int:
    """Return the number of rows whose logits exist at a time."""
    return max(FEWEST_ROWS, min(MOST_ROWS, PIECE_BYTES // (4 * shape.vocab)))


def head_training(shape: ModelShape, tokens: float, setup: Training) -> float:
    """Return the bytes of the language-model head in a forward and backward pass over N selected tokens, with V words:

    what is kept between the passes, plus the larger of
    forward     scaled logits and log-probabilities in float32 of a piece's R rows, 8 R V; with several pieces also the last one's
                log-probabilities, and its own logits e
    backward    the gradient of the head's weight in float32 and the product that is added to it, (4 + e) V H; the piece's logits'
                gradient in float32 and, in bfloat16, its copy: 4 R V or 6 R V; with several pieces also the last one's gradient, 8 R V or
                10 R V; where probabilities are recomputed also these, 12 R V, with several pieces 16 R V or 20 R V
    """
    rows, e = min(tokens, piece_rows(shape)), setup.element
    half = e if e < 4 else 0
    several, keeps = tokens > rows, _keeps_probabilities(shape, tokens, setup)
    forward = 8 + 2 * several
    recomputed = 16 + 2 * half if several else 12
    backward = 4 + half + 4 * several if keeps else recomputed
    weight = (4 + e) * shape.embedding if setup.adapters is None else 0.0
    passes = max(forward * rows * shape.vocab, backward * rows * shape.vocab + weight)
    return head_kept(shape, tokens, setup) + passes


def head_kept(shape: ModelShape, tokens: float, setup: Training) -> float:
    """Return the bytes kept between a forward and a backward pass: hidden states e N H and possibly probabilities 4 N V."""
    return tokens * (setup.element * shape.hidden + 4 * shape.vocab * _keeps_probabilities(shape, tokens, setup))


def _keeps_probabilities(shape: ModelShape, tokens: float, setup: Training) -> bool:
    """Return whether probabilities are kept: they take 1 GiB at most, and layers aren't recomputed."""
    return 4 * tokens * shape.vocab <= KEPT_PROBABILITIES and not setup.gradient_checkpointing


def head_forward(shape: ModelShape, tokens: float, dtype: str = "bfloat16") -> float:
    """Return the bytes of the head without a backward pass: logits of R rows, and two float32 copies of them."""
    return min(tokens, piece_rows(shape)) * shape.vocab * (element_bytes(dtype) + 8)


def forward_activations(shape: ModelShape, tokens: float, dtype: str = "bfloat16") -> float:
    """Return the bytes of a forward pass without a backward pass: the most that one layer has at a time.

    These are input, residual, gate, its activation, up and their product.
    """
    return tokens * element_bytes(dtype) * (3 * shape.hidden + 4 * shape.active_experts * shape.intermediate)


def mask_bytes(tokens: float, length: float, dtype: str) -> float:
    """Return the bytes of masks [rows, length, length] for rows in which responses share a prompt, and of the mask's additive copy."""
    return tokens * length * (1 + element_bytes(dtype))


def adapter_parameters(shape: ModelShape, rank: int) -> int:
    """Return the parameters of A and B of the seven linear layers of each block (of every expert)."""
    h, q, kv, m = shape.hidden, shape.attention_width, shape.kv_width, shape.intermediate
    return shape.layers * rank * (2 * (h + q) + 2 * (h + kv) + 3 * shape.experts * (h + m))


# Rollout engines

ENGINE_PROCESS = 1.5 * GIB  # CUDA's context, libraries' workspaces, captured graphs (rlhf_core/engines/memory/gpu_memory.py)
ENGINE_LOGITS = 4  # float32 copies: logits, the sampler's, log-probabilities and noise


def kv_bytes_per_token(shape: ModelShape, dtype: str = "bfloat16") -> float:
    """Return the bytes of one token's keys and values in all layers.

    Source: Kwon et al. 2023 (vLLM), https://arxiv.org/abs/2309.06180, section 3
    """
    return 2 * shape.layers * shape.kv_width * element_bytes(dtype)


def kv_capacity(shape: ModelShape, memory: float, *, tensor_parallel: int, dtype: str = "bfloat16") -> float:
    """Return the number of tokens whose keys and values fit into an engine.

    Args:
        memory: bytes of each of its GPUs, weights included.
    """
    weights = shape.parameters * element_bytes(dtype) / tensor_parallel
    return max(0.0, memory - weights) * kv_parts(shape, tensor_parallel) / kv_bytes_per_token(shape, dtype)


def kv_parts(shape: ModelShape, tensor_parallel: int) -> int:
    """Return the number of parts into which an engine's GPUs divide keys and values; GPUs beyond the number of heads have copies."""
    return min(tensor_parallel, shape.kv_heads)


def engine_pass(shape: ModelShape, tokens: float, sequences: int, dtype: str, *, tensor_parallel: int = 1) -> float:
    """Return the bytes of an engine's forward pass on each of its GPUs, as rlhf_core/engines/memory/gpu_memory.py counts them."""
    inner = 8 * shape.hidden + 3 * shape.active_experts * shape.intermediate / tensor_parallel
    return tokens * inner * element_bytes(dtype) + sequences * shape.vocab * 4 * ENGINE_LOGITS
