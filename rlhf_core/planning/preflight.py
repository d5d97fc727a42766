"""Checks before a stage loads anything that its processes fit into the memory that is there, and names the nearest settings that do.

A stage is refused only if it lacks more than a prediction's error. Only decoders with gated MLPs are predicted; a model of another
architecture is never refused.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from rlhf_core.config import Params, ScorerConfig
from rlhf_core.environment import INFERENCE_STAGES
from rlhf_core.paths import POLICY_MODEL, REWARD_MODEL, SFT_MODEL
from rlhf_core.planning.hardware import GIB
from rlhf_core.planning.machine import Gpu, Machine, here
from rlhf_core.planning.models import Model, base_model, read_model
from rlhf_core.planning.remedy import advice, remedy
from rlhf_core.planning.shortages import Plan, Shortage, check
from rlhf_core.planning.stages import PLANS, Models, Unpredictable

SHOWN_PARTS = 6
STAGES = ("train_sft", "train_reward", "gate_reward", "train_policy", "evaluate")
PATIENCE = 20.0  # seconds

log = logging.getLogger("rlhf")


def preflight(stage: str, params: Params, machine: Machine | None = None, models: Models | None = None) -> str | None:
    """Check a stage before it loads anything, and log a shortage that the prediction's error may explain.

    Args:
        machine: None: this machine. models: None: the models of the workspace.
    Returns:
        Why the stage is refused, or None if it may run.
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
    """Return whether a stage loads models, so that its memory is predicted. A round's stage may have its number, as in train_round@1."""
    return stage == "train_policy" or stage in PLANS


def runs_elsewhere(stage: str, params: Params) -> bool:
    """Return whether a job loads the stage's models on a cluster to which this machine may not belong."""
    if params.cluster.address is None:
        return False
    method, name = params.alignment.method, stage.partition("@")[0]
    divided = params.cluster.inference_ranks > 1
    if name in INFERENCE_STAGES:
        return divided
    if name == "train_policy" and method in ("rejection_sampling", "conditional_sft") and divided:
        return True
    key = {"train_sft": "sft", "train_reward": "reward", "train_round": "dpo", "train_policy": method}.get(name)
    if key == "reward" and not params.reward.is_trained:
        return divided
    if key == "external" or (key == "sft" and not params.sft.enabled):
        return False
    return key == "rl" or (key is not None and getattr(params, key).ranks > 1)


def _patient(shortages: Callable[[Machine], list[Shortage]], look: Callable[[], Machine]) -> list[Shortage]:
    """Return what is missing on the machine that `look` returns.

    If the memory exists but is taken, processes of an earlier run may be about to end, so the machine is looked at again for up to PATIENCE
    seconds.
    """
    deadline = time.monotonic() + PATIENCE
    while True:
        machine = look()
        found = shortages(machine)
        if not found or not found[0].is_certain or shortages(machine.empty) or time.monotonic() > deadline:
            return found
        time.sleep(1.0)


def models_of(stage: str, params: Params) -> Models:
    """Return the models that a stage of this workspace loads.

    Raises:
        Unpredictable: a folder is missing or damaged, which the stage itself reports.
    """
    try:
        start = base_model(params.model) if stage == "train_sft" else read_model(SFT_MODEL)
        trained = read_model(REWARD_MODEL) if stage != "train_reward" and (REWARD_MODEL / "config.json").is_file() else given_reward(params)
        if stage == "evaluate" and (POLICY_MODEL / "config.json").is_file():
            start = max(start, read_model(POLICY_MODEL), key=lambda model: model.parameters)
        return Models(start, trained, tuple(scorer_models(scorers_of(stage, params), trained)), teacher_models(stage, params))
    except (ValueError, OSError) as error:
        raise Unpredictable(str(error)) from error


def given_reward(params: Params) -> Model | None:
    """Return the ready-made model at `reward.path`, or None if this machine doesn't have it.

    Raises:
        ValueError: a file of the model is missing or truncated.
    """
    if params.reward.path is None or params.reward.is_registered:
        return None
    return base_model(params.model.model_copy(update={"path": params.reward.path, "revision": None}))


