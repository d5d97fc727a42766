"""Parses and validates the registry's tags, which `flows.promote` writes.

Anyone who may push tags can write anything into one. An invalid tag is reported with its problem and left out.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from flows.chain.worktree import git
from flows.registry.objects import Object, read_objects
from flows.registry.signatures import Signature, Signers, verify
from rlhf_core.config import MAX_BYTES, ConfigError, parse_json, shown
from rlhf_core.provenance.file_hashes import folder_sha256

_TAGGER = re.compile(r"(?P<name>[^<]*)<[^>]*> (?P<second>[0-9]+) (?P<sign>[+-])(?P<hours>[0-9]{2})(?P<minutes>[0-9]{2})")
_HASH = r"[0-9a-f]{40,64}"
_HEAD = re.compile(rf"object (?P<commit>{_HASH})\ntype commit\ntag (?P<name>[^\n]+)\ntagger (?P<tagger>[^\n]*)")
# A signature begins, for git, at the last line that starts with one of these.
_SIGNATURE = re.compile(r"^-----BEGIN (?:PGP SIGNATURE|PGP MESSAGE|SIGNED MESSAGE|SSH SIGNATURE)-----", re.MULTILINE)
MAX_NAME = 300  # characters of a tag's name in a message; file systems limit a name to 255 bytes
Verdict = Literal["passed", "rejected", "not needed"]


@dataclass(frozen=True)
class Tag:
    """An annotated tag.

    oid: the tag's own hash; commit: the tagged commit; by: the tagger's name, which nothing verifies; signer: who signed it, None if no
    signature is required; second: Unix time of its creation.
    """

    name: str
    oid: str
    commit: str
    by: str
    at: str
    second: int
    content: dict[str, Any]
    signer: str | None = None


@dataclass(frozen=True)
class BadTag:
    """A tag that is left out, and why. cause: the name of another bad tag that alone invalidates this one."""

    name: str
    problem: str
    cause: str | None = None


@dataclass(frozen=True)
class Version:
    """A version of a model.

    lineage: as rlhf_core/provenance/lineage.py writes it; at: time of registration, ISO 8601; by: the tagger's stated name; signer: who
    signed it.
    """

    artifact: str
    version: str
    commit: str
    by: str
    at: str
    lineage: dict[str, Any]
    signer: str | None = None

    @property
    def md5(self) -> str:
        return self.lineage["md5"]

    @property
    def gate_accuracy(self) -> float | None:
        """The held-out accuracy; None if the gate judged no reward model."""
        return (self.lineage["gate"] or {}).get("accuracy")

    @property
    def gains(self) -> dict[str, float]:
        """The lower bound of its accuracy minus another version's on the same pairs, by the md5 of each version that its gate compared it
        with.
        """
        gate = self.lineage["gate"] or {}
        compared = [gate[role] for role in ("incumbent", "anchor") if gate.get(role)]
        return {found["md5"]: found["low"] for found in compared if found["low"] is not None}

    @property
    def sha256(self) -> str | None:
        """The sha256 of the folder by `rlhf_core.provenance.file_hashes.folder_sha256`; None if it was registered by its md5 only."""
        files = self.lineage.get("sha256")
        return None if files is None else folder_sha256(files)

    @property
    def identity(self) -> str:
        return f"md5 {self.md5}, " + (f"sha256 {self.sha256}" if self.sha256 else "identified by md5 only")

    @property
    def verdict(self) -> Verdict:
        gate = self.lineage["gate"]
        return "rejected" if gate is None else "passed" if gate["passed"] else "rejected" if gate["needed"] else "not needed"

    @property
    def model(self) -> dict[str, str | None]:
        """The identity of the model, which is kept with each decision about it."""
        return {"md5": self.md5, "sha256": self.sha256, "commit": self.commit, "gate": self.verdict}


@dataclass(frozen=True)
class Event:
    """A promotion or a rollback. version: the version promoted from then on, None: nothing; previous: the version promoted before.

    by: stated decider; signer: who signed the tag, where a signature is required.
    override: reason for promoting a model that its gate rejected or that was rolled back.
    model: `Version.model` of the version; None: nothing is promoted, or an older decision, which kept only the name.
    """

    number: int
    action: Literal["promote", "rollback"]
    version: str | None
    previous: str | None
    by: str
    reason: str
    override: str | None
    at: str
    model: dict[str, str | None] | None = None
    signer: str | None = None

    @property
    def who(self) -> str:
        return who(self.by, self.signer)


def who(by: str, signer: str | None) -> str:
    """Return a tag's author, and whether that is stated or signed."""
    if signer is None:
        return f"stated by {by}"
    return f"signed by {signer}" if signer in by else f"signed by {signer}, stated by {by}"


