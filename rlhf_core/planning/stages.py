"""Counts what each process of a stage takes: resident bytes by role, and further bytes by phase, of which one exists at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from rlhf_core.config import LoraConfig, ModelConfig, Params, TrainingConfig, number_of
from rlhf_core.planning.hardware import GIB
from rlhf_core.planning.machine import has_amx
from rlhf_core.planning.memory import (
    ENGINE_PROCESS,
    Frozen,
    Training,
    adapter_parameters,
    element_bytes,
    engine_pass,
    forward_activations,
    frozen_model,
    head_forward,
    head_training,
    kv_bytes_per_token,
    kv_parts,
    mask_bytes,
    training_states,
    trunk_activations,
)
from rlhf_core.planning.models import Model
from rlhf_core.planning.shape import ModelShape, check_engine

# Bytes of private memory of a process without models: PyTorch, transformers and DeepSpeed, measured on a CPU; vLLM, and all of Ray's
# processes, estimated. Pages of libraries are shared by processes and can be evicted.
TRAINER_HOST, ENGINE_HOST, RAY_HOST = 0.35 * GIB, 0.6 * GIB, 1.0 * GIB
ALLOCATOR = 0.25 * GIB  # that glibc keeps of freed memory (MALLOC_TRIM_THRESHOLD_ in rlhf_core/process.py)
TRAINER_GPU = 1.5 * GIB  # CUDA's context, NCCL's buffers and workspaces
BATCHED_TOKENS = 8192  # of vLLM's forward pass (rlhf_core/engines/vllm/start.py)
SCORED_TOKENS = 8192  # of a reward model's outside training (rlhf_core/scorers/reward/model.py)
BLOCK = 128  # tokens of the KV cache
RANKS_KEY = "cluster.inference_ranks"

Parts = dict[str, float]


@dataclass(frozen=True)
class Process:
    """A process that holds models, or several equal ones.

    count: number of such processes at the same time.
    parts: resident bytes on its device, by role and kind. phases: further bytes of each phase; one phase exists at a time.
    host: bytes of each process in its host's memory if its device is a GPU, without libraries; on a CPU included in `parts` and `phases`.
    once: further bytes of a host, whatever the number of processes: whole weights on their way to a file or to the engines, and what
        teachers answer.
    base: bytes of the process without models, on a CPU.
    share: share of a GPU's memory that a rollout engine may take; None: the process takes what it needs.
    gpus: number of GPUs over which it is divided; bytes are those on each GPU, or on a CPU the sum.
    section: section of params.yaml whose keys change what the process takes.
    ranks_key: key for the number of ranks, each of which needs its own GPU; None: `ranks` of the section, or the process is no rank.
    """

    name: str
    section: str
    parts: Parts
    phases: Parts = field(default_factory=dict)
    host: float = 0.0
    once: float = 0.0
    count: int = 1
    base: float = TRAINER_HOST
    share: float | None = None
    gpus: int = 1
    ranks_key: str | None = None

    @property
    def peak(self) -> str:
        """Name of the phase that takes most; empty without phases."""
        return max(self.phases, key=lambda name: self.phases[name], default="")

    @property
    def needed(self) -> float:
        """Bytes on the device at the peak."""
        return sum(self.parts.values()) + self.phases.get(self.peak, 0.0)


@dataclass(frozen=True)
class Models:
    """Models of a chain; None stands for an unknown one.

    start: the model that the stage starts from. reward: a member of the reward model. scorers: further reward models.
    teachers: of rl.distillation.
    """

    start: Model | None
    reward: Model | None = None
    scorers: tuple[Model | None, ...] = ()
    teachers: tuple[Model | None, ...] = ()


class Unpredictable(Exception):
    """The memory of a stage can't be predicted; the message says why."""


# Training


