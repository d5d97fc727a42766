"""What a reward model must be like to be used."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from rlhf_core.config.base import Fraction, Section


class ExternalPairsConfig(Section):
    """Pairs that had no part in training, such as RewardBench's; subset names the column by which they are reported."""

    name: str = Field(pattern=r"^[A-Za-z0-9_.-]+$")
    path: str
    format: Literal["preference", "hh"]
    columns: dict[str, str] = Field(default_factory=dict)
    implicit_prompt: bool = False  # as of a data source
    subset: str | None = None
    min_accuracy: float | None = Field(default=None, ge=0, le=1)


class IncumbentConfig(Section):
    """A reward model that was promoted, as the registry has it (docs/registry.md): version, and md5 of its folder as in dvc.lock.

    sha256: of the folder; None: the version was registered by its md5 only.
    """

    version: str
    md5: str = Field(pattern=r"^[0-9a-f]{32}\.dir$")
    sha256: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$")


class RolledBackConfig(IncumbentConfig):
    """A reward model that was promoted and then taken back, and why."""

    reason: str


class GateConfig(Section):
    min_accuracy: float = Fraction
    confidence: float = Field(gt=0, lt=1)
    min_pairs: int = Field(ge=1)
    slices: list[str]
    min_slice_accuracy: float | None = Field(ge=0, le=1)
    min_slice_pairs: int = Field(ge=1)
    max_ece: float | None = Field(ge=0, le=1)
    min_shorter_accuracy: float | None = Field(ge=0, le=1)
    probe_pairs: int = Field(ge=1)
    max_score_difference: float = Field(gt=0)
    max_format_shift: float | None = Field(gt=0)
    incumbent: IncumbentConfig | None
    anchor: IncumbentConfig | None
    max_regression: float = Field(ge=0, le=1)
    external: list[ExternalPairsConfig]
    rolled_back: list[RolledBackConfig]
    override: str | None = Field(min_length=1)

    @model_validator(mode="after")
    def _names_differ(self):
        for key, names in (("slices", self.slices), ("external", [e.name for e in self.external])):
            if len(set(names)) < len(names):
                raise ValueError(f"{key}: expected different names, got {names}; take one out")
        return self
