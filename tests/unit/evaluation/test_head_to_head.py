"""A judge of mode head_to_head compares the policy's answer with the SFT model's, in both orders."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from judge_service import judging
from tiny_models import tiny_params

from rlhf_core.config import ConfigError, ScorerConfig
from rlhf_core.engines.rollout.requests import Sample
from rlhf_core.evaluation.answers import EvaluatedModel, score_answers
from rlhf_core.evaluation.figures import win_rate
from rlhf_core.models.tokenizer import encode_prompt
from rlhf_core.sampling.scoring import LocalScorers
from rlhf_core.types import Prompt

TEXTS = {"sft": ["14", "no", "14", "no"], "policy": ["no", "14", "14", "401"]}  # the judge prefers answers with a 1


def ones(text: str, _: list) -> float:
    return float(text.count("1"))


def compared(tokenizer, folder: Path, reward_model: Path, *, favours: str | None = None):
    """The answers of both models, and the service that judged them."""
    prompts = [Prompt(str(n), "s", [{"role": "user", "content": f"Sort 4{n}."}], [], None) for n in range(4)]
    prompts = [replace(p, prompt_ids=encode_prompt(tokenizer, p.messages)) for p in prompts]
    models = {name: EvaluatedModel(folder, tokenizer, prompts) for name in TEXTS}
    ids = {text: [*tokenizer(text, add_special_tokens=False).input_ids, tokenizer.eos_token_id] for text in ("14", "no", "401")}
    samples = {"greedy": {name: [[Sample(ids[text], [], True)] for text in texts] for name, texts in TEXTS.items()}}
    with judging(quality=ones, favours=favours) as service:
        config = ScorerConfig(name="better", kind="llm_judge", mode="head_to_head", url=service.url, model="rule")
        scorers = LocalScorers([config], reward_model=reward_model, source_judges={}, model=tiny_params().model)
        return score_answers(models, samples, scorers, {})["greedy"], service


def test_scores_are_wins_ties_and_losses_and_no_question_is_asked_twice(
    sft_folder: Path, reward_folder: Path, tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    answers, service = compared(tokenizer, sft_folder, reward_folder)
    assert [a.text for a in answers["policy"]] == TEXTS["policy"]
    assert [a.score for a in answers["policy"]] == [0.0, 1.0, 0.5, 1.0]
    assert [a.score for a in answers["sft"]] == [1.0, 0.0, 0.5, 0.0]
    rate = win_rate(answers["policy"], answers["sft"], confidence=0.95)
    assert (rate["value"], rate["wins"], rate["ties"], rate["losses"]) == (0.625, 2, 1, 1)
    assert set(service.asked.values()) == {1} and len(service.requests) == 2 * 3 + 1  # of equal answers both orders are one question


def test_a_judge_of_positions_makes_ties(sft_folder: Path, reward_folder: Path, tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    answers, _ = compared(tokenizer, sft_folder, reward_folder, favours="1")
    assert {a.score for of_model in answers.values() for a in of_model} == {0.5}


def test_it_is_refused_where_one_model_answers():
    scorer = {"name": "better", "kind": "llm_judge", "mode": "head_to_head", "url": "http://127.0.0.1:1/v1", "model": "rule", "weight": 0.0}
    with pytest.raises(ConfigError, match=r"rl\.reward\.scorers: expected mode head_to_head in evaluation\.scorers alone"):
        tiny_params(**{"rl.reward.scorers": [{"name": "brief", "kind": "length", "target_length": 8}, scorer]})