def training(section: TrainingConfig, model: Model, dtype: str, *, ranks: int, on_gpu: bool, scalar: bool = False) -> Training:
    """Return how a section of params.yaml trains a model."""
    check_heads(shape_of(model), section.sequence_parallel)
    fast = dtype == "float32" or has_amx()
    packed = model.plain_llama and fast and not on_gpu and section.zero_stage < 3 and not section.gradient_checkpointing
    return Training(
        dtype=dtype,
        ranks=ranks,
        sequence_parallel=section.sequence_parallel,
        zero_stage=section.zero_stage,
        offload_optimizer=section.offload_optimizer,
        offload_parameters=section.offload_parameters,
        gradient_checkpointing=section.gradient_checkpointing,
        optimizer=section.optimizer,
        average=section.ema_decay is not None,
        on_gpu=on_gpu,
        packed=packed and _packs_adapters(section.lora) and section.sequence_parallel == 1,
        **_adapters(section.lora, model, scalar=scalar),
    )


def _packs_adapters(lora: LoraConfig | None) -> bool:
    return lora is None or (lora.dropout == 0.0 and lora.quantize is None)


def _adapters(lora: LoraConfig | None, model: Model, *, scalar: bool) -> dict:
    """Return the trained parameters with adapters. For a list of layers the count is that of all linear layers, an upper bound."""
    if lora is None:
        return {}
    shape = shape_of(model)
    return {"adapters": adapter_parameters(shape, lora.rank) + (shape.hidden if scalar else 0), "quantized": lora.quantize is not None}


def shape_of(model: Model) -> ModelShape:
    if model.shape is None:
        raise Unpredictable("its architecture isn't a decoder with gated MLPs")
    return model.shape


def check_heads(shape: ModelShape, ranks: int) -> None:
    """Check that ranks which share each sequence can divide the attention's heads.

    Raises:
        ValueError: they can't.
    """
    if shape.heads % ranks or (shape.kv_heads % ranks and ranks % shape.kv_heads):
        raise ValueError(
            f"sequence_parallel: expected a divisor of the model's {number_of(shape.heads, 'head')}, and a divisor or a multiple of its "
            f"{number_of(shape.kv_heads, 'head')} of keys and values, got {ranks}; change it"
        )


def pass_tokens(microbatch_tokens: int, max_length: int, sequences: float, setup: Training) -> tuple[int, int]:
    """Return the tokens of the largest micro-batch, and a rank's part of them.

    A micro-batch has the budget's tokens but no more than its sequences have, and always room for the longest sequence.

    Padding counts towards the budget, so a path that leaves it out (on a GPU, or the CPU's fast path) never takes more.

    Args:
        sequences: number of sequences of an optimizer step.
    """
    of_group = math.ceil(sequences * setup.sequence_parallel / setup.ranks)
    tokens = max(max_length, min(microbatch_tokens, of_group * max_length))
    return tokens, math.ceil(tokens / setup.sequence_parallel)


def trained_role(role: str, model: Model, setup: Training, tokens: int, *, scalar: bool = False) -> tuple[Parts, Parts, float]:
    """Return a trained model's resident parts, its phases, and its bytes in the host memory of a GPU.

    Weights whose file has the training's dtype are mapped from the file; others are converted in the host memory of each rank.

    Args:
        tokens: this rank's tokens of a micro-batch, all of which the loss selects.
        scalar: whether the model has a head with scores in place of the vocabulary's.
    """
    shape = shape_of(model)
    parameters = model.scalar_parameters if scalar else model.parameters
    states = training_states(parameters, setup, linear=shape.linear)
    parts = {
        f"{role}: weights": states.weights,
        f"{role}: float32 weights": states.master,
        f"{role}: optimizer": states.optimizer,
        f"{role}: gradients": states.gradients,
        f"{role}: gradients' buffer": states.buffers,
    }
    activations = trunk_activations(shape, tokens, setup) + (0.0 if scalar else head_training(shape, tokens, setup))
    phases = {
        f"{role}: a pass of {tokens:,} tokens": states.one_pass(activations),
        f"{role}: the optimizer's step": states.step,
    }
    converted = 0.0 if model.stored == setup.dtype else setup.element * parameters
    if not setup.on_gpu:
        phases[f"{role}: saving the weights"] = max(0.0, setup.element * parameters - states.gradients)
        if states.host:
            parts[f"{role}: offloaded"] = states.host
    return {name: size for name, size in parts.items() if size}, phases, states.host + converted if setup.on_gpu else 0.0


