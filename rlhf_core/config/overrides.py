"""Sets keys of params.yaml by their dotted names, and keeps its comments and its shared section."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from io import StringIO
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap

from rlhf_core.config.base import RENAMED_KEYS, ConfigError, Section, did_you_mean, keys_of, shown, with_defaults
from rlhf_core.config.params import Params
from rlhf_core.config.reading import (
    check_size,
    forbidden_values,
    load_params,
    parse_params,
    parse_yaml,
    read_text,
    read_yaml,
    read_yaml_text,
)
from rlhf_core.files import replace_text


def apply_overrides(path: Path, overrides: dict[str, Any]) -> Params:
    """Write dotted overrides such as {"rl.algorithm": "grpo"} into params.yaml, comments kept, and check the result.

    Nothing is written when a key is unknown or a value is refused.

    Raises:
        ConfigError: naming the key.
    """
    text, params = overridden(read_text(path), overrides, subject=str(path))
    replace_text(path, text)
    return params


def overridden(
    text: str, overrides: dict[str, Any], *, subject: str, source: str = "override", rounds: bool = False, complete: bool = True
) -> tuple[str, Params]:
    """Return the text of a params.yaml with overrides, and its params. An override of `training` reaches each section that takes it over.

    Args:
        subject: names the text in messages.
        source: names the overrides in messages.
        rounds: for a series of rounds of iterative DPO.
        complete: whether the result must have all that a run needs, a model and data.
    Raises:
        ConfigError: a line for each key that is unknown, or whose value is refused or conflicts with another.
    """
    plain = read_yaml_text(text, subject)
    if not overrides:
        return text, parse_params(plain, subject=subject, rounds=rounds, complete=complete)
    yaml = YAML()
    yaml.preserve_quotes = True
    yaml.width = 4096
    yaml.indent(mapping=2, sequence=4, offset=2)
    yaml.representer.add_representer(type(None), lambda representer, _: representer.represent_scalar("tag:yaml.org,2002:null", "null"))
    tree = yaml.load(text)
    problems = set_keys(tree, overrides)
    check_size(tree, source)
    before, plain = plain, _plain(tree)
    if plain != before and not forbidden_values(plain):  # else the text stays as it is, so that a resumed run has nothing to commit
        written = StringIO()
        yaml.dump(tree, written)
        text = written.getvalue()
        plain = read_yaml_text(text, source)
    return text, parse_params(plain, subject=source, problems=problems, rounds=rounds, complete=complete)


def parse_assignment(text: str) -> tuple[str, Any]:
    """Parses `rl.algorithm=grpo` to ("rl.algorithm", "grpo"); the value is YAML.

    Raises:
        ConfigError: the text has no key or no `=`, or the value is not YAML.
    """
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(
            f"--set {shown(text)}: expected key=value, got no {'key' if equals else '='}; write for example --set rl.algorithm=grpo"
        )
    return key.strip(), parse_yaml(value, f"--set {shown(key)}")


def with_recipes(recipes: Iterable[Path | str], overrides: dict[str, Any]) -> dict[str, Any]:
    """Return the values of all recipes as dotted keys, each laid over those before it, and the overrides over all.

    Raises:
        ConfigError: a recipe can't be read, or it or the overrides set epochs that steps below them would replace.
    """
    values: dict[str, Any] = {}
    for source, layer in (*((f"recipe {shown(str(recipe))}", read_recipe(Path(recipe))) for recipe in recipes), ("--set", overrides)):
        if problems := [f"{source}: {problem}" for problem in _replaced_epochs(layer, values.get)]:
            raise ConfigError("\n".join(problems))
        values |= layer
    return values


def read_recipe(path: Path) -> dict[str, Any]:
    """Return a recipe as dotted keys: a nested mapping laid over params.yaml.

    A list, an empty mapping and a mapping that is a single value replace what is there.
    """
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
    """The params of params.yaml with a recipe laid over them. The recipe may be a whole params.yaml, and must be where `path` is missing.
    The result may name no model and no data.

    Raises:
        ConfigError: naming every key that is unknown, or whose value is refused or conflicts with another.
    """
    if recipe is None or not path.exists():
        return load_params(path if recipe is None else recipe, complete=False)
    return overridden(read_text(path), read_recipe(recipe), subject=str(path), source=shown(str(recipe)), complete=False)[1]


def set_keys(tree: Any, overrides: dict[str, Any]) -> list[str]:
    """Set the known keys of a tree. Returns a line for each unknown key, sorted by key."""
    problems = []
    for dotted, value in sorted(overrides.items()):
        try:
            set_key(tree, dotted, value)
        except ConfigError as error:
            problems.append(str(error))

    def value_at(dotted: str) -> Any:
        """Return the value at a dotted key; None where there is no such key."""
        node = tree
        for part in dotted.split("."):
            node = node.get(part) if isinstance(node, dict) else None
        return node

    return sorted([*problems, *(f"override {problem}" for problem in _replaced_epochs(overrides, value_at))])


def _replaced_epochs(overrides: Mapping[str, Any], value_at: Callable[[str], Any]) -> Iterator[str]:
    """A line for each key `epochs` that has no effect because `steps`, which the same overrides don't set, is a number below them."""
    for key in overrides:
        section, _, last = key.rpartition(".")
        steps = f"{section}.steps"
        if last == "epochs" and steps not in overrides and (number := value_at(steps)) is not None:
            moved = f"; passes over each rollout batch are {section}.ppo_epochs" * (section == "rl")
            yield f"{key}: expected {steps} null, since steps replace epochs, got {number}; set {steps} to null beside it{moved}"


