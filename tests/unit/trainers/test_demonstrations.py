"""Which tokens of a conversation are trained on."""

from __future__ import annotations

import json
import pickle

import pytest
from chat_templates import TEMPLATES, templated

from rlhf_core.data.schema import with_tools
from rlhf_core.models.tokenizer import encode_conversation, turn_end
from rlhf_core.trainers.supervised.demonstrations import Demonstration, collate_demonstrations, encode_demonstrations

CONVERSATION = [
    {"role": "user", "content": "Please sort 4172."},
    {"role": "assistant", "content": "Certainly: 1247."},
    {"role": "user", "content": "Quick, sort 21."},
]
ROW = {"messages": CONVERSATION, "response": "Sorted: 12."}
THOUGHTFUL = {"messages": CONVERSATION[:1], "response": "<think>\nThe digits are 4, 1, 7 and 2.\n</think>\n\nSorted: 1247."}


def encode(tokenizer, row=ROW, **how) -> list[Demonstration]:
    return encode_demonstrations([row], tokenizer, max_length=1000, **how)[0]


def test_demonstrations_can_be_sent_to_ranks(tokenizer):
    examples, _ = encode_demonstrations([ROW, THOUGHTFUL], tokenizer, max_length=1000)
    assert pickle.loads(pickle.dumps(examples)) == examples and len(examples) == 2


def trained(tokenizer, example: Demonstration) -> list[str]:
    """The texts of the runs of tokens that are trained on."""
    mask = collate_demonstrations([example], pad_id=0).selected[0].tolist()
    assert sum(mask) == example.num_trained
    runs: list[list[int]] = []
    for i, selected in enumerate(mask):
        if selected and (i == 0 or not mask[i - 1]):
            runs.append([])
        if selected:
            runs[-1].append(example.ids[i])
    return [tokenizer.decode(run) for run in runs]


@pytest.mark.parametrize("name", sorted({*TEMPLATES} - {"thinks", "distilled", "endless", "channels"}))
def test_every_turn_with_its_end_is_trained_on_in_the_rendering_of_the_whole_conversation(name):
    tokenizer = templated(name)
    (example,) = encode(tokenizer, train_on="all_turns")
    whole = [*CONVERSATION, {"role": "assistant", "content": "Sorted: 12."}]
    if name == "parts":
        whole = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in whole]
    assert [*example.ids, *turn_end(tokenizer).after] == tokenizer.apply_chat_template(whole, return_dict=False)
    end, space = tokenizer.decode(turn_end(tokenizer).trained), " " if name == "brackets" else ""
    assert trained(tokenizer, example) == [f"{space}Certainly: 1247.{end}", f"{space}Sorted: 12.{end}"]


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_last_turn_is_trained_on_by_default(name):
    tokenizer = templated(name)
    assert encode(tokenizer) == [Demonstration(*encode_conversation(tokenizer, CONVERSATION, "Sorted: 12."))]


@pytest.mark.parametrize("name", ["thinks", "distilled", "endless", "channels"])
def test_a_template_that_writes_earlier_turns_otherwise_gives_an_example_a_turn(name):
    tokenizer = templated(name)
    expected = [(CONVERSATION[:1], "Certainly: 1247."), (CONVERSATION, "Sorted: 12.")]
    assert encode(tokenizer, train_on="all_turns") == [Demonstration(*encode_conversation(tokenizer, *turn)) for turn in expected]


def test_thoughts_are_trained_on_or_only_what_follows_them():
    tokenizer = templated("thinks")
    (example,), (masked,) = encode(tokenizer, THOUGHTFUL), encode(tokenizer, THOUGHTFUL, train_on_thoughts=False)
    assert example.ids == masked.ids
    assert trained(tokenizer, example) == [THOUGHTFUL["response"] + "<|im_end|>"]
    assert trained(tokenizer, masked) == ["Sorted: 1247.<|im_end|>"]


@pytest.mark.parametrize("thoughts", [True, False])
def test_calls_of_tools_are_turns_and_masks_stay_apart(thoughts):
    tokenizer = templated("thinks")
    call = {"type": "function", "function": {"name": "sort", "arguments": {"digits": "4172"}}}
    thinking = "<think>\nThe digits are 4, 1, 7 and 2.\n</think>\n\n"
    messages = [
        CONVERSATION[0],
        {"role": "assistant", "content": thinking, "extra": json.dumps({"tool_calls": [call]})},
        {"role": "tool", "content": "1247"},
    ]
    (example,) = encode(
        tokenizer,
        {"messages": messages, "response": f"{thinking}Sorted: 1247."},
        train_on="all_turns",
        train_on_thoughts=thoughts,
    )
    called = '\n<tool_call>\n{"name": "sort", "arguments": {"digits": "4172"}}\n</tool_call><|im_end|>'
    if not thoughts:
        called = called.removeprefix("\n")
    before = thinking if thoughts else ""
    assert trained(tokenizer, example) == [before + called, f"{before}Sorted: 1247.<|im_end|>"]
    messages[1] = {"role": "assistant", "content": thinking, "tool_calls": [call]}
    whole = [*messages, {"role": "assistant", "content": f"{thinking}Sorted: 1247."}]
    assert [*example.ids, *turn_end(tokenizer).after] == tokenizer.apply_chat_template(whole, return_dict=False)


def test_all_turns_with_tools_are_the_rendering_of_the_whole_conversation_with_them():
    tokenizer = templated("chatml")
    tokenizer.chat_template = "{% if tools %}{{ tools | tojson }}{% endif %}" + tokenizer.chat_template
    tools = [{"type": "function", "function": {"name": "sort", "parameters": {"type": "object", "properties": {}}}}]
    (example,) = encode(tokenizer, {**ROW, "messages": with_tools(CONVERSATION, tools)}, train_on="all_turns")
    whole = [*CONVERSATION, {"role": "assistant", "content": "Sorted: 12."}]
    assert [*example.ids, *turn_end(tokenizer).after] == tokenizer.apply_chat_template(whole, tools=tools, return_dict=False)
    assert trained(tokenizer, example) == ["Certainly: 1247.<|im_end|>", "Sorted: 12.<|im_end|>"]


def test_an_example_that_is_too_long_is_dropped_alone():
    tokenizer = templated("thinks")
    first, second = encode(tokenizer, train_on="all_turns")
    assert len(first.ids) < len(second.ids)
    kept, dropped = encode_demonstrations([ROW], tokenizer, max_length=len(first.ids), train_on="all_turns")
    assert (kept, dropped) == ([first], 1)
