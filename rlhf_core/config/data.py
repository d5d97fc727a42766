"""Where data comes from, and what it must be like to be trained on."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, model_validator

from rlhf_core.config.base import Fraction, Section


class ClerkConfig(Section):
    pretrain_lines: int = Field(ge=0)
    demonstrations: int = Field(ge=0)
    prompts: int = Field(ge=0)
    responses_per_prompt: int = Field(ge=2)
    label_noise: float = Fraction
    garbled_fraction: float = Fraction
    polite_errors_only: bool


class SamplesConfig(Section):
    """Prompts, demonstrations and pairs that the model at model.path writes itself.

    openings: what a prompt begins with, in turn.
    opening_tokens: that the model adds to an opening, up to the end of a sentence, to make a prompt; 0: the openings are the prompts.
    prompts: how many different ones, at most.
    responses_per_prompt: each up to the end of a sentence; the first one is a demonstration.
    label_noise: share of the pairs whose label is flipped.
    """

    openings: list[str] = Field(min_length=1)
    opening_tokens: int = Field(ge=0)
    prompts: int = Field(ge=1)
    responses_per_prompt: int = Field(ge=2)
    max_new_tokens: int = Field(ge=1)
    temperature: float = Field(gt=0)
    top_p: float = Field(gt=0, le=1)
    label_noise: float = Fraction


DataUse = Literal["pretrain", "sft", "preference", "prompt"]
DataFormat = Literal[
    "preference",  # prompt, chosen, rejected; text or message lists, whose shared turns are the prompt where no column is
    "hh",  # Anthropic-HH transcripts in chosen and rejected
    "instruction",  # instruction (and input, and a history of earlier turns), output
    "messages",  # one column with a conversation whose last message is the assistant's
    "unpaired",  # prompt, completion, boolean label
    "graded",  # prompt and several completions, each marked good or bad: every good one against every bad one
    "compared",  # prompt, first and second response, and a number: below 0 the first is preferred, above 0 the second
    "prompt",  # prompt and, for verifiable tasks, label
    "text",  # plain text for pretraining
]


# What the expectations of these names count.
DropKind = Literal["empty", "identical", "contradictory", "too_long"]

# Format -> the uses it can serve, and our names of its columns.
FORMATS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "preference": (("sft", "preference", "prompt"), ("prompt", "chosen", "rejected", "system")),
    "hh": (("sft", "preference", "prompt"), ("chosen", "rejected")),
    "instruction": (("sft", "prompt"), ("instruction", "input", "output", "label", "system", "history")),
    "messages": (("sft", "prompt"), ("messages", "label", "system")),
    "unpaired": (("sft", "preference", "prompt"), ("prompt", "completion", "label", "system")),
    "graded": (("sft", "preference", "prompt"), ("prompt", "completions", "completion", "good", "system")),
    "compared": (("sft", "preference", "prompt"), ("prompt", "first", "second", "preference", "system")),
    "prompt": (("prompt",), ("prompt", "label", "system")),
    "text": (("pretrain",), ("text",)),
}

CLERK_JUDGE = "clerk"  # what the built-in data's judge is called among the judges; the others are rules, and called as their function is

# What the gate slices by without any column of the data.
BUILT_IN_SLICES = ("source", "prompt_length", "response_length", "length_order")


class SourceConfig(Section):
    name: str = Field(pattern=r"^[A-Za-z0-9_.-]+$")
    kind: Literal["clerk", "file", "huggingface", "samples"]
    uses: list[DataUse] = Field(min_length=1)
    weight: float = Field(gt=0)
    clerk: ClerkConfig | None = None
    samples: SamplesConfig | None = None
    judge: str | None = None  # a rule of yours, file.py:name or package.module:name; of kind samples it labels the pairs too
    path: str | None = None  # a file, a folder, or the name of a Hugging Face data set
    delimiter: str | None = Field(default=None, min_length=1, max_length=1)  # of a CSV file; null: found in its header
    encoding: str = "utf-8"  # of text files
    subset: str | None = None  # of a Hugging Face data set
    dataset_split: str = "train"  # of a Hugging Face data set
    format: DataFormat | None = None
    columns: dict[str, str | list[str]] = Field(default_factory=dict)  # our name -> theirs; dots reach into nested columns
    implicit_prompt: bool = False  # preference as text without a prompt column: what chosen and rejected begin with is the prompt
    slices: dict[str, str] = Field(default_factory=dict)  # a name for the gate's slices -> their column
    drop: list[DropKind] = Field(default_factory=list)  # rows that are left out and counted, where else validation would refuse them
    label_pattern: str | None = None  # regular expression that finds the label inside its column; its first group, if it has one

    @model_validator(mode="after")
    def _complete(self):
        if self.kind == "clerk":
            if self.clerk is None:
                raise ValueError(f"source {self.name}: kind clerk expects a clerk section, got none; copy it from the default params.yaml")
            if self.judge is not None:
                raise ValueError(f"source {self.name}: kind clerk expects no judge, got {self.judge}; it has its own, so take that out")
        elif self.kind == "samples":
            self._check_samples()
        elif self.path is None or self.format is None:
            raise ValueError(
                f"source {self.name}: kind {self.kind} expects path and format, got path={self.path} format={self.format}; set both"
            )
        else:
            self._check_format(*FORMATS[self.format])
        self._check_reading()
        return self

    @property
    def judge_name(self) -> str | None:
        """Of whom `find_judge` finds for the source's rows; None: they have none."""
        return CLERK_JUDGE if self.kind == "clerk" else self.judge

    def _check_samples(self) -> None:
        if self.samples is None or self.judge is None:
            got = "no samples section" if self.samples is None else "no judge"
            raise ValueError(f"source {self.name}: kind samples expects samples and judge, got {got}; see recipes/stories.yaml")
        if "pretrain" in self.uses:
            raise ValueError(f"source {self.name}: kind samples expects uses among sft, preference, prompt, got pretrain; take that out")

    def _check_reading(self) -> None:
        subject = f"source {self.name}"
        if self.kind != "file" and (self.delimiter is not None or self.encoding != "utf-8"):
            raise ValueError(f"{subject}: delimiter and encoding expect kind file, got {self.kind}; take them out")
        try:
            "a".encode(self.encoding)
        except (LookupError, ValueError) as error:
            got = f"{self.encoding[:60]!r}; correct it"
            raise ValueError(f"{subject}: encoding expects a name such as utf-8, utf-16 or cp1252, got {got}") from error
        if self.delimiter in ('"', "\n", "\r"):
            raise ValueError(f"{subject}: delimiter expects a character between fields, got {self.delimiter!r}; correct it")
        if self.implicit_prompt and (self.format != "preference" or "prompt" in self.columns):
            got = "a mapped prompt" if "prompt" in self.columns else f"format {self.format}"
            raise ValueError(f"{subject}: implicit_prompt expects format preference without a prompt column, got {got}; take it out")

    def _check_format(self, uses: tuple[str, ...], columns: tuple[str, ...]) -> None:
        subject = f"source {self.name}"
        if unserved := [use for use in self.uses if use not in uses]:
            raise ValueError(f"{subject}: format {self.format} expects uses among {list(uses)}, got {unserved}; take those out")
        if unknown := [column for column in self.columns if column not in columns]:
            raise ValueError(f"{subject}: format {self.format} expects columns named {list(columns)}, got {unknown}; map ours to theirs")
        if lists := [column for column, theirs in self.columns.items() if isinstance(theirs, list) and column != "completions"]:
            raise ValueError(f"{subject}: columns {lists} expect one column each, got lists; only completions takes several")
        if taken := [name for name in self.slices if name in BUILT_IN_SLICES]:
            raise ValueError(f"{subject}: slices expect names other than {list(BUILT_IN_SLICES)}, got {taken}; rename them")
        if self.label_pattern is not None:
            try:
                re.compile(self.label_pattern)
            except re.error as error:
                message = f"{subject}: label_pattern expects a regular expression, got {self.label_pattern!r} ({error}); correct it"
                raise ValueError(message) from error


