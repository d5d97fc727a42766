"""The model registry's command line: python -m flows.promote register|show|promote|rollback|history|fetch --help.

Exit codes: 0 done, 2 refused, with the reason.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tabulate import tabulate

from flows.chain.command_line import INTERRUPTED, REFUSED, show_own_log
from flows.chain.worktree import git
from flows.registry import decisions, versions
from flows.registry.evidence import GateProblem, check_version, gates
from flows.registry.state import ARTIFACTS, Registry, read_registry
from flows.registry.tags import Event, Version, who
from rlhf_core.config import ConfigError
from rlhf_core.paths import PROMOTED, REWARD_MODEL
from rlhf_core.provenance.lineage import evaluated_by_reward_model, learned_from_reward_model, named_inputs, trained_from

SHORT = 10  # characters of a hash in a table
SHORT_INPUT = 12  # of the hash of an external input


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """The arguments of the command line."""
    parser = argparse.ArgumentParser(prog="python -m flows.promote", description="Versions of the reward model and the policy.")
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text)
        added.add_argument("artifact", choices=ARTIFACTS)
        return added

    added = command("register", "Make the model of a run's last commit a version.")
    added.add_argument("--run", metavar="NAME", help="the run in runs/NAME; without it the current folder")
    added.add_argument("--round", type=int, metavar="N", help="the policy of this round, if NAME is a series of iterative DPO")
    added = command("show", "All versions, or one in detail.")
    added.add_argument("version", nargs="?", help="for example v2.0.0; `promoted` for the promoted one")
    added.add_argument("--json", action="store_true", help="for programs, with the whole lineage")
    added = command("promote", "Make a version the promoted one.")
    added.add_argument("version", nargs="?", help="for example v2.0.0; without it the newest")
    _decision(added)
    added.add_argument(
        "--override", metavar="WHY", help="promote a model that its gate rejected or that was rolled back; kept with the decision"
    )
    added = command("rollback", "Roll back the promoted version; the one before it is promoted again, if there is one.")
    added.add_argument("--to", metavar="VERSION", help="an earlier promoted version; without it the last one")
    _decision(added)
    command("history", "All promotions and rollbacks: who, when and why.")
    added = command("fetch", "Fetch a version's files by their hash from DVC's cache or remote, and verify each.")
    added.add_argument("--version", help="without it the promoted one")
    added.add_argument("--to", type=Path, metavar="FOLDER", help="without it models/promoted/<artifact>-<version>")
    return parser.parse_args(arguments)


def _decision(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--reason", required=True, help="kept with the decision")
    parser.add_argument("--by", help="who decides; without it the name and address from git's settings")


def main(arguments: list[str] | None = None) -> int:
    show_own_log()
    options = parse_arguments(arguments)
    try:
        print(plain(COMMANDS[options.command](Path.cwd(), options)))
        return 0
    except ConfigError as error:
        print(plain(str(error)), file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:
        return INTERRUPTED


def register(root: Path, options: argparse.Namespace) -> str:
    version = versions.register(root, options.artifact, options.run, options.round)
    gate = "".join(f"{name.capitalize()}: {text}\n" for name, text in gate_facts(version).items())
    return (
        f"Registered {options.artifact} {version.version}: "
        f"commit {version.commit[:SHORT]} of {version.lineage['run']}, {version.identity}\n{gate}{share(options.artifact)}"
    )


def show(root: Path, options: argparse.Namespace) -> str:
    found = _read(root, options.artifact)
    if options.version is None:
        problems = gates(root, list(found.versions.values()))
        texts = {name: problem and problem.message for name, problem in problems.items()}
        _warn(filter(None, texts.values()))
        if options.json:
            return json.dumps([describe(found, version, texts[version.version]) for version in found.versions.values()], indent=1)
        return versions_table(found, problems)
    if options.version == "promoted":
        found.check_decisions()
    version = found.get(None if options.version == "promoted" else options.version)
    problem = problem_of(root, version)
    _warn(filter(None, [problem]))
    return json.dumps(describe(found, version, problem), indent=1) if options.json else summary(found, version, problem)


def _read(root: Path, artifact: str) -> Registry:
    """The registry, after a warning of each tag that was left out."""
    found = read_registry(root, artifact)
    _warn(found.problems())
    return found


def _warn(problems: Iterable[str]) -> None:
    for problem in problems:
        print(plain(f"warning: {problem}"), file=sys.stderr)


def plain(text: str) -> str:
    """The text in a form that is safe to print, since a tag may contain control sequences."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)


