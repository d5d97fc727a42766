"""What differs between two runs: params, data and models, figures with the interval of their difference."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import pandas as pd

from rlhf_core.report.texts import measured, number, signed
from rlhf_core.statistics import difference_of_intervals, wilson_interval

Tree = Mapping[str, Any]
Form = Literal["share", "score", "length", "number"]
Interval = tuple[float, float, float]  # value, low, high

METHODS = ("rl", "dpo", "kto", "rejection_sampling", "conditional_sft")
# Sections that change no figure, and what a flow writes by itself.
IGNORED = ("cluster", "tracking", "flow", "report", "iterative")


@dataclass(frozen=True)
class Results:
    """What a run has left.

    name: as a reader knows it. params: section -> values. outs: path of data or a model -> md5.
    metrics: stage -> content of its metrics file, of the stages that were run.
    """

    name: str
    params: Tree
    outs: Mapping[str, str]
    metrics: Mapping[str, Tree]


@dataclass(frozen=True)
class Difference:
    """A figure of two runs. change: second minus first; low, high: its interval, where both figures have one.

    tone: good or bad where the interval leaves 0 out, in the direction that is better or worse; else "".
    """

    label: str
    form: Form
    first: float | None
    second: float | None
    change: float | None
    low: float | None
    high: float | None
    tone: Literal["good", "bad", ""]

    @property
    def shown(self) -> tuple[str, str, str, str]:
        """First, second, change and interval as a table has them."""
        values = [number(v) if self.form == "number" else measured(v, self.form) for v in (self.first, self.second)]
        change = "" if self.change is None else self._signed(self.change)
        interval = "" if self.low is None or self.high is None else f"{self._signed(self.low)} to {self._signed(self.high)}"
        return values[0], values[1], change, interval

    def _signed(self, value: float) -> str:
        if self.form == "number":
            return ("+" if value > 0 else "") + number(value)
        return signed(value, self.form)


def params_that_differ(first: Tree, second: Tree) -> list[tuple[str, str, str]]:
    """(dotted key, value in the first, value in the second); of the ways to the policy only those that a run has used."""
    used = {str(tree["alignment"]["method"]) for tree in (first, second)}
    left_out = {*IGNORED, *(m for m in METHODS if m not in used)}
    one, other = (dict(_flat({s: v for s, v in tree.items() if s not in left_out})) for tree in (first, second))
    keys = [*one, *(k for k in other if k not in one)]
    return [(k, _text(one, k), _text(other, k)) for k in keys if _text(one, k) != _text(other, k)]


def _flat(tree: Tree, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _text(flat: Tree, key: str) -> str:
    return json.dumps(flat[key], ensure_ascii=False, sort_keys=True) if key in flat else "–"


def outs_that_differ(first: Results, second: Results) -> list[tuple[str, str, str]]:
    """(path, md5 in the first, md5 in the second)."""
    paths = sorted({*first.outs, *second.outs})
    return [(p, first.outs.get(p, "–"), second.outs.get(p, "–")) for p in paths if first.outs.get(p) != second.outs.get(p)]


def same_rewards(first: Results, second: Results) -> bool:
    """Whether both runs' scores are of one scale: the same scorers with the same reward model."""
    scorers = [r.params["rl"]["reward"]["scorers"] for r in (first, second)]
    return scorers[0] == scorers[1] and first.outs.get("models/reward") == second.outs.get("models/reward")


def figures_that_count(first: Results, second: Results) -> list[Difference]:
    """In the order of the chain; a figure that neither run has is left out."""
    rows = [
        _plain(first, second, "SFT: held-out loss", ("train_sft", "heldout_loss"), "number", more_is_better=False),
        _difference("Reward model: accuracy on test pairs", "share", _gate(first), _gate(second), more_is_better=True),
        *(row for mode in ("greedy", "sampled") for row in _evaluated(first, second, mode)),
    ]
    return [row for row in rows if row.first is not None or row.second is not None]


