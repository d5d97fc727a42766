"""The problems of recipes/code.yaml: the committed file is what the tool prints, and solutions pass their tests, mistakes don't."""

from __future__ import annotations

import json
from pathlib import Path

from rlhf_core.config import ScorerConfig
from rlhf_core.scorers.text import ScoreItem, TextScorers
from tools.code_problems import CONSTANTS, FORMS, TASKS, problems, solution

FILE = Path(__file__).parents[3] / "recipes" / "code_problems.jsonl"
K = CONSTANTS[-1]


def item(response: str, label: list | dict) -> ScoreItem:
    return ScoreItem("", [], response, json.dumps(label), {"id": "1", "source": "code"})


def test_the_committed_file_is_what_the_tool_prints():
    assert FILE.read_text().splitlines() == [json.dumps(problem) for problem in problems()]


def test_a_third_of_the_demonstrations_are_right():
    cases = [(task, k, form) for task in range(len(TASKS)) for k in CONSTANTS for form in range(len(FORMS))]
    right = sum(made["demonstration"] == solution(form, task, k) for made, (task, k, form) in zip(problems(), cases, strict=True))
    assert 0.26 < right / len(cases) < 0.34


def test_solutions_pass_their_tests_and_mistakes_fail():
    """A function and a program for each task, of the last constant: right, with either mistake, and with the next constant."""
    made, items = list(problems()), []
    for task in range(len(TASKS)):
        for form in range(len(FORMS)):
            tests = made[len(FORMS) * (task * len(CONSTANTS) + len(CONSTANTS) - 1) + form]["tests"]
            answers = [solution(form, task, K), solution(form, task, K, confused=True), solution(form, task, K, forgot=True)]
            items += [item(answer, tests) for answer in (*answers, solution(form, task, K + 1))]
    scores, _ = TextScorers(0, [ScorerConfig(name="tests", kind="code", reward="all", seconds=10)], {}).score_items("tests", items)
    assert scores == [1.0, 0.0, 0.0, 0.0] * (len(items) // 4)
