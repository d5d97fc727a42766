"""The examples of CONTRIBUTING.md work in the modules that they are meant for."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest
import torch

from rlhf_core.algorithms import advantages
from rlhf_core.config import ScorerConfig
from rlhf_core.scorers import text
from rlhf_core.types import Prompt

PAGE = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text(encoding="utf-8")


def example(name: str, module) -> object:
    """The function of this name from a code block, defined among the names of the module."""
    (block,) = (code for code in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if f"def {name}(" in code)
    names = dict(vars(module))
    exec(textwrap.dedent(block), names)
    return names[name]


def test_the_estimator_by_hand():
    """The mean of 3, 1 and -1 is 1; a fourth response could not be scored, a fifth is masked."""
    centred = example("centred", advantages)
    mask = torch.tensor([[1, 1], [1, 0], [0, 1], [1, 1], [0, 0]], dtype=torch.bool)
    found = centred(torch.tensor([3.0, 1.0, -1.0, float("nan"), 9.0]), mask)
    assert torch.equal(found, torch.tensor([[2.0, 2.0], [0.0, 0.0], [0.0, -2.0], [0.0, 0.0], [0.0, 0.0]]))


def test_the_scorer_by_hand():
    no_shouting = example("no_shouting", text)
    config = ScorerConfig(name="it", kind="length", target_length=1)

    def item(response: str) -> text.ScoreItem:
        prompt = Prompt("id", "clerk", [{"role": "user", "content": "?"}], [5], None)
        return text.score_item(prompt, response, finished=True, response_length=3)

    assert no_shouting(item("AbCd"), config) == 0.5
    with pytest.raises(ValueError, match="no letters"):
        no_shouting(item("12"), config)
