"""Reads and checks params.yaml and other YAML and JSON files.

Any content is either accepted or refused with a ConfigError that names the file and the line, or the key. The number of values that YAML's
aliases stand for is limited, because nine lines of aliases can stand for a billion values.
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

from rlhf_core.config.base import COLLECTED, MOVED_KEYS, RENAMED_KEYS, ConfigError, Section, did_you_mean, section_keys, shown
from rlhf_core.config.credentials import credential_in
from rlhf_core.config.model import SharedTrainingConfig
from rlhf_core.config.params import Params, conflicts, incomplete, keys_in_use, used_conflicts
from rlhf_core.config.usual import with_usual_rates

MAX_BYTES = 2**20  # of a file
MAX_VALUES = 100_000  # of a file, each alias counted as the values that it stands for
MAX_DEPTH = 60
MAX_BRACKETS = 200  # open at once; ruamel's time grows with the square of that number (2,000: 18 s)
MAX_PROBLEMS = 40  # lines of one message
MAX_WHOLE_NUMBER = 2**53  # JSON and torch don't keep larger whole numbers exactly


def load_params(path: Path | str = "params.yaml", *, complete: bool = True) -> Params:
    """Read and check params.yaml.

    Args:
        complete: whether it must have all that a run needs, a model and data.
    Raises:
        ConfigError: the file is missing, is not YAML, or a key is unknown, missing, or of the wrong type or value.
    """
    return parse_params(read_yaml(Path(path)), subject=str(path), complete=complete)


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file.

    Raises:
        ConfigError: the file can't be read or holds something else, with the line.
    """
    return read_yaml_text(read_text(path), str(path))


