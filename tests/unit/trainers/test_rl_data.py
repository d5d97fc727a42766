"""Rollouts as tensors, and the prompts of a step."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from tiny_models import rl_job, tiny_params

from rlhf_core.data.schema import write_rows
from rlhf_core.models.tokenizer import encode_prompt
from rlhf_core.trainers.rl import TooManyUnscored, check_scored
from rlhf_core.trainers.rl_data import PromptStream, collate, rollout_batch_metrics, sequences_of
from rlhf_core.types import Prompt, Rollout, ScoredRollout


def scored(prompt_ids: list[int], response_ids: list[int], score: float, *, finished: bool = True, group_id: int = 0) -> ScoredRollout:
    prompt = Prompt("id", "clerk", [], prompt_ids, None)
    return ScoredRollout(Rollout(prompt, response_ids, [-0.1 * i for i in response_ids], finished, group_id, policy_version=4), score)


ROLLOUTS = [scored([11, 12, 13], [1], 0.5), scored([14], [2, 3, 4], math.nan, finished=False, group_id=1), scored([15, 16], [5, 6], 2.5)]
OLD = torch.tensor([-1.0, -2.0, -3.0, -4.0, -5.0, -6.0])


def test_collate_by_hand():
    batch = collate(ROLLOUTS, {"old_logprobs": OLD, "ref_logprobs": OLD - 0.5, "values": OLD * 10}, pad_id=0)
    assert batch.prompt_ids.tolist() == [[11, 12, 13], [0, 0, 14], [0, 15, 16]]
    assert batch.prompt_mask.tolist() == [[True, True, True], [False, False, True], [False, True, True]]
    assert batch.response_ids.tolist() == [[1, 0, 0], [2, 3, 4], [5, 6, 0]]
    assert batch.response_mask.tolist() == [[True, False, False], [True, True, True], [True, True, False]]
    assert batch.old_logprobs.tolist() == [[-1.0, 0.0, 0.0], [-2.0, -3.0, -4.0], [-5.0, -6.0, 0.0]]
    assert batch.ref_logprobs.tolist() == [[-1.5, 0.0, 0.0], [-2.5, -3.5, -4.5], [-5.5, -6.5, 0.0]]
    assert batch.values.tolist() == [[-10.0, 0.0, 0.0], [-20.0, -30.0, -40.0], [-50.0, -60.0, 0.0]]
    torch.testing.assert_close(batch.rollout_logprobs, torch.tensor([[-0.1, 0.0, 0.0], [-0.2, -0.3, -0.4], [-0.5, -0.6, 0.0]]))
    assert batch.finished.tolist() == [True, False, True]
    assert batch.group_ids.tolist() == [0, 1, 0]
    assert batch.policy_versions.tolist() == [4, 4, 4]


def test_without_reference_and_critic_there_is_no_divergence_and_no_value():
    batch = collate(ROLLOUTS, {"old_logprobs": OLD}, pad_id=0)
    assert torch.equal(batch.ref_logprobs, batch.old_logprobs)
    assert not batch.values.any()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_metrics_by_hand_over_what_could_be_scored(bad: float):
    batch = collate(
        [ROLLOUTS[0], scored([14], [2, 3, 4], bad, finished=False), ROLLOUTS[2]], {"old_logprobs": OLD, "ref_logprobs": OLD - 0.5}, 0
    )
    assert rollout_batch_metrics(batch) == pytest.approx(
        {
            "score_mean": 1.5,
            "score_std": 1.0,
            "kl_mean": 0.5 * (1 + 3 + 2) / 3,
            "response_length": 2.0,
            "cut_off_fraction": 1 / 3,
            "unscored_fraction": 1 / 3,
        }
    )


def test_sequences_are_prompt_and_response_with_the_border():
    sequences, starts = sequences_of([s.rollout for s in ROLLOUTS])
    assert sequences == [[11, 12, 13, 1], [14, 2, 3, 4], [15, 16, 5, 6]]
    assert starts == [3, 1, 2]


def prompt_rows(questions: list[str]) -> list[dict]:
    return [
        {"id": f"p{i}", "source": "clerk", "split": "train", "messages": [{"role": "user", "content": q}], "label": None}
        for i, q in enumerate(questions)
    ]


def stream(folder: Path, sft_folder: Path, questions: list[str], **overrides) -> PromptStream:
    write_rows(folder, "prompt", [*prompt_rows(questions), {**prompt_rows(["Held out."])[0], "id": "test", "split": "test"}])
    job = rl_job(sft_folder, sft_folder, **{"rl.samples_per_step": 4, "rl.minibatch_size": 4, "rl.ppo.group_size": 2, **overrides})
    return PromptStream(job.model_copy(update={"prepared": str(folder)}))


def test_a_step_has_samples_over_group_size_prompts_and_each_comes_once_per_pass(tmp_path: Path, sft_folder: Path, tokenizer):
    questions = [f"Please sort {i}." for i in range(6)]
    prompts = stream(tmp_path, sft_folder, questions)
    steps = [prompts.batch(step) for step in range(3)]
    assert [len(s) for s in steps] == [2, 2, 2]
    assert sorted(p.id for s in steps for p in s) == [f"p{i}" for i in range(6)]  # of the train split only
    assert prompts.batch(2) == steps[2]
    assert len(prompts.batch(0, size=5)) == 5
    (first, *_) = steps[0]
    assert first.prompt_ids == encode_prompt(tokenizer, first.messages)
    assert (prompts.pad_id, prompts.eos_id) == (tokenizer.pad_token_id, tokenizer.eos_token_id)


def test_prompts_that_leave_no_room_for_the_response_are_dropped(tmp_path: Path, sft_folder: Path, tokenizer):
    questions = ["Please sort 1.", "Please sort 4172. " * 6]
    longest = max(len(encode_prompt(tokenizer, r["messages"])) for r in prompt_rows(questions))
    for max_length, kept in ((longest + 8, {"p0", "p1"}), (longest + 7, {"p0"})):
        prompts = stream(tmp_path, sft_folder, questions, **{"model.max_length": max_length, "evaluation.max_new_tokens": 8})
        assert {p.id for p in prompts.batch(0, size=10)} == kept


def test_no_prompt_that_fits_is_an_error(tmp_path: Path, sft_folder: Path):
    with pytest.raises(ValueError, match=r"prompts: expected some of at most 56 tokens, got none of 1"):
        stream(tmp_path, sft_folder, ["Please sort 4172. " * 30])


@pytest.mark.parametrize("bad", [[math.nan], [math.nan, math.inf]])
def test_more_unscored_responses_than_the_limit_stop_the_run(bad):
    config = tiny_params().rl
    scores = [*bad, *[0.5] * (10 - len(bad))]
    batch = collate([scored([11], [1], score) for score in scores], {"old_logprobs": torch.zeros(10)}, pad_id=0)
    if len(bad) == 1:  # 1 of 10 is the limit of 0.1
        check_scored(batch, config, step=3)
    else:
        with pytest.raises(TooManyUnscored, match=r"step 3.*max_unscored_fraction=0\.1 .*got 0\.2"):
            check_scored(batch, config, step=3)
