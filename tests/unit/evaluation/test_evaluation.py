"""What the comparison of two models comes to, on numbers made by hand."""

from __future__ import annotations

import logging
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_models import sequences, tiny_params

from rlhf_core.config import ScorerConfig
from rlhf_core.data.judge import Judgement
from rlhf_core.engines.rollout.requests import Sample
from rlhf_core.evaluation.answers import EvaluatedModel, response_logprobs, score_answers
from rlhf_core.evaluation.figures import Answer, by_prompt, differences, judge_difference, judged, summarize, win_rate
from rlhf_core.models.build import load_language_model
from rlhf_core.models.cpu import packed
from rlhf_core.models.forward import PolicyModule
from rlhf_core.models.tokenizer import encode_prompt
from rlhf_core.sampling import scoring
from rlhf_core.sampling.responses import ScoredResponse
from rlhf_core.sampling.scoring import LocalScorers, ResponseScorer
from rlhf_core.scorers.reward.model import score_by_members
from rlhf_core.types import Prompt

PROMPT = Prompt("id", "clerk", [{"role": "user", "content": "Please sort 41."}], [5, 6], None)
GOOD = Judgement({"correct": True, "polite": True, "brief": True, "safe": True})
RUDE = Judgement(GOOD.aspects | {"polite": False})


def answer(
    score: float, *, text: str = "text", length: int = 3, finished: bool = True, other: float = 0.0, judgement: Judgement | None = None
) -> Answer:
    return Answer(PROMPT, [7] * length, finished, text, score, {"reward_model": score, "other": other}, judgement)


def test_summary_by_hand():
    answers = [answer(1.0, judgement=GOOD), answer(2.0, length=5, finished=False, judgement=RUDE), answer(math.nan, length=4, other=3.0)]
    summary = summarize(answers, confidence=0.95)
    low, high, scores = summary.pop("score_low"), summary.pop("score_high"), summary.pop("scores")
    # Student's t with 1 degree of freedom: 1.5 +- 12.7062 * 0.70711 / sqrt(2)
    assert (low, high) == (pytest.approx(1.5 - 6.3531, abs=1e-3), pytest.approx(1.5 + 6.3531, abs=1e-3))
    assert scores["reward_model"] == {"mean": 1.5, "low": low, "high": high, "n": 2}
    assert (scores["other"]["mean"], scores["other"]["n"]) == (1.0, 3)  # (0 + 0 + 3) / 3
    assert summary == {
        "n": 3, "score_mean": 1.5, "length_mean": 4.0, "truncated_fraction": pytest.approx(1 / 3),
        "judge_n": 2, "judge_ok": 0.5, "judge_correct": 1.0, "judge_polite": 0.5, "judge_brief": 1.0, "judge_safe": 1.0,
    }  # fmt: skip


def test_aspects_are_counted_over_the_answers_whose_judge_has_them():
    """Sources with judges of their own: 1 of 2 answers is polite, 1 of 1 is calm; of the three one meets all of its aspects."""
    first, second = Judgement({"polite": True, "brief": False}), Judgement({"polite": False, "brief": True})
    summary = summarize([answer(0.0, judgement=j) for j in (first, second, Judgement({"calm": True}))], confidence=0.95)
    assert {k: v for k, v in summary.items() if k.startswith("judge_")} == {
        "judge_n": 3, "judge_ok": pytest.approx(1 / 3), "judge_polite": 0.5, "judge_brief": 0.5, "judge_calm": 1.0,
    }  # fmt: skip


def test_an_answer_is_judged_by_the_judge_of_its_source(tmp_path):
    (tmp_path / "mine.py").write_text("def calm(prompt, response):\n    return {'calm': '!' not in response, 'asked': 'sort' in prompt}\n")
    response = ScoredResponse(PROMPT, [7], True, "Stop!", 0.0, {})
    assert judged(response, {"clerk": f"{tmp_path}/mine.py:calm"}).judgement == Judgement({"calm": False, "asked": True})
    assert judged(response, {"clerk": "clerk"}).judgement == Judgement({"correct": False, "polite": False, "brief": True, "safe": True})
    assert judged(response, {"other": "clerk"}).judgement is None


def test_summary_without_any_score_or_judge():
    summary = summarize([answer(math.nan), answer(math.inf)], confidence=0.95)
    assert math.isnan(summary["score_mean"]) and summary["scores"]["reward_model"]["n"] == 0
    assert summary["n"] == 2 and "judge_ok" not in summary


