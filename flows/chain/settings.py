"""Warns at the start of a run of settings that wreck pretrained models."""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path

from flows.runs.record import note
from rlhf_core.config import Params, unusual
from rlhf_core.planning.models import base_model
from rlhf_core.planning.shape import named_shape

log = logging.getLogger("rlhf.flows")


def warn_of_settings(workspace: Path, params: Params, *, rounds: bool = False) -> None:
    """Log a warning for each such setting, and keep them in the run's record.

    Args:
        rounds: whether the run is a series of rounds of iterative DPO.
    """
    found = unusual(params, _size(params), rounds=rounds)
    note(workspace, warnings=found)
    for line in found:
        log.warning("%s", line)


def _size(params: Params) -> int | None:
    """Return the number of the model's parameters, or None if it is unknown."""
    with suppress(ValueError, OSError):  # stage check_model refuses a damaged folder
        if (found := base_model(params.model)) is not None:
            return found.parameters
    shape = named_shape(params.model.path) if params.model.path else None
    return None if shape is None else shape.parameters
