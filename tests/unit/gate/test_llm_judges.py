"""The gate's verdict on language models that judge: a good one passes, and biased, random and unreadable ones don't."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import warm_python
from aiohttp import web
from clerk_params import CLERK_PARAMS
from gate_verdicts import gate_config
from judge_service import JudgeService, Tree, at_random, by_length, by_plus, judging

from rlhf_core.config import ScorerConfig, apply_overrides, load_params
from rlhf_core.config.params import rows_needed
from rlhf_core.data.schema import write_rows
from rlhf_core.gate.llm_judges import JudgeUnavailable, judge_judge
from rlhf_core.gate.looks import LEDGER
from rlhf_core.scorers import service as transport
from rlhf_core.scorers.llm_judge.answers import BudgetSpent
from rlhf_core.stage.run import StageRefused, check_gate_of_judges

ROOT = Path(__file__).parents[3]
KEY = "rl.reward.scorers.helpful"
PAIRS = 160


@pytest.fixture(autouse=True)
def in_a_folder(monkeypatch, tmp_path):
    monkeypatch.setattr(transport, "FIRST_PAUSE", 0.01)
    monkeypatch.chdir(tmp_path)


def rows(count: int = PAIRS, *, wrong: int = 10) -> list[dict]:
    """Pairs whose chosen response has a plus more, but for every `wrong`-th; half of the chosen ones are the longer."""
    found = []
    for n in range(count):
        better, worse = f"It is {n} ++.", f"It is {n} +."
        better, worse = (better, worse + " And more words.") if n % 2 else (better + " And more words.", worse)
        chosen, rejected = (worse, better) if n % wrong == 0 else (better, worse)
        messages = [{"role": "user", "content": f"Question {n}?"}]
        found.append({"id": f"id{n}", "source": "chat", "split": "test", "messages": messages, "chosen": chosen, "rejected": rejected})
    return found


def scorer(service: JudgeService, **settings) -> ScorerConfig:
    return ScorerConfig(name="helpful", kind="llm_judge", url=service.url, model="rule", **{"retries": 1, **settings})


def entry(service: JudgeService, tokenizer, pairs: list[dict], *, limits: dict | None = None, **settings) -> dict:
    own = {"min_accuracy": 0.55, "min_pairs": 100, "slices": ["source", "length_order"], "min_slice_pairs": 50, "min_slice_accuracy": None}
    config = gate_config(**own, **(limits or {}))
    return judge_judge(KEY, scorer(service, **settings), pairs, {}, tokenizer, config)


def failed(found: dict) -> set[str]:
    return {check["name"] for check in found["checks"] if check["passed"] is False}


@pytest.mark.parametrize("mode", ["pointwise", "pairwise"])
def test_a_good_judge_passes(mode, tokenizer):
    with judging(quality=by_plus) as service:
        found = entry(service, tokenizer, rows(), mode=mode)
        assert len(service.requests) == 4 * PAIRS and set(service.asked.values()) == {1}
    # 144 of 160 right, one pair a prompt. Wilson's interval: with z^2 / n = 3.84146 / 160 = 0.0240091 the centre is
    # (0.9 + 0.0120046) / 1.0240091 = 0.890622, the half 1.959964 sqrt(0.09 / 160 + 0.0000375) / 1.0240091 = 0.046884
    assert found["accuracy"] == 0.9 and (round(found["low"], 4), round(found["high"], 4)) == (0.8437, 0.9375)
    assert found["passed"] and failed(found) == set() and found["message"].startswith("passed: accuracy 0.9000 on 160 pairs of 160 prompts")
    assert found["consistency"]["value"] == 1.0 and found["without_verdict"]["value"] == 0.0
    assert found["tokens"] == 4 * PAIRS * 110 and found["look"]["number"] == 1
    assert {s["column"] for s in found["slices"]} == {"source", "length_order"} and found["worst_slice"]["column"] == "length_order"
    assert (found["position"] is None) == (mode == "pointwise")
    if mode == "pairwise":
        assert found["position"]["value"] == 0.0 and found["position"]["flipped"] == 0.0


def test_a_judge_of_positions_fails_by_its_accuracy_and_its_bias(tokenizer):
    with judging(favours="1") as service:
        found = entry(service, tokenizer, rows(), mode="pairwise")
    assert not found["passed"] and failed(found) == {"accuracy", "position_bias"}
    assert found["accuracy"] == 0.5 and found["ties"] == PAIRS
    assert found["position"]["value"] == 0.5 and found["position"]["flipped"] == 1.0
    assert "rejected: position_bias: expected 0.2 to be met by the whole interval, got 0.5" in found["message"]


def test_a_judge_of_lengths_fails_by_its_bias_though_its_accuracy_passes(tokenizer):
    pairs = [row for n, row in enumerate(rows(320)) if n % 2 == 0 or n % 8 == 1]  # mostly with a longer chosen response
    with judging(quality=by_length) as service:
        found = entry(service, tokenizer, pairs)
    assert not found["passed"] and failed(found) == {"length_bias"} and found["low"] > 0.55
    assert found["length"]["bias"]["value"] == found["length"]["longer"]["accuracy"] - found["length"]["shorter"]["accuracy"] == 1.0


def test_a_random_judge_fails_by_its_accuracy(tokenizer):
    with judging(quality=at_random) as service:
        found = entry(service, tokenizer, rows())
    assert not found["passed"] and failed(found) == {"accuracy"} and 0.4 < found["accuracy"] < 0.6


def test_a_judge_that_changes_its_mind_fails_by_its_consistency(tokenizer):
    async def by_seed(service: JudgeService, request: web.Request, tree: Tree) -> web.StreamResponse | None:
        if tree["seed"] == 0:
            return None
        return web.json_response(service.completion(json.dumps({"score": 10 - service.verdict(tree)["score"]})))

    with judging(misbehave=by_seed) as service:
        found = entry(service, tokenizer, rows())
    assert not found["passed"] and failed(found) == {"consistency"} and found["consistency"]["value"] == 0.0


def test_a_judge_without_verdicts_fails(tokenizer):
    async def every_tenth(service: JudgeService, request: web.Request, tree: Tree) -> web.StreamResponse | None:
        text = "I like both." if len(service.requests) % 10 == 0 else None
        return None if text is None else web.json_response(service.completion(text))

    with judging(misbehave=every_tenth) as service:
        found = entry(service, tokenizer, rows(), concurrency=1)
        assert failed(found) == {"without_verdict"} and found["n"] < found["asked"] == PAIRS
        assert found["without_verdict"]["value"] == pytest.approx(0.1)
    with judging(says="No.") as service:
        found = entry(service, tokenizer, rows())
    assert failed(found) == {"pairs", "without_verdict"} and found["accuracy"] is None and found["n"] == 0
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_the_number_of_pairs_is_bounded_and_others_stay_when_data_is_added(tokenizer):
    limits = {"llm_judge": gate_config().llm_judge.model_copy(update={"pairs": 100})}
    with judging() as service:
        assert entry(service, tokenizer, rows(), limits=limits)["asked"] == 100 and len(service.requests) == 400
        assert entry(service, tokenizer, rows(PAIRS + 4), limits=limits)["asked"] == 100
        assert len(service.requests) < 400 + 4 * 4 * 2, "only about the new ones"


def test_a_service_that_fails_gives_no_verdict_and_is_asked_only_for_the_rest(tokenizer):
    async def breaks(service: JudgeService, request: web.Request, tree: Tree) -> web.StreamResponse | None:
        return web.Response(status=404) if service.asked.total() >= 200 else None

    with judging(misbehave=breaks) as service:
        with pytest.raises(JudgeUnavailable, match="to 640 questions about held-out pairs, got none to"):
            entry(service, tokenizer, rows(), concurrency=1)
        service.misbehave = None
        assert entry(service, tokenizer, rows())["passed"]
        assert service.asked.total() == 640 and set(service.asked.values()) == {1}


def test_the_gate_keeps_to_the_budget(tokenizer):
    with judging() as service, pytest.raises(BudgetSpent, match="budget_tokens=1100"):
        entry(service, tokenizer, rows(), budget_tokens=1100)


def test_each_other_judge_is_a_further_look_at_the_pairs(tokenizer):
    with judging() as service:
        first = entry(service, tokenizer, rows())
        again = entry(service, tokenizer, rows())
        other = entry(service, tokenizer, rows(), scale=[0, 20])
    assert (first["look"]["number"], again["look"]["number"], other["look"]["number"]) == (1, 1, 2)
    assert other["confidence"] > first["confidence"] and other["look"]["earlier"][0]["passed"] is True
    assert len(LEDGER.path(Path()).read_text().splitlines()) == 4, "two looks and their results"


def test_a_rubric_of_the_rows_cant_be_judged(tokenizer):
    with judging() as service:
        found = entry(service, tokenizer, rows(), mode="rubric")
        assert not service.requests
    assert not found["passed"] and "expected criteria in the params" in found["message"]


def test_a_policy_is_trained_on_a_judge_that_passed_only():
    scorers = [ScorerConfig(name="helpful", kind="llm_judge", url="http://a/v1", model="m"), ScorerConfig(name="n", kind="number")]
    gate = {"override": None, "llm_judges": [{"key": KEY, "passed": True, "message": "passed: all."}]}
    assert check_gate_of_judges(gate, "rl.reward.scorers", scorers) is None
    rejected = gate | {"llm_judges": [{"key": KEY, "passed": False, "message": "rejected: accuracy."}]}
    with pytest.raises(StageRefused, match=r"judge rl\.reward\.scorers\.helpful: expected one that passed the gate"):
        check_gate_of_judges(rejected, "rl.reward.scorers", scorers)
    assert check_gate_of_judges(rejected | {"override": "a try"}, "rl.reward.scorers", scorers) == "a try"
    with pytest.raises(StageRefused, match="expected the gate's verdict"):
        check_gate_of_judges(gate | {"llm_judges": []}, "rl.reward.scorers", scorers)
    measured_only = [scorers[0].model_copy(update={"weight": 0.0})]
    assert check_gate_of_judges(gate | {"llm_judges": []}, "rl.reward.scorers", measured_only) is None


@pytest.mark.parametrize(("favours", "override"), [(None, None), ("1", None), ("1", "a try")])
def test_the_stage_without_a_reward_model(tmp_path, tokenizer, favours, override):
    for file in (CLERK_PARAMS, ROOT / "dvc.yaml"):
        shutil.copy(file, tmp_path)
    for folder in ("tasks", "rlhf_core", "rewards"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    (tmp_path / "models/reward").mkdir(parents=True)
    (tmp_path / "data").mkdir()
    (tmp_path / "data/reward_heldout.parquet").touch()
    tokenizer.save_pretrained(tmp_path / "models/tokenizer")
    write_rows(tmp_path / "data/prepared", "preference", rows())
    with judging(favours=favours) as service:
        judge = {"name": "helpful", "kind": "llm_judge", "url": service.url, "model": "rule", "mode": "pairwise"}
        changes = {"reward.enabled": False, "rl.algorithm": "grpo", "rl.ppo.critic_init": "sft", "rl.reward.scorers": [judge]}
        apply_overrides(
            tmp_path / "params.yaml",
            changes | {"gate.min_accuracy": 0.55, "gate.min_pairs": 100, "gate.override": override, "evaluation.scorers": []},
        )
        assert ("preference", "test") in rows_needed(load_params(tmp_path / "params.yaml"))
        done = warm_python.run([sys.executable, "-m", "tasks.gate_reward"], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)})
    gate = json.loads((tmp_path / "metrics/gate.json").read_text())
    (found,) = gate["llm_judges"]
    assert found["passed"] == (favours is None) and gate["override"] == override and not gate["needed"]
    assert (done.returncode == 0) == (favours is None or override is not None), done.stdout + done.stderr
    if favours and override is None:
        assert (
            "judge rl.reward.scorers.helpful: rejected: expected the lower end of the interval to reach gate.min_accuracy=0.55"
            in done.stdout + done.stderr
        )
