"""What each key of params.yaml means, by the typed models, their docstrings and the comments of params.yaml; and the schema for editors.

`rlhf params schema > params.schema.json` writes the committed schema anew.
"""

from __future__ import annotations

import ast
import inspect
import io
import itertools
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from rlhf_core.config import STAGE_SECTIONS, ConfigError, Params, Section, SharedTrainingConfig
from rlhf_core.config.base import did_you_mean, section_keys, subsection

SCHEMA = Path("params.schema.json")
METHOD = "${alignment.method}"  # in STAGE_SECTIONS: the section of the method
METHODS = ("rl", "dpo", "kto", "rejection_sampling", "conditional_sft", "external")
_KEYS = "[a-z][a-z0-9_]*(?:, [a-z][a-z0-9_]*)*"
_ENTRY = re.compile(rf"^({_KEYS}): (.*)$")
_LATER_ENTRY = re.compile(rf"(?<=\. )({_KEYS}): ")


@dataclass(frozen=True)
class Explanation:
    """A key of params.yaml.

    text: what it does; empty where only its name says it. kind: its type and limits. default: None if params.yaml must have the key.
    stages: those that run again when it changes. below: keys of a section with their texts.
    """

    key: str
    text: str
    kind: str
    required: bool
    default: Any
    stages: tuple[str, ...]
    below: dict[str, str]


def explain(key: str, comments: dict[str, str]) -> Explanation:
    """What a key means; numbers of list items may be left out.

    Args:
        comments: of params.yaml, from `comments_of`.
    Raises:
        ConfigError: there is no such key.
    """
    parts = [part for part in key.split(".") if not part.isdecimal()]
    owner, field = _field(parts)
    path = ".".join(parts)
    below, is_list = subsection(field.annotation)
    default = None if field.is_required() else field.get_default(call_default_factory=True)
    return Explanation(
        path,
        _text(owner, parts[-1], path, comments),
        "list of sections" if is_list and below else "section" if below else _kind(owner.model_json_schema()["properties"][parts[-1]]),
        field.is_required(),
        default.model_dump(mode="json") if isinstance(default, Section) else default,
        tuple(_rerun(path)),
        {name: _text(below, name, f"{path}.{name}", comments) for name in below.model_fields} if below else {},
    )


def _field(parts: list[str]) -> tuple[type[Section], FieldInfo]:
    """The field and the section that has it."""
    owner: type[Section] | None = Params
    for place, part in enumerate(parts):
        if owner is None or part not in owner.model_fields:
            key = ".".join(parts)
            hint = did_you_mean(key, (re.sub(r"\.0\b", "", known) for known in section_keys(Params)))
            raise ConfigError(f"{key}: expected a key of params.yaml, got none of that name; {hint or '`rlhf params print` prints all'}")
        field = owner.model_fields[part]
        if place == len(parts) - 1:
            return owner, field
        owner, _ = subsection(field.annotation)
    raise ConfigError("key: expected a key of params.yaml, got none; `rlhf params print` prints all")


def _text(owner: type[Section], name: str, path: str, comments: dict[str, str]) -> str:
    """A key's comment in params.yaml, else its entry in the section's docstring, else the comment at its field, else its own section's
    first sentences.
    """
    below, _ = subsection(owner.model_fields[name].annotation)
    own = _docstring(below).split("\n\n")[0].replace("\n", " ") if below else ""
    shared = comments.get(f"training.{name}") if issubclass(owner, SharedTrainingConfig) else None
    return comments.get(path) or shared or _entries(owner).get(name) or _comment_at(owner, name) or own


def _docstring(section: type[Section]) -> str:
    return inspect.cleandoc(section.__dict__.get("__doc__") or "")


def _entries(section: type[Section]) -> dict[str, str]:
    """What docstrings of a section and of those that it extends say of single keys: sentences such as `key, key: text`."""
    found: dict[str, str] = {}
    for owner in reversed([one for one in section.__mro__ if issubclass(one, Section)]):
        names: list[str] = []
        for line in (part for whole in _docstring(owner).splitlines() for part in _parts(whole, owner)):
            entry = _ENTRY.match(line)
            names = entry[1].split(", ") if entry else names if line.strip() else []
            for name in names:
                found[name] = entry[2] if entry else f"{found[name]} {line.strip()}"
    return found


def _comment_at(section: type[Section], name: str) -> str | None:
    """What the comment behind a field of a section, or else above it, says, or the description of a field that an algorithm has."""
    owners = (owner for owner in section.__mro__ if name in inspect.get_annotations(owner))
    return section.model_fields[name].description or _own_comments(next(owners)).get(name)


