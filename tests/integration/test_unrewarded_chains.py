"""A chain that learns from the data itself: no reward model is trained, nothing scores, and the report says what it can't."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest
from small_chain import PYTORCH_ROLLOUTS, SMALL, make_chain, run

STEPS = {"steps": 8, "batch_size": 16, "checkpoint_every": 4, "eval_every": 4}
UNREWARDED = {"reward": {"enabled": False}, "kto": STEPS, "sft": {"steps": 12, "pretrain": {"steps": 0, "batch_size": 16}}}


def records(count: int) -> list[dict]:
    """Sums, each with one answer that is marked right or wrong."""
    draw = random.Random(7)
    made = []
    for number in range(count):
        a, b, good = draw.randrange(100), draw.randrange(100), number % 2 == 0
        answer = a + b + (0 if good else draw.randrange(1, 9))
        made.append({"prompt": f"What is {a} and {b}, number {number}?", "completion": f"It is {answer}.", "label": good})
    return made


@pytest.mark.long
def test_kto_on_unpaired_rows_reports_what_was_not_measured(tmp_path: Path):
    data = tmp_path / "sums.jsonl"
    data.write_text("\n".join(map(json.dumps, records(400))))
    source = {
        "name": "sums",
        "kind": "file",
        "path": str(data),
        "format": "unpaired",
        "uses": ["sft", "preference", "prompt"],
        "weight": 1.0,
    }
    workspace = tmp_path / "flow"
    workspace.mkdir()
    make_chain(workspace, SMALL, PYTORCH_ROLLOUTS, UNREWARDED, {"alignment": {"method": "kto"}, "data": {"sources": [source]}})
    code, printed = run(workspace, "flows.full_pipeline")
    assert code == 0, printed[-3000:]
    evaluation = json.loads((workspace / "metrics/evaluate.json").read_text())
    assert not evaluation["judge"] and evaluation["win_rate"]["greedy"]["value"] is None and evaluation["kl"]["sampled"] is not None
    report = (workspace / "reports/report.html").read_text()
    assert "There is no verdict: nothing compared" in report and "Stage at fault" not in report and "Win rate" not in report
    assert "neither score nor judge" in printed
    assert re.search(r"^train_policy: preference step 8/8 · loss \S+ .*in all$", printed, re.MULTILINE)
    assert re.search(r"^evaluate: answer 80/80 · .*in all$", printed, re.MULTILINE)
