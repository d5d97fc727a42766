"""Estimates the memory and time of online RL on a cluster: rlhf plan, or python -m rlhf_core.planning.

With --stages it estimates the memory of each stage of params.yaml, as the preflight does, on this machine or on --gpus of a kind.

Options that aren't given come from params.yaml: the model's shape, lengths, batches and roles. The output has the best placement of each
layout, and settings for the best of these. The exit code is 1 if no placement fits.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rlhf_core.commands import run_module
from rlhf_core.config import ConfigError, Params, overridden, parse_assignment, parse_params, read_text, read_yaml_text, with_recipes
from rlhf_core.planning.describe import (
    assumed,
    hours_text,
    layouts_text,
    proposal_text,
    stages_text,
    stages_values,
    text,
    values,
    workload_text,
    workload_values,
)
from rlhf_core.planning.duration import hours_of_a_pass
from rlhf_core.planning.hardware import GIB, GPUS, Cluster, Efficiency
from rlhf_core.planning.machine import Gpu, Machine, here
from rlhf_core.planning.models import Model, base_model, of_shape
from rlhf_core.planning.online import RlTraining
from rlhf_core.planning.options import NOTHING_GIVEN, Options, option_overrides, unkeyed
from rlhf_core.planning.phases import predict
from rlhf_core.planning.plan import Placement, Prediction, Workload
from rlhf_core.planning.preflight import plan_stages
from rlhf_core.planning.published import table
from rlhf_core.planning.search import LAYOUTS, Search, best_of_layouts, of_params, settings
from rlhf_core.planning.shape import SIZES, ModelShape, from_architecture, named_shape
from rlhf_core.process import exit_with

DEFAULT_GPUS = 8


def plan(*, arguments: Options = NOTHING_GIVEN) -> int:
    if arguments.check:
        print(table())
        return 0
    try:
        params, overrides = params_of(arguments)
        if arguments.stages:
            return print_stages(params, arguments)
        require_room(params)
        return print_step(params, overrides, arguments)
    except (ConfigError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2


def params_of(arguments: Options) -> tuple[Params, dict[str, Any]]:
    """Return params.yaml with recipes, --set and the options of the workload laid over it, and these overrides by their keys."""
    text, subject = read_text(arguments.base), str(arguments.base)
    overrides = with_recipes(arguments.recipes, dict(map(parse_assignment, arguments.assignments)))
    params = overridden(text, overrides, subject=subject, complete=False)[1]
    if of_options := option_overrides(arguments, params):
        overrides |= of_options
        params = overridden(text, overrides, subject=subject, complete=False)[1]
    if params.model.path is None and params.model.architecture is None:
        raise ValueError("model: expected --model, or --params with a recipe that names one, got none; add one of them")
    return params, overrides


def require_room(params: Params) -> None:
    """Raise ConfigError if responses of RL leave no token for a prompt."""
    longest, limit = params.rl.rollout.max_new_tokens, params.model.max_length
    if longest >= limit:
        method = params.alignment.method
        hint = "" if method == "rl" else f"; for alignment.method {method}, which has no RL, pass --stages"
        raise ConfigError(
            f"rl.rollout.max_new_tokens: expected less than model.max_length, {limit}, got {longest}; "
            f"lower it, or pass --prompt-length{hint}"
        )


def print_step(params: Params, overrides: dict[str, Any], arguments: Options) -> int:
    """Print the layouts and the proposal, and return the exit code: 1 if no placement fits."""
    work, cluster = workload(params, arguments), cluster_of(arguments)
    layouts = best_placements(work, params, arguments)
    proposed = next(iter(layouts.values()))
    chosen = settings(proposed.placement) if arguments.layout != "params" else {}
    lines = differing(read_text(arguments.base), overrides | chosen) if proposed.fits else {}
    notes = notices(params, arguments) + ([] if proposed.fits else remedies(work, params, arguments))
    if replaced := [key for key, value in chosen.items() if overrides.get(key, value) != value]:
        notes.append(f"{', '.join(replaced)}: the proposal sets it otherwise; --layout params predicts yours")
    for notice in notes:
        print(notice, file=sys.stderr)
    hours = {}
    if arguments.pairs and proposed.fits:
        hours = hours_of_a_pass(work, arguments.pairs, proposed, cluster, efficiency_of(arguments))
    basis = assumed(work, params, arguments)
    if arguments.json:
        predicted = {name: values(prediction, cluster) for name, prediction in layouts.items()}
        found = {"workload": workload_values(basis), "layouts": predicted, "proposed": values(proposed, cluster) | {"settings": lines}}
        print(json.dumps(found | ({"hours": hours} if hours else {}), indent=2))
    else:
        print(f"{workload_text(basis)}\n\n{layouts_text(layouts, work, cluster)}\n\nproposed: {text(proposed, cluster)}\n")
        if hours:
            print(f"{hours_text(hours, arguments.pairs, cluster)}\n")
        if proposed.fits:
            print(proposal_text(proposed, work, cluster, lines, unkeyed(arguments)))
    return 0 if proposed.fits else 1


def differing(text: str, overrides: dict[str, Any]) -> dict[str, Any]:
    """Return the overrides that change a params.yaml of this text."""
    tree = read_yaml_text(text, "params.yaml")
    params = parse_params(tree, subject="params.yaml", complete=False)
    return {key: value for key, value in overrides.items() if value != _at(tree, params, key)}


def _at(tree: Any, params: Any, key: str) -> Any:
    """Return the value of a key in the text, else its default, else `...`."""
    for name in key.split("."):
        tree = tree.get(name, ...) if isinstance(tree, dict) else ...
        params = getattr(params, name, ...)
    return params if tree is ... else tree


def print_stages(params: Params, arguments: Options) -> int:
    """Print the memory of each stage, and return the exit code: 1 if a stage lacks memory or is refused."""
    machine = machine_of(arguments)
    start = start_of(params, arguments)
    rewards = [of_shape(shape_of(given, params)) for given in arguments.reward_model]
    plans, problems = plan_stages(params, machine, start, rewards)
    if arguments.json:
        print(json.dumps(stages_values(plans, problems), indent=2))
    else:
        print(stages_text(plans, machine, problems))
    refused = any(isinstance(error, ValueError) for error in problems.values())
    return 1 if refused or any(plan.shortages for plan in plans) else 0


def machine_of(arguments: Options) -> Machine:
    """Return the cluster of --gpus, or this machine, with --host-memory in place of its own if that is given."""
    cluster = cluster_of(arguments)
    if arguments.gpus is not None:
        gpus = (Gpu(cluster.gpu.memory, cluster.gpu.memory),) * cluster.gpus
        return Machine(cluster.host_memory, gpus, cluster.host_memory, cluster.gpus_per_node)
    return here() if arguments.host_memory is None else replace(here(), host=cluster.host_memory, host_total=cluster.host_memory)


def start_of(params: Params, arguments: Options) -> Model | None:
    """Return the model that the chain starts from; None if no option names it, this machine doesn't have it and its shape isn't known."""
    if arguments.model:
        return of_shape(shape_of(arguments.model, params))
    found = base_model(params.model)
    known = named_shape(params.model.path) if found is None and params.model.path else None
    return of_shape(known) if known else found


def notices(params: Params, arguments: Options) -> list[str]:
    """Return notes on where the prediction differs from params.yaml or from the number format of the GPU's figures."""
    found = []
    if params.alignment.method != "rl":
        found.append(
            f"alignment.method: {params.alignment.method} has no RL; the prediction is for alignment.method rl (--stages is for yours)"
        )
    if params.model.dtype == "float32" and arguments.gpu_flops is None:
        found.append(f"{arguments.gpu}: its FLOP/s are for bfloat16, but the model's dtype is float32; pass --dtype or --gpu-flops")
    room = params.model.max_length - params.rl.rollout.max_new_tokens
    if arguments.prompt_length == room:
        found.append(f"model.max_length: leaves {room} tokens for a prompt, the mean; longer prompts are dropped: set it for the longest")
    if params.rl.lora is not None:
        found.append("rl.lora: adapters are ignored; the prediction is for full training (--stages counts them)")
    if len(params.rl.role_groups) > 1 and arguments.layout != "params":
        found.append("rl.placement: the proposal is free to place roles otherwise; --layout params predicts your groups")
    return found


