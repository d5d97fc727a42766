"""Simulates intervals and decisions of evaluation, comparisons, calibration and agreement, by the functions that the stages call.

Each case draws a stage's counts and measures how often the interval contains the truth, or the decision is right.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import numpy as np
import pandas as pd
from scipy.special import expit

from rlhf_core.gate.calibration import calibration_error
from rlhf_core.preparation.labels import agreement
from rlhf_core.report.differences import Results, figures_that_count, headline
from rlhf_core.report.verdict import MODES, outcome
from rlhf_core.statistics.intervals import (
    detectable_difference,
    mean_interval,
    paired_interval,
    paired_means,
    points_interval,
    sign_test,
)
from tools.simulate.rows import Row

CONFIDENCE = 0.95
PROMPTS = 400  # evaluation.prompts
REWARD_MODEL = ({"name": "reward_model", "kind": "reward_model", "weight": 1.0},)
SEEDS_DEVIATION = 0.02  # standard deviation of the judge's share over seeds
PAGES = 4  # replications are divided by this where each makes a whole page
PARAMS = {
    "alignment": {"method": "rl"},
    "evaluation": {"confidence": CONFIDENCE},
    "rl": {"reward": {"scorers": list(REWARD_MODEL)}},
}

interval = lru_cache(maxsize=None)(lambda ahead, behind, n: paired_interval(ahead, behind, n, CONFIDENCE))
sign = lru_cache(maxsize=None)(sign_test)


def simulate(replications: int, rng: np.random.Generator) -> list[Row]:
    return [
        *win_rates(replications, rng),
        *judges_differences(replications, rng),
        *decisions(replications, rng),
        *calibration(replications, rng),
        *annotators(replications, rng),
        *seeds(replications, rng),
    ]


def hits(found: list[bool] | np.ndarray) -> tuple[int, int]:
    return int(np.sum(found)), len(found)


def contains(ends: tuple[float, float], truth: float) -> bool:
    return ends[0] - 1e-12 <= truth <= ends[1] + 1e-12


def cells(shares: tuple[float, ...], n: int, replications: int, rng: np.random.Generator) -> list[tuple[int, ...]]:
    """Counts of each category and of the rest; a tuple for each replication."""
    return [tuple(row) for row in rng.multinomial(n, [*shares, 1 - sum(shares)], size=replications).tolist()]


def win_rates(replications: int, rng: np.random.Generator) -> Iterator[Row]:
    for n, win, tie in ((400, 237 / 400, 154 / 400), (400, 0.3, 0.4), (50, 0.5, 0.3), (20, 0.8, 0.15)):
        drawn = cells((win, tie), n, replications, rng)
        found = [contains(interval(wins, losses, n), 2 * win + tie - 1) for wins, _, losses in drawn]
        yield Row(f"win rate, {n} prompts, {win:.0%} wins and {tie:.0%} ties: coverage", "0.95", *hits(found))


def judges_differences(replications: int, rng: np.random.Generator) -> Iterator[Row]:
    """Answers of two models of which the judge accepts only one."""
    for n, first_only, second_only in ((400, 0.035, 0.005), (400, 0.1, 0.1), (50, 0.2, 0.1), (20, 0.3, 0.05)):
        drawn = cells((first_only, second_only), n, replications, rng)
        found = [contains(interval(first, second, n), first_only - second_only) for first, second, _ in drawn]
        what = f"judge's difference, {n} prompts, only the first accepted on {first_only:.1%}, only the second on {second_only:.1%}"
        yield Row(f"{what}: coverage", "0.95", *hits(found))
    for first_only, second_only in ((0.035, 0.005), (0.06, 0.03)):
        drawn = cells((first_only, second_only), PROMPTS, replications, rng)
        what = f"a gain of 3 points, 400 prompts, only the first accepted on {first_only:.1%}, only the second on {second_only:.1%}: found"
        yield Row(what, "high", *hits([sign(first, second) < 1 - CONFIDENCE for first, second, _ in drawn]))
    for share in (0.02, 0.2):
        drawn = cells((share, share), PROMPTS, replications, rng)
        what = f"no gain, 400 prompts, each accepted alone on {share:.0%}: found"
        yield Row(what, "at most 0.05", *hits([sign(first, second) < 1 - CONFIDENCE for first, second, _ in drawn]))
    drawn = cells((0.05, 0.05), PROMPTS, replications, rng)
    gains = [detectable_difference(*interval(first, second, PROMPTS), CONFIDENCE) for first, second, _ in drawn]
    gain = float(np.mean(gains))
    drawn = cells((0.05 + gain / 2, 0.05 - gain / 2), PROMPTS, replications, rng)
    what = f"the gain detectable with 80% power ({100 * gain:.1f} points): found"
    yield Row(what, "0.8", *hits([sign(first, second) < 1 - CONFIDENCE for first, second, _ in drawn]))


def decisions(replications: int, rng: np.random.Generator) -> Iterator[Row]:
    """Rows for decisions about two models that are equally good."""
    tones = [outcome(equal_models(rng), REWARD_MODEL, confidence=CONFIDENCE).tone for _ in range(replications)]
    yield Row("policy and SFT model equally good: the report calls one better", "at most 0.05", *hits([tone != "open" for tone in tones]))
    coloured = []
    for _ in range(max(1, replications // PAGES)):
        rows = figures_that_count(a_run(0, 0.88, rng), a_run(0, 0.88, rng))
        coloured.append(any(row.tone for row in rows))
    yield Row("two runs equally good, 7 tests on their page: any row is coloured", "at most 0.05", *hits(coloured))
    better = []
    for _ in range(max(1, replications // PAGES)):
        one, other = (a_run(seed, rng.normal(0.88, SEEDS_DEVIATION), rng) for seed in (0, 1))
        better.append(headline(one, other, figures_that_count(one, other))[0] != "open")
    yield Row("two seeds of one configuration: its page calls one configuration better", "0", *hits(better))


def equal_models(rng: np.random.Generator) -> dict:
    """An evaluation of two equal models: each is accepted alone on 6% of the prompts and wins 30%."""
    found: dict = {"judge": True, "win_rate": {}, "difference": {}}
    for mode in MODES:
        ((first, second, _),) = cells((0.06, 0.06), PROMPTS, 1, rng)
        ((wins, losses, _),) = cells((0.3, 0.3), PROMPTS, 1, rng)
        low, high = interval(wins, losses, PROMPTS)
        rate = {"value": 0.5, "low": (1 + low) / 2, "high": (1 + high) / 2, "n": PROMPTS, "wins": wins, "losses": losses}
        found["win_rate"][mode] = rate | {"p_value": sign(wins, losses)}
        low, high = interval(first, second, PROMPTS)
        difference = {"value": (first - second) / PROMPTS, "low": low, "high": high, "p_value": sign(first, second)}
        found["difference"][mode] = {"judge_ok": difference}
        found[mode] = {model: {"judge_ok": 0.8, "score_mean": 0.0} for model in ("sft", "policy")}
    return found


def a_run(seed: int, accepted: float, rng: np.random.Generator) -> Results:
    """A run's results for a comparison: the judge accepts a share `accepted`; 59% of the prompts are wins, 38% ties."""
    table, evaluation = pd.DataFrame({"id": [f"{i:016x}" for i in range(PROMPTS)]}), {"win_rate": {}, "kl": {}}
    for mode in MODES:
        ok, score = (rng.random(PROMPTS) < accepted).astype(int), rng.normal(1.5, 1.5, PROMPTS)
        points = rng.choice([1.0, 0.5, 0.0], PROMPTS, p=(237 / 400, 154 / 400, 9 / 400))
        table[f"{mode}_judge_ok"], table[f"{mode}_score"], table[f"{mode}_points"] = ok, score, points
        low, high = mean_interval(score, CONFIDENCE)
        figures = {"score_mean": float(score.mean()), "score_low": low, "score_high": high, "length_mean": 8.0, "truncated_fraction": 0.0}
        evaluation[mode] = {"policy": figures | {"judge_ok": float(ok.mean()), "judge_n": PROMPTS}}
        low, high = points_interval(points.tolist(), CONFIDENCE)
        evaluation["win_rate"][mode], evaluation["kl"][mode] = {"value": float(points.mean()), "low": low, "high": high}, 1.0
    gate = {"accuracy": int(rng.binomial(1800, 0.86)) / 1800, "n_effective": 1800.0}
    return Results(f"seed {seed}", PARAMS | {"seed": seed}, {}, {"evaluate": evaluation, "gate_reward": gate}, table.to_csv(index=False))


