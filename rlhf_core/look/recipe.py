"""YAML for params.yaml: a source, and a recipe with the other keys that its data needs."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, get_args

from rlhf_core.config import Params, SourceConfig
from rlhf_core.config.data import DropKind
from rlhf_core.data.drops import Tally
from rlhf_core.look.look import Looked

LIMITS = {
    "empty": "max_empty_fraction",
    "identical": "max_identical_fraction",
    "contradictory": "max_contradictory_fraction",
    "too_long": "max_too_long_fraction",
    "duplicate": "max_duplicate_fraction",
    "templated": "max_templated_fraction",
    "end_token": "max_end_token_fraction",
}
KEYS = ("name", "kind", "path", "subset", "dataset_split", "format", "columns", "label_pattern", "uses", "weight")

_PLAIN = re.compile(r"(?:\.{0,2}/)*[A-Za-z_][A-Za-z0-9_./-]*")
_WORDS = {"null", "true", "false", "yes", "no", "on", "off", "y", "n"}  # plain scalars that YAML doesn't read as text


def recipe(found: Looked, params: Params, model: Mapping[str, Any]) -> str:
    """A recipe for `--params`: the source with the `drop` that it needs, keys of `model`, and the limits that would stop the chain."""
    drop = needed_drop(found, params)
    lines = [yaml_lines(found.tried.source.model_copy(update={"drop": drop}))]
    sections = {"model": [f"{key}: {_yaml_value(value)}" for key, value in model.items()], "validation": list(_limits(found, drop, params))}
    for section, keys in sections.items():
        lines += [f"{section}:", *(f"  {key}" for key in keys)] if keys else []
    return "\n".join(lines)


def needed_drop(found: Looked, params: Params) -> list[DropKind]:
    """The kinds of rows of which a use has more than validate_data allows, without those that no `drop` removes."""
    stopping = {
        kind for counts in found.counts.values() for kind, n in counts.objections().items() if exceeds_limit(kind, n, counts.rows, params)
    }
    return [kind for kind in get_args(DropKind) if kind in stopping]


def exceeds_limit(kind: str, count: int, rows: int, params: Params) -> bool:
    return kind in LIMITS and count / rows > getattr(params.validation, LIMITS[kind])


def dropped_share(found: Looked, drop: list[DropKind]) -> tuple[float, str]:
    """The largest share that prepare_data would leave out, at most, and its use."""
    tally = Tally(found.dropped, Counter({use: counts.rows for use, counts in found.counts.items()}))
    tally.dropped.update({use: counts.dropped(drop) for use, counts in found.counts.items()})
    return max(((tally.share(use), use) for use in found.counts), default=(0.0, ""))


def _limits(found: Looked, drop: list[DropKind], params: Params) -> Iterator[str]:
    share, use = dropped_share(found, drop)
    if share > params.validation.max_dropped_fraction:
        yield f"max_dropped_fraction: {_above(share, 1.0):g}  # {share:.1%} of the {use} data are left out"
    if (pairs := found.counts.get("preference")) and pairs.found["pairs"]:
        longer = pairs.chosen_is_longer / pairs.found["pairs"]
        if (bias := abs(longer - 0.5)) > params.validation.max_length_bias:
            why = f"the chosen response is the longer one in {longer:.0%} of the pairs: training would learn length"
            yield f"max_length_bias: {_above(bias, 0.5):g}  # {why}"


def _above(share: float, highest: float) -> float:
    """One to two percentage points more, in full ones: what follows the sample may differ a little."""
    return min(highest, (int(100 * share) + 2) / 100)


def yaml_lines(source: SourceConfig) -> str:
    """The source as YAML for params.yaml, without keys at their default."""
    fields = type(source).model_fields
    given = source.model_dump()
    rest = [key for key in given if key not in KEYS]
    kept = [key for key in (*KEYS, *rest) if key == "weight" or given[key] != fields[key].get_default(call_default_factory=True)]
    first, *others = [f"{key}: {_yaml_value(given[key])}" for key in kept]
    return "\n".join(["data:", "  sources:", f"    - {first}", *(f"      {line}" for line in others)])


def _yaml_value(value: Any) -> str:
    """A value in YAML's flow style, in which JSON strings are valid."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_yaml_value(k)}: {_yaml_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_yaml_value, value)) + "]"
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _WORDS:
        return value
    text = json.dumps(value, ensure_ascii=False)
    return "".join(c if c.isprintable() else f"\\U{ord(c):08X}" for c in text)
