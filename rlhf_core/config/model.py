"""The model that is aligned, and adapters on it."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import date
from typing import Any, Literal

from pydantic import Field

from rlhf_core.config.base import Section, shown


class ArchitectureConfig(Section):
    hidden_size: int = Field(gt=0)
    intermediate_size: int = Field(gt=0)
    layers: int = Field(gt=0)
    heads: int = Field(gt=0)
    vocab_size: int = Field(ge=300)

    def conflicts(self) -> Iterator[str]:
        if self.hidden_size % self.heads or (self.hidden_size // self.heads) % 2:
            yield (
                f"hidden_size: expected an even multiple of heads={self.heads}, got {self.hidden_size}; "
                "each head needs an even width for rotary positions"
            )


class ModelConfig(Section):
    path: str | None
    revision: str | None = None
    chat_template: str | None = None
    trust_remote_code: bool
    dtype: Literal["float32", "bfloat16"]
    max_length: int = Field(ge=8)
    template_date: str
    template_options: dict[str, Any]
    architecture: ArchitectureConfig

    def conflicts(self) -> Iterator[str]:
        try:
            date.fromisoformat(self.template_date)
        except ValueError:
            yield f"template_date: expected a day such as 2024-07-26, got {shown(repr(self.template_date))}; correct it"
        if self.revision is not None and self.path is None:
            yield "revision: expected none without model.path, whose revision it is, got one; set it to null"
        if self.template_options and self.path is None:
            yield "template_options: expected none without model.path, whose template reads them, got some; remove them"
        if self.chat_template is not None and self.path is None:
            yield f"chat_template: expected null while path is null, whose tokenizer has its own, got {self.chat_template!r}"


class LoraConfig(Section):
    """Low-rank adapters in the place of full training; merged into the weights when the model is saved.

    target_modules: names of linear layers, or all-linear: every one but the head, routers and what a state-space mixer reads itself.
    quantize: nf4 rounds the frozen linear layers to 4 bits (QLoRA); None keeps them.
    """

    rank: int = Field(gt=0)
    alpha: float = Field(gt=0)
    dropout: float = Field(ge=0, lt=1)
    target_modules: Literal["all-linear"] | list[str]
    quantize: Literal["nf4"] | None = None
