"""The page of a registry version for its reviewers: what it is, what changed since the version before, who said what, and how to answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from flows.registry.reviews import Review, read_reviews
from flows.registry.state import Registry
from flows.registry.tags import Event, Version, who
from flows.runs.results import read_side
from rlhf_core.config import ConfigError, with_usual_rates
from rlhf_core.provenance.lineage import named_inputs, trained_from
from rlhf_core.report.differences import Results, figures_that_count, headline, params_that_differ, read_as
from rlhf_core.report.page import page

Change = tuple[str, str, str]
TONES = {"promoted": "good", "rolled back": "bad"}


def render_version(root: Path, found: Registry, version: Version, gate: Mapping[str, str], problem: str | None = None) -> str:
    """Return the HTML page of a version.

    Args:
        gate: the gate's verdict as texts by name.
        problem: contradiction between its tag and its commit; None: there is none.
    """
    reviews = read_reviews(root, found)
    before = _before(found, version)
    rejected = (last := reviews.last(version.version)) is not None and last.answer == "reject"
    state = found.known_state(version.version)
    content = {
        "title": f"{found.artifact} {version.version}",
        "artifact": found.artifact,
        "version": version,
        "state": state,
        "tone": "bad" if rejected or problem else TONES.get(state, "open" if last is None else _tone(last)),
        "sentence": _sentence(version, state, last, problem),
        "problem": problem,
        "facts": _facts(version),
        "gate": gate,
        "entries": _entries(version, reviews.of(version.version), found),
        "bad": [tag.problem for tag in reviews.bad] + found.problems(),
        "before": before,
        **_compared(root, version, before),
    }
    return page("version.html.jinja", {}, content)


def _before(found: Registry, version: Version) -> Version | None:
    """The version to compare with: the promoted one, or for that one the version that was promoted before it; else the last one before."""
    if found.current is not None and found.current != version:
        return found.current
    promotion = next((e for e in reversed(found.events) if e.action == "promote" and e.version == version.version), None)
    name = (promotion and promotion.previous) or version.lineage["previous_version"]
    return found.versions.get(name or "")


def _sentence(version: Version, state: str, last: Review | None, problem: str | None) -> str:
    name = f"{version.artifact} {version.version}"
    if problem:
        return f"{name} contradicts its commit: don’t use it"
    if last is None:
        return f"{name} is {state}, and nobody has reviewed it"
    by = last.by.partition(" <")[0]
    return f"{name} is {state}, and {by} has {'approved' if last.answer == 'approve' else 'rejected'} it"


def _facts(version: Version) -> list[tuple[str, str]]:
    line = version.lineage
    return [
        ("Registered", f"{_time(version.at)}, {who(version.by, version.signer)}"),
        ("Commit", f"{version.commit} ({line['run']})"),
        ("md5", version.md5),
        ("sha256", version.sha256 or "registered by its md5 only"),
        ("Files", f"{line['path']}: {line['files']} files, {line['size']} bytes"),
        ("Data", line["data"] or "none"),
        *((f"Made from {key}", f"{place} {hashed}") for key, place, hashed in named_inputs(line.get("inputs") or {})),
        *((f"Parent {path}", md5) for path, md5 in trained_from(line).items()),
    ]


def _entries(version: Version, reviews: list[Review], found: Registry) -> list[dict[str, str]]:
    """Reviews and decisions about a version in the order of time."""
    events = [event for event in found.events if version.version in (event.version, event.previous)]
    rows = [
        {"at": _time(r.at), "what": "approved" if r.answer == "approve" else "rejected", "who": r.who, "why": r.reason, "tone": _tone(r)}
        for r in reviews
    ] + [{"at": _time(e.at), "what": _decided(e), "who": e.who, "why": _why(e), "tone": "open"} for e in events]
    return sorted(rows, key=lambda row: row["at"])


def _time(at: str) -> str:
    return datetime.fromisoformat(at).astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _tone(review: Review) -> str:
    return "good" if review.answer == "approve" else "bad"


def _decided(event: Event) -> str:
    return f"{'promoted' if event.action == 'promote' else 'rolled back'}: {event.previous or 'nothing'} → {event.version or 'nothing'}"


def _why(event: Event) -> str:
    return event.reason + (f" Override: {event.override}" if event.override else "")


def _compared(root: Path, version: Version, before: Version | None) -> dict[str, Any]:
    """What changed since another version: figures, params, data and models, packages."""
    empty: dict[str, Any] = {"names": None, "rows": [], "read_as": [], "headline": None, "params": [], "made": [], "packages": []}
    if before is None:
        return empty
    one, other = before.lineage, version.lineage
    sides = [_results(root, v) for v in (before, version)]
    figures: dict[str, Any] = {}
    if all(side is not None for side in sides):
        rows = figures_that_count(*sides)
        figures = {"rows": rows, "read_as": read_as(*sides, rows), "headline": headline(*sides, rows)[1]}
    return {
        **empty,
        **figures,
        "names": (before.version, version.version),
        "params": params_that_differ(with_usual_rates(one["params"]), with_usual_rates(other["params"])),
        "made": _changes(_made_of(one), _made_of(other)),
        "packages": _changes(one["packages"], other["packages"]),
    }


def _results(root: Path, version: Version) -> Results | None:
    """The results in a version's commit; None if they aren't here, or aren't a run's."""
    try:
        results = read_side(root, version.commit).results
    except ConfigError:
        return None
    return replace(results, name=version.version) if "evaluation" in results.params else None


def _made_of(line: dict[str, Any]) -> dict[str, str]:
    inputs = {key: hashed for key, _, hashed in named_inputs(line.get("inputs") or {})}
    return {**inputs, "data/prepared": line["data"] or "none", **line["parents"], line["path"]: line["md5"]}


def _changes(one: dict[str, str], other: dict[str, str]) -> list[Change]:
    return [(key, one.get(key, "none"), other.get(key, "none")) for key in sorted({**one, **other}) if one.get(key) != other.get(key)]
