"""The end of training by `max_minutes`.

The limit counts the wall-clock time of steps, evaluations and checkpoints, also before a resume, but not the evaluation and the checkpoint
at which training stopped.
"""

from __future__ import annotations

import logging
from typing import Any

log = logging.getLogger("rlhf")


def out_of_time(seconds: float, max_minutes: float | None) -> bool:
    return max_minutes is not None and seconds >= 60 * max_minutes


def ended_by_time(subject: str, done: int, planned: int) -> dict[str, Any]:
    """Return metrics of training that ended by `max_minutes` after `done` of `planned` steps, and log what that means."""
    log.warning(
        "%s: max_minutes ended the training after step %d of %d, at %.0f%% of the learning rate's schedule, which is not bent; with fewer "
        "epochs or steps, about %d, it decays to its end; another run gets as far as its machine allows, so this one can't be rebuilt",
        subject,
        done,
        planned,
        100 * done / planned,
        done,
    )
    return {"planned_steps": planned, "ended_by": "max_minutes"}
