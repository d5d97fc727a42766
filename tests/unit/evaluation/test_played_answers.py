"""Evaluation by episodes: the real PyTorch engine plays them, scorers see the last reply, the KL leaves out what was put in."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest
import torch
from tiny_models import tiny_params

from rlhf_core.agents.environment import Environment
from rlhf_core.config import EnvironmentConfig, ScorerConfig
from rlhf_core.evaluation.answers import EvaluatedModel, response_logprobs, sample_answers, score_answers
from rlhf_core.evaluation.figures import summarize
from rlhf_core.evaluation.policy import sample_table
from rlhf_core.models.build import load_language_model
from rlhf_core.models.forward import PolicyModule
from rlhf_core.models.tokenizer import encode_prompt, write_ends
from rlhf_core.sampling.responses import last_reply
from rlhf_core.sampling.scoring import LocalScorers, ResponseScorer
from rlhf_core.types import Prompt

WORDS = ["one", "two", "three", "four"]


async def talk(task, policy):
    """Two turns; the fourth task fails, the third has no score."""
    chat = policy.chat(task.messages)
    if (await chat.generate()).finished:
        chat.user(f"And {task.label}?")
        await chat.generate()
    if task.label == "four":
        raise LookupError("no such task")
    return None if task.label == "three" else 0.5


@pytest.fixture(scope="module")
def answers(sft_folder: Path, reward_folder: Path, tokenizer, tmp_path_factory):
    params = tiny_params()
    folder = tmp_path_factory.mktemp("model") / "sft"
    shutil.copytree(sft_folder, folder)
    write_ends(folder, [tokenizer.eos_token_id, *range(5, 60)])  # a random model hardly ever writes one alone
    messages = [[{"role": "user", "content": f"Sort 4{n}."}] for n in range(4)]
    prompts = [Prompt(str(n), "s", m, encode_prompt(tokenizer, m), WORDS[n]) for n, m in enumerate(messages)]
    models = {name: EvaluatedModel(folder, tokenizer, prompts) for name in ("sft", "policy")}
    config = tiny_params(**{"evaluation.prompts": 4, "evaluation.max_new_tokens": 48}).evaluation
    settings = EnvironmentConfig(path=f"{__file__}:talk")
    how = {"stops": models["sft"].stops, "max_length": params.model.max_length, "deadline": 60.0, "takes_scores": True}
    samples = sample_answers(
        models,
        config,
        backend="pytorch",
        model=params.model,
        max_concurrent_sequences=8,
        threads=1,
        seed=0,
        seeds=[3, 4, 5, 6],
        environments={name: Environment(settings, tokenizer, **how) for name in models},
    )
    kinds = [ScorerConfig(name=kind, kind=kind) for kind in ("environment", "reward_model")]
    scorers = LocalScorers(kinds, reward_model=reward_folder, source_judges={}, model=params.model)
    alone = ResponseScorer(scorers, tokenizer, stops=models["sft"].stops)
    return score_answers(models, samples, scorers, {}), alone, prompts


def test_both_models_play_and_scorers_see_the_last_reply(answers):
    scored, alone, prompts = answers
    for mode in ("greedy", "sampled"):
        assert [a.components["environment"] for a in scored[mode]["policy"]] == pytest.approx([0.5, 0.5, math.nan, math.nan], nan_ok=True)
        for sft, policy in zip(scored[mode]["sft"], scored[mode]["policy"], strict=True):
            assert sft.response_ids == policy.response_ids and sft.text == policy.text, "the same model"
    assert summarize(scored["sampled"]["sft"], confidence=0.95)["scores"]["environment"]["n"] == 2
    for answer, prompt in zip(scored["sampled"]["sft"][:3], prompts, strict=False):
        assert answer.dialogue.turns == 2 or not answer.finished
        last = last_reply(answer)
        assert answer.response_ids[answer.dialogue.start :] == last.response_ids
        assert [*last.prompt.prompt_ids, *last.response_ids] == [*answer.prompt.prompt_ids, *answer.response_ids]
        if answer.dialogue.turns == 2:
            assert last.prompt.messages[0] == prompt.messages[0] and last.prompt.messages[2]["content"] == f"And {prompt.label}?"
        reward = alone.collect(alone.submit([last]))["reward_model"]
        assert float(reward) == pytest.approx(answer.components["reward_model"], abs=1e-5)
    assert math.isnan(scored["sampled"]["sft"][3].components["reward_model"]), "of a failed episode nothing is scored"


def test_lengths_and_the_kl_leave_out_what_was_put_in(answers, sft_folder: Path):
    found = [a for a in answers[0]["sampled"]["sft"] if a.dialogue.turns == 2]
    assert found
    model = load_language_model(sft_folder)
    sums = response_logprobs(PolicyModule(model), found, pad_id=0, temperature=1.0)
    for answer, total in zip(found, sums.tolist(), strict=True):
        assert answer.num_sampled < len(answer.response_ids) == len(answer.dialogue.sampled)
        prompt, response = answer.prompt.prompt_ids, answer.response_ids
        with torch.no_grad():
            logprobs = model(input_ids=torch.tensor([prompt + response])).logits[0].log_softmax(-1)
        of_each = logprobs[range(len(prompt) - 1, len(prompt + response) - 1), response]
        assert total == pytest.approx(sum(x for x, s in zip(of_each.tolist(), answer.dialogue.sampled, strict=True) if s), abs=1e-4)


def test_the_table_of_samples_shows_whole_conversations(answers):
    rows = sample_table(answers[0], 4, Path())  # without pictures
    shown = [row["policy_response"] for row in rows if row["mode"] == "sampled"]
    assert any(text.startswith("assistant: ") and "\nuser: And one?\nassistant: " in text for text in shown)
    assert [row["prompt"] for row in rows[:4]] == [f"user: Sort 4{n}." for n in range(4)]
