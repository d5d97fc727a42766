"""The registry of models: versions, which of them is promoted, and who decided that and why.

It is GTO's: annotated git tags, `reward-model@v2.0.0` for a version and `reward-model#prod#3` for the third assignment, so that git, GTO
and DVC show the same. The tags' messages hold, as JSON after a line for people, the lineage of a version or who promoted it and why.
Read here by the assignments' numbers. GTO takes the highest version of those in the stage, and DVC the last tag by the second in which
it was made: so the old version leaves the stage before the new one enters it, and no two tags are of the same second.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from flows.tags import Event, Version, as_event, as_version, not_ours, read_tags
from flows.worktree import IDENTITY, git, has_identity
from rlhf_core.config import ConfigError, shown

ARTIFACTS = ("reward-model", "policy")  # as in dvc.yaml
STAGE = "prod"
LOCK_DEADLINE = 60.0  # seconds
State = Literal["promoted", "rolled back", "superseded", "registered"]

_VERSION = re.compile(r"[\w-]+@v(?P<number>[1-9][0-9]{0,8})\.0\.0")
_ASSIGNMENT = re.compile(r"[\w-]+#prod!?#(?P<number>[1-9][0-9]{0,8})")


@dataclass(frozen=True)
class Registry:
    """All that is known of one artifact. versions: by name, oldest first; events: in order; newest: seconds since 1970 of its last tag."""

    artifact: str
    versions: dict[str, Version]
    events: list[Event]
    newest: int

    @property
    def current(self) -> Version | None:
        """The promoted version."""
        return self.versions.get(self.events[-1].version or "") if self.events else None

    @property
    def anchor(self) -> Version | None:
        """Of the versions that were ever promoted and not taken back the one with its gate's highest accuracy; of equal ones the oldest."""
        known = [v for v in self.versions.values() if v.gate_accuracy is not None and self.state(v.version) in ("promoted", "superseded")]
        return max(known, key=lambda v: v.gate_accuracy, default=None)

    @property
    def rolled_back(self) -> dict[str, Event]:
        """Versions that were taken back and not promoted again, and the rollback."""
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

    def get(self, version: str | None) -> Version:
        """A version by its name; None: the promoted one.

        Raises:
            ConfigError: there is none.
        """
        known = ", ".join(self.versions) or "none; a clone needs its tags: `git fetch --tags`"
        if version is None:
            if self.current is None:
                raise ConfigError(f"{self.artifact}: expected a promoted version, got none (registered: {known}); promote one")
            return self.current
        if version not in self.versions:
            raise ConfigError(f"{self.artifact}: expected a registered version, got {version} (registered: {known}); correct it")
        return self.versions[version]

    def before(self) -> str | None:
        """The version to go back to: the last one before the present one that wasn't taken back."""
        rolled_back, current = self.rolled_back, self.current
        for event in reversed(self.events):
            if event.version is not None and event.version not in rolled_back and current and event.version != current.version:
                return event.version
        return None


def read_registry(root: Path, artifact: str) -> Registry:
    """From the tags of a repository; neither GTO nor DVC is imported.

    Raises:
        ConfigError: a tag is not as it was made.
    """
    if artifact not in ARTIFACTS:
        raise ConfigError(f"artifact: expected one of {', '.join(ARTIFACTS)}, got {artifact}; dvc.yaml has them")
    patterns = (f"refs/tags/{artifact}@*", f"refs/tags/{artifact}#{STAGE}#*", f"refs/tags/{artifact}#{STAGE}!#*")
    versions: dict[int, Version] = {}
    events: dict[int, Event] = {}
    newest = 0
    for tag in read_tags(root, patterns):
        newest = max(newest, tag.second)
        if found := _VERSION.fullmatch(tag.name):
            versions[int(found["number"])] = as_version(artifact, tag)
        elif found := _ASSIGNMENT.fullmatch(tag.name):
            if tag.content.get("action") != "unassign":
                events[int(found["number"])] = as_event(int(found["number"]), tag)
        else:
            raise not_ours(tag.name, "one whose name has another form")
    ordered = {versions[n].version: versions[n] for n in sorted(versions)}
    registry = Registry(artifact, ordered, [events[n] for n in sorted(events)], newest)
    for event in registry.events:
        if unknown := [name for name in (event.version, event.previous) if name is not None and name not in ordered]:
            got = f"{shown(repr(unknown[0]))}; a clone needs its tags: `git fetch --tags`"
            raise ConfigError(f"tag {artifact}#{STAGE}#{event.number}: expected a registered version, got {got}")
    return registry


