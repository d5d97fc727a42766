"""Chains that learn from the data itself: no reward model is trained, nothing scores, and the report says what it can't."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from small_chain import PYTORCH_ROLLOUTS, SMALL, make_chain, run

STEPS = {"steps": 8, "batch_size": 16, "checkpoint_every": 4, "eval_every": 4}
UNREWARDED = {"reward": {"enabled": False}, "dpo": STEPS, "kto": STEPS, "sft": {"steps": 12, "pretrain": {"steps": 0, "batch_size": 16}}}


def records(count: int, *, paired: bool) -> list[dict]:
    """Sums with right and wrong answers: a pair a prompt, or single answers, each marked."""
    draw = random.Random(7)
    made = []
    for number in range(count):
        a, b = draw.randrange(100), draw.randrange(100)
        prompt, right, wrong = f"What is {a} and {b}, number {number}?", f"It is {a + b}.", f"It is {a + b + draw.randrange(1, 9)}."
        good = number % 2 == 0
        single = {"prompt": prompt, "completion": right if good else wrong, "label": good}
        made.append({"prompt": prompt, "chosen": right, "rejected": wrong} if paired else single)
    return made


def source(path: Path, form: str) -> dict:
    return {"name": "sums", "kind": "file", "path": str(path), "format": form, "uses": ["sft", "preference", "prompt"], "weight": 1.0}


@pytest.mark.parametrize(("method", "form"), [("kto", "unpaired"), ("dpo", "preference")])
def test_a_chain_without_a_reward_model_runs_to_a_report_that_says_what_cant_be_said(tmp_path: Path, method: str, form: str):
    data = tmp_path / "sums.jsonl"
    data.write_text("\n".join(map(json.dumps, records(400, paired=form == "preference"))))
    changes = {"alignment": {"method": method}, "data": {"sources": [source(data, form)]}}
    workspace = tmp_path / "flow"
    workspace.mkdir()
    make_chain(workspace, SMALL, PYTORCH_ROLLOUTS, UNREWARDED, changes)
    code, printed = run(workspace, "flows.full_pipeline")
    assert code == 0, printed[-3000:]
    evaluation = json.loads((workspace / "metrics/evaluate.json").read_text())
    assert not evaluation["judge"] and evaluation["win_rate"]["greedy"]["value"] is None and evaluation["kl"]["sampled"] is not None
    report = (workspace / "reports/report.html").read_text()
    assert "Whether the policy is better can’t be said" in report and "To blame" not in report and "Win rate" not in report
    assert "neither score nor judge" in printed