def plan_stages(
    params: Params, machine: Machine, start: Model | None, rewards: Sequence[Model] = ()
) -> tuple[list[Plan], dict[str, ValueError | Unpredictable]]:
    """Return the plans of a chain that has trained no model yet, and why stages have no plan.

    A plan that lacks memory has settings that fit. In the second result, a ValueError means that the stage is refused, and Unpredictable
    that it isn't predicted.

    Args:
        start: the model that the chain starts from; all models that it trains have its size.
        rewards: the scorers' reward models in the scorers' order; empty: they are read from their folders.
    """
    plans: list[Plan] = []
    problems: dict[str, ValueError | Unpredictable] = {}
    for stage in STAGES:
        try:
            trained = start if params.reward.path is None else given_reward(params)
            scorers = tuple(rewards) or _known_scorers(scorers_of(stage, params), trained)
            models = Models(start, trained, scorers, _known_teachers(stage, params))
            plan = check(stage, params, models, machine)
            plans.append(replace(plan, remedy=remedy(stage, params, models, machine)) if plan.shortages else plan)
        except (Unpredictable, ValueError) as error:
            problems[stage] = error
    return plans, problems


def _known_scorers(scorers: list[ScorerConfig], trained: Model | None) -> tuple[Model | None, ...]:
    try:
        return tuple(scorer_models(scorers, trained))
    except (ValueError, OSError) as error:
        raise Unpredictable(str(error)) from error


def _known_teachers(stage: str, params: Params) -> tuple[Model | None, ...]:
    try:
        return teacher_models(stage, params)
    except (ValueError, OSError) as error:
        raise Unpredictable(str(error)) from error


def teacher_models(stage: str, params: Params) -> tuple[Model | None, ...]:
    """Return the teachers of a stage; None for one that isn't on this machine yet."""
    paths = params.teachers.values() if stage == "train_policy" else ()
    return tuple(base_model(params.model.model_copy(update={"path": path, "revision": None})) for path in paths)


def scorers_of(stage: str, params: Params) -> list[ScorerConfig]:
    if stage == "evaluate":
        return params.evaluation_scorers[1]
    if stage == "train_policy" and params.method_scorers is not None:
        return params.method_scorers[1]
    return []


def scorer_models(scorers: list[ScorerConfig], trained: Model | None) -> Iterator[Model | None]:
    """Yield a model for each member of each scorer of kind reward_model."""
    for scorer in (s for s in scorers if s.kind == "reward_model"):
        found = trained if scorer.is_own_reward_model else read_model(scorer.path)
        yield from [found] * scorer.members


def smallest(machines: list[Machine]) -> Machine:
    """Return a machine that stands for a cluster's: the GPUs of all, each as small as the smallest, and the smallest host."""
    gpus = [gpu for machine in machines for gpu in machine.gpus]
    if gpus:
        gpus = [Gpu(min(g.total for g in gpus), min(g.free for g in gpus))] * len(gpus)
    per_host = max(len(m.gpus) for m in machines) or None
    return Machine(min(m.host for m in machines), tuple(gpus), min(m.host_total for m in machines), per_host)


def message(shortage: Shortage, stage: str, params: Params, models: Models, machine: Machine) -> str:
    parts = sorted(shortage.parts.items(), key=lambda item: -item[1])[:SHOWN_PARTS]
    todo = advice(remedy(stage, params, models, machine))
    told = ", ".join(f"{name} {gib(size)}" for name, size in parts)
    return (
        f"{shortage.name}: expected to need at most the {gib(shortage.available)} that {shortage.where} has left, got "
        f"{gib(shortage.needed)} ({told}); {todo} (docs/planning.md; flow.preflight=warn runs it anyway)"
    )


def gib(size: float) -> str:
    return f"{size / GIB:.3g} GiB"