class _Form(BaseModel):
    """The keys of a tag's JSON that are read; others are ignored."""

    model_config = ConfigDict(strict=True)


class _Look(_Form):
    number: int
    level: float


class _Compared(_Form):
    md5: str
    low: float | None


class _Gate(_Form):
    needed: bool
    passed: bool
    message: str
    override: str | None
    accuracy: float | None = Field(default=None, ge=0, le=1)
    look: _Look | None = None
    incumbent: _Compared | None = None
    anchor: _Compared | None = None


class _Alignment(_Form):
    method: str


class _Params(_Form):
    seed: int
    alignment: _Alignment


_Md5 = Annotated[str, Field(pattern=r"^[0-9a-f]{32}\.dir$")]
_Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class _Input(_Form):
    path: str | None = None
    name: str | None = None
    address: str | None = None
    sha256: str | None = None
    commit: str | None = None


class _Lineage(_Form):
    """The part of a lineage that is read, as rlhf_core.provenance.lineage.lineage writes it."""

    path: str
    md5: _Md5
    sha256: dict[str, _Sha256] | None = None
    size: int | None
    files: int | None
    commit: str
    run: str
    data: str | None
    inputs: dict[str, dict[str, _Input | None]] = {}
    parents: dict[str, str]
    params: _Params
    gate: _Gate | None
    packages: dict[str, str]
    reward_model_version: str | None
    previous_version: str | None


class _Model(_Form):
    md5: _Md5
    sha256: _Sha256 | None
    commit: str
    gate: Verdict


class _Event(_Form):
    action: Literal["promote", "rollback"]
    version: str | None
    previous: str | None
    by: str
    reason: str
    override: str | None
    model: _Model | None = None


class ReviewForm(_Form):
    """The JSON of a review's tag."""

    action: Literal["approve", "reject"]
    by: str
    reason: str
    model: _Model


class _Unassignment(_Form):
    action: Literal["unassign"]
    version: str
    because_of: str


def read_tags(root: Path, patterns: Sequence[str], signers: Signers | None = None) -> list[Tag | BadTag]:
    """Read the tags whose refs match one of the patterns, with a fixed number of calls of git.

    Args:
        signers: allowed signers. Each tag then needs a signature, verified with one call of git per tag. None: signatures are ignored.
    """
    # Split at \n alone, and with the name first: a name may contain other line separators and end with a Unicode space.
    listed = git(root, "for-each-ref", "--format=%(refname:strip=2) %(objectname)", *patterns).split("\n")
    refs = [(oid, name) for name, _, oid in (line.partition(" ") for line in listed if line)]
    found = [_read(name, oid, content) for (oid, name), content in zip(refs, read_objects(root, [oid for oid, _ in refs]), strict=True)]
    if signers is None:
        return found
    signatures = verify(root, [tag.oid for tag in found if isinstance(tag, Tag)], signers)
    return [_signed(tag, signatures[tag.oid]) if isinstance(tag, Tag) else tag for tag in found]


def _signed(tag: Tag, signature: Signature) -> Tag | BadTag:
    if signature.signer is None:
        subject = f"tag {shown(tag.name, MAX_NAME)}"
        return BadTag(tag.name, f"{subject}: expected a signature of an allowed signer, got {signature.problem}; don't use it")
    return replace(tag, signer=signature.signer)


def _read(name: str, oid: str, found: Object | None) -> Tag | BadTag:
    try:
        return _parse(name, oid, found)
    except ConfigError as error:
        return BadTag(name, str(error))


