"""Writes versions, promotions and rollbacks to the registry. Each is a tag, made under a lock and verified after it is written."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from flows.chain.worktree import IDENTITY, git, has_identity
from flows.registry.evidence import check_version
from flows.registry.figures import check_accuracy
from flows.registry.objects import failure_text, run_git
from flows.registry.reviews import Answer, Review, read_reviews, refusals
from flows.registry.signatures import allowed_signers, signing, verify
from flows.registry.state import STAGE, Registry, read_for_decision, read_registry, version_number
from flows.registry.tags import Event, Version
from rlhf_core.config import MAX_BYTES, ConfigError, credential_in, shown
from rlhf_core.files import lock_file

log = logging.getLogger("rlhf.flows")

_NUMBER = re.compile(r"#([1-9][0-9]{0,8})$")
MAX_NUMBER = 999_999_999
PATIENCE = 3.0  # seconds to wait for a clock that is behind
LOCK_DEADLINE = 60.0  # seconds


@contextlib.contextmanager
def registry_lock(root: Path) -> Iterator[None]:
    """Holds the lock under which tags are read and written, shared by all worktrees of a repository.

    Raises:
        ConfigError: another process holds it for too long.
    """
    common = Path(git(root, "rev-parse", "--path-format=absolute", "--git-common-dir"))
    with (common / "rlhf-registry.lock").open("a") as file:
        try:
            lock_file(file, LOCK_DEADLINE)
        except TimeoutError as error:
            raise ConfigError(f"registry: {error}; wait for it") from error
        yield


def add_version(root: Path, artifact: str, lineage: dict[str, Any]) -> Version:
    """Tag the lineage's commit as a new version. The caller holds `registry_lock`.

    Raises:
        ConfigError: the same model is registered already.
    """
    registry = read_registry(root, artifact)
    if same := next((v for v in registry.versions.values() if v.md5 == lineage["md5"]), None):
        if lineage.get("sha256") and same.lineage.get("sha256") and lineage["sha256"] != same.lineage["sha256"]:
            raise ConfigError(f"{artifact}: expected different content to have a new md5, got that of {same.version}; don't use this model")
        raise ConfigError(f"{artifact}: expected a model that isn't registered yet, got this very model as {same.version}; promote that")
    last = registry.newest_version()
    version = f"v{version_number(last) + 1}.0.0"
    head = f"{artifact} {version}: md5 {lineage['md5']}, of {lineage['run']}"
    name = f"{artifact}@{version}"
    write_tag(root, name, lineage["commit"], head, {**lineage, "previous_version": last}, after=registry.newest)
    return read_registry(root, artifact).get(version)


def promote(
    root: Path,
    artifact: str,
    version: str | None,
    *,
    by: str,
    reason: str,
    override: str | None = None,
    approved: dict[str, str | None] | None = None,
) -> Event:
    """Promote a version.

    Args:
        version: None: the newest one.
        override: reason for promoting a version that its gate or a review rejected, or that was rolled back.
        approved: the model that a person approved (`Version.model`); None: no approval was requested.
    Raises:
        ConfigError: the version may not be promoted, is already promoted, or its tag contradicts its commit or its held-out scores.
        AnotherModel: the version isn't the approved model.
    """
    with registry_lock(root):
        registry = read_for_decision(root, artifact)
        chosen = registry.get(version or registry.newest_version() or "latest")
        check_approved(chosen, approved)
        check_version(root, chosen)
        if chosen.gate_accuracy is not None and not check_accuracy(root, chosen):
            log.warning("%s %s: its accuracy isn't computed again, since DVC's cache here lacks its scores", artifact, chosen.version)
        refusal = refusals(root, registry, chosen)
        if refusal and override is None:
            raise ConfigError(f"{artifact} {chosen.version}: {refusal}; to promote it anyway, give a reason with --override")
        if registry.current == chosen:
            raise ConfigError(f"{artifact} {chosen.version}: expected one that isn't promoted, got the promoted one; nothing to do")
        return _assign(root, registry, "promote", chosen.version, by=by, reason=reason, override=override if refusal else None)


def review(root: Path, artifact: str, version: str, answer: Answer, *, by: str, reason: str) -> Review:
    """Record a review of a version.

    Raises:
        ConfigError: there is no such version, its tag contradicts its commit, or a name or reason is missing.
    """
    check_words(by=by, reason=reason)
    with registry_lock(root):
        registry = read_registry(root, artifact)
        chosen = registry.get(version)
        check_version(root, chosen)
        known = read_reviews(root, registry)
        known.check(chosen.version)
        number = max((earlier.number for earlier in known.of(chosen.version)), default=0) + 1
        content = {"action": answer, "by": by, "reason": reason, "model": chosen.model}
        head = f"{artifact} {chosen.version}: review {number}, {answer}, stated by {by}: {reason}".replace("\n", " ")
        write_tag(root, f"{artifact}-review-{chosen.version}-{number}", chosen.commit, head, content, after=registry.newest)
        return read_reviews(root, registry).of(chosen.version)[-1]


class AnotherModel(ConfigError):
    """Raised when a version isn't the model that a person approved."""


