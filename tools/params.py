"""Prints params.yaml with every key, including those left at their defaults.

python -m tools.params rl.rollout
python -m tools.params --params recipes/clerk.yaml --set rl.algorithm=ppo
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from ruamel.yaml import YAML

from rlhf_core.config import ConfigError, keys_of, overridden, parse_assignment, read_text, with_recipes
from rlhf_core.process import exit_with


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.params", description=__doc__.partition("\n")[0])
    parser.add_argument("key", nargs="?", help="a section or key, such as rl.rollout; left out: all")
    parser.add_argument("--params", type=Path, action="append", default=[], help="recipe laid over params.yaml; repeat for several")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="assignments")
    arguments = parser.parse_args()
    try:
        overrides = with_recipes(arguments.params, dict(map(parse_assignment, arguments.assignments)))
        tree = overridden(read_text(Path("params.yaml")), overrides, subject="params.yaml", complete=False)[1].model_dump(mode="json")
    except ConfigError as error:
        sys.exit(str(error))
    if arguments.key and arguments.key not in keys_of(tree):
        sys.exit(f"{arguments.key}: expected a key of params.yaml, got none of that name; `python -m tools.params` prints all")
    node = tree
    for part in arguments.key.split(".") if arguments.key else ():
        node = node[int(part)] if isinstance(node, list) else node[part]
    if not isinstance(node, dict | list):
        print(json.dumps(node, ensure_ascii=False))
        return
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = None
    yaml.sort_base_mapping_type_on_output = False
    yaml.width = 140
    yaml.representer.ignore_aliases = lambda _: True
    yaml.dump(node, sys.stdout)


if __name__ == "__main__":
    exit_with(main)