def _evaluated(first: Results, second: Results, mode: str) -> Iterator[Difference]:
    comparable = same_rewards(first, second)
    yield _difference(f"Judge accepts, {mode}", "share", _judged(first, mode), _judged(second, mode), more_is_better=True)
    note = "" if comparable else " (other reward)"
    scores = [_interval(r, "evaluate", (mode, "policy"), "score_") for r in (first, second)]
    yield _difference(f"Score, {mode}{note}", "score", *scores, more_is_better=True if comparable else None)
    rates = [_interval(r, "evaluate", ("win_rate", mode), "") for r in (first, second)]
    yield _difference(f"Win rate over its SFT model, {mode}{note}", "share", *rates, more_is_better=True if comparable else None)
    yield _plain(first, second, f"KL to its SFT model, {mode}, nats", ("evaluate", "kl", mode), "number", more_is_better=None)
    yield _plain(first, second, f"Tokens per answer, {mode}", ("evaluate", mode, "policy", "length_mean"), "length", more_is_better=None)
    cut_off = ("evaluate", mode, "policy", "cut_off_fraction")
    yield _plain(first, second, f"Cut off, {mode}", cut_off, "share", more_is_better=None)


def find(results: Results, *path: str) -> Any:
    """What a stage's metrics have at a path; None where the stage wasn't run, or has no such figure."""
    node: Any = results.metrics
    for key in path:
        node = node.get(key) if isinstance(node, Mapping) else None
    return node


def _gate(results: Results) -> Interval | None:
    return _triple(find(results, "gate_reward"), "accuracy", "low", "high")


def _interval(results: Results, stage: str, path: tuple[str, ...], prefix: str) -> Interval | None:
    return _triple(find(results, stage, *path), f"{prefix}mean" if prefix else "value", f"{prefix}low", f"{prefix}high")


def _triple(tree: Tree | None, *keys: str) -> Interval | None:
    values = [None if tree is None else tree.get(key) for key in keys]
    return None if None in values else (values[0], values[1], values[2])  # type: ignore[return-value]


def _judged(results: Results, mode: str) -> Interval | None:
    value, n = (find(results, "evaluate", mode, "policy", key) for key in ("judge_ok", "judge_n"))
    confidence = results.params["evaluation"]["confidence"]
    return None if value is None or not n else (value, *wilson_interval(round(value * n), n, confidence))


def _difference(label: str, form: Form, first: Interval | None, second: Interval | None, *, more_is_better: bool | None) -> Difference:
    values = tuple(None if v is None else v[0] for v in (first, second))
    if first is None or second is None:
        return Difference(label, form, *values, None, None, None, "")
    low, high = difference_of_intervals(second, first)
    clear = low > 0 or high < 0
    tone = "" if more_is_better is None or not clear else "good" if (low > 0) == more_is_better else "bad"
    return Difference(label, form, *values, second[0] - first[0], low, high, tone)


def _plain(first: Results, second: Results, label: str, path: tuple[str, ...], form: Form, *, more_is_better: bool | None) -> Difference:
    """Without an interval nothing is said to be clear."""
    values = [find(r, *path) for r in (first, second)]
    change = None if None in values else values[1] - values[0]
    return Difference(label, form, values[0], values[1], change, None, None, "")


def headline(first: Results, second: Results, rows: list[Difference]) -> tuple[Literal["good", "bad", "open"], str]:
    """Which policy is better, by the judge, or by the score where one reward model gave both; clear in both modes, or it is open."""
    if not all("evaluate" in r.metrics for r in (first, second)):
        return "open", "One of the runs has no evaluation: there is no policy to compare."
    by, name = [r for r in rows if r.label.startswith("Judge accepts")], "judge"
    if not any(r.change is not None for r in by):
        by, name = [r for r in rows if r.label in ("Score, greedy", "Score, sampled")], "reward"
    tones = {r.tone for r in by}
    if not by:
        return "open", "There is no judge, and the rewards differ: nothing says which policy is better."
    if tones == {"good"}:
        return "good", f"{second.name} has the better policy by the {name}."
    if tones == {"bad"}:
        return "bad", f"{first.name} has the better policy by the {name}."
    return "open", f"The {name} sees no clear difference between the two policies."


def samples_that_differ(first: pd.DataFrame, second: pd.DataFrame) -> pd.DataFrame:
    """Prompts that both runs answered, with other answers; the columns of each with the endings _first and _second."""
    keys = ["id", "source", "prompt", "mode"]
    columns = [*keys, "policy_response", "policy_score", "policy_judge_ok"]
    both = first[columns].merge(second[columns], on=keys, suffixes=("_first", "_second"))
    return both[both["policy_response_first"] != both["policy_response_second"]]
