"""A flow whose RL job samples freely with vLLM, is killed, and is trained again by one command from its journal."""

from __future__ import annotations

import time

import pandas as pd
import pytest
from small_chain import (
    SMALL,
    SMALL_CLERK,
    assert_nothing_left,
    await_checkpoint,
    begin,
    driver_process,
    make_chain,
    output_of,
    results,
    run,
)

from rlhf_core.stage.run import CRASHED

pytestmark = [pytest.mark.timeout(1500), pytest.mark.long]  # tests/unit/trainers/rl/test_rl_journal.py has engines and ranks

STEPS = 10
RECORDED = {
    "data": {"sources": {0: {"clerk": SMALL_CLERK}}},
    "rl": {
        "steps": STEPS,
        "checkpoint_every": 3,
        "rollout": {"max_new_tokens": 32, "max_lag": 2, "schedule": "recorded"},
        "evaluation": {"every": 5, "prompts": 8},
    },
}


def test_a_recorded_run_is_killed_and_trained_again_to_the_same_bits(tmp_path):
    (workspace := tmp_path / "recorded").mkdir()
    make_chain(workspace, SMALL, RECORDED)
    code, printed = run(workspace, "flows.full_pipeline", "--until", "gate_reward")
    assert code == 0, printed[-3000:]
    stage = begin(workspace, "tasks.train_rl")
    await_checkpoint(workspace, "train_policy", stage)
    (journal,) = (workspace / "scratch/train_policy").glob("*.journal")
    while not (journal / "batch-000004.json.gz").exists():
        assert stage.poll() is None, output_of(workspace)[-3000:]
        time.sleep(0.02)
    driver_process(workspace).kill()
    assert stage.wait(timeout=400) == CRASHED, output_of(workspace)[-3000:]

    code, printed = run(workspace, "flows.full_pipeline", "--until", "train_policy")
    assert code == 0 and "rl: resuming from the checkpoint of step 3" in printed, printed[-3000:]
    assert "batches, which are trained on without sampling" in printed
    curves = pd.read_csv(workspace / "plots/train_policy.csv")
    assert len(curves) == STEPS and curves["policy_lag_max"].max() <= 2 and curves["logprob_difference"].max() < 1e-4
    assert len(list(journal.glob("batch-*"))) == STEPS and [path.name for path in journal.parent.glob("*/")] == [journal.name]
    once = results(workspace)

    code, printed = run(workspace, "flows.full_pipeline", "--until", "train_policy", "--force", "train_policy")
    assert code == 0 and f"the journal has the next {STEPS} batches" in printed and "resuming" not in printed, printed[-3000:]
    assert "rl: starting 0 rollout engines" in printed
    again = results(workspace)
    assert [name for name in once if "policy" in name and again[name] != once[name]] == [], "weights, curves and metrics"
    assert_nothing_left(workspace)
