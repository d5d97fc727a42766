"""The gate as a user meets it: the stage's own process in a workspace of its own, under plain Python and under DVC."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlhf_core.config import apply_overrides
from rlhf_core.rounds import dvc_md5

ROOT = Path(__file__).parents[2]
JUDGE = {"name": "judge", "kind": "judge", "weight": 1.0, "normalization": "none"}
WITHOUT_REWARD_MODEL = {"reward.enabled": False, "rl.algorithm": "grpo", "rl.reward.scorers": [JUDGE], "rl.ppo.critic_init": "sft"}
Row = tuple[str, str, str, float, float]


def write_scores(workspace: Path, rows: list[Row]) -> None:
    columns = {name: [row[i] for row in rows] for i, name in enumerate(("id", "source", "split", "chosen_score", "rejected_score"))}
    columns |= {"chosen_tokens": [5] * len(rows), "rejected_tokens": [6] * len(rows)}
    (workspace / "data").mkdir(exist_ok=True)
    pq.write_table(pa.table(columns), workspace / "data/reward_heldout.parquet")


def pairs(right: int, wrong: int, ties: int = 0, *, source: str = "clerk", split: str = "test") -> list[Row]:
    margins = [1.0] * right + [-1.0] * wrong + [0.0] * ties
    return [(f"{source}-{split}-{i}", source, split, margin, 0.0) for i, margin in enumerate(margins)]


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    for name in ("params.yaml", "dvc.yaml"):
        shutil.copy(ROOT / name, tmp_path / name)
    for folder in ("tasks", "rlhf_core"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    (tmp_path / "models/reward").mkdir(parents=True)
    (tmp_path / "models/reward/model.safetensors").write_bytes(b"an earlier run's")
    return tmp_path


def run_stage(workspace: Path, stage: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", f"tasks.{stage}"]
    return subprocess.run(command, cwd=workspace, env=environment, capture_output=True, text=True, timeout=60, check=False)


def run_gate(workspace: Path) -> tuple[subprocess.CompletedProcess[str], dict]:
    done = run_stage(workspace, "gate_reward")
    return done, json.loads((workspace / "metrics/gate.json").read_text())


def test_passes_on_the_lower_end_and_counts_only_test_pairs(workspace):
    # The validation pairs, all wrong, don't count. 900 right and 20 ties of 1000: 0.91; the interval's ends by the formula
    # of test_statistics: centre 0.91 + 0.001920729 = 0.911920729, half 1.959964 * sqrt(0.0000819 + 9.6e-7) = 0.017841
    # / 1.003841459 gives 0.890658 and 0.926204.
    write_scores(workspace, pairs(900, 80, 20) + pairs(0, 500, split="validation"))
    done, gate = run_gate(workspace)
    assert done.returncode == 0 and "passed: held-out accuracy 0.9100 on 1000 pairs" in done.stdout
    assert gate["needed"] and gate["passed"] and (gate["n"], gate["ties"], gate["accuracy"]) == (1000, 20, 0.91)
    assert (gate["low"], gate["high"]) == pytest.approx((0.890658, 0.926204), abs=3e-6)
    assert [c["name"] for c in gate["checks"]] == ["pairs", "accuracy"] and all(c["passed"] for c in gate["checks"])


def test_a_share_above_the_bar_with_an_interval_across_it_is_rejected(workspace):
    # 231 of 300 is 0.77, over the 0.75 asked for, but the lower end is 0.719.
    write_scores(workspace, pairs(231, 69))
    done, gate = run_gate(workspace)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert gate["accuracy"] == 0.77 and gate["low"] == pytest.approx(0.719, abs=1e-3) and not gate["passed"]
    assert "expected the lower end of the interval to reach gate.min_accuracy=0.75, got 0.71" in done.stderr
    assert gate["message"] in done.stderr


def test_too_few_pairs_have_their_own_message(workspace):
    write_scores(workspace, pairs(199, 0))
    done, gate = run_gate(workspace)
    assert done.returncode == 1 and "expected at least gate.min_pairs=200 test pairs to judge by, got 199" in done.stderr
    assert {c["name"]: c["passed"] for c in gate["checks"]} == {"pairs": False, "accuracy": True}
    assert "lower end" not in gate["message"]


def test_no_test_pairs_at_all(workspace):
    write_scores(workspace, pairs(300, 0, split="validation"))
    done, gate = run_gate(workspace)
    assert done.returncode == 1 and "got 0" in gate["message"]
    assert gate["accuracy"] is None and not any(c["passed"] for c in gate["checks"])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_scores_that_are_no_numbers_are_refused_with_their_ids(workspace, bad):
    write_scores(workspace, [*pairs(300, 0), ("the-bad-one", "clerk", "test", bad, 0.0)])
    done, gate = run_gate(workspace)
    assert done.returncode == 1 and gate["needed"] and not gate["passed"] and gate["accuracy"] is None
    assert "1 of 301 test pairs: the-bad-one" in gate["message"] and gate["message"] in done.stderr


def test_a_missing_column_is_named(workspace):
    write_scores(workspace, pairs(300, 0))
    path = workspace / "data/reward_heldout.parquet"
    pq.write_table(pq.read_table(path).drop_columns(["rejected_score"]), path)
    done, gate = run_gate(workspace)
    assert done.returncode == 1 and "got none named rejected_score" in gate["message"]


def test_each_source_is_reported_by_itself(workspace):
    # Overall 450 of 500 = 0.9; one source is perfect, the other, with 100 pairs, a coin.
    write_scores(workspace, pairs(400, 0, source="good") + pairs(50, 50, source="coin"))
    _, gate = run_gate(workspace)
    assert gate["accuracy"] == 0.9
    assert {name: (s["accuracy"], s["n"]) for name, s in gate["by_source"].items()} == {"good": (1.0, 400), "coin": (0.5, 100)}


def test_without_a_reward_model_the_chain_goes_on_and_the_files_say_why(workspace):
    apply_overrides(workspace / "params.yaml", WITHOUT_REWARD_MODEL)
    for needed in ("data/prepared", "models/sft"):
        (workspace / needed).mkdir(parents=True)
    trained = run_stage(workspace, "train_reward")
    assert trained.returncode == 0, trained.stderr
    assert [path.name for path in (workspace / "models/reward").iterdir()] == ["not_trained.json"]
    reason = {"trained": False, "reason": "reward.enabled is false"}
    assert json.loads((workspace / "models/reward/not_trained.json").read_text()) == reason
    assert json.loads((workspace / "metrics/train_reward.json").read_text()) == reason
    heldout = pq.read_table(workspace / "data/reward_heldout.parquet")
    assert len(heldout) == 0 and pa.types.is_floating(heldout.schema.field("chosen_score").type)
    assert heldout.column_names == ["id", "source", "split", "chosen_score", "rejected_score", "chosen_tokens", "rejected_tokens"]
    done, gate = run_gate(workspace)
    assert done.returncode == 0 and "not needed: no reward model was trained" in done.stdout
    assert (gate["needed"], gate["passed"], gate["accuracy"], gate["by_source"]) == (False, False, None, {})


def test_a_reward_model_that_was_rolled_back_does_not_pass_again(workspace):
    write_scores(workspace, pairs(900, 100))
    taken_back = {"version": "v2.0.0", "md5": dvc_md5(workspace / "models/reward"), "reason": "policies became curt"}
    other = {"version": "v1.0.0", "md5": "0" * 32 + ".dir", "reason": "older"}
    apply_overrides(workspace / "params.yaml", {"gate.rolled_back": [other]})
    done, gate = run_gate(workspace)
    assert done.returncode == 0 and gate["passed"] and {c["name"]: c["passed"] for c in gate["checks"]}["rolled_back"]
    apply_overrides(workspace / "params.yaml", {"gate.rolled_back": [other, taken_back]})
    done, gate = run_gate(workspace)
    assert done.returncode == 1 and not gate["passed"] and [c["name"] for c in gate["checks"] if not c["passed"]] == ["rolled_back"]
    assert "rejected: version v2.0.0 was rolled back (policies became curt), and this is the same model." in done.stderr


def test_an_override_lets_the_chain_go_on_and_is_written_down(workspace):
    apply_overrides(workspace / "params.yaml", {"gate.override": "a demonstration"})
    write_scores(workspace, pairs(231, 69))
    done, gate = run_gate(workspace)
    assert done.returncode == 0 and not gate["passed"] and gate["override"] == "a demonstration"
    assert "Used all the same, for gate.override says: a demonstration" in done.stdout
    write_scores(workspace, pairs(290, 10))
    done, gate = run_gate(workspace)
    assert gate["passed"] and gate["override"] is None  # none was needed


def test_gate_json_survives_a_rejection_under_dvc(workspace):
    write_scores(workspace, pairs(150, 150))
    shutil.copytree(ROOT / ".dvc", workspace / ".dvc", ignore=shutil.ignore_patterns("tmp", "cache", "config.local"))
    (workspace / "metrics").mkdir()
    (workspace / "metrics/gate.json").write_text('{"passed": true, "of": "an earlier run"}')
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": path, "DVC_NO_ANALYTICS": "1"}
    subprocess.run(["git", "init", "--quiet"], cwd=workspace, check=True)
    command = [sys.executable, "-m", "dvc", "repro", "--single-item", "gate_reward"]
    done = subprocess.run(command, cwd=workspace, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode != 0 and "gate.min_accuracy=0.75" in done.stdout + done.stderr
    gate = json.loads((workspace / "metrics/gate.json").read_text())
    assert gate["passed"] is False and gate["accuracy"] == 0.5
