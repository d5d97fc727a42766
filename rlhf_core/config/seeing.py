"""What a model that sees can't do yet: its refusals, before anything expensive starts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlhf_core.config.params import Params

METHODS = ("rl", "dpo", "kto")
_BLIND = ("http", "llm_judge")  # scorers that get answers without their pictures


def vision_conflicts(params: Params) -> Iterator[str]:
    """Conflicts of other keys with model.vision."""
    vision, method = params.model.vision, params.alignment.method
    if vision is None:
        named = [s.name for s in params.data.sources if s.images is not None or "images" in s.columns or s.kind == "shapes"]
        if named:
            yield f"data.sources: expected no images of {named} without model.vision, got some; set model.vision with a model that sees"
        return
    if method not in METHODS:
        yield f"alignment.method: expected one of {', '.join(METHODS)} with model.vision, got {method}; change it"
    if params.reward.step_separator is not None:
        yield "reward.step_separator: expected null with model.vision, got a text; set it to null, because process reward models don't see"
    if params.evaluation.harness is not None:
        yield "evaluation.harness: expected null with model.vision, got some; set it to null, because its tasks have no pictures"
    for key, scorers in params.scorers_in_use.items():
        if blind := [scorer.name for scorer in scorers if scorer.kind in _BLIND]:
            yield f"{key}: expected none of kind {' or '.join(_BLIND)} with model.vision, got {', '.join(blind)}; take out what doesn't see"
    if (together := params.cluster.inference_ranks_per_model) > 1:
        yield f"cluster.inference_ranks_per_model: expected 1 with model.vision, got {together}; set it to 1: none that sees is divided"
    sections = {"sft": params.sft} | ({"reward": params.reward} if params.reward.is_trained else {})
    if method == "rl":
        yield from _rl_conflicts(params)
        sections["rl.trainer"] = params.rl.trainer
    elif method in METHODS:
        sections[method] = getattr(params, method)
    for name, section in sections.items():
        if section.sequence_parallel > 1:
            yield (
                f"{name}.sequence_parallel: expected 1 with model.vision, got {section.sequence_parallel}; set it to 1, because sequences "
                "with pictures aren't divided"
            )
        if section.zero_stage > (most := 1 if vision == "trained" else 2):
            yield (
                f"{name}.zero_stage: expected at most {most} with model.vision {vision}, got {section.zero_stage}; lower it, because ranks "
                "with and without a picture have a tower's gradients, or gather its weights, in different order"
            )
        if section.gradient_checkpointing:
            yield f"{name}.gradient_checkpointing: expected false with model.vision, got true; set it to false"
    for source in params.data.sources:
        if source.kind not in ("file", "huggingface", "shapes"):
            yield f"data.sources.{source.name}.kind: expected file, huggingface or shapes with model.vision, got {source.kind}; take it out"
    yield "iterative: expected no rounds with model.vision, got some; run the chain, because rounds give their samples no pictures"


def _rl_conflicts(params: Params) -> Iterator[str]:
    rl = params.rl
    for key in ("environment", "distillation"):
        if getattr(rl, key) is not None:
            yield f"rl.{key}: expected null with model.vision, got some; set it to null, because agents and teachers get no pictures"
    if rl.rollout.tensor_parallel_size > 1:
        yield (
            f"rl.rollout.tensor_parallel_size: expected 1 with model.vision, got {rl.rollout.tensor_parallel_size}; set it to 1, and "
            "rl.rollout.engines higher"
        )
