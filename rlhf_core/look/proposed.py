"""Formats a proposal as text and as JSON values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rlhf_core.config import shown
from rlhf_core.planning.preflight import gib

if TYPE_CHECKING:
    from rlhf_core.look.propose import Proposal, StageCost

SURE = "times within a factor of about 2 on an idle machine, memory within 10% (docs/planning.md)"


def notes(found: Proposal) -> Iterator[str]:
    """What was chosen and left out, and what the user must know first."""
    yield f"Proposal for {shown(found.model.path)} ({_model(found)}) on {found.machine.text}:"
    yield from (f"  {line}" for line in found.notes)
    yield from (f"  WARNING: {line}" for line in found.warnings)


def _model(found: Proposal) -> str:
    model = found.model
    size = "of an architecture that isn't predicted" if model.parameters is None else f"{model.parameters / 1e6:,.4g}M parameters"
    positions = "" if model.positions is None else f", {model.positions:,} positions"
    return f"{'chat' if model.is_chat else 'base'} model, {size}{positions}"


def costs(found: Proposal) -> Iterator[str]:
    """The table of stages with their predicted cost, as YAML comments."""
    if not found.costs:
        return
    yield f"# expected on {found.machine.text} ({SURE}; about so many steps, since rows are split by hash):"
    yield f"#   {'stage':<13} {'steps':>7} {'time':>10} {'memory':>10}"
    for cost in found.costs:
        steps = "" if cost.time is None or cost.time.steps is None else f"~{cost.time.steps:,}"
        seconds = "unknown" if cost.time is None else duration(cost.time.seconds)
        memory = "" if cost.memory is None else gib(cost.memory)
        yield f"#   {cost.stage:<13} {steps:>7} {seconds:>10} {memory:>10}{_parts(cost)}"
    if found.basis:
        yield f"#   {'together':<13} {'':>7} {duration(found.seconds):>10} {'':>10}  {gib(found.machine.available)} available"
        yield f"# computed from {found.basis}"


def _parts(cost: StageCost) -> str:
    """Return what check_model does, or the predicted seconds of each part of an RL step."""
    if cost.stage == "check_model":
        return "  tries training and sampling on a small copy of the model"
    if cost.time is None or not cost.time.parts:
        return ""
    return "  a step: " + ", ".join(f"{part} {duration(seconds)}" for part, seconds in cost.time.parts.items())


def duration(seconds: float) -> str:
    """Return a duration in words. Two digits are as much as a prediction is worth."""
    for unit, size in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.2g} {unit}"
    return f"{seconds:.2g} s"


def as_json(found: Proposal) -> dict[str, Any]:
    """Return the proposal as JSON values, in seconds and bytes."""
    return {
        "method": found.choice.name,
        "settings": dict(found.settings),
        "notes": list(found.notes),
        "warnings": list(found.warnings),
        "left_out": dict(found.lengths.left_out),
        "stages": {
            cost.stage: {
                "steps": None if cost.time is None else cost.time.steps,
                "seconds": None if cost.time is None else cost.time.seconds,
                "seconds_of_a_step": None if cost.time is None or cost.time.parts is None else dict(cost.time.parts),
                "memory": cost.memory,
            }
            for cost in found.costs
        },
        "available": found.machine.available,
        "basis": found.basis,
    }
