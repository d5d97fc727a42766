"""Overrides of params.yaml for one run, as dotted keys: from the command line, a recipe or a deployment's form."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

from pydantic import WithJsonSchema

from rlhf_core.config import ConfigError, Params, overridden, parse_yaml, read_recipe, read_text, shown


def parse_assignment(text: str) -> tuple[str, Any]:
    """`rl.algorithm=grpo` as ("rl.algorithm", "grpo"); the value is YAML.

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
    """The values of the recipes, each laid over those before it, and the overrides over all.

    Raises:
        ConfigError: a recipe can't be read.
    """
    values: dict[str, Any] = {}
    for recipe in recipes:
        values |= read_recipe(Path(recipe))
    return values | overrides


def check(params_file: Path, overrides: dict[str, Any], *, rounds: bool = False) -> Params:
    """The params of the file with the overrides; nothing is written.

    Args:
        rounds: for a series of rounds of iterative DPO.
    Raises:
        ConfigError: names every key that is unknown, or whose value is invalid or conflicts with another.
    """
    return overridden(read_text(params_file), overrides, subject=params_file.name, rounds=rounds)[1]


def overrides_schema() -> dict[str, Any]:
    """JSON schema of a mapping of dotted keys to values. Prefect checks a run's parameters with it before the run starts."""
    schema = Params.model_json_schema()
    keys: dict[str, Any] = {}

    def describe(node: dict[str, Any], path: tuple[str, ...]) -> None:
        if "$ref" in node:
            node = schema["$defs"][node["$ref"].rsplit("/", 1)[-1]]
        if path:
            keys[".".join(path)] = _leaf_schema(node)
        for name, child in node.get("properties", {}).items():
            describe(child, (*path, name))

    describe(schema, ())
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


def _leaf_schema(node: dict[str, Any]) -> dict[str, Any]:
    """Schema of a key. Sections and lists have only a type, since the flow checks their content when it starts."""
    if node.get("type") in ("object", "array"):
        return {"type": node["type"]}
    if any("$ref" in choice for choice in node.get("anyOf", ())):
        return {"type": ["object", "null"]}
    return {k: v for k, v in node.items() if k != "default"}


Overrides = Annotated[dict[str, Any], WithJsonSchema(overrides_schema())]