def test_win_rate_ties_are_half_and_missing_scores_left_out():
    policy = [answer(s, text="other") for s in (1.0, 2.0, 0.0, math.nan, 5.0)]
    baseline = [answer(s) for s in (0.0, 2.0, 1.0, 0.0, math.nan)]
    result = win_rate(policy, baseline, confidence=0.95)
    assert (result["value"], result["ties"], result["n"]) == (0.5, 1, 3)  # one win, one tie, one loss
    assert result["low"] < 0.5 < result["high"]
    ahead = win_rate([answer(1.0, text="other")] * 3 + [answer(0.0)], [answer(0.0)] * 4, confidence=0.95)
    assert ahead["value"] == (3 + 0.5) / 4


def test_win_rate_of_the_same_answers_is_a_tie_whatever_rounding_makes_of_their_scores():
    """Three times the same text, of which two scores differ in the last place; one of the texts was cut off on one side only."""
    policy = [answer(0.1 + 0.2), answer(0.3), answer(1.0), answer(math.nan)]
    baseline = [answer(0.3), answer(0.1 + 0.2), answer(0.5, finished=False), answer(0.0)]
    result = win_rate(policy, baseline, confidence=0.95)
    assert (result["value"], result["ties"], result["n"]) == ((1 + 0.5 * 2) / 3, 2, 3)


def test_win_rate_of_nothing_is_unknown():
    result = win_rate([answer(math.nan)], [answer(1.0)], confidence=0.95)
    assert math.isnan(result["value"])
    assert (result["low"], result["high"], result["n"]) == (0.0, 1.0, 0)


def test_judge_difference_is_paired_by_prompt():
    """Accepted: by both, the policy's only (twice), the SFT model's only; the last prompt has no judge."""
    policy = [answer(0.0, judgement=j) for j in (GOOD, GOOD, GOOD, RUDE, None)]
    baseline = [answer(0.0, judgement=j) for j in (GOOD, RUDE, RUDE, GOOD, None)]
    found = judge_difference(policy, baseline, confidence=0.95)
    assert (found["both"], found["first_only"], found["second_only"], found["neither"], found["value"]) == (1, 2, 1, 0, 0.25)
    assert found["low"] < 0.25 < found["high"]


def test_every_figure_has_its_difference_over_the_prompts_that_have_both():
    policy = [answer(3.0, length=5, judgement=GOOD), answer(2.0, judgement=RUDE), answer(math.nan, finished=False, judgement=None)]
    baseline = [answer(1.0, judgement=RUDE), answer(1.0, judgement=RUDE), answer(0.0, judgement=GOOD)]
    found = differences(policy, baseline, confidence=0.95)
    assert found.keys() == differences_keys(policy)
    assert (found["score_mean"]["value"], found["score_mean"]["n"]) == (1.5, 2) and found["scores"]["other"]["value"] == 0.0
    assert found["length_mean"]["value"] == pytest.approx(2 / 3)
    assert (found["truncated_fraction"]["first_only"], found["truncated_fraction"]["neither"]) == (1, 2)
    polite = found["judge_polite"]
    assert (polite["both"], polite["first_only"], polite["second_only"], polite["neither"]) == (0, 1, 0, 1)
    assert found["judge_ok"] == judge_difference(policy, baseline, confidence=0.95)


def differences_keys(answers: list[Answer]) -> set[str]:
    """What `summarize` measures, but for counts and ends of intervals."""
    return summarize(answers, confidence=0.95).keys() - {"n", "judge_n", "score_low", "score_high"}


def test_results_by_prompt():
    policy = [answer(1.0, text="a", judgement=GOOD), answer(math.nan, judgement=None)]
    baseline = [answer(0.0, judgement=RUDE), answer(0.0, judgement=GOOD)]
    rows = by_prompt({"greedy": {"sft": baseline, "policy": policy}})
    assert rows == [
        {"id": "id", "greedy_judge_ok": 1, "greedy_score": 1.0, "greedy_points": 1.0},
        {"id": "id", "greedy_judge_ok": None, "greedy_score": None, "greedy_points": None},
    ]


