"""Prints params.yaml with every key, explains a key, and prints the schema for editors: rlhf params, or python -m tools.params."""

from __future__ import annotations

import io
import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from tabulate import tabulate

from rlhf_core.commands import NONE_GIVEN, Json, Overrides, printed, run_module
from rlhf_core.config import ConfigError, keys_of, overridden, parse_assignment, read_text, with_recipes
from rlhf_core.process import exit_with
from tools.explained import comments_of, explain, pages_about, schema


@printed()
def print_params(key: str | None = None, /, *, given: Overrides = NONE_GIVEN) -> str:
    """Print params.yaml with every key.

    Args:
        key: a section or key, such as rl.rollout; left out: all.
    """
    tree = _tree(given)
    if key and key not in keys_of(tree):
        raise ConfigError(f"{key}: expected a key of params.yaml, got none of that name; `rlhf params print` prints all")
    node = tree
    for part in key.split(".") if key else ():
        node = node[int(part)] if isinstance(node, list) else node[part]
    return _yaml(node) if isinstance(node, dict | list) else json.dumps(node, ensure_ascii=False)


@printed()
def show(key: str, /, *, given: Overrides = NONE_GIVEN, as_json: Json = False) -> str:
    """Explain a key.

    Args:
        key: such as rl.kl.coef; numbers of list items may be left out.
    """
    found = explain(key, comments_of(read_text(Path("params.yaml"))))
    if as_json:
        return json.dumps(asdict(found), indent=1, ensure_ascii=False)
    facts = {
        "type": found.kind,
        "default": "none; params.yaml or a recipe must give it" if found.required else json.dumps(found.default, ensure_ascii=False),
        "value": _value(key, given),
        "reruns": f"{', '.join(found.stages)}; then what depends on their results" if found.stages else "nothing: no result depends on it",
    }
    if pages := pages_about(found.key, Path("docs")):
        facts["pages"] = ", ".join(map(str, pages))
    lines = [found.key, *([found.text] if found.text else []), "", tabulate(facts.items(), tablefmt="plain", disable_numparse=True)]
    return "\n".join(lines) + ("\n\n" + tabulate(found.below.items(), tablefmt="plain") if found.below else "")


@printed()
def print_schema() -> str:
    return json.dumps(schema(comments_of(read_text(Path("params.yaml")))), indent=1, ensure_ascii=False)


def _value(key: str, given: Overrides) -> str:
    """The value in params.yaml with the overrides; of a section or of items of a list, where to read it."""
    node: Any = _tree(given)
    for part in key.split("."):
        if isinstance(node, list) and not (part.isdecimal() and int(part) < len(node)):
            return f"that of each item; see rlhf params print {key.partition(f'.{part}')[0]}"
        node = node[int(part)] if isinstance(node, list) else (node or {}).get(part)
    return f"see rlhf params print {key}" if isinstance(node, dict) else json.dumps(node, ensure_ascii=False)


def _tree(given: Overrides) -> dict[str, Any]:
    overrides = with_recipes(given.recipes, dict(map(parse_assignment, given.assignments)))
    return overridden(read_text(Path("params.yaml")), overrides, subject="params.yaml", complete=False)[1].model_dump(mode="json")


def _yaml(node: Any) -> str:
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = None
    yaml.sort_base_mapping_type_on_output = False
    yaml.width = 140
    yaml.representer.ignore_aliases = lambda _: True
    text = io.StringIO()
    yaml.dump(node, text)
    return text.getvalue().rstrip("\n")


main = partial(run_module, "params print")

if __name__ == "__main__":
    exit_with(main)
