"""The tags of the registry as values: what `flows.promote` has written, believed in nothing.

Whoever may push tags may write anything into one; a tag that isn't as it was made is refused by its name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from flows.worktree import git
from rlhf_core.config import ConfigError, shown

# The date as it stands in the tag: git itself formats none of the registry's if it can't format one.
_FIELDS = ("%(refname:strip=2)", "%(*objectname)", "%(tagger)", "%(contents)")
_TAGGER = re.compile(r"(?P<name>[^<]*)<[^>]*> (?P<second>[0-9]+) (?P<sign>[+-])(?P<hours>[0-9]{2})(?P<minutes>[0-9]{2})")


@dataclass(frozen=True)
class Tag:
    """An annotated tag. commit: at which it is; second: since 1970, when it was made."""

    name: str
    commit: str
    by: str
    at: str
    second: int
    content: dict[str, Any]


@dataclass(frozen=True)
class Version:
    """lineage: rlhf_core/lineage.py; at: when it was registered, ISO 8601."""

    artifact: str
    version: str
    commit: str
    by: str
    at: str
    lineage: dict[str, Any]

    @property
    def md5(self) -> str:
        return self.lineage["md5"]

    @property
    def gate_accuracy(self) -> float | None:
        """Held-out accuracy; None: no reward model was judged."""
        return (self.lineage["gate"] or {}).get("accuracy")


@dataclass(frozen=True)
class Event:
    """A promotion or a rollback. version: what is promoted since then, None: nothing; previous: what was before.

    override: the reason for which a model was promoted that the gate had rejected or that had been rolled back.
    """

    number: int
    action: Literal["promote", "rollback"]
    version: str | None
    previous: str | None
    by: str
    reason: str
    override: str | None
    at: str


class _Form(BaseModel):
    """What of a tag's JSON is read; there may be more."""

    model_config = ConfigDict(strict=True)


class _Look(_Form):
    number: int
    level: float


class _Gate(_Form):
    needed: bool
    passed: bool
    message: str
    override: str | None
    accuracy: float | None = Field(default=None, ge=0, le=1)
    look: _Look | None = None


class _Alignment(_Form):
    method: str


class _Params(_Form):
    seed: int
    alignment: _Alignment


class _Lineage(_Form):
    """As rlhf_core.lineage.lineage makes it."""

    path: str
    md5: str = Field(pattern=r"^[0-9a-f]{32}\.dir$")
    size: int | None
    files: int | None
    commit: str
    run: str
    data: str | None
    parents: dict[str, str]
    params: _Params
    gate: _Gate | None
    packages: dict[str, str]
    reward_model_version: str | None
    previous_version: str | None


class _Event(_Form):
    action: Literal["promote", "rollback"]
    version: str | None
    previous: str | None
    by: str
    reason: str
    override: str | None


def read_tags(root: Path, patterns: Sequence[str]) -> Iterator[Tag]:
    """The tags of a repository whose refs are like one of the patterns.

    Raises:
        ConfigError: one of them has no message of ours.
    """
    listed = git(root, "for-each-ref", f"--format={'%00'.join(_FIELDS)}%00%01", *patterns)
    for entry in filter(None, (part.strip("\n") for part in listed.split("\0\x01"))):
        name, commit, tagger, message = entry.split("\0")
        try:
            content = json.loads(message.partition("\n\n")[2])
        except (ValueError, RecursionError) as error:
            raise not_ours(name, "one without its JSON") from error
        if not isinstance(content, dict):
            raise not_ours(name, "one with other JSON")
        by, made = _tagger(name, tagger)
        yield Tag(name, commit, by, made.isoformat(timespec="seconds"), int(made.timestamp()), content)


def _tagger(tag: str, line: str) -> tuple[str, datetime]:
    """Who made a tag, and when."""
    found = _TAGGER.fullmatch(line)
    if found is None:
        raise not_ours(tag, "one without a date")
    zone = timedelta(hours=int(found["hours"]), minutes=int(found["minutes"])) * (-1 if found["sign"] == "-" else 1)
    try:
        return found["name"].removesuffix(" "), datetime.fromtimestamp(int(found["second"]), UTC).astimezone(timezone(zone))
    except (ValueError, OverflowError, OSError) as error:  # a date or a zone that there isn't
        raise not_ours(tag, "one with a date that there isn't") from error


def as_version(artifact: str, tag: Tag) -> Version:
    """Raises: ConfigError: the tag says something else, or is at another commit than it says."""
    _check(tag, _Lineage)
    if tag.content["commit"] != tag.commit:
        said = shown(tag.content["commit"])
        raise ConfigError(
            f"tag {tag.name}: expected it at commit {said}, as its message says, got {tag.commit}; someone moved it: "
            "`git fetch --tags --force` brings the shared one back"
        )
    return Version(artifact, tag.name.partition("@")[2], tag.commit, tag.by, tag.at, tag.content)


def as_event(number: int, tag: Tag) -> Event:
    """Raises: ConfigError: the tag says something else."""
    return Event(number=number, at=tag.at, **_check(tag, _Event).model_dump())


def _check(tag: Tag, form: type[_Form]) -> _Form:
    try:
        return form.model_validate(tag.content)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise not_ours(tag.name, f"another value of {shown(key)} ({shown(first['msg'])})") from error


def not_ours(tag: str, got: str) -> ConfigError:
    """The refusal of a tag."""
    return ConfigError(f"tag {tag}: expected one made by `python -m flows.promote`, got {got}; remove it with `git tag -d '{tag}'`")
