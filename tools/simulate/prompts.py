"""Simulates intervals over prompts and the gate's verdict for prompts with different numbers of pairs, by the gate's own functions."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from scipy.special import ndtri

from rlhf_core.config import GateConfig
from rlhf_core.gate.looks import at_look, look_level
from rlhf_core.statistics.clusters import difference_interval, mean_interval, share_interval
from tools.simulate.gate import THRESHOLD, Split, passes, settings
from tools.simulate.rows import Row

ACCURACY, OTHER = 0.85, 0.86
LOOK = 3  # a later one, at which the tails count


def lognormal(prompts: int, deviation: float) -> np.ndarray:
    """Quantiles of a lognormal distribution with median 4, rounded, at least 1."""
    return np.maximum(1, np.round(4 * np.exp(deviation * ndtri((np.arange(prompts) + 0.5) / prompts)))).astype(int)


SIZES = {
    "100 prompts of 6 pairs": np.full(100, 6),
    "one prompt of 90 pairs, 177 of one": np.array([90] + [1] * 177),
    "one prompt of 90 pairs, 59 of 3": np.array([90] + [3] * 59),
    "one prompt of 30 pairs, 270 of one": np.array([30] + [1] * 270),
    "40 prompts, lognormal (1.0)": lognormal(40, 1.0),
    "150 prompts, lognormal (0.5)": lognormal(150, 0.5),
    "150 prompts, lognormal (1.0)": lognormal(150, 1.0),
    "150 prompts, lognormal (1.5)": lognormal(150, 1.5),
    "720 prompts, lognormal (1.5)": lognormal(720, 1.5),
}
OF_PROMPT = (0.0, 0.08, 0.3)  # the prompt's part of a pair's variable


def judged(rng: np.random.Generator, config: GateConfig, sizes: np.ndarray, of_prompt: float) -> tuple[bool, ...]:
    """Whether intervals contain the truth (of an accuracy, a difference on the same pairs and a mean), and whether a model at the threshold
    passes at look 1 and at LOOK.
    """
    split = Split.draw(rng, sizes, of_prompt)
    ours, theirs, at_threshold = (split.points(accuracy, rng) for accuracy in (ACCURACY, OTHER, THRESHOLD))
    accuracy = share_interval(ours, split.prompts, 0.95)
    difference, mean = difference_interval(ours - theirs, split.prompts, 0.95), mean_interval(split.shared, split.prompts, 0.95)
    return (
        accuracy.low <= ACCURACY <= accuracy.high,
        difference[0] <= ACCURACY - OTHER <= difference[1],
        mean[0] <= 0 <= mean[1],
        passes(split, at_threshold, config),
        passes(split, at_threshold, at_look(config, LOOK)),
    )


def simulate(replications: int, rng: np.random.Generator) -> Iterator[Row]:
    config = settings().model_copy(update={"min_pairs": 1})
    what = (
        ("95% interval of an accuracy holds the truth", "0.95 or more"),
        ("95% interval of a difference holds the truth", "0.95 or more"),
        ("95% interval of a mean holds the truth", "0.95 or more"),
        ("a model at the threshold passes", "at most 0.025"),
        (f"a model at the threshold passes at look {LOOK}", f"at most {look_level(config.confidence, LOOK):.2g}"),
    )
    for name, sizes in SIZES.items():
        for of_prompt in OF_PROMPT:
            found = [judged(rng, config, sizes, of_prompt) for _ in range(replications)]
            for (case, wanted), hits in zip(what, zip(*found, strict=True), strict=True):
                yield Row(f"{name}, the prompt's part {of_prompt}: {case}", wanted, sum(hits), replications)
