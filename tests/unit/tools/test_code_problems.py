"""The problems of recipes/code.yaml: the committed file is what the tool prints, and solutions pass their tests, mistakes don't."""

from __future__ import annotations

import json
import random
from pathlib import Path

from rlhf_core.config import ScorerConfig
from rlhf_core.scorers.text import ScoreItem, TextScorers
from tools.code_problems import CONSTANTS, FORMS, TASKS, careless, problems, solution

FILE = Path(__file__).parents[3] / "recipes" / "code_problems.jsonl"
K = CONSTANTS[-1]


def item(response: str, label: list | dict) -> ScoreItem:
    return ScoreItem("", [], response, json.dumps(label), {"id": "1", "source": "code"})


def test_the_committed_file_is_what_the_tool_prints():
    assert FILE.read_text().splitlines() == [json.dumps(problem) for problem in problems()]


def test_a_third_of_the_demonstrations_are_right():
    draw, cases = random.Random(1), [(form, task) for form in range(len(FORMS)) for task in range(len(TASKS))] * 200
    right = sum(careless(draw, form, task, K) == solution(form, task, K) for form, task in cases)
    assert 0.27 < right / len(cases) < 0.33  # 0.3 of 3,200: four standard errors are 0.032


def test_solutions_pass_their_tests_and_mistakes_none():
    """A function and a program for each task, of the last constant: right, with the next task, the next constant, and the wrong form."""
    made = list(problems())
    items, wanted = [], []
    for task in range(len(TASKS)):
        for form in range(len(FORMS)):
            tests = made[len(FORMS) * (task * len(CONSTANTS) + len(CONSTANTS) - 1) + form]["tests"]
            answers = [solution(form, task, K), solution(form, (task + 1) % len(TASKS), K), solution(form, task, K + 1)]
            answers.append(solution(form, task, K, forgets=True))
            items += [item(answer, tests) for answer in answers]
            wanted += [1.0, 0.0, 0.0, 0.0]
    scores, _ = TextScorers(0, [ScorerConfig(name="tests", kind="code", reward="all", seconds=10)], {}).score_items("tests", items)
    assert scores == wanted
