"""What a reward function may return, or do instead: scores, or no score and the reason; never a 0 of its own, never the end of the run."""

from __future__ import annotations

import logging
import math
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[2]))
from hostile import NASTY_VALUES, is_clear

from rlhf_core.config import ScorerConfig
from rlhf_core.scorers.text import ScoreItem, TextScorers, same_number, same_text

PROGRAM = """\
import itertools, sys
class Rude:
    def __float__(self): raise RuntimeError("no")
    def __repr__(self): raise RuntimeError("no")
    def __len__(self): raise RuntimeError("no")
    def __iter__(self): raise RuntimeError("no")
ANSWER = None
def answer(prompts, responses, labels, metadata):
    return ANSWER
def endless(prompts, responses, labels, metadata):
    return itertools.repeat(1.0)
def leaves(prompts, responses, labels, metadata):
    sys.exit(0)
def late(prompts, responses, labels, metadata):
    yield 1.0
    raise KeyError("late")
def rude(prompts, responses, labels, metadata):
    return [Rude()] * len(responses), {"m": Rude()}
def rude_itself(prompts, responses, labels, metadata):
    return Rude()
def spoils(prompts, responses, labels, metadata):
    metadata[0].clear(); responses.clear(); prompts.append(1)
    return [1.0, 2.0]
"""
ITEMS = [ScoreItem("q", [], "r", None, {"id": str(i), "source": "s"}) for i in range(2)]


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("rewards") / "mine.py"
    path.write_text(PROGRAM)
    return path


def scorers(program: Path, name: str) -> TextScorers:
    return TextScorers(0, [ScorerConfig(name="f", kind="function", weight=1.0, normalization="none", path=f"{program}:{name}")], {})


@pytest.mark.parametrize("name", ["endless", "leaves", "late", "rude", "rude_itself"])
def test_what_fails_in_any_way_gives_no_score(program, name, caplog):
    with caplog.at_level(logging.WARNING, "rlhf"):
        scores, metrics = scorers(program, name).score_items("f", ITEMS)
    assert all(math.isnan(s) for s in scores) and len(scores) == 2 and all(math.isnan(m) for m in metrics.values())
    assert len(caplog.messages) == 1 and is_clear(caplog.messages[0]), caplog.messages


def test_a_function_that_spoils_its_arguments_spoils_nothing_else(program):
    before = [ScoreItem(i.prompt, list(i.messages), i.response, i.label, dict(i.metadata)) for i in ITEMS]
    assert scorers(program, "spoils").score_items("f", ITEMS) == ([1.0, 2.0], {})
    assert before == ITEMS


@settings(max_examples=60)
@given(
    answer=st.lists(st.sampled_from(NASTY_VALUES) | st.floats() | st.integers(), max_size=3)
    | st.sampled_from(NASTY_VALUES)
    | st.tuples(
        st.lists(st.floats(), min_size=2, max_size=2), st.dictionaries(st.text(max_size=3), st.sampled_from(NASTY_VALUES), max_size=2)
    )
)
def test_any_answer_gives_finite_scores_or_none(program, answer):
    loaded = scorers(program, "answer")
    module = next(m for name, m in sys.modules.items() if name.startswith("user_mine"))
    module.ANSWER = answer
    scores, metrics = loaded.score_items("f", ITEMS)
    assert len(scores) == 2 and all(isinstance(s, float) and (math.isnan(s) or math.isfinite(s)) for s in scores)
    for name, value in metrics.items():
        assert isinstance(value, float)
        name.encode()


@settings(max_examples=100)
@given(response=st.text(max_size=40) | st.from_regex(r"[-+$(0-9.,eE/# ]{0,40}"), label=st.sampled_from(["7", "-1.5e10", "1,000"]))
def test_any_response_can_be_compared(response, label):
    assert same_number(response, label) in (True, False) and same_text(response, label) in (True, False)


@pytest.mark.parametrize(
    "response", ["9" * 300_000, "1e9999", "-" * 100_000, "1," * 100_000, "#### " * 50_000, "1/" * 100_000, "$ " * 100_000]
)
@pytest.mark.timeout(20)
def test_a_response_made_to_be_slow_is_compared_in_time(response):
    assert same_number(response, "7") is False
