"""Finds the nearest settings with which a stage fits a machine."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from rlhf_core.config import ConfigError, Params, Section, parse_yaml
from rlhf_core.planning.machine import Machine
from rlhf_core.planning.shortages import check
from rlhf_core.planning.stages import Models, Unpredictable

LORA = {"rank": 16, "alpha": 32.0, "dropout": 0.0, "target_modules": "all-linear"}


def remedy(stage: str, params: Params, models: Models, machine: Machine) -> dict[str, Any]:
    """Return settings of params.yaml with which the stage fits; empty if none of those tried does.

    Changes that help are added one after the other; those that turn out not to be needed are dropped.
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


def advice(found: Mapping[str, Any]) -> str:
    """Return what to do, given the settings of `remedy`."""
    settings = " and ".join(f"{key}={shown(value)}" for key, value in found.items())
    return f"set {settings}" if settings else "no setting that was tried fits: take a smaller model or more memory"


def shown(value: Any) -> str:
    """Return a value as params.yaml and --set take it."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k}: {shown(v)}" for k, v in value.items()) + "}"
    return value if isinstance(value, str) and _is_plain(value) else json.dumps(value)


def _is_plain(text: str) -> bool:
    """Return whether YAML reads a text without quotes as itself."""
    try:
        return parse_yaml(text, "value") == text
    except ConfigError:
        return False


def _merged(changes: list[dict[str, Any]]) -> dict[str, Any]:
    return {key: value for change in changes for key, value in change.items()}


def _ratio(stage: str, params: Params, models: Models, machine: Machine) -> float:
    try:
        shortages = check(stage, params, models, machine).shortages
    except (Unpredictable, ValueError):
        return float("inf")
    return shortages[0].ratio if shortages else 1.0


def _changes(stage: str, params: Params, machine: Machine) -> Iterator[dict[str, Any]]:
    """Yield changes in the order in which they are tried: the ones that change results least come first."""
    method = params.alignment.method
    is_rl = stage == "train_policy" and method == "rl"
    key = {"train_sft": "sft", "train_reward": "reward", "train_round": "dpo", "train_policy": method}.get(stage)
    yield from _engine_changes(stage, params, is_rl=is_rl, on_gpu=bool(machine.gpus))
    if is_rl and params.rl.rollout.backend == "vllm":
        yield from _divided_engines(params, max(machine.nodes, default=0))
    half = [{"model.dtype": "bfloat16"}] if machine.gpus and params.model.dtype == "float32" else []
    if key in (None, "external") or (key == "reward" and not params.reward.is_trained):
        yield from half
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
    if is_rl or key in ("dpo", "kto"):
        yield {f"{trainer}.offload_frozen": True}
    if machine.gpus:
        yield {f"{trainer}.zero_stage": max(1, section.zero_stage), f"{trainer}.offload_optimizer": True}
        yield {f"{trainer}.zero_stage": 3, f"{trainer}.offload_optimizer": True}
        yield {f"{trainer}.zero_stage": 3, f"{trainer}.offload_parameters": True}
    yield from half
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
    if is_rl and params.rl.rollout.take_turns is False:
        yield {"rl.rollout.take_turns": "auto"}
    if is_rl:
        yield {"rl.rollout.kv_cache_gib": 1}
    if on_gpu and is_rl:
        yield from ({f"{key}.gpu_memory_fraction": fraction} for fraction in (0.4, 0.25))


def _divided_engines(params: Params, gpus: int) -> Iterator[dict[str, Any]]:
    """Yield settings with larger engines, up to this number of GPUs, and accordingly fewer of them."""
    rollout = params.rl.rollout
    for size in (2, 4, 8):
        if rollout.tensor_parallel_size < size <= gpus:
            engines = max(1, rollout.engines * rollout.tensor_parallel_size // size)
            yield {"rl.rollout.tensor_parallel_size": size, "rl.rollout.engines": engines}


def changed(params: Params, changes: Mapping[str, Any]) -> Params:
    """Return the params with other values at dotted keys, which aren't checked."""
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
