"""Reviews of versions: who approved or rejected one, and why. Each is an annotated tag, `policy-review-v2.0.0-1`, signed as the others are.

A review is about a model, not a name. The last one of a version counts: a rejected version isn't promoted without an override, and the flow
`promote` takes an approval for the answer to its question.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from flows.registry.signatures import allowed_signers
from flows.registry.state import Registry, why_not
from flows.registry.tags import BadTag, ReviewForm, Tag, Version, read_tags, who
from rlhf_core.config import ConfigError, shown

Answer = Literal["approve", "reject"]
_NAME = re.compile(r"(?P<artifact>[\w-]+)-review-(?P<version>v[1-9][0-9]{0,8}\.0\.0)-(?P<number>[1-9][0-9]{0,8})")


@dataclass(frozen=True)
class Review:
    """One review. by: stated reviewer; signer: who signed the tag, where a signature is required."""

    number: int
    version: str
    answer: Answer
    by: str
    reason: str
    at: str
    signer: str | None = None

    @property
    def who(self) -> str:
        return who(self.by, self.signer)

    @property
    def line(self) -> str:
        return f"{'approved' if self.answer == 'approve' else 'rejected'}, {self.who}: {self.reason}"


@dataclass(frozen=True)
class Reviews:
    """The reviews of an artifact's versions, oldest first, and the tags that were left out."""

    by_version: dict[str, list[Review]]
    bad: tuple[BadTag, ...] = ()

    def of(self, version: str) -> list[Review]:
        return self.by_version.get(version, [])

    def last(self, version: str) -> Review | None:
        return (self.of(version) or [None])[-1]

    def check(self, version: str) -> None:
        """Check that every review of a version could be read.

        Raises:
            ConfigError: a tag was left out, which may be a rejection.
        """
        for tag in self.bad:
            if (found := _NAME.fullmatch(tag.name)) is None or found["version"] == version:
                raise ConfigError(f"{tag.problem}; until then it isn't certain whether {version} was rejected")


def read_reviews(root: Path, registry: Registry) -> Reviews:
    """Read the reviews of a registry's versions from the repository's tags."""
    found: dict[str, list[Review]] = {}
    bad: list[BadTag] = []
    for tag in read_tags(root, [f"refs/tags/{registry.artifact}-review-*"], allowed_signers(root)):
        try:
            review = _review(tag, registry)
            found.setdefault(review.version, []).append(review)
        except ConfigError as error:
            bad.append(BadTag(tag.name, str(error)))
    return Reviews({version: sorted(reviews, key=lambda r: r.number) for version, reviews in found.items()}, tuple(bad))


def _review(tag: Tag | BadTag, registry: Registry) -> Review:
    """Return the review in a tag.

    Raises:
        ConfigError: the tag isn't a review of the model that its version's tag has.
    """
    if isinstance(tag, BadTag):
        raise ConfigError(tag.problem)
    name, subject = _NAME.fullmatch(tag.name), f"tag {shown(tag.name)}"
    version = None if name is None else registry.versions.get(name["version"])
    if name is None or version is None:
        raise ConfigError(f"{subject}: expected a review of a registered version, got another name; remove it with `git tag -d`")
    try:
        form = ReviewForm.model_validate(tag.content)
    except ValidationError as error:
        raise ConfigError(f"{subject}: expected one made by `rlhf registry review`, got {shown(error.errors()[0]['msg'])}") from error
    if tag.commit != version.commit or form.model.model_dump() != version.model:
        raise ConfigError(
            f"{subject}: expected a review of the model of {version.version}, {version.identity}, got one of another model; "
            "`git fetch --tags --force` restores shared tags"
        )
    return Review(int(name["number"]), version.version, form.action, form.by, form.reason, tag.at, tag.signer)


def refusals(root: Path, registry: Registry, version: Version) -> str | None:
    """Return every reason why a version may not be promoted without an override, of its gate, its history and its reviews; None if it may.

    Raises:
        ConfigError: a review can't be read.
    """
    found = [reason for reason in (why_not(registry, version), rejected(root, registry, version)) if reason]
    return "; ".join(found) or None


def rejected(root: Path, registry: Registry, version: Version) -> str | None:
    """Return why a version may not be promoted by its reviews; None if it may.

    Raises:
        ConfigError: a review can't be read.
    """
    reviews = read_reviews(root, registry)
    reviews.check(version.version)
    last = reviews.last(version.version)
    if last is None or last.answer == "approve":
        return None
    return f"expected a version that no review rejects, got one that was {shown(last.line, 1000)}"
