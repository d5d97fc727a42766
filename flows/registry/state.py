"""The registry of models: versions, the promoted one, and who decided it and why.

The format is GTO's: annotated git tags, `reward-model@v2.0.0` for a version and `reward-model#prod#3` for the third assignment, so git, GTO
and DVC show the same. After a line for people, a tag's message has JSON: a version's lineage, or who promoted it and why.
Assignments are ordered by their numbers. Invalid tags are left out, and decisions that they could change are refused.
GTO takes the highest version in the stage, and DVC the tag with the latest second. So the old version leaves the stage before the new one
enters it, and no two tags have the same second.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass, replace
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Literal

from flows.registry.evidence import check_version
from flows.registry.signatures import allowed_signers
from flows.registry.tags import BadTag, Event, Tag, Version, as_event, as_version, is_decision, not_ours, read_tags
from rlhf_core.config import ConfigError, shown

ARTIFACTS = ("reward-model", "policy")  # as in dvc.yaml
STAGE = "prod"
State = Literal["promoted", "rolled back", "superseded", "registered"]
RESTORE = "`git fetch --tags --force` from the repository that it was pushed to, or from a backup"

log = logging.getLogger("rlhf.flows")

_VERSION = re.compile(r"[\w-]+@v(?P<number>[1-9][0-9]{0,8})\.0\.0")
_ASSIGNMENT = re.compile(r"[\w-]+#prod!?#(?P<number>[1-9][0-9]{0,8})")


@dataclass(frozen=True)
class Registry:
    """Versions and decisions of one artifact.

    versions: by name, oldest first; events: in order; newest: Unix time of the last tag; bad: tags that were left out.
    """

    artifact: str
    versions: dict[str, Version]
    events: list[Event]
    newest: int
    bad: tuple[BadTag, ...] = ()

    @property
    def current(self) -> Version | None:
        """The promoted version."""
        return self.versions.get(self.events[-1].version or "") if self.events else None

    @property
    def anchor(self) -> Version | None:
        """The first promoted version, replaced by each later one that clearly beats it on the same pairs: the lower bound of the gain in
        accuracy is above 0.

        Versions whose gate judged no model are left out. One that was rolled back is never the anchor, but links a version that was
        compared with it to the anchor before: the sum of both lower bounds counts. The highest accuracy wouldn't do: measured on other
        pairs it is often another model's luck.
        """
        found, rolled_back = None, self.rolled_back
        links: dict[str, float] = {}  # by md5: lower bound of the gain over `found`, of itself and of rolled-back versions
        for name in dict.fromkeys(event.version for event in self.events if event.version in self.versions):
            version = self.versions[name]
            if version.gate_accuracy is None or (found is None and name in rolled_back):
                continue
            gain = max((low + links[md5] for md5, low in version.gains.items() if md5 in links), default=None)
            if name in rolled_back:
                links |= {} if gain is None else {version.md5: gain}
            elif found is None or (gain is not None and gain > 0):
                found, links = version, {version.md5: 0.0}
        return found

    @property
    def rolled_back(self) -> dict[str, Event]:
        """Versions that were rolled back and not promoted again, with the rollback."""
        found: dict[str, Event] = {}
        for event in self.events:
            if event.action == "rollback" and event.previous is not None:
                found[event.previous] = event
            found.pop(event.version or "", None)
        return found

    def state(self, version: str) -> State:
        if self.current is not None and version == self.current.version:
            return "promoted"
        if version in self.rolled_back:
            return "rolled back"
        return "superseded" if any(event.version == version for event in self.events) else "registered"

    def known_state(self, version: str) -> State | Literal["unknown"]:
        """Return the state for a table; `unknown` if a decision was left out, since it could change every version's state."""
        return "unknown" if self.bad_decisions else self.state(version)

    @property
    def bad_decisions(self) -> list[BadTag]:
        return [tag for tag in self.bad if is_decision(tag.name)]

    @property
    def none_known(self) -> str:
        """Why there is no version."""
        if self.bad:
            return f"none; all its tags are bad: {shown(', '.join(tag.name for tag in self.bad), 1000)}"
        return "none; a clone needs its tags: `git fetch --tags`"

    def problems(self) -> list[str]:
        """Return the problems of the tags that were left out. Tags left out because of another one are named with that one."""
        lines = []
        for tag in self.bad:
            if tag.cause is None:
                taken = [other.name for other in self.bad if other.cause == tag.name]
                lines.append(f"{tag.problem}; left out with it: {shown(', '.join(taken), 1000)}" if taken else tag.problem)
        return lines

    def get(self, version: str | None) -> Version:
        """Return a version by its name, or the promoted one for None.

        Raises:
            ConfigError: there is no such version.
        """
        known = ", ".join(self.versions) or self.none_known
        if version is None:
            if self.current is None:
                raise ConfigError(f"{self.artifact}: expected a promoted version, got none (registered: {known}); promote one")
            return self.current
        if version not in self.versions:
            if bad := next((tag for tag in self.bad if tag.name == f"{self.artifact}@{version}"), None):
                raise ConfigError(bad.problem)
            raise ConfigError(f"{self.artifact}: expected a registered version, got {version} (registered: {known}); correct it")
        return self.versions[version]

    def before(self) -> str | None:
        """Return the version that a rollback promotes: the last one before the current one that wasn't rolled back."""
        rolled_back, current = self.rolled_back, self.current
        for event in reversed(self.events):
            if event.version is not None and event.version not in rolled_back and current and event.version != current.version:
                return event.version
        return None

    def check_decisions(self) -> None:
        """Check that every decision could be read.

        Raises:
            ConfigError: a decision's tag was left out, so the promoted version isn't certain.
        """
        if bad := self.bad_decisions:
            raise ConfigError(f"{bad[0].problem}; until then it isn't certain which {self.artifact} is promoted")

    def newest_version(self) -> str | None:
        """Return the name of the newest version; None if there is none.

        Raises:
            ConfigError: the tag of a version that may be newer was left out.
        """
        last = next(reversed(self.versions), None)
        for tag in self.bad:
            found = _VERSION.fullmatch(tag.name)
            if tag.name.startswith(f"{self.artifact}@") and (found is None or int(found["number"]) > version_number(last)):
                raise ConfigError(f"{tag.problem}; until then it isn't certain which version is the newest")
        return last


