"""Whether training on preferences has taught anything that held-out data show."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rlhf_core.config import Params
from rlhf_core.config.usual import usual

CERTAIN = 1.96  # standard errors of a two-sided 95% interval
LITTLE = 0.02  # share of the untrained model's loss; a smaller gain is hardly any
REWARD = "reward"


def unlearned(section: str, metrics: Mapping[str, Any], params: Params) -> str | None:
    """Return a sentence on training that taught nothing or hardly anything, with the usual remedies; None if it taught something.

    Nothing: the interval of the fall in held-out loss below an untrained model's doesn't lie above 0, and that of the held-out accuracy not
    above 0.5. Hardly anything: the loss has changed by less than LITTLE of the untrained model's, with all of its interval.
    Both intervals take held-out pairs as independent. Pairs of one prompt aren't, so training that taught nothing can escape.

    Args:
        section: of params.yaml. metrics: with `untrained` of `beside_untrained`, where the loss has an untrained value.
    """
    found = metrics.get("untrained")
    if found is None:
        return None
    gain, error, accuracy = found["gain"], CERTAIN * found["gain_error"], metrics["heldout_accuracy"]
    if gain <= error and accuracy - CERTAIN * found["accuracy_error"] <= 0.5:
        what = "nothing was learned that held-out data show"
    elif abs(gain) + error < LITTLE * found["loss"]:
        what = "hardly anything was learned"
    else:
        return None
    name = f"{found['loss']:.4f}" + (", ln 2," if math.isclose(found["loss"], math.log(2), abs_tol=1e-4) else "")
    ended = f"the held-out loss ended at {found['loss'] - gain:.4f} against {name} of an untrained model"
    remedies = _other_data(section) if gain + error < 0 else _more_training(section, params)
    return f"{section}: {ended}, and the held-out accuracy at {accuracy:.3f}: {what}. Usual remedies: {remedies}."


def _more_training(section: str, params: Params) -> str:
    config = getattr(params, section)
    range_ = usual(f"{section}.learning_rate", lora=config.lora is not None, optimizer=config.optimizer)
    weaker = "" if section == REWARD else f", a lower {section}.beta"
    return (
        f"a higher {section}.learning_rate (it is {config.learning_rate:.2g}; {range_} is usual for pretrained models, and small "
        f"models take more), more {section}.epochs{weaker}, or more pairs whose sides differ clearly"
    )


def _other_data(section: str) -> str:
    """Return advice for a loss above the untrained model's: training has moved the model, but not to anything that holds for other data."""
    return f"more or cleaner pairs, a check that chosen and rejected are mapped correctly, or fewer {section}.epochs"
