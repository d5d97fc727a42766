"""params.yaml from its file, checked."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from rlhf_core.config.base import ConfigError
from rlhf_core.config.params import Params


def load_params(path: Path | str = "params.yaml") -> Params:
    """Read and check params.yaml.

    Raises:
        ConfigError: the file is missing, is not YAML, or a key is unknown, missing, or of the wrong type or value.
    """
    return parse_params(read_yaml(Path(path)), subject=str(path))


def read_yaml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: expected a readable parameter file, got {error.strerror}; run from the folder that has it") from error
    return read_yaml_text(text, str(path))


def read_yaml_text(text: str, subject: str) -> dict[str, Any]:
    """Args: subject: what the text is of, for messages."""
    try:
        tree = YAML(typ="safe", pure=True).load(text)
    except YAMLError as error:
        raise ConfigError(f"{subject}: expected YAML, got {' '.join(str(error).split())}; fix that line") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{subject}: expected a mapping of sections, got {type(tree).__name__}; see the default params.yaml")
    return tree


def parse_params(tree: dict[str, Any], subject: str = "params") -> Params:
    try:
        return Params.model_validate(tree)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(subject, e) for e in error.errors())) from error


def _explain(subject: str, error: dict[str, Any]) -> str:
    key = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        return f"{subject}: {key}: expected a known key, got one that nothing reads; remove it or correct its spelling"
    if error["type"] == "missing":
        return f"{subject}: {key}: expected a value, got nothing; take it from the default params.yaml"
    if error["type"] == "value_error":
        message = str(error["ctx"]["error"])
        return f"{subject}: {key + '.' if key else ''}{message}"
    expected = re.sub(r"^Input should be ", "", error["msg"])
    return f"{subject}: {key}: expected {expected}, got {error['input']!r}; correct it there or in the override"
