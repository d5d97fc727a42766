"""The check before a stage loads anything: what its processes take, beside the memory that is there, and the nearest settings that fit.

A prediction of a decoder with gated MLPs is within 10% of what processes took on a CPU (docs/planning.md), so a stage is refused only where
it takes more than that beyond the available memory. Other architectures aren't predicted, and never refused.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rlhf_core.config import Params, ScorerConfig, Section
from rlhf_core.environment import INFERENCE_STAGES
from rlhf_core.paths import POLICY_MODEL, REWARD_MODEL, SFT_MODEL
from rlhf_core.planning.hardware import GIB
from rlhf_core.planning.machine import Gpu, Machine, here
from rlhf_core.planning.memory import ENGINE_PROCESS
from rlhf_core.planning.models import Model, base_model, read_model
from rlhf_core.planning.online import rl_engine, rl_ranks
from rlhf_core.planning.placement import Placement, place
from rlhf_core.planning.stages import (
    ALLOCATOR,
    PLANS,
    RAY_HOST,
    TRAINER_GPU,
    Models,
    Moments,
    Process,
    Unpredictable,
)

ERROR = 0.1  # of a prediction
RESERVED = 0.03  # of the available memory, for fragmentation and other processes
GPU_HOST = 3 * GIB  # of a process on a GPU: libraries and pinned buffers
LORA = {"rank": 16, "alpha": 32.0, "dropout": 0.0, "target_modules": "all-linear"}
SHOWN_PARTS = 6
STAGES = ("train_sft", "train_reward", "gate_reward", "train_policy", "evaluate")
PATIENCE = 20.0  # seconds

log = logging.getLogger("rlhf")


@dataclass(frozen=True)
class Shortage:
    """A process for which memory is missing, or all of a host's.

    needed, available: bytes. where: names the memory. parts: bytes by role and kind, the largest phase included.
    """

    name: str
    section: str
    needed: float
    available: float
    where: str
    parts: Mapping[str, float]

    @property
    def ratio(self) -> float:
        """Needed over available."""
        return self.needed / max(self.available, 1.0)

    @property
    def is_certain(self) -> bool:
        return self.ratio > 1 + ERROR


@dataclass(frozen=True)
class Plan:
    """Of a stage on a machine: its processes, moment by moment, and what is missing, the worst first.

    turns: of processes that take turns on a GPU: bytes on it in each turn, of which the largest counts.
    """

    stage: str
    moments: Moments
    shortages: list[Shortage]
    turns: Mapping[str, float] = field(default_factory=dict)


def check(stage: str, params: Params, models: Models, machine: Machine) -> Plan:
    """The plan of a stage of dvc.yaml or rounds/dvc.yaml.

    Raises:
        Unpredictable: a model's size or architecture isn't known, or the GPUs have different sizes of which some may not fit.
    """
    if stage == "train_policy" and params.alignment.method == "rl":
        return _check_rl(params, models, machine)
    name = params.alignment.method if stage == "train_policy" else stage
    if name not in PLANS:
        return Plan(stage, [], [])
    moments = PLANS[name](params, models, on_gpu=bool(machine.gpus))
    if not machine.gpus:  # several ranks train in a job of Ray
        moments = [[*moment, _ray(stage)] if any(p.count > 1 for p in moment) else moment for moment in moments]
    found = [shortage for moment in moments for shortage in _shortages(moment, machine)]
    return Plan(stage, moments, sorted(found, key=lambda s: -s.ratio))


def _check_rl(params: Params, models: Models, machine: Machine) -> Plan:
    rl, on_gpu = params.rl, bool(machine.gpus)
    placement = place(rl, len(machine.gpus), machine.nodes)
    ranks = rl_ranks(rl, params.model, models, on_gpu=on_gpu)
    rollouts = rl_engine(rl, params.model, models, on_gpu=on_gpu, per_engine=placement.engine_share(rl))
    if on_gpu and placement.takes_turns(rl):
        return _check_turns(placement, ranks, rollouts, machine)
    moment = [*ranks, rollouts]
    if not on_gpu:
        weights = rollouts.parts["engine: weights"]
        moment.append(_ray("train_policy", 2 * weights))
    beside = {}
    for number, process in enumerate(ranks if on_gpu else ()):
        engines = placement.engines_beside_ranks(number) * (rollouts.share or 0.0) * min(gpu.total for gpu in machine.gpus)
        beside[process.name] = engines + sum(ranks[other].needed + TRAINER_GPU for other in placement.groups_beside(number))
    found = _shortages(moment, machine, beside=beside)
    return Plan("train_policy", [moment], sorted(found, key=lambda s: -s.ratio))


def _check_turns(placement: Placement, ranks: list[Process], engines: Process, machine: Machine) -> Plan:
    """Engines and ranks that take turns on GPUs: each process leaves its context only, and the ranks' parts go to the host."""
    ranks = [replace(rank, host=rank.host + sum(rank.parts.values())) for rank in ranks]
    at_once = max(map(placement.engines_beside_ranks, range(len(ranks))))
    of_engines = {gpu for first in placement.engines for gpu in placement.engine_gpus(first)}
    contexts = TRAINER_GPU * max(sum(gpu in group for group in placement.ranks) for gpu in of_engines)
    beside, turns = {engines.name: contexts}, {}
    for number, rank in enumerate(ranks):
        others = sum(ranks[other].needed + TRAINER_GPU for other in placement.groups_beside(number))
        beside[rank.name] = placement.engines_beside_ranks(number) * ENGINE_PROCESS + others
        turns[f"the turn of {rank.name}"] = rank.needed + TRAINER_GPU + beside[rank.name]
    weights = {
        "policy: weights": max(rank.parts.get("policy: weights", 0.0) for rank in ranks),
        "engine: weights": at_once * engines.parts["engine: weights"],
        "processes": contexts + at_once * ENGINE_PROCESS,
    }
    sent = sum(weights.values())
    turns = {"the engines' turn": at_once * engines.needed + contexts, "weights on their way": sent, **turns}
    where = {
        p.name: f"its GPU, in {turn}," for p, turn in ((engines, "the engines' turn"), *((rank, "the trainer's turn") for rank in ranks))
    }
    found = _shortages([*ranks, engines], machine, beside=beside, where=where)
    free = _usable(min(gpu.free for gpu in machine.gpus))
    if sent > free:
        name = "train_policy: weights on their way to the engines"
        found.append(Shortage(name, "rl.rollout", sent, free, "a GPU of engine and rank", weights))
    return Plan("train_policy", [[*ranks, engines]], sorted(found, key=lambda s: -s.ratio), turns)


