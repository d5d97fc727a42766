"""params.yaml from its file, checked.

What is read here may be anything: every way in which it isn't what it should be ends in a ConfigError that names the file and the
line, or the key. YAML's aliases are followed with a limit, for nine lines of them can stand for a billion values.
"""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from rlhf_core.config.base import COLLECTED, ConfigError, Section, shown
from rlhf_core.config.conflicts import conflicts, conflicts_below, key_of
from rlhf_core.config.credentials import credential_in
from rlhf_core.config.in_use import is_in_use, keys_in_use
from rlhf_core.config.nearest import did_you_mean, section_keys
from rlhf_core.config.params import Params

MAX_BYTES = 2**20  # of a YAML file
MAX_VALUES = 100_000  # in one, aliases followed
MAX_DEPTH = 60
MAX_BRACKETS = 200
MAX_PROBLEMS = 40  # lines of one message
MAX_WHOLE_NUMBER = 2**53  # above it JSON and torch don't keep whole numbers


def load_params(path: Path | str = "params.yaml") -> Params:
    """Read and check params.yaml.

    Raises:
        ConfigError: the file is missing, is not YAML, or a key is unknown, missing, or of the wrong type or value.
    """
    return parse_params(read_yaml(Path(path)), subject=str(path))


def read_yaml(path: Path) -> dict[str, Any]:
    """A YAML file with a mapping in it.

    Raises:
        ConfigError: it can't be read, or holds something else; with the line.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
            size = path.stat().st_size
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{path}: expected a readable parameter file, got {reason}; run from the folder that has it") from error
    if len(content) > MAX_BYTES:
        raise ConfigError(f"{path}: expected at most {MAX_BYTES} bytes, got {size}; is that a parameter file?")
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        got = f"byte {content[error.start]:#04x} at byte {error.start} (line {line})"
        raise ConfigError(f"{path}: expected UTF-8, got {got}; convert it to UTF-8") from error
    return read_yaml_text(text, str(path))


def read_yaml_text(text: str, subject: str) -> dict[str, Any]:
    """Args: subject: what the text is of, for messages."""
    tree = parse_yaml(text, subject)
    if not isinstance(tree, dict):
        raise ConfigError(f"{subject}: expected a mapping of sections, got {type(tree).__name__}; see the default params.yaml")
    return tree


def parse_yaml(text: str, subject: str) -> Any:
    """Any value of YAML, with no more in it than can be walked through.

    Raises:
        ConfigError: it isn't YAML, or is too deep or too large.
    """
    return copy.deepcopy(_parse(text, subject))


@lru_cache(maxsize=16)
def _parse(text: str, subject: str) -> Any:
    """Remembered: a flow asks for the same few files forty times, and each time takes ruamel 0.1 to 0.3 s."""
    if _brackets(text) > MAX_BRACKETS:
        raise ConfigError(f"{subject}: expected YAML, got more than {MAX_BRACKETS} nested brackets; is that a parameter file?")
    try:
        tree = YAML(typ="safe", pure=True).load(text)
    except YAMLError as error:
        raise ConfigError(f"{subject}: expected YAML, got {_place(error)}; fix that line") from error
    except RecursionError as error:
        raise ConfigError(f"{subject}: expected YAML, got one that is nested too deeply to be read; is that a parameter file?") from error
    except Exception as error:  # what ruamel's constructors make of a tag that lies, such as !!int x or a 13th month
        raise ConfigError(f"{subject}: expected YAML, got a value that its tag doesn't fit ({shown(str(error))}); correct it") from error
    check_size(tree, subject)
    return tree


def parse_json(text: str, subject: str) -> Any:
    """Any value of JSON, within the limits of YAML files here.

    Raises:
        ConfigError: it isn't JSON, has a key twice, NaN or an infinity, or is too deep or too large.
    """
    if len(text) > MAX_BYTES:
        raise ConfigError(f"{subject}: expected at most {MAX_BYTES} characters of JSON, got {len(text)}; is that the right file?")
    if _brackets(text) > MAX_BRACKETS:
        raise ConfigError(f"{subject}: expected JSON, got more than {MAX_BRACKETS} nested brackets; is that the right file?")
    try:
        tree = json.loads(text, object_pairs_hook=_different_keys, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{subject}: expected JSON, got {shown(' '.join(str(error).split()))}; restore it") from error
    check_size(tree, subject)
    return tree


def _different_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("the same key twice in one object")
    return found


def _no_number(constant: str) -> None:
    raise ValueError(f"{constant}, which JSON doesn't have")


def _brackets(text: str) -> int:
    """How many are open at once, those in quotes too: with their square grows the time that ruamel takes (2,000: 18 s)."""
    steps = (1 if character in "[{" else -1 for character in text if character in "[]{}")
    return max(accumulate(steps), default=0)


def _place(error: YAMLError) -> str:
    """What is wrong, and where."""
    if isinstance(error, MarkedYAMLError) and error.problem_mark is not None:
        return f"{shown(error.problem or 'no YAML')} in line {error.problem_mark.line + 1}, column {error.problem_mark.column + 1}"
    return shown(" ".join(str(error).split()))


def check_size(tree: Any, subject: str) -> None:
    """Keys are text; not deeper than MAX_DEPTH, and not more than MAX_VALUES with every alias counted where it stands."""
    values, level = 0, [tree]
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for node in level:
            if odd := [key for key in node if not isinstance(key, str)] if isinstance(node, dict) else []:
                raise ConfigError(
                    f"{subject}: expected keys that are text, got {shown(repr(odd[0]))}; put it in quotes, or correct the line"
                )
            below += node.values() if isinstance(node, dict) else node if isinstance(node, list | tuple | set) else ()
            if values + len(below) > MAX_VALUES:
                raise ConfigError(
                    f"{subject}: expected at most {MAX_VALUES} values, got more, aliases counted where they stand; remove some"
                )
        values += len(below)
        level = below
    if level:
        raise ConfigError(f"{subject}: expected a tree, got one that is deeper than {MAX_DEPTH} levels; does an alias hold itself?")


def parse_params(tree: dict[str, Any], subject: str = "params", *, problems: Sequence[str] = (), rounds: bool = False) -> Params:
    """The typed params of a tree.

    Args:
        problems: that are known already, each a line; they are told with those found here.
        rounds: for a series of rounds of iterative DPO, which reads further sections.
    Raises:
        ConfigError: with a line for each key that is unknown or missing, or whose value is refused or doesn't fit the others, by key.
    """
    check_size(tree, subject)
    found = [f"{subject}: {problem}" for problem in _unfit(tree, ())]
    params = None
    if not found:
        try:
            params = Params.model_validate(tree, context={COLLECTED})
            found = [f"{subject}: {shown(conflict, 2000)}" for conflict in conflicts(params, rounds=rounds)]
        except ValidationError as error:
            found = [_explain(subject, e) for e in error.errors()]
            found += [f"{subject}: {shown(conflict, 2000)}" for conflict in _conflicts_of_sound_sections(tree)]
    if params is None or problems or found:
        raise ConfigError(_listed(sorted([*problems, *found], key=lambda line: line.removeprefix(subject).lstrip(": "))))
    return params


def _listed(problems: list[str]) -> str:
    """A line each; of very many the first ones."""
    more = len(problems) - MAX_PROBLEMS
    return "\n".join([*problems[:MAX_PROBLEMS], *([f"and {more} more of the kind"] if more > 0 else [])])


def _conflicts_of_sound_sections(tree: dict[str, Any]) -> Iterator[str]:
    """Where types and keys of some section are wrong: the conflicts inside the others. What holds across sections waits for those."""
    sound: dict[str, Any] = {}
    for name, field in Params.model_fields.items():
        with suppress(ValidationError, TypeError):
            sound[name] = field.annotation.model_validate(tree.get(name), context={COLLECTED}) if _is_section(field.annotation) else None
    if not {"reward", "alignment"} <= set(sound):
        return
    used = keys_in_use(Params.model_construct(**sound))
    found = (conflict for name, section in sound.items() if section is not None for conflict in conflicts_below(section, f"{name}."))
    yield from (conflict for conflict in found if is_in_use(key_of(conflict), used))


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Section)


def _unfit(node: Any, path: tuple[str, ...]) -> list[str]:
    """Of every value that no key can have, whatever its type: what is wrong with it."""
    if isinstance(node, dict):
        return [problem for key, value in node.items() for problem in (*_unfit(key, path), *_unfit(value, (*path, str(key))))]
    if isinstance(node, list):
        return [problem for number, value in enumerate(node) for problem in _unfit(value, (*path, str(number)))]
    expected = None
    if isinstance(node, str) and (found := credential_in(node)):
        where = shown(".".join(_hidden(part) for part in path)) or "a key"
        return [
            f"{where}: expected no credential, got {found}; params are committed, reported and stored: keep it in the environment or in "
            "the file that its library reads (docs/security.md), and make it invalid if it was in a file that others see"
        ]
    if isinstance(node, str) and not _is_text(node):
        expected = "text without control characters and half characters"
    elif isinstance(node, float) and not math.isfinite(node):
        expected = "a finite number"
    elif isinstance(node, int) and abs(node) > MAX_WHOLE_NUMBER:
        expected = "a whole number of at most 2^53"
    return (
        [f"{shown('.'.join(path))}: expected {expected}, got {_shown_value(node)}; correct it there or in the override"] if expected else []
    )


def _hidden(key: str) -> str:
    """A key for a message, unless it is a credential itself."""
    return "***" if credential_in(key) else key


def _is_text(text: str) -> bool:
    return not any((character < " " and character not in "\n\t") or "\ud800" <= character <= "\udfff" for character in text)


def _explain(subject: str, error: dict[str, Any]) -> str:
    key = shown(".".join(str(part) for part in error["loc"]))
    if error["type"] == "extra_forbidden":
        meant = did_you_mean(key, section_keys(Params, item=next((str(part) for part in error["loc"] if isinstance(part, int)), "0")))
        return f"{subject}: {key}: expected a known key, got one that nothing reads; {meant or 'remove it or correct its spelling'}"
    if error["type"] == "missing":
        return f"{subject}: {key}: expected a value, got nothing; take it from the default params.yaml"
    if error["type"] == "value_error":
        message = shown(str(error["ctx"]["error"]), 2000)
        return f"{subject}: {key + '.' if key else ''}{message}"
    expected = re.sub(r"^Input should be ", "", error["msg"])
    meant = did_you_mean(error["input"], _choices(error)) if isinstance(error["input"], str) else ""
    return f"{subject}: {key}: expected {expected}, got {_shown_value(error['input'])}; {meant or 'correct it there or in the override'}"


def _choices(error: dict[str, Any]) -> list[str]:
    """Where one of some words is expected, those."""
    return re.findall(r"'([^']*)'", error.get("ctx", {}).get("expected", "")) if error["type"] == "literal_error" else []


def _shown_value(value: Any) -> str:
    return "a number of thousands of digits" if isinstance(value, int) and value.bit_length() > 10_000 else shown(repr(value))