def best_placements(work: Workload, params: Params, arguments: Options) -> dict[str, Prediction]:
    """Return the best placement of each layout, the best first; with `--layout params` only the placement of params.yaml."""
    cluster, efficiency = cluster_of(arguments), efficiency_of(arguments)
    if arguments.layout == "params":
        return {"params": predict(work, of_settings(work, params, arguments), cluster, efficiency)}
    search = Search(
        (arguments.layout,) if arguments.layout else LAYOUTS,
        arguments.engine_gpus,
        arguments.zero_stage,
        arguments.offload,
        arguments.tensor_parallel,
        arguments.checkpointing,
        arguments.sleep,
        params.rl.rollout.max_concurrent_sequences,
        gloo=sends_by_gloo(params),
    )
    return best_of_layouts(work, cluster, efficiency, search)


def remedies(work: Workload, params: Params, arguments: Options) -> list[str]:
    """Return advice for the case that no placement fits."""
    if work.dtype == "float32" and next(iter(best_placements(replace(work, dtype="bfloat16"), params, arguments).values())).fits:
        return ["no placement fits: set model.dtype=bfloat16 (--dtype bfloat16), with which one does"]
    return ["no placement fits: take a smaller model, shorter responses, more GPUs or more memory"]


def sends_by_gloo(params: Params) -> bool:
    """Return whether weights go to the engines by gloo, wherever these are. On GPUs, `auto` means another way for vLLM."""
    rollout = params.rl.rollout
    return rollout.weight_transfer == "gloo" or rollout.backend == "pytorch"


