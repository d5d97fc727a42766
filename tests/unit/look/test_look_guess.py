"""What a file's columns are taken for: the shapes of well-known data sets, and data of which nobody can tell."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, DatasetDict
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_core.config import ConfigError
from rlhf_core.look import page
from rlhf_core.look.guess import PROMPT
from rlhf_core.look.look import Guess, Place, guess, inspect_reading, place_of, sample_of
from rlhf_core.preparation.values import RawRecord
from tests.tiny_models import tiny_params, tiny_tokenizer

ASK = {"role": "user", "content": "What is 2 + 2?"}
GOOD, BAD = {"role": "assistant", "content": "It is 4."}, {"role": "assistant", "content": "It is 5."}


def guessed(path: Path, *, format_: str | None = None, **columns) -> Guess:
    place = place_of(str(path), {})
    records, whole = sample_of(place, 2000)
    return guess(place, records, whole=whole, format_=format_, columns=columns)


def written(folder: Path, *records: dict, name: str = "data.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


ULTRAFEEDBACK = {
    **{"prompt": ASK["content"], "prompt_id": "a1", "chosen": [ASK, GOOD], "rejected": [ASK, BAD], "messages": [ASK, GOOD]},
    **{"score_chosen": 8.5, "score_rejected": 2.0},
}
ORPO_MIX = {"source": "x", "prompt": ASK["content"], "chosen": [ASK, GOOD], "rejected": [ASK, BAD], "question": ASK["content"]}
TURNS = "\n\nHuman: What is 2 + 2?\n\nAssistant: It is "
SOLUTIONS = {
    "question": "What is 2 + 2?",
    "a": {"solution": "2 + 2 = 4", "is_correct": True},
    "b": {"solution": "2 + 2 = 5", "is_correct": False},
}
OPENAI_PAIRS = {"input": {"messages": [ASK], "tools": []}, "preferred_output": [GOOD], "non_preferred_output": [BAD]}
TOOL_CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": 2}'}}
WITH_TOOLS = {
    "messages": [
        ASK,
        {"role": "assistant", "content": None, "tool_calls": [TOOL_CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "4"},
        GOOD,
    ],
    "tools": [{"type": "function", "function": {"name": "add", "parameters": {}}}],
}
SHAPES = {
    "trl": ({"prompt": "2 + 2?", "chosen": "4", "rejected": "5"}, "preference", {}),
    "trl_talk": ({"prompt": [ASK], "chosen": [GOOD], "rejected": [BAD]}, "preference", {}),
    "trl_implicit_talk": ({"chosen": [ASK, GOOD], "rejected": [ASK, BAD]}, "preference", {}),
    "ultrafeedback": (ULTRAFEEDBACK, "preference", {}),
    "orpo_mix": (ORPO_MIX, "preference", {}),
    "openai_pairs": (
        OPENAI_PAIRS,
        "preference",
        {"prompt": "input.messages", "chosen": "preferred_output", "rejected": "non_preferred_output"},
    ),
    "renamed": (
        {"question": "2 + 2?", "better": "4", "worse": "5"},
        "preference",
        {"prompt": "question", "chosen": "better", "rejected": "worse"},
    ),
    "hh": ({"chosen": f"{TURNS}4.", "rejected": f"{TURNS}5."}, "hh", {}),
    "kto": ({"prompt": "2 + 2?", "completion": "4", "label": True}, "unpaired", {}),
    "kto_talk": ({"prompt": [ASK], "completion": [GOOD], "label": False}, "unpaired", {}),
    "sharegpt": (
        {"id": "1", "conversations": [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}]},
        "messages",
        {"messages": "conversations"},
    ),
    "openai": ({"messages": [ASK, GOOD]}, "messages", {}),
    "openai_tools": (WITH_TOOLS, "messages", {"tools": "tools"}),
    "alpaca": ({"instruction": "Add.", "input": "2 2", "output": "Here it is: 4", "text": "Add. 2 2 Here it is: 4"}, "instruction", {}),
    "dolly": (
        {"instruction": "Add.", "context": "2 and 2", "response": "The sum is four.", "category": "open_qa"},
        "instruction",
        {"input": "context", "output": "response"},
    ),
    "gsm8k": (
        {"question": "2 + 2?", "answer": "2 + 2 = 4\n#### 4"},
        "instruction",
        {"instruction": "question", "output": "answer", "label": "answer"},
    ),
    "gsm8k_solutions": (
        SOLUTIONS,
        "graded",
        {"prompt": "question", "completions": ["a", "b"], "completion": "solution", "good": "is_correct"},
    ),
    "graded_list": (
        {"prompt": "2 + 2?", "responses": [{"text": "4", "correct": True}, {"text": "5", "correct": False}]},
        "graded",
        {"completions": "responses", "completion": "text", "good": "correct"},
    ),
    "verifiable": (
        {"prompt": [ASK], "reward_model": {"ground_truth": "4", "style": "rule"}},
        "prompt",
        {"label": "reward_model.ground_truth"},
    ),
    "helpsteer3": (
        {"domain": "stem", "context": [ASK], "response1": "It is 5.", "response2": "It is 4.", "overall_preference": 2},
        "compared",
        {"prompt": "context", "first": "response1", "second": "response2", "preference": "overall_preference"},
    ),
    "helpsteer2": (
        {"split": "train", "prompt": "2 + 2?", "response_1": "4", "response_2": "5", "preference_strength": -3},
        "compared",
        {"first": "response_1", "second": "response_2", "preference": "preference_strength"},
    ),
    "text": ({"text": "Once upon a time."}, "text", {}),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_known_shape_is_one_reading_with_its_columns(shape, tmp_path):
    record, format_, columns = SHAPES[shape]
    found = guessed(written(tmp_path, record))
    assert [t.reading.format for t in found.fitting] == [format_] and found.unreadable is None
    assert dict(found.fitting[0].source.columns) == columns
    assert found.fitting[0].taken == 1 and found.whole


def test_gsm8k_has_its_label_pattern(tmp_path):
    (tried,) = guessed(written(tmp_path, SHAPES["gsm8k"][0])).fitting
    assert tried.source.label_pattern == r"####\s*(\S+)" and tried.source.uses == ["sft", "prompt"]


@pytest.mark.parametrize(
    ("shape", "known"),
    [
        ("ultrafeedback", "UltraFeedback (binarized)"),
        ("hh", "Anthropic's HH-RLHF"),
        ("trl_implicit_talk", "TRL's preference with an implicit prompt"),
        ("gsm8k", "GSM8K"),
        ("helpsteer3", "HelpSteer3-Preference"),
        ("renamed", None),
    ],
)
def test_a_known_data_set_is_named(shape, known, tmp_path):
    assert guessed(written(tmp_path, SHAPES[shape][0])).known == known
    assert guessed(written(tmp_path, {"question": "2 + 2?", "answer": "4"})).known is None  # the columns of GSM8K, but not its answers


def test_nested_parquet_is_read_by_dotted_paths(tmp_path):
    path = tmp_path / "nested.parquet"
    pq.write_table(pa.Table.from_pylist([{"id": 1, "data": {"question": "2 + 2?", "chosen": "4", "rejected": "5"}}]), path)
    (tried,) = guessed(path).fitting
    assert dict(tried.source.columns) == {"prompt": "data.question", "chosen": "data.chosen", "rejected": "data.rejected"}


def test_csv_marks_are_read_as_true_and_false(tmp_path):
    path = tmp_path / "marks.csv"
    path.write_text("prompt,completion,label\n2 + 2?,4,true\n2 + 2?,5,false\n", encoding="utf-8")
    (tried,) = guessed(path).fitting
    assert tried.source.format == "unpaired" and tried.source.uses == ["sft", "preference", "prompt"]


@pytest.mark.parametrize(
    ("record", "formats"),
    [
        ({"question": "What is 2 + 2?", "answer": "4"}, ["instruction", "prompt"]),
        ({"messages": [ASK, GOOD], "text": "Something else entirely."}, ["messages", "text"]),
        ({"messages": [ASK, GOOD], "instruction": "Add 2 and 3.", "response": "That makes five."}, ["messages", "instruction"]),
        (
            {"prompt": "2 + 2?", "response": "It is 4.", "answer": "It is four, I think."},
            ["instruction", "instruction"],
        ),
    ],
)
def test_two_readings_are_a_question_and_not_a_guess(record, formats, tmp_path):
    found = guessed(written(tmp_path, record))
    assert [t.reading.format for t in found.fitting] == formats


def test_a_choice_of_format_or_column_settles_it(tmp_path):
    path = written(tmp_path, {"question": "What is 2 + 2?", "answer": "4"})
    assert [t.reading.format for t in guessed(path, format_="prompt").fitting] == ["prompt"]
    path = written(tmp_path, {"prompt": "2 + 2?", "response": "It is 4.", "answer": "It is four, I think."})
    (tried,) = guessed(path, format_="instruction", output="response").fitting
    assert tried.source.columns["output"] == "response"


@pytest.mark.parametrize(
    ("record", "named"),
    [
        ({"prompt": "c#", "response": "A language.", "helpfulness": 3, "correctness": 4, "coherence": 4}, "helpfulness"),
        ({"question": "2 + 2?", "response_a": "4", "response_b": "5", "winner": "gpt-4"}, "response_a"),
    ],
)
def test_marks_and_comparisons_without_a_format_are_named(record, named, tmp_path):
    found = guessed(written(tmp_path, record))
    assert found.unreadable is not None and named in found.unreadable


def test_what_a_reading_leaves_aside_is_named(tmp_path):
    (tried,) = guessed(written(tmp_path, {"prompt": "2?", "chosen": "4", "rejected": "5", "input": "more of it", "lang": "en"})).fitting
    assert any("input is not read" in line for line in tried.reading.unsure)
    assert tried.reading.unread == ("lang",)


def test_a_solution_is_learned_and_its_answer_is_the_label(tmp_path):
    (tried,) = guessed(written(tmp_path, {"problem": "2 + 2?", "solution": "2 and 2 make 4.", "answer": "4"})).fitting
    assert dict(tried.source.columns) == {"instruction": "problem", "output": "solution", "label": "answer"}


def test_columns_before_the_prompt_are_mapped_since_they_are_read_only_so(tmp_path):
    record = {"instruction": "And 3?", "output": "It is six.", "system": "Be kind.", "history": [["2 + 2?", "It is 4."]]}
    (tried,) = guessed(written(tmp_path, record)).fitting
    assert tried.source.columns == {"system": "system", "history": "history"}


def test_texts_without_a_prompt_need_a_word_of_the_user(tmp_path):
    (tried,) = guessed(written(tmp_path, {"chosen": "The sky is blue.", "rejected": "The sky is green."})).fitting
    assert tried.source.implicit_prompt and any("beginning of both texts" in line for line in tried.reading.unsure)


def test_an_implicit_prompt_is_something_to_look_at(tmp_path):
    (tried,) = guessed(written(tmp_path, {"chosen": [ASK, GOOD], "rejected": [ASK, BAD]})).fitting
    assert any("no prompt column" in line for line in tried.reading.unsure)


def test_nothing_fits_and_each_try_says_why(tmp_path):
    found = guessed(written(tmp_path, {"a": 1, "b": [1, 2]}))
    assert found.fitting == []


@pytest.mark.parametrize("path", ["./nowhere", "nowhere.jsonl", "/no/where", "a/b/c"])
def test_a_path_with_nothing_there_is_no_hub_name(path):
    with pytest.raises(FileNotFoundError, match="got nothing there"):
        place_of(path, {})


def test_a_saved_data_set_is_one_of_its_library(tmp_path):
    DatasetDict({"train_prefs": Dataset.from_list([ULTRAFEEDBACK])}).save_to_disk(tmp_path / "saved")
    place = place_of(str(tmp_path / "saved"), {"dataset_split": "train_prefs"})
    records, whole = sample_of(place, 2000)
    (tried,) = guess(place, records, whole=whole, format_=None, columns={}).fitting
    assert (tried.source.kind, tried.source.dataset_split, tried.source.format) == ("huggingface", "train_prefs", "preference")
    with pytest.raises(ValueError, match="expected a split 'train', got \\['train_prefs'\\]"):
        sample_of(place_of(str(tmp_path / "saved"), {}), 2000)


def test_a_name_is_one_on_the_hub():
    assert place_of("HuggingFaceH4/ultrafeedback_binarized", {"dataset_split": "train_prefs"}).kind == "huggingface"


def test_a_reading_that_leaves_much_out_says_so(tmp_path):
    pair, other = {"prompt": "2 + 2?", "chosen": "4", "rejected": "5"}, {"question": "3?", "answer": "It is three, as it was."}
    (tried,) = guessed(written(tmp_path, pair, pair, pair, other)).fitting
    assert tried.source.format == "preference"
    assert "1 of 4 records are left out, most often since: no column chosen" in tried.reading.unsure


@pytest.mark.parametrize(("options", "path"), [({"subset": "main"}, "here.jsonl"), ({"delimiter": ";"}, "owner/name")])
def test_an_option_of_the_other_kind_is_refused(options, path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    written(tmp_path, {"a": "b"}, name="here.jsonl")
    with pytest.raises(ValueError, match=f"expected no {next(iter(options))} of kind"):
        place_of(path, options)


def test_columns_that_no_format_has_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="expected names among"):
        guessed(written(tmp_path, {"a": "b"}), prompts="a")


PARAMS, TOKENIZER = tiny_params(), tiny_tokenizer()
NAMES = st.sampled_from(
    [*PROMPT[:4], "chosen", "rejected", "label", "messages", "conversations", "completions", "output", "text", "score", "a.b"]
)
TALK = st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", 7, None]), "content": st.none() | st.text(max_size=5)})
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats() | st.text(max_size=8) | st.lists(TALK, max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=6,
)


@given(st.lists(st.dictionaries(NAMES, VALUES, max_size=5), min_size=1, max_size=4))
@settings(max_examples=60, deadline=None)
def test_any_records_give_readings_that_convert_or_none(records):
    found = [RawRecord(f"x line {number}", record, "") for number, record in enumerate(records, start=1)]
    guessed = guess(Place("file", "x.jsonl"), found, whole=True, format_=None, columns={})
    assert all(tried.taken and tried.source.uses for tried in guessed.fitting)
    assert "\n".join(page.describe_guess(guessed, "x.jsonl"))
    for tried in guessed.fitting:
        shown = inspect_reading(tried, found, PARAMS, TOKENIZER, show=3)
        assert shown.dropped.read == len(records)
        assert "\n".join(page.describe_inspection(shown, PARAMS, colour=False, every_token=True)).replace("\n", "").isprintable()
