"""What every section of params.yaml is made of."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class ConfigError(ValueError):
    """params.yaml, or an override of it, is wrong. The message names the key, what was expected and what to do."""


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, protected_namespaces=())


Fraction = Field(ge=0.0, le=1.0)
