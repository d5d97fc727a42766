"""Differences between two runs: params, data and models, and figures with the interval of their difference.

If both runs were evaluated on the same prompts, figures are compared by prompt; otherwise the runs count as independent.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import pandas as pd
from scipy.special import ndtri

from rlhf_core.config import STAGE_SECTIONS
from rlhf_core.paths import REWARD_MODEL
from rlhf_core.report.naming import start_name
from rlhf_core.report.texts import measured, number, signed
from rlhf_core.statistics.intervals import (
    detectable_difference,
    difference_of_intervals,
    holm,
    interval_p_value,
    paired_difference,
    paired_means,
    wilson_interval,
)

Tree = Mapping[str, Any]
Form = Literal["share", "score", "length", "number"]
Interval = tuple[float, float, float]  # value, low, high
Tables = tuple[pd.DataFrame, pd.DataFrame]  # results by prompt, of the first and the second run

METHODS = ("rl", "dpo", "kto", "rejection_sampling", "conditional_sft", "external")
# Sections that don't affect a run's figures.
IGNORED = ("cluster", "tracking", "flow", "report", "iterative", "promotion")
OF_THE_REGISTRY = (
    "incumbent",
    "anchor",
    "rolled_back",
    "pinned",
)  # of gate and reward, by flows/chain/pins.py at a run's start


@dataclass(frozen=True)
class Results:
    """The results of a run.

    name: shown to the reader. params: section -> values. outs: path of data or a model -> md5.
    metrics: finished stage -> content of its metrics file.
    prompts: plots/evaluation.csv as text, with a row per prompt of the evaluation; None without it.
    stale: stage -> its params that aren't those with which dvc.lock says that it ran.
    """

    name: str
    params: Tree
    outs: Mapping[str, str]
    metrics: Mapping[str, Tree]
    prompts: str | None = None
    stale: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def warnings(self) -> list[str]:
        """A sentence for each stage whose figures are of other params than the run's params.yaml has."""
        return [
            f"{self.name}: the figures of {stage} are of other params: its params.yaml differs from its dvc.lock in {', '.join(keys)}. "
            "Name the commit in which the run finished."
            for stage, keys in self.stale.items()
        ]


@dataclass(frozen=True)
class Difference:
    """A figure of two runs and its change (second minus first).

    low, high: interval of the change, if both figures have one.

    p_value: of "no difference", uncorrected; None if the figure has no better direction.
    prompts: number of prompts of a paired comparison; None: independent.
    tone: good or bad if the change is significant after Holm's correction over all rows; else "".
    detectable: the true difference that an insignificant row detects with 80% power; None otherwise, or without variation.
    """

    label: str
    form: Form
    first: float | None
    second: float | None
    change: float | None
    low: float | None
    high: float | None
    more_is_better: bool | None
    p_value: float | None = None
    prompts: int | None = None
    tone: Literal["good", "bad", ""] = ""
    detectable: float | None = None

    @property
    def shown(self) -> tuple[str, str, str, str, str]:
        """The first and second value, change, interval and detectable difference as text."""
        values = [number(v) if self.form == "number" else measured(v, self.form) for v in (self.first, self.second)]
        change = "" if self.change is None else self._signed(self.change)
        interval = "" if self.low is None or self.high is None else f"{self._signed(self.low)} to {self._signed(self.high)}"
        detectable = "" if self.detectable is None else self._signed(self.detectable).lstrip("+")
        return values[0], values[1], change, interval, detectable

    def _signed(self, value: float) -> str:
        if self.form == "number":
            return ("+" if value > 0 else "") + number(value)
        return signed(value, self.form)


def params_that_differ(first: Tree, second: Tree) -> list[tuple[str, str, str]]:
    """Each key that differs with both values, without sections of methods that neither run uses, apart from keys of the evaluation."""
    used = {str(tree["alignment"]["method"]) for tree in (first, second)}
    left_out = tuple(f"{s}." for s in (*IGNORED, *(m for m in METHODS if m not in used)))
    of_evaluation = STAGE_SECTIONS["evaluate"]
    return [c for c in changed_keys(first, second) if c[0] in of_evaluation or not f"{c[0]}.".startswith(left_out)]


def changed_keys(first: Tree, second: Tree) -> list[tuple[str, str, str]]:
    """Return each dotted key of two trees whose value differs, with both values as text."""
    one, other = dict(_flat(first)), dict(_flat(second))
    return [(k, _text(one, k), _text(other, k)) for k in {**one, **other} if _text(one, k) != _text(other, k)]