@cache
def _own_comments(section: type[Section]) -> dict[str, str]:
    try:
        source = inspect.getsource(section)
    except OSError:  # an algorithm's, made of its line in ALGORITHMS
        return {}
    tokens = [token for token in tokenize.generate_tokens(io.StringIO(source).readline) if token.type == tokenize.COMMENT]
    comments = {token.start[0]: token.string.lstrip("# ") for token in tokens if "noqa" not in token.string}
    alone = {token.start[0] for token in tokens if token.line.lstrip().startswith("#")}
    found: dict[str, str] = {}
    for node in ast.parse(source).body[0].body:
        if not isinstance(node, ast.AnnAssign):
            continue
        behind = [comments[line] for line in range(node.lineno, node.end_lineno + 1) if line in comments]
        above = list(itertools.takewhile(alone.__contains__, range(node.lineno - 1, 0, -1)))
        if words := behind or [comments[line] for line in reversed(above) if line in comments]:
            found[node.target.id] = " ".join(words)
    return found


def _parts(line: str, section: type[Section]) -> Iterator[str]:
    """Yield the line in parts, which begin where a sentence is the entry of keys of the section."""
    start = 0
    for later in _LATER_ENTRY.finditer(line):
        if all(name in section.model_fields for name in later[1].split(", ")):
            yield line[start : later.start()].rstrip()
            start = later.start()
    yield line[start:]


def comments_of(text: str) -> dict[str, str]:
    """The comment at the end of a key's line in params.yaml, else the one above it, by dotted keys."""
    found: dict[str, str] = {}
    path: list[tuple[int, str]] = []
    above: list[str] = []
    for line in text.splitlines():
        key = re.match(r"( *)([a-z][a-z0-9_]*):(.*)$", line)
        if key is None:
            above = [*above, line.strip().lstrip("# ")] if line.strip().startswith("#") else []
            continue
        path = [*((depth, name) for depth, name in path if depth < len(key[1])), (len(key[1]), key[2])]
        comment = re.search(r"\s#\s+(.*)$", key[3])
        if words := comment[1] if comment else " ".join(above):
            found[".".join(name for _, name in path)] = words
        above = []
    return found


def pages_about(key: str, folder: Path) -> list[Path]:
    """The pages that name a key, or its end of two names and more, in backticks."""
    parts = key.split(".")
    names = {".".join(parts[place:]) for place in range(max(1, len(parts) - 1))}
    named = re.compile(rf"`(?:{'|'.join(map(re.escape, names))})(?![\w.])[^`\n]*`")
    return [page for page in sorted(folder.glob("*.md")) if named.search(page.read_text(encoding="utf-8"))]


def _rerun(key: str) -> Iterator[str]:
    """The stages of dvc.yaml that depend on a key; for keys of a method's section, with the method."""
    if key.partition(".")[0] == "training":
        yield "those of each section that takes the value over"
        return
    for stage, sections in STAGE_SECTIONS.items():
        names = ("alignment.method" if section == METHOD else section for section in sections)
        if any(_overlaps(key, name) for name in names):
            yield stage
        elif METHOD in sections and key.partition(".")[0] in METHODS:
            yield f"{stage} (with alignment.method: {key.partition('.')[0]})"


def _overlaps(key: str, section: str) -> bool:
    return f"{key}.".startswith(f"{section}.") or f"{section}.".startswith(f"{key}.")


def _kind(schema: dict[str, Any]) -> str:
    """Type and limits as text."""
    if "anyOf" in schema:
        return " or ".join(_kind(one) for one in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        return " | ".join(map(str, schema.get("enum", [schema.get("const")])))
    limits = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below", "pattern": "like"}
    parts = [f"{words} {schema[name]}" for name, words in limits.items() if name in schema]
    of = f" of {_kind(schema['items'])}" if isinstance(schema.get("items"), dict) else ""
    return ", ".join([schema.get("type", "section").replace("array", "list") + of, *parts])


def schema(comments: dict[str, str]) -> dict[str, Any]:
    """The JSON schema of params.yaml and of recipes, in which any key may be left out, with the keys' explanations.

    Args:
        comments: of params.yaml, from `comments_of`.
    """
    tree = Params.model_json_schema()
    _tidy(tree)
    paths = {Params: ""} | {section: path for path, section in _sections(Params, "")}
    for section, path in paths.items():
        described = tree if section is Params else tree["$defs"].get(section.__name__, {})
        for name, field in described.get("properties", {}).items():
            if text := _text(section, name, f"{path}{name}", comments):
                field["description"] = text
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "params.yaml and recipes"} | tree


def _sections(section: type[Section], path: str) -> Iterator[tuple[str, type[Section]]]:
    """Every section below one, with the prefix of its keys."""
    for name, field in section.model_fields.items():
        below, _ = subsection(field.annotation)
        if below is not None:
            yield f"{path}{name}.", below
            yield from _sections(below, f"{path}{name}.")


def _tidy(node: Any) -> None:
    """Remove what an editor shouldn't ask for or show: required keys and titles made of names."""
    if isinstance(node, dict):
        for name in ("required", "title"):
            if not isinstance(node.get(name), dict):
                node.pop(name, None)
        for value in node.values():
            _tidy(value)
    elif isinstance(node, list):
        for value in node:
            _tidy(value)
