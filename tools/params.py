"""Prints params.yaml with every key, including those left at their defaults: rlhf params print, or python -m tools.params."""

from __future__ import annotations

import io
import json
from functools import partial
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from rlhf_core.commands import NONE_GIVEN, Overrides, printed, run_module
from rlhf_core.config import ConfigError, keys_of, overridden, parse_assignment, read_text, with_recipes
from rlhf_core.process import exit_with


@printed()
def print_params(key: str | None = None, /, *, given: Overrides = NONE_GIVEN) -> str:
    """Print params.yaml with every key.

    Args:
        key: a section or key, such as rl.rollout; left out: all.
    """
    overrides = with_recipes(given.recipes, dict(map(parse_assignment, given.assignments)))
    tree = overridden(read_text(Path("params.yaml")), overrides, subject="params.yaml", complete=False)[1].model_dump(mode="json")
    if key and key not in keys_of(tree):
        raise ConfigError(f"{key}: expected a key of params.yaml, got none of that name; `rlhf params print` prints all")
    node = tree
    for part in key.split(".") if key else ():
        node = node[int(part)] if isinstance(node, list) else node[part]
    return _yaml(node) if isinstance(node, dict | list) else json.dumps(node, ensure_ascii=False)


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
