"""Lists, shows and deletes runs: rlhf runs list | show NAME | delete NAME..., rlhf stages, rlhf report; or python -m flows.runs.

Exit codes: 0 done, 2 refused, with the reason.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from tabulate import tabulate

from flows.chain.stages import read_stages, unchanged
from flows.chain.summary import key_figure, report_of
from flows.chain.updates import own_params, run_params
from flows.runs.delete import delete, versions_of
from flows.runs.record import GATE_REJECTED, read_record
from flows.runs.state import RunState, lock_of, read_runs, run_names
from rlhf_core.commands import Json, RunFolder, printed, run_module
from rlhf_core.config import ConfigError, number_of, overridden, read_yaml_text
from rlhf_core.paths import REPORT, RUNS, STOPPED_REPORT
from rlhf_core.process import exit_with
from rlhf_core.provenance.lineage import hashes_of_outs
from rlhf_core.report.opened import open_page, run_folder

MAX_TEXT = 60  # characters of a message in the table


@printed()
def delete_runs(*names: Annotated[str, Parameter(required=True)], force: bool = False) -> str:
    """Delete worktrees and branches of runs.

    Args:
        names: of the runs.
        force: even if files or commits are lost that exist nowhere else.
    """
    return delete(Path.cwd(), list(dict.fromkeys(names)), force=force)


@printed()
def stages(run: RunFolder = ".", *, as_json: Json = False) -> str:
    """List the stages of a run with their states.

    Args:
        run: a run's name, or a folder; by default the current one.
    """
    folder = run_folder(run)
    (state,) = read_runs(Path.cwd(), [run]) if folder.parent == RUNS else [None]
    found = list(_stages(folder, state))
    if as_json:
        return json.dumps(found, indent=1)
    return _stages_table(found)


@printed()
def report(run: RunFolder = ".", *, open_: Annotated[bool, Parameter("--open", negative_bool="no-")] = True) -> str:
    """Open the report of a run, or the page of a run that stopped, where there is a display.

    Args:
        run: a run's name, or a folder; by default the current one.
        open_: open it in a browser.
    """
    folder = run_folder(run)
    page = max(filter(Path.is_file, (folder / REPORT, folder / STOPPED_REPORT)), key=lambda page: page.stat().st_mtime, default=None)
    if page is None:
        raise ConfigError(f"{folder}: expected a report, got none at {REPORT}; `rlhf run` writes it")
    if open_:
        open_page(page)
    return str(page)


@printed()
def list_runs(*, as_json: Json = False) -> str:
    root = Path.cwd()
    states = sorted(read_runs(root, run_names(root)), key=lambda state: state.used, reverse=True)
    if as_json:
        return json.dumps([asdict(state) for state in states], indent=1)
    if not states:
        return "No runs: rlhf run --params recipes/clerk.yaml --run NAME makes one."
    rows = [_row(state) for state in states]
    headers = ("run", "made", "last used", "commit", "method", "outcome", "gate", "judge", "MB")
    total = sum(state.size for state in states)
    return f"{tabulate(rows, headers, disable_numparse=True)}\n\n{number_of(len(states), 'run')}, {total / 1e6:.0f} MB. Times are UTC."


def _row(state: RunState) -> tuple[str, ...]:
    size = f"{state.size / 1e6:.1f}" if state.folder else "branch only"
    gate = "" if state.gate_accuracy is None else f"{state.gate_accuracy:.3f}"
    made, used = (_short_time(at) for at in (state.made, state.used))
    return state.name, made, used, state.commit[:9], state.method, state.outcome_text, gate, _figures(state), size


def _short_time(at: str | None) -> str:
    return at[:16].replace("T", " ") if at else ""


def _figures(state: RunState) -> str:
    rounds = f"{state.rounds} rounds" if state.rounds else ""
    if state.before is None or state.after is None:
        return rounds
    name = "" if state.metric == "judge" else f"{state.metric} "
    return ", ".join(filter(None, (f"{name}{state.before:.2f} -> {state.after:.2f}", rounds)))


@printed()
def show(run: Annotated[str, Parameter("--run")], *, as_json: Json = False) -> str:
    """Show a run.

    Args:
        run: its name.
    """
    root = Path.cwd()
    (state,) = read_runs(root, [run])
    known = details(root, state)
    if as_json:
        return json.dumps({**asdict(state), **known}, indent=1, ensure_ascii=False)
    facts = {
        "outcome": state.outcome_text + (f": {state.message}" if state.message else ""),
        "at work": state.process and f"process {state.process}",
        "made, last used": f"{_short_time(state.made) or 'unknown'}, {_short_time(state.used)} (UTC)",
        "folder": f"{state.folder}, {state.size / 1e6:.1f} MB" if state.folder else "removed; a run of its name continues from the branch",
        "branch": f"{state.branch or 'none'} at {state.commit}",
        "method": state.method,
        "gate, judge": ", ".join(filter(None, (state.gate_accuracy and f"accuracy {state.gate_accuracy:.3f}", _figures(state)))),
        "report": known["report"],
        "registered": ", ".join(known["registered"]),
        "warnings": "\n".join(known["warnings"]),
    }
    parts = [f"Run {run}", tabulate([fact for fact in facts.items() if fact[1]], tablefmt="plain")]
    parts.append(_params_text(known["params"]))
    parts.append(_stages_table(known["stages"]) if known["stages"] else "")
    parts.append("Lineage:\n" + tabulate(known["outs"].items(), ("path", "md5"), disable_numparse=True) if known["outs"] else "")
    return "\n\n".join(filter(None, parts))


def _stages_table(stages: list[dict[str, str]]) -> str:
    rows = [(stage["stage"], stage["state"], stage["figure"]) for stage in stages]
    return tabulate(rows, ("stage", "state", "key figure"), disable_numparse=True)


def _params_text(changes: list[dict[str, Any]] | None) -> str:
    if changes is None:
        return "Params: can't be compared with those the run was made from."
    if not changes:
        return "Params: as those the run was made from."
    rows = [(change["key"], _value(change["default"]), _value(change["run"])) for change in changes]
    return "Params that differ from those the run was made from:\n" + tabulate(rows, ("key", "there", "run"), disable_numparse=True)


def details(root: Path, state: RunState) -> dict[str, Any]:
    """Return details that are too slow for a list: params, lineage, and the stages' states by DVC."""
    folder = root / state.folder if state.folder else None
    ended = state.outcome in ("done", "failed", GATE_REJECTED) and state.until is None  # otherwise the page is an earlier run's
    page = report_of(folder, None if state.outcome == "done" else state.stage) if folder and ended else None
    return {
        "params": _params(root, state),
        "stages": list(_stages(folder, state)) if folder else [],
        "outs": _outs(root, state),
        "report": str(page) if page else None,
        "registered": versions_of(root, state),
        "warnings": read_record(folder).get("warnings", []) if folder else [],
    }


