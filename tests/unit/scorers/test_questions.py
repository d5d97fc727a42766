"""The rule and the measure of recipes/smollm2.yaml."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlhf_core.data.functions import load_function
from rlhf_core.data.judge import find_judge

ROOT = Path(__file__).parents[3]
FILE = ROOT / "rewards/questions.py"


@pytest.mark.parametrize(
    ("response", "aspects"),
    [
        ("The capital of France is Paris.", {"short": True, "one": True}),
        ("It is Paris. Paris is in France.", {"short": True, "one": False}),
        ("Paris", {"short": True, "one": False}),
        (f"It is {'very ' * 12}old.", {"short": False, "one": True}),
        ("It is\n3.5.", {"short": True, "one": False}),
    ],
)
def test_a_brief_answer_is_one_sentence_of_twelve_words(response, aspects):
    question = [{"role": "user", "content": "What?"}]
    assert find_judge(f"{FILE}:brief")(question, response).aspects == aspects


def test_a_right_answer_is_finished_and_says_one_of_the_labels_words():
    right = load_function(f"{FILE}:right", ("prompts", "responses", "labels", "metadata"), what="scorer")
    responses = [
        "It's a mouse, plural Mice.",
        "They are micey",
        "No twice.",
        "It has eight legs",
        "8 legs",
        "80 or 1,8",
        "any",
        "hydrogen",
        "It is H.",
    ]
    labels = ["mice", "mice", "ice", "8|eight", "8|eight", "8|eight", None, "H", "H"]
    finished = [True, False, *[True] * 7]
    scores = right(responses, responses, labels, [{"finished": value} for value in finished])
    assert scores == [1.0, 0.0, 0.0, 1.0, 1.0, 0.0, None, 0.0, 1.0]


def test_every_question_has_a_label_and_occurs_once():
    rows = [json.loads(line) for line in (ROOT / "recipes/questions.jsonl").read_text().splitlines()]
    assert len({row["prompt"] for row in rows}) == len(rows) > 300 and all(row["label"].strip("|") for row in rows)