def of_settings(work: Workload, params: Params, arguments: Options) -> Placement:
    """Return the placement that params.yaml asks for."""
    rl = params.rl
    return Placement(
        of_params(work, cluster_gpus(arguments), rl),
        zero_stage=rl.trainer.zero_stage,
        offload=rl.trainer.offload_optimizer,
        tensor_parallel=rl.rollout.tensor_parallel_size,
        checkpointing=rl.trainer.gradient_checkpointing,
        sleep=arguments.sleep,
        max_concurrent=rl.rollout.max_concurrent_sequences,
        sequence_parallel=RlTraining(rl).sequence_parallel,
        gloo=sends_by_gloo(params),
    )


def shape_of(name: str, params: Params) -> ModelShape:
    """Return the shape of a model.

    Args:
        name: a key of SIZES, a repository of one of these, or a model's folder, whose own code runs if model.trust_remote_code is true.
    """
    if Path(name).is_dir():
        from rlhf_core.planning.structure import from_class  # imports transformers, which takes seconds

        return from_class(name, trust_remote_code=params.model.trust_remote_code)
    if (shape := named_shape(name)) is None:
        raise ValueError(
            f"model: expected a folder with a config.json or one of {', '.join(SIZES)} or their repositories, got {name!r}; correct it"
        )
    return shape


def workload(params: Params, arguments: Options) -> Workload:
    """Return the workload of params and of the options that no key of params holds (`unkeyed`)."""
    rl, model = params.rl, params.model
    policy = shape_of(model.path, params) if model.path else from_architecture(model.architecture)
    scorers = sum(scorer.members for scorer in rl.reward.scorers if scorer.kind == "reward_model")
    rewards = [shape_of(given, params) for given in arguments.reward_model] or [policy] * scorers
    longest = rl.rollout.max_new_tokens
    return Workload(
        policy=policy,
        critic=(shape_of(arguments.critic_model, params) if arguments.critic_model else policy) if rl.spec.critic else None,
        reference=rl.kl.keeps_reference,
        reward_models=() if arguments.no_reward_model else tuple(rewards),
        samples=rl.samples_per_step,
        group_size=rl.group_size,
        minibatch=rl.minibatch_size,
        ppo_epochs=rl.ppo_epochs,
        prompt_length=arguments.prompt_length or model.max_length - longest,
        response_length=arguments.response_length or longest,
        longest=longest,
        microbatch_tokens=rl.trainer.microbatch_tokens,
        dtype=model.dtype,
        max_length=model.max_length,
    )


def cluster_gpus(arguments: Options) -> int:
    return arguments.gpus or DEFAULT_GPUS


def efficiency_of(arguments: Options) -> Efficiency:
    return Efficiency(arguments.flops_efficiency, arguments.bandwidth_efficiency, arguments.network_efficiency, arguments.decode_overhead)


def cluster_of(arguments: Options) -> Cluster:
    gpu = GPUS[arguments.gpu]
    units = {"memory": GIB, "flops": 1e12, "bandwidth": 1e9, "link": 1e9}
    given = {key: getattr(arguments, f"gpu_{key}") for key in units}
    gpu = replace(gpu, **{key: given[key] * unit for key, unit in units.items() if given[key] is not None})
    return Cluster(
        gpu,
        cluster_gpus(arguments),
        arguments.gpus_per_node,
        network=arguments.network * 1e9,
        host_link=arguments.host_link * 1e9,
        host_bandwidth=arguments.host_bandwidth * 1e9,
        gloo=arguments.gloo * 1e9,
        reserve=arguments.reserve * GIB,
        host_memory=arguments.host_memory * GIB if arguments.host_memory else float("inf"),
    )


main = partial(run_module, "plan")

if __name__ == "__main__":
    exit_with(main)