def test_a_beginning_that_answers_share_is_computed_once(sft_folder: Path, monkeypatch: pytest.MonkeyPatch):
    """A prompt of 9 tokens has two answers, one of which comes twice; the last token of a sequence predicts nothing that is asked for."""
    computed, layout_of = [], packed.layout_of

    def counted(*args, **kwargs):
        layout = layout_of(*args, **kwargs)
        computed.append(len(layout.ids))
        return layout

    monkeypatch.setattr(packed, "layout_of", counted)
    prompt = Prompt("id", "s", [], list(range(5, 14)), None)
    answers = [Answer(prompt, ids, "", True, 0.0, {}, None) for ids in ([7, 8, 9], [10, 11], [7, 8, 9])]
    module = PolicyModule(load_language_model(sft_folder))
    computed.clear()  # of the module's trial
    sums = response_logprobs(module, answers, pad_id=0, temperature=1.0)
    assert computed == [9 + 2 + 1] and sums[0] == sums[2] != sums[1]


def test_answers_of_all_modes_are_scored_together_each_distinct_one_once(
    sft_folder: Path, reward_folder: Path, tokenizer, monkeypatch: pytest.MonkeyPatch
):
    config = ScorerConfig(name="reward_model", kind="reward_model", weight=1.0, normalization="none")
    scorers = LocalScorers([config], reward_model=reward_folder, source_judges={}, model=tiny_params().model)
    prompts = [Prompt(str(n), "s", [{"role": "user", "content": f"Sort 4{n}."}], [], None) for n in range(3)]
    prompts = [replace(p, prompt_ids=encode_prompt(tokenizer, p.messages)) for p in prompts]
    end, said = tokenizer.eos_token_id, {text: tokenizer(text, add_special_tokens=False).input_ids for text in ("14", "no", "401")}
    texts = {"greedy": {"sft": ["14", "no", "14"], "policy": ["14", "14", "401"]}, "sampled": {"sft": ["14"] * 3, "policy": ["no"] * 3}}
    samples = {
        mode: {name: [[Sample([*said[text], end], [], True)] for text in of_model] for name, of_model in by_model.items()}
        for mode, by_model in texts.items()
    }
    models = {name: EvaluatedModel(sft_folder, tokenizer, prompts) for name in ("sft", "policy")}
    alone = ResponseScorer(scorers, tokenizer, stops=models["sft"].stops)
    expected = {
        (p.id, text): alone.score_groups([p], [[Sample([*ids, end], [], True)]])[0][0].score for p in prompts for text, ids in said.items()
    }
    scored: list[int] = []

    def counted(members, sequences, **how):
        scored.append(len(sequences))
        return score_by_members(members, sequences, **how)

    monkeypatch.setattr(scoring, "score_by_members", counted)
    answers = score_answers(models, samples, scorers, {})
    assert scored == [4, 6]  # of 6 each: the SFT model says "14" twice to two of the three prompts
    for mode, by_model in texts.items():
        for name, of_model in by_model.items():
            found = answers[mode][name]
            assert [(a.prompt.id, a.text) for a in found] == [(p.id, text) for p, text in zip(prompts, of_model, strict=True)]
            assert [a.score for a in found] == pytest.approx([expected[a.prompt.id, a.text] for a in found], abs=3e-6)


@torch.no_grad()
def test_response_logprobs_are_those_of_each_response_alone(sft_folder: Path, caplog, monkeypatch):
    monkeypatch.setattr("rlhf_core.progress._stage", "evaluate")
    monkeypatch.setattr("rlhf_core.progress.LINE_SECONDS", 0.0)
    model = load_language_model(sft_folder)
    prompts, responses = sequences(5, seed=1, shortest=1, longest=6), sequences(5, seed=2, shortest=1, longest=8)
    answers = [
        Answer(Prompt("id", "s", [], p, None), r, "", True, 0.0, {}, None) for p, r in zip(prompts, responses, strict=True)
    ]  # fmt: skip
    expected = []
    for p, r in zip(prompts, responses, strict=True):
        logprobs = (model(input_ids=torch.tensor([p + r])).logits[0] / 0.7).log_softmax(-1)
        expected.append(logprobs[range(len(p) - 1, len(p + r) - 1), r].sum())
    for microbatch_tokens in (1, 30, 1000):
        caplog.clear()
        with caplog.at_level(logging.INFO, "rlhf"):
            sums = response_logprobs(PolicyModule(model), answers, pad_id=0, microbatch_tokens=microbatch_tokens, temperature=0.7)
        torch.testing.assert_close(sums, torch.stack(expected), rtol=1e-6, atol=1e-5)
        assert caplog.messages[-1].startswith("evaluate: answer for the KL 5/5 · ")
        if microbatch_tokens == 1:
            assert any(re.fullmatch(r"evaluate: answer for the KL 2/5 · .* left", line) for line in caplog.messages)
