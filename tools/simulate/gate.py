"""Simulates how often the gate lets a bad reward model pass, how far a chain of promotions slides, and how often a good model passes.

The gate's own checks (rlhf_core/gate) decide on points drawn from a Gaussian copula. A pair is right where a normal variable, the sum of
a part of its prompt, of the pair and of the model, is below the quantile of the model's true accuracy. Models share the parts of prompts
and pairs, so they tend to be right on the same ones, as models of one recipe are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtri

from rlhf_core.config import GateConfig
from rlhf_core.gate.checks import all_checks
from rlhf_core.gate.heldout import nothing_measured
from rlhf_core.gate.looks import at_look, look_level
from rlhf_core.gate.pairs import Pairs, compare, summarize
from rlhf_core.statistics.clusters import difference_interval, share_interval
from tools.clerk import clerk_params
from tools.simulate.rows import Row

PROMPTS, PAIRS = 720, 6  # pairs of each prompt; about the size of the built-in data's test split
OF_PROMPT, OF_PAIR = 0.08, 0.75  # of the variance: a design effect of 1.2, and two models of 0.85 that disagree on 11% of the pairs
THRESHOLD, START, STEP, CHAIN, YEAR, MARGIN = 0.75, 0.88, 0.005, 30, 365, 0.02
BETTER = 0.775


@dataclass(frozen=True)
class Split:
    """One draw of held-out pairs: the shared part of each pair's variable [N], and the pairs' prompts [N]."""

    shared: np.ndarray
    prompts: np.ndarray

    @classmethod
    def draw(cls, rng: np.random.Generator, sizes: np.ndarray | None = None, of_prompt: float = OF_PROMPT) -> Split:
        """Draw a split.

        sizes: number of pairs of each prompt; None means PAIRS for each of PROMPTS. of_prompt: the prompt's part of what models share.
        """
        prompts = np.repeat(np.arange(PROMPTS), PAIRS) if sizes is None else np.repeat(np.arange(len(sizes)), sizes)
        parts = rng.standard_normal(prompts.max() + 1)[prompts], rng.standard_normal(len(prompts))
        return cls(math.sqrt(of_prompt) * parts[0] + math.sqrt(OF_PROMPT + OF_PAIR - of_prompt) * parts[1], prompts)

    def points(self, accuracy: float, rng: np.random.Generator) -> np.ndarray:
        """Return the points [N] of a model with this true accuracy."""
        own = math.sqrt(1 - OF_PROMPT - OF_PAIR) * rng.standard_normal(len(self.shared))
        return (self.shared + own < ndtri(accuracy)).astype(float)


def passes(split: Split, points: np.ndarray, config: GateConfig, **promoted: np.ndarray) -> bool:
    """Return the gate's verdict on points alone.

    promoted: points of incumbent and anchor, if any.
    """
    n = len(points)
    none = np.zeros(n, dtype=int)
    pairs = Pairs(points, np.full(n, 0.5), none, none, none, split.prompts, none)
    compared = {role: compare(points, other, split.prompts, config.confidence) | {"md5": role} for role, other in promoted.items()}
    gate = {**nothing_measured(config), **summarize(pairs, config.confidence), **compared}
    return all(check.passed is not False for check in all_checks(gate, config, exact_scores=True))


def any_passes(rng: np.random.Generator, config: GateConfig, *, tries: int, counted: bool, same_pairs: bool) -> bool:
    """Return whether any of several models passes whose true accuracy is the threshold.

    same_pairs: whether all models are judged on the same pairs; otherwise each has its own.
    """
    split = Split.draw(rng)
    for number in range(1, tries + 1):
        if number > 1 and not same_pairs:
            split = Split.draw(rng)
        if passes(split, split.points(THRESHOLD, rng), at_look(config, number) if counted else config):
            return True
    return False


def chain(rng: np.random.Generator, config: GateConfig, *, guarded: bool, fresh: bool = False, nights: int = CHAIN) -> float:
    """Return the true accuracy at the end of a chain of candidates, each worse by STEP than the promoted model, which it replaces if it
    passes.

    Args:
        guarded: whether the anchor is compared too and looks are counted; otherwise only the incumbent is, and every look counts as the
            first.
        fresh: whether each night has other pairs, so that every look is the first.
    """
    split = Split.draw(rng)
    truth = held = START  # of incumbent and anchor
    incumbent = anchor = split.points(START, rng)
    for number in range(2, nights + 2):  # the first promoted one was look 1
        if fresh:
            split = Split.draw(rng)
            incumbent = split.points(truth, rng)
            anchor = incumbent if held == truth else split.points(held, rng)
        candidate = split.points(truth - STEP, rng)
        at = at_look(config, number) if guarded and not fresh else config
        if passes(split, candidate, at, incumbent=incumbent, **({"anchor": anchor} if guarded else {})):
            truth, incumbent = truth - STEP, candidate
            if compare(candidate, anchor, split.prompts, at.confidence)["low"] > 0:  # flows.registry.state.Registry.anchor
                held, anchor = truth, candidate
    return truth


def chain_row(rng: np.random.Generator, config: GateConfig, how: str, replications: int, *, nights: int = CHAIN, **options: bool) -> Row:
    """Return a row on how often a chain ends below the margin.

    options: options of `chain`.
    """
    ends = np.array([chain(rng, config, nights=nights, **options) for _ in range(replications)])
    case = (
        f"{nights} candidates from {START}, each truly worse by {STEP}, end more than {MARGIN} below, {how} "
        f"(at {ends.mean():.3f} in the mean, {ends.min():.3f} at worst)"
    )
    below = int((ends < START - MARGIN - STEP / 2).sum())
    return Row(case, "at most 0.05" if nights == CHAIN else "no bound", below, replications)


def power(rng: np.random.Generator, config: GateConfig, number: int) -> tuple[bool, bool]:
    """Whether a model of accuracy BETTER passes the threshold at a look, and whether one of START passes with incumbent and anchor of
    START.
    """
    split = Split.draw(rng)
    config = at_look(config, number)
    equal, incumbent, anchor = (split.points(START, rng) for _ in range(3))
    return passes(split, split.points(BETTER, rng), config), passes(split, equal, config, incumbent=incumbent, anchor=anchor)


def worse_passes(rng: np.random.Generator, config: GateConfig) -> bool:
    """Whether a model passes that is worse than the incumbent by the whole margin."""
    split = Split.draw(rng)
    return passes(split, split.points(START - MARGIN, rng), config, incumbent=split.points(START, rng))


def loser_passes(rng: np.random.Generator, config: GateConfig, *, prompts: int, number: int, replications: int) -> int:
    """How often a model passes that is worse than the incumbent by the whole margin and right on no pair that the incumbent has wrong."""
    split = Split(np.zeros(prompts), np.arange(prompts))
    right = np.ones(prompts)
    config, verdicts, hits = at_look(config, number), {}, 0
    for lost in rng.binomial(prompts, MARGIN, replications):
        if lost not in verdicts:
            verdicts[lost] = passes(split, np.where(np.arange(prompts) < lost, 0.0, 1.0), config, incumbent=right)
        hits += verdicts[lost]
    return hits


def covered(rng: np.random.Generator) -> tuple[bool, bool]:
    """Whether the interval of an accuracy, and that of a difference on the same pairs, contain the truth."""
    split = Split.draw(rng)
    ours, theirs = split.points(0.85, rng), split.points(0.86, rng)
    accuracy = share_interval(ours, split.prompts, 0.95)
    low, high = difference_interval(ours - theirs, split.prompts, 0.95)
    return accuracy.low <= 0.85 <= accuracy.high, low <= -0.01 <= high


def settings() -> GateConfig:
    """The clerk's settings of the gate, with the rows' threshold and margin."""
    return clerk_params().gate.model_copy(update={"min_accuracy": THRESHOLD, "max_regression": MARGIN})


def simulate(replications: int, rng: np.random.Generator) -> list[Row]:
    config = settings()
    found = [covered(rng) for _ in range(replications)]
    rows = [
        Row(f"95% interval of {what} holds the truth", "0.95", sum(f[k] for f in found), replications)
        for k, what in enumerate(("an accuracy of 0.85", "a difference of 0.01 on the same pairs"))
    ]
    for tries in (1, 10, 30):
        for same_pairs in (True, False) if tries > 1 else (True,):
            for counted in (False, True) if tries > 1 else (True,):
                hits = sum(any_passes(rng, config, tries=tries, counted=counted, same_pairs=same_pairs) for _ in range(replications))
                where = "" if tries == 1 else ", on the same pairs" if same_pairs else ", each on pairs of its own"
                how = "" if tries == 1 else ", looks counted" if counted else ", each judged as the first look"
                case = f"{'a model' if tries == 1 else f'any of {tries} models'} at the threshold passes{where}{how}"
                rows.append(Row(case, "at most 0.025" if tries == 1 else "at most 0.05", hits, replications))
    rows.append(chain_row(rng, config, "against the incumbent alone, each judged as the first look", replications, guarded=False))
    rows.append(chain_row(rng, config, "with the anchor, on the same pairs, looks counted", replications, guarded=True))
    worse = sum(worse_passes(rng, config) for _ in range(replications))
    rows.append(Row(f"a model that is worse than the incumbent by {MARGIN} passes", "at most 0.025", worse, replications))
    for prompts in (200, PROMPTS):
        for number in (1, 3, 10):
            hits = loser_passes(rng, config, prompts=prompts, number=number, replications=replications)
            case = f"the same, never ahead, {prompts} prompts of one pair, look {number}"
            rows.append(Row(case, f"at most {look_level(config.confidence, number):.2g}", hits, replications))
    for number in (1, 2, 5, 10, 30):
        found = [power(rng, config, number) for _ in range(replications)]
        for k, what in enumerate((f"a model of {BETTER}", f"a model as good as incumbent and anchor ({START})")):
            rows.append(Row(f"{what} passes at look {number}", "high", sum(f[k] for f in found), replications))
    other_pairs = "with the anchor, on other pairs every night"
    rows.append(chain_row(rng, config, other_pairs, replications, guarded=True, fresh=True))
    rows.append(chain_row(rng, config, other_pairs, max(1, replications // 10), guarded=True, fresh=True, nights=YEAR))
    return rows
