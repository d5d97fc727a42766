"""Estimate memory and time of online RL on a cluster: python -m rlhf_core.planning [--gpu h100 --gpus 16 --model llama3-8b ...].

With --stages: the memory of each stage of params.yaml, as the preflight counts it, on this machine or on --gpus of a kind.

Options that aren't given come from params.yaml: the model's shape, lengths, batches and roles. The command proposes a placement;
with --layout it also evaluates that one; `params` is that of params.yaml. The exit code is 1 if none fits.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from rlhf_core.config import Algorithm, ConfigError, Params, overridden, read_recipe, read_text
from rlhf_core.planning.describe import assumed, proposal_text, stages_text, stages_values, text, values, workload_text, workload_values
from rlhf_core.planning.hardware import GIB, GPUS, Cluster, Efficiency
from rlhf_core.planning.machine import Gpu, Machine, here
from rlhf_core.planning.models import base_model, of_shape
from rlhf_core.planning.online import RlTraining
from rlhf_core.planning.phases import predict
from rlhf_core.planning.plan import Placement, Prediction, Workload
from rlhf_core.planning.preflight import plan_stages
from rlhf_core.planning.published import table
from rlhf_core.planning.search import apart, colocated, of_params, propose, settings, three_parts
from rlhf_core.planning.shape import SIZES, ModelShape, from_architecture
from rlhf_core.process import exit_with

DEFAULT_GPUS = 8
LAYOUTS = ("params", "colocated", "apart", "three-parts")


def main() -> int:
    arguments = parse()
    if arguments.check:
        print(table())
        return 0
    try:
        params = params_of(arguments)
        if arguments.stages:
            return print_stages(params, arguments)
        work = workload(params, arguments)
        found = plan(work, params, arguments)
    except (ConfigError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    cluster = cluster_of(arguments)
    for notice in notices(params, arguments):
        print(notice, file=sys.stderr)
    basis = assumed(work, params, arguments)
    if arguments.json:
        predicted = {name: values(prediction, cluster) for name, prediction in found.items()}
        if found["proposed"].fits:
            predicted["proposed"]["settings"] = settings(found["proposed"].placement)
        print(json.dumps({"workload": workload_values(basis), **predicted}, indent=2))
    else:
        print(f"{workload_text(basis)}\n")
        for name, prediction in found.items():
            print(f"{name}: {text(prediction, cluster)}\n")
        if found["proposed"].fits:
            print(proposal_text(found["proposed"], work, cluster))
    return 0 if any(prediction.fits for prediction in found.values()) else 1


def params_of(arguments: argparse.Namespace) -> Params:
    """params.yaml with the recipes laid over it. Nothing is written."""
    overrides: dict[str, Any] = {}
    for recipe in arguments.recipe:
        overrides |= read_recipe(recipe)
    return overridden(read_text(arguments.params), overrides, subject=str(arguments.params))[1]


def print_stages(params: Params, arguments: argparse.Namespace) -> int:
    """Returns the exit code: 1 if a stage lacks memory or is refused."""
    machine = here()
    if arguments.gpus is not None:
        cluster = cluster_of(arguments)
        host = arguments.host_memory * GIB if arguments.host_memory else float("inf")
        gpus = (Gpu(cluster.gpu.memory, cluster.gpu.memory),) * cluster.gpus
        machine = Machine(host, gpus, host, cluster.gpus_per_node)
    start = of_shape(shape_of(arguments.model)) if arguments.model else base_model(params.model)
    rewards = [of_shape(shape_of(given)) for given in arguments.reward_model]
    plans, problems = plan_stages(params, machine, start, rewards)
    if arguments.json:
        print(json.dumps(stages_values(plans, problems), indent=2))
    else:
        print(stages_text(plans, machine, problems))
    refused = any(isinstance(error, ValueError) for error in problems.values())
    return 1 if refused or any(plan.shortages for plan in plans) else 0


def notices(params: Params, arguments: argparse.Namespace) -> list[str]:
    """Notes on predictions that differ from params.yaml, or from the number format of the GPU's figures."""
    found = []
    if (arguments.dtype or params.model.dtype) == "float32" and arguments.gpu_flops is None:
        found.append(f"{arguments.gpu}: its FLOP/s are for bfloat16, but the model's dtype is float32; pass --dtype or --gpu-flops")
    if params.rl.lora is not None:
        found.append("rl.lora: adapters are ignored; the prediction is for full training (--stages counts them)")
    if len(params.rl.role_groups) > 1 and arguments.layout != "params":
        found.append("rl.placement: the proposal is free to place roles otherwise; --layout params predicts your groups")
    return found