def _params(root: Path, state: RunState) -> list[dict[str, Any]] | None:
    """Return params that differ from the base commit's; None if the run has no branch or other code's keys."""
    if state.branch is None:
        return None
    with suppress(ConfigError):
        params = overridden(run_params(root, state.name) or "", {}, subject=f"params.yaml of run {state.name}")[1]
        return [{"key": key, "default": old, "run": new} for key, old, new in own_params(root, state.name, params)]
    return None


def _stages(folder: Path, state: RunState | None) -> Iterator[dict[str, str]]:
    """Yield state and key figure of each stage, by DVC, or by the record while a flow is at work, since its stage holds DVC's lock."""
    stages = read_stages(folder)
    order = [*stages]
    ended = order[: order.index(state.stage)] if state and state.process and state.stage in order else unchanged(folder, order)
    for stage in order:
        if stage in ended:
            yield {"stage": stage, "state": "up to date", "figure": key_figure(folder, stages, stage)}
        elif state and stage == state.stage and state.outcome != "done":
            figure = key_figure(folder, stages, stage) if state.outcome == GATE_REJECTED else ""
            yield {"stage": stage, "state": state.outcome, "figure": figure}
        else:
            yield {"stage": stage, "state": "to do", "figure": ""}


def _outs(root: Path, state: RunState) -> dict[str, str]:
    text = lock_of(root, state)
    if not text:
        return {}
    lock = read_yaml_text(text, f"dvc.lock of run {state.name}")
    return {path: md5 for path, md5 in hashes_of_outs(lock, lock["stages"]) if path.startswith(("data/", "models/"))}


def _value(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT - 1]}…"


main = partial(run_module, "runs")

if __name__ == "__main__":
    exit_with(main)
