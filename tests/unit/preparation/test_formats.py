"""Each format on records written by hand."""

from __future__ import annotations

import json

import pytest

from rlhf_core.config import SourceConfig
from rlhf_core.preparation.drops import Dropped
from rlhf_core.preparation.formats import convert


def source(format: str, **settings) -> SourceConfig:
    return SourceConfig.model_validate(
        {"name": "s", "kind": "file", "path": "x", "uses": ["prompt"], "weight": 1.0, "format": format} | settings
    )


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def test_preference_as_text_keeps_white_space():
    rows = convert({"prompt": " q ", "chosen": "a\n", "rejected": "b"}, source("preference"))
    assert rows == {
        "sft": [{"messages": [user(" q ")], "response": "a\n"}],
        "preference": [{"messages": [user(" q ")], "chosen": "a\n", "rejected": "b"}],
        "prompt": [{"messages": [user(" q ")], "label": None}],
    }


def test_preference_as_messages_with_a_prompt():
    record = {"prompt": [{"role": "system", "content": "s"}, user("q")], "chosen": [assistant("a")], "rejected": [assistant("b")]}
    assert convert(record, source("preference"))["preference"] == [
        {"messages": [{"role": "system", "content": "s"}, user("q")], "chosen": "a", "rejected": "b"}
    ]


def test_preference_as_messages_with_an_implicit_prompt():
    record = {
        "chosen": [user("q"), assistant("x"), user("r"), assistant("a")],
        "rejected": [user("q"), assistant("x"), user("r"), assistant("b")],
    }
    assert convert(record, source("preference"))["preference"] == [
        {"messages": [user("q"), assistant("x"), user("r")], "chosen": "a", "rejected": "b"}
    ]


@pytest.mark.parametrize(
    ("chosen", "rejected", "expected"),
    [
        ("Capital? Paris it is.", "Capital? Pluto.", ("Capital?", " Paris it is.", " Pluto.")),  # "P" belongs to the answers
        ("Say yes.", "Say yes. Or no.", ("Say yes.", "", " Or no.")),  # an empty answer, for validate_data to report
        ("Q: 1+1?\nA: 2", "Q: 1+1?\nA: 3", ("Q: 1+1?\nA:", " 2", " 3")),
        ("Answer: same", "Answer: same", ("Answer: same", "", "")),
    ],
)
def test_an_implicit_prompt_is_the_shared_text_up_to_a_whole_word(chosen, rejected, expected):
    [pair] = convert({"chosen": chosen, "rejected": rejected}, source("preference", implicit_prompt=True))["preference"]
    assert (pair["messages"][0]["content"], pair["chosen"], pair["rejected"]) == expected


def test_texts_without_a_shared_beginning_are_dropped():
    with pytest.raises(Dropped, match="share no beginning"):
        convert({"chosen": "yes", "rejected": "no"}, source("preference", implicit_prompt=True))


HH = "\n\nHuman: hi\n\nAssistant: hello\n\nHuman: how?\n\nAssistant: "


def test_hh_transcripts():
    [pair] = convert({"chosen": HH + "like this:\n\n1. so", "rejected": HH + "no"}, source("hh"))["preference"]
    assert pair == {"messages": [user("hi"), assistant("hello"), user("how?")], "chosen": "like this:\n\n1. so", "rejected": "no"}


def test_hh_turns_by_one_speaker_in_a_row_are_joined():
    [pair] = convert({"chosen": HH + "a\n\nAssistant: b", "rejected": HH + "a\n\nAssistant: c"}, source("hh"))["preference"]
    assert (pair["messages"][-1], pair["chosen"], pair["rejected"]) == (user("how?"), "a\n\nb", "a\n\nc")


@pytest.mark.parametrize(
    ("chosen", "rejected", "reason"),
    [
        (HH + "a", HH.replace("hello", "hey") + "a", "prompts of chosen and rejected differ"),
        (HH + "a\n\nAssistant: b", HH + "c", "prompts of chosen and rejected differ"),
        (HH + "a\n\nHuman: bye", HH + "a\n\nHuman: no", "last message is not the assistant's"),
        ("\n\nAssistant: hello", "\n\nAssistant: hi", "doesn't end with a message of the user"),
    ],
)
def test_unusable_hh_pairs_are_dropped_with_a_reason(chosen, rejected, reason):
    with pytest.raises(Dropped, match=reason):
        convert({"chosen": chosen, "rejected": rejected}, source("hh"))