def plan(work: Workload, params: Params, arguments: argparse.Namespace) -> dict[str, Prediction]:
    cluster = cluster_of(arguments)
    efficiency = Efficiency(
        arguments.flops_efficiency, arguments.bandwidth_efficiency, arguments.network_efficiency, arguments.decode_overhead
    )
    at_a_time = arguments.max_concurrent or params.rl.rollout.max_concurrent_sequences
    found = {}
    if arguments.layout:
        found["requested"] = predict(work, requested(work, params, arguments, at_a_time), cluster, efficiency)
    found["proposed"] = propose(
        work,
        cluster,
        efficiency,
        checkpointing=arguments.checkpointing,
        sleep=arguments.sleep,
        max_concurrent=at_a_time,
        gloo=sends_by_gloo(params),
    )
    return found


def sends_by_gloo(params: Params) -> bool:
    """Whether weights go to the engines by gloo wherever they are placed; vLLM's have `auto` resolved to another way on GPUs."""
    rollout = params.rl.rollout
    return rollout.weight_transfer == "gloo" or rollout.backend == "pytorch"


def requested(work: Workload, params: Params, arguments: argparse.Namespace, at_a_time: int) -> Placement:
    engines = arguments.engine_gpus or max(1, cluster_gpus(arguments) // 2)
    own, trainer = arguments.layout == "params", params.rl.trainer
    groups = {
        "params": lambda: of_params(work, cluster_gpus(arguments), params.rl),
        "colocated": lambda: colocated(work, cluster_gpus(arguments)),
        "apart": lambda: apart(work, cluster_gpus(arguments), engines),
        "three-parts": lambda: three_parts(work, cluster_gpus(arguments), engines),
    }[arguments.layout]()
    return Placement(
        groups,
        zero_stage=trainer.zero_stage if arguments.zero_stage is None else arguments.zero_stage,
        offload=trainer.offload_optimizer if arguments.offload is None else arguments.offload,
        tensor_parallel=params.rl.rollout.tensor_parallel_size if own else arguments.tensor_parallel,
        checkpointing=trainer.gradient_checkpointing if own and arguments.checkpointing is None else bool(arguments.checkpointing),
        sleep=arguments.sleep,
        max_concurrent=at_a_time,
        sequence_parallel=RlTraining(params.rl).sequence_parallel,
        gloo=sends_by_gloo(params),
    )


def shape_of(name: str) -> ModelShape:
    """name: a key of SIZES, or a model's folder."""
    if name not in SIZES and not Path(name).is_dir():
        raise ValueError(f"model: expected a folder with a config.json or one of {', '.join(SIZES)}, got {name!r}; correct it")
    if name in SIZES:
        return SIZES[name]
    from rlhf_core.planning.structure import from_class  # imports transformers, which takes seconds

    return from_class(name)


def workload(params: Params, arguments: argparse.Namespace) -> Workload:
    """The workload from the arguments, or else from params.yaml."""
    rl, model = params.rl, params.model
    name = arguments.model or model.path
    policy = shape_of(name) if name else from_architecture(model.architecture)
    algorithm = arguments.algorithm or rl.algorithm
    response = arguments.response_length or rl.rollout.max_new_tokens
    samples = arguments.samples or rl.samples_per_step
    scorers = sum(scorer.members for scorer in rl.reward.scorers if scorer.kind == "reward_model")
    rewards = [shape_of(given) for given in arguments.reward_model] or [policy] * scorers
    return Workload(
        policy=policy,
        critic=(shape_of(arguments.critic_model) if arguments.critic_model else policy) if algorithm == "ppo" else None,
        reference=rl.kl.keeps_reference if arguments.reference is None else arguments.reference,
        reward_models=() if arguments.no_reward_model else tuple(rewards),
        samples=samples,
        group_size=arguments.group_size or rl.model_copy(update={"algorithm": algorithm}).group_size,
        minibatch=min(samples, arguments.minibatch or rl.minibatch_size),
        epochs=arguments.epochs or rl.epochs,
        prompt_length=arguments.prompt_length or model.max_length - rl.rollout.max_new_tokens,
        response_length=response,
        longest=max(response, arguments.longest or 0),
        microbatch_tokens=arguments.microbatch_tokens or rl.trainer.microbatch_tokens,
        dtype=arguments.dtype or model.dtype,
    )


def cluster_gpus(arguments: argparse.Namespace) -> int:
    return arguments.gpus or DEFAULT_GPUS


def cluster_of(arguments: argparse.Namespace) -> Cluster:
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
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m rlhf_core.planning", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--params", type=Path, default=Path("params.yaml"))
    parser.add_argument("--recipe", type=Path, action="append", default=[], help="laid over params.yaml; repeat for several")
    parser.add_argument("--stages", action="store_true", help="memory of each stage, as the preflight counts it")
    parser.add_argument("--check", action="store_true", help="compare predictions with published and measured figures")
    parser.add_argument("--json", action="store_true", help="print JSON, in bytes and seconds")
    _work_arguments(parser.add_argument_group("workload"))
    _cluster_arguments(parser.add_argument_group("cluster"))
    _placement_arguments(parser.add_argument_group("placement"))
    return parser.parse_args()


