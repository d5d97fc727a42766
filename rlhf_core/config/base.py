"""The base class of every section of params.yaml, and functions that show keys and values in messages."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, WithJsonSchema, model_validator

COLLECTED = "conflicts are collected"  # validation context: the caller gathers the conflicts of all sections

# Old key of params.yaml -> its new name. Old keys are refused with the new name in the message.
RENAMED_KEYS = {
    "checkpoints.go_on_from": "checkpoints.resume_from",
    "rl.reward.mask_cut_off": "rl.reward.mask_truncated",
    "rl.monitor.cut_off": "rl.monitor.truncated",
    "rl.rollout.one_step_off_policy": "rl.rollout.max_lag (1 for true, 0 for false)",
}
# Key whose old name has another meaning now -> what it is. Named in the message where the key is missing.
MOVED_KEYS = {
    "rl.ppo_epochs": "the passes over each rollout batch, which were rl.epochs; rl.epochs counts passes over the training prompts"
}
RENAMED_COLUMNS = {"cut_off_fraction": "truncated_fraction"}  # the same for columns of plots/train_policy.csv

MIN_SIMILARITY = 0.7  # of difflib's ratio: rollout.max_tokens suggests rl.rollout.max_new_tokens
HIGH_SIMILARITY = 0.8  # below it, a key of several parts suggests first those with the same last word
SIMILARITY_MARGIN = 0.02  # names within this of the best one are suggested too
MAX_SUGGESTIONS = 4
MAX_NAME = 120  # characters; a longer name gets no suggestion

# Unicode marks, embeddings, overrides and isolates, which change the direction in which a text is read.
_REORDERING = re.compile("[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")

Fraction = Field(ge=0.0, le=1.0)
RolloutBackend = Literal["vllm", "pytorch"]
StopStrings = list[Annotated[str, Field(min_length=1)]]  # each ends a response
# params.yaml may have null, which rlhf_core/config/usual.py replaces before a section is read.
LearningRate = Annotated[float, Field(gt=0), WithJsonSchema({"anyOf": [{"type": "number", "exclusiveMinimum": 0}, {"type": "null"}]})]


class ConfigError(ValueError):
    """params.yaml, or an override of it, is wrong. The message names the key, what was expected and what to do."""


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, protected_namespaces=())

    @classmethod
    def completed(cls, tree: Any) -> Any:
        """The section as written, with defaults that depend on other values. A section with such defaults makes this a model validator."""
        return tree

    def conflicts(self) -> Iterator[str]:
        """Values of this section that don't fit together, each as `key: expected X, got Y; what to do`, the key relative to the section."""
        yield from ()

    @model_validator(mode="after")
    def _refuse_conflicts(self, info: ValidationInfo):
        """Refuse conflicts in a section that is validated alone.

        `rlhf_core.config.params.conflicts` gathers those of a whole params.yaml.
        """
        if COLLECTED not in (info.context or ()) and (found := list(self.conflicts())):
            raise ValueError("\n".join(found))
        return self


def number_of(count: float, one: str, many: str | None = None) -> str:
    """Return a number with its noun: "1 GPU", "2 GPUs".

    many: the plural; None means `one` with an s.
    """
    return f"{f'{count:g}' if isinstance(count, float) else count} {one if count == 1 else many or one + 's'}"


def bytes_shown(count: int) -> str:
    """1536 as "1.5 kB"."""
    if count < 1000:
        return f"{count} bytes"
    power = min(4, int(math.log(count, 1000)))
    return f"{count / 1000**power:.1f} {('kB', 'MB', 'GB', 'TB')[power - 1]}"


def shown(text: str, limit: int = 200) -> str:
    """Text from outside in a form for messages: one line, control characters escaped, at most `limit` characters."""
    text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text[: limit + 1])
    return text if len(text) <= limit else f"{text[:limit]}..."


def reordering_shown(text: str) -> str:
    """Return the text with each character that changes the direction of reading replaced by its code point."""
    return _REORDERING.sub(lambda found: f"⟨U+{ord(found[0]):04X}⟩", text)


# Where a key of expert parallelism, as other libraries have it, is asked for.
EXPERTS_DIVIDED = (
    "experts can't be put on different GPUs as a whole: rl.rollout.tensor_parallel_size divides each of them over an engine's GPUs, and "
    "zero_stage 3 over the trainer's ranks"
)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`did you mean a.b?`, with several names where they are equally similar; empty where no name is similar.

    A name is compared with the whole of a dotted key and with its end: rollout.backend finds rl.rollout.backend. If none is very similar,
    keys with the same last word come first: preference.beta finds dpo.beta.
    """
    if len(name) > MAX_NAME:
        return ""
    if re.search("expert.*parallel", name):
        return EXPERTS_DIVIDED
    parts = name.split(".")

    def similarity(key: str) -> float:
        ends = {key, ".".join(key.split(".")[-len(parts) :])}
        return max(difflib.SequenceMatcher(None, name.lower(), end.lower()).ratio() for end in ends)

    similarities = {key: similarity(key) for key in dict.fromkeys(known)}
    best = max(similarities.values(), default=0.0)
    same_word = [key for key in similarities if key.rpartition(".")[2] == parts[-1]] if len(parts) > 1 and best < HIGH_SIMILARITY else []
    if best < MIN_SIMILARITY and not same_word:
        return ""
    near = [key for key, ratio in similarities.items() if ratio >= best - SIMILARITY_MARGIN]
    found = [shown(key) for key in sorted(same_word, key=similarities.__getitem__, reverse=True) or near][:MAX_SUGGESTIONS]
    several = f"{', '.join(found[:-1])} or {found[-1]}" if len(found) == MAX_SUGGESTIONS else " or ".join(found)
    return f"did you mean {several}?"


def keys_of(tree: Any, path: str = "") -> Iterator[str]:
    """Every dotted key of a mapping, in its order; items of lists by their numbers."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield f"{path}{key}"
        yield from keys_of(value, f"{path}{key}.")


def subsection(annotation: Any) -> tuple[type[Section] | None, bool]:
    """Return the section inside a field's type (None where there is none), and whether the field is a list of such sections."""
    kinds = (annotation, *get_args(annotation))
    items = next((get_args(kind) for kind in kinds if get_origin(kind) is list), ())
    found = next((kind for kind in (*items, *kinds) if isinstance(kind, type) and issubclass(kind, Section)), None)
    return found, bool(items)


def section_keys(section: type[Section], path: str = "", *, item: str = "0") -> Iterator[str]:
    """Every dotted key that a section may have according to its type.

    Args:
        item: the number that stands for each item of a list.
    """
    for name, field in section.model_fields.items():
        yield f"{path}{name}"
        below, is_list = subsection(field.annotation)
        if below is not None:
            yield from section_keys(below, f"{path}{name}.{item}." if is_list else f"{path}{name}.", item=item)


def with_defaults(section: type[Section], tree: Any) -> Any:
    """Return a section as written, with the default of every key that it leaves out; values aren't checked."""
    if not isinstance(tree, dict):
        return tree
    filled = dict(section.completed(tree))
    for name, field in section.model_fields.items():
        if name not in filled:
            if field.is_required():
                continue
            default = field.get_default(call_default_factory=True)
            filled[name] = default.model_dump(mode="json") if isinstance(default, Section) else default
        below, is_list = subsection(field.annotation)
        if below is not None and is_list and isinstance(filled[name], list):
            filled[name] = [with_defaults(below, item) for item in filled[name]]
        elif below is not None and not is_list:
            filled[name] = with_defaults(below, filled[name])
    return filled