def version_number(version: str | None) -> int:
    return int(version[1:].partition(".")[0]) if version else 0


def read_registry(root: Path, artifact: str) -> Registry:
    """Read the registry from a repository's tags, for display. Decisions use `read_for_decision`. Imports neither GTO nor DVC.

    Raises:
        ConfigError: there is no such artifact, or the file of allowed signers is missing.
    """
    if artifact not in ARTIFACTS:
        raise ConfigError(f"artifact: expected one of {', '.join(ARTIFACTS)}, got {artifact}; dvc.yaml has them")
    patterns = (f"refs/tags/{artifact}@*", f"refs/tags/{artifact}#{STAGE}#*", f"refs/tags/{artifact}#{STAGE}!#*")
    found = read_tags(root, patterns, allowed_signers(root))
    bad = [tag for tag in found if isinstance(tag, BadTag)]
    tags = [tag for tag in found if isinstance(tag, Tag)]
    versions = _versions(artifact, [tag for tag in tags if not is_decision(tag.name)], bad)
    newest = max((tag.second for tag in tags), default=0)
    events = _events([tag for tag in tags if is_decision(tag.name)], Registry(artifact, versions, [], newest, tuple(bad)), bad)
    return _with_remedies(Registry(artifact, versions, events, newest, tuple(bad)))


def _with_remedies(found: Registry) -> Registry:
    """Add a remedy to the problem of each bad decision. Removing its tag is none, since that could promote a rolled-back version."""
    promoted = found.current.version if found.current else "nothing"
    remedy = f"restore it with {RESTORE}; don't remove a decision: {promoted} would then be promoted"
    return replace(found, bad=tuple(replace(t, problem=f"{t.problem}; {remedy}") if is_decision(t.name) else t for t in found.bad))


def read_for_decision(root: Path, artifact: str) -> Registry:
    """Read the registry for code that depends on the promoted or rolled-back versions. Every bad tag is warned of.

    Raises:
        ConfigError: as `read_registry`; or a decision's tag is invalid.
    """
    found = read_registry(root, artifact)
    for problem in found.problems():
        _warn(problem)
    found.check_decisions()
    return found


@lru_cache(maxsize=1024)
def _warn(problem: str) -> None:
    """Log a problem once per process, although a flow reads the registry several times."""
    log.warning("%s", problem)


def read_promoted(root: Path, artifact: str) -> Version | None:
    """Return the promoted version, with its tag verified against its commit; None if nothing is promoted.

    Raises:
        ConfigError: as `read_for_decision`; or the tag contradicts its commit.
    """
    current = read_for_decision(root, artifact).current
    if current is not None:
        check_version(root, current)
    return current


def _versions(artifact: str, tags: list[Tag], bad: list[BadTag]) -> dict[str, Version]:
    """Versions by name, oldest first.

    Other tags are appended to `bad`: invalid ones, those of a model that already has a version, and those dated before the version before.
    """
    numbered: dict[int, Tag] = {}
    for tag in tags:
        if found := _VERSION.fullmatch(tag.name):
            numbered[int(found["number"])] = tag
        else:
            bad.append(BadTag(tag.name, str(not_ours(tag.name, "one whose name has another form"))))
    versions: dict[str, Version] = {}
    by_md5: dict[str, str] = {}
    for number in sorted(numbered):
        tag = numbered[number]
        try:
            version = as_version(artifact, tag)
            if (same := by_md5.setdefault(version.md5, version.version)) != version.version:  # else a model could escape its rollback
                raise not_ours(tag.name, f"one of the model of {same}, md5 {version.md5}")
            _check_date(tag.name, version.at, next(reversed(versions.values()), None))
            versions[version.version] = version
        except ConfigError as error:
            bad.append(BadTag(tag.name, str(error)))
    return versions


