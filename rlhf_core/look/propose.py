"""Proposes a whole recipe for data, model and machine: method, lengths, schedule, memory settings, and the cost of each stage."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rlhf_core.config import Params, SourceConfig, overridden, read_yaml_text, shown
from rlhf_core.config.base import keys_of, with_defaults
from rlhf_core.config.seeing import METHODS as SEEING_METHODS
from rlhf_core.config.usual import SMALL_MODEL, SMALL_RATES, nulls
from rlhf_core.look import recipe, repeats
from rlhf_core.look.facts import DataFacts, MachineFacts, ModelFacts
from rlhf_core.look.fit import Fit, device_settings, propose_fit, section_at, section_of
from rlhf_core.look.lengths import Lengths, propose_lengths
from rlhf_core.look.look import Inspection
from rlhf_core.look.methods import Choice, choose
from rlhf_core.look.schedule import CHECKPOINTS, EVALUATIONS, every, nice, propose_schedule
from rlhf_core.planning.chain import Rows, StageTime, stage_times
from rlhf_core.planning.machine import Machine
from rlhf_core.planning.shortages import Plan, check, without_models
from rlhf_core.planning.speed import Speed, of_cpu, of_gpus
from rlhf_core.planning.stages import TRAINER_GPU, Models, Unpredictable

HOURS = 4  # of a stage, beyond which there are fewer epochs, though at least one, or of RL fewer steps
FEW_PAIRS = 500
FEWEST_STEPS = 20  # of RL, however slow
# Of full training on preferences. With 62 steps at 1e-6, which suits thousands of steps, SmolLM2-135M learns nothing (docs/your_model.md).
FEW_STEPS, FEW_STEPS_RATE, FEW_STEPS_MODEL = 200, 5e-6, 500_000_000
STAGES = ("check_model", "train_sft", "train_policy", "evaluate")


@dataclass(frozen=True)
class StageCost:
    """Predicted cost of a stage.

    time: seconds; None if not predicted. memory: bytes of the largest process on a GPU, or of all processes together on a CPU; None if not
    predicted.
    """

    stage: str
    time: StageTime | None
    memory: float | None


@dataclass(frozen=True)
class Proposal:
    """A recipe with its reasons.

    settings: keys and values that differ from params.yaml. why: comment for each key. notes: what was chosen and left out.
    warnings: what the user has to decide or know first. params: params.yaml with the recipe laid over it.
    costs: in the order of the chain. basis: where the predicted seconds come from, for people; empty if there are none.
    """

    choice: Choice
    lengths: Lengths
    source: SourceConfig
    settings: Mapping[str, Any]
    why: Mapping[str, str]
    notes: tuple[str, ...]
    warnings: tuple[str, ...]
    params: Params
    costs: tuple[StageCost, ...]
    basis: str
    model: ModelFacts
    machine: MachineFacts

    @property
    def seconds(self) -> float:
        """Total seconds of all stages whose time is predicted."""
        return sum(cost.time.seconds for cost in self.costs if cost.time is not None)


@dataclass(frozen=True)
class UserInput:
    """What the user gave.

    text: params.yaml with a recipe laid over it. model: keys of `model` that options set.
    """

    text: str
    model: Mapping[str, Any]


def propose(found: Inspection, data: DataFacts, model: ModelFacts, machine: MachineFacts, given: UserInput) -> Proposal:
    """Return a recipe for the data, the model and the machine.

    Raises:
        ConfigError: params.yaml with the proposal laid over it is refused: a fault of the proposal or of the given recipe.
    """
    choice = choose(data, model)
    if "vision" in given.model and choice.settings.get("alignment.method") not in SEEING_METHODS:
        choice = Choice("", f"{choice.why}; a model that sees learns by {', '.join(SEEING_METHODS)}", uses=choice.uses)
    if not choice.name:
        return _without_method(found, choice, model, machine, given)
    lengths = propose_lengths(data, choice, model.positions, given=given.model.get("max_length"), on_gpu=bool(machine.memory.gpus))
    source = found.tried.source.model_copy(update={"uses": list(choice.uses)})
    settings = _model_settings(given) | {"model.max_length": lengths.max_length}
    settings |= _of_choice(choice) | {"data.sources": [recipe.plain(source)], "evaluation.max_new_tokens": lengths.new_tokens}
    settings |= {"rl.rollout.max_new_tokens": lengths.new_tokens} if choice.name == "grpo" else {}
    params = _applied(given.text, settings)
    settings |= device_settings(model, machine, rl=choice.name == "grpo") | _small_models_rates(choice, model, given)
    schedule = propose_schedule(data, choice, machine, params)
    settings |= schedule.settings
    params = _applied(given.text, settings)
    fits = {stage: propose_fit(stage, params, model, machine) for stage in _trained(choice)}
    settings |= {key: value for fit in fits.values() for key, value in fit.settings.items()}
    few_steps = _few_steps_rate(choice, model, given, _applied(given.text, settings), schedule.rows)
    settings |= few_steps
    params = _applied(given.text, settings)
    speed = _speed(model, machine, params)
    times = {} if speed is None or model.sizes is None else stage_times(params, model.sizes.shape, schedule.rows, speed)
    shorter = _shortened(params, times)
    if shorter:
        settings |= shorter
        params = _applied(given.text, settings)
        times = stage_times(params, model.sizes.shape, schedule.rows, speed)
    limits = recipe.needed_limits(found, source.uses, params)
    source = source.model_copy(update={"drop": limits.drop})
    settings |= limits.settings | {"data.sources": [recipe.plain(source)]}
    if choice.name == "dpo" and data.pairs < params.validation.min_pairs:
        settings["validation.min_pairs"] = data.pairs // 2
    params = _applied(given.text, settings)
    costs = tuple(_costs(params, model, machine, times))
    why = {**limits.why, **_why(choice, lengths, shorter), **dict.fromkeys(few_steps, "the usual 1e-6 teaches nothing in so few steps")}
    return Proposal(
        choice,
        lengths,
        source,
        _differing(settings, given),
        why,
        tuple(_notes(choice, lengths, fits, data, model, params)),
        (*_warnings(choice, lengths, fits, data, model, drops="too_long" in source.drop), *_stops(found, params)),
        params,
        costs,
        "" if speed is None else speed.basis,
        model,
        machine,
    )


def _without_method(found: Inspection, choice: Choice, model: ModelFacts, machine: MachineFacts, given: UserInput) -> Proposal:
    """Return a proposal of the source and the model alone, for data that is enough for no method."""
    params = overridden(given.text, _model_settings(given), subject="params.yaml", complete=False)[1]
    limits = recipe.needed_limits(found, found.tried.source.uses, params)
    source = found.tried.source.model_copy(update={"drop": limits.drop})
    lengths = Lengths(params.model.max_length, 0, {}, forced=False)
    settings = _differing(_model_settings(given) | limits.settings, given)
    notes = (f"no method: {choice.why}",)
    return Proposal(choice, lengths, source, settings, limits.why, notes, (), params, (), "", model, machine)


def _model_settings(given: UserInput) -> dict[str, Any]:
    return {f"model.{key}": value for key, value in given.model.items()}


def _of_choice(choice: Choice) -> dict[str, Any]:
    return dict(choice.settings) | {"sft.enabled": choice.sft}


def _small_models_rates(choice: Choice, model: ModelFacts, given: UserInput) -> dict[str, float]:
    """Learning rates for a model below the sizes that the usual rates are for, where the user gave none."""
    if model.parameters is None or model.parameters >= SMALL_MODEL:
        return {}
    unset = nulls(read_yaml_text(given.text, "params.yaml"))
    rates = {f"{section}.learning_rate": SMALL_RATES[section] for section in _sections(choice)}
    return {key: rate for key, rate in rates.items() if key in unset}


def _few_steps_rate(choice: Choice, model: ModelFacts, given: UserInput, params: Params, rows: Mapping[str, Rows]) -> dict[str, float]:
    """Return a higher learning rate for full training of a small pretrained model on few pairs, where the user gave none."""
    if choice.name not in ("dpo", "kto") or model.parameters is None or not SMALL_MODEL <= model.parameters < FEW_STEPS_MODEL:
        return {}
    settings, key = getattr(params, choice.name), f"{choice.name}.learning_rate"
    few = rows["preference"].train * settings.epochs <= FEW_STEPS * settings.batch_size
    unset = key in nulls(read_yaml_text(given.text, "params.yaml"))
    return {key: FEW_STEPS_RATE} if few and unset and settings.lora is None else {}


def _sections(choice: Choice) -> list[str]:
    """Sections of params.yaml with which the method trains."""
    return ["sft"] * choice.sft + ["rl" if choice.name == "grpo" else choice.name] * (choice.name in ("dpo", "kto", "grpo"))


def _applied(text: str, settings: Mapping[str, Any]) -> Params:
    return overridden(text, dict(settings), subject="params.yaml", source="the proposal")[1]


def _trained(choice: Choice) -> list[str]:
    return ["train_sft"] * choice.sft + ["train_policy"] * (choice.name in ("dpo", "kto", "grpo"))


def _speed(model: ModelFacts, machine: MachineFacts, params: Params) -> Speed | None:
    """Return the machine's speed; None if the planner doesn't predict the model, or the kind of this machine's GPUs is unknown."""
    if model.sizes is None:
        return None
    if machine.gpu is not None:
        return of_gpus(machine.gpu, machine.ranks)
    shape = model.sizes.shape
    return None if machine.memory.gpus else of_cpu(shape.hidden, shape.intermediate, params.model.dtype, machine.cores or 1)