def problem_of(root: Path, version: Version) -> str | None:
    """The contradiction between a version's tag and its commit; None if they agree."""
    try:
        check_version(root, version)
    except ConfigError as error:
        return str(error)
    return None


def promote(root: Path, options: argparse.Namespace) -> str:
    event = decisions.promote(
        root, options.artifact, options.version, by=options.by or identity(root), reason=options.reason, override=options.override
    )
    return decided(options.artifact, event)


def rollback(root: Path, options: argparse.Namespace) -> str:
    return decided(
        options.artifact, decisions.rollback(root, options.artifact, options.to, by=options.by or identity(root), reason=options.reason)
    )


def history(root: Path, options: argparse.Namespace) -> str:
    found = _read(root, options.artifact)
    rows = [
        (e.number, e.at, e.action, f"{e.previous or 'none'} -> {e.version or 'none'}", e.who, e.reason, e.override or "")
        for e in found.events
    ]
    return (
        tabulate(rows, headers=["", "when", "what", "version", "who", "why", "override"]) if rows else f"{options.artifact}: never promoted"
    )


def fetch(root: Path, options: argparse.Namespace) -> str:
    found = _read(root, options.artifact)
    if options.version is None:
        found.check_decisions()
    wanted = found.get(options.version)
    folder = options.to or PROMOTED / f"{options.artifact}-{wanted.version}"
    version, source = versions.fetch(root, found, wanted.version, folder)
    files = version.lineage["files"]
    return f"{options.artifact} {version.version}: {files} files from DVC's {source} in {folder}, {version.identity}, all checked"


COMMANDS = {"register": register, "show": show, "promote": promote, "rollback": rollback, "history": history, "fetch": fetch}


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
    """The message about a decision that was made."""
    done = f"promoted {event.version}" if event.action == "promote" else f"rolled back {event.previous}"
    now = f"{event.version} is used from now on" if event.version else "no version is promoted now"
    override = f"\nOverride: {event.override}" if event.override else ""
    return f"{artifact}: {done}, {event.who}; {now}. Why: {event.reason}{override}\n{share(artifact)}"


def share(artifact: str) -> str:
    return f"To share it: git push origin 'refs/tags/{artifact}*', and dvc push"


def versions_table(found: Registry, problems: dict[str, GateProblem | None]) -> str:
    """A table of all versions.

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
    """The name of an artifact's gate. A policy has none of its own."""
    return "gate" if artifact == "reward-model" else "gate of its reward model"


def uses_reward_model(version: Version) -> bool:
    """Whether the version is a reward model, or a policy whose training used one."""
    return version.artifact == "reward-model" or learned_from_reward_model(version.lineage)


def gate_facts(version: Version) -> dict[str, str]:
    """The gate's verdict as texts by name. For a policy that learned from no reward model it says which model the verdict is about."""
    if uses_reward_model(version):
        return {gate_of(version.artifact): _gate_text(version)}
    evaluated = {"gate of the reward model that scored its evaluation": _gate_text(version)}
    return {"reward model": "none used in training"} | (evaluated if evaluated_by_reward_model(version.lineage) else {})


def describe(found: Registry, version: Version, problem: str | None) -> dict[str, Any]:
    """A version as JSON.

    problem: contradiction between tag and commit; None if there is none.
    """
    events = [asdict(event) for event in found.events if version.version in (event.version, event.previous)]
    return {
        **asdict(version),
        "sha256": version.sha256,
        "state": found.known_state(version.version),
        "problem": problem,
        "events": events,
        "trained_from": trained_from(version.lineage),
    }


def summary(found: Registry, version: Version, problem: str | None = None) -> str:
    """A version as text, without most of its params.

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
        [f"{found.artifact} {version.version}", tabulate([fact for fact in facts.items() if fact[1]], tablefmt="plain"), *events]
    )


def _look_line(version: Version) -> str:
    look = _look(version)
    return f"{look['number']} at its test pairs, judged at a one-sided level of {100 * look['level']:.3g}%" if look else ""


def _look(version: Version) -> dict[str, Any] | None:
    """The gate's look; None if the gate didn't count looks."""
    return (version.lineage["gate"] or {}).get("look")


def _gate_text(version: Version) -> str:
    gate = version.lineage["gate"]
    if gate is None:
        return "none"
    used = f" Override: {gate['override']}" if gate["override"] else ""
    return f"{gate['message']}{used}"


if __name__ == "__main__":
    sys.exit(main())
