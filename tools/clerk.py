"""The clerk's settings, with which benchmarks and matrices start: params.yaml with recipes/clerk.yaml laid over it."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from rlhf_core.config import Params, overridden, parse_params, read_text, read_yaml_text, with_recipes

ROOT = Path(__file__).parents[1]


@cache
def clerk_text() -> str:
    """The settings as the text of a params.yaml, with its comments."""
    return overridden(read_text(ROOT / "params.yaml"), with_recipes([ROOT / "recipes/clerk.yaml"], {}), subject="the clerk's params")[0]


def clerk_tree() -> dict[str, Any]:
    """The settings as written, a new tree for each caller."""
    return read_yaml_text(clerk_text(), "the clerk's params")


def clerk_params() -> Params:
    """The settings as params."""
    return parse_params(clerk_tree(), "the clerk's params")