def check_approved(chosen: Version, approved: dict[str, str | None] | None) -> None:
    """Check that the version's model is the one that was approved.

    Raises:
        AnotherModel: the models differ; names both.
    """
    if approved is not None and approved != chosen.model:
        key = next(key for key in chosen.model if approved.get(key) != chosen.model[key])
        raise AnotherModel(
            f"{chosen.artifact} {chosen.version}: expected the model that was approved, {key} {approved.get(key)}, got {key} "
            f"{chosen.model[key]}: its tag was replaced after the question; request approval again"
        )


def rollback(root: Path, artifact: str, to: str | None, *, by: str, reason: str) -> Event:
    """Roll back the promoted version to an earlier one.

    Args:
        to: None: the previous version that wasn't rolled back; without one, no version stays promoted.
    Raises:
        ConfigError: nothing is promoted, or `to` was never promoted or was itself rolled back.
    """
    with registry_lock(root):
        registry = read_for_decision(root, artifact)
        current = registry.get(None)
        if to is not None and registry.state(registry.get(to).version) != "superseded":
            raise ConfigError(
                f"{artifact} {to}: expected one that was promoted before, got one that is {registry.state(to)}; use promote for another"
            )
        target = to or registry.before()
        if target == current.version:
            raise ConfigError(f"{artifact} {to}: expected another version than the promoted one; name an earlier one")
        if target is not None:
            check_version(root, registry.get(target))
        return _assign(root, registry, "rollback", target, by=by, reason=reason, override=None)


def check_words(**words: str) -> None:
    """Check a decision's texts.

    Raises:
        ConfigError: one is empty, or has control characters or a credential.
    """
    for name, value in words.items():
        if not value.strip():
            raise ConfigError(f"{name}: expected some words, got none; write them, since they are kept with the decision")
        if not value.replace("\n", " ").isprintable():
            raise ConfigError(f"{name}: expected words, got {shown(repr(value))}; write them without control characters")
        if found := credential_in(value):  # later runs copy reasons of rollbacks to params.yaml, which refuses credentials
            raise ConfigError(f"{name}: expected words, got {found}; remove it, since the tag is shared")


def _assign(root: Path, registry: Registry, action: str, version: str | None, *, by: str, reason: str, override: str | None) -> Event:
    check_words(by=by, reason=reason, **({"override": override} if override is not None else {}))
    artifact, previous = registry.artifact, registry.current
    entry = {"action": action, "version": version, "previous": previous and previous.version, "by": by, "reason": reason}
    entry["override"] = override
    entry["model"] = version and registry.versions[version].model
    head = f"{artifact}: {action}, {entry['previous'] or 'nothing'} -> {version or 'nothing'}, stated by {by}: {reason}".replace("\n", " ")
    if version is None:
        _tag(root, registry, previous, entry, head, leaves=True)
    else:
        after = registry.newest
        if previous is not None:
            note = {"action": "unassign", "version": previous.version, "because_of": version}
            after = _tag(root, registry, previous, note, f"{artifact}: {previous.version} makes room for {version}", leaves=True)
        _tag(root, registry, registry.versions[version], entry, head, leaves=False, after=after)
    done = read_registry(root, artifact)
    done.check_decisions()
    return done.events[-1]