def _flat(tree: Tree, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _text(flat: Tree, key: str) -> str:
    return json.dumps(flat[key], ensure_ascii=False, sort_keys=True) if key in flat else "–"


def outs_that_differ(first: Results, second: Results) -> list[tuple[str, str, str]]:
    """Return each path whose md5 differs, with both md5s."""
    paths = sorted({*first.outs, *second.outs})
    return [(p, first.outs.get(p, "–"), second.outs.get(p, "–")) for p in paths if first.outs.get(p) != second.outs.get(p)]


def same_rewards(first: Results, second: Results) -> bool:
    """Return whether both runs' scores are comparable: the same scorers with the same reward model."""
    own = [r.params["evaluation"].get("scorers") for r in (first, second)]
    scorers = [r.params["rl"]["reward"]["scorers"] if given is None else given for given, r in zip(own, (first, second), strict=True)]
    return scorers[0] == scorers[1] and first.outs.get(str(REWARD_MODEL)) == second.outs.get(str(REWARD_MODEL))


def figures_that_count(first: Results, second: Results) -> list[Difference]:
    """Figures of both runs in the order of the chain, without those that neither has."""
    tables = _paired_tables(first, second)
    gates = _gate(first, _confidence(second)), _gate(second, _confidence(second))
    rows = [
        _plain(first, second, "SFT: held-out loss", ("train_sft", "heldout_loss"), "number"),
        _apart(second, "Reward model: accuracy on test pairs", "share", gates, more_is_better=True),
        *(row for mode in ("greedy", "sampled") for row in _evaluated(first, second, mode, tables)),
        *_harness(first, second),
    ]
    return judged_together([row for row in rows if row.first is not None or row.second is not None], _confidence(second))


def judged_together(rows: list[Difference], confidence: float) -> list[Difference]:
    """Return the rows of one table with their tones, after Holm's correction for the number of rows.

    An insignificant row gets its detectable difference at the level that Holm's method leaves to such rows.
    """
    tested = [i for i, row in enumerate(rows) if row.p_value is not None]
    corrected = dict(zip(tested, holm([rows[i].p_value for i in tested]), strict=True))  # type: ignore[misc]
    unclear = sum(p >= 1 - confidence for p in corrected.values())

    def judged(row: Difference, p_value: float) -> Difference:
        if p_value < 1 - confidence:
            return replace(row, tone="good" if (row.change > 0) == row.more_is_better else "bad")  # type: ignore[operator]
        found = detectable_difference(row.low, row.high, confidence, tests=unclear)  # type: ignore[arg-type]
        return replace(row, detectable=found if 0 < found < math.inf else None)

    return [judged(row, corrected[i]) if i in corrected else row for i, row in enumerate(rows)]


def _paired_tables(first: Results, second: Results) -> Tables | None:
    """Both runs' results by prompt, in the same order; None if the prompts differ."""
    one, other = (_by_prompt(r) for r in (first, second))
    return None if one is None or other is None or set(one.index) != set(other.index) else (one, other.reindex(one.index))


def _by_prompt(results: Results) -> pd.DataFrame | None:
    if results.prompts is None or "evaluate" not in results.metrics:
        return None
    return pd.read_csv(io.StringIO(results.prompts), dtype={"id": str}).set_index("id")


def _evaluated(first: Results, second: Results, mode: str, tables: Tables | None) -> Iterator[Difference]:
    comparable = same_rewards(first, second)

    def row(label: str, form: Form, column: str, both: tuple[Interval | None, Interval | None], more_is_better: bool | None) -> Difference:
        found = None if tables is None or None in both else _paired(label, form, both, tables, column, _confidence(second), more_is_better)
        return _apart(second, label, form, both, more_is_better=more_is_better) if found is None else found

    def scored(label: str, form: Form, column: str, both: tuple[Interval | None, Interval | None]) -> Difference:
        if comparable:
            return row(label, form, column, both, True)
        return Difference(f"{label} (other reward)", form, *(None if v is None else v[0] for v in both), None, None, None, None)

    yield row(f"Judge accepts, {mode}", "share", f"{mode}_judge_ok", (_judged(first, mode), _judged(second, mode)), True)
    scores = tuple(_interval(r, "evaluate", (mode, "policy"), "score_") for r in (first, second))
    yield scored(f"Score, {mode}", "score", f"{mode}_score", scores)
    rates = tuple(_interval(r, "evaluate", ("win_rate", mode), "") for r in (first, second))
    start = start_name(first.params) if start_name(first.params) == start_name(second.params) else "model at the start"
    yield scored(f"Win rate over its {start}, {mode}", "share", f"{mode}_points", rates)
    yield _plain(first, second, f"KL to its {start}, {mode}, nats", ("evaluate", "kl", mode), "number")
    yield _plain(first, second, f"Tokens per answer, {mode}", ("evaluate", mode, "policy", "length_mean"), "length")
    yield _plain(first, second, f"Truncated, {mode}", ("evaluate", mode, "policy", "truncated_fraction"), "share")


def _harness(first: Results, second: Results) -> Iterator[Difference]:
    """The policies' figures on the tasks of lm-evaluation-harness, with a test where both runs asked the same in the same way."""
    found = [find(r, "evaluate", "harness") or {"tasks": {}} for r in (first, second)]
    settings, tasks = [{**of, "tasks": None, "confidence": None} for of in found], [of["tasks"] for of in found]
    for name in {**tasks[0], **tasks[1]}:
        both = [of.get(name, {"figures": {}}) for of in tasks]
        asked = [[task.get(key) for key in ("version", "num_fewshot", "n")] for task in both]
        same = settings[0] == settings[1] and asked[0] == asked[1]
        for key in {**both[0]["figures"], **both[1]["figures"]}:
            of_policies = [task["figures"].get(key, {}).get("policy", {}) for task in both]
            values, errors = ([figure.get(part) for figure in of_policies] for part in ("value", "stderr"))
            form: Form = "share" if all(0 <= value <= 1 for value in values if value is not None) else "score"
            label = f"{name}: {key.removesuffix(',none')}"
            if same and None not in values and all(errors):  # 0 where all documents agree, which is no certainty
                intervals = tuple(_with_error(figure, _confidence(second)) for figure in of_policies)
                yield _apart(second, label, form, intervals, more_is_better=both[0]["figures"][key]["higher_is_better"])
            else:
                change = values[1] - values[0] if same and None not in values else None
                yield Difference(label if same else f"{label} (other settings)", form, *values, change, None, None, None)


def _with_error(figure: Tree, confidence: float) -> Interval:
    half = float(ndtri((1 + confidence) / 2)) * figure["stderr"]
    return figure["value"], figure["value"] - half, figure["value"] + half


def find(results: Results, *path: str) -> Any:
    """Return a value of a stage's metrics; None if the stage didn't run or has no such figure."""
    node: Any = results.metrics
    for key in path:
        node = node.get(key) if isinstance(node, Mapping) else None
    return node


def _gate(results: Results, confidence: float) -> Interval | None:
    """Return the reward model's accuracy with an interval at `confidence`. The interval in gate.json is wider at later looks."""
    accuracy, n = (find(results, "gate_reward", key) for key in ("accuracy", "n_effective"))
    if accuracy is None or not n:  # baselines of older versions have the interval only
        return _triple(find(results, "gate_reward"), "accuracy", "low", "high")
    return accuracy, *wilson_interval(accuracy * n, n, confidence)


def _interval(results: Results, stage: str, path: tuple[str, ...], prefix: str) -> Interval | None:
    return _triple(find(results, stage, *path), f"{prefix}mean" if prefix else "value", f"{prefix}low", f"{prefix}high")


def _triple(tree: Tree | None, *keys: str) -> Interval | None:
    values = [None if tree is None else tree.get(key) for key in keys]
    return None if None in values else (values[0], values[1], values[2])  # type: ignore[return-value]


def _judged(results: Results, mode: str) -> Interval | None:
    value, n = (find(results, "evaluate", mode, "policy", key) for key in ("judge_ok", "judge_n"))
    confidence = results.params["evaluation"]["confidence"]
    return None if value is None or not n else (value, *wilson_interval(round(value * n), n, confidence))


def _confidence(results: Results) -> float:
    return results.params["evaluation"]["confidence"]


def _apart(
    second: Results, label: str, form: Form, both: tuple[Interval | None, Interval | None], *, more_is_better: bool | None
) -> Difference:
    """Return the difference of two figures from their intervals, taking the runs as independent."""
    values = tuple(None if v is None else v[0] for v in both)
    one, other = both
    if one is None or other is None:
        return Difference(label, form, *values, None, None, None, more_is_better)
    change, (low, high) = other[0] - one[0], difference_of_intervals(other, one)
    p_value = None if more_is_better is None else interval_p_value(change, low, high, _confidence(second))
    return Difference(label, form, *values, change, low, high, more_is_better, p_value)


def _paired(
    label: str,
    form: Form,
    both: tuple[Interval | None, Interval | None],
    tables: Tables,
    column: str,
    confidence: float,
    more_is_better: bool | None,
) -> Difference | None:
    """The difference by prompt, with Tango's interval and the sign test for the judge and Student's for means. None if no prompt has both
    figures.
    """
    one, other = (table[column] for table in tables)
    known = one.notna() & other.notna()
    values = [v[0] for v in both if v is not None]
    if not known.any():
        return None
    if column.endswith("_judge_ok"):
        found = paired_difference(other[known].astype(bool).tolist(), one[known].astype(bool).tolist(), confidence)
    else:
        found = paired_means(other[known].tolist(), one[known].tolist(), confidence)
    p_value = None if more_is_better is None else found.p_value
    return Difference(label, form, *values, found.value, found.low, found.high, more_is_better, p_value, int(known.sum()))


def _plain(first: Results, second: Results, label: str, path: tuple[str, ...], form: Form) -> Difference:
    """Return the difference of two figures without intervals, and so without a test."""
    values = [find(r, *path) for r in (first, second)]
    change = None if None in values else values[1] - values[0]
    return Difference(label, form, values[0], values[1], change, None, None, None)


def of_one_configuration(first: Results, second: Results) -> bool:
    """Return whether two runs' params differ at most in the seed and in what was promoted when they started."""
    return not params_that_differ(_configuration(first.params), _configuration(second.params))


def _configuration(params: Tree) -> dict[str, Any]:
    pinned = {name: params.get(name) or {} for name in ("gate", "reward")}
    unpinned = {name: {key: value for key, value in tree.items() if key not in OF_THE_REGISTRY} for name, tree in pinned.items()}
    return {key: value for key, value in params.items() if key != "seed"} | unpinned


def differ_in_seed_only(first: Results, second: Results) -> tuple[Any, Any] | None:
    """Return the seeds of two runs that differ only in their seed; None if configurations differ or it is the same run twice."""
    seeds = tuple(r.params.get("seed") for r in (first, second))
    return None if seeds[0] == seeds[1] or not of_one_configuration(first, second) else seeds  # type: ignore[return-value]


def headline(first: Results, second: Results, rows: list[Difference]) -> tuple[Literal["good", "bad", "open"], str]:
    """Return a sentence that says which policy is better, by the judge or else by a common reward.

    A policy is called better only if the difference is significant in both modes.

    Two seeds of one configuration are two checkpoints; neither is called the better configuration.
    """
    if not all("evaluate" in r.metrics for r in (first, second)):
        return "open", "One of the runs has no evaluation: there is no policy to compare."
    by, name = [r for r in rows if r.label.startswith("Judge accepts")], "judge"
    if not any(r.change is not None for r in by):
        by, name = [r for r in rows if r.label in ("Score, greedy", "Score, sampled")], "reward"
    tones = {r.tone for r in by}
    if not by:
        return "open", "There is no judge, and the rewards differ: nothing says which policy is better."
    if len(tones) > 1:
        where = "in one of the two modes only" if "" in tones else "in both modes, in opposite directions"
        return "open", f"The {name} sees a clear difference {where}."
    if tones == {""}:
        return "open", f"The {name} sees no clear difference between the two policies."
    better = second.name if tones == {"good"} else first.name
    seeds = differ_in_seed_only(first, second)
    if seeds is not None:
        return (
            "open",
            f"{better} has the better checkpoint by the {name}; both are of one configuration, with seeds {seeds[0]} and {seeds[1]}.",
        )
    return "good" if tones == {"good"} else "bad", f"{better} has the better policy by the {name}."


def read_as(first: Results, second: Results, rows: list[Difference], *, mark: str = "Green and red") -> list[str]:
    """Sentences that explain how to read the table of differences.

    mark: how the table shows a significant change.
    """
    tested = sum(r.p_value is not None for r in rows)
    remarks = [
        *(*first.warnings, *second.warnings),
        f"Intervals are {_confidence(second):.0%} intervals for these two checkpoints; another seed would give other figures.",
        *_tests_read_as(tested, mark),
    ]
    tables = _paired_tables(first, second)
    if tables is not None:
        return [*remarks, f"Evaluation figures are compared by prompt, on the {len(tables[0]):,} prompts that both runs answered."]
    if all("evaluate" in r.metrics for r in (first, second)):
        remarks.append("The runs answered different prompts, or one has no results by prompt, so they count as independent.")
    return remarks


def _tests_read_as(tested: int, mark: str) -> list[str]:
    if tested == 0:
        return ["No figure of the table has a test."]
    by = "in the table’s only test" if tested == 1 else f"after Holm’s correction for the table’s {tested} tests"
    detectable = "Detectable: the true difference that an insignificant row would detect with a probability of 80%."
    return [f"{mark}: significant {by}.", detectable]


def samples_that_differ(first: pd.DataFrame, second: pd.DataFrame) -> pd.DataFrame:
    """Prompts that both runs answered differently; columns have the suffixes _first and _second."""
    keys = ["id", "source", "prompt", "mode"]
    columns = [*keys, "policy_response", "policy_score", "policy_judge_ok"]
    previews = [name for name in first.columns if name == "pictures"]
    both = first[[*columns, *previews]].merge(second[columns], on=keys, suffixes=("_first", "_second"))
    return both[both["policy_response_first"] != both["policy_response_second"]]