def _ray(stage: str, weights: float = 0.0) -> Process:
    """
    Args:
        weights: bytes on their way to rollout engines.
    """
    return Process(f"{stage}: Ray", "cluster", {"Ray: weights on their way to the engines": weights} if weights else {}, base=RAY_HOST)


def _shortages(
    moment: list[Process], machine: Machine, *, beside: Mapping[str, float] | None = None, where: Mapping[str, str] | None = None
) -> list[Shortage]:
    """
    Args:
        beside: a process's name -> bytes that others take of its GPU.
        where: a process's name -> its GPU, for messages.
    """
    beside, where = beside or {}, where or {}
    if not machine.gpus:
        parts = {f"{p.count} x {p.name}" if p.count > 1 else p.name: p.count * (p.needed + p.base + ALLOCATOR) for p in moment}
        largest = max(moment, key=lambda p: p.count * p.needed)
        host = _usable(machine.host)
        needed = sum(parts.values())
        told = parts if len(parts) > 1 else _parts(largest)
        return [Shortage(largest.name, largest.section, needed, host, "this machine", told)] if needed > host else []
    found = []
    smallest = min(machine.gpus, key=lambda gpu: gpu.free)
    for process in moment:
        if process.share is not None:
            own = TRAINER_GPU if process.count > 1 and process.ranks_key is not None else 0.0  # the rank's own process
            left = smallest.free - own - beside.get(process.name, 0.0)
            available, needed = _usable(min(process.share * smallest.total, left)), process.needed
        else:
            available, needed = _usable(smallest.free - beside.get(process.name, 0.0)), process.needed + TRAINER_GPU
        if needed > available:
            found.append(Shortage(process.name, process.section, needed, available, where.get(process.name, "its GPU"), _parts(process)))
        if process.count > len(machine.gpus) and (process.share is None or process.ranks_key is not None):
            key, there = process.ranks_key or f"{process.section}.ranks", len(machine.gpus)
            why = "because two ranks can't share a GPU"
            count = process.count * process.gpus
            raise ValueError(f"{key}: expected at most the {there} GPUs that are there, got {count}; lower it, {why}")
    per_host = machine.gpus_per_host or len(machine.gpus)
    parts = {p.name: min(p.count, per_host // p.gpus) * (p.host + GPU_HOST * _processes(p)) + p.once for p in moment}
    needed, available = sum(parts.values()), _usable(machine.host)
    if needed > available:
        largest = max(moment, key=lambda p: parts[p.name])
        found.append(Shortage(largest.name, largest.section, needed, available, "a host of the GPUs", parts))
    return found


def _processes(process: Process) -> int:
    """An engine on several GPUs has one for each beside its own."""
    return 1 + process.gpus if process.gpus > 1 else 1


def _usable(available: float) -> float:
    return max(0.0, available * (1 - RESERVED))


def _parts(process: Process) -> dict[str, float]:
    peak = {process.peak: process.phases[process.peak]} if process.phases else {}
    return {**process.parts, **peak}


# The nearest settings that fit


def remedy(stage: str, params: Params, models: Models, machine: Machine) -> dict[str, Any]:
    """Keys of params.yaml and values with which the stage fits; empty: none of the tried.

    Changes are added one after the other while they help, and those that turn out not to be needed are dropped.
    """
    worst = _ratio(stage, params, models, machine)
    kept: list[dict[str, Any]] = []
    for change in _changes(stage, params, machine):
        ratio = _ratio(stage, changed(params, _merged([*kept, change])), models, machine)
        if ratio < worst:
            kept, worst = [*kept, change], ratio
        if worst <= 1:
            break
    if worst > 1:
        return {}
    for change in list(kept):
        others = [other for other in kept if other is not change]
        if _ratio(stage, changed(params, _merged(others)), models, machine) <= 1:
            kept = others
    return _merged(kept)


def _merged(changes: list[dict[str, Any]]) -> dict[str, Any]:
    return {key: value for change in changes for key, value in change.items()}


def _ratio(stage: str, params: Params, models: Models, machine: Machine) -> float:
    try:
        shortages = check(stage, params, models, machine).shortages
    except (Unpredictable, ValueError):
        return float("inf")
    return shortages[0].ratio if shortages else 1.0


def _changes(stage: str, params: Params, machine: Machine) -> Iterator[dict[str, Any]]:
    """Changes in the order in which they are tried: the ones that change results least come first."""
    method = params.alignment.method
    is_rl = stage == "train_policy" and method == "rl"
    key = {"train_sft": "sft", "train_reward": "reward", "train_round": "dpo", "train_policy": method}.get(stage)
    yield from _engine_changes(stage, params, is_rl=is_rl, on_gpu=bool(machine.gpus))
    if is_rl and params.rl.rollout.backend == "vllm":
        yield from _divided_engines(params, max(machine.nodes, default=0))
    if key is None:
        return
    section = params.rl.trainer if is_rl else getattr(params, key)
    trainer = "rl.trainer" if is_rl else key
    yield {f"{trainer}.gradient_checkpointing": True}
    tokens = section.microbatch_tokens
    while tokens // 2 >= params.model.max_length:
        tokens //= 2
        yield {f"{trainer}.microbatch_tokens": tokens}
    spread, ranks = {}, section.ranks
    if ranks > 1:
        yield from ({f"{trainer}.zero_stage": stage} for stage in range(section.zero_stage + 1, 4))
    elif len(machine.gpus) > 1:
        ranks = len(machine.gpus)
        spread = {f"{trainer}.ranks": ranks, f"{trainer}.zero_stage": 3}
        yield spread
    shared = (size for size in range(section.sequence_parallel + 1, ranks + 1) if ranks % size == 0)
    yield from (spread | {f"{trainer}.sequence_parallel": size} for size in shared)
    if is_rl:
        yield {"rl.trainer.offload_frozen": True}
    if machine.gpus:
        yield {f"{trainer}.zero_stage": max(1, section.zero_stage), f"{trainer}.offload_optimizer": True}
        yield {f"{trainer}.zero_stage": 3, f"{trainer}.offload_optimizer": True}
        yield {f"{trainer}.zero_stage": 3, f"{trainer}.offload_parameters": True}
    if section_lora(params, key) is None:
        yield {f"{key}.lora": LORA}
        yield {f"{key}.lora": LORA | {"quantize": "nf4"}}


def section_lora(params: Params, key: str) -> Any:
    return getattr(params, key).lora


def _engine_changes(stage: str, params: Params, *, is_rl: bool, on_gpu: bool) -> Iterator[dict[str, Any]]:
    keys = {"train_policy": "rejection_sampling.sampling", "sample_round": "iterative.sampling", "evaluate": "evaluation"}
    key = "rl.rollout" if is_rl else keys.get(stage)
    if key is None or (key.startswith("rejection") and params.alignment.method != "rejection_sampling"):
        return
    if on_gpu:
        yield from ({f"{key}.gpu_memory_fraction": fraction} for fraction in (0.7, 0.9))
    if is_rl:
        yield {"rl.rollout.kv_cache_gib": 1}
    if on_gpu and is_rl:
        yield from ({f"{key}.gpu_memory_fraction": fraction} for fraction in (0.4, 0.25))


def _divided_engines(params: Params, gpus: int) -> Iterator[dict[str, Any]]:
    """Engines on several of so many GPUs of a node, and as many fewer of them."""
    rollout = params.rl.rollout
    for size in (2, 4, 8):
        if rollout.tensor_parallel_size < size <= gpus:
            engines = max(1, rollout.engines * rollout.tensor_parallel_size // size)
            yield {"rl.rollout.tensor_parallel_size": size, "rl.rollout.engines": engines}


def changed(params: Params, changes: Mapping[str, Any]) -> Params:
    """The params with other values at dotted keys. They aren't checked."""
    for key, value in changes.items():
        params = _replaced(params, key.split("."), value)
    return params


def _replaced(section: Section, path: list[str], value: Any) -> Any:
    name, *rest = path
    if rest:
        value = _replaced(getattr(section, name), rest, value)
    elif isinstance(value, dict):
        annotation = type(section).model_fields[name].annotation
        kind = next(a for a in (annotation, *getattr(annotation, "__args__", ())) if isinstance(a, type) and issubclass(a, Section))
        value = kind(**value)
    return section.model_copy(update={name: value})


# Messages


def message(shortage: Shortage, stage: str, params: Params, models: Models, machine: Machine) -> str:
    parts = sorted(shortage.parts.items(), key=lambda item: -item[1])[:SHOWN_PARTS]
    found = remedy(stage, params, models, machine)
    settings = " and ".join(f"{key}={_shown(value)}" for key, value in found.items())
    todo = f"set {settings}" if settings else "no setting that was tried fits: take a smaller model or more memory"
    told = ", ".join(f"{name} {gib(size)}" for name, size in parts)
    return (
        f"{shortage.name}: expected to need at most the {gib(shortage.available)} that {shortage.where} has left, got "
        f"{gib(shortage.needed)} ({told}); {todo} (docs/planning.md; flow.preflight=warn runs it anyway)"
    )


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "{" + ", ".join(f"{k}: {v}" for k, v in value.items()) + "}" if isinstance(value, dict) else str(value)


def gib(size: float) -> str:
    return f"{size / GIB:.3g} GiB"


# A stage


def preflight(stage: str, params: Params, machine: Machine | None = None, models: Models | None = None) -> str | None:
    """Check a stage before it loads anything, and log a shortage that the prediction's error may explain.

    Args:
        machine: None: this one. models: None: those in the workspace.
    Returns:
        Why the stage is refused; None: it may run.
    """
    if params.flow.preflight == "off" or not is_planned(stage):
        return None
    look = here if machine is None else lambda: machine
    try:
        models = models_of(stage, params) if models is None else models
        shortages = _patient(lambda there: check(stage, params, models, there).shortages, look)
        told = message(shortages[0], stage, params, models, look()) if shortages else None
    except Unpredictable as error:
        log.info("preflight: can't predict the memory of %s: %s", stage, error)
        return None
    if told is not None and params.flow.preflight == "refuse" and shortages[0].is_certain:
        return told
    if told is not None:
        log.warning("preflight: %s", told)
    return None


def is_planned(stage: str) -> bool:
    """Whether the stage loads models, so that its memory is predicted; `stage` may have the number of its round, as in train_round@1."""
    return stage == "train_policy" or stage in PLANS


def runs_elsewhere(stage: str, params: Params) -> bool:
    """Whether the stage's models are loaded by a job on a cluster that this machine may be no part of."""
    if params.cluster.address is None:
        return False
    method, name = params.alignment.method, stage.partition("@")[0]
    divided = params.cluster.inference_ranks > 1
    if name in INFERENCE_STAGES:
        return divided
    if name == "train_policy" and method in ("rejection_sampling", "conditional_sft") and divided:
        return True
    key = {"train_sft": "sft", "train_reward": "reward", "train_round": "dpo", "train_policy": method}.get(name)
    return key == "rl" or (key is not None and getattr(params, key).ranks > 1)


def _patient(shortages: Callable[[Machine], list[Shortage]], look: Callable[[], Machine]) -> list[Shortage]:
    """What is missing on the machine that `look` returns. Where the memory is there but taken, processes of an earlier run may be about to
    end, so it is looked at again for some seconds.
    """
    deadline = time.monotonic() + PATIENCE
    while True:
        machine = look()
        found = shortages(machine)
        if not found or not found[0].is_certain or shortages(machine.empty) or time.monotonic() > deadline:
            return found
        time.sleep(1.0)


def models_of(stage: str, params: Params) -> Models:
    """The models that a stage of this workspace loads.

    Raises:
        Unpredictable: a folder is missing or damaged; the stage itself says more about that.
    """
    try:
        start = base_model(params.model) if stage == "train_sft" else read_model(SFT_MODEL)
        trained = read_model(REWARD_MODEL) if (REWARD_MODEL / "config.json").is_file() else None
        if stage == "evaluate" and (POLICY_MODEL / "config.json").is_file():
            start = max(start, read_model(POLICY_MODEL), key=lambda model: model.parameters)
        return Models(start, trained, tuple(scorer_models(scorers_of(stage, params), trained)))
    except (ValueError, OSError) as error:
        raise Unpredictable(str(error)) from error


def plan_stages(params: Params, machine: Machine, start: Model | None, rewards: Sequence[Model] = ()) -> tuple[list[Plan], dict[str, str]]:
    """The plans of a chain before it has trained any model, and why some stages are not predicted, by stage.

    Args:
        start: the model that the chain starts from; all models that it trains have its size.
        rewards: of scorers with models from elsewhere, in their order; None are read from their folders.
    """
    plans, problems = [], {}
    for stage in STAGES:
        try:
            found = rewards or scorer_models(scorers_of(stage, params), start)
            plans.append(check(stage, params, Models(start, start, tuple(found)), machine))
        except (Unpredictable, ValueError) as error:
            problems[stage] = str(error)
    return plans, problems


def scorers_of(stage: str, params: Params) -> list[ScorerConfig]:
    if stage == "evaluate":
        return params.evaluation_scorers
    if stage == "train_policy" and params.method_scorers is not None:
        return params.method_scorers[1]
    return []


def scorer_models(scorers: list[ScorerConfig], trained: Model | None) -> Iterator[Model | None]:
    """A model for each member of each scorer of kind reward_model."""
    for scorer in (s for s in scorers if s.kind == "reward_model"):
        found = trained if scorer.is_own_reward_model else read_model(scorer.path)
        yield from [found] * scorer.members


def smallest(machines: list[Machine]) -> Machine:
    """A machine that stands for all of a cluster's: GPUs of all, each as small as the smallest, and the smallest host."""
    gpus = [gpu for machine in machines for gpu in machine.gpus]
    if gpus:
        gpus = [Gpu(min(g.total for g in gpus), min(g.free for g in gpus))] * len(gpus)
    per_host = max(len(m.gpus) for m in machines) or None
    return Machine(min(m.host for m in machines), tuple(gpus), min(m.host_total for m in machines), per_host)