def frozen_pass(model: Model, tokens: int, dtype: str, *, scalar: bool = False) -> float:
    """Return the bytes of a forward pass with the head."""
    shape = shape_of(model)
    return forward_activations(shape, tokens, dtype) + (0.0 if scalar else head_forward(shape, tokens, dtype))


def supervised(
    name: str,
    key: str,
    section: TrainingConfig,
    model: Model,
    params: Params,
    *,
    on_gpu: bool,
    sequences: int,
    scalar: bool = False,
    reference: str = "none",
    offload_frozen: bool = False,
    shares_prompts: bool = False,
) -> Process:
    """Return the ranks of supervised training.

    Args:
        sequences: number of sequences of an optimizer step.
        reference: none, precomputed, live or policy; with policy (no copy of the model) the reference takes less than a training pass.
        offload_frozen: whether a live reference is on the host while it isn't used.
        shares_prompts: whether responses to one prompt share one pass over it, as they do on a CPU.
    """
    dtype, ranks = params.model.dtype, section.ranks
    setup = training(section, model, dtype, ranks=ranks, on_gpu=on_gpu, scalar=scalar)
    of_group, tokens = pass_tokens(section.microbatch_tokens, params.model.max_length, sequences, setup)
    parts, phases, host = trained_role("model", model, setup, tokens, scalar=scalar)
    if shares_prompts and not on_gpu and not setup.packed:
        name_of_pass = next(iter(phases))
        phases[name_of_pass] += mask_bytes(of_group, of_group, dtype)
    frozen = frozen_model(model.parameters, setup, offload=offload_frozen and on_gpu)
    if reference == "live":
        host += add_frozen(parts, phases, "reference", frozen, frozen_pass(model, tokens, dtype))
    elif reference == "precomputed":
        # Computed before the engine exists: instead of the trained model's states there are its weights, on the host.
        before = frozen.weights + frozen.passing + frozen_pass(model, tokens, dtype) + (0 if on_gpu else setup.element * model.parameters)
        phases["reference: its log-probabilities"] = max(0.0, before - sum(parts.values()))
        host = max(host, frozen.host)
    once = setup.element * model.parameters if on_gpu else 0.0
    return Process(f"{name}: training rank", key, parts, phases, host=host, once=once, count=ranks)


def add_frozen(parts: Parts, phases: Parts, role: str, frozen: Frozen, one_pass: float) -> float:
    """Add a frozen model to parts and phases, and return its bytes in the host memory of a GPU."""
    if frozen.weights:
        parts[f"{role}: weights"] = frozen.weights
    phases[f"{role}: a pass"] = frozen.passing + one_pass
    return frozen.host


# Engines and scorers


def engine(
    name: str,
    key: str,
    model: Model,
    config: ModelConfig,
    *,
    backend: str,
    on_gpu: bool,
    sequences: int,
    fraction: float,
    kv_cache_gib: int = 1,
    count: int = 1,
    gpus: int = 1,
    ranks_key: str | None = None,
) -> Process:
    """Return rollout engines. On a GPU an engine takes `fraction` of the memory, which must hold weights, a pass and one sequence.

    Args:
        gpus: number of GPUs over which each is divided; on a CPU, number of processes.
        ranks_key: key for the number of ranks, each of which has an engine; one of several ranks is a process besides vLLM's.
    """
    several = {"count": count, "ranks_key": ranks_key, "gpus": gpus}
    base = ENGINE_HOST * (1 + gpus if gpus > 1 else 1) + (gpus * TRAINER_HOST if ranks_key is not None and count * gpus > 1 else 0)
    shape, dtype, length = shape_of(model), config.dtype, config.max_length
    check_engine(shape, gpus, key="rl.rollout.tensor_parallel_size" if ranks_key is None else "cluster.inference_ranks_per_model")
    divided = gpus if on_gpu else 1
    e, per_token = element_bytes(dtype), kv_bytes_per_token(shape, dtype) / kv_parts(shape, divided)
    weights = e * model.parameters / divided
    one = per_token * BLOCK * (math.ceil(length / BLOCK) + 1)
    all_of_them = min(sequences * one, sequences * per_token * (length + BLOCK))
    parts = {"engine: weights": weights}
    if backend == "pytorch":
        parts["engine: keys and values"] = per_token * sequences * length
        phases = {"engine: a pass": forward_activations(shape, sequences, dtype) + 2 * 4 * sequences * shape.vocab}
        return Process(name, key, parts, phases, **several)
    pass_bytes = engine_pass(shape, max(BATCHED_TOKENS, length), sequences, dtype, tensor_parallel=divided)
    if on_gpu:
        parts |= {"engine: process": ENGINE_PROCESS, "engine: one sequence": one}
        return Process(name, key, parts, {"engine: a pass": pass_bytes}, base=base, share=fraction, **several)
    parts["engine: keys and values"] = min(kv_cache_gib * GIB, all_of_them)
    return Process(name, key, parts, {"engine: a pass": pass_bytes / 4}, base=base, **several)


