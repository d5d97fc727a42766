"""Public shapes and shapes that strangers bring: the format that is guessed, or the sentence that refuses or asks."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.look.__main__ import main
from tests.tiny_models import DEFAULTS

CASES = Path(__file__).parents[3] / "../shared/cases/formats"
# File -> format, columns and options as printed, rows of the use preference, and a sentence that the look prints.
EXPECTED: dict[str, tuple[str, dict[str, str], int, str]] = {
    "nectar": ("ranked", {"completions": "answers", "completion": "answer"}, 24, "transcripts such as of Human: and Assistant:"),
    "prompt_in_sides": ("preference", {}, 12, "answers begin with the prompt; it is removed from them (implicit_prompt)"),
    "shp": (
        "compared",
        {**{"prompt": "history", "first": "human_ref_A", "second": "human_ref_B"}, "first_score": "score_A", "second_score": "score_B"},
        12,
        "labels say otherwise than score_A and score_B in 6 of 12 records",
    ),
    "stringified_sides": ("preference", {}, 12, "chosen, rejected: text that writes down messages, and is read as messages"),
}
FILES = (*EXPECTED, "endtoken", "templated", "rlaifv", "llamafactory_mm")


def looked(capsys, path: Path, *options: str) -> tuple[int, dict[str, Any]]:
    code = main([str(path), "--json", "--params", str(DEFAULTS), *options])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("name", FILES)
def test_every_case_is_looked_at(name, capsys):
    path = CASES / f"{name}.jsonl"
    if not path.is_file():
        pytest.skip("the cases are not here: ../shared/cases/formats, beside the checkout")
    code = main([str(path), "--params", str(DEFAULTS)])
    page = capsys.readouterr()
    assert code in (0, 2) and "Traceback" not in page.out + page.err
    if name in EXPECTED:
        assert code == 0 and EXPECTED[name][3] in page.out


@pytest.mark.parametrize("name", EXPECTED)
def test_a_case_has_one_reading_with_all_of_its_pairs(name, capsys):
    if not (path := CASES / f"{name}.jsonl").is_file():
        pytest.skip("the cases are not here: ../shared/cases/formats, beside the checkout")
    (code, found), (format_, columns, pairs, _) = looked(capsys, path), EXPECTED[name]
    (reading,) = found["readings"]
    assert (code, reading["format"], reading["columns"]) == (0, format_, columns) and found["readings"][0]["left_out"] == 0
    assert reading["counts"]["preference"]["rows"] == pairs


def test_the_new_shapes_train_on_the_answers_alone(capsys):
    """No prompt, no list and no mark of a turn is in a trained text."""
    for name in EXPECTED:
        if not (path := CASES / f"{name}.jsonl").is_file():
            pytest.skip("the cases are not here: ../shared/cases/formats, beside the checkout")
        main([str(path), "--params", str(DEFAULTS), "--show", "12"])
        lines = [line for line in capsys.readouterr().out.splitlines() if "\N{MATHEMATICAL LEFT WHITE SQUARE BRACKET}" in line]
        trained = [line.split("\N{MATHEMATICAL LEFT WHITE SQUARE BRACKET}")[1] for line in lines[1:]]
        assert len(trained) >= 36
        assert not [text for text in trained if any(word in text for word in ("Tell me", "How do I", "role", "Human", "Assistant"))]


ASK, GOOD, BAD = "What is 2 + 2?", "It is four, of course.", "It is five, I am sure."
TALK = [{"role": "user", "content": ASK}]
A, B = ([*TALK, {"role": "assistant", "content": text}] for text in (BAD, GOOD))
SHAPES: dict[str, tuple[dict[str, Any], str, dict[str, str], str | None]] = {
    "webgpt": (
        {
            **{"question": {"dataset": "eli5", "id": "1", "full_text": ASK}, "answer_0": BAD, "score_0": -0.5, "answer_1": GOOD},
            **{"score_1": 0.5, "quotes_0": {"title": [], "extract": []}},
        },
        "compared",
        {
            **{"prompt": "question.full_text", "first": "answer_0", "second": "answer_1"},
            **{"first_score": "score_0", "second_score": "score_1"},
        },
        "WebGPT comparisons",
    ),
    "arena": (
        {"question_id": "1", "model_a": "x", "model_b": "y", "winner": "model_b", "conversation_a": A, "conversation_b": B, "turn": 1},
        "compared",
        {"first": "conversation_a", "second": "conversation_b"},
        "Chatbot Arena's conversations",
    ),
    "lmsys": (
        {
            **{"id": 1, "model_a": "x", "model_b": "y", "prompt": json.dumps([ASK]), "response_a": json.dumps([BAD])},
            **{"response_b": json.dumps([GOOD]), "winner_model_a": 0, "winner_model_b": 1, "winner_tie": 0},
        },
        "compared",
        {
            **{"first": "response_a", "second": "response_b"},
            **{"first_score": "winner_model_a", "second_score": "winner_model_b"},
        },
        "LMSYS's human preferences",
    ),
    "named_verdict": (
        {"question": ASK, "response_a": BAD, "response_b": GOOD, "winner": "b"},
        "compared",
        {"prompt": "question", "first": "response_a", "second": "response_b"},
        None,
    ),
    "ultrafeedback": (
        {
            **{"source": "x", "instruction": ASK, "models": ["x", "y"]},
            "completions": [{"response": BAD, "overall_score": 3.0, "model": "x"}, {"response": GOOD, "overall_score": 8.5, "model": "y"}],
        },
        "ranked",
        {"prompt": "instruction", "completion": "response", "score": "overall_score"},
        "UltraFeedback",
    ),
    "parallel": (
        {"prompt": ASK, "responses": [BAD, GOOD], "scores": [0.1, 0.9]},
        "ranked",
        {"completions": "responses", "score": "scores"},
        None,
    ),
    "oasst": (
        {
            **{"message_tree_id": "1", "tree_state": "ready_for_export"},
            "prompt": {
                **{"message_id": "1", "text": ASK, "role": "prompter", "rank": None},
                "replies": [
                    {"message_id": "2", "text": BAD, "role": "assistant", "rank": 1, "replies": []},
                    {"message_id": "3", "text": GOOD, "role": "assistant", "rank": 0, "replies": []},
                ],
            },
        },
        "tree",
        {"tree": "prompt"},
        "OpenAssistant's trees",
    ),
    "steerlm": (
        {"prompt": f"Hi<extra_id_1>Assistant\nHi.\n<extra_id_1>User\n{ASK}", "chosen": GOOD, "rejected": BAD},
        "preference",
        {},
        "TRL's preference",
    ),
    "hh_prompt": (
        {"prompt": f"\n\nHuman: {ASK}\n\nAssistant:", "chosen": f" {GOOD}", "rejected": f" {BAD}"},
        "preference",
        {},
        "TRL's preference",
    ),
    "whole_transcripts_in_messages": ({"chosen": repr(B), "rejected": repr(A)}, "preference", {}, None),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_public_shape_has_one_reading_that_prefers_the_better_answer(shape, tmp_path, capsys):
    record, format_, columns, known = SHAPES[shape]
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps(record) + "\n", encoding="utf-8")
    code, found = looked(capsys, path)
    (reading,) = found["readings"]
    assert (code, reading["format"], reading["columns"]) == (0, format_, columns) and known in (None, found["known"])
    assert main([str(path), "--params", str(DEFAULTS)]) == 0
    page = capsys.readouterr().out
    chosen, rejected = (
        page.split(f"preference, {side}")[1].split("\N{MATHEMATICAL LEFT WHITE SQUARE BRACKET}")[1] for side in ("chosen", "rejected")
    )
    assert chosen.startswith(GOOD) and rejected.startswith(BAD)
    assert f"<|user|>{ASK}<|end|>" in page


def test_messages_of_a_tree_one_by_one_are_no_texts_to_learn(tmp_path, capsys):
    records = [
        {"message_id": "1", "parent_id": None, "text": ASK, "role": "prompter"},
        {"message_id": "2", "parent_id": "1", "text": GOOD, "role": "assistant"},
    ]
    (tmp_path / "flat.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    code, found = looked(capsys, tmp_path / "flat.jsonl")
    assert code == 2 and "take the file of whole trees, which format tree reads" in found["unsure"]
    assert found["known"] == "OpenAssistant's messages"


def test_two_verdicts_are_a_question(tmp_path, capsys):
    record = {"prompt": ASK, "response_0": GOOD, "response_1": BAD, "better_response_id": 0, "safer_response_id": 1}
    (tmp_path / "safe.jsonl").write_text(json.dumps(record) + "\n")
    code, found = looked(capsys, tmp_path / "safe.jsonl")
    assert code == 2 and [r["columns"]["winner"] for r in found["readings"]] == ["better_response_id", "safer_response_id"]


def test_a_number_that_may_be_no_name_is_something_to_look_at(tmp_path, capsys):
    record = {"prompt": ASK, "response_0": GOOD, "response_1": BAD, "label": 0}
    (tmp_path / "numbered.jsonl").write_text(json.dumps(record) + "\n")
    code, found = looked(capsys, tmp_path / "numbered.jsonl")
    (reading,) = found["readings"]
    assert code == 0 and reading["columns"]["winner"] == "label"
    assert "label is read as the name of the better one; look whether that is right" in reading["unsure"]


def marked(folder: Path, *marks: str, name: str = "label") -> Path:
    path = folder / "kto.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["prompt", "completion", name])
        writer.writerows([f"Which is number {i}?", f"It is the one called {i}.", mark] for i, mark in enumerate(marks))
    return path


@pytest.mark.parametrize(
    "marks", [("1.0", "0.0"), ("1", "-1"), ("+1", "-1"), ("1", "0"), ("chosen", "rejected"), ("good", "bad"), ("Desirable", "undesirable")]
)
def test_marks_of_kto_in_a_table_are_feedback(marks, tmp_path, capsys):
    code, found = looked(capsys, marked(tmp_path, *marks * 3))
    (reading,) = found["readings"]
    assert (code, reading["format"]) == (0, "unpaired")
    assert (reading["counts"]["sft"]["rows"], reading["counts"]["preference"]["rows"]) == (3, 6)


@pytest.mark.parametrize("marks", [("positive", "negative"), ("correct", "incorrect"), ("yes", "no"), ("pass", "fail")])
def test_words_that_may_be_an_expected_answer_are_a_question(marks, tmp_path, capsys):
    code, found = looked(capsys, marked(tmp_path, *marks * 3))
    instruction, unpaired = found["readings"]
    assert (code, instruction["format"], unpaired["format"]) == (2, "instruction", "unpaired")
    assert "label" not in instruction["columns"] and any("every response would be learned" in line for line in instruction["unsure"])


@pytest.mark.parametrize("name", ["is_bad", "toxic", "thumbs_down"])
def test_marks_whose_yes_is_bad_are_not_read_the_other_way_round(name, tmp_path, capsys):
    code, found = looked(capsys, marked(tmp_path, "1", "0", "1", "0", name=name))
    assert code == 2 and name in found["unsure"] and [r["format"] for r in found["readings"]] == ["instruction"]


def test_a_number_among_answers_stays_a_label(tmp_path, capsys):
    path = tmp_path / "sums.jsonl"
    path.write_text(
        "".join(json.dumps({"problem": f"{i} + 2?", "solution": f"It is then {i + 2}.", "answer": i + 2.0}) + "\n" for i in range(3))
    )
    code, found = looked(capsys, path)
    assert code == 0 and found["readings"][0]["columns"]["label"] == "answer"
    main([str(path), "--params", str(DEFAULTS)])
    assert "label '2'" in capsys.readouterr().out
