"""Overrides of params.yaml for one run, as dotted keys: their check, and their schema for a deployment's form."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import WithJsonSchema

from rlhf_core.config import Params, overridden, read_text


def check(params_file: Path, overrides: dict[str, Any], *, rounds: bool = False) -> Params:
    """Return the params of the file with the overrides laid over them; nothing is written.

    Args:
        rounds: whether they are for a series of rounds of iterative DPO.
    Raises:
        ConfigError: names every key that is unknown, or whose value is invalid or conflicts with another.
    """
    return overridden(read_text(params_file), overrides, subject=params_file.name, rounds=rounds)[1]


def overrides_schema() -> dict[str, Any]:
    """Return the JSON schema of a mapping of dotted keys to values, by which Prefect checks a run's parameters before the run starts."""
    schema = Params.model_json_schema()
    keys: dict[str, Any] = {}

    def describe(node: dict[str, Any], path: tuple[str, ...]) -> None:
        if "$ref" in node:
            node = schema["$defs"][node["$ref"].rsplit("/", 1)[-1]]
        if path:
            keys[".".join(path)] = _leaf_schema(node)
        for choice in (choice for choice in node.get("anyOf", ()) if "$ref" in choice):  # a section or null
            node = schema["$defs"][choice["$ref"].rsplit("/", 1)[-1]]
        for name, child in node.get("properties", {}).items():
            describe(child, (*path, name))

    describe(schema, ())
    return {
        "type": "object",
        "title": "Overrides",
        "description": 'Dotted keys of params.yaml and their values, for example {"rl.algorithm": "grpo"}.',
        "properties": keys,
        "patternProperties": {
            r"^(data\.sources|(rl\.reward|rejection_sampling|iterative|evaluation)\.scorers)\.\d+\.": {},
            r"^rl\.monitor\.\w+(\.|$)": {},
        },
        "additionalProperties": False,
    }


def _leaf_schema(node: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a key. Sections and lists have only a type, since the flow checks their content when it starts."""
    if node.get("type") in ("object", "array"):
        return {"type": node["type"]}
    choices = node.get("anyOf", ())
    if any("$ref" in choice for choice in choices):
        return {"type": ["object", "null"]}
    if [choice.get("type") for choice in choices] == ["array", "null"]:
        return {"type": ["array", "null"]}
    return {k: v for k, v in node.items() if k != "default"}


Overrides = Annotated[dict[str, Any], WithJsonSchema(overrides_schema())]
