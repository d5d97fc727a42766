"""Choosing prompts and scoring responses, on two tiny models."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_models import tiny_params

from rlhf_core.config import ScorerConfig
from rlhf_core.engines.rollout.requests import Sample
from rlhf_core.models.build import load_scalar_model
from rlhf_core.models.tokenizer import CHAT_TEMPLATE, encode_conversation, encode_prompt
from rlhf_core.sampling.prompts import choose_prompts
from rlhf_core.sampling.scoring import LocalScorers, ResponseScorer
from rlhf_core.trainers.sft.conditional import asking_tokenizer, with_quality
from rlhf_core.types import Prompt

ROWS = [
    {"id": str(n), "source": "mine", "messages": [{"role": "user", "content": "Sort 4" + "1" * n}], "label": None} for n in range(8)
]  # fmt: skip
PROMPT = Prompt("id", "mine", [{"role": "user", "content": "2 + 2?"}], [5, 6], None)


def test_prompts_come_in_a_seeded_order_without_those_that_are_too_long(tokenizer, caplog):
    longest = len(encode_prompt(tokenizer, ROWS[5]["messages"]))  # each has one digit more than the one before
    every = choose_prompts(ROWS, tokenizer, longest=longest, count=None, seed=3)
    assert sorted(p.id for p in every) == ["0", "1", "2", "3", "4", "5"] != [p.id for p in every]
    assert f"prompts: 2 of 8 have more than {longest} tokens" in caplog.text
    assert choose_prompts(ROWS, tokenizer, longest=longest, count=4, seed=3) == every[:4]
    assert choose_prompts(ROWS, tokenizer, longest=longest, count=None, seed=4) != every
    with pytest.raises(ValueError, match=r"prompts: expected some of at most 2 tokens, got none of 8; raise model\.max_length"):
        choose_prompts(ROWS, tokenizer, longest=2, count=None, seed=3)


def scorer(kind: str, weight: float, **options) -> ScorerConfig:
    return ScorerConfig(name=kind, kind=kind, weight=weight, normalization="none", **options)


def local_scorers(reward_folder: Path, *scorers: ScorerConfig) -> LocalScorers:
    return LocalScorers(list(scorers), reward_model=reward_folder, source_judges={}, model=tiny_params().model)


def samples_of(tokenizer, *texts: str, finished: bool = True) -> list[Sample]:
    end = [tokenizer.eos_token_id] * finished
    return [Sample(tokenizer(text, add_special_tokens=False)["input_ids"] + end, [], finished) for text in texts]


def reward(folder: Path, ids: list[int]) -> float:
    with torch.no_grad():
        return float(load_scalar_model(folder).eval()(input_ids=torch.tensor([ids])).logits[0, 0])


def test_scores_are_raw_weighted_sums_and_responses_stay_with_their_prompts(reward_folder: Path, tokenizer):
    prompts = choose_prompts(ROWS[:2], tokenizer, longest=60, count=None, seed=0)
    samples = [samples_of(tokenizer, "14", "I can't"), samples_of(tokenizer, "411")]
    scorers = local_scorers(
        reward_folder, scorer("reward_model", 2.0), scorer("regex", -0.5, pattern="4"), scorer("length", 0.0, target_length=3)
    )
    groups = ResponseScorer(scorers, tokenizer).score_groups(prompts, samples)
    assert [[r.text for r in group] for group in groups] == [["14", "I can't"], ["411"]]
    for prompt, group, drawn in zip(prompts, groups, samples, strict=True):
        for response, sample in zip(group, drawn, strict=True):
            raw = reward(reward_folder, [*prompt.prompt_ids, *sample.response_ids])
            assert response.prompt is prompt and response.response_ids == sample.response_ids
            assert response.components["reward_model"] == pytest.approx(raw, abs=1e-5)
            assert response.components["regex"] == float("4" in response.text)
            assert response.score == pytest.approx(2.0 * raw - 0.5 * response.components["regex"], abs=1e-5)
    assert groups[0][0].components["length"] == 0.0  # 3 tokens: two digits and the end


def test_what_cannot_be_scored_is_nan_and_so_is_the_sum_it_counts_in(reward_folder: Path, tokenizer):
    prompts, samples = [PROMPT], [samples_of(tokenizer, "4")]
    by_number = local_scorers(reward_folder, scorer("number", 1.0), scorer("regex", 1.0, pattern="4"))
    ((counts,),) = ResponseScorer(by_number, tokenizer).score_groups(prompts, samples)
    assert math.isnan(counts.components["number"]) and math.isnan(counts.score) and counts.components["regex"] == 1.0
    without_weight = local_scorers(reward_folder, scorer("number", 0.0), scorer("regex", 1.0, pattern="4"))
    ((measured,),) = ResponseScorer(without_weight, tokenizer).score_groups(prompts, samples)
    assert math.isnan(measured.components["number"]) and measured.score == 1.0


def test_a_program_is_scored_by_the_tests_in_its_prompts_label(reward_folder: Path, tokenizer):
    """As evaluation and rejection sampling score: a right program, a wrong one, one that was cut off, and a prompt without tests."""
    tested = replace(PROMPT, label="assert f(2) == 4\nassert f(3) == 9")
    programs = [f"```python\ndef f(x):\n    return {value}\n```" for value in ("x * x", "4")]
    scorers = local_scorers(reward_folder, scorer("code", 1.0))
    samples = [
        samples_of(tokenizer, *programs) + samples_of(tokenizer, programs[0][:-3], finished=False),
        samples_of(tokenizer, programs[0]),
    ]
    scored = ResponseScorer(scorers, tokenizer).score_groups([tested, PROMPT], samples)
    assert [response.score for response in scored[0]] == [1.0, 0.5, 0.0] and math.isnan(scored[1][0].score)


def test_a_reward_model_sees_no_quality_that_the_policys_template_asks_for(reward_folder: Path, tokenizer):
    asking = asking_tokenizer(tokenizer, levels=2, wanted=1)
    (prompt,) = choose_prompts(ROWS[:1], asking, longest=60, count=None, seed=0)
    assert prompt.prompt_ids == encode_prompt(tokenizer, with_quality(prompt.messages, 1)) and tokenizer.chat_template == CHAT_TEMPLATE
    scorers = local_scorers(reward_folder, scorer("reward_model", 1.0))
    ((response,),) = ResponseScorer(scorers, asking).score_groups([prompt], [samples_of(asking, "14")])
    assert response.score == pytest.approx(reward(reward_folder, encode_conversation(tokenizer, prompt.messages, "14")[0]), abs=1e-5)
