"""Writes YAML for params.yaml: a source, and a recipe with the other keys that its data needs."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

from rlhf_core.config import Params, SourceConfig
from rlhf_core.config.data import DropKind
from rlhf_core.look.look import Inspection
from rlhf_core.preparation.drops import Tally

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
# Share of a use's rows that may be left out because they are too long: beyond it the recipe leaves the chain to stop, since what is left
# is other data than the user's. The second one where the user chose the length.
MOST_TOO_LONG, MOST_TOO_LONG_CHOSEN = 0.1, 0.5

_PLAIN = re.compile(r"(?:\.{0,2}/)*[A-Za-z_][A-Za-z0-9_./-]*")
_WORDS = {"null", "true", "false", "yes", "no", "on", "off", "y", "n"}  # plain scalars that YAML doesn't read as text


@dataclass(frozen=True)
class Limits:
    """Limits that prepare_data and validate_data need to accept the data.

    settings: keys of `validation`. why: comment for each key.
    """

    drop: list[DropKind]
    settings: dict[str, Any] = field(default_factory=dict)
    why: dict[str, str] = field(default_factory=dict)


def recipe(found: Inspection, params: Params, model: Mapping[str, Any]) -> str:
    """A recipe for `--params` without a proposal: the source with its `drop`, keys of `model`, and limits that would otherwise stop the
    chain.
    """
    most = MOST_TOO_LONG_CHOSEN if "max_length" in model else MOST_TOO_LONG
    limits = needed_limits(found, found.tried.source.uses, params, most_too_long=most)
    source = found.tried.source.model_copy(update={"drop": limits.drop})
    return recipe_lines(source, {f"model.{key}": value for key, value in model.items()} | limits.settings, limits.why)


def recipe_lines(source: SourceConfig, settings: Mapping[str, Any], why: Mapping[str, str]) -> str:
    """Return a source and dotted keys as YAML lines.

    why: comment for each key.
    """
    tree: dict[str, Any] = {}
    for key, value in settings.items():
        *path, name = key.split(".")
        node = tree
        for part in path:
            node = node.setdefault(part, {})
        node[name] = _Leaf(value, why.get(key, ""))
    data = tree.pop("data", {})
    return "\n".join([yaml_lines(source), *_tree_lines(data, 1), *_tree_lines(tree, 0)])


@dataclass(frozen=True)
class _Leaf:
    value: Any
    why: str


def _tree_lines(tree: Mapping[str, Any], depth: int) -> Iterator[str]:
    for key, node in sorted(tree.items(), key=lambda item: not isinstance(item[1], _Leaf)):  # values before mappings
        name = f"{'  ' * depth}{key}:"
        if isinstance(node, _Leaf):
            yield f"{name} {_yaml_value(node.value)}" + (f"  # {node.why}" if node.why else "")
        else:
            yield name
            yield from _tree_lines(node, depth + 1)


def needed_limits(found: Inspection, uses: list[str], params: Params, *, most_too_long: float = MOST_TOO_LONG) -> Limits:
    """Return the limits that the data exceeds, raised far enough to accept it.

    Args:
        uses: of the source. most_too_long: share of a use's rows that `drop` may leave out because they are too long.
    """
    drop = needed_drop(found, uses, params)
    if "too_long" in drop and _too_long(found, uses, params) > most_too_long:
        drop.remove("too_long")
    limits = Limits(drop)
    share, use = dropped_share(found, drop, uses, params.model.max_length)
    if share > params.validation.max_dropped_fraction:
        limits.settings["validation.max_dropped_fraction"] = _above(share, 1.0)
        limits.why["validation.max_dropped_fraction"] = f"{share:.1%} of the {use} data are left out"
    if "preference" in uses and (pairs := found.counts.get("preference")) and pairs.found["pairs"]:
        longer = pairs.chosen_is_longer / pairs.found["pairs"]
        if (bias := abs(longer - 0.5)) > params.validation.max_length_bias:
            limits.settings["validation.max_length_bias"] = _above(bias, 0.5)
            why = f"the chosen response is the longer one in {longer:.0%} of the pairs: training would learn length"
            limits.why["validation.max_length_bias"] = why
    return limits


def _too_long(found: Inspection, uses: list[str], params: Params) -> float:
    """Return the largest share of rows of one use that are too long."""
    return max(found.counts[use].longer_than(params.model.max_length) / found.counts[use].rows for use in uses if use in found.counts)


def needed_drop(found: Inspection, uses: list[str], params: Params) -> list[DropKind]:
    """Kinds of rows of which a use has more than validate_data allows and which `drop` can remove."""
    stopping = {
        kind
        for use, counts in found.counts.items()
        for kind, n in counts.objections(params.model.max_length).items()
        if use in uses and exceeds_limit(kind, n, counts.rows, params)
    }
    return [kind for kind in get_args(DropKind) if kind in stopping]


def exceeds_limit(kind: str, count: int, rows: int, params: Params) -> bool:
    return kind in LIMITS and count / rows > getattr(params.validation, LIMITS[kind])


def dropped_share(found: Inspection, drop: list[DropKind], uses: list[str], max_length: int) -> tuple[float, str]:
    """Return the largest share of one use's rows that prepare_data could leave out, with its use."""
    counted = {use: counts for use, counts in found.counts.items() if use in uses}
    tally = Tally(found.dropped, Counter({use: counts.rows for use, counts in counted.items()}))
    tally.dropped.update({use: counts.dropped(drop, max_length) for use, counts in counted.items()})
    return max(((tally.share(use), use) for use in counted), default=(0.0, ""))


def _above(share: float, highest: float) -> float:
    """Return a limit one to two percentage points above the share, in whole points, since records after the sample may differ a little."""
    return min(highest, (int(100 * share) + 2) / 100)


def yaml_lines(source: SourceConfig) -> str:
    """Return the source as YAML for params.yaml, without keys at their default."""
    first, *others = [f"{key}: {_yaml_value(value)}" for key, value in plain(source).items()]
    return "\n".join(["data:", "  sources:", f"    - {first}", *(f"      {line}" for line in others)])


def plain(source: SourceConfig) -> dict[str, Any]:
    """Return the source's keys in the order in which they are written, without those at their default, but with the weight."""
    fields = type(source).model_fields
    given = source.model_dump()
    rest = [key for key in given if key not in KEYS]
    kept = [key for key in (*KEYS, *rest) if key == "weight" or given[key] != fields[key].get_default(call_default_factory=True)]
    return {key: given[key] for key in kept}


def _yaml_value(value: Any) -> str:
    """Return a value in YAML's flow style, in which JSON strings are valid."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_yaml_value(k)}: {_yaml_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_yaml_value, value)) + "]"
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _WORDS:
        return value
    text = json.dumps(value, ensure_ascii=False)
    return "".join(c if c.isprintable() else f"\\U{ord(c):08X}" for c in text)
