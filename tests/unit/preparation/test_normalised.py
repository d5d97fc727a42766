"""Normalised text: what a reader overlooks is gone, what makes another question stays."""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_core.preparation.normalised import normalised_text


@pytest.mark.parametrize(
    "other",
    [
        "What's 1.5 + 2",
        "what's  1.5 +\n2 ?!",
        "What\u2019s 1.5 + 2?",
        "Wh\u200bat's 1.\u20605 + 2?\ufeff",  # zero-width space, word joiner, byte-order mark
        "What's\u00a01.5 + 2?",
        "\u00abWhat's\u00bb 1.5 + 2\u2026",
        "\uff37hat's \uff11.5 \uff0b 2\uff1f",  # full width
        "Wha\ufe0ft's 1.5 + 2?",  # a variation selector
    ],
)
def test_overlooked_differences_vanish(other: str):
    assert normalised_text(other) == normalised_text("What's 1.5 + 2?") == "whats 1.5 + 2"


def test_brackets_and_exclamation_marks_of_prose_vanish():
    assert normalised_text("Hello! (Room 12) [now]!") == normalised_text("Hello, room 12, now.") == "hello room 12 now"


def test_accents_are_composed_and_cases_folded():
    assert normalised_text("Stra\u00dfe CAFE\u0301") == normalised_text("STRASSE caf\u00e9") == "strasse caf\u00e9"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        *(("2+2?", "2-2?"), ("2 - 2", "2 + 2"), ("1.5", "15"), ("at 12:30", "at 1230"), ("-5", "5"), ("$5", "5"), ("50%", "50")),
        *(("(2 + 3) * 4", "2 + (3 * 4)"), ("(2+3)*4", "2+3*4"), ("5!", "5"), ("Is x != y?", "Is x = y?"), ("(2 + 1)!", "(2 + 1)")),
        *(("Sort 4066.", "Sort 4067."), ("x = y", "x y"), ("C#", "C"), ("?", "!")),
        ("\u0915\u093f", "\u0915\u0940"),  # two vowel signs of Devanagari
    ],
)
def test_other_questions_stay_different(one: str, other: str):
    assert normalised_text(one) != normalised_text(other)


def test_invisible_text_is_empty():
    assert normalised_text(" \u200b\u00ad\u3164\u2060\n") == ""


@given(st.text(max_size=40))
def test_normalising_twice_changes_nothing_and_composition_doesnt_matter(text: str):
    once = normalised_text(text)
    assert normalised_text(once) == once == normalised_text(unicodedata.normalize("NFD", text))
    assert once == " ".join(once.split())


@given(st.lists(st.sampled_from("a1 .,:-'\u200b\u2013?(!)=+"), max_size=12).map("".join))
def test_normalising_marks_around_numbers_twice_changes_nothing(text: str):
    assert normalised_text(normalised_text(text)) == normalised_text(text)
