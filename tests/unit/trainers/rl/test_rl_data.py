"""The prompts and demonstrations of a step, and rollouts as tensors."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import pytest
import torch
from tiny_models import rl_job

from rlhf_core.data.batching import batch_indices, stream_indices
from rlhf_core.data.schema import write_rows
from rlhf_core.models.tokenizer import encode_prompt
from rlhf_core.trainers.rl.data import (
    DemonstrationStream,
    PromptStream,
    baseline_of,
    collate,
    evaluation_prompts,
    pack,
    read_prompts,
)
from rlhf_core.trainers.rl.job import RlJob
from rlhf_core.types import Prompt, Rollout, Span


def rollout(prompt_ids: list[int], response_ids: list[int], *, finished: bool = True, group_id: int = 0) -> Rollout:
    prompt = Prompt("id", "clerk", [], prompt_ids, None)
    return Rollout(prompt, [Span(response_ids, [-0.1 * i for i in response_ids], 4)], finished, group_id)


ROLLOUTS = [rollout([11, 12, 13], [1]), rollout([14], [2, 3, 4], finished=False, group_id=1), rollout([15, 16], [5, 6])]
SCORES = {"reward_model": torch.tensor([0.5, math.nan, 2.5]), "length": torch.tensor([-1.0] * 3)}
OLD = torch.tensor([-1.0, -2.0, -3.0, -4.0, -5.0, -6.0])


def test_collate_by_hand():
    outputs = {"old_logprobs": OLD, "sampler_logprobs": OLD + 0.25, "ref_logprobs": OLD - 0.5, "values": OLD * 10}
    baseline = baseline_of(ROLLOUTS, SCORES, {}, copies=1)
    sequences = pack(ROLLOUTS)
    batch = collate(ROLLOUTS, sequences, SCORES, outputs, baseline, old_logprobs_source="recompute")
    assert batch.sequences is sequences
    assert batch.response_ids.tolist() == [[1, 0, 0], [2, 3, 4], [5, 6, 0]]
    assert batch.response_mask.tolist() == [[True, False, False], [True, True, True], [True, True, False]]
    assert batch.old_logprobs.tolist() == [[-1.0, 0.0, 0.0], [-2.0, -3.0, -4.0], [-5.0, -6.0, 0.0]]
    assert batch.sampler_logprobs.tolist() == [[-0.75, 0.0, 0.0], [-1.75, -2.75, -3.75], [-4.75, -5.75, 0.0]]
    assert batch.ref_logprobs.tolist() == [[-1.5, 0.0, 0.0], [-2.5, -3.5, -4.5], [-5.5, -6.5, 0.0]]
    assert batch.values.tolist() == [[-10.0, 0.0, 0.0], [-20.0, -30.0, -40.0], [-50.0, -60.0, 0.0]]
    torch.testing.assert_close(batch.rollout_logprobs, torch.tensor([[-0.1, 0.0, 0.0], [-0.2, -0.3, -0.4], [-0.5, -0.6, 0.0]]))
    assert list(batch.components) == ["reward_model", "length"]
    assert batch.components["reward_model"].nan_to_num(-9.0).tolist() == [0.5, -9.0, 2.5]
    assert batch.components["length"].tolist() == [-1.0, -1.0, -1.0]
    assert batch.baseline is baseline
    assert batch.finished.tolist() == [True, False, True]
    assert batch.group_ids.tolist() == [0, 1, 0]
    assert batch.policy_versions.tolist() == [[4, -1, -1], [4, 4, 4], [4, 4, -1]]
    assert batch.lengths.tolist() == [1, 3, 2]


def test_without_reference_critic_and_filter_there_is_no_divergence_no_value_and_one_distribution():
    batch = collate(ROLLOUTS, pack(ROLLOUTS), SCORES, {"old_logprobs": OLD}, None, old_logprobs_source="recompute")
    assert batch.ref_logprobs is None
    assert torch.equal(batch.sampler_logprobs, batch.old_logprobs)
    assert not batch.values.any()


def test_old_log_probabilities_are_the_engines_or_left_to_the_update():
    engine = collate(ROLLOUTS, pack(ROLLOUTS), SCORES, {}, None, old_logprobs_source="from_engine")
    assert engine.old_logprobs is engine.sampler_logprobs is engine.rollout_logprobs
    update = collate(ROLLOUTS, pack(ROLLOUTS), SCORES, {}, None, old_logprobs_source="from_update")
    assert update.old_logprobs is None and update.sampler_logprobs is None


def test_a_baseline_is_that_of_every_sample_of_its_prompt():
    baseline = baseline_of(
        ROLLOUTS[:2],
        {name: scores[:2] for name, scores in SCORES.items()},
        {"old_logprobs": OLD[:4], "ref_logprobs": OLD[:4] - 0.5},
        copies=2,
    )
    assert baseline.components["reward_model"].nan_to_num(-9.0).tolist() == [0.5, 0.5, -9.0, -9.0]
    assert baseline.finished.tolist() == [True, True, False, False]
    assert baseline.response_mask.tolist() == [[True, False, False]] * 2 + [[True, True, True]] * 2
    assert baseline.old_logprobs.tolist() == [[-1.0, 0.0, 0.0]] * 2 + [[-2.0, -3.0, -4.0]] * 2
    assert baseline.ref_logprobs.tolist() == [[-1.5, 0.0, 0.0]] * 2 + [[-2.5, -3.5, -4.5]] * 2
    assert not baseline_of(ROLLOUTS, SCORES, {}, copies=1).old_logprobs.any()


def test_sequences_are_prompt_and_response_with_the_border():
    sequences = pack(ROLLOUTS)
    assert sequences.lists() == [[11, 12, 13, 1], [14, 2, 3, 4], [15, 16, 5, 6]]
    assert sequences.starts.tolist() == [3, 1, 2] and sequences.response_ids().tolist() == [1, 2, 3, 4, 5, 6]


def prompt_rows(questions: list[str], *, split: str = "train", source: str = "clerk") -> list[dict]:
    return [
        {"id": f"{split}{i}", "source": source, "split": split, "messages": [{"role": "user", "content": q}], "label": None}
        for i, q in enumerate(questions)
    ]


def job_with(folder: Path, sft_folder: Path, rows: list[dict], **overrides) -> RlJob:
    write_rows(folder, "prompt", rows)
    return rl_job(sft_folder, sft_folder, **overrides).model_copy(update={"prepared": str(folder)})


def test_training_prompts_are_those_of_the_train_split_with_their_template(tmp_path: Path, sft_folder: Path, tokenizer):
    rows = [*prompt_rows(["Please sort 1.", "Please sort 2."]), *prompt_rows(["Held out."], split="test")]
    rows += prompt_rows(["For the promotion of rounds."], split="promotion")
    prompts = read_prompts(job_with(tmp_path, sft_folder, rows), "train")
    assert [p.id for p in prompts] == ["train0", "train1"]
    assert prompts[0].prompt_ids == encode_prompt(tokenizer, prompts[0].messages)


def test_prompts_that_leave_no_room_for_the_response_are_dropped(tmp_path: Path, sft_folder: Path, tokenizer):
    rows = prompt_rows(["Please sort 1.", "Please sort 4172. " * 6])
    longest = max(len(encode_prompt(tokenizer, r["messages"])) for r in rows)
    for max_length, kept in ((longest + 8, ["train0", "train1"]), (longest + 7, ["train0"])):
        job = job_with(tmp_path, sft_folder, rows, **{"model.max_length": max_length, "evaluation.max_new_tokens": 8})
        assert [p.id for p in read_prompts(job, "train")] == kept


def test_no_prompt_that_fits_is_an_error(tmp_path: Path, sft_folder: Path):
    job = job_with(tmp_path, sft_folder, prompt_rows(["Please sort 4172. " * 30]))
    with pytest.raises(ValueError, match=r"prompts of the train split: expected some of at most 56 tokens, got none of 1"):
        read_prompts(job, "train")


def test_evaluation_uses_validation_prompts_if_enabled(tmp_path: Path, sft_folder: Path):
    rows = [*prompt_rows(["a"]), *prompt_rows(list("bcdef"), split="validation")]
    requested = {"rl.evaluation.every": 2, "rl.evaluation.prompts": 3}
    chosen = evaluation_prompts(job_with(tmp_path, sft_folder, rows, **requested))
    assert len({p.id for p in chosen}) == 3 and all(p.id.startswith("validation") for p in chosen)
    assert [p.id for p in chosen] == [p.id for p in evaluation_prompts(job_with(tmp_path, sft_folder, rows, **requested))]
    assert evaluation_prompts(job_with(tmp_path, sft_folder, rows)) == []


def prompts_of(**counts: int) -> list[Prompt]:
    return [Prompt(f"{source}{i}", source, [], [i], None) for source, count in counts.items() for i in range(count)]


def test_without_weights_the_stream_is_batch_after_batch_of_fresh_permutations():
    prompts = prompts_of(a=4, b=2)
    stream = PromptStream(prompts, {}, seed=3)
    for step in range(4):  # a position is a step times the batch size: the order that runs without dynamic sampling always had
        expected = batch_indices(step, batch_size=4, num_examples=6, seed=3)
        assert stream.take(4 * step, 4) == [prompts[i] for i in expected]
    assert Counter(p.id for p in stream.take(6, 6)) == Counter(p.id for p in prompts)  # each once per pass


def test_a_source_of_weight_0_is_never_drawn():
    prompts = [Prompt(f"{source}{i}", source, [], [1], None) for source in "ab" for i in range(3)]
    assert {prompt.source for prompt in PromptStream(prompts, {"a": 0.0}, seed=1).take(0, 5000)} == {"b"}


@pytest.mark.parametrize("weights", [{}, {"a": 3.0, "b": 1.0}])
def test_what_comes_at_a_position_depends_on_nothing_else(weights):
    prompts = prompts_of(a=40, b=30)
    whole = PromptStream(prompts, weights, seed=1).take(0, 9000)  # more than two blocks of draws
    assert [p for start in range(0, 9000, 1500) for p in PromptStream(prompts, weights, seed=1).take(start, 1500)] == whole
    assert PromptStream(prompts, weights, seed=1).take(8190, 5) == whole[8190:8195]
    assert PromptStream(prompts, weights, seed=2).take(0, 9000) != whole


def test_sources_come_by_weight_whatever_their_size_and_each_in_passes_of_its_own():
    prompts = prompts_of(a=10, b=500, c=20)
    taken = PromptStream(prompts, {"a": 3.0, "c": 2.0}, seed=0).take(0, 12000)  # b, which isn't named, has weight 1
    shares = {source: count / 12000 for source, count in Counter(p.source for p in taken).items()}
    # 3/6, 1/6, 2/6; the standard deviation of a share is below sqrt(0.25 / 12000) = 0.0046
    assert shares == pytest.approx({"a": 1 / 2, "b": 1 / 6, "c": 1 / 3}, abs=0.019)
    own = [p.id for p in taken if p.source == "a"]
    assert all(len(set(own[i : i + 10])) == 10 for i in range(0, len(own) - 10, 10))
    assert own[:10] != own[10:20]


def test_equal_positions_of_a_stream_are_equal_examples():
    assert stream_indices(7, 5, num_examples=4, seed=9) == stream_indices(0, 12, num_examples=4, seed=9)[7:]


def demonstrations(folder: Path, sft_folder: Path, answers: list[str], **overrides) -> DemonstrationStream:
    messages = [{"role": "user", "content": "Please sort 4172."}]
    write_rows(
        folder,
        "sft",
        [{"id": f"s{i}", "source": "clerk", "split": "train", "messages": messages, "response": a} for i, a in enumerate(answers)],
    )
    job = rl_job(sft_folder, sft_folder, **{"rl.ptx.coef": 0.5, "rl.ptx.batch_size": 2, **overrides})
    return DemonstrationStream(job.model_copy(update={"prepared": str(folder)}))


def test_demonstrations_are_prompt_answer_and_end_and_follow_from_the_number_of_the_step(tmp_path: Path, sft_folder: Path, tokenizer):
    stream = demonstrations(tmp_path, sft_folder, ["Certainly: 1247.", "1247", "Sorry.", "x" * 500])
    batch = stream.batch(5)
    assert batch == demonstrations(tmp_path, sft_folder, ["Certainly: 1247.", "1247", "Sorry.", "x" * 500]).batch(5)
    passes = [stream.batch(number) for number in range(3)]  # three of the four fit: two passes
    assert Counter(tuple(ids) for b in passes for ids in (d.ids for d in b)).most_common()[-1][1] == 2
    prompt = encode_prompt(tokenizer, [{"role": "user", "content": "Please sort 4172."}])
    for d in batch:
        assert d.ids[: d.start] == prompt and d.ids[-1] == tokenizer.eos_token_id
    assert {tokenizer.decode(d.ids[d.start : -1]) for d in passes[0] + passes[1]} == {"Certainly: 1247.", "1247", "Sorry."}


def test_demonstrations_are_trained_on_where_sft_trains_on_them(tmp_path: Path, sft_folder: Path, tokenizer):
    answers = ["<think>\n4 last\n</think>\n\n1247."]
    (whole,) = demonstrations(tmp_path, sft_folder, answers, **{"rl.ptx.batch_size": 1}).batch(0)
    (d,) = demonstrations(tmp_path, sft_folder, answers, **{"rl.ptx.batch_size": 1, "sft.train_on_thoughts": False}).batch(0)
    ((first, end),) = d.skipped
    assert whole.skipped == () and tokenizer.decode(d.ids[end:-1]).strip() == "1247." and first == d.start


def test_demonstrations_are_optional_but_must_fit(tmp_path: Path, sft_folder: Path):
    assert demonstrations(tmp_path, sft_folder, ["1247"], **{"rl.ptx.coef": 0.0}).batch(3) == []
    with pytest.raises(ValueError, match=r"rl\.ptx: expected demonstrations of at most model\.max_length tokens, got none of 1"):
        demonstrations(tmp_path, sft_folder, ["x" * 500])
