"""Keys of params.yaml set by their dotted names, with its comments kept."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from rlhf_core.config.base import ConfigError, Section, shown
from rlhf_core.config.nearest import did_you_mean, keys_of
from rlhf_core.config.params import Params
from rlhf_core.config.reading import check_size, load_params, parse_params, read_yaml


def apply_overrides(path: Path, overrides: dict[str, Any]) -> Params:
    """Write dotted overrides such as {"rl.algorithm": "grpo"} into params.yaml, comments kept, and check the result.

    Nothing is written when a key is unknown or a value is refused.

    Raises:
        ConfigError: naming the key.
    """
    yaml = YAML()
    yaml.preserve_quotes = True
    yaml.width = 4096
    yaml.indent(mapping=2, sequence=4, offset=2)
    yaml.representer.add_representer(type(None), lambda representer, _: representer.represent_scalar("tag:yaml.org,2002:null", "null"))
    read_yaml(path)  # for its error messages
    tree = yaml.load(path.read_text(encoding="utf-8"))
    problems = set_keys(tree, overrides)
    check_size(tree, "override")
    params = parse_params(_plain(tree), subject="override", problems=problems)
    aside = path.with_name(path.name + ".tmp")
    with aside.open("w", encoding="utf-8") as file:
        yaml.dump(tree, file)
    aside.replace(path)
    return params


def read_recipe(path: Path) -> dict[str, Any]:
    """A recipe is a nested mapping laid over params.yaml; lists, empty mappings and those that are one value replace what is there."""
    return dict(_leaves(read_yaml(path), (), Params))


def _leaves(node: dict[str, Any], path: tuple[str, ...], section: type[Section]) -> Iterator[tuple[str, Any]]:
    for key, value in node.items():
        here = (*path, str(key))
        below = section.model_fields[key].annotation if key in section.model_fields else None
        if isinstance(value, dict) and value and isinstance(below, type) and issubclass(below, Section):
            yield from _leaves(value, here, below)
        else:
            yield ".".join(here), value


def load_overlaid(path: Path, recipe: Path | None) -> Params:
    """The params of params.yaml with a recipe laid over them, which may be a whole params.yaml; without params.yaml it has to be one.

    Raises:
        ConfigError: naming every key that is unknown, whose value is refused or doesn't fit the others.
    """
    if recipe is None or not path.exists():
        return load_params(path if recipe is None else recipe)
    tree = read_yaml(path)
    problems = set_keys(tree, read_recipe(recipe))
    return parse_params(tree, subject=shown(str(recipe)), problems=problems)


def set_keys(tree: Any, overrides: dict[str, Any]) -> list[str]:
    """Replace existing keys. Returns what is wrong with the others, a line for each, by key."""
    problems = []
    for dotted, value in sorted(overrides.items()):
        try:
            set_key(tree, dotted, value)
        except ConfigError as error:
            problems.append(str(error))
    return problems


def set_key(tree: Any, dotted: str, value: Any) -> None:
    """Replace an existing key; list items are addressed by their number, as in data.sources.0.weight.

    Raises:
        ConfigError: there is no such key; with the nearest one.
    """
    *parents, last = dotted.split(".")
    node = tree
    for part in [*parents, last]:
        holder = node
        if isinstance(holder, list) and re.fullmatch("[0-9]{1,9}", part) and int(part) < len(holder):
            node = holder[int(part)]
        elif isinstance(holder, dict) and part in holder:
            node = holder[part]
        else:
            raise ConfigError(f"override {shown(dotted)}: expected a key of params.yaml, got {_unknown(tree, holder, dotted, part)}")
    holder[int(last) if isinstance(holder, list) else last] = value


def _unknown(tree: Any, holder: Any, dotted: str, part: str) -> str:
    """What is wrong with a part of a dotted key, and what to do."""
    if isinstance(holder, list):
        return f"{shown(part)!r} of a list; its items are 0 to {len(holder) - 1}"
    where = dotted.split(".")[0]
    in_section = f"the keys of {shown(where)} are in params.yaml" if isinstance(tree.get(where), dict) else "see params.yaml"
    return f"{shown(part)!r}; {did_you_mean(dotted, keys_of(tree)) or in_section}"


def _plain(node: Any) -> Any:
    """ruamel's round-trip containers as plain ones, so that strict types accept them."""
    if isinstance(node, dict):
        return {str(k): _plain(v) for k, v in node.items()}
    if isinstance(node, list):
        return [_plain(v) for v in node]
    if isinstance(node, bool) or node is None:
        return node
    for kind in (int, float, str):
        if isinstance(node, kind):
            return kind(node)
    return node