def _tag(
    root: Path, registry: Registry, version: Version, content: dict[str, Any], head: str, *, leaves: bool, after: int | None = None
) -> int:
    """Write the tag of a version that enters or leaves the stage. Returns the tag's time in seconds."""
    name = f"{registry.artifact}#{STAGE}{'!' if leaves else ''}#{next_number(root, registry.artifact)}"
    return write_tag(root, name, version.commit, head, content, after=registry.newest if after is None else after)


# Tags are written by git itself, in GTO's form: GTO can't sign the tags that it writes.


def next_number(root: Path, artifact: str) -> int:
    """Return the number of the next assignment: one more than the highest of all stages, as in GTO.

    Raises:
        ConfigError: a tag has the largest possible number.
    """
    names = git(root, "for-each-ref", "--format=%(refname:strip=2)", f"refs/tags/{artifact}#*").splitlines()
    numbered = {int(found[1]): name for name in names if (found := _NUMBER.search(name))}
    last = max(numbered, default=0)
    if last == MAX_NUMBER:
        raise ConfigError(
            f"tag {numbered[last]}: expected a number below {MAX_NUMBER}, got the largest one, which `flows.promote` never writes; note "
            "what `show` and `history` print, remove the tag, and check that they still print the same"
        )
    return last + 1


def write_tag(root: Path, name: str, commit: str, head: str, content: dict[str, Any], *, after: int) -> int:
    """Make an annotated tag, signed if `promotion.allowed_signers` is set.

    Args:
        head: first line of the message, for people. content: written below it as JSON.
        after: Unix time of the artifact's newest tag. The new tag gets a later second, by which GTO and DVC order tags; a decision that is
            dated before the one that it follows is no decision.
    Returns:
        The tag's Unix time.
    Raises:
        ConfigError: git can't write or sign the tag, the key isn't an allowed signer's, or the clock is more than PATIENCE behind. No tag
            is left.
    """
    try:
        text = json.dumps(content, indent=1, sort_keys=True, allow_nan=False)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"tag {name}: expected content that JSON can hold, got {error}; correct it in the commit") from error
    message = f"{head}\n\n{text}\n".encode()
    if len(message) > MAX_BYTES // 2:  # git adds headers and a signature
        raise ConfigError(f"tag {name}: expected at most {MAX_BYTES // 2} bytes, got {len(message)}; check the number of the model's files")
    signers = allowed_signers(root)
    settings, sign_option = signing(signers)
    identity = () if has_identity(root) else IDENTITY
    _wait_for_next_second(name, after)
    done = run_git(root, *identity, *settings, "tag", sign_option, "--cleanup=verbatim", "--file=-", name, commit, content=message)
    if done.returncode:
        key = "; name your key with `git config user.signingKey FILE`" if signers else ""
        raise ConfigError(f"tag {name}: expected git to write it, got: {failure_text(done)}{key}")
    oid, second = git(root, "for-each-ref", "--format=%(objectname) %(taggerdate:unix)", f"refs/tags/{name}").split()
    if signers is not None and (signature := verify(root, [oid], signers)[oid]).signer is None:
        git(root, "update-ref", "-d", f"refs/tags/{name}", oid)
        raise ConfigError(
            f"tag {name}: expected your key to sign it and to be one of {signers.path.name}, got {signature.problem}; nothing was written. "
            "`git config user.signingKey FILE` names your key"
        )
    return int(second)


def _wait_for_next_second(name: str, after: int) -> None:
    until = time.monotonic() + PATIENCE
    while (now := time.time()) < after + 1:
        if time.monotonic() > until:
            newest, here = (datetime.fromtimestamp(second, UTC).isoformat(timespec="seconds") for second in (after, now))
            raise ConfigError(
                f"tag {name}: expected a clock that is past the newest tag, of {newest}, got {here}; set this machine's clock, or, if that "
                "tag was made by a wrong clock, wait until then"
            )
        time.sleep(0.02)