def _positive(value: str) -> float:
    number = float(value)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {value}")
    return number


def _count(value: str) -> int:
    if not value.isdecimal() or int(value) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number above 0, got {value}")
    return int(value)


def _work_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--model", help=f"a folder with a config.json, or one of {', '.join(SIZES)}")
    group.add_argument("--critic-model", help="the same; default: the policy's shape")
    group.add_argument("--reward-model", action="append", default=[], help="the same; repeat for several")
    group.add_argument("--no-reward-model", action="store_true", help="scores come from functions")
    group.add_argument("--algorithm", choices=get_args(Algorithm))
    group.add_argument("--reference", action=argparse.BooleanOptionalAction, help="default: as in rl.kl")
    for name in ("samples", "group-size", "minibatch", "epochs", "microbatch-tokens"):
        group.add_argument(f"--{name}", type=_count)
    group.add_argument("--prompt-length", type=_count, help="mean, tokens")
    group.add_argument("--response-length", type=_count, help="mean, tokens; default: rl.rollout.max_new_tokens")
    group.add_argument("--longest", type=_count, help="tokens of the longest response")
    group.add_argument("--dtype", choices=("bfloat16", "float32"))


def _cluster_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--gpu", choices=GPUS, default="a100-80")
    group.add_argument("--gpus", type=_count, help="default: 8; with --stages this machine's")
    group.add_argument("--gpus-per-node", type=_count, default=8)
    for name, unit in (("memory", "GiB"), ("flops", "TFLOP/s of the dtype"), ("bandwidth", "GB/s"), ("link", "GB/s in one direction")):
        group.add_argument(f"--gpu-{name}", type=_positive, help=f"{unit}; default: of --gpu")
    group.add_argument("--network", type=_positive, default=25.0, help="GB/s between nodes for each GPU")
    group.add_argument("--host-link", type=_positive, default=25.0, help="GB/s between a GPU and its host")
    group.add_argument("--host-bandwidth", type=_positive, default=200.0, help="GB/s of a host's memory")
    group.add_argument("--gloo", type=_positive, default=2.1, help="GB/s that a trainer sends by gloo to all engines together")
    group.add_argument("--host-memory", type=_positive, help="GiB of each host, with --stages and --gpus; default: not checked")
    group.add_argument("--reserve", type=_positive, default=3.0, help="GiB of each GPU for context and buffers")
    defaults = Efficiency()
    for name in ("flops", "bandwidth", "network"):
        group.add_argument(f"--{name}-efficiency", type=_positive, default=getattr(defaults, name), help="share of the peak")
    group.add_argument("--decode-overhead", type=float, default=defaults.decode_overhead, help="seconds in each decoding step")


def _placement_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--layout", choices=LAYOUTS, help="also evaluate this layout")
    group.add_argument("--engine-gpus", type=_count, help="of apart and three-parts; default: half")
    group.add_argument("--zero-stage", type=int, choices=range(4))
    group.add_argument("--offload", action=argparse.BooleanOptionalAction, help="keep the optimizer's state on the host")
    group.add_argument("--tensor-parallel", type=_count, default=1, help="of each engine")
    group.add_argument("--checkpointing", action=argparse.BooleanOptionalAction, help="default: try both")
    group.add_argument(
        "--sleep", action=argparse.BooleanOptionalAction, default=True, help="engines free their memory while others compute"
    )
    group.add_argument("--max-concurrent", type=_count, help="concurrent responses per engine")


if __name__ == "__main__":
    exit_with(main)