def _events(tags: list[Tag], empty: Registry, bad: list[BadTag]) -> list[Event]:
    """Decisions in order. Invalid tags are appended to `bad`, and those that don't follow from the decisions before them.

    Args:
        empty: the registry without events.
    """
    numbered: dict[int, Tag] = {}
    for tag in tags:
        found = _ASSIGNMENT.fullmatch(tag.name)
        if found is None:
            bad.append(BadTag(tag.name, str(not_ours(tag.name, "one whose name has another form"))))
        elif (other := numbered.setdefault(int(found["number"]), tag)) is not tag:
            bad.append(BadTag(tag.name, str(not_ours(tag.name, f"one with the number of {other.name}"))))
    so_far = empty
    for number in sorted(numbered):
        tag = numbered[number]
        try:
            event = as_event(number, tag)
            if event is not None:
                _check_event(tag, event, so_far)
                so_far = replace(so_far, events=[*so_far.events, event])
        except LeftOut as error:
            bad.append(BadTag(tag.name, str(error), error.cause or _cause(number, bad)))
        except ConfigError as error:
            bad.append(BadTag(tag.name, str(error)))
    return so_far.events


class LeftOut(ConfigError):
    """A decision that is left out because of another tag. `cause` is the bad version's tag; None: an earlier decision."""

    def __init__(self, message: str, cause: str | None = None):
        super().__init__(message)
        self.cause = cause


def _cause(number: int, bad: list[BadTag]) -> str | None:
    """Return the cause of the last bad decision before decision `number`, or that decision itself; None if all of them are valid."""
    before = [(int(found["number"]), tag) for tag in bad if (found := _ASSIGNMENT.fullmatch(tag.name)) and int(found["number"]) < number]
    last = max(before, key=lambda pair: pair[0], default=(0, None))[1]
    return last and (last.cause or last.name)


def _check_event(tag: Tag, event: Event, so_far: Registry) -> None:
    """Check that a decision names known versions, follows from the decisions before it, and is about the model in its version's tag."""
    versions, before = so_far.versions, so_far.current
    if unknown := [name for name in (event.version, event.previous) if name is not None and name not in versions]:
        cause = next((b for b in so_far.bad if b.name == f"{so_far.artifact}@{unknown[0]}"), None)
        why = cause.problem if cause else "a clone needs its tags: `git fetch --tags`"
        refusal = f"tag {tag.name}: expected a registered version, got {shown(repr(unknown[0]))}; {why}"
        raise LeftOut(refusal, cause.name) if cause else ConfigError(refusal)
    if event.previous != (before and before.version):
        was = before.version if before else "nothing"
        got = f"one that replaces {event.previous or 'nothing'} while {was} was promoted, as if a tag was missing"
        raise LeftOut(str(not_ours(tag.name, got)))
    if event.version is None and event.previous is None:
        raise not_ours(tag.name, "one that names no version")
    chosen = versions[event.version or event.previous]
    _check_date(tag.name, event.at, chosen)
    _check_date(tag.name, event.at, so_far.events[-1] if so_far.events else None)
    if tag.commit != chosen.commit:
        raise not_ours(tag.name, f"one at commit {tag.commit[:10]}, which isn't its version's")
    if event.action == "promote" and event.override is None and (refusal := why_not(so_far, chosen)):
        raise not_ours(tag.name, f"a promotion without an override that {chosen.version} needs: {shown(refusal, 1000)}")
    if event.action == "rollback" and event.version is not None and so_far.state(event.version) != "superseded":
        raise not_ours(tag.name, f"a rollback to {event.version}, which is {so_far.state(event.version)}")
    if event.model is not None and event.model != chosen.model:
        key = next(key for key in chosen.model if event.model.get(key) != chosen.model[key])
        raise ConfigError(
            f"tag {tag.name}: expected {chosen.version} to be the model that was decided on, {key} {event.model.get(key)}, got {key} "
            f"{chosen.model[key]} in that version's tag; one of the tags was replaced: `git fetch --tags --force` restores the shared ones"
        )


def _check_date(tag: str, at: str, before: Version | Event | None) -> None:
    """Check that a tag isn't dated before the one that it follows, because ssh-keygen judges an expired key by the date that the tag
    states.

    Raises:
        ConfigError: the tag is dated before the other one.
    """
    if before is not None and datetime.fromisoformat(at) < datetime.fromisoformat(before.at):
        what = f"version {before.version}" if isinstance(before, Version) else f"decision {before.number}"
        raise not_ours(tag, f"one that is dated {at}, before {what} of {before.at}, which it follows")


def why_not(registry: Registry, chosen: Version) -> str | None:
    """Return the reason why a version may not be promoted without an override; None if it may."""
    if (taken_back := registry.rolled_back.get(chosen.version)) is not None:
        why = shown(f"{taken_back.who}: {taken_back.reason}", 1000)
        return f"expected a version that was not rolled back, got one that was, {why}"
    gate = chosen.lineage["gate"]
    if chosen.artifact == "reward-model" and not (gate and gate["passed"]):
        message = shown(gate["message"], 1000) if gate else "there is no gate.json"
        return f"expected one that passed its gate, got one that didn't: {message}"
    return None
