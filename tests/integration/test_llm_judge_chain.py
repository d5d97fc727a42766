"""RL rewarded by a language model that judges: the gate stops a bad one, and a killed run asks for nothing twice."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
from judge_service import JudgeService, Tree, at_random, judging
from small_chain import (
    PYTORCH_ROLLOUTS,
    SMALL,
    SMALL_CLERK,
    await_checkpoint,
    begin,
    change_params,
    driver_process,
    forget,
    make_chain,
    ran,
    results,
    run,
)

from rlhf_core.data.judge import judge
from rlhf_core.stage.run import CRASHED

pytestmark = [pytest.mark.timeout(1200), pytest.mark.long]  # tests/unit/scorers/test_llm_judge.py and tests/unit/gate/test_llm_judges.py

STEPS = 8
IN_FLIGHT = 16  # the default of a judge's concurrency


def of_the_clerk(response: str, conversation: list[Tree]) -> float:
    """How many of the clerk's four aspects a response meets; of a stage's trial, which isn't the clerk's, none."""
    return 0.0 if conversation[-1]["content"] == "What is 2 + 2?" else 2.0 * judge(conversation, response).met


def params_of(service: JudgeService, model: str) -> dict:
    scorer = {"name": "helpful", "kind": "llm_judge", "url": service.url, "model": model, "normalization": "running"}
    scorer |= {"prices": {"input": 1.0, "output": 2.0}, "budget_cost": 100.0}
    return {"rl": {"reward": {"scorers": [scorer]}}}


JUDGED = {
    "reward": {"enabled": False},
    "data": {"sources": {0: {"clerk": SMALL_CLERK}}},
    "gate": {"min_accuracy": 0.55, "min_pairs": 60, "llm_judge": {"pairs": 80}},
    "rl": {"algorithm": "grpo", "steps": STEPS, "checkpoint_every": 2, "grpo": {"group_size": 4}, "ppo": {"critic_init": "sft"}},
    "evaluation": {"scorers": [{"name": "brief", "kind": "length", "target_length": 8}]},
}


def asked(service: JudgeService, model: str) -> dict[str, int]:
    """Question -> how often it was answered, without the stages' trials."""
    questions = {json.dumps([r["model"], r["messages"], r["seed"]]) for r in service.requests if r["model"] == model}
    return {question: service.asked[question] for question in questions if "What is 2 + 2?" not in question}


def test_a_bad_judge_stops_the_chain_and_a_good_ones_answers_survive_a_kill(tmp_path: Path):
    workspace = tmp_path / "judged"
    workspace.mkdir()
    with judging(quality=at_random) as service:
        make_chain(workspace, SMALL, PYTORCH_ROLLOUTS, JUDGED, params_of(service, "random"))
        code, printed = run(workspace, "dvc", "repro")
        assert code != 0 and ran(printed)[-1] == "gate_reward", printed[-3000:]
        assert "judge rl.reward.scorers.helpful: rejected: expected the lower end of the interval to reach" in printed
        gate = json.loads((workspace / "metrics/gate.json").read_text())
        assert not gate["llm_judges"][0]["passed"] and gate["override"] is None and not (workspace / "models/policy").exists()

        service.quality, service.seconds = of_the_clerk, 0.02
        change_params(workspace, params_of(service, "clerk"))
        code, printed = run(workspace, "dvc", "repro", "gate_reward")
        assert code == 0 and "judge rl.reward.scorers.helpful: passed" in printed, printed[-3000:]
        # the gate's 212 questions that differ cost 0.02544: the budget ends within RL, whose first steps ask 16 each at most
        change_params(workspace, {"rl": {"reward": {"scorers": {0: {"budget_cost": 0.029}}}}})
        code, printed = run(workspace, "dvc", "repro", "train_policy")
        assert code != 0 and "gate_reward" not in ran(printed) and ran(printed)[-1] == "train_policy", printed[-3000:]
        assert "scorer helpful: expected to judge within budget_cost=0.029, got" in printed, printed[-3000:]
        change_params(workspace, {"rl": {"reward": {"scorers": {0: {"budget_cost": 100.0}}}}})
        stage = begin(workspace, "tasks.train_rl")
        await_checkpoint(workspace, "train_policy", stage)
        driver_process(workspace).kill()
        assert stage.wait(timeout=400) == CRASHED
        before = len(service.requests)
        code, printed = run(workspace, "dvc", "repro")
        assert code == 0 and ran(printed) == ["train_policy", "evaluate", "report"], printed[-3000:]
        assert "rl: resuming from the checkpoint of step" in printed
        again = [times for times in asked(service, "clerk").values() if times > 1]
        assert len(service.requests) > before and len(again) <= IN_FLIGHT and set(again) <= {2}, "only what was asked for at the kill"

        survived, before = results(workspace), len(service.requests)
        forget(workspace, "tasks.train_rl")
        code, printed = run(workspace, "dvc", "repro", "--force", "--single-item", "train_policy")
        assert code == 0 and "resuming" not in printed, printed[-3000:]
        assert len(service.requests) == before + 1, "one trial"
        assert results(workspace) == survived
    curves = pd.read_csv(workspace / "plots/train_policy.csv")
    assert len(curves) == STEPS and (curves["failed_helpful"] == 0).all() and curves["score_helpful"].between(1, 10).all()
    measured = [json.loads(text) for text in curves["scorer_metrics"]]
    assert {(m["helpful.tokens"], m["helpful.unparsable"]) for m in measured} == {(110.0, 0.0)}
    # a question has 100 tokens at 1 per million, an answer 10 at 2
    assert [m["helpful.cost"] for m in measured] == pytest.approx([0.00012] * STEPS)
    assert "## Gate of the judge helpful\n\nModel: clerk. Passed: accuracy" in (workspace / "models/policy/README.md").read_text()
    report = (workspace / "reports/report.html").read_text()
    assert "The judge helpful" in report and "passed: accuracy" in report
    assert f"Scores of helpful come from {service.url}, which has no hash and calls itself rule-1." in report
