"""Learning-rate schedules: factors of the peak learning rate, by optimizer step.

Every schedule warms up linearly and then follows a shape of SCHEDULES from 1 down to the floor:

    factor(s) = (s + 1) / warmup                           for s < warmup
    factor(s) = floor + (1 - floor) * shape(p, decay)      for s >= warmup,  p = (s - warmup) / (total - warmup), at most 1

A shape takes p in [0, 1], the share of the steps after the warm-up that are done, and `decay` in [0, 1], the share of those steps that
the decay of wsd takes.
"""

from __future__ import annotations

import math
from collections.abc import Callable


def cosine(p: float, decay: float) -> float:
    """(1 + cos(pi p)) / 2. Source: Loshchilov and Hutter 2017, https://arxiv.org/abs/1608.03983"""
    return 0.5 * (1 + math.cos(math.pi * p))


def linear(p: float, decay: float) -> float:
    """1 - p."""
    return 1 - p


def constant(p: float, decay: float) -> float:
    """1: the floor is never reached."""
    return 1.0


def warmup_stable_decay(p: float, decay: float) -> float:
    """1 until the decay begins, then 1 - sqrt(q), where q in [0, 1] is the share of the decay that is done.

    Sources: Hu et al. 2024 (MiniCPM), https://arxiv.org/abs/2404.06395; the square root: Hägele et al. 2024,
    https://arxiv.org/abs/2405.18392, section 3.
    """
    return 1 - math.sqrt(_decayed(p, decay))


def warmup_stable_decay_linear(p: float, decay: float) -> float:
    """As warmup_stable_decay with 1 - q in place of 1 - sqrt(q)."""
    return 1 - _decayed(p, decay)


def _decayed(p: float, decay: float) -> float:
    """Share of the decay that is done; the decay takes the last `decay` of the steps."""
    return 0.0 if p <= 1 - decay else min(1.0, (p - (1 - decay)) / decay)


def learning_rate_factor(step: int, *, schedule: str, total: int, warmup: int, floor: float, decay_fraction: float) -> float:
    """Factor of the peak learning rate at a step, counted from 0.

    Args:
        schedule: of SCHEDULES.
        total: optimizer steps of the training; later steps have the factor of step `total`.
        warmup: its first steps, with a linear increase from 1/warmup to 1.
        floor: factor at step `total`, in [0, 1]. constant ignores it.
        decay_fraction: the share of `total` over which wsd and wsd_linear decay, in [0, 1].
    """
    if step < warmup:
        return (step + 1) / warmup
    after_warmup = max(1, total - warmup)
    shape = SCHEDULES[schedule](min(1.0, (step - warmup) / after_warmup), min(1.0, decay_fraction * total / after_warmup))
    return floor + (1 - floor) * shape


SCHEDULES: dict[str, Callable[[float, float], float]] = {
    "cosine": cosine,
    "linear": linear,
    "constant": constant,
    "wsd": warmup_stable_decay,
    "wsd_linear": warmup_stable_decay_linear,
}
