"""Describes a workload and a prediction as text and as values for JSON."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rlhf_core.config import Params, number_of
from rlhf_core.planning.hardware import GIB, Cluster
from rlhf_core.planning.machine import Machine
from rlhf_core.planning.plan import ENGINE, Placement, Prediction, Workload, usable_host
from rlhf_core.planning.preflight import STAGES, gib
from rlhf_core.planning.remedy import advice, shown
from rlhf_core.planning.search import LAYOUTS, divides_minibatch, impossible
from rlhf_core.planning.shortages import ERROR, Plan, without_models
from rlhf_core.planning.stages import Process, Unpredictable

Problems = Mapping[str, ValueError | Unpredictable]


def headline(placement: Placement) -> str:
    groups = ", ".join(f"{group.gpus} GPU{'s' * (group.gpus > 1)} {group.name}" for group in placement.groups)
    options = [f"ZeRO {placement.zero_stage}", f"tensor parallel {placement.tensor_parallel} in the engines"]
    options += ["optimizer on the host"] * placement.offload + ["checkpointing"] * placement.checkpointing
    return f"{groups}; {', '.join(options)}"


def text(found: Prediction, cluster: Cluster) -> str:
    """Return the memory of each group, and the seconds of each phase if all groups fit."""
    lines = [headline(found.placement), "", f"  {_host(found, cluster)}"]
    for memory in found.memory:
        fits = "fits" if memory.keeps_margin(cluster) else f"fits, but not if it needs {ERROR:.0%} more"
        state = f"lacks {memory.missing / GIB:.3g} GiB" if memory.missing else fits
        lines.append(f"  {memory.group.name}: {memory.needed / GIB:.3g} of {cluster.available / GIB:.1f} GiB on each GPU, {state}")
        lines += [f"    {part:<32} {size / GIB:9.3g} GiB" for part, size in memory.parts.items()]
        if ENGINE in memory.group.roles:
            lines.append(f"    {'left for keys and values':<32} {memory.cache / GIB:9.3g} GiB: {found.concurrency:.0f} responses at once")
        if memory.host:
            lines.append(f"    {'on the host, for each GPU':<32} {memory.host / GIB:9.3g} GiB")
    if found.fits:
        phases = {**found.seconds, "step": found.step}
        lines += ["", *(f"  {phase:<10} {seconds:10.3g} s" for phase, seconds in phases.items())]
    return "\n".join(lines)


def _lacking(found: Prediction) -> str:
    worst = max(found.memory, key=lambda memory: memory.missing)
    gpus = f": lacks {gib(worst.missing)} on each GPU of {worst.group.name}" if worst.missing else ""
    return gpus + (f": lacks {gib(found.host_missing)} of host memory" if found.host_missing else "")


def _host(found: Prediction, cluster: Cluster) -> str:
    needed = f"{gib(found.host)} of host memory on the fullest node"
    if cluster.host_memory == float("inf"):
        return f"needs {needed}, not checked: pass --host-memory"
    state = f"lacks {gib(found.host_missing)}" if found.host_missing else "fits"
    return f"{needed.replace(' of host', f' of {gib(usable_host(cluster))} of host')}, {state}"


def layouts_text(layouts: Mapping[str, Prediction], work: Workload, cluster: Cluster) -> str:
    """Return a line for each layout with the seconds of its best placement, and the memory that this leaves on the fullest GPU."""
    lines = [f"  {'layout':<12} {'s a step':>9} {'GiB to spare':>13}  setting"]
    for layout, found in layouts.items():
        spare = (cluster.available - max(memory.needed for memory in found.memory)) / GIB
        seconds = f"{found.step:.4g}" if found.fits else "none fits"
        lines.append(f"  {layout:<12} {seconds:>9} {spare:>13.3g}  {headline(found.placement)}{_lacking(found)}")
    lines += [f"  {layout:<12} {'':>9} {'':>13}  {why}" for layout in LAYOUTS if (why := impossible(layout, work, cluster.gpus))]
    return "\n".join(["Layouts, the best first:", "", *lines])


def hours_text(hours: Mapping[str, float], pairs: int, cluster: Cluster) -> str:
    lines = [f"Hours of a pass over {pairs:,} pairs, or in RL prompts, on {number_of(cluster.gpus, 'GPU')}:", ""]
    return "\n".join([*lines, *(f"  {what:<14} {value:10.3g}" for what, value in hours.items())])


def proposal_text(found: Prediction, work: Workload, cluster: Cluster, lines: Mapping[str, Any], unkeyed: Sequence[str] = ()) -> str:
    """Return objections to a proposal that fits, and the options that run it.

    Args:
        lines: values by key, where they differ from params.yaml. unkeyed: options of the workload that no key holds.
    """
    return "\n".join([*_objections(found, work, cluster), *_pasted(lines, unkeyed)])


def _objections(found: Prediction, work: Workload, cluster: Cluster) -> list[str]:
    lines = []
    if not found.keeps_margin(cluster):
        lines.append(f"No placement whose ranks divide the minibatch fits with a margin of {ERROR:.0%}, the prediction's error.")
    if not divides_minibatch(work, found.placement):
        lines.append(f"rl.minibatch_size: expected a multiple of the ranks below, got {work.minibatch}; change it")
    return lines


def _pasted(lines: Mapping[str, Any], unkeyed: Sequence[str]) -> list[str]:
    beside = [f"Not among the settings, since no key holds it: {' '.join(unkeyed)}; reward models are those of rl.reward.scorers"]
    if not lines:
        return [*beside * bool(unkeyed), "The proposal is params.yaml as it is."]
    given = " \\\n".join(f"  --set {shlex.quote(f'{key}={shown(value)}')}" for key, value in lines.items())
    heading = "Settings of the proposal, all that differ from params.yaml, for rlhf run; check its stages with --stages:"
    return [*beside * bool(unkeyed), heading, "", given]


def stages_text(plans: list[Plan], machine: Machine, problems: Problems) -> str:
    """Return a verdict on each stage, and the processes and their memory of each stage that has a plan.

    Args:
        problems: why stages have no plan, as `plan_stages` returns them.
    """
    count = len(machine.gpus)
    where = f"{number_of(count, 'GPU')} of {machine.gpus[0].free / GIB:.4g} GiB" if count else "CPU"
    host = f"{machine.host / GIB:.4g} GiB of host memory" if machine.host < float("inf") else "host memory not checked"
    verdicts = {plan.stage: _verdict(plan) for plan in plans} | {stage: _refusal(error) for stage, error in problems.items()}
    lines = [f"Memory of each stage ({where}, {host}):", "", *(f"  {stage + ':':<13} {verdicts[stage]}" for stage in STAGES)]
    for plan in plans:
        processes = [process for moment in plan.moments for process in moment]
        lines += ["", f"{plan.stage}:"] * bool(processes)
        for process in processes:
            lines += _process_lines(process, plan.stage, on_gpu=bool(machine.gpus))
        if plan.turns:
            lines.append("  on a GPU by turns, the largest counts:")
            lines += [_line(turn.replace(f"{plan.stage}: ", ""), size) for turn, size in plan.turns.items()]
    return "\n".join(lines)


def _verdict(plan: Plan) -> str:
    if not plan.shortages:
        return "fits" if plan.moments else "loads no model"
    worst = plan.shortages[0]
    state = "lacks memory" if worst.is_certain else f"may lack memory, by less than the prediction's error of {ERROR:.0%}"
    name = worst.name.removeprefix(f"{plan.stage}: ")
    needed = f"{gib(worst.needed)} needed of the {gib(worst.available)} that {worst.where} has left"
    return f"{state}: {name}: {needed}; {advice(plan.remedy or {})}"


def _refusal(error: ValueError | Unpredictable) -> str:
    return f"{'refused' if isinstance(error, ValueError) else 'not predicted'}: {error}"


def _process_lines(process: Process, stage: str, *, on_gpu: bool) -> list[str]:
    host = f", {gib(process.host)} on the host" if on_gpu and process.host else ""
    own = 0.0 if on_gpu else without_models(process)
    lines = [f"  {process.count} x {process.name.removeprefix(f'{stage}: ')}: {gib(process.needed + own)}{host}"]
    lines += [_line(part, size) for part, size in process.parts.items()]
    if process.peak:
        largest = f" (largest of {len(process.phases)} phases)" if len(process.phases) > 1 else ""
        lines.append(_line(process.peak + largest, process.phases[process.peak]))
    return lines + ([_line("the process without models", own)] if own else [])


def _line(what: str, size: float) -> str:
    return f"    {what:<64} {size / GIB:9.3g} GiB"


def stages_values(plans: list[Plan], problems: Problems) -> dict[str, Any]:
    """Return the content of `stages_text` for JSON, in bytes."""
    found: dict[str, Any] = {stage: {"problem": str(error), "refused": isinstance(error, ValueError)} for stage, error in problems.items()}
    for plan in plans:
        processes = [asdict(process) | {"needed": process.needed} for moment in plan.moments for process in moment]
        found[plan.stage] = {
            "fits": not plan.shortages,
            "processes": processes,
            "shortages": [asdict(s) for s in plan.shortages],
            "turns": dict(plan.turns),
            "remedy": plan.remedy,
        }
    return found


def values(found: Prediction, cluster: Cluster) -> dict[str, Any]:
    """Return a prediction for JSON, in bytes and seconds."""
    p = found.placement
    return {
        "fits": found.fits,
        "missing": found.missing,
        "host": found.host,
        "host_missing": found.host_missing,
        "keeps_margin": found.keeps_margin(cluster),
        "seconds": {**found.seconds, "step": found.step},
        "concurrency": found.concurrency,
        "zero_stage": p.zero_stage,
        "offload": p.offload,
        "tensor_parallel": p.tensor_parallel,
        "checkpointing": p.checkpointing,
        "groups": [
            {"gpus": m.group.gpus, "roles": list(m.group.roles), "parts": m.parts, "needed": m.needed, "missing": m.missing, "host": m.host}
            for m in found.memory
        ],
    }


@dataclass(frozen=True)
class Assumed:
    """A quantity of the workload; `source` is the option or the key of params.yaml that sets it."""

    name: str
    value: int | float | str
    unit: str
    source: str


def assumed(work: Workload, params: Params, given: argparse.Namespace) -> list[Assumed]:
    """Return the quantities of one step's workload, and the number of steps."""

    def source(option: str, key: str) -> str:
        return f"--{option.replace('_', '-')}" if getattr(given, option) is not None else key

    algorithm = given.algorithm or params.rl.algorithm
    rewards = "--no-reward-model" if given.no_reward_model else "--reward-model" if given.reward_model else "rl.reward.scorers"
    return [
        Assumed(
            "model", work.policy.parameters, "parameters", source("model", "model.path" if params.model.path else "model.architecture")
        ),
        Assumed("dtype", work.dtype, "", source("dtype", "model.dtype")),
        Assumed("algorithm", algorithm, "", source("algorithm", "rl.algorithm")),
        Assumed("steps", params.rl.steps, "in the run; seconds are of one", "rl.steps")
        if params.rl.steps is not None
        else Assumed("epochs", params.rl.epochs, "passes over the prompts; seconds are of a step", "rl.epochs"),
        Assumed("samples", work.samples, "responses a step", source("samples", "rl.samples_per_step")),
        Assumed("group size", work.group_size, "responses to a prompt", source("group_size", f"rl.{algorithm}.group_size")),
        Assumed("prompts", work.samples // work.group_size, "a step", "samples / group size"),
        Assumed("prompt length", work.prompt_length, "tokens", source("prompt_length", "model.max_length - rl.rollout.max_new_tokens")),
        Assumed(
            "response length", work.response_length, "tokens", source("response_length", source("longest", "rl.rollout.max_new_tokens"))
        ),
        Assumed("longest response", work.longest, "tokens", source("longest", source("response_length", "rl.rollout.max_new_tokens"))),
        Assumed("longest sample", work.longest_sample, "tokens", "model.max_length"),
        Assumed("minibatch", work.minibatch, "samples an optimizer step", source("minibatch", "rl.minibatch_size")),
        Assumed("PPO epochs", work.ppo_epochs, "passes over a step's samples", source("ppo_epochs", "rl.ppo_epochs")),
        Assumed("microbatch", work.microbatch_tokens, "tokens a forward pass", source("microbatch_tokens", "rl.trainer.microbatch_tokens")),
        Assumed("reward models", len(work.reward_models), "", rewards),
        Assumed("reference", "yes" if work.reference else "no", "", source("reference", "rl.kl")),
    ]


def workload_text(found: list[Assumed]) -> str:
    lines = [f"  {a.name:<18} {_shown(a.value):>14} {a.unit}".rstrip().ljust(66) + f" {a.source}" for a in found]
    return "\n".join(["Assumed workload:", "", *lines])


def workload_values(found: list[Assumed]) -> dict[str, dict[str, Any]]:
    """Return the quantities of a workload by their names."""
    return {a.name: {key: value for key, value in asdict(a).items() if key != "name"} for a in found}


def _shown(value: int | float | str) -> str:
    return value if isinstance(value, str) else f"{value:,.10g}"
