"""Overrides of params.yaml for one run: from the command line, from a recipe, from a deployment's form. All end as dotted keys."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Annotated, Any

from pydantic import WithJsonSchema

from rlhf_core.config import ConfigError, Params, parse_params, parse_yaml, read_yaml, set_keys, shown


def parse_assignment(text: str) -> tuple[str, Any]:
    """`rl.algorithm=grpo` as ("rl.algorithm", "grpo"); the value is YAML.

    Raises:
        ConfigError: there is no `=`, or the value is not YAML.
    """
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(
            f"--set {shown(text)}: expected key=value, got no {'key' if equals else '='}; write for example --set rl.algorithm=grpo"
        )
    return key.strip(), parse_yaml(value, f"--set {shown(key)}")


def check(params_file: Path, overrides: dict[str, Any], *, rounds: bool = False) -> Params:
    """The params that the overrides would give; nothing is written.

    Args:
        rounds: for a series of rounds of iterative DPO.
    Raises:
        ConfigError: naming every key that is unknown, whose value is refused or doesn't fit the others.
    """
    return overridden(read_yaml(params_file), overrides, subject=params_file.name, rounds=rounds)


def overridden(tree: dict[str, Any], overrides: dict[str, Any], *, subject: str, rounds: bool = False) -> Params:
    """`check` for params that were read; subject: where they come from."""
    changed = copy.deepcopy(tree)
    problems = set_keys(changed, overrides)
    return parse_params(changed, subject="override" if overrides else subject, problems=problems, rounds=rounds)


def overrides_schema() -> dict[str, Any]:
    """JSON schema of a mapping of dotted keys to values, so that Prefect refuses a wrong one when a run is asked for."""
    schema = Params.model_json_schema()
    keys: dict[str, Any] = {}
    _describe(schema, schema, (), keys)
    return {
        "type": "object",
        "title": "Overrides",
        "description": 'Dotted keys of params.yaml and their values, for example {"rl.algorithm": "grpo"}.',
        "properties": keys,
        "patternProperties": {
            r"^(data\.sources|(rl\.reward|rejection_sampling|iterative)\.scorers)\.\d+\.": {},
            r"^rl\.monitor\.\w+(\.|$)": {},
        },
        "additionalProperties": False,
    }


def _describe(node: dict[str, Any], root: dict[str, Any], path: tuple[str, ...], keys: dict[str, Any]) -> None:
    if "$ref" in node:
        node = root["$defs"][node["$ref"].rsplit("/", 1)[-1]]
    if path:
        keys[".".join(path)] = _plain_schema(node)
    for name, child in node.get("properties", {}).items():
        _describe(child, root, (*path, name), keys)


def _plain_schema(node: dict[str, Any]) -> dict[str, Any]:
    """A leaf as it is; what refers to other models only by its type. The flow checks those when it starts."""
    if node.get("type") in ("object", "array"):
        return {"type": node["type"]}
    if any("$ref" in choice for choice in node.get("anyOf", ())):
        return {"type": ["object", "null"]}
    return {k: v for k, v in node.items() if k != "default"}


Overrides = Annotated[dict[str, Any], WithJsonSchema(overrides_schema())]
