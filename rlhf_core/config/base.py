"""What every section of params.yaml is made of."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class ConfigError(ValueError):
    """params.yaml, or an override of it, is wrong. The message names the key, what was expected and what to do."""


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, protected_namespaces=())


def shown(text: str, limit: int = 200) -> str:
    """What somebody gave, for a message: on one line, no orders to a terminal, and not much of it."""
    text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text[: limit + 1])
    return text if len(text) <= limit else f"{text[:limit]}..."


Fraction = Field(ge=0.0, le=1.0)
RolloutBackend = Literal["vllm", "pytorch"]