def _shortened(params: Params, times: Mapping[str, StageTime]) -> dict[str, Any]:
    """Settings for stages that would take more than HOURS: fewer epochs, down to one, and in RL a number of steps."""
    found: dict[str, Any] = {}
    for stage in ("train_sft", "train_policy"):
        time, (method, _) = times.get(stage), section_of(stage, params)
        if time is None or time.steps is None or time.seconds <= 3600 * HOURS:
            continue
        share = 3600 * HOURS / time.seconds
        steps = min(time.steps, max(FEWEST_STEPS, nice(share * time.steps)))
        if time.parts is not None:
            found |= {"rl.steps": steps, "rl.evaluation.every": every(steps, EVALUATIONS), "rl.checkpoint_every": every(steps, CHECKPOINTS)}
        elif (epochs := section_at(method, params).epochs) > 1:
            fewer = max(1.0, math.floor(share * epochs))
            steps = time.steps * fewer / epochs
            found |= {f"{method}.epochs": float(fewer), f"{method}.eval_every": every(steps, EVALUATIONS)}
            found |= {f"{method}.checkpoint_every": every(steps, CHECKPOINTS)}
    return found


def _costs(params: Params, model: ModelFacts, machine: MachineFacts, times: Mapping[str, StageTime]) -> Iterator[StageCost]:
    for stage in STAGES:
        memory = None if stage == "check_model" or model.sizes is None else _memory(stage, params, model, machine.memory)
        if stage in times or memory:
            yield StageCost(stage, times.get(stage), memory)


