"""Usual learning rates for pretrained models of 0.1 to 8B parameters, which `learning_rate: null` stands for.

docs/training.md has the same table with its sources.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from rlhf_core.algorithms.online import ALGORITHMS

LION_DIVISOR = 5.0  # the paper's rates for Lion are 3 to 10 times lower than AdamW's
WRECKING_FACTOR = 10.0  # a rate so many times above the usual range is pointed out
SMALL_MODEL = 50_000_000  # parameters; below, rates that are high here are usual
SMALL_RATES = {"sft": 1e-3, "dpo": 5e-4, "kto": 5e-4, "rl": 5e-4}  # of smaller models, such as recipes/stories.yaml's


@dataclass(frozen=True)
class Usual:
    """A rate for AdamW, and the range of peers' defaults and published recipes."""

    rate: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{_short(self.low)} to {_short(self.high)}"


@dataclass(frozen=True)
class Rates:
    full: Usual
    lora: Usual | None  # None: the model has no adapters


_SFT = Rates(full=Usual(2e-5, 5e-6, 2e-5), lora=Usual(2e-4, 5e-5, 2e-4))
_PREFERENCE = Rates(full=Usual(1e-6, 5e-7, 1e-6), lora=Usual(1e-5, 5e-6, 1e-5))
CRITIC_RATES = tuple(f"rl.{name}.critic_learning_rate" for name, spec in ALGORITHMS.items() if spec.critic)
# Dotted key of params.yaml -> its usual values. The section's `lora` chooses, but the critic is always trained in full.
LEARNING_RATES: dict[str, Rates] = {
    "sft.learning_rate": _SFT,
    "reward.learning_rate": Rates(full=Usual(1e-5, 3e-6, 1e-5), lora=Usual(1e-4, 3e-5, 1e-4)),
    "dpo.learning_rate": _PREFERENCE,
    "kto.learning_rate": _PREFERENCE,
    "rejection_sampling.learning_rate": _SFT,
    "conditional_sft.learning_rate": _SFT,
    "rl.learning_rate": Rates(full=Usual(1e-6, 3e-7, 1e-6), lora=Usual(1e-5, 3e-6, 5e-5)),
    **dict.fromkeys(CRITIC_RATES, Rates(full=Usual(1e-5, 5e-6, 1e-5), lora=None)),
}


def usual(key: str, *, lora: bool, optimizer: str = "adamw") -> Usual:
    """Return the usual learning rate of a key.

    Args:
        key: of LEARNING_RATES. lora: whether the section trains adapters. optimizer: as in params.yaml.
    """
    rates = LEARNING_RATES[key]
    found = rates.lora if lora and rates.lora is not None else rates.full
    if optimizer != "lion":
        return found
    return replace(found, rate=found.rate / LION_DIVISOR, low=found.low / LION_DIVISOR, high=found.high / LION_DIVISOR)


def with_usual_rates(tree: Any) -> Any:
    """Params as written, with each `learning_rate: null` replaced by its usual value. `iterative` takes the value of `dpo`."""
    if not isinstance(tree, dict):
        return tree
    for key in nulls(tree):
        section = tree[key.partition(".")[0]]
        found = usual(key, lora=section.get("lora") is not None, optimizer=section.get("optimizer", "adamw"))
        tree = _replaced(tree, key.split("."), found.rate)
    iterative, dpo = tree.get("iterative"), tree.get("dpo")
    if isinstance(iterative, dict) and iterative.get("learning_rate", ...) is None and isinstance(dpo, dict) and "learning_rate" in dpo:
        tree = _replaced(tree, ["iterative", "learning_rate"], dpo["learning_rate"])
    return tree


def nulls(tree: dict[str, Any]) -> list[str]:
    """Return the keys of LEARNING_RATES that are null in a tree."""
    return [key for key in LEARNING_RATES if _at(tree, key) is None]


def _at(tree: Any, key: str) -> Any:
    """Return the value at a dotted key; `...` if there is no such key."""
    for part in key.split("."):
        tree = tree.get(part, ...) if isinstance(tree, dict) else ...
    return tree


def _replaced(tree: dict[str, Any], path: list[str], value: float) -> dict[str, Any]:
    """Return the tree with another value at a path; `tree` itself stays unchanged."""
    first, *rest = path
    return {**tree, first: _replaced(tree[first], rest, value) if rest else value}


def _short(rate: float) -> str:
    """Return a rate in short form: 2e-05 as 2e-5."""
    digits, _, exponent = f"{rate:.0e}".partition("e")
    return f"{digits}e{int(exponent)}"
