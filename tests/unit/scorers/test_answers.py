"""Is a response's answer the label's: as text, as a number, as mathematics."""

from __future__ import annotations

import os
import signal
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_core.scorers.math_answers import MathComparer
from rlhf_core.scorers.text import final_number, same_number, same_text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("5 + 3 = 8\n#### 1,234", "1234"),
        ("#### 5, because 7 is more", "5"),  # after the mark the first one counts
        ("#### 5 no, #### 6", "6"),
        ("7 ####", None),
        ("first 3, then 9.", "9"),
        ("It costs $12.50", "12.50"),
        ("$1,000,000.", "1000000"),
        ("-$5", "-5"),
        ("$-5", "-5"),
        ("−7 degrees", "-7"),
        ("= -3", "-3"),
        ("5-3", "3"),  # a minus between numbers is no sign
        ("5 - 3", "3"),
        ("(-3)", "-3"),
        (".5", "0.5"),
        ("1e3", "1000"),
        ("12kg", "12"),
        ("50%", "50"),
        ("1,2,3", "3"),  # a list, not 123
        ("12,34", "34"),
        ("1/2", None),
        ("9 is 3 / 4 of it", "9"),
        ("9, on 1/2/2024", "9"),
        ("x2", None),
        ("none at all", None),
        ("", None),
    ],
)
def test_the_number_that_is_the_answer(text, expected):
    assert final_number(text) == (None if expected is None else Decimal(expected))


@given(st.decimals(min_value=-(10**12), max_value=10**12, places=3))
def test_a_number_is_read_however_it_is_written(value):
    for text in (f"{value}", f"{value:,}", f"so 7 and then {value:,}.", f"#### {value}\n7"):
        assert final_number(text) == value


def test_numbers_are_compared_by_value_and_a_label_without_one_is_no_zero():
    assert same_number("#### 1,234", "1234.0") and not same_number("1233.999", "1234") and not same_number("no idea", "3")
    with pytest.raises(ValueError, match="no number to compare with: 'many'"):
        same_number("3", "many")


def test_text_is_compared_but_for_white_space():
    assert same_text(" a  b\n", "a b") and not same_text("A b", "a b") and not same_text("ab", "a b")


@pytest.fixture(scope="module")
def comparer() -> MathComparer:
    return MathComparer()


@pytest.mark.parametrize(
    ("response", "label", "same"),
    [
        (r"The answer is $\frac{1}{2}$.", "0.5", True),
        (r"\boxed{1/2}", r"\frac{1}{2}", True),
        ("$x^2 + 2x + 1$", "(x+1)^2", True),
        (r"$\sqrt{8}$", r"2\sqrt{2}", True),
        (r"$\{1, 2\}$", r"\{2, 1\}", True),
        ("so it is 1,234", "1234", True),
        ("it is 5", "3", False),
        ("I don't know", "3", False),
        ("", "3", False),
    ],
)
def test_mathematics_is_compared_by_meaning(comparer, response, label, same):
    assert comparer.same(response, label) is same


def test_a_label_that_is_no_mathematics_is_refused(comparer):
    with pytest.raises(ValueError, match="no mathematical answer to compare with: ''"):
        comparer.same("3", "")


def test_a_comparison_without_end_has_no_result_and_the_next_one_does(comparer):
    with pytest.raises(ValueError, match="took longer than 5 s or too much memory: its process ended with code -14"):
        comparer.same("$10^{10^{10}}$", "3")
    assert comparer.same("3", "3") is True


@pytest.mark.parametrize("ended", [False, True])  # its pipe takes the question for as long as it has not ended
def test_a_child_that_was_killed_is_replaced(ended: bool):
    comparer = MathComparer()
    assert comparer.same("3", "3") is True
    os.kill(comparer._child.pid, signal.SIGKILL)
    if ended:
        comparer._child.wait()
    with pytest.raises(ValueError, match="ended with code -9"):
        comparer.same("3", "3")
    assert comparer.same("4", "3") is False
