"""The format compared: two responses and a number that says which one is better."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_core.config import SourceConfig
from rlhf_core.preparation.drops import Dropped, Misfit
from rlhf_core.preparation.formats import convert

SOURCE = SourceConfig(name="x", kind="file", path="x.jsonl", format="compared", uses=["sft", "preference", "prompt"], weight=1.0)


def record(preference, **other) -> dict:
    return {"prompt": "2 + 2?", "first": "one", "second": "two", "preference": preference, **other}


@pytest.mark.parametrize(
    ("preference", "chosen", "rejected"), [(-3, "one", "two"), (2, "two", "one"), (0.5, "two", "one"), ("-1", "one", "two")]
)
def test_the_sign_says_which_response_is_chosen(preference, chosen, rejected):
    rows = convert(record(preference), SOURCE)
    messages = [{"role": "user", "content": "2 + 2?"}]
    assert rows["preference"] == [{"messages": messages, "chosen": chosen, "rejected": rejected}]
    assert rows["sft"] == [{"messages": messages, "response": chosen}]


def test_a_conversation_is_the_prompt_with_all_of_its_turns():
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    assert convert(record(1, prompt=turns), SOURCE)["preference"][0]["messages"] == turns


@pytest.mark.parametrize(("preference", "reason"), [(0, "neither response is preferred"), (None, "preference is null")])
def test_a_record_without_a_preference_is_dropped(preference, reason):
    with pytest.raises(Dropped, match=reason):
        convert(record(preference), SOURCE)


@pytest.mark.parametrize("preference", ["a", True, math.nan, "nan", "inf", [1]])
def test_what_is_no_number_is_none(preference):
    with pytest.raises(Misfit, match="preference"):
        convert(record(preference), SOURCE)


TEXT = st.text(min_size=1, max_size=20).filter(str.strip)


@given(st.lists(TEXT, min_size=0, max_size=4), TEXT, TEXT, st.floats(-3, 3).filter(bool))
def test_every_text_comes_out(earlier, first, second, preference):
    turns = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate([*earlier[: len(earlier) // 2 * 2], "now?"])]
    (row,) = convert(record(preference, prompt=turns, first=first, second=second), SOURCE)["preference"]
    clean = [text.replace("\r\n", "\n").replace("\r", "\n") for text in (*(t["content"] for t in turns), first, second)]
    sides = [row["chosen"], row["rejected"]]
    assert [m["content"] for m in row["messages"]] + (sides if preference < 0 else sides[::-1]) == clean
