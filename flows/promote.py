"""The model registry's command line: rlhf registry, or python -m flows.promote.

Exit codes: 0 done, 2 refused, with the reason.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter
from tabulate import tabulate

from flows.chain.worktree import git
from flows.registry import decisions, versions
from flows.registry.evidence import GateProblem, check_version, gates
from flows.registry.reviews import Review, Reviews, read_reviews
from flows.registry.state import ARTIFACTS, Registry, read_registry
from flows.registry.tags import Event, Version, who
from rlhf_core.commands import GivenPath, Json, printable, printed, run_module
from rlhf_core.config import ConfigError
from rlhf_core.paths import PROMOTED, REPORTS, REWARD_MODEL
from rlhf_core.provenance.lineage import evaluated_by_reward_model, learned_from_reward_model, named_inputs, trained_from

SHORT = 10  # characters of a hash in a table
SHORT_INPUT = 12  # of the hash of an external input


Opened = Annotated[bool, Parameter("--open", negative_bool="no-")]
Artifact = Annotated[Literal[tuple(ARTIFACTS)], Parameter(help="Whose versions.")]


@printed()
def register(artifact: Artifact, /, *, run: str | None = None, round_: Annotated[int | None, Parameter("--round")] = None) -> str:
    """Make the model of a run's last commit a version.

    Args:
        run: the run in runs/RUN; without it the current folder.
        round_: the policy of this round, if RUN is a series of iterative DPO.
    """
    version = versions.register(Path.cwd(), artifact, run, round_)
    gate = "".join(f"{name.capitalize()}: {text}\n" for name, text in gate_facts(version).items())
    return (
        f"Registered {artifact} {version.version}: "
        f"commit {version.commit[:SHORT]} of {version.lineage['run']}, {version.identity}\n{gate}{share(artifact, version.version)}"
    )


@printed()
def show(artifact: Artifact | None = None, version: str | None = None, /, *, as_json: Json = False) -> str:
    """Show all versions, or one in detail.

    Args:
        version: for example v2.0.0; `promoted` for the promoted one.
    """
    root = Path.cwd()
    if artifact is None:
        if as_json:
            return json.dumps({name: _described(root, _read(root, name)) for name in ARTIFACTS}, indent=1)
        return "\n\n".join(_all_versions(root, _read(root, name), f"{name}\n") for name in ARTIFACTS)
    found = _read(root, artifact)
    if version is None:
        return json.dumps(_described(root, found), indent=1) if as_json else _all_versions(root, found)
    if version == "promoted":
        found.check_decisions()
    one = found.get(None if version == "promoted" else version)
    problem = problem_of(root, one)
    _warn(filter(None, [problem]))
    reviews = _reviews(root, found).of(one.version)
    return json.dumps(describe(found, one, problem, reviews), indent=1) if as_json else summary(found, one, problem, reviews)


def _reviews(root: Path, found: Registry) -> Reviews:
    """Return the reviews, after a warning of each tag that was left out."""
    reviews = read_reviews(root, found)
    _warn(tag.problem for tag in reviews.bad)
    return reviews


def _described(root: Path, found: Registry) -> list[dict[str, Any]]:
    """Return all versions as JSON."""
    texts, reviews = _gate_problems(root, found)[1], _reviews(root, found)
    return [describe(found, version, texts[version.version], reviews.of(version.version)) for version in found.versions.values()]


def _all_versions(root: Path, found: Registry, title: str = "") -> str:
    """Return the table of all versions, below the title if there are any."""
    return (title if found.versions else "") + versions_table(found, _gate_problems(root, found)[0])


def _gate_problems(root: Path, found: Registry) -> tuple[dict[str, GateProblem | None], dict[str, str | None]]:
    """Return the problems of the versions' verdicts, and their texts, which are warned of."""
    problems = gates(root, list(found.versions.values()))
    texts = {name: problem and problem.message for name, problem in problems.items()}
    _warn(filter(None, texts.values()))
    return problems, texts


def _read(root: Path, artifact: str) -> Registry:
    """Return the registry, after a warning of each tag that was left out."""
    found = read_registry(root, artifact)
    _warn(found.problems())
    return found


def _warn(problems: Iterable[str]) -> None:
    for problem in problems:
        print(printable(f"warning: {problem}"), file=sys.stderr)


def problem_of(root: Path, version: Version) -> str | None:
    """Return the contradiction between a version's tag and its commit; None if they agree."""
    try:
        check_version(root, version)
    except ConfigError as error:
        return str(error)
    return None


