"""The options of rlhf plan, and the keys of params.yaml that they override."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Group, Parameter

from rlhf_core.algorithms.online import ALGORITHMS
from rlhf_core.commands import Count, FileOrName, GivenPath, Json, Positive, Switch
from rlhf_core.config import Params
from rlhf_core.config.curves import KL_COLUMNS
from rlhf_core.planning.hardware import GPUS, Efficiency
from rlhf_core.planning.search import LAYOUTS
from rlhf_core.planning.shape import REPOSITORIES

# Of an option's name the key that it overrides.
KEYS = {
    "dtype": "model.dtype",
    "algorithm": "rl.algorithm",
    "samples": "rl.samples_per_step",
    "minibatch": "rl.minibatch_size",
    "ppo_epochs": "rl.ppo_epochs",
    "microbatch_tokens": "rl.trainer.microbatch_tokens",
    "max_concurrent": "rl.rollout.max_concurrent_sequences",
}
# The same where params' own placement is predicted; a search takes these as bounds.
PLACEMENT_KEYS = {
    "zero_stage": "rl.trainer.zero_stage",
    "offload": "rl.trainer.offload_optimizer",
    "checkpointing": "rl.trainer.gradient_checkpointing",
    "tensor_parallel": "rl.rollout.tensor_parallel_size",
}

DEFAULTS = Efficiency()
_WORK, _CLUSTER, _PLACEMENT = (
    Parameter(group=Group(name, sort_key=place)) for place, name in enumerate(("Workload", "Cluster", "Placement"), 1)
)


@Parameter(name="*")
@dataclass(frozen=True)
class Options:
    """What to plan.

    Args:
        base: the file that recipes are laid over.
        recipes: apply a recipe to params.yaml, such as recipes/gsm8k.yaml; repeat for several.
        assignments: override a key of params.yaml, such as rl.algorithm=grpo; repeat for several.
        stages: memory of each stage, as the preflight counts it.
        check: compare predictions with published and measured figures.
        json: print JSON, in bytes and seconds.
        model: a folder with a config.json, or a name such as llama3-8b or its repository.
        critic_model: the same; by default the policy's shape.
        reward_model: the same; repeat for several.
        no_reward_model: scores come from functions.
        algorithm: rl.algorithm.
        reference: by default as in rl.kl.
        samples: responses of a step.
        group_size: responses to a prompt.
        minibatch: rl.minibatch_size.
        ppo_epochs: passes over each rollout batch.
        microbatch_tokens: rl.trainer.microbatch_tokens.
        pairs: print the hours of a pass over so many preference pairs, and over as many prompts.
        prompt_length: mean, tokens; by default what model.max_length leaves, which is for the longest prompt and is raised if that is less.
        response_length: mean, tokens; by default the longest.
        longest: tokens of the longest response; by default --response-length.
        dtype: model.dtype.
        gpu: kind of GPU.
        gpus: by default 8; with --stages this machine's.
        gpus_per_node: of a node.
        gpu_memory: GiB; by default that of --gpu.
        gpu_flops: TFLOP/s of the dtype; by default those of --gpu.
        gpu_bandwidth: GB/s; by default that of --gpu.
        gpu_link: GB/s in one direction; by default that of --gpu.
        network: GB/s between nodes for each GPU.
        host_link: GB/s between a GPU and its host.
        host_bandwidth: GB/s of a host's memory.
        gloo: GB/s that a trainer sends by gloo to all engines together.
        host_memory: GiB of each host; by default not checked; with --stages and no --gpus this machine's.
        reserve: GiB of each GPU for context and buffers.
        flops_efficiency: share of the peak.
        bandwidth_efficiency: share of the peak.
        network_efficiency: share of the peak.
        decode_overhead: seconds in each decoding step.
        layout: only this one; params: as rl.placement and its settings are.
        engine_gpus: of apart and three-parts; by default several are tried.
        zero_stage: by default all are tried.
        offload: of the optimizer's state to the host; by default both are tried.
        tensor_parallel: GPUs of each engine; by default several are tried.
        checkpointing: by default both are tried.
        sleep: engines free their memory while others compute.
        max_concurrent: concurrent responses per engine.
    """

    base: Annotated[GivenPath, Parameter("--params-file")] = Path("params.yaml")
    recipes: Annotated[tuple[GivenPath, ...], Parameter("--params")] = ()
    assignments: Annotated[tuple[str, ...], Parameter("--set")] = ()
    stages: bool = False
    check: bool = False
    json: Json = False

    model: Annotated[FileOrName | None, _WORK] = None
    critic_model: Annotated[FileOrName | None, _WORK] = None
    reward_model: Annotated[tuple[FileOrName, ...], _WORK] = ()
    no_reward_model: Annotated[bool, _WORK] = False
    algorithm: Annotated[Literal[tuple(ALGORITHMS)] | None, _WORK] = None
    reference: Annotated[Switch, _WORK] = None
    samples: Annotated[Count | None, _WORK] = None
    group_size: Annotated[Count | None, _WORK] = None
    minibatch: Annotated[Count | None, _WORK] = None
    ppo_epochs: Annotated[Count | None, _WORK] = None
    microbatch_tokens: Annotated[Count | None, _WORK] = None
    pairs: Annotated[Count | None, _WORK] = None
    prompt_length: Annotated[Count | None, _WORK] = None
    response_length: Annotated[Count | None, _WORK] = None
    longest: Annotated[Count | None, _WORK] = None
    dtype: Annotated[Literal["bfloat16", "float32"] | None, _WORK] = None

    gpu: Annotated[Literal[tuple(GPUS)], _CLUSTER] = "a100-80"
    gpus: Annotated[Count | None, _CLUSTER] = None
    gpus_per_node: Annotated[Count, _CLUSTER] = 8
    gpu_memory: Annotated[Positive | None, _CLUSTER] = None
    gpu_flops: Annotated[Positive | None, _CLUSTER] = None
    gpu_bandwidth: Annotated[Positive | None, _CLUSTER] = None
    gpu_link: Annotated[Positive | None, _CLUSTER] = None
    network: Annotated[Positive, _CLUSTER] = 25.0
    host_link: Annotated[Positive, _CLUSTER] = 25.0
    host_bandwidth: Annotated[Positive, _CLUSTER] = 200.0
    gloo: Annotated[Positive, _CLUSTER] = 2.1
    host_memory: Annotated[Positive | None, _CLUSTER] = None
    reserve: Annotated[Positive, _CLUSTER] = 3.0
    flops_efficiency: Annotated[Positive, _CLUSTER] = DEFAULTS.flops
    bandwidth_efficiency: Annotated[Positive, _CLUSTER] = DEFAULTS.bandwidth
    network_efficiency: Annotated[Positive, _CLUSTER] = DEFAULTS.network
    decode_overhead: Annotated[float, _CLUSTER] = DEFAULTS.decode_overhead

    layout: Annotated[Literal[("params", *LAYOUTS)] | None, _PLACEMENT] = None
    engine_gpus: Annotated[Count | None, _PLACEMENT] = None
    zero_stage: Annotated[Literal[0, 1, 2, 3] | None, _PLACEMENT] = None
    offload: Annotated[Switch, _PLACEMENT] = None
    tensor_parallel: Annotated[Count | None, _PLACEMENT] = None
    checkpointing: Annotated[Switch, _PLACEMENT] = None
    sleep: Annotated[bool, _PLACEMENT, Parameter(negative_bool="no-")] = True
    max_concurrent: Annotated[Count | None, _PLACEMENT] = None


NOTHING_GIVEN = Options()


def option_overrides(given: Options, params: Params) -> dict[str, Any]:
    """Return the values of the workload's options by dotted keys; a run with these overrides is the planned one.

    Args:
        params: params with recipes and --set, which have the lengths that no option gives.
    """
    rl = params.rl
    keys = KEYS | (PLACEMENT_KEYS if given.layout == "params" else {})
    found = {key: getattr(given, option) for option, key in keys.items() if getattr(given, option) is not None}
    if given.model is not None:
        found["model.path"] = REPOSITORIES.get(given.model, (given.model,))[0]
    if given.group_size is not None:
        found[f"rl.{given.algorithm or rl.algorithm}.group_size"] = given.group_size
    if given.samples is not None and given.minibatch is None and given.samples < rl.minibatch_size:
        found["rl.minibatch_size"] = given.samples
    return found | _lengths(given, params) | _reference(given, params)


def _lengths(given: Options, params: Params) -> dict[str, Any]:
    """Return the override of max_new_tokens, and of model.max_length if it leaves too little room; it is never lowered."""
    max_length, new_tokens = params.model.max_length, params.rl.rollout.max_new_tokens
    prompt = given.prompt_length or max_length - new_tokens
    longest = max(given.response_length or 0, given.longest or 0) or new_tokens
    found = {"rl.rollout.max_new_tokens": longest} if longest != new_tokens else {}
    return found | ({"model.max_length": prompt + longest} if prompt + longest > max_length else {})


def _reference(given: Options, params: Params) -> dict[str, Any]:
    if given.reference is None or given.reference == params.rl.kl.keeps_reference:
        return {}
    if given.reference:
        return {"rl.kl.measure": True}
    limits = {f"rl.monitor.{name}": None for name, limit in params.rl.limits.items() if limit.metric in KL_COLUMNS}
    return {"rl.kl.coef": 0.0, "rl.kl.measure": False, **limits}


def unkeyed(given: Options) -> list[str]:
    """Return the options of the workload that no key of params.yaml holds, as they were given."""
    found = [f"--critic-model {given.critic_model}"] if given.critic_model else []
    found += [f"--reward-model {name}" for name in given.reward_model] + ["--no-reward-model"] * given.no_reward_model
    found += [f"--prompt-length {given.prompt_length}"] if given.prompt_length else []
    mean, longest = given.response_length, given.longest
    return found + ([f"--response-length {mean}"] if mean and longest and mean < longest else [])