def test_hh_refuses_text_without_turns():
    with pytest.raises(ValueError, match="expected a transcript of 'Human:' and 'Assistant:' turns, got 'plain text'"):
        convert({"chosen": "plain text", "rejected": "other"}, source("hh"))


def test_instruction_with_and_without_input_and_label():
    mapping = {"columns": {"instruction": "q", "output": "a", "label": "a"}, "label_pattern": r"#### *(\S+)"}
    rows = convert({"q": "Add.", "input": "1 2", "a": "It is 3\n#### 3"}, source("instruction", **mapping))
    assert rows["sft"] == [{"messages": [user("Add.\n\n1 2")], "response": "It is 3\n#### 3"}]
    assert rows["prompt"] == [{"messages": [user("Add.\n\n1 2")], "label": "3"}]
    assert convert({"instruction": "Go.", "input": "", "output": "ok"}, source("instruction"))["prompt"] == [
        {"messages": [user("Go.")], "label": None}
    ]
    with pytest.raises(Dropped, match="label_pattern finds nothing"):
        convert({"q": "Add.", "a": "It is 3"}, source("instruction", **mapping))


def test_messages_in_both_spellings():
    expected = [{"messages": [user("q")], "response": "a"}]
    assert convert({"messages": [user("q"), assistant("a")]}, source("messages"))["sft"] == expected
    sharegpt = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    assert convert({"talk": {"turns": sharegpt}}, source("messages", columns={"messages": "talk.turns"}))["sft"] == expected
    with pytest.raises(Dropped, match="last message is not the assistant's"):
        convert({"messages": [user("q")]}, source("messages"))
    with pytest.raises(ValueError, match="column 'messages': expected messages with role"):
        convert({"messages": [{"role": "robot", "content": "q"}]}, source("messages"))


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}}
IN_A_TABLE = {"type": "function", "function": {**TOOL["function"], "strict": None}, "example": None}


@pytest.mark.parametrize("tools", [[TOOL], json.dumps([TOOL]), [json.dumps(TOOL)], [IN_A_TABLE]])
def test_tools_that_the_source_maps_belong_to_the_first_message(tools):
    pair = {"prompt": "q", "chosen": "a", "rejected": "b", "tools": tools}
    mapped = convert({**pair, "more": "s"}, source("preference", columns={"tools": "tools", "system": "more"}))
    for (row,) in (mapped["sft"], mapped["preference"], mapped["prompt"]):
        first, second = row["messages"]
        assert (first["content"], json.loads(first["extra"])) == ("s", {"tools": [TOOL]}) and second == user("q")
    assert convert(pair, source("preference"))["sft"][0]["messages"] == [user("q")]


@pytest.mark.parametrize("tools", [None, [], "", "[]"])
def test_a_record_without_tools_is_as_it_was(tools):
    talk = {"messages": [user("q"), assistant("a")], "tools": tools}
    assert convert(talk, source("messages", columns={"tools": "tools"}))["sft"] == [{"messages": [user("q")], "response": "a"}]


@pytest.mark.parametrize("tools", ["add", ["add"], [{"type": "function"}], {"name": "add"}, 7, "[null]"])
def test_tools_that_are_no_schemas_are_refused(tools):
    with pytest.raises(ValueError, match=r"column 'tools': expected a list of tools as JSON schemas, each with a name, got"):
        convert({"messages": [user("q"), assistant("a")], "tools": tools}, source("messages", columns={"tools": "tools"}))


@pytest.mark.parametrize(("label", "good"), [(True, True), (0, False), ("True", True), ("false", False)])
def test_unpaired_feedback_leaves_the_other_side_empty(label, good):
    rows = convert({"prompt": "q", "completion": "a", "label": label}, source("unpaired"))
    [row] = rows["preference"]
    assert (row["chosen"], row["rejected"]) == (("a", None) if good else (None, "a"))
    assert len(rows["sft"]) == good


def test_unpaired_feedback_wants_a_boolean():
    with pytest.raises(ValueError, match="column 'label': expected true or false, got 'maybe'"):
        convert({"prompt": "q", "completion": "a", "label": "maybe"}, source("unpaired"))


GRADED = {"prompt": "question", "completions": ["m1", "m2", "deep.m3"], "completion": "solution", "good": "is_correct"}