@printed()
def promote(artifact: Artifact, version: str | None = None, /, *, reason: str, by: str | None = None, override: str | None = None) -> str:
    """Make a version the promoted one.

    Args:
        version: for example v2.0.0; without it the newest.
        reason: kept with the decision.
        by: who decides; without it the name and address from git's settings.
        override: why a model is promoted that its gate or a review rejected, or that was rolled back; kept with the decision.
    """
    root = Path.cwd()
    event = decisions.promote(root, artifact, version, by=by or identity(root), reason=reason, override=override)
    return decided(artifact, event)


@printed()
def review(
    artifact: Artifact,
    version: str,
    /,
    *,
    approve: Annotated[bool, Parameter("--approve", negative_bool="", negative="--reject")],
    reason: str,
    by: str | None = None,
) -> str:
    """Approve or reject a version.

    Args:
        version: for example v2.0.0.
        approve: whether it may be used; --reject: it may not be promoted.
        reason: kept with the review.
        by: who reviews; without it the name and address from git's settings.
    """
    root = Path.cwd()
    done = decisions.review(root, artifact, version, "approve" if approve else "reject", by=by or identity(root), reason=reason)
    return f"{artifact} {version}: {done.line}\n{share(artifact, version)}"


@printed()
def page(artifact: Artifact, version: str | None = None, /, *, output: GivenPath | None = None, open_: Opened = True) -> str:
    """Write the page of a version for its reviewers, and open it.

    Args:
        version: for example v2.0.0; without it the newest.
        output: the page; reports/ARTIFACT-VERSION.html otherwise.
        open_: open it in a browser.
    """
    from flows.registry.page import render_version  # imports Bokeh
    from rlhf_core.report.opened import open_page

    root = Path.cwd()
    found = _read(root, artifact)
    chosen = found.get(version or found.newest_version() or "latest")
    path = output or REPORTS / f"{artifact}-{chosen.version}.html"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render_version(root, found, chosen, gate_facts(chosen), problem_of(root, chosen)), encoding="utf-8", newline="\n")
    if open_:
        open_page(path)
    return str(path)


@printed()
def rollback(artifact: Artifact, /, *, reason: str, to: str | None = None, by: str | None = None) -> str:
    """Roll back the promoted version.

    Args:
        reason: kept with the decision.
        to: an earlier promoted version; without it the last one.
        by: who decides; without it the name and address from git's settings.
    """
    root = Path.cwd()
    return decided(artifact, decisions.rollback(root, artifact, to, by=by or identity(root), reason=reason))


@printed()
def history(artifact: Artifact, /) -> str:
    found = _read(Path.cwd(), artifact)
    rows = [
        (e.number, e.at, e.action, f"{e.previous or 'none'} -> {e.version or 'none'}", e.who, e.reason, e.override or "")
        for e in found.events
    ]
    return tabulate(rows, headers=["", "when", "what", "version", "who", "why", "override"]) if rows else f"{artifact}: never promoted"


@printed()
def fetch(artifact: Artifact, /, *, version: str | None = None, to: GivenPath | None = None) -> str:
    """Fetch a version's files, and verify each.

    Args:
        version: without it the promoted one.
        to: folder to be made; without it models/promoted/ARTIFACT-VERSION.
    """
    root = Path.cwd()
    found = _read(root, artifact)
    if version is None:
        found.check_decisions()
    wanted = found.get(version).version
    folder = to or PROMOTED / f"{artifact}-{wanted}"
    fetched, source = versions.fetch(root, found, wanted, folder)
    files = fetched.lineage["files"]
    return f"{artifact} {fetched.version}: {files} files from DVC's {source} in {folder}, {fetched.identity}, all checked"


def identity(root: Path) -> str:
    """git's committer identity, as `name <address>`.

    Raises:
        ConfigError: git has none.
    """
    try:
        return git(root, "var", "GIT_COMMITTER_IDENT").partition(">")[0] + ">"
    except ConfigError:
        raise ConfigError("by: expected who decides, got no --by and no git identity; name yourself with --by") from None


def decided(artifact: str, event: Event) -> str:
    """Return the message about a decision that was made."""
    done = f"promoted {event.version}" if event.action == "promote" else f"rolled back {event.previous}"
    now = f"{event.version} is used from now on" if event.version else "no version is promoted now"
    override = f"\nOverride: {event.override}" if event.override else ""
    return f"{artifact}: {done}, {event.who}; {now}. Why: {event.reason}{override}\n{share(artifact, event.version or event.previous)}"


def share(artifact: str, version: str | None) -> str:
    return f"To share it: rlhf push {artifact}@{version}"