def _memory(stage: str, params: Params, model: ModelFacts, machine: Machine) -> float | None:
    if stage == "train_sft" and not params.sft.enabled:
        return None
    try:
        plan = check(stage, params, Models(model.sizes, model.sizes, ()), machine)
    except (Unpredictable, ValueError):
        return None
    return _peak(plan, on_gpu=bool(machine.gpus)) if plan.moments else None


def _peak(plan: Plan, *, on_gpu: bool) -> float:
    """Bytes on the fullest GPU, or of all simultaneous processes on a CPU."""
    if plan.turns:
        return max(plan.turns.values())
    if on_gpu:
        return max(p.needed + TRAINER_GPU * (p.share is None) for moment in plan.moments for p in moment)
    return max(sum(p.count * (p.needed + without_models(p)) for p in moment) for moment in plan.moments)


def _differing(settings: Mapping[str, Any], given: UserInput) -> dict[str, Any]:
    """Return the settings that differ from params.yaml, in its order, without the source, which is written separately."""
    plain = read_yaml_text(given.text, "params.yaml")
    order = list(keys_of(with_defaults(Params, plain)))
    kept = {key: value for key, value in settings.items() if key != "data.sources" and _at(plain, key) != value}
    return dict(sorted(kept.items(), key=lambda item: order.index(item[0]) if item[0] in order else len(order)))


def _at(tree: Any, key: str) -> Any:
    """Return the value at a dotted key of params.yaml as written, or its default; `...`: there is none."""
    node = with_defaults(Params, tree)
    for name in key.split("."):
        node = node.get(name, ...) if isinstance(node, dict) else ...
    return node