def _inference(params: Params) -> dict:
    """Return how many ranks score, and the key that sets their number."""
    return {"count": params.cluster.inference_ranks, "ranks_key": RANKS_KEY}


def _sampling(params: Params) -> dict:
    """Return how many engines the ranks have, and over how many of their GPUs each is divided."""
    cluster = params.cluster
    return {
        "count": cluster.inference_ranks // cluster.inference_ranks_per_model,
        "gpus": cluster.inference_ranks_per_model,
        "ranks_key": RANKS_KEY,
    }


def scorer(name: str, key: str, members: list[Model], params: Params, *, dtype: str | None = None) -> Process:
    """Return the ranks that score outside training, each of which loads all reward models.

    Args:
        dtype: dtype of the models; None: model.dtype.
    """
    dtype = dtype or params.model.dtype
    parts = {f"reward model {n}: weights": element_bytes(dtype) * m.scalar_parameters for n, m in enumerate(members)}
    tokens = max(SCORED_TOKENS, params.model.max_length)
    phases = {"reward model: a pass": max(frozen_pass(m, tokens, dtype, scalar=True) for m in members)}
    return Process(name, key, parts, phases, **_inference(params))


def known(model: Model | None, what: str) -> Model:
    if model is None:
        raise Unpredictable(f"the size of {what} isn't known yet")
    return model


# Stages. Each inner list is one moment of the stage: the processes in it exist at the same time.

Moments = list[list[Process]]


def plan_sft(params: Params, models: Models, *, on_gpu: bool) -> Moments:
    if not params.sft.enabled:
        return []
    model = known(models.start, "the model")
    return [[supervised("train_sft", "sft", params.sft, model, params, on_gpu=on_gpu, sequences=params.sft.batch_size)]]


def plan_reward(params: Params, models: Models, *, on_gpu: bool) -> Moments:
    """Return the training of one member, since those of an ensemble are trained in turn; a ready-made model scores as in gate_reward."""
    if not params.reward.is_trained:
        return plan_gate(params, models, on_gpu=on_gpu)
    model, options = known(models.start, "the SFT model"), {"scalar": True, "shares_prompts": True}
    tokens = params.reward.microbatch_tokens  # a conversation may have many pairs
    return [[supervised("train_reward", "reward", params.reward, model, params, on_gpu=on_gpu, sequences=tokens, **options)]]


def plan_gate(params: Params, models: Models, *, on_gpu: bool) -> Moments:
    if not params.reward.enabled:
        return []
    members = [known(models.reward, "the reward model")] * params.reward.ensemble
    return [[scorer("gate_reward: reward models", "reward", members, params, dtype="float32")]]


def plan_dpo(params: Params, models: Models, *, on_gpu: bool) -> Moments:
    options = {"sequences": 2 * params.dpo.batch_size, "reference": params.dpo.reference_kind, "shares_prompts": True}
    options |= {"offload_frozen": params.dpo.offload_frozen}
    return [[supervised("train_policy", "dpo", params.dpo, known(models.start, "the SFT model"), params, on_gpu=on_gpu, **options)]]