def test_graded_makes_every_good_one_beat_every_bad_one():
    record = {
        "question": "q",
        "m1": {"solution": "right", "is_correct": True},
        "m2": {"solution": "wrong", "is_correct": False},
        "deep": {"m3": {"solution": "bad", "is_correct": False}},
    }
    rows = convert(record, source("graded", columns=GRADED))
    assert [(r["chosen"], r["rejected"]) for r in rows["preference"]] == [("right", "wrong"), ("right", "bad")]
    assert [r["response"] for r in rows["sft"]] == ["right"]
    as_list = {"prompt": "q", "completions": [{"completion": "right", "good": True}, {"completion": "wrong", "good": False}]}
    assert [(r["chosen"], r["rejected"]) for r in convert(as_list, source("graded"))["preference"]] == [("right", "wrong")]


def test_prompts_and_plain_text():
    assert convert({"prompt": "q", "label": 7}, source("prompt")) == {"prompt": [{"messages": [user("q")], "label": "7"}]}
    assert convert({"body": " t "}, source("text", uses=["pretrain"], columns={"text": "body"})) == {"pretrain": [{"text": " t "}]}


def test_missing_columns_are_named_with_what_there_is():
    with pytest.raises(ValueError, match="expected a column 'chosen' for 'chosen', got question, answer; map chosen"):
        convert({"question": "q", "answer": "a"}, source("preference"))
    with pytest.raises(ValueError, match=r"expected a column 'meta\.answer' for 'rejected', got x; map rejected"):
        convert({"prompt": "q", "chosen": "a", "meta": {"x": 1}}, source("preference", columns={"rejected": "meta.answer"}))
    with pytest.raises(ValueError, match="expected a column 'task' for 'prompt'"):  # once mapped, even an optional column must be there
        convert({"prompt": "q", "chosen": "a", "rejected": "b"}, source("preference", columns={"prompt": "task"}))


def test_half_a_character_is_refused_before_parquet_trips_over_it():
    with pytest.raises(ValueError, match="column 'text': expected text, got half a character"):
        convert({"text": "\ud800"}, source("text", uses=["pretrain"]))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"format": "text", "uses": ["sft"]}, r"format text expects uses among \['pretrain'\], got \['sft'\]"),
        ({"format": "hh", "columns": {"prompt": "p"}}, r"expects columns named \['chosen', 'rejected'\], got \['prompt'\]"),
        ({"format": "hh", "columns": {"chosen": ["a", "b"]}}, "expect one column each"),
        ({"format": "ranked", "columns": {"completions": ["a", "b"]}}, "expect one column each"),
        ({"format": "prompt", "implicit_prompt": True}, "implicit_prompt expects a format among .*, got prompt"),
        ({"format": "compared", "columns": {"winner": "w", "preference": "p"}}, r"to map preference, or winner, or first_score and"),
        ({"format": "compared", "columns": {"first_score": "s"}}, r"got \['first_score'\]; map one of these"),
        ({"format": "ranked", "columns": {"rank": "r", "score": "s"}}, r"to map rank, or score, got \['rank', 'score'\]"),
        ({"format": "prompt", "encoding": "no-such"}, "encoding expects a name such as .*, got 'no-such'"),
        ({"format": "prompt", "kind": "huggingface", "delimiter": ";"}, "delimiter and encoding expect kind file, got huggingface"),
        ({"format": "prompt", "delimiter": '"'}, "delimiter expects a character between fields"),
        ({"format": "prompt", "label_pattern": "("}, "label_pattern expects a regular expression"),
    ],
)
def test_a_mapping_that_cannot_work_is_refused_with_the_params(settings, message):
    with pytest.raises(ValueError, match=message):
        source(**settings)


def test_slices_are_columns_kept_beside_each_pair_and_prompt():
    record = {"prompt": "q", "chosen": "a", "rejected": "b", "meta": {"subset": "chat", "level": 3}}
    rows = convert(record, source("preference", uses=["preference"], slices={"subset": "meta.subset", "level": "meta.level"}))
    assert rows["preference"] == [{"messages": [user("q")], "chosen": "a", "rejected": "b", "slices": {"subset": "chat", "level": "3"}}]
    assert "slices" not in rows["sft"][0] and "slices" not in rows["prompt"][0]
    prompts = convert(record, source("preference", uses=["prompt"], slices={"level": "meta.level"}))
    assert prompts["prompt"] == [{"messages": [user("q")], "label": None, "slices": {"level": "3"}}]
    with pytest.raises(ValueError, match="expected a column 'kind' for 'subset'"):
        convert(record, source("preference", slices={"subset": "kind"}))
    with pytest.raises(ValueError, match=r"slices expect names other than .*, got \['source'\]"):
        source("preference", slices={"source": "meta.subset"})
