"""How a source writes its conversations, found over its first records: read so where all agree, left alone where it is chance."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rlhf_core.config import SourceConfig
from rlhf_core.preparation.drops import Dropped
from rlhf_core.preparation.notation import FIRST, notation_of, with_messages
from rlhf_core.preparation.sources import Loaded, load_source, records_of
from rlhf_core.preparation.transcripts import prompt_messages, transcript
from rlhf_core.preparation.values import RawRecord

ASK = {"role": "user", "content": "What's 2 + 2?"}
GOOD, BAD = ({"role": "assistant", "content": f'It is "{n}".\nYes, {{{n}}}.'} for n in (4, 5))


def source(path: Path | str, format: str = "preference", **more) -> SourceConfig:
    uses = ["preference", "sft"]
    given = {"name": "mine", "kind": "file", "path": str(path), "format": format, "uses": uses, "weight": 1.0}
    return SourceConfig.model_validate(given | more)


def loaded(folder: Path, *records: dict, format: str = "preference", **more) -> Loaded:
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return load_source(source(path, format, **more), seed=0)


def pairs(found: Loaded) -> list[tuple[str, str, str]]:
    return [(row["messages"][-1]["content"], row["chosen"], row["rejected"]) for row in found.rows["preference"]]


def as_text(messages: list[dict], spelling: str) -> str:
    return {"json": json.dumps, "python": repr, "numpy": lambda m: str(np.array(m, dtype=object))}[spelling](messages)


class TestMessagesInText:
    @pytest.mark.parametrize("spelling", ["json", "python", "numpy"])
    def test_sides_that_write_down_messages_are_read_as_messages(self, spelling, tmp_path, caplog):
        record = {"prompt": ASK["content"], "chosen": as_text([ASK, GOOD], spelling), "rejected": as_text([ASK, BAD], spelling)}
        assert pairs(loaded(tmp_path, record)) == [(ASK["content"], GOOD["content"], BAD["content"])]
        assert "chosen, rejected: text that writes down messages, and is read as messages" in caplog.text

    def test_messages_with_other_keys_first_are_read(self, tmp_path):
        talks = [json.dumps([{"index": 0, **ASK}, {"weight": 1, **answer}]) for answer in (GOOD, BAD)]
        assert pairs(loaded(tmp_path, {"chosen": talks[0], "rejected": talks[1]})) == [(ASK["content"], GOOD["content"], BAD["content"])]

    def test_a_table_that_pandas_wrote_is_read(self, tmp_path):
        folder = tmp_path / "as.csv"
        pd.DataFrame({"messages": [np.array([ASK, GOOD], dtype=object)] * 2}).to_csv(folder, index=False)
        assert load_source(source(folder, "messages", uses=["sft"]), seed=0).rows["sft"][0]["response"] == GOOD["content"]

    def test_a_text_that_writes_down_messages_by_chance_stays_text(self, tmp_path):
        chance = {"prompt": "Write a chat as JSON.", "chosen": json.dumps([ASK, GOOD]), "rejected": "[]"}
        other = {"prompt": "And?", "chosen": "[1, 2]", "rejected": '{"role": "king"}'}
        found = pairs(loaded(tmp_path, chance, other, other))
        assert found == [tuple(record[key] for key in ("prompt", "chosen", "rejected")) for record in (chance, other, other)]

    @pytest.mark.parametrize("broken", ["[{'role': 'user', 'content': 'cut o", "no list at all", '[{"role": "user", "content": array(1)}]'])
    def test_a_text_among_them_that_is_no_list_is_dropped(self, broken, tmp_path):
        whole = {"prompt": ASK["content"], "chosen": json.dumps([ASK, GOOD]), "rejected": json.dumps([ASK, BAD])}
        found = loaded(tmp_path, whole, whole, whole | {"chosen": broken})
        assert len(found.rows["preference"]) == 2 and found.dropped == {"chosen is no list of messages": 1}

    def test_a_column_of_which_no_text_can_be_read_is_refused(self, tmp_path):
        cut = {"prompt": "q", "chosen": "[{'role': 'user', 'content': 'cut o", "rejected": "[{'role': 'user', 'content': 'cut"}
        with pytest.raises(ValueError, match="column 'chosen': expected a list of messages"):
            loaded(tmp_path, cut, cut)

    def test_a_bad_line_behind_the_first_records_is_read_no_earlier(self, tmp_path):
        path = tmp_path / "data.jsonl"
        path.write_text('{"text": "a"}\n{"text": "b"}\n{')
        records = records_of(source(path, "text", uses=["pretrain"]))
        assert [next(records).values["text"], next(records).values["text"]] == ["a", "b"]
        with pytest.raises(ValueError, match="line 3"):
            next(records)

    @given(st.lists(st.dictionaries(st.sampled_from("ab"), st.text("[{]}'\":, rolecntus\n") | st.none() | st.integers()), max_size=4))
    def test_other_records_are_as_they_were(self, values):
        records = [RawRecord(str(i), record) for i, record in enumerate(values)]
        assert list(with_messages(records)) == records


class TestPromptInAnswers:
    @pytest.mark.parametrize(
        ("format", "record", "expected"),
        [
            ("preference", {"prompt": "2+2? ", "chosen": "2+2? 4", "rejected": "2+2? 5"}, ("2+2? ", "4", "5")),
            ("compared", {"prompt": "2+2?", "first": "2+2?\n4", "second": "2+2?5", "preference": -1}, ("2+2?", "\n4", "5")),
            (
                "graded",
                {"prompt": "2+2?", "completions": [{"completion": "2+2? 4", "good": True}, {"completion": "2+2? 5", "good": False}]},
                ("2+2?", " 4", " 5"),
            ),
            ("ranked", {"prompt": "2+2?", "completions": ["2+2? 4", "2+2? 5"], "score": [2, 1]}, ("2+2?", " 4", " 5")),
        ],
    )
    def test_the_prompt_is_removed_from_answers_that_begin_with_it(self, format, record, expected, tmp_path, caplog):
        found = loaded(tmp_path, record, format=format)
        assert pairs(found) == [expected] and found.rows["sft"][0]["response"] == expected[1]
        assert "answers begin with the prompt; it is removed from them (implicit_prompt)" in caplog.text

    def test_feedback_without_pairs_loses_it_too(self, tmp_path):
        records = [{"prompt": "q?", "completion": f"q? {n}", "label": n == 4} for n in (4, 5)]
        rows = loaded(tmp_path, *records, format="unpaired").rows["preference"]
        assert [(row["chosen"], row["rejected"]) for row in rows] == [(" 4", None), (None, " 5")]

    def test_answers_that_begin_so_by_chance_stay_whole(self, tmp_path, caplog):
        chance, other = {"prompt": "Say hi", "chosen": "Say hi you", "rejected": "Say hi!"}, {"prompt": "q", "chosen": "a", "rejected": "b"}
        assert pairs(loaded(tmp_path, chance, *[other] * 9))[0] == ("Say hi", "Say hi you", "Say hi!")
        assert caplog.text == ""

    def test_what_many_records_have_is_said_and_left(self, tmp_path, caplog):
        whole, other = {"prompt": "q", "chosen": "q 1", "rejected": "q 2"}, {"prompt": "r", "chosen": "a", "rejected": "b"}
        assert pairs(loaded(tmp_path, whole, other, whole))[0] == ("q", "q 1", "q 2")
        assert "answers begin with the prompt in 67% of the first 3 records, and are read as they are" in caplog.text

    def test_a_record_that_differs_from_the_others_is_dropped(self, tmp_path):
        whole, other = {"prompt": "q", "chosen": "q 1", "rejected": "q 2"}, {"prompt": "q", "chosen": "q 3", "rejected": "4"}
        found = loaded(tmp_path, *[whole] * FIRST, other)
        assert len(found.rows["preference"]) == FIRST and found.dropped == {
            "rejected doesn't begin with the prompt, as other answers do": 1
        }

    @pytest.mark.parametrize(
        ("sides", "sentence"),
        [
            (("q 1", "2"), "some answers begin with the prompt and others to it don't, in 100% of the first 1 records"),
            (("Human: q\n\nAssistant: 1", "Human: q\n\nAssistant: 2"), "answers are transcripts such as of Human: and Assistant: in 100%"),
        ],
    )
    def test_other_whole_texts_are_said(self, sides, sentence, tmp_path, caplog):
        assert pairs(loaded(tmp_path, {"prompt": "q", "chosen": sides[0], "rejected": sides[1]})) == [("q", *sides)]
        assert sentence in caplog.text

    def test_the_source_may_say_so_or_say_no(self, tmp_path):
        whole, other = {"prompt": "q", "chosen": "q 1", "rejected": "q 2"}, {"prompt": "r", "chosen": "a", "rejected": "b"}
        assert pairs(loaded(tmp_path, whole, implicit_prompt=False)) == [("q", "q 1", "q 2")]
        assert pairs(loaded(tmp_path, whole, other, other, implicit_prompt=True)) == [("q", " 1", " 2")]


TURNS = [
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "Four. User: no"},
    {"role": "user", "content": "And\n\n3?"},
]
NAMES = [("Human", "Assistant"), ("User", "Assistant"), ("USER", "ASSISTANT"), ("### Human", "### Assistant"), ("User", "AI")]


class TestTranscripts:
    @pytest.mark.parametrize("names", NAMES)
    @pytest.mark.parametrize("breaks", ["\n\n", "\n"])
    @pytest.mark.parametrize("end", ["", "{breaks}{assistant}:", "{breaks}{assistant}: "])
    def test_a_transcript_in_the_prompt_is_its_turns(self, names, breaks, end):
        who = dict(zip(("user", "assistant"), names, strict=True))
        text = breaks.join(f"{who[turn['role']]}: {turn['content']}" for turn in TURNS) + end.format(breaks=breaks, assistant=names[1])
        assert transcript(f"\n\n{text}") == TURNS

    def test_one_turn_may_hold_what_looks_like_another_speaker(self):
        assert transcript("Human: Go on:\nUser: hi\nAI: ho\n\nAssistant:") == [{"role": "user", "content": "Go on:\nUser: hi\nAI: ho"}]

    @pytest.mark.parametrize("text", ["Assistant: hi", "What does Human: mean?", "", "Human: a\n\nAssistant: b"])
    def test_what_waits_for_no_answer_is_no_transcript(self, text):
        assert transcript(text) is None

    def test_a_column_of_transcripts_is_read_as_turns_and_another_prompt_dropped(self, tmp_path, caplog):
        record = {"prompt": "\n\nHuman: 2+2?\n\nAssistant:", "chosen": " 4", "rejected": " 5"}
        found = loaded(tmp_path, *[record] * FIRST, record | {"prompt": "What?"})
        assert pairs(found) == [("2+2?", "4", "5")] * FIRST
        assert found.dropped == {"the prompt is no transcript, as those of other records are": 1}
        assert "prompts are transcripts such as of Human: and Assistant:; their turns are read as messages" in caplog.text

    def test_some_transcripts_are_said_and_left(self, tmp_path, caplog):
        record, other = (
            {"prompt": "Human: 2?\n\nAssistant:", "chosen": "4", "rejected": "5"},
            {"prompt": "q", "chosen": "a", "rejected": "b"},
        )
        assert pairs(loaded(tmp_path, record, other))[0][0] == "Human: 2?\n\nAssistant:"
        assert (
            "prompts are transcripts such as of Human: and Assistant: in 50% of the first 2 records, and are read as they are"
            in caplog.text
        )

    @pytest.mark.parametrize(
        "text",
        [
            "2+2?\n<extra_id_1>Assistant\nFour. User: no\n<extra_id_1>User\nAnd\n\n3?",
            "<extra_id_1>User\n2+2?\n<extra_id_1>Assistant\nFour. User: no\n<extra_id_1>User\nAnd\n\n3?\n<extra_id_1>Assistant\n",
        ],
    )
    def test_turns_of_steerlm_are_messages_in_any_record(self, text, tmp_path):
        other = {"prompt": "q", "chosen": "a", "rejected": "b"}
        assert loaded(tmp_path, other, {"prompt": text, "chosen": "4", "rejected": "5"}).rows["preference"][1]["messages"] == TURNS
        row = loaded(tmp_path, {"instruction": text, "output": "4"}, format="instruction", uses=["sft"]).rows["sft"][0]
        assert row["messages"] == TURNS

    def test_sentinels_of_t5_are_text_and_marks_inside_a_turn_are_dropped(self):
        assert prompt_messages("The <extra_id_0> walks.", transcripts=False)[0]["content"] == "The <extra_id_0> walks."
        with pytest.raises(Dropped, match="inside a turn"):
            prompt_messages("<extra_id_1>User\nq\n<extra_id_1>Assistant\n<extra_id_2>quality:4\n", transcripts=False)


MARKED = {"prompt": "q", "completion": "a"}


@pytest.mark.parametrize(
    ("marks", "expected"),
    [
        ((1, -1), [True, False]),
        (("+1", "-1"), [True, False]),
        ((1.0, 0.0), [True, False]),
        (("1.0", "0.0"), [True, False]),
        ((1, 0, -1), [True, False]),  # 0 is neutral, and dropped
        (("Positive", "negative"), [True, False]),
        (("chosen", "rejected"), [True, False]),
        ((1, 0, 0), [True, False, False]),
    ],
)
def test_marks_are_read_as_the_whole_column_has_them(marks, expected, tmp_path):
    rows = loaded(tmp_path, *({**MARKED, "label": mark} for mark in marks), format="unpaired").rows["preference"]
    assert [row["chosen"] is not None for row in rows] == expected


def test_the_notation_needs_no_column_to_be_there():
    for format in ("preference", "hh", "graded", "ranked", "compared", "unpaired", "instruction", "messages", "prompt", "text", "tree"):
        uses = ["pretrain"] if format == "text" else ["prompt"]
        records: list[dict[str, Any]] = [{}, {"completions": 3, "prompt": 7}, {"completions": [None, {"good": []}], "label": [1]}]
        assert notation_of(records, source("x", format, uses=uses)).read == ()


@pytest.mark.parametrize(
    ("label", "text"), [(18.0, "18"), (18.5, "18.5"), (True, "true"), (False, "false"), (18, "18"), ("18.0", "18.0"), (1e300, "1e+300")]
)
def test_a_label_is_written_as_the_data_have_it(label, text, tmp_path):
    rows = loaded(tmp_path, {"prompt": "q", "label": label}, format="prompt", uses=["prompt"]).rows["prompt"]
    assert rows[0]["label"] == text


SPACES = 2**20


@pytest.mark.parametrize(
    "text",
    [
        *(
            " " * SPACES,
            "[" + "\n" * SPACES + "x",
            "[{'role': 'user'}" + "\n" * SPACES + "x",
            "[" * SPACES,
            "{'role': 'user', 'content': " + "[" * SPACES,
        ),
        *("Human:" + "\n" * SPACES, "\nHuman:" * 10**5, "<extra_id_1>" * 10**5, '["' + "a" * SPACES),
    ],
)
def test_hostile_texts_are_read_in_no_time(text, tmp_path):
    start = time.process_time()
    try:
        loaded(tmp_path, {"prompt": text, "first": text, "second": text, "winner": "1" * SPACES + "x"}, format="compared")
    except ValueError as error:
        assert "expected" in str(error)
    assert time.process_time() - start < 5


@pytest.fixture(autouse=True)
def _warnings_only(caplog):
    caplog.set_level(logging.WARNING, logger="rlhf")


@pytest.mark.parametrize("format", ["unpaired", "graded"])
def test_a_minus_one_that_comes_late_is_refused(format, tmp_path):
    def record(mark: int) -> dict:
        answer = {"completion": "a", "good": mark}
        return {"prompt": "q", "completions": [answer]} if format == "graded" else {"prompt": "q", "completion": "a", "label": mark}

    marks = [1] * FIRST + [0] * 50
    assert loaded(tmp_path, *map(record, marks), format=format, uses=["sft"]).dropped.records == 0
    with pytest.raises(ValueError, match=r"source mine: \S+data.jsonl line 151: column '(label|good)': .* got -1, which none of them has"):
        loaded(tmp_path, *map(record, [*marks, -1]), format=format, uses=["sft"])


TALK = {"prompt": "Human: 2+2?\n\nAssistant:", "chosen": "    return 4\n", "rejected": " 5"}


def test_transcripts_can_be_switched_off_and_on(tmp_path, caplog):
    assert pairs(loaded(tmp_path, TALK)) == [("2+2?", "   return 4", "5")]
    assert "prompts are transcripts such as of Human: and Assistant:; their turns are read as messages (transcripts)" in caplog.text
    caplog.clear()
    assert pairs(loaded(tmp_path, TALK, transcripts=False)) == [(TALK["prompt"], TALK["chosen"], TALK["rejected"])] and not caplog.text
    other = {"prompt": "q", "chosen": "a", "rejected": "b"}
    found = loaded(tmp_path, TALK, other, transcripts=True)
    assert len(pairs(found)) == 1 and found.dropped == {"the prompt is no transcript, as those of other records are": 1}
    with pytest.raises(ValidationError, match=r"transcripts expects a format among .*, got hh; remove it"):
        source("x.jsonl", "hh", transcripts=True)
