"""Scores of steps of sampled responses: the same numbers and tokens as in training, and one score for the response."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from tiny_models import tiny_params

from rlhf_core.config import ScorerConfig
from rlhf_core.models.build import load_scalar_model
from rlhf_core.models.tokenizer import encode_prompt
from rlhf_core.sampling.responses import SampledResponse
from rlhf_core.sampling.scoring import LocalScorers, ResponseScorer
from rlhf_core.scorers.needs import check_scorers
from rlhf_core.scorers.reward.loaded import LoadedModel
from rlhf_core.trainers.reward.steps import begin_solutions
from rlhf_core.types import Dialogue, Prompt

MESSAGES = [{"role": "user", "content": "Please sort 4172."}]


@pytest.fixture
def process_folder(reward_folder: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "process"
    shutil.copytree(reward_folder, folder)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"step_separator": "\n"}))
    return folder


def response(tokenizer, text: str, *, finished: bool = True, dialogue: Dialogue | None = None) -> SampledResponse:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id] * finished
    return SampledResponse(Prompt("id", "mine", MESSAGES, encode_prompt(tokenizer, MESSAGES), None), ids, finished, dialogue=dialogue)


def scored(folder: Path, tokenizer, *responses: SampledResponse, **options):
    config = ScorerConfig(name="prm", kind="reward_model", **options)
    scorer = ResponseScorer(LocalScorers([config], reward_model=folder, source_judges={}, model=tiny_params().model), tokenizer)
    steps = {}
    components = scorer.collect(scorer.submit(responses), steps=steps)
    return components["prm"].tolist(), steps["prm"]


def probability(folder: Path, ids: list[int]) -> float:
    with torch.no_grad():
        return float(load_scalar_model(folder).eval()(input_ids=torch.tensor([ids])).logits[0, 0].sigmoid())


def test_each_step_has_the_score_of_the_prefix_that_ends_with_it(process_folder, tokenizer):
    one, two = response(tokenizer, "1247.\nSorry\n309"), response(tokenizer, "give", finished=False)
    scores, steps = scored(process_folder, tokenizer, one, two)
    newlines = [i for i, token in enumerate(one.response_ids) if tokenizer.decode([token]).endswith("\n")]
    assert steps.ends == [[*newlines, len(one.response_ids) - 1], [len(two.response_ids) - 1]] and len(newlines) == 2
    for r, ends, found in zip((one, two), steps.ends, steps.probabilities, strict=True):
        expected = [probability(process_folder, [*r.prompt.prompt_ids, *r.response_ids[: end + 1]]) for end in ends]
        assert found == pytest.approx(expected, abs=1e-5)
    assert scores == pytest.approx([min(steps.probabilities[0]), steps.probabilities[1][0]])


@pytest.mark.parametrize(("aggregate", "whole"), [("sum", sum), ("last", lambda p: p[-1]), ("min", min)])
def test_the_score_is_what_the_scorer_makes_of_its_steps(process_folder, tokenizer, aggregate, whole):
    scores, steps = scored(process_folder, tokenizer, response(tokenizer, "1247.\nSorry"), steps=aggregate)
    assert scores == pytest.approx([whole(steps.probabilities[0])])
    assert sum(steps.rewards[0]) == pytest.approx(scores[0] - (aggregate == "min"))


def test_training_and_scoring_read_the_same_tokens(process_folder, tokenizer):
    row = {"id": "0", "messages": MESSAGES, "response": "1247.\nSorry\n309", "labels": [1, 1, -1]}
    [[solution], _] = begin_solutions([row], tokenizer, "\n", max_length=64)(0)
    sampled = response(tokenizer, row["response"])
    _, steps = scored(process_folder, tokenizer, sampled)
    start = len(sampled.prompt.prompt_ids)
    assert solution.ids == [*sampled.prompt.prompt_ids, *sampled.response_ids]
    assert solution.ends == [start + end for end in steps.ends[0]]
    model = LoadedModel.load(process_folder, max_length=64, trust_remote_code=False)
    [(means, stds)] = model.score_steps([(MESSAGES, row["response"])])
    assert torch.tensor(means).sigmoid().tolist() == pytest.approx(steps.probabilities[0], abs=1e-5) and stds == [0.0] * 3


def test_another_tokenizer_scores_the_same_steps_at_the_policys_own_tokens(process_folder, tokenizer):
    other = LoadedModel.load(process_folder, max_length=64, trust_remote_code=False).tokenizer
    other.chat_template = other.chat_template.replace("'<|assistant|>'", "'<|assistant|>:'").replace("'|>' + message", "'|>:' + message")
    other.save_pretrained(process_folder)
    sampled = response(tokenizer, "1247.\n\nSorry\n309")
    _, steps = scored(process_folder, tokenizer, sampled)
    assert [sampled.response_ids[end] for end in steps.ends[0]][-1] == tokenizer.eos_token_id
    assert [tokenizer.decode([sampled.response_ids[end]])[-1:] for end in steps.ends[0][:-1]] == ["\n", "\n"]
    assert len(steps.probabilities[0]) == 3


def test_a_response_without_room_has_no_score_and_no_steps(process_folder, tokenizer):
    scores, steps = scored(process_folder, tokenizer, response(tokenizer, "1\n" * 60), response(tokenizer, "4"))
    assert scores[0] != scores[0] and scores[1] == scores[1]
    assert steps.ends[0] == [] and steps.rewards[0] == []


def test_steps_of_the_last_reply_are_at_their_tokens_of_the_episode(process_folder, tokenizer):
    ids = tokenizer("Yes.\nNo.", add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
    dialogue = Dialogue(MESSAGES, 1, [True] * (len(ids) + 3), 3, None, [], False, 2, 0, 0)
    whole = SampledResponse(Prompt("id", "mine", MESSAGES, [5, 6], None), [7, 8, 9, *ids], True, dialogue=dialogue)
    _, steps = scored(process_folder, tokenizer, whole)
    assert len(steps.ends[0]) == 2 and steps.ends[0][-1] == len(ids) + 2


def test_an_aggregate_for_a_model_of_whole_responses_is_refused(reward_folder):
    config = ScorerConfig(name="prm", kind="reward_model", steps="sum")
    with pytest.raises(ValueError, match=r"expected a process reward model at .* with steps: sum, got one that scores whole responses"):
        check_scorers([config], reward_model=reward_folder, source_judges={}, has_labels=lambda: False)
