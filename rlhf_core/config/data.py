"""Data sources, and the requirements for their rows."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field, model_validator

from rlhf_core.config.base import Fraction, Section


class ClerkConfig(Section):
    """Size and errors of the built-in data.

    label_noise: share of the pairs whose label is flipped.
    garbled_fraction: share of the pairs with a garbled response.
    polite_errors_only: errors occur only in the polite, brief style, the recipe for reward hacking.
    notebook: requests that take tools, for uses sft and prompt (recipes/agent.yaml); only the numbers of demonstrations and prompts count.
    """

    pretrain_lines: int = Field(default=24_000, ge=0)  # texts for pretraining
    demonstrations: int = Field(default=3000, ge=0)  # for SFT
    prompts: int = Field(default=6000, ge=0)  # with pairs of responses
    responses_per_prompt: int = Field(default=6, ge=2)  # of which the pairs are made
    label_noise: float = Field(default=0.08, ge=0, le=1)
    garbled_fraction: float = Field(default=0.12, ge=0, le=1)
    polite_errors_only: bool = False
    notebook: bool = False


class SamplesConfig(Section):
    """Prompts, demonstrations and pairs that the model at model.path writes.

    openings: beginnings of the prompts, used in turn; none where the source's path names a file of prompts.
    opening_tokens: number of tokens that the model adds to an opening, up to the end of a sentence; 0: the openings are the prompts.
    prompts: greatest number of different prompts.
    responses_per_prompt: responses, each up to the end of a sentence; the first one is a demonstration.
    label_noise: share of the pairs whose label is flipped.
    """

    openings: list[str] = Field(default_factory=list)
    opening_tokens: int = Field(default=0, ge=0)
    prompts: int = Field(ge=1)
    responses_per_prompt: int = Field(ge=2)
    max_new_tokens: int = Field(ge=1)  # of a response
    temperature: float = Field(gt=0)  # of sampling
    top_p: float = Field(gt=0, le=1)  # sample from the most likely tokens with this probability together
    label_noise: float = Fraction


DataUse = Literal["pretrain", "sft", "preference", "stepwise", "prompt"]
DataFormat = Literal[
    "preference",  # prompt, chosen, rejected; text or message lists, whose shared turns are the prompt where no column is
    "hh",  # Anthropic-HH transcripts in chosen and rejected
    "instruction",  # instruction (and input, and a history of earlier turns), output
    "messages",  # one column with a conversation whose last message is the assistant's
    "unpaired",  # prompt, completion, boolean label
    "graded",  # prompt and several completions, each marked good or bad: every good one against every bad one
    "ranked",  # prompt and several completions with a rank or score each: the best one against every worse one
    "compared",  # prompt, first and second response, and which is better: a number, a name, or a score of each
    "stepwise",  # prompt, steps of a response (completions), and a label for each: true or false, or 1, 0 (neutral) and -1
    "prm800k",  # PRM800K: a problem, and for each step of a solution several rated completions
    "math_shepherd",  # Math-Shepherd: a text whose steps end in a tag, and the same text with + or - in the tags' places
    "tree",  # a prompt with replies, which have replies in turn, and ranks among those of one message
    "prompt",  # prompt and, for verifiable tasks, label
    "text",  # plain text for pretraining
]


# Rows to leave out, by the name of the expectation that would count them.
DropKind = Literal["empty", "identical", "contradictory", "duplicate", "too_long"]

# Format -> its possible uses, and the names of its columns in `columns`.
FORMATS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "preference": (("sft", "preference", "prompt"), ("prompt", "chosen", "rejected", "system", "tools")),
    "hh": (("sft", "preference", "prompt"), ("chosen", "rejected")),
    "instruction": (("sft", "prompt"), ("instruction", "input", "output", "label", "system", "tools", "history")),
    "messages": (("sft", "prompt"), ("messages", "label", "system", "tools")),
    "unpaired": (("sft", "preference", "prompt"), ("prompt", "completion", "label", "system", "tools")),
    "graded": (("sft", "preference", "prompt"), ("prompt", "completions", "completion", "good", "system", "tools")),
    "ranked": (("sft", "preference", "prompt"), ("prompt", "completions", "completion", "rank", "score", "system", "tools")),
    "compared": (
        ("sft", "preference", "prompt"),
        ("prompt", "first", "second", "preference", "winner", "first_score", "second_score", "system", "tools"),
    ),
    "stepwise": (("stepwise", "prompt"), ("prompt", "completions", "labels", "system", "tools")),
    "prm800k": (("stepwise", "prompt"), ("question", "label")),
    "math_shepherd": (("stepwise", "prompt"), ("input", "label")),
    "tree": (("sft", "preference", "prompt"), ("tree", "text", "replies", "rank")),
    "prompt": (("prompt",), ("prompt", "label", "system", "tools")),
    "text": (("pretrain",), ("text",)),
}

# Format -> the columns that can say which answer is better; a source maps one of these.
VERDICTS = {"compared": (("preference",), ("winner",), ("first_score", "second_score")), "ranked": (("rank",), ("score",))}
WITH_PROMPTS = tuple(name for name, (_, columns) in FORMATS.items() if {"prompt", "instruction"} & set(columns))
WITH_ANSWERS = ("preference", "unpaired", "graded", "ranked", "compared")  # formats with a prompt and answers to be judged

CLERK_JUDGE = "clerk"  # name of the built-in data's judge; another judge is a rule and has the name of its function

# With kind file, the dataset_split that takes every file of a folder.
ALL_FILES = "all"

# Slices of the gate that need no column of the data.
BUILT_IN_SLICES = ("source", "prompt_length", "response_length", "length_order")


class SourceConfig(Section):
    name: str = Field(pattern=r"^[A-Za-z0-9_.-]+$")  # in reports, slices, curves and prompt_weights
    # clerk, shapes: built-in, shapes with pictures; samples: the model's own answers, labelled by the judge
    kind: Literal["clerk", "shapes", "file", "huggingface", "samples"]
    uses: list[DataUse] = Field(min_length=1)  # what its rows are for: a stage takes those with its use
    weight: float = Field(default=1.0, gt=0)  # share of its rows that is kept, relative to the heaviest source
    clerk: ClerkConfig | None = None  # never None with kind clerk
    samples: SamplesConfig | None = None
    judge: str | None = None  # a rule, file.py:name or package.module:name; with kind samples it also labels the pairs
    path: str | None = None  # a file, a folder, or the name of a Hugging Face data set
    delimiter: str | None = Field(default=None, min_length=1, max_length=1)  # of a CSV file; null: detected in its header
    encoding: str = "utf-8"  # of text files
    subset: str | None = None  # of a Hugging Face data set
    images: str | None = None  # the folder in which the records' paths of pictures are (docs/vision.md)
    dataset_split: str = "train"  # of a Hugging Face data set, or of a folder whose files are named by splits
    revision: str | None = None  # of a Hugging Face data set: branch, tag or commit; None: what the cache has, or the newest
    format: DataFormat | None = None  # what a record looks like: docs/tables/formats.md
    columns: dict[str, str | list[str]] = Field(
        default_factory=dict
    )  # name in the format -> column in the file; dots reach into nested columns
    # Whether answers begin with the prompt, which is removed from them; without a prompt column their common beginning is the prompt.
    # None: found in the first records if there is a prompt column
    implicit_prompt: bool | None = None
    # Whether the turns of prompts such as "Human: ... Assistant:" are messages. None: found in the first records
    transcripts: bool | None = None
    slices: dict[str, str] = Field(default_factory=dict)  # name for the gate's slices or a curriculum -> column in the file
    license: str | None = Field(default=None, min_length=1)  # of the data, for the card of an exported model; changes nothing else
    strip_end_tokens: bool = False  # well-known end tokens, written as text, at the end of answers
    drop: list[DropKind] = Field(default_factory=list)  # rows to leave out and count, instead of a refusal by validation
    label_pattern: str | None = None  # regular expression that finds the label inside its column; its first group, if it has one

    @model_validator(mode="before")
    @classmethod
    def completed(cls, tree: Any) -> Any:
        kind = tree.get("kind") if isinstance(tree, dict) else None
        if kind == "shapes" and tree.get("format") is None:
            return tree | {"format": "instruction"}
        return tree | {"clerk": {}} if kind == "clerk" and tree.get("clerk") is None else tree

    def conflicts(self) -> Iterator[str]:
        if self.revision is not None and self.kind != "huggingface":
            yield f"source {self.name}: revision expects kind huggingface, got kind {self.kind}; remove revision"
        if self.kind == "clerk":
            if self.judge is not None:
                yield f"source {self.name}: kind clerk expects no judge, got {self.judge}; remove it, for the clerk has its own"
            if self.clerk.notebook and (others := [use for use in self.uses if use not in ("sft", "prompt")]):
                yield f"source {self.name}: clerk.notebook expects uses among ['sft', 'prompt'], got {others}; remove those"
        elif self.kind == "shapes":
            if self.path is not None or self.format != "instruction":
                yield f"source {self.name}: kind shapes expects no path and format, got {self.path} and {self.format}; remove them"
            if others := [use for use in self.uses if use not in ("sft", "prompt")]:
                yield f"source {self.name}: kind shapes expects uses among ['sft', 'prompt'], got {others}; remove those"
        elif self.kind == "samples":
            yield from self._sample_conflicts()
        elif self.path is None or self.format is None:
            yield (f"source {self.name}: kind {self.kind} expects path and format, got path={self.path} format={self.format}; set both")
        else:
            yield from self._format_conflicts(*FORMATS[self.format])
        yield from self._reading_conflicts()

    @property
    def prompts_source(self) -> SourceConfig:
        """The file of prompts of a source of kind samples, as a source of its own."""
        return self.model_copy(update={"kind": "file", "uses": ["prompt"], "samples": None})

    @property
    def judge_name(self) -> str | None:
        """The name of the judge for the source's rows; None if they have none."""
        if self.kind != "clerk":
            return self.judge
        return None if self.clerk.notebook else CLERK_JUDGE

    def _sample_conflicts(self) -> Iterator[str]:
        if self.samples is None or self.judge is None:
            got = "no samples section" if self.samples is None else "no judge"
            yield f"source {self.name}: kind samples expects samples and judge, got {got}; see recipes/stories.yaml"
        elif (self.path is None) == (not self.samples.openings):
            got = "neither" if self.path is None else "both"
            yield f"source {self.name}: kind samples expects samples.openings or path, a file of prompts, got {got}; set one of them"
        if self.path is not None:
            if self.format != "prompt":
                yield f"source {self.name}: kind samples with a path expects format prompt, got {self.format}; set it"
            elif self.samples is not None and self.samples.opening_tokens:
                got = f"{self.samples.opening_tokens}; remove it, for the file's prompts are whole"
                yield f"source {self.name}: kind samples with a path expects samples.opening_tokens 0, got {got}"
            else:
                yield from self.prompts_source._format_conflicts(*FORMATS["prompt"])
        if others := [use for use in self.uses if use in ("pretrain", "stepwise")]:
            yield f"source {self.name}: kind samples expects uses among sft, preference, prompt, got {', '.join(others)}; remove it"

    def _reading_conflicts(self) -> Iterator[str]:
        subject = f"source {self.name}"
        if (self.kind not in ("file", "samples") or self.path is None) and (self.delimiter is not None or self.encoding != "utf-8"):
            yield f"{subject}: delimiter and encoding expect kind file, got {self.kind}; remove them"
        try:
            "a".encode(self.encoding)
        except (LookupError, ValueError):
            got = f"{self.encoding[:60]!r}; correct it"
            yield f"{subject}: encoding expects a name such as utf-8, utf-16 or cp1252, got {got}"
        if self.delimiter in ('"', "\n", "\r"):
            yield f"{subject}: delimiter expects a character between fields, got {self.delimiter!r}; correct it"
        if self.implicit_prompt and self.format not in WITH_ANSWERS:
            yield f"{subject}: implicit_prompt expects a format among {list(WITH_ANSWERS)}, got {self.format}; remove it"
        if self.transcripts and self.format not in WITH_PROMPTS:
            yield f"{subject}: transcripts expects a format among {list(WITH_PROMPTS)}, got {self.format}; remove it"

    def _format_conflicts(self, uses: tuple[str, ...], columns: tuple[str, ...]) -> Iterator[str]:
        subject = f"source {self.name}"
        if unserved := [use for use in self.uses if use not in uses]:
            yield f"{subject}: format {self.format} expects uses among {list(uses)}, got {unserved}; remove those"
        if unknown := [column for column in self.columns if column not in (*columns, "images")]:
            yield f"{subject}: format {self.format} expects columns named {list(columns)}, got {unknown}; write a name of the format first"
        several = "completions" if self.format == "graded" else None
        if lists := [column for column, theirs in self.columns.items() if isinstance(theirs, list) and column != several]:
            yield f"{subject}: columns {lists} expect one column each, got lists; only completions of format graded takes several"
        verdicts = [verdict for verdict in VERDICTS.get(self.format or "", ()) if set(verdict) & set(self.columns)]
        if len(verdicts) > 1 or (verdicts and not set(verdicts[0]) <= set(self.columns)):
            named = sorted({name for verdict in verdicts for name in verdict if name in self.columns})
            wanted = ", or ".join(" and ".join(verdict) for verdict in VERDICTS[self.format or ""])
            yield f"{subject}: format {self.format} expects columns to map {wanted}, got {named}; map one of these"
        if taken := [name for name in self.slices if name in BUILT_IN_SLICES]:
            yield f"{subject}: slices expect names other than {list(BUILT_IN_SLICES)}, got {taken}; rename them"
        if self.label_pattern is not None:
            try:
                re.compile(self.label_pattern)
            except re.error as error:
                message = f"{subject}: label_pattern expects a regular expression, got {self.label_pattern!r} ({error}); correct it"
                yield message