def read_text(path: Path) -> str:
    """Return a UTF-8 file of at most MAX_BYTES.

    Raises:
        ConfigError: the file is missing, too large or not UTF-8.
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
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        got = f"byte {content[error.start]:#04x} at byte {error.start} (line {line})"
        raise ConfigError(f"{path}: expected UTF-8, got {got}; convert it to UTF-8") from error


def read_yaml_text(text: str, subject: str) -> dict[str, Any]:
    """Return the mapping in a text; `subject` names the text in messages."""
    tree = parse_yaml(text, subject)
    if not isinstance(tree, dict):
        raise ConfigError(f"{subject}: expected a mapping of sections, got {type(tree).__name__}; see the default params.yaml")
    return tree


def parse_yaml(text: str, subject: str) -> Any:
    """Return the value of a YAML text.

    Raises:
        ConfigError: the text isn't YAML, or its value is too deep or too large.
    """
    return copy.deepcopy(_parse(text, subject))


@lru_cache(maxsize=16)
def _parse(text: str, subject: str) -> Any:
    """Return the value of a YAML text; cached, because a command reads the same few files several times, each a tenth of a second."""
    if _brackets(text) > MAX_BRACKETS:
        raise ConfigError(f"{subject}: expected YAML, got more than {MAX_BRACKETS} nested brackets; is that a parameter file?")
    try:
        tree = YAML(typ="safe", pure=True).load(text)
    except YAMLError as error:
        raise ConfigError(f"{subject}: expected YAML, got {_explain_yaml(error)}; fix that line") from error
    except RecursionError as error:
        raise ConfigError(f"{subject}: expected YAML, got a file that is nested too deeply; is that a parameter file?") from error
    except Exception as error:  # ruamel's constructors raise anything for a wrong tag, such as !!int x
        raise ConfigError(f"{subject}: expected YAML, got a value that its tag doesn't fit ({shown(str(error))}); correct it") from error
    check_size(tree, subject)
    return tree


def parse_json(text: str, subject: str) -> Any:
    """Return the value of a JSON text, within the limits of YAML files.

    Raises:
        ConfigError: the text isn't JSON, has a key twice, NaN or an infinity, or is too deep or too large.
    """
    if len(text) > MAX_BYTES:
        raise ConfigError(f"{subject}: expected at most {MAX_BYTES} characters of JSON, got {len(text)}; is that the right file?")
    if _brackets(text) > MAX_BRACKETS:
        raise ConfigError(f"{subject}: expected JSON, got more than {MAX_BRACKETS} nested brackets; is that the right file?")
    try:
        tree = json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{subject}: expected JSON, got {shown(' '.join(str(error).split()))}; restore it") from error
    check_size(tree, subject)
    return tree


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("the same key twice in one object")
    return found


def _refuse_constant(constant: str) -> None:
    raise ValueError(f"{constant}, which JSON doesn't have")


def _brackets(text: str) -> int:
    """Return the greatest number of brackets that are open at once, including those inside quotes."""
    steps = (1 if character in "[{" else -1 for character in text if character in "[]{}")
    return max(accumulate(steps), default=0)


def _explain_yaml(error: YAMLError) -> str:
    if isinstance(error, MarkedYAMLError) and error.problem_mark is not None:
        return f"{shown(error.problem or 'no YAML')} in line {error.problem_mark.line + 1}, column {error.problem_mark.column + 1}"
    return shown(" ".join(str(error).split()))


def check_size(tree: Any, subject: str) -> None:
    """Refuse keys that aren't text, a depth above MAX_DEPTH and more than MAX_VALUES values.

    Raises:
        ConfigError: naming `subject`.
    """
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
                raise ConfigError(f"{subject}: expected at most {MAX_VALUES} values, aliases included, got more; remove some")
        values += len(below)
        level = below
    if level:
        raise ConfigError(f"{subject}: expected at most {MAX_DEPTH} levels, got more; does an alias contain itself?")


def parse_params(
    tree: dict[str, Any], subject: str = "params", *, problems: Sequence[str] = (), rounds: bool = False, complete: bool = True
) -> Params:
    """Return the typed params of a tree.

    Args:
        problems: lines that are known already; the message lists them with those found here.
        rounds: for a series of rounds of iterative DPO, which reads further sections.
        complete: whether the tree must have all that a run needs, a model and data.
    Raises:
        ConfigError: a line for each key that is unknown or missing, or whose value is refused or conflicts with another, sorted by key.
    """
    check_size(tree, subject)
    found = [f"{subject}: {problem}" for problem in forbidden_values(tree)]
    params = None
    if not found:
        try:
            params = Params.model_validate(tree, context={COLLECTED})
            lacking = incomplete(tree, params, rounds=rounds) if complete else ()
            found = [f"{subject}: {shown(conflict, 2000)}" for conflict in (*lacking, *conflicts(params, rounds=rounds))]
        except ValidationError as error:
            found = [_explain(subject, e) for e in error.errors()]
            found += [f"{subject}: {shown(conflict, 2000)}" for conflict in _conflicts_of_valid_sections(tree)]
    if params is None or problems or found:
        lines = sorted([*problems, *found], key=lambda line: line.removeprefix(subject).lstrip(": "))
        more = len(lines) - MAX_PROBLEMS
        raise ConfigError("\n".join([*lines[:MAX_PROBLEMS], *([f"and {more} more of the kind"] if more > 0 else [])]))
    return params


def _conflicts_of_valid_sections(tree: dict[str, Any]) -> Iterator[str]:
    """The conflicts inside valid sections, where another section has wrong types or keys. Conflicts across sections are left out."""
    valid: dict[str, Any] = {}
    for name, field in Params.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            with suppress(ValidationError, TypeError):
                valid[name] = field.annotation.model_validate(with_usual_rates(tree).get(name), context={COLLECTED})
    if {"sft", "reward", "alignment", "evaluation"} <= set(valid):
        used = keys_in_use(Params.model_construct(**valid))
        for name, section in valid.items():
            yield from used_conflicts(section, f"{name}.", used)


def forbidden_values(node: Any, path: tuple[str, ...] = ()) -> list[str]:
    """Return a line for each value that no key may have: credentials, control characters, infinities and integers beyond 2^53."""
    if isinstance(node, dict):
        return [line for key, value in node.items() for line in (*forbidden_values(key, path), *forbidden_values(value, (*path, str(key))))]
    if isinstance(node, list):
        return [line for number, value in enumerate(node) for line in forbidden_values(value, (*path, str(number)))]
    expected = None
    if isinstance(node, str) and (found := credential_in(node, ".".join(path[-2:]))):
        where = shown(".".join("***" if credential_in(part) else part for part in path)) or "a key"
        return [
            f"{where}: expected no credential, got {found}; params are committed, reported and stored, so keep it in the environment or in "
            "the file that its library reads (docs/security.md), and revoke it if others could read the file"
        ]
    if isinstance(node, str) and any((c < " " and c not in "\n\t") or "\ud800" <= c <= "\udfff" for c in node):
        expected = "text without control characters and half characters"
    elif isinstance(node, float) and not math.isfinite(node):
        expected = "a finite number"
    elif isinstance(node, int) and abs(node) > MAX_WHOLE_NUMBER:
        expected = "a whole number of at most 2^53"
    if expected is None:
        return []
    return [f"{shown('.'.join(path))}: expected {expected}, got {_shown_value(node)}; correct it there or in the override"]


def _explain(subject: str, error: dict[str, Any]) -> str:
    """Return a pydantic error as one line."""
    key = shown(".".join(str(part) for part in error["loc"]))
    if error["type"] == "extra_forbidden":
        if key in RENAMED_KEYS:
            return f"{subject}: {key}: expected {RENAMED_KEYS[key]}, got the key's old name; rename it"
        meant = did_you_mean(key, section_keys(Params, item=next((str(part) for part in error["loc"] if isinstance(part, int)), "0")))
        return f"{subject}: {key}: expected a known key, got one that nothing reads; {meant or 'remove it or correct its spelling'}"
    if error["type"] == "missing":
        if key in MOVED_KEYS:
            return f"{subject}: {key}: expected {MOVED_KEYS[key]}, got nothing; write ppo_epochs: 1, or the number that epochs had"
        shared = len(error["loc"]) == 2 and error["loc"][0] != "training" and error["loc"][1] in SharedTrainingConfig.model_fields
        todo = "take it from the default params.yaml" + (", or take over the section training with `<<: *training`" if shared else "")
        return f"{subject}: {key}: expected a value, got nothing; {todo}"
    if error["type"] == "value_error":
        message = shown(str(error["ctx"]["error"]), 2000)
        return f"{subject}: {key + '.' if key else ''}{message}"
    expected = re.sub(r"^Input should be ", "", error["msg"])
    choices = re.findall(r"'([^']*)'", error.get("ctx", {}).get("expected", "")) if error["type"] == "literal_error" else []
    meant = did_you_mean(error["input"], choices) if isinstance(error["input"], str) else ""
    return f"{subject}: {key}: expected {expected}, got {_shown_value(error['input'])}; {meant or 'correct it there or in the override'}"


def _shown_value(value: Any) -> str:
    return "a number of thousands of digits" if isinstance(value, int) and value.bit_length() > 10_000 else shown(repr(value))
