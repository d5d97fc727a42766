"""Training that taught nothing is told from training that taught something, by held-out loss and accuracy."""

from __future__ import annotations

import math

import pytest
from tiny_models import tiny_params

from rlhf_core.stage.unlearned import unlearned


def told(*, gain: float, error: float, accuracy: float, pairs: int = 100, section: str = "dpo") -> str | None:
    untrained = {"loss": math.log(2), "gain": gain, "gain_error": error, "accuracy_error": 0.5 / math.sqrt(pairs)}
    return unlearned(section, {"heldout_accuracy": accuracy, "untrained": untrained}, tiny_params())


def test_a_loss_that_stayed_at_ln_2_gets_the_usual_remedies():
    found = told(gain=0.0004, error=0.001, accuracy=0.53)
    assert found.startswith(
        "dpo: the held-out loss ended at 0.6927 against 0.6931, ln 2, of an untrained model, and the held-out accuracy at 0.530: "
        "nothing was learned that held-out data show. Usual remedies: a higher dpo.learning_rate (it is "
    )
    assert "5e-7 to 1e-6 is usual" in found and "a lower dpo.beta" in found
    of_reward = told(gain=0.0004, error=0.001, accuracy=0.53, section="reward")
    assert "3e-6 to 1e-5 is usual" in of_reward and "beta" not in of_reward


@pytest.mark.parametrize(
    ("gain", "error", "accuracy", "what"),
    [
        (0.0004, 0.001, 0.53, "nothing was learned"),
        (0.004, 0.001, 0.53, "hardly anything"),  # 0.004 + 0.00196 is below 2% of 0.6931, which is 0.0139
        (0.0004, 0.001, 0.62, "hardly anything"),  # 0.62 - 1.96 * 0.05 = 0.522 is above 0.5
        (0.02, 0.001, 0.53, None),  # the loss fell by 3%, and certainly
        (0.1, 0.1, 0.53, "nothing was learned"),  # on so few pairs a fall by chance
        (-0.3, 0.05, 0.75, None),  # too sure, but right
        (-0.3, 0.05, 0.55, "nothing was learned"),
    ],
)
def test_loss_and_accuracy_decide_together(gain, error, accuracy, what):
    found = told(gain=gain, error=error, accuracy=accuracy)
    assert found is None if what is None else what in found


def test_a_loss_above_the_untrained_one_asks_for_other_data_and_not_for_a_higher_rate():
    found = told(gain=-0.3, error=0.05, accuracy=0.55)
    assert "more or cleaner pairs" in found and "learning_rate" not in found


def test_a_loss_without_an_untrained_value_is_not_judged():
    assert unlearned("dpo", {"heldout_accuracy": 0.5}, tiny_params()) is None