def plan_kto(params: Params, models: Models, *, on_gpu: bool) -> Moments:
    options = {"sequences": params.kto.batch_size, "reference": params.kto.reference_kind, "shares_prompts": True}
    options |= {"offload_frozen": params.kto.offload_frozen}
    return [[supervised("train_policy", "kto", params.kto, known(models.start, "the SFT model"), params, on_gpu=on_gpu, **options)]]


def plan_rejection(params: Params, models: Models, *, on_gpu: bool) -> Moments:
    """Return sampling, scoring and training, which follow each other."""
    model, section = known(models.start, "the SFT model"), params.rejection_sampling
    sampling = section.sampling
    options = {"backend": sampling.backend, "sequences": sampling.max_concurrent_sequences, "fraction": sampling.gpu_memory_fraction}
    options |= _sampling(params)
    moments = [[engine("train_policy: rollout engine", "rejection_sampling.sampling", model, params.model, on_gpu=on_gpu, **options)]]
    if models.scorers:
        members = [known(found, "a reward model") for found in models.scorers]
        moments.append([scorer("train_policy: reward models", "rejection_sampling", members, params)])
    training_rank = supervised("train_policy", "rejection_sampling", section, model, params, on_gpu=on_gpu, sequences=section.batch_size)
    return [*moments, [training_rank]]


def plan_conditional(params: Params, models: Models, *, on_gpu: bool) -> Moments:
    model, section = known(models.start, "the SFT model"), params.conditional_sft
    moments: Moments = []
    if section.label_by == "scores":
        members = [known(models.reward, "the reward model")] * params.reward.ensemble
        moments.append([scorer("train_policy: reward models", "conditional_sft", members, params)])
    return [*moments, [supervised("train_policy", "conditional_sft", section, model, params, on_gpu=on_gpu, sequences=section.batch_size)]]


def plan_evaluate(params: Params, models: Models, *, on_gpu: bool) -> Moments:
    """Return an engine, since the models sample in turn, then the reward models, then a model's log-probabilities."""
    model, dtype = known(models.start, "the model"), params.model.dtype
    config, longest = params.evaluation, max(params.model.max_length, params.harness_max_length)
    sized = params.model.model_copy(update={"max_length": longest})
    options = {"backend": params.evaluation_backend, "sequences": 256, "fraction": config.gpu_memory_fraction}
    options |= _sampling(params)
    moments = [[engine("evaluate: rollout engine", "evaluation", model, sized, on_gpu=on_gpu, **options)]]
    if models.scorers:
        members = [known(found, "a reward model") for found in models.scorers]
        moments.append([scorer("evaluate: reward models", "evaluation", members, params)])
    tokens = max(SCORED_TOKENS, longest)
    ranks, is_divided = params.cluster.inference_ranks, params.cluster.inference_ranks_per_model > 1
    frozen = frozen_model(model.parameters, Training(dtype, ranks, zero_stage=3 if is_divided else 0, on_gpu=on_gpu))
    parts, phases = {"model: weights": frozen.weights}, {"a pass": frozen.passing + frozen_pass(model, tokens, dtype)}
    return [*moments, [Process("evaluate: log-probabilities", "evaluation", parts, phases, **_inference(params))]]


def plan_sampling_round(params: Params, models: Models, *, on_gpu: bool) -> Moments:
    model, sampling = known(models.start, "the policy"), params.iterative.sampling
    options = {"backend": sampling.backend, "sequences": sampling.max_concurrent_sequences, "fraction": sampling.gpu_memory_fraction}
    options |= _sampling(params)
    return [[engine("sample_round: rollout engine", "iterative.sampling", model, params.model, on_gpu=on_gpu, **options)]]


PLANS: dict[str, Callable[..., Moments]] = {
    "train_sft": plan_sft,
    "train_reward": plan_reward,
    "gate_reward": plan_gate,
    "dpo": plan_dpo,
    "kto": plan_kto,
    "rejection_sampling": plan_rejection,
    "conditional_sft": plan_conditional,
    "evaluate": plan_evaluate,
    "train_round": plan_dpo,
    "sample_round": plan_sampling_round,
    "evaluate_round": plan_evaluate,
}
