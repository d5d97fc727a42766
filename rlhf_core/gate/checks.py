"""The checks of gate.json and their messages."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from rlhf_core.config import GateConfig
from rlhf_core.gate.looks import SHARED
from rlhf_core.statistics.clusters import accuracy_needed

SLICE = "slice: "  # prefix of the names of slices' checks
FIRST_ERROR = "first_error_f1"  # the check by which a process reward model is judged
MAX_SLICES = 5  # named in a message
UNEVEN = 4  # times as many prompts as equal ones with the same precision, from which on a message says so


@dataclass(frozen=True)
class Check:
    """One measured value and whether it passed.

    passed: None if the value is reported without a threshold.

    way_out: what to do if the check fails, with the parameter that sets the threshold.
    """

    name: str
    value: float | None
    low: float | None
    high: float | None
    threshold: float | None
    n: int | None
    passed: bool | None
    way_out: str = ""

    def as_json(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if key != "way_out"}


def at_least(name: str, measured: dict[str, Any], threshold: float | None, way_out: str = "", *, value: str = "accuracy") -> Check:
    """Return a check that passes if the lower end of the interval reaches the threshold."""
    end = measured["low"]
    passed = None if threshold is None else bool(measured["n"]) and end is not None and end >= threshold
    return Check(name, measured[value], end, measured["high"], threshold, measured["n"], passed, way_out)


def at_most(name: str, measured: dict[str, Any], threshold: float | None, way_out: str = "", *, value: str = "value") -> Check:
    """Return a check that passes if the upper end of the interval (or the value, without an interval) is at most the threshold."""
    end = measured["high"] if measured["high"] is not None else measured[value]
    passed = None if threshold is None or end is None else end <= threshold
    return Check(name, measured[value], measured["low"], measured["high"], threshold, measured["n"], passed, way_out)


def all_checks(gate: dict[str, Any], config: GateConfig, *, exact_scores: bool) -> list[Check]:
    """All checks, in the order of docs/gate.md. With fewer than gate.min_pairs pairs only that check is judged.

    Args:
        gate: measurements, as in gate.json.
        exact_scores: train_reward stored float32 scores, which the gate's own must equal.
    """
    parts = (
        _accuracy(gate, config),
        _lengths(gate, config),
        _calibration(gate, config),
        _probes(gate, config, exact_scores),
        _others(gate, config),
    )
    checks = [check for part in parts for check in part]
    if gate["n"] < config.min_pairs:
        return [check if check.name == "pairs" else replace(check, passed=None) for check in checks]
    return checks


def _accuracy(gate: dict[str, Any], config: GateConfig) -> Iterator[Check]:
    n = gate["n"]
    what = "add preference data" if "first_error" not in gate else "add responses with labelled steps"
    yield Check("pairs", n, None, None, config.min_pairs, n, n >= config.min_pairs, f"{what} or raise data.test_fraction")
    if "first_error" in gate:
        yield from _steps(gate, config)
        return
    yield at_least("accuracy", gate, config.min_accuracy, "train a better reward model or lower gate.min_accuracy knowingly")
    if config.min_slice_accuracy is not None:
        for s in gate["slices"]:
            threshold = config.min_slice_accuracy if s["judged"] else None
            yield at_least(f"{SLICE}{s['column']}={s['value']}", s, threshold)


def _steps(gate: dict[str, Any], config: GateConfig) -> Iterator[Check]:
    """Checks of a process reward model: the F1 of the first wrong step; the accuracies behind it and those of steps are shown."""
    found = gate["first_error"]
    way_out = "train a better process reward model or lower gate.min_first_error_f1 knowingly"
    if not found["n"]:
        way_out = "add held-out responses without and with wrong steps, or raise data.test_fraction"
    yield at_least(FIRST_ERROR, found, config.min_first_error_f1, way_out, value="f1")
    yield at_least("first_error_accuracy", gate, None)
    for kind in ("correct", "erroneous"):
        yield at_least(f"first_error_accuracy: {kind}", found[kind], None)
    for kind, measured in gate["steps"].items():
        yield at_least("step_accuracy" if kind == "all" else f"step_accuracy: {kind}", measured, None)


def _lengths(gate: dict[str, Any], config: GateConfig) -> Iterator[Check]:
    if gate["length"] is not None:
        way_out = "add pairs whose better response is short, or lower gate.min_shorter_accuracy"
        yield at_least("shorter_accuracy", gate["length"]["shorter"], config.min_shorter_accuracy, way_out)
        yield at_most("length_correlation", gate["length"]["correlation"], None)


def _calibration(gate: dict[str, Any], config: GateConfig) -> Iterator[Check]:
    if gate["calibration"] is not None:
        after = gate["calibration"]["after"]
        for name, limit in (("ece", config.max_ece), ("brier", None)):
            measured = {"value": after[name], "low": after[f"{name}_low"], "high": after[f"{name}_high"], "n": gate["n"]}
            yield at_most(name, measured, limit, "train for fewer epochs, or raise gate.max_ece")


def _probes(gate: dict[str, Any], config: GateConfig, exact_scores: bool) -> Iterator[Check]:
    for name, probe in sorted((gate["probes"] or {}).items()):  # as gate.json has them, from which the registry computes them again
        if name.startswith("format: "):
            yield within(name, probe, config.max_format_shift, "add pairs that differ in this only, or raise gate.max_format_shift")
            continue
        limit = config.max_score_difference if exact_scores or name != "stored_scores" else None
        way_out = "find out why the model computes the same text differently, or raise gate.max_score_difference"
        yield at_most(name, probe, limit, way_out)


def within(name: str, measured: dict[str, Any], limit: float | None, way_out: str) -> Check:
    """Return a check that passes if the whole interval lies between -limit and limit."""
    ends = [measured["low"], measured["high"]]
    passed = None if limit is None or None in ends else max(map(abs, ends)) <= limit
    return Check(name, measured["value"], *ends, limit, measured["n"], passed, way_out)


def _others(gate: dict[str, Any], config: GateConfig) -> Iterator[Check]:
    if gate["incumbent"] is not None:
        way_out = "keep the incumbent, or raise gate.max_regression knowingly"
        yield _not_worse("incumbent_difference", gate, "incumbent", config, way_out)
    if gate["anchor"] is not None and (gate["incumbent"] is None or gate["anchor"]["md5"] != gate["incumbent"]["md5"]):
        way_out = "keep the incumbent, raise gate.max_regression knowingly, or roll back the anchor if it is a bad model"
        yield _not_worse("anchor_difference", gate, "anchor", config, way_out)
    if gate["judge"] is not None:
        j = gate["judge"]
        yield Check("judge_correlation", j["spearman"], j["spearman_low"], j["spearman_high"], None, j["n"], None)
    for external in gate["external"]:
        way_out = "train a better reward model, or lower this file's min_accuracy in gate.external"
        yield at_least(f"external: {external['name']}", external, external["threshold"], way_out)


def _not_worse(name: str, gate: dict[str, Any], role: str, config: GateConfig, way_out: str) -> Check:
    """Return a check of non-inferiority, which passes if the lower end of the difference is at least minus the margin.

    The check fails with too few pairs to detect a difference as large as the margin (`too_few_to_compare`). A model compared with itself
    passes on any number of pairs.
    """
    compared = gate[role]
    check = at_least(name, compared, -config.max_regression, way_out, value="difference")
    if gate["look"] is not None and compared["md5"] == gate["look"]["model"]:
        return replace(check, passed=True)
    return replace(check, passed=False) if check.n < config.min_pairs or too_few_to_compare(check, config.max_regression) else check


def too_few_to_compare(check: Check, margin: float) -> bool:
    """Return whether the half-width of a difference's interval exceeds the margin, unless the whole interval is at least 0.

    An interval without negative values shows that the candidate is no worse, whatever its width.
    """
    return (check.high - check.low) / 2 > margin and check.low < 0


def sentences(gate: dict[str, Any], checks: list[Check], config: GateConfig) -> Iterator[str]:
    """Sentences of the message: why the gate passed or rejected the model."""
    if bad := [check for check in checks if check.passed is False and check.name.startswith(SLICE)]:
        yield _bad_slices(bad, config)
    for check in checks:
        if check.passed is False and not check.name.startswith(SLICE) and (check.name == "pairs" or gate["n"]):
            yield reason_of(gate, check, config)
    if all(check.passed is not False for check in checks):
        limit = f"min_first_error_f1={config.min_first_error_f1}" if "first_error" in gate else f"min_accuracy={config.min_accuracy}"
        yield f"passed: {_measured(gate, config)}; the lower end reaches gate.{limit}."
    if gate["look"] is not None and gate["look"]["number"] > 1 and (look := _look(gate, checks, config)):
        yield look


def _measured(gate: dict[str, Any], config: GateConfig) -> str:
    if "first_error" in gate:
        return _measured_steps(gate["first_error"], gate["prompts"], config)
    n, interval = gate["n"], f"{percent(config.confidence)} interval {gate['low']:.4f} to {gate['high']:.4f}"
    uneven = gate["prompts_effective"] < gate["prompts"] / UNEVEN
    few = f" (some have so many of the pairs that they count as {gate['prompts_effective']:.1f})" if uneven else ""
    return f"held-out accuracy {gate['accuracy']:.4f} on {n} pairs of {gate['prompts']} prompts{few}, {interval}"


def _measured_steps(found: dict[str, Any], prompts: int, config: GateConfig) -> str:
    if found["f1"] is None:
        return f"{found['correct']['n']} held-out responses without a wrong step, {found['erroneous']['n']} with one"
    kinds = ", ".join(f"{found[kind]['accuracy']:.4f} of {found[kind]['n']} {kind} ones" for kind in ("correct", "erroneous"))
    return (
        f"held-out F1 of the first wrong step {found['f1']:.4f} on {found['n']} responses to {prompts} prompts ({kinds}), "
        f"{percent(config.confidence)} interval {found['low']:.4f} to {found['high']:.4f}"
    )


def _counted(gate: dict[str, Any]) -> str:
    return "test responses" if "first_error" in gate else "test pairs"


def _too_few(gate: dict[str, Any], check: Check, config: GateConfig) -> str:
    return (
        f"rejected: expected at least gate.min_pairs={config.min_pairs} {_counted(gate)} to judge by, got {check.n}, on which nothing is "
        f"decided; {check.way_out}."
    )


def _inaccurate(gate: dict[str, Any], check: Check, config: GateConfig) -> str:
    key = f"min_{check.name}"
    return (
        f"rejected: expected the lower end of the interval to reach gate.{key}={getattr(config, key)}, got {check.low:.4f} "
        f"({_measured(gate, config)}); {check.way_out}."
    )


def _bad_slices(bad: list[Check], config: GateConfig) -> str:
    worst_first = sorted(bad, key=lambda check: check.value)
    named = ", ".join(
        f"{c.name.removeprefix(SLICE)} {c.value:.4f} ({c.low:.4f} to {c.high:.4f}, n={c.n})" for c in worst_first[:MAX_SLICES]
    )
    more = f" and {len(bad) - MAX_SLICES} more" if len(bad) > MAX_SLICES else ""
    return (
        f"rejected: expected the lower end of each slice's interval to reach gate.min_slice_accuracy={config.min_slice_accuracy}, got less "
        f"in {named}{more}; add pairs of this kind, or lower it knowingly."
    )


def _worse_than_promoted(gate: dict[str, Any], check: Check, config: GateConfig) -> str:
    role = check.name.removesuffix("_difference")
    i, margin = gate[role], config.max_regression
    if check.n < config.min_pairs:
        needed = f"gate.min_pairs={config.min_pairs} pairs that the {role} {i['version']} can score"
        return f"rejected: expected at least {needed}, got {check.n}; {check.way_out}."
    if margin and too_few_to_compare(check, margin) and check.high >= -margin:
        return f"rejected: {_too_few_beside(f'the {role} ' + i['version'], check, margin)}."
    accuracies = f"{i['candidate_accuracy']:.4f} against {i['accuracy']:.4f} on the same {check.n} pairs, McNemar's p {i['p_value']:.2g}"
    return (
        f"rejected: the {role} {i['version']} wins: expected the difference in accuracy to it to be at least -{config.max_regression} "
        f"(gate.max_regression) with its whole interval, got {check.value:+.4f} ({check.low:+.4f} to {check.high:+.4f}; {accuracies}); "
        f"{check.way_out}."
    )


def _too_few_beside(other: str, check: Check, margin: float) -> str:
    half = (check.high - check.low) / 2
    found = (
        f"too few pairs to compare with {other}: half-width {half:.4f} of the difference's interval exceeds gate.max_regression={margin}"
    )
    if not math.isfinite(half):
        return f"{found}; pairs of more than one prompt are needed"
    needed = f"about {math.ceil(check.n * (half / margin) ** 2):,} pairs are needed, of proportionally more prompts"
    return f"{found} on {check.n} pairs; {needed}: add preference data or raise data.test_fraction, or gate.max_regression knowingly"


def _look(gate: dict[str, Any], checks: list[Check], config: GateConfig) -> str | None:
    """Return a sentence on how earlier looks at this split widen the intervals; None if accuracy was not judged."""
    judged = next(check for check in checks if check.name in ("accuracy", FIRST_ERROR))
    if judged.passed is None or not gate["n"]:
        return None
    number = gate["look"]["number"]
    message = f"This is look {number} at pairs of the split, for which the intervals are those of {percent(config.confidence)}"
    if judged.passed or judged.name == FIRST_ERROR:
        return f"{message}."
    needed = accuracy_needed(config.min_accuracy, gate["n_effective"], config.confidence)
    at_first = accuracy_needed(config.min_accuracy, gate["n_effective"], 1 - 2 * gate["look"]["level"] * number * (number - 1))
    message += f": accuracy {needed:.4f} is needed, {at_first:.4f} at look 1."
    best = max([gate["accuracy"], *(earlier["accuracy"] for earlier in gate["look"]["earlier"] if earlier["accuracy"] is not None)])
    if best < at_first:
        return (
            f"{message} The most accurate model of all looks has {best:.4f}, which would not have passed as look 1 either: train a better "
            "reward model."
        )
    if best < needed:
        message += (
            f" The most accurate model of all looks has {best:.4f}, which would have passed as look 1: the split is worn out. Hold out "
            "more pairs (add preference data, or raise data.test_fraction): that narrows the interval, and looks at splits that share less "
            f"than {SHARED:.0%} of the pairs don't count."
        )
    return message


def percent(confidence: float) -> str:
    """Return a share as a percentage with as many digits as matter: 0.95 as 95%, 0.999375 as 99.94%."""
    return f"{100 * confidence:.4g}%" if confidence < 0.99995 else f"{100 * confidence:.7g}%"


def reason_of(gate: dict[str, Any], check: Check, config: GateConfig) -> str:
    """Return a sentence on a check that failed, from the figures of gate.json or of a judge in it."""
    return _REASONS.get(check.name, _any_reason)(gate, check, config)


def _any_reason(gate: dict[str, Any], check: Check, config: GateConfig) -> str:
    if check.value is None:
        return f"rejected: {check.name}: expected figures to compare with {check.threshold:g}, got none (n={check.n}); {check.way_out}."
    interval = "" if check.low is None else f" ({check.low:.4f} to {check.high:.4f})"
    return (
        f"rejected: {check.name}: expected {check.threshold:g} to be met by the whole interval, got {check.value:.4g}{interval} "
        f"on n={check.n}; {check.way_out}."
    )


def explain(gate: dict[str, Any]) -> Iterator[str]:
    """Lines for the log, in addition to a rejection's message."""
    if (look := gate["look"]) is not None:
        yield f"look {look['number']} at this split's {gate['n']} {_counted(gate)}: intervals of {percent(gate['confidence'])}"
    for judge in gate["llm_judges"]:
        yield f"judge {judge['key']}: {judge['message']}"
    for s in gate["slices"]:
        few = "" if s["judged"] else " (too few to judge)"
        yield f"{s['column']}={s['value']}: accuracy {s['accuracy']:.4f} ({s['low']:.4f} to {s['high']:.4f}) on {s['n']} pairs{few}"
    if gate["worst_slice"] is not None:
        worst = gate["worst_slice"]
        yield f"worst slice: {worst['column']}={worst['value']}, accuracy {worst['accuracy']:.4f}"
    for external in gate["external"]:
        found = "no pair got a score" if not external["n"] else f"accuracy {external['accuracy']:.4f} on {external['n']} pairs"
        yield f"external {external['name']}: {found}"
        if missing := external.get("unscored_subsets"):
            yield (
                f"external {external['name']}: no sections and no score of RewardBench, since {len(missing)} of its subsets have no scored "
                f"pair: {', '.join(missing)}; see not_scored and left_out in metrics/gate.json"
            )
    for role in ("incumbent", "anchor"):
        if (other := gate[role]) is not None:
            difference = f"{other['difference']:+.4f} ({other['low']:+.4f} to {other['high']:+.4f})"
            yield f"{role} {other['version']}: accuracy {other['accuracy']:.4f} on {other['n']} pairs; this model's is {difference} from it"
    if gate["passed"] or not gate["needed"]:
        yield gate["message"]
    elif gate["override"] is not None:
        yield f"{gate['message']} Used anyway; gate.override says: {gate['override']}"


_REASONS: dict[str, Callable[[dict[str, Any], Check, GateConfig], str]] = {
    "pairs": _too_few,
    "accuracy": _inaccurate,
    FIRST_ERROR: _inaccurate,
    "incumbent_difference": _worse_than_promoted,
    "anchor_difference": _worse_than_promoted,
}
