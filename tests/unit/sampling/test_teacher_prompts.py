"""What teachers read in place of the last user message, and prompts for which there is no such text."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from tiny_models import tiny_tokenizer

from rlhf_core.data.schema import whole_message
from rlhf_core.models.tokenizer import encode_prompt
from rlhf_core.sampling.prompts import fitting_prompts, teacher_messages

TEMPLATE = "{prompt} The solution is {label}; {other}."
TALK = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}, {"role": "user", "content": "{label} sort 4172."}]


def row(messages: list[dict[str, str]] = TALK, label: str | None = "1247 {prompt}", **further: Any) -> dict:
    return {"id": "p1", "source": "mine", "messages": messages, "label": label, **further}


def test_the_last_message_is_filled_in_once():
    """What a message or a label holds is no placeholder, and other braces are text."""
    found = teacher_messages(row(), TEMPLATE)
    assert found[:2] == TALK[:2]
    assert found[2] == {"role": "user", "content": "{label} sort 4172. The solution is 1247 {prompt}; {other}."}
    assert TALK[2]["content"] == "{label} sort 4172."


def test_a_message_in_parts_is_filled_in_too():
    """A template that takes parts would otherwise write the student's."""
    parts = [{"type": "text", "text": "Please"}, {"type": "text", "text": "sort 4172."}]
    extra = json.dumps({"content": parts, "tools": [{"name": "sorted"}]})
    (found,) = teacher_messages(row([{"role": "user", "content": "Please\nsort 4172.", "extra": extra}], label="1247"), TEMPLATE)
    assert whole_message(found) == {
        "role": "user", "content": "Please\nsort 4172. The solution is 1247; {other}.", "tools": [{"name": "sorted"}],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("of", "why"),
    [
        (row(label=None), "expected a label of every training prompt, got none of p1 of source mine; map"),
        (
            row(messages=[{"role": "system", "content": "Be good."}]),
            "expected a user's message in every prompt, got none in p1 of source mine",
        ),
    ],
    ids=["no label", "no user"],
)
def test_a_prompt_that_lacks_what_the_template_needs_is_refused(of: dict, why: str):
    with pytest.raises(ValueError, match=f"rl.distillation.teacher_template: {why}"):
        teacher_messages(of, TEMPLATE)


def test_without_a_place_for_it_no_label_is_needed():
    assert teacher_messages(row(label=None), "{prompt} Be brief.")[2]["content"] == "{label} sort 4172. Be brief."


def test_a_prompt_whose_longer_text_leaves_no_room_is_left_out(caplog):
    tokenizer, rows = tiny_tokenizer(), [row(), row(label="9" * 40)]
    (short,) = fitting_prompts(rows[:1], tokenizer, longest=1000, teacher_template=TEMPLATE)
    assert short.prompt_ids == encode_prompt(tokenizer, TALK) and short.teacher_ids == encode_prompt(
        tokenizer, teacher_messages(row(), TEMPLATE)
    )
    with caplog.at_level(logging.WARNING):
        assert fitting_prompts(rows, tokenizer, longest=len(short.teacher_ids), teacher_template=TEMPLATE) == [short]
    assert "prompts: 1 of 2 have more than" in caplog.text
    assert fitting_prompts(rows, tokenizer, longest=1000)[0].teacher_ids is None
