"""The summary printed at the end of a run: one row per stage with its key figure, and the report's path."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from tabulate import tabulate

from flows.chain.stages import HASH_INPUTS, StageResult, Stages, metrics_file
from rlhf_core.config import reordering_shown
from rlhf_core.paths import REPORT, STOPPED_REPORT
from rlhf_core.provenance.inputs import read_recorded, summary
from rlhf_core.report.texts import markdown_text


def _rows(m: dict[str, Any]) -> str:
    rows = m["rows"]
    return ", ".join(f"{use} {_total(n):,}" for use, n in rows.items())


def _total(node: Any) -> int:
    return sum(map(_total, node.values())) if isinstance(node, dict) else int(node)


def _validation(m: dict[str, Any]) -> str:
    checks = m["expectations"]
    failed = sum(not c["passed"] for c in checks)
    return f"{len(checks)} expectations, {failed or 'none'} failed"


def _model_check(m: dict[str, Any]) -> str:
    verdicts = (f"{name} {verdict.partition(':')[0]}" for name, verdict in m["checks"].items())
    return f"{m['model']}: {', '.join(verdicts)}"


def _reward(m: dict[str, Any]) -> str:
    if m.get("given"):
        scored = {name: m[f"heldout_{name}"] for name in ("pairs", "solutions") if f"heldout_{name}" in m}
        return "; ".join(["ready-made", *(f"{number} {name} scored" for name, number in scored.items())])
    return f"held-out accuracy {m['heldout_accuracy']:.3f}" if m["trained"] else "none trained"


def _gate(m: dict[str, Any]) -> str:
    if not m["needed"]:
        return "not needed"
    number = (m.get("look") or {"number": 1})["number"]
    look = f", look {number}" if number > 1 else ""
    verdict = "passed" if m["passed"] else "rejected"
    if (found := m.get("first_error")) is not None:
        if not found["n"]:
            return f"no F1 of first errors without responses of both kinds{look}: {verdict}"
        return f"F1 of first errors {found['f1']:.3f}, at least {found['low']:.3f} (needs {m['threshold']:.3f}){look}: {verdict}"
    return f"accuracy {m['accuracy']:.3f}, at least {m['low']:.3f} (needs {m['threshold']:.3f}){look}: {verdict}"


def _policy(m: dict[str, Any]) -> str:
    """Return the key figure by method: the score for RL, the held-out accuracy for DPO and KTO, otherwise the held-out loss."""
    if m["method"] == "rl":
        stopped = m["monitor"]["stopped"]
        ended = f", ended at step {stopped['step']} by the limit {stopped['limit']}" if stopped else ""
        names = (("score", "score_first_step", "score_mean"), ("distillation loss", "distillation_loss_first_step", "distillation_loss"))
        changes = ", ".join(f"{name} {m[first]:.2f} -> {m[last]:.2f}" for name, first, last in names if first in m)
        return f"{m['algorithm']}: {changes}, KL {m['kl_mean']:.2f}{ended}"
    if m["method"] == "external":
        return "made elsewhere"
    if "heldout_accuracy" in m:
        return f"{m['method']}: held-out accuracy {m['heldout_accuracy']:.3f}"
    return f"{m['method']}: held-out loss {m['heldout_loss']:.3f}"


TASKS_SHOWN = 3


def _evaluation(m: dict[str, Any]) -> str:
    name, key = ("judge", "judge_ok") if "judge_ok" in m["greedy"]["policy"] else ("score", "score_mean")
    if m["greedy"]["policy"][key] is None:
        return f"neither score nor judge; KL {m['kl']['sampled']:.2f}{_harness(m)}"

    def change(mode: str) -> str:
        wins = m["win_rate"][mode]["value"]
        of_score = "" if wins is None else f", wins {wins:.2f}"
        return f"{m[mode]['sft'][key]:.2f} -> {m[mode]['policy'][key]:.2f} ({mode}{of_score})"

    return f"{name} {change('sampled')}, {change('greedy')}{_harness(m)}"


def _harness(m: dict[str, Any]) -> str:
    """The first figure of the harness's first tasks."""
    tasks = list(m.get("harness", {}).get("tasks", {}).items())
    first = [(task, *next(iter(of["figures"].items()))) for task, of in tasks if of["figures"]][:TASKS_SHOWN]
    known = [(task, key.partition(",")[0], f["sft"]["value"], f["policy"]["value"]) for task, key, f in first]
    return "".join(f", {task} {metric} {sft:.3f} -> {policy:.3f}" for task, metric, sft, policy in known if None not in (sft, policy))