class DataConfig(Section):
    validation_fraction: float = Field(gt=0, lt=0.5)
    test_fraction: float = Field(gt=0, lt=0.5)
    promotion_fraction: float = Field(default=0.0, ge=0, lt=0.5)
    max_rows: int | None = Field(default=None, gt=0)
    max_unrenderable_fraction: float = Field(default=0.05, ge=0, le=1)
    sources: list[SourceConfig] = Field(min_length=1)

    @model_validator(mode="after")
    def _something_is_left(self):
        aside = self.validation_fraction + self.test_fraction + self.promotion_fraction
        if aside >= 1:
            raise ValueError(
                f"validation_fraction, test_fraction and promotion_fraction: expected less than 1 together, got {aside:g}; leave something "
                "to train on"
            )
        return self

    @model_validator(mode="after")
    def _names_differ(self):
        names = [s.name for s in self.sources]
        if len(set(names)) < len(names):
            raise ValueError(f"sources: expected different names, got {names}; rename one")
        return self


class ValidationConfig(Section):
    max_dropped_fraction: float = Field(default=0.1, ge=0, le=1)
    max_empty_fraction: float = Fraction
    max_identical_fraction: float = Fraction
    max_duplicate_fraction: float = Fraction
    max_contradictory_fraction: float = Fraction
    max_too_long_fraction: float = Fraction
    max_length_bias: float = Field(ge=0, le=0.5)
    min_label_balance: float = Field(ge=0, le=0.5)
    min_pairs: int = Field(ge=0)
    max_reported_ids: int = Field(ge=1)
