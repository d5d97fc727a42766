"""Data of a model's own samples, with a writer whose texts are known, and with a tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.config import SamplesConfig, SourceConfig
from rlhf_core.data.schema import Message
from rlhf_core.preparation.drops import DropCounts
from rlhf_core.preparation.samples import Written, whole_sentences
from rlhf_core.preparation.sources import read_source

RULE = "def rule(prompt, response):\n    return {'good': 'good' in response, 'calm': '!' not in response}\n"
OPENINGS = ["Once", "One day"]
SAMPLES: dict[str, Any] = {
    "openings": OPENINGS, "opening_tokens": 8, "prompts": 4, "responses_per_prompt": 3, "max_new_tokens": 9, "temperature": 1.0,
    "top_p": 1.0, "label_noise": 0.0,
}  # fmt: skip


def source(folder: Path, *, rule: str = RULE, uses: tuple[str, ...] = ("sft", "preference", "prompt"), **samples) -> SourceConfig:
    (folder / "mine.py").write_text(rule)
    settings = {"name": "own", "kind": "samples", "judge": f"{folder / 'mine.py'}:rule", "uses": list(uses), "weight": 1.0}
    return SourceConfig.model_validate({**settings, "samples": SAMPLES | samples})


class KnownWriter:
    """Writes what it is told: the extensions of openings by draw, and the same responses to every prompt."""

    def __init__(self, extensions: list[list[str]], responses: list[Written]):
        self._extensions, self._responses = extensions, responses

    def extend(self, openings: list[str], config: SamplesConfig, *, source: str, draw: int) -> list[Written]:
        return [Written(f"{opening}{more}", ended=False) for opening, more in zip(openings, self._extensions[draw], strict=True)]

    def respond(self, conversations: list[list[Message]], config: SamplesConfig, *, source: str, draw: int) -> list[list[Written]]:
        return [self._responses for _ in conversations]


def cut(text: str) -> Written:
    return Written(text, ended=False)


def rows(source: SourceConfig, writer: KnownWriter) -> tuple[dict[str, list[dict]], DropCounts]:
    dropped = DropCounts()
    found: dict[str, list[dict]] = {use: [] for use in source.uses}
    for use, row in read_source(source, seed=0, dropped=dropped, writer=writer):
        found[use].append(row)
    return found, dropped


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        ("She ran. He fel", "She ran."),
        ("She ran. He fell!", "She ran. He fell!"),
        ("no end here", ""),
        ("3.5 is less than 4.", "3.5 is less than 4."),
        ('He said, "Run. Now', ""),  # the quote is open
        ('He said, "Run." She', 'He said, "Run."'),
        ("它跑了。然后", "它跑了。"),
    ],
)
def test_a_text_is_cut_after_its_last_whole_sentence(text, whole):
    assert whole_sentences(text) == whole


def test_prompts_pairs_and_demonstrations_by_hand(tmp_path):
    # The third extension has no sentence, the fourth repeats the second's prompt; two more come with the second draw.
    extensions = [[" he ran. And", " it fell.", " she", " it fell. So"], [" a. b", " b. c", " c. d", " d. e"]]
    responses = [cut("It was good. It w"), cut("Stop!"), cut("It was good. Th"), cut("no end")]
    found, dropped = rows(source(tmp_path), KnownWriter(extensions, responses))
    prompts = [row["messages"][0]["content"] for row in found["prompt"]]
    assert prompts == ["Once he ran.", "One day it fell.", "Once a.", "One day b."]
    assert {row["response"] for row in found["sft"]} == {"It was good."} and len(found["sft"]) == 4
    # Of the four responses one has no end and two are the same: one pair is left, which both aspects tell apart.
    pair = {"chosen": "It was good.", "rejected": "Stop!", "slices": {"aspects": "good+calm"}}
    assert found["preference"] == [{"messages": row["messages"], **pair} for row in found["prompt"]]
    assert dropped == {"prompts that are no beginning of a text": 1, "responses without a whole sentence": 4}


def test_openings_are_the_prompts_where_nothing_is_to_be_added(tmp_path):
    given = source(tmp_path, opening_tokens=0, openings=["What is good?", "Why?", "Why?"])
    found, _ = rows(given, KnownWriter([], [Written("good", ended=True), Written("bad!", ended=True)]))
    assert [row["messages"] for row in found["prompt"]] == [[{"role": "user", "content": text}] for text in ("What is good?", "Why?")]
    assert found["preference"][0]["chosen"] == "good"  # as the model ended it, with or without a sentence


def test_prompts_of_a_file_keep_their_labels_and_turns(tmp_path):
    turns = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Yes?"}, {"role": "user", "content": "Why?"}]
    records = [{"question": "What is good?", "answer": "all"}, {"question": turns, "answer": None}, {"question": "Third?", "answer": "x"}]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    file = {"path": str(tmp_path / "questions.jsonl"), "format": "prompt", "columns": {"prompt": "question", "label": "answer"}}
    samples = SAMPLES | {"openings": [], "opening_tokens": 0, "prompts": 2}
    given = SourceConfig.model_validate(source(tmp_path).model_dump() | file | {"samples": samples})
    found, _ = rows(given, KnownWriter([], [Written("good", ended=True), Written("bad!", ended=True)]))
    one = [{"role": "user", "content": "What is good?"}]
    assert [(row["messages"], row["label"]) for row in found["prompt"]] == [(one, "all"), (turns, None)]
    assert [row["messages"] for row in found["preference"]] == [one, turns] and {row["chosen"] for row in found["preference"]} == {"good"}


def test_label_noise_flips_its_share_of_the_pairs(tmp_path):
    openings = [f"Number {i}." for i in range(400)]
    given = source(tmp_path, opening_tokens=0, openings=openings, prompts=400, label_noise=0.2)
    found, _ = rows(given, KnownWriter([], [cut("It is good."), cut("Stop!")]))
    flipped = sum(row["chosen"] == "Stop!" for row in found["preference"])
    assert 50 < flipped < 110  # 80 expected, standard deviation 8
    again, _ = rows(given, KnownWriter([], [cut("It is good."), cut("Stop!")]))
    assert again == found


def test_only_the_declared_uses_get_rows(tmp_path):
    found, _ = rows(source(tmp_path, uses=("prompt",), opening_tokens=0, openings=["a."]), KnownWriter([], [cut("Stop!")]))
    assert list(found) == ["prompt"] and len(found["prompt"]) == 1


def test_a_rule_that_tells_nothing_apart_is_refused(tmp_path):
    given = source(tmp_path, opening_tokens=0, openings=["a."])
    with pytest.raises(ValueError, match=r"source own: expected rows for preference, got none from the model .*doesn't tell apart.*rule"):
        rows(given, KnownWriter([], [cut("Stop!"), cut("Go!")]))


def test_a_model_that_writes_no_sentences_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"source own: expected prompts that end with a sentence, got none after 8 tokens; raise"):
        rows(source(tmp_path), KnownWriter([[" a", " b", " c", " d"]] * 3, []))


class NeverAsked(KnownWriter):
    def extend(self, openings, config, *, source, draw):
        raise AssertionError("a rule that can't be used was not refused before the model wrote anything")


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("rule = 3\n", r"rule .*mine.py:rule: expected a function rule there, got 3; correct the name"),
        ("def other(prompt, response):\n    return {}\n", r"expected a function rule there, got None"),
        ("def rule(prompt):\n    return {}\n", r"expected it to take \(prompt, response\), got \(prompt\)"),
        ("import nothing_of_that_name\n", r"expected an importable module, got ModuleNotFoundError"),
        ("def rule(prompt, response):\n    return 1 / 0\n", r"expected a verdict on 'Once', got ZeroDivisionError \(division by zero\)"),
        ("def rule(prompt, response):\n    return 0.7\n", r"expected a dictionary of aspects and True or False, got 0.7; correct it"),
        ("def rule(prompt, response):\n    return {}\n", r"expected a dictionary of aspects and True or False, got \{\}"),
        ("def rule(prompt, response):\n    return {'good': 1}\n", r"expected a dictionary of aspects and True or False, got \{'good': 1\}"),
        ("def rule(prompt, response):\n    return {'ok': True}\n", r"expected aspects named .*none of \['n', 'ok'\], got 'ok'; rename it"),
        ("def rule(prompt, response):\n    return {'Not so': True}\n", r"expected aspects named in small letters.*got 'Not so'"),
    ],
)
def test_a_rule_that_cannot_be_used_is_refused_before_anything_is_drawn(tmp_path, rule, message):
    with pytest.raises(ValueError, match=message):
        rows(source(tmp_path, rule=rule), NeverAsked([], []))