def _why(choice: Choice, lengths: Lengths, shorter: Mapping[str, Any]) -> dict[str, str]:
    """Comments on keys of the recipe."""
    share, use = lengths.worst
    left = _too_long(choice, share, use) if share else "no row is longer"
    found = {"model.max_length": left, "rl.reward.no_eos_penalty": "the rewards are 0 and 1"}
    found["sft.enabled"] = choice.sft_why.partition(",")[0]
    for key in shorter:
        if key.endswith((".epochs", ".steps")):
            found[key] = f"more would take over {HOURS} hours on this machine"
    return found


def _too_long(choice: Choice, share: float, use: str) -> str:
    what = "leave a response no room" if choice.name == "grpo" and use == "prompt" else "are longer"
    return f"{share:.1%} of the {use} rows {what}"


def _trained_with(section: str, params: Params) -> str:
    """Return the settings that matter most, whether the recipe writes them or params.yaml has them."""
    settings = getattr(params, section)
    found = [f"learning rate {settings.learning_rate:g}{'' if settings.lora is None else ' of adapters'}"]
    if section == "rl":
        found += [f"{settings.samples_per_step} samples a step", f"KL coefficient {settings.kl.coef:g}"]
    else:
        found += [f"batches of {settings.batch_size}", f"{settings.epochs:g} epochs"]
    found += [f"beta {settings.beta:g}"] if section in ("dpo", "kto") else []
    return ", ".join(found)


def _notes(choice: Choice, lengths: Lengths, fits: Mapping[str, Fit], data: DataFacts, model: ModelFacts, params: Params) -> Iterator[str]:
    """What was chosen and why, then what was left out."""
    yield f"method: {choice.why}"
    yield f"{'SFT first' if choice.sft else 'no SFT'}: {choice.sft_why}"
    if model.system_prompt:
        yield f"prompts without a system prompt get the template's own: {shown(model.system_prompt)}"
    share, use = lengths.worst
    positions = "" if model.positions is None else f" of the model's {model.positions:,} positions"
    left = f"{_too_long(choice, share, use)} and left out" if share else "no row is longer"
    yield f"model.max_length {lengths.max_length}{positions}: {left}"
    yield from (f"{section}: {_trained_with(section, params)}" for section in _sections(choice))
    yield from (f"{stage}: {fit.why}" for stage, fit in fits.items() if not fit.lacks)
    yield from (f"left out: {line}" for line in choice.left_out)
    if data.at_least:
        yield f"counting the records took too long: there are more than the {data.rows(choice.uses[0]):,} rows that the schedule is for"


def _warnings(
    choice: Choice, lengths: Lengths, fits: Mapping[str, Fit], data: DataFacts, model: ModelFacts, *, drops: bool
) -> Iterator[str]:
    """What will stop the chain, or what the user must do first.

    Args:
        drops: the recipe leaves out rows that are too long.
    """
    share, use = lengths.worst
    if lengths.forced:
        limit = "the model's positions" if lengths.max_length == model.positions else "your --max-length"
        fate = "drop leaves them out" if drops else "validate_data stops, because so much can't be left out in silence"
        yield (
            f"{share:.0%} of the {use} rows are longer than {lengths.max_length} tokens, {limit}: {fate}; take a model with more "
            "positions, or shorten the data"
        )
    yield from (
        f"{stage}: no setting that was tried fits: {fit.lacks}; take a smaller model or more memory"
        for stage, fit in fits.items()
        if fit.lacks
    )
    if not model.has_weights:
        yield f"{model.path} has no weights: the recipe is planned by its config.json alone; put the weights there before you run it"
    if choice.name == "dpo" and data.pairs < FEW_PAIRS:
        yield f"{data.pairs} pairs are few: a thousand or more is usual, and a held-out tenth of {data.pairs} judges little"


def _stops(found: Inspection, params: Params) -> Iterator[str]:
    """Reasons for which validate_data will stop and that no key of the recipe should hide."""
    for kind, limit in repeats.LIMITS.items():
        allowed = getattr(params.validation, limit)
        for split, (count, prompts) in repeats.shares(found.repeats, kind).items():
            if count > allowed * prompts:
                yield f"{count} of {prompts} prompts of the {split} split are in training too (see above): validate_data stops"