def set_key(tree: Any, dotted: str, value: Any) -> None:
    """Set a key that the tree has, or leaves at its default. Items of lists are addressed by number, as in data.sources.0.weight.

    A plain tree doesn't know which sections took over `training`: set keys of that section with `overridden`.

    Raises:
        ConfigError: there is no such key; with the most similar one.
    """
    assert isinstance(tree, CommentedMap) or not dotted.startswith("training."), f"{dotted}: expected a tree with YAML's merge keys"
    parts = dotted.split(".")
    holder = tree
    for number, part in enumerate(parts):
        last = number == len(parts) - 1
        if isinstance(holder, list) and re.fullmatch("[0-9]{1,9}", part) and int(part) < len(holder):
            if last:
                holder[int(part)] = value
            else:
                holder = holder[int(part)]
        elif isinstance(holder, dict) and (part in holder or _has_default(tree, parts)):
            if last:
                _insert(holder, part, value)
            else:
                others = (section for section in tree.values() if isinstance(section, dict) and section is not holder)
                inherited = any(part in other and other[part] is holder.get(part) for other in others)
                if part not in holder:
                    _insert(holder, part, {})
                elif inherited and isinstance(holder[part], dict):  # a section's own copy of a mapping of `training`, such as lora
                    _insert(holder, part, copy.copy(holder[part]))
                holder = holder[part]
        else:
            raise ConfigError(f"override {shown(dotted)}: {_unknown(tree, holder, dotted, part)}")


def _insert(holder: dict[str, Any], key: str, value: Any) -> None:
    """Set a key. A new key stands first in its section, because the comment behind a section's last key belongs to the next section."""
    if isinstance(holder, CommentedMap) and key not in dict(holder.non_merged_items()):
        holder.insert(0, key, value)
    else:
        holder[key] = value


def _has_default(tree: Any, parts: list[str]) -> bool:
    """Return whether a dotted key exists once every key that the tree leaves out has its default."""
    node = with_defaults(Params, tree)
    for part in parts:
        if isinstance(node, list) and re.fullmatch("[0-9]{1,9}", part) and int(part) < len(node):
            node = node[int(part)]
        elif isinstance(node, dict) and part in node:
            node = node[part]
        else:
            return False
    return True


def _unknown(tree: Any, holder: Any, dotted: str, part: str) -> str:
    """Return the message for a part of a dotted key that its parent lacks: what was expected and what to do."""
    if dotted in RENAMED_KEYS:
        return f"expected {RENAMED_KEYS[dotted]}, got the key's old name; rename it"
    got = f"expected a key of params.yaml, got {shown(part)!r}"
    if isinstance(holder, list):
        return f"{got} of a list; its items are 0 to {len(holder) - 1}"
    where = dotted.split(".")[0]
    in_section = f"the keys of {shown(where)} are in params.yaml" if isinstance(tree.get(where), dict) else "see params.yaml"
    return f"{got}; {did_you_mean(dotted, keys_of(with_defaults(Params, tree))) or in_section}"


def _plain(node: Any) -> Any:
    """ruamel's round-trip containers converted to plain ones, so that strict types accept them."""
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