# Stage -> key figure from its metrics file. Stages not listed show none.
KEY_FIGURES: dict[str, Callable[[dict[str, Any]], str]] = {
    "prepare_data": _rows,
    "validate_data": _validation,
    "check_model": _model_check,
    "train_sft": lambda m: f"held-out loss {m['heldout_loss']:.3f}" if m.get("trained", True) else "not needed: the given model is used",
    "train_reward": _reward,
    "gate_reward": _gate,
    "train_policy": _policy,
    "evaluate": _evaluation,
}


def read_metrics(workspace: Path, stages: Stages, stage: str) -> dict[str, Any] | None:
    """Return the stage's metrics, or None if it has none or hasn't written them yet."""
    path = metrics_file(stages.get(stage, {}))
    if path is None:
        return None
    with suppress(OSError, json.JSONDecodeError):
        return json.loads((workspace / path).read_text(encoding="utf-8"))
    return None


def key_figure(workspace: Path, stages: Stages, stage: str) -> str:
    """Return in words the figure that tells most about a stage's results; empty if it has none."""
    if stage == "report":
        report = workspace / REPORT
        return f"{report.stat().st_size / 1e6:.1f} MB" if report.is_file() else ""
    if stage == HASH_INPUTS:
        inputs = read_recorded(workspace)
        return "" if inputs is None else summary(inputs)
    metrics, show = read_metrics(workspace, stages, stage), KEY_FIGURES.get(stage)
    if metrics is None or show is None:
        return ""
    with suppress(KeyError, TypeError, ValueError):  # a missing metric is left out
        return show(metrics)
    return ""


def stage_table(workspace: Path, stages: Stages, results: list[StageResult], failed: str | None = None, *, style: str = "simple") -> str:
    """Return the table of stages as text (style simple) or as markdown (style github).

    Args:
        stages: all stages of the chain, in order; those without a result weren't reached.
        failed: the stage that failed.
    """
    done = {r.stage: r for r in results}
    rows = []
    for stage in stages:
        result = done.get(stage)
        outcome = result.outcome if result else "failed" if stage == failed else "not reached"
        figure = key_figure(workspace, stages, stage) if result or stage == failed else ""
        figure = markdown_text(figure) if style == "github" else reordering_shown(figure)
        rows.append((stage, f"{result.seconds:.1f}" if result else "", figure, outcome))
    rows.append(("total", f"{sum(r.seconds for r in results):.1f}", "", ""))
    return tabulate(
        rows,
        headers=("stage", "seconds", "key figure", "ran or cached"),
        tablefmt=style,
        colalign=("left", "right", "left", "left"),
        disable_numparse=True,
    )


def report_of(workspace: Path, failed: str | None = None) -> Path | None:
    """Return the path of this run's report, or of the page of a run that stopped at `failed`; None if it isn't written."""
    page = workspace / (REPORT if failed is None else STOPPED_REPORT)
    return page if page.is_file() else None


def report_line(workspace: Path, failed: str | None = None) -> str:
    """Return the last line of a run's summary, with the path of its report."""
    page = report_of(workspace, failed)
    return f"Report: {page or 'not written'}" + (f" (stopped at {failed})" if page and failed else "")


def until_line(until: str, workspace: Path) -> str:
    """Return the last line of the summary of a run that ended after the requested stage `until`."""
    return f"Ended after {until}, as `until` says, in {workspace}; the same run without `until` continues from there"