def versions_table(found: Registry, problems: dict[str, GateProblem | None]) -> str:
    """Return a table of all versions.

    Args:
        problems: problem of each version's verdict, from `flows.registry.evidence.gates`.
    """
    rows = [
        (
            *(v.version, found.known_state(v.version), v.lineage["run"], v.commit[:SHORT], v.md5[:SHORT], (v.sha256 or "md5 only")[:SHORT]),
            *(
                _verdict(v, problems[v.version]),
                (_look(v) or {}).get("number", "") if uses_reward_model(v) else "",
                who(v.by, v.signer),
                v.at,
            ),
        )
        for v in found.versions.values()
    ]
    headers = ["version", "state", "run", "commit", "md5", "sha256", gate_of(found.artifact), "look", "registered", "at"]
    return tabulate(rows, headers=headers) if rows else f"{found.artifact}: registered versions: {found.none_known}"


def _verdict(version: Version, problem: GateProblem | None) -> str:
    if problem is not None:
        return f"says {version.verdict}, {problem.short}"
    return version.verdict if uses_reward_model(version) else "no reward model used"


def gate_of(artifact: str) -> str:
    """Return the name of an artifact's gate. A policy has none of its own."""
    return "gate" if artifact == "reward-model" else "gate of its reward model"


def uses_reward_model(version: Version) -> bool:
    """Return whether the version is a reward model, or a policy whose training used one."""
    return version.artifact == "reward-model" or learned_from_reward_model(version.lineage)


def gate_facts(version: Version) -> dict[str, str]:
    """The gate's verdict as texts by name. For a policy that learned from no reward model it says which model the verdict is about."""
    if uses_reward_model(version):
        return {gate_of(version.artifact): _gate_text(version)}
    evaluated = {"gate of the reward model that scored its evaluation": _gate_text(version)}
    return {"reward model": "none used in training"} | (evaluated if evaluated_by_reward_model(version.lineage) else {})


def describe(found: Registry, version: Version, problem: str | None, reviews: Sequence[Review] = ()) -> dict[str, Any]:
    """Return a version as JSON.

    problem: contradiction between tag and commit; None if there is none.
    """
    events = [asdict(event) for event in found.events if version.version in (event.version, event.previous)]
    return {
        **asdict(version),
        "sha256": version.sha256,
        "state": found.known_state(version.version),
        "problem": problem,
        "events": events,
        "reviews": [asdict(review) for review in reviews],
        "trained_from": trained_from(version.lineage),
    }


def summary(found: Registry, version: Version, problem: str | None = None, reviews: Sequence[Review] = ()) -> str:
    """Return a version as text, without most of its params.

    problem: as for `describe`.
    """
    line = version.lineage
    parents = trained_from(line)
    facts = {
        "state": found.known_state(version.version),
        "registered": f"{version.at}, {who(version.by, version.signer)}",
        "commit": f"{version.commit} ({line['run']})",
        "its commit": problem or "says the same as the tag",
        "files": f"{line['path']}: {line['files']} files, {line['size']} bytes, {version.identity}",
        **gate_facts(version),
        "look": _look_line(version) if uses_reward_model(version) else "",
        "data": line["data"],
        "made from": "\n".join(f"{key} {place} {hash_[:SHORT_INPUT]}" for key, place, hash_ in named_inputs(line.get("inputs") or {})),
        "parents": ", ".join(f"{path} {md5}" for path, md5 in parents.items()),
        **({"reward model": line["reward_model_version"] or "not registered"} if str(REWARD_MODEL) in parents else {}),
        "version before": line["previous_version"] or "none",
        "seed, method": f"{line['params']['seed']}, {line['params']['alignment']['method']}",
        "packages": ", ".join(f"{name} {number}" for name, number in line["packages"].items()),
    }
    events = [decided(found.artifact, e).splitlines()[0] for e in found.events if version.version in (e.version, e.previous)]
    return "\n".join(
        [
            f"{found.artifact} {version.version}",
            tabulate([fact for fact in facts.items() if fact[1]], tablefmt="plain"),
            *(f"review {r.number}: {r.line}" for r in reviews),
            *events,
        ]
    )


def _look_line(version: Version) -> str:
    look = _look(version)
    return f"{look['number']} at its test pairs, judged at a one-sided level of {100 * look['level']:.3g}%" if look else ""


def _look(version: Version) -> dict[str, Any] | None:
    """Return the gate's look; None if the gate didn't count looks."""
    return (version.lineage["gate"] or {}).get("look")


def _gate_text(version: Version) -> str:
    gate = version.lineage["gate"]
    if gate is None:
        return "none"
    used = f" Override: {gate['override']}" if gate["override"] else ""
    return f"{gate['message']}{used}"


main = partial(run_module, "registry")

if __name__ == "__main__":
    sys.exit(main())