def calibration(replications: int, rng: np.random.Generator) -> Iterator[Row]:
    """Calibrated margins, and margins with twice the log odds; once with three equal pairs per prompt."""
    inside = []
    for n, of_prompt, surer in ((210, 1, 1.0), (2000, 1, 1.0), (600, 3, 1.0), (210, 1, 2.0), (2000, 1, 2.0)):
        truth = true_calibration_error(surer, rng)
        found = []
        for _ in range(replications):
            margins, points = (np.repeat(column, of_prompt) for column in pairs(n // of_prompt, surer, rng))
            found.append(calibration_error(margins, points, np.repeat(np.arange(n // of_prompt), of_prompt), CONFIDENCE))
        means = f"mean found {np.mean([f.value for f in found]):.3f}, of the samples themselves {np.mean([f.sample for f in found]):.3f}"
        what = f"calibration error {truth:.3f}, {n} pairs of {n // of_prompt} prompts ({means}): coverage"
        yield Row(what, "0.95", *hits([contains((f.low, f.high), truth) for f in found]))
        inside += [f.low <= f.value <= f.high for f in found]
    yield Row("calibration error, all of these: the interval contains the value that is shown", "1", *hits(inside))


def pairs(n: int, surer: float, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Margins and points of n pairs; the log odds of the right order are the margin divided by `surer`."""
    margins = np.abs(rng.normal(1.5, 1.5, n))
    right = rng.random(n) < expit(margins / surer)
    return np.where(right, margins, -margins), right.astype(float)


def true_calibration_error(surer: float, rng: np.random.Generator) -> float:
    """The calibration error over bins, from the claims' distribution instead of outcomes."""
    margins = np.abs(rng.normal(1.5, 1.5, 1_000_000))
    at = np.minimum(((expit(margins) - 0.5) * 20).astype(int), 9)
    return float(np.abs(np.bincount(at, weights=expit(margins / surer) - expit(margins), minlength=10)).sum() / len(margins))


def annotators(replications: int, rng: np.random.Generator) -> Iterator[Row]:
    """Each item's share of annotators who choose a is drawn from a beta distribution."""
    items, a, b = 100, 1.0, 1.0
    truth = 1 - 2 * a * b / ((a + b) * (a + b + 1))
    for people in (2, 5):
        found = []
        for _ in range(replications):
            chosen = rng.random((items, people)) < rng.beta(a, b, (items, 1))
            votes = [{str(who): "a" if one else "b" for who, one in enumerate(row)} for row in chosen.tolist()]
            share = agreement(votes, CONFIDENCE)
            found.append(contains((share["low"], share["high"]), truth))
        yield Row(f"agreement of {people} annotators on {items} pairs: coverage", "0.95", *hits(found))


def seeds(replications: int, rng: np.random.Generator) -> Iterator[Row]:
    """Runs of one configuration with different ends, each measured on 400 prompts."""
    for n in (3, 5):
        ends = rng.normal(0.88, SEEDS_DEVIATION, (replications, n)) + rng.normal(0, 0.016, (replications, n))
        yield Row(
            f"mean over {n} seeds: coverage",
            "0.95",
            *hits([contains(mean_interval(row, CONFIDENCE), 0.88) for row in ends]),
        )
    first, second = (rng.normal(0.88, SEEDS_DEVIATION, (replications, 3)) for _ in range(2))
    found = [paired_means(one, other, CONFIDENCE).p_value < 1 - CONFIDENCE for one, other in zip(first, second, strict=True)]
    yield Row("two configurations equally good, 3 seeds of each: called different", "at most 0.05", *hits(found))