@contextlib.contextmanager
def registry_lock(root: Path) -> Iterator[None]:
    """Held while tags are read and written; of all worktrees of a repository.

    Raises:
        ConfigError: somebody else holds it for too long.
    """
    common = Path(git(root, "rev-parse", "--path-format=absolute", "--git-common-dir"))
    until = time.monotonic() + LOCK_DEADLINE
    with (common / "rlhf-registry.lock").open("a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise ConfigError(f"registry: expected to be free within {LOCK_DEADLINE:.0f} s, got another process at work") from None
                time.sleep(0.05)
        yield


def add_version(root: Path, artifact: str, lineage: dict[str, Any]) -> Version:
    """Under the lock: a tag at the lineage's commit.

    Raises:
        ConfigError: the same model is registered already.
    """
    registry = read_registry(root, artifact)
    if same := next((v for v in registry.versions.values() if v.md5 == lineage["md5"]), None):
        raise ConfigError(f"{artifact}: expected a model that isn't registered yet, got this very model as {same.version}; promote that")
    last = next(reversed(registry.versions), "v0.0.0")
    version = f"v{int(last[1:].partition('.')[0]) + 1}.0.0"
    head = f"{artifact} {version}: md5 {lineage['md5']}, of {lineage['run']}"
    lineage = {**lineage, "previous_version": None if last == "v0.0.0" else last}
    import gto.api

    _next_second(registry)
    message = _message(head, lineage)
    gto.api.register(str(root), artifact, lineage["commit"], version=version, message=message, **_author(root))
    return read_registry(root, artifact).versions[version]


def promote(
    root: Path,
    artifact: str,
    version: str | None,
    *,
    by: str,
    reason: str,
    override: str | None = None,
) -> Event:
    """Make a version the one that is used from now on.

    Args:
        version: None: the newest one.
        override: why one is promoted that its gate rejected, or that was rolled back.
    Raises:
        ConfigError: it may not be promoted, or is already.
    """
    with registry_lock(root):
        registry = read_registry(root, artifact)
        chosen = registry.get(version or next(reversed(registry.versions), "latest"))
        refusal = why_not(registry, chosen)
        if refusal and override is None:
            raise ConfigError(f"{artifact} {chosen.version}: {refusal}; to promote it all the same, say why with --override")
        if registry.current == chosen:
            raise ConfigError(f"{artifact} {chosen.version}: expected one that isn't promoted, got the promoted one; nothing is to do")
        return _assign(root, registry, "promote", chosen.version, by=by, reason=reason, override=override if refusal else None)


def why_not(registry: Registry, chosen: Version) -> str | None:
    """Why a version may not be promoted without an override; None: it may."""
    if (taken_back := registry.rolled_back.get(chosen.version)) is not None:
        return f"expected a version that was not rolled back, got one that was, by {taken_back.by}: {taken_back.reason}"
    gate = chosen.lineage["gate"]
    if chosen.artifact == "reward-model" and not (gate and gate["passed"]):
        return f"expected one that passed its gate, got one that didn't: {gate['message'] if gate else 'there is no gate.json'}"
    return None


def rollback(root: Path, artifact: str, to: str | None, *, by: str, reason: str) -> Event:
    """Take the promoted version back, for an earlier one.

    Args:
        to: None: the one before that wasn't taken back; where there is none, nothing is promoted any more.
    Raises:
        ConfigError: nothing is promoted, or `to` was never promoted or was taken back itself.
    """
    with registry_lock(root):
        registry = read_registry(root, artifact)
        current = registry.get(None)
        if to is not None and registry.state(registry.get(to).version) != "superseded":
            raise ConfigError(
                f"{artifact} {to}: expected one that was promoted before, got one that is {registry.state(to)}; use promote for another"
            )
        target = to or registry.before()
        if target == current.version:
            raise ConfigError(f"{artifact} {to}: expected another version than the promoted one; name an earlier one")
        return _assign(root, registry, "rollback", target, by=by, reason=reason, override=None)


def _assign(root: Path, registry: Registry, action: str, version: str | None, *, by: str, reason: str, override: str | None) -> Event:
    for name, value in (("by", by), ("reason", reason), *((("override", override),) if override is not None else ())):
        if not value.strip():
            raise ConfigError(f"{name}: expected some words, got none; it is kept with the decision")
        if not value.replace("\n", " ").isprintable():
            raise ConfigError(f"{name}: expected words, got {shown(repr(value))}; write them without control characters")
    artifact, previous = registry.artifact, registry.current
    entry = {"action": action, "version": version, "previous": previous and previous.version, "by": by, "reason": reason}
    entry["override"] = override
    head = f"{artifact}: {action}, {entry['previous'] or 'nothing'} -> {version or 'nothing'}, by {by}: {reason}".replace("\n", " ")
    if version is None:
        _tag(root, artifact, previous.version, entry, head, leaves=True)
    else:
        if previous is not None:
            note = {"action": "unassign", "version": previous.version, "because_of": version}
            _tag(root, artifact, previous.version, note, f"{artifact}: {previous.version} makes room for {version}", leaves=True)
        _tag(root, artifact, version, entry, head)
    return read_registry(root, artifact).events[-1]


def _tag(root: Path, artifact: str, version: str, content: dict[str, Any], head: str, *, leaves: bool = False) -> None:
    """A version enters the stage, or leaves it."""
    import gto.api

    _next_second(read_registry(root, artifact))
    options = {"version": version, "message": _message(head, content), "force": True, **_author(root)}
    if leaves:
        gto.api.unassign(str(root), artifact, stage=STAGE, **options)
    else:  # force: GTO takes a version that had the stage before only so
        gto.api.assign(str(root), artifact, STAGE, **options)


def _message(head: str, content: dict[str, Any]) -> str:
    return f"{head}\n\n{json.dumps(content, indent=1, sort_keys=True)}"


def _author(root: Path) -> dict[str, str]:
    """For a repository without a git identity, which GTO can't do with."""
    name, email = (setting.partition("=")[2] for setting in IDENTITY if "=" in setting)
    return {} if has_identity(root) else {"author": name, "author_email": email}


def _next_second(registry: Registry, patience: float = 3.0) -> None:
    """Wait until no tag of the artifact is of this second: GTO orders them by it. Not for a clock that is far behind."""
    until = time.monotonic() + patience
    while time.time() < registry.newest + 1 and time.monotonic() < until:
        time.sleep(0.02)
