"""The options of python -m rlhf_core.planning, and the keys of params.yaml that they override."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rlhf_core.algorithms.online import ALGORITHMS
from rlhf_core.config import Params
from rlhf_core.config.rl import KL_COLUMNS
from rlhf_core.planning.hardware import GPUS, Efficiency
from rlhf_core.planning.search import LAYOUTS
from rlhf_core.planning.shape import REPOSITORIES, SIZES

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


def option_overrides(given: argparse.Namespace, params: Params) -> dict[str, Any]:
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


def _lengths(given: argparse.Namespace, params: Params) -> dict[str, Any]:
    """Return the override of max_new_tokens, and of model.max_length if it leaves too little room; it is never lowered."""
    max_length, new_tokens = params.model.max_length, params.rl.rollout.max_new_tokens
    prompt = given.prompt_length or max_length - new_tokens
    longest = max(given.response_length or 0, given.longest or 0) or new_tokens
    found = {"rl.rollout.max_new_tokens": longest} if longest != new_tokens else {}
    return found | ({"model.max_length": prompt + longest} if prompt + longest > max_length else {})


def _reference(given: argparse.Namespace, params: Params) -> dict[str, Any]:
    if given.reference is None or given.reference == params.rl.kl.keeps_reference:
        return {}
    if given.reference:
        return {"rl.kl.measure": True}
    limits = {f"rl.monitor.{name}": None for name, limit in params.rl.limits.items() if limit.metric in KL_COLUMNS}
    return {"rl.kl.coef": 0.0, "rl.kl.measure": False, **limits}


def unkeyed(given: argparse.Namespace) -> list[str]:
    """Return the options of the workload that no key of params.yaml holds, as they were given."""
    found = [f"--critic-model {given.critic_model}"] if given.critic_model else []
    found += [f"--reward-model {name}" for name in given.reward_model] + ["--no-reward-model"] * given.no_reward_model
    found += [f"--prompt-length {given.prompt_length}"] if given.prompt_length else []
    mean, longest = given.response_length, given.longest
    return found + ([f"--response-length {mean}"] if mean and longest and mean < longest else [])


def parse(description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m rlhf_core.planning", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--params", type=Path, default=Path("params.yaml"))
    parser.add_argument("--recipe", type=Path, action="append", default=[], help="laid over params.yaml; repeat for several")
    parser.add_argument(
        "--set", action="append", default=[], dest="assignments", metavar="KEY=VALUE", help="a key of params.yaml; repeat for several"
    )
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
    group.add_argument("--model", help=f"a folder with a config.json, a repository of these, or one of {', '.join(SIZES)}")
    group.add_argument("--critic-model", help="the same; default: the policy's shape")
    group.add_argument("--reward-model", action="append", default=[], help="the same; repeat for several")
    group.add_argument("--no-reward-model", action="store_true", help="scores come from functions")
    group.add_argument("--algorithm", choices=tuple(ALGORITHMS))
    group.add_argument("--reference", action=argparse.BooleanOptionalAction, help="default: as in rl.kl")
    for name in ("samples", "group-size", "minibatch", "ppo-epochs", "microbatch-tokens"):
        group.add_argument(f"--{name}", type=_count)
    group.add_argument("--pairs", type=_count, help="print the hours of a pass over so many preference pairs, and over as many prompts")
    of_prompts = "mean, tokens; default: what model.max_length leaves, which counts the longest prompt and is raised if it leaves less"
    group.add_argument("--prompt-length", type=_count, help=of_prompts)
    group.add_argument("--response-length", type=_count, help="mean, tokens; default: the longest")
    group.add_argument("--longest", type=_count, help="tokens of the longest response; default: --response-length")
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
    group.add_argument(
        "--host-memory", type=_positive, help="GiB of each host; default: not checked; with --stages and no --gpus this machine's"
    )
    group.add_argument("--reserve", type=_positive, default=3.0, help="GiB of each GPU for context and buffers")
    defaults = Efficiency()
    for name in ("flops", "bandwidth", "network"):
        group.add_argument(f"--{name}-efficiency", type=_positive, default=getattr(defaults, name), help="share of the peak")
    group.add_argument("--decode-overhead", type=float, default=defaults.decode_overhead, help="seconds in each decoding step")


def _placement_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--layout", choices=("params", *LAYOUTS), help="only this one; params: as rl.placement and its settings are")
    group.add_argument("--engine-gpus", type=_count, help="of apart and three-parts; default: try several")
    group.add_argument("--zero-stage", type=int, choices=range(4), help="default: try all")
    group.add_argument("--offload", action=argparse.BooleanOptionalAction, help="of the optimizer's state to the host; default: try both")
    group.add_argument("--tensor-parallel", type=_count, help="GPUs of each engine; default: try several")
    group.add_argument("--checkpointing", action=argparse.BooleanOptionalAction, help="default: try both")
    group.add_argument(
        "--sleep", action=argparse.BooleanOptionalAction, default=True, help="engines free their memory while others compute"
    )
    group.add_argument("--max-concurrent", type=_count, help="concurrent responses per engine")
