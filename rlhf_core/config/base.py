"""What every section of params.yaml is made of."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, model_validator

COLLECTED = "conflicts are collected"  # validation context: whoever validates asks for the conflicts of all sections himself


class ConfigError(ValueError):
    """params.yaml, or an override of it, is wrong. The message names the key, what was expected and what to do."""


# Marks, embeddings, overrides and isolates, by which a text can be read in another order than it stands in.
_REORDERING = re.compile("[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, protected_namespaces=())

    def conflicts(self) -> Iterator[str]:
        """What doesn't fit together in this section, each as `key: expected X, got Y; what to do`, the key relative to the section."""
        yield from ()

    @model_validator(mode="after")
    def _fits_together(self, info: ValidationInfo):
        """Of a section on its own; those of params.yaml are asked all together (rlhf_core/config/conflicts.py)."""
        if COLLECTED not in (info.context or ()) and (found := list(self.conflicts())):
            raise ValueError("\n".join(found))
        return self


def shown(text: str, limit: int = 200) -> str:
    """What somebody gave, for a message: on one line, no orders to a terminal, and not much of it."""
    text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text[: limit + 1])
    return text if len(text) <= limit else f"{text[:limit]}..."


def reordering_shown(text: str) -> str:
    """The text as it stands: what changes the direction of reading is shown by its number."""
    return _REORDERING.sub(lambda found: f"⟨U+{ord(found[0]):04X}⟩", text)


Fraction = Field(ge=0.0, le=1.0)
RolloutBackend = Literal["vllm", "pytorch"]
