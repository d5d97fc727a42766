"""The lines for `data.sources` of params.yaml."""

from __future__ import annotations

import json
import re
from typing import Any

from rlhf_core.config import SourceConfig

_PLAIN = re.compile(r"(?:\.{0,2}/)*[A-Za-z_][A-Za-z0-9_./-]*")
_WORDS = {"null", "true", "false", "yes", "no", "on", "off", "y", "n"}  # which YAML takes for something else than text
KEYS = ("name", "kind", "path", "subset", "dataset_split", "format", "columns", "label_pattern", "uses", "weight")


def lines(source: SourceConfig) -> str:
    """YAML that `parse_params` reads as this source; keys that have their default are left out."""
    fields = type(source).model_fields
    given = source.model_dump()
    rest = [key for key in given if key not in KEYS]
    kept = [key for key in (*KEYS, *rest) if key == "weight" or given[key] != fields[key].get_default(call_default_factory=True)]
    first, *others = [f"{key}: {_value(given[key])}" for key in kept]
    return "\n".join(["data:", "  sources:", f"    - {first}", *(f"      {line}" for line in others)])


def _value(value: Any) -> str:
    """In YAML's flow style, where JSON's strings are strings."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_value(k)}: {_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _WORDS:
        return value
    text = json.dumps(value, ensure_ascii=False)
    return "".join(c if c.isprintable() else f"\\U{ord(c):08X}" for c in text)
