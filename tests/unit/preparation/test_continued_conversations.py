"""A conversation and its continuations are in one split, so no answer to a held-out prompt is an earlier turn in training."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlhf_core.config import DataConfig
from rlhf_core.data.schema import read_rows
from rlhf_core.preparation.sources import mix

QUESTIONS = 300
FRACTIONS = {"validation_fraction": 0.1, "test_fraction": 0.2, "promotion_fraction": 0.1}


def asked(i: int) -> dict[str, str]:
    return {"role": "user", "content": f"Question {i}?"}


def answered(i: int) -> dict[str, str]:
    return {"role": "assistant", "content": f"Answer {i}."}


def turns(i: int, long: bool) -> list[dict[str, str]]:
    """[q, a], or [q, a, q2, a2]."""
    return [asked(i), answered(i), *([asked(i + 1000), answered(i + 1000)] if long else [])]


def instruction(i: int, long: bool) -> dict[str, Any]:
    *earlier, last, output = turns(i, long)
    history = [[q["content"], a["content"]] for q, a in zip(earlier[::2], earlier[1::2], strict=True)]
    return {"instruction": last["content"], "output": output["content"], "history": history}


def transcript(messages: list[dict[str, str]]) -> str:
    return "".join(f"\n\n{'Human' if m['role'] == 'user' else 'Assistant'}: {m['content']}" for m in messages)


def pair(i: int, long: bool) -> dict[str, Any]:
    *prompt, chosen = turns(i, long)
    return {"prompt": prompt, "chosen": chosen["content"], "rejected": "No."}


FORMATS: dict[str, tuple[Callable[[int, bool], dict[str, Any]], dict[str, str]]] = {
    "messages": (lambda i, long: {"messages": turns(i, long)}, {}),
    "instruction": (instruction, {"history": "history"}),
    "preference": (pair, {}),
    "hh": (lambda i, long: {"chosen": transcript(turns(i, long)), "rejected": transcript([*turns(i, long)[:-1], answered(-1)])}, {}),
}


@pytest.mark.parametrize("format_", FORMATS)
def test_no_answer_to_a_held_out_prompt_is_an_earlier_turn_in_training(format_: str, tmp_path: Path):
    record, columns = FORMATS[format_]
    records = [record(i, long) for long in (False, True) for i in range(QUESTIONS)]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    source = {"name": "d", "kind": "file", "path": str(tmp_path / "d.jsonl"), "format": format_, "uses": ["sft"], "columns": columns}
    mix(DataConfig.model_validate({**FRACTIONS, "sources": [source]}), tmp_path / "out", scratch=tmp_path / "aside", seed=0)
    rows = read_rows(tmp_path / "out", "sft")
    trained = {m["content"] for row in rows if row["split"] == "train" for m in [*row["messages"], {"content": row["response"]}]}
    test = [row for row in rows if row["split"] == "test"]
    assert len(rows) == 2 * QUESTIONS and len(test) > 80
    assert not [row for row in test if row["response"] in trained]
    splits: dict[str, set[str]] = {}
    for row in rows:
        splits.setdefault(row["messages"][0]["content"], set()).add(row["split"])
    assert len(splits) == QUESTIONS and all(len(of_question) == 1 for of_question in splits.values())