def _parse(name: str, oid: str, found: Object | None) -> Tag:
    if found is None or found.kind != "tag":
        raise not_ours(name, "one without its JSON")
    if found.content is None:
        raise not_ours(name, f"one of {found.size} bytes, which is more than {MAX_BYTES}")
    try:
        text = found.content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise not_ours(name, f"one that isn't UTF-8 at byte {error.start}") from error
    headers, _, message = text.partition("\n\n")
    head = _HEAD.fullmatch(headers)
    if head is None:
        raise not_ours(name, "one with other headers")
    if head["name"] != name:
        raise not_ours(name, f"one that was made as {shown(repr(head['name']))} and renamed")
    if ends := [found.start() for found in _SIGNATURE.finditer(message)]:
        message = message[: ends[-1]]
    try:
        content = parse_json(message.partition("\n\n")[2], "its JSON")
    except ConfigError as error:
        raise not_ours(name, f"one without its JSON ({error})") from error
    if not isinstance(content, dict):
        raise not_ours(name, "one with other JSON")
    by, made = _tagger(name, head["tagger"])
    return Tag(name, oid, head["commit"], by, made.isoformat(timespec="seconds"), int(made.timestamp()), content)


def _tagger(tag: str, line: str) -> tuple[str, datetime]:
    """Return the tagger's name and the time."""
    found = _TAGGER.fullmatch(line)
    if found is None:
        raise not_ours(tag, "one without a date")
    zone = timedelta(hours=int(found["hours"]), minutes=int(found["minutes"])) * (-1 if found["sign"] == "-" else 1)
    try:
        return found["name"].removesuffix(" "), datetime.fromtimestamp(int(found["second"]), UTC).astimezone(timezone(zone))
    except (ValueError, OverflowError, OSError) as error:  # a date or a time zone out of range
        raise not_ours(tag, "one with an impossible date") from error


def as_version(artifact: str, tag: Tag) -> Version:
    """Return the version in a tag.

    Raises:
        ConfigError: the tag's content isn't a lineage, or names another commit than the tagged one.
    """
    _check(tag, _Lineage)
    if tag.content["commit"] != tag.commit:
        stated = shown(tag.content["commit"])
        raise ConfigError(
            f"tag {tag.name}: expected it at commit {stated}, as its message says, got {tag.commit}; someone moved it: "
            "`git fetch --tags --force` restores the shared one"
        )
    return Version(artifact, tag.name.partition("@")[2], tag.commit, tag.by, tag.at, tag.content, tag.signer)


def as_event(number: int, tag: Tag) -> Event | None:
    """Return the decision in a tag; None if the tag only removes a version from the stage before the next one enters.

    Raises:
        ConfigError: the tag's content isn't a decision.
    """
    leaves = "!#" in tag.name  # GTO's mark
    if leaves and tag.content.get("action") == "unassign":
        _check(tag, _Unassignment)
        return None
    event = Event(number=number, at=tag.at, signer=tag.signer, **_check(tag, _Event).model_dump())
    if leaves != (event.version is None) or (leaves and event.action != "rollback"):
        raise not_ours(tag.name, f"one by which {shown(repr(event.version))} {'leaves' if leaves else 'enters'} the stage")
    return event


def _check(tag: Tag, form: type[_Form]) -> _Form:
    try:
        return form.model_validate(tag.content)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise not_ours(tag.name, f"another value of {shown(key)} ({shown(first['msg'])})") from error


def not_ours(tag: str, got: str) -> ConfigError:
    """Return the error for an invalid tag. The tag's name is quoted, since users copy the command into a shell.

    No removal is suggested for a decision, since the one before it would become valid; `flows.registry.state` adds the remedy.
    """
    tag = shown(tag, MAX_NAME)
    removal = "" if is_decision(tag) else f"; remove it with `git tag -d {_quoted(tag)}`"
    return ConfigError(f"tag {tag}: expected one made by `rlhf registry`, got {got}{removal}")


def is_decision(tag: str) -> bool:
    """Return whether a registry tag's name is that of an assignment rather than a version."""
    return "#" in tag.partition("@")[0]


def _quoted(tag: str) -> str:
    return f"'{tag}'" if "'" not in tag else shlex.quote(tag)
