"""The problems of recipes/code.yaml: the committed file is what the tool prints, and its solutions pass its tests."""

from __future__ import annotations

import json
from pathlib import Path

from rlhf_core.config import ScorerConfig
from rlhf_core.scorers.text import ScoreItem, TextScorers
from tools.code_problems import CONSTANTS, TASKS, problems

FILE = Path(__file__).parents[3] / "recipes" / "code_problems.jsonl"


def item(response: str, label: list | dict) -> ScoreItem:
    return ScoreItem("", [], response, json.dumps(label), {"id": "1", "source": "code"})


def test_the_committed_file_is_what_the_tool_prints():
    assert FILE.read_text().splitlines() == [json.dumps(problem) for problem in problems()]


def test_solutions_pass_their_tests_and_those_of_no_other_task():
    """A function and a program for each task, of its last constant; solved, and answered by the next task's solution."""
    made = list(problems())
    own = [made[2 * (task * len(CONSTANTS) + len(CONSTANTS) - 1) + form] for form in (0, 1) for task in range(len(TASKS))]
    items = [item(problem["solution"], problem["tests"]) for problem in own]
    items += [item(other["solution"], problem["tests"]) for problem, other in zip(own, own[1:] + own[:1], strict=True)]
    scores, _ = TextScorers(0, [ScorerConfig(name="tests", kind="code", reward="all", seconds=10)], {}).score_items("tests", items)
    assert scores == [1.0] * len(own) + [0.0] * len(own)