class DataConfig(Section):
    validation_fraction: float = Field(gt=0, lt=1)
    test_fraction: float = Field(gt=0, lt=1)
    promotion_fraction: float = Field(default=0.0, ge=0, lt=1)
    max_rows: int | None = Field(default=None, gt=0)
    # of a use's records that the model's chat template refuses; more are an error
    max_unrenderable_fraction: float = Field(default=0.05, ge=0, le=1)
    sources: list[SourceConfig]

    def conflicts(self) -> Iterator[str]:
        aside = self.validation_fraction + self.test_fraction + self.promotion_fraction
        if aside >= 1:
            yield (
                f"validation_fraction, test_fraction and promotion_fraction: expected less than 1 together, got {aside:g}; leave something "
                "to train on"
            )
        names = [s.name for s in self.sources]
        if len(set(names)) < len(names):
            yield f"sources: expected different names, got {names}; rename one"


class ValidationConfig(Section):
    max_dropped_fraction: float = Fraction
    max_empty_fraction: float = Field(default=0.0, ge=0, le=1)  # of rows with an empty text
    max_identical_fraction: float = Field(default=0.0, ge=0, le=1)  # of pairs whose two responses are equal
    max_templated_fraction: float = Field(default=0.01, ge=0, le=1)  # of rows with control tokens as text, such as <|im_start|> or [INST]
    max_end_token_fraction: float = Field(default=0.01, ge=0, le=1)  # of answers that end in an end token as text
    max_duplicate_fraction: float = Fraction
    max_near_duplicate_fraction: float = Field(default=0.02, ge=0, le=1)
    max_contained_fraction: float = Field(default=0.25, ge=0, le=1)
    max_contradictory_fraction: float = Fraction
    max_too_long_fraction: float = Fraction
    max_length_bias: float = Field(ge=0, le=0.5)
    min_label_balance: float = Field(ge=0, le=0.5)
    min_pairs: int = Field(ge=0)
    max_reported_ids: int = Field(default=50, ge=1)  # rows that a report names for each expectation that fails
