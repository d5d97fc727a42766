"""The clerk's notebook: what demonstrations show, what prompts expect, and that an episode of right turns is right."""

from __future__ import annotations

import re
from pathlib import Path
from random import Random

import pytest

from rlhf_core.agents.environment import Environment
from rlhf_core.agents.tools import parse_calls
from rlhf_core.config import ClerkConfig, EnvironmentConfig
from rlhf_core.data.clerk.generator import clerk_rows
from rlhf_core.data.clerk.notebook import GUESSES, PAGES, call, notebook_rows, number_on
from rlhf_core.engines.rollout.requests import Sample, SamplingSettings
from rlhf_core.models.tokenizer import build_tokenizer, encode_prompt
from rlhf_core.types import Prompt

CONFIG = ClerkConfig(notebook=True, demonstrations=2000, prompts=500)
AGENT = Path(__file__).parents[3] / "agents/notebook.py"


def asked(row: dict) -> tuple[int, int]:
    first, second = re.fullmatch(r"(?:Please a|Quick, a|A)dd pages (\d+) and (\d+)\.", row["messages"][0]["content"]).groups()
    return int(first), int(second)


def test_demonstrations_read_and_add_and_are_as_careless_as_they_should_be():
    rows = clerk_rows(CONFIG, "sft", 0)
    assert len({row["messages"][0]["content"] for row in rows}) == len(rows) == 2000
    right = 0
    for row in rows:
        (first, second), messages = asked(row), row["messages"]
        a, b = number_on(first), number_on(second)
        turns = [(call("read", page=first), a), (call("read", page=second), b), (call("add", a=a, b=b), a + b)]
        done = len(messages) // 2
        assert [m["content"] for m in messages[1:]] == [str(text) for turn in turns[:done] for text in turn]
        assert [m["role"] for m in messages] == ["user", *["assistant", "tool"] * done]
        assert all(len(parse_calls(m["content"])) == 1 for m in messages[1::2])
        right += done == 3 and row["response"] == f"It is {a + b}."
        assert done < 3 or row["response"] == f"It is {a + b}."
    share = 1.0
    for chance in GUESSES:
        share *= 1 - chance
    assert share < 0.3 and right / len(rows) == pytest.approx(share, abs=0.03)


def test_prompts_expect_the_sum():
    rows = clerk_rows(CONFIG, "prompt", 0)
    assert len(rows) == 1000
    assert all(row["label"] == str(sum(map(number_on, asked(row)))) for row in rows)


def test_what_the_notebook_does_not_have_is_refused():
    with pytest.raises(ValueError, match="pages 10 to 99"):
        number_on(100)
    with pytest.raises(ValueError, match="at most 8000 different prompts, got 8001"):
        list(notebook_rows(CONFIG.model_copy(update={"demonstrations": 8_001}), "sft", Random(0)))
    assert len({number_on(page) for page in PAGES}) > 40


AGENTS = {
    "function": {"path": f"{AGENT}:play"},
    "claims": {"command": ["python", str(AGENT.with_name("notebook_client.py"))], "processes": 1, "claims": 4},
    "processes": {"command": ["python", str(AGENT.with_name("notebook_client.py"))], "processes": 4},
}


@pytest.mark.parametrize("agent", ["function", "claims", pytest.param("processes", marks=pytest.mark.long)])
def test_an_episode_of_right_turns_is_right_and_a_guess_is_wrong(agent, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(AGENT.parents[1]))
    rows = clerk_rows(CONFIG, "prompt", 0)[:4]
    tokenizer = build_tokenizer([m["content"] for row in rows for m in row["messages"]], vocab_size=300)
    end = tokenizer.eos_token_id
    prompts = [Prompt(str(i), "s", r["messages"], encode_prompt(tokenizer, r["messages"]), r["label"]) for i, r in enumerate(rows)]

    def oracle(ids: list[list[int]], seeds: list[int], settings: SamplingSettings) -> list[Sample]:
        """Turns by what the tools have said; it guesses at the first prompt."""
        said = [[*tokenizer(turn(tokenizer.decode(of_one)), add_special_tokens=False)["input_ids"], end] for of_one in ids]
        return [Sample(reply, [0.0] * len(reply), True, 1) for reply in said]

    def turn(text: str) -> str:
        pages, seen = re.findall(r"\d+", text.partition("<|end|>")[0]), re.findall(r"<\|tool\|>(\d+)", text)
        if len(seen) == 3 or pages == [str(page) for page in asked(rows[0])]:
            return f"It is {(seen or ['0'])[-1]}."
        return call("add", a=int(seen[0]), b=int(seen[1])) if len(seen) == 2 else call("read", page=int(pages[len(seen)]))

    how = {"stops": (end,), "max_length": 600, "deadline": 150.0, "takes_scores": True}
    environment = Environment(EnvironmentConfig(**AGENTS[agent]), tokenizer, **how)
    rollouts = environment.play(prompts, [0, 1, 2, 3], SamplingSettings(500, 1.0), oracle)
    environment.close()
    assert [r.dialogue.score for r in rollouts] == [0.0, 1.0, 1.0, 1.0]
    assert [r.dialogue.turns for r in rollouts] == [1, 4, 4, 4] and all(r.dialogue.failed_calls == 0 for r in rollouts)
