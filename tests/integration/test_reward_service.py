"""The chain with rewards of an HTTP service that needs a key and fails in the second step of RL."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
from aiohttp import web
from score_service import Service, Tree, serving
from small_chain import NAMED, PYTORCH_ROLLOUTS, change_params, copy_chain, ran, run

pytestmark = pytest.mark.timeout(900)

TRIALS = 2  # of check_model, and of train_policy before its job
CALIBRATION, OF_A_STEP = 32, 16
EVALUATED = 20 * 2 * 2  # prompts, models, greedy and sampled


@pytest.mark.long
def test_a_job_of_two_steps_asks_for_each_score_once_though_the_service_fails_between_them(chain, tmp_path: Path):
    workspace, broken = copy_chain(chain.workspace, tmp_path / "service"), [True]

    async def fails_in_step_2(service: Service, request: web.Request, tree: Tree) -> web.StreamResponse | None:
        return web.Response(status=500) if broken[0] and service.scored.total() >= TRIALS + CALIBRATION + OF_A_STEP else None

    with serving(misbehave=fails_in_step_2, key=NAMED["SCORER_API_KEY"]) as service:
        judge = {"name": "characters", "kind": "http", "url": service.url, "api_key_env": "SCORER_API_KEY", "retries": 1}
        rl = {"algorithm": "rloo", "steps": 2, "checkpoint_every": 1, "rloo": {"group_size": 4}}
        rl["reward"] = {"scorers": [judge | {"normalization": "initial"}]}
        change_params(workspace, PYTORCH_ROLLOUTS, {"rl": rl})
        code, printed = run(workspace, "dvc", "repro")
        assert code != 0 and ran(printed) == ["check_model", "train_policy"], printed[-3000:]
        assert f"the service answered 500 Internal Server Error: {service.url}, item " in printed, printed[-3000:]
        assert "scorer characters: expected at most rl.reward.max_unscored_fraction=0.1 of the responses without a finite score" in printed
        assert service.scored.total() == TRIALS + CALIBRATION + OF_A_STEP
        broken[0] = False
        code, printed = run(workspace, "dvc", "repro")
        assert code == 0 and ran(printed) == ["train_policy", "evaluate", "report"], printed[-3000:]
        assert "rl: resuming from the checkpoint of step 1" in printed
        again = 2  # trials, of train_policy and evaluate
        assert service.scored.total() == TRIALS + CALIBRATION + 2 * OF_A_STEP + again + EVALUATED
    curves = pd.read_csv(workspace / "plots/train_policy.csv")
    assert list(curves["step"]) == [1, 2] and (curves["failed_characters"] == 0).all() and (curves["score_characters"] > 1).all()
    evaluated = json.loads((workspace / "metrics/evaluate.json").read_text())
    assert evaluated["greedy"]["policy"]["score_mean"] == pytest.approx(mean_characters(workspace), abs=1e-3)
    inputs = json.loads((workspace / "data/inputs.json").read_text())
    assert inputs["scorers"] == {"rl.reward.scorers.characters": {"address": service.url}}
    assert json.loads((workspace / "metrics/check_model.json").read_text())["services"] == {"characters": {"url": service.url}}
    report = (workspace / "reports/report.html").read_text()
    assert f"Scores of characters come from {service.url}, which has no hash." in report
    assert not [path for path in workspace.rglob("*") if path.is_file() and NAMED["SCORER_API_KEY"].encode() in path.read_bytes()]
    assert NAMED["SCORER_API_KEY"] not in printed


def mean_characters(workspace: Path) -> float:
    samples = pd.read_parquet(workspace / "data/evaluation_samples.parquet")
    greedy = samples[samples["mode"] == "greedy"]
    assert (greedy["policy_response"].str.len() == greedy["policy_score"]).all()
    return json.loads((workspace / "metrics/evaluate.json").read_text())["greedy"]["policy"]["scores"]["characters"]["mean"]
