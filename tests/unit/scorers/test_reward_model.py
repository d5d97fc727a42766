"""What a reward model is shown, and how its scores come back."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from tiny_models import save_tiny_models, sequences, tiny_tokenizer
from transformers import PreTrainedTokenizerFast

from rlhf_core.models.batch import collate_tokens
from rlhf_core.models.build import load_scalar_model
from rlhf_core.models.forward import ScalarModule
from rlhf_core.models.tokenizer import PLAIN_TEMPLATE, encode_conversation, encode_prompt, load_tokenizer
from rlhf_core.scorers.reward.input import RewardModelInput
from rlhf_core.scorers.reward.members import combine_members, member_folders
from rlhf_core.scorers.reward.model import load_members, score_by_members, score_sequences
from rlhf_core.types import Prompt

QUESTION = [{"role": "user", "content": "Please sort 4172."}]
CPU = torch.device("cpu")


def shown_ids(policy, reward, prompt_ids: list[int], response_ids: list[int], *, finished: bool, max_length: int = 64) -> list[int] | None:
    prompt = Prompt("p", "s", QUESTION, prompt_ids, None)
    (ids,) = RewardModelInput(policy, reward, max_length=max_length).sequences([(prompt, response_ids, finished)])
    return ids


def sampled(tokenizer: PreTrainedTokenizerFast, text: str, *, finished: bool) -> tuple[list[int], list[int]]:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return encode_prompt(tokenizer, QUESTION), [*ids, tokenizer.eos_token_id] if finished else ids


@pytest.mark.parametrize("finished", [True, False])
def test_rm_tokenizer_the_same_one_gets_the_very_ids(tokenizer, tmp_path: Path, finished: bool):
    tokenizer.save_pretrained(tmp_path)
    twin = load_tokenizer(str(tmp_path), trust_remote_code=False)
    prompt_ids, response_ids = sampled(tokenizer, "Certainly: 1247.", finished=finished)
    # Ids that no tokenizer would produce: decoding and encoding again would give others.
    response_ids = [tokenizer.convert_tokens_to_ids(c) for c in "Cer"] + response_ids
    shown = shown_ids(tokenizer, twin, prompt_ids, response_ids, finished=finished)
    assert shown == prompt_ids + response_ids


def other_tokenizer(template: str = PLAIN_TEMPLATE) -> PreTrainedTokenizerFast:
    other = tiny_tokenizer(vocab_size=290)
    other.chat_template = template
    return other


def test_rm_tokenizer_another_one_encodes_again_with_its_own_template(tokenizer):
    other = other_tokenizer()
    prompt_ids, response_ids = sampled(tokenizer, "Certainly: 1247.", finished=True)
    shown = shown_ids(tokenizer, other, prompt_ids, response_ids, finished=True)
    assert shown == encode_conversation(other, QUESTION, "Certainly: 1247.")[0]
    assert other.decode(shown) == "User:\nPlease sort 4172.\n\nAssistant:\nCertainly: 1247.<|end|>"


def test_a_truncated_response_gets_no_end_token(tokenizer):
    other = other_tokenizer()
    prompt_ids, response_ids = sampled(tokenizer, "Certainly: 12", finished=False)
    shown = shown_ids(tokenizer, other, prompt_ids, response_ids, finished=False)
    assert other.decode(shown) == "User:\nPlease sort 4172.\n\nAssistant:\nCertainly: 12"


def test_the_same_vocabulary_with_another_template_or_end_is_another_tokenizer(tokenizer):
    prompt_ids, response_ids = sampled(tokenizer, "Certainly: 1247.", finished=True)
    templated, ended = tiny_tokenizer(), tiny_tokenizer()
    templated.chat_template = PLAIN_TEMPLATE
    ended.eos_token, ended.chat_template = "<|user|>", ended.chat_template.replace("'<|end|>'", "eos_token")
    for other in (templated, ended):
        shown = shown_ids(tokenizer, other, prompt_ids, response_ids, finished=True)
        assert shown == encode_conversation(other, QUESTION, "Certainly: 1247.")[0] != prompt_ids + response_ids


@pytest.mark.parametrize("other", [None, 290])
def test_rm_truncation_too_long_is_no_sequence_rather_than_a_cut_one(tokenizer, other: int | None):
    reward_tokenizer = tokenizer if other is None else other_tokenizer()
    prompt_ids, response_ids = sampled(tokenizer, "Certainly: 1247.", finished=True)
    needed = len(shown_ids(tokenizer, reward_tokenizer, prompt_ids, response_ids, finished=True, max_length=999))
    for max_length, fits in ((needed, True), (needed - 1, False)):
        shown = shown_ids(tokenizer, reward_tokenizer, prompt_ids, response_ids, finished=True, max_length=max_length)
        assert (shown is not None) == fits


def test_rm_score_the_same_for_any_microbatches_in_order_and_nan_where_there_is_nothing(reward_folder: Path):
    module = ScalarModule(load_scalar_model(reward_folder))
    ids: list[list[int] | None] = [*sequences(6, seed=9), None, *sequences(3, seed=10)]
    with torch.no_grad():
        alone = [float("nan") if s is None else float(module(collate_tokens([s], [len(s) - 1], pad_id=0))) for s in ids]
    for microbatch_tokens in (1, 40, 1000):
        scores = score_sequences(module, ids, pad_id=0, microbatch_tokens=microbatch_tokens, device=CPU)
        torch.testing.assert_close(scores, torch.tensor(alone), rtol=0, atol=2e-6, equal_nan=True)
    assert not scores.requires_grad


def test_nothing_to_score_is_all_nan(reward_folder: Path):
    module = ScalarModule(load_scalar_model(reward_folder))
    assert score_sequences(module, [None, None], pad_id=0, microbatch_tokens=10, device=CPU).isnan().tolist() == [True, True]


def test_an_ensembles_score_is_the_mean_less_what_its_members_disagree_by():
    # Members say 1, 2, 3 and 4, 4, 4: means 2 and 4, standard deviations sqrt(2/3) and 0.
    scores = torch.tensor([[1.0, 2.0, 3.0], [4.0, 4.0, 4.0], [float("nan")] * 3])
    combined, std = combine_members(scores, std_coef=0.5)
    assert std[:2].tolist() == pytest.approx([(2 / 3) ** 0.5, 0.0])
    assert combined[:2].tolist() == pytest.approx([2 - 0.5 * (2 / 3) ** 0.5, 4.0]) and combined[2].isnan()
    alone, none = combine_members(scores[:, :1], std_coef=0.5)
    assert alone[:2].tolist() == [1.0, 4.0] and none[:2].tolist() == [0.0, 0.0]


def test_members_are_the_folder_and_those_beside_its_files_by_number(tmp_path: Path, reward_folder: Path, tokenizer):
    other = save_tiny_models(tmp_path / "other", tokenizer, seed=7)[1]
    folder = tmp_path / "reward"
    shutil.copytree(reward_folder, folder)
    for number in (10, 2):
        shutil.copytree(other, folder / f"member_{number}")
    (folder / "member_3").mkdir()  # no model in it
    assert [p.name for p in member_folders(folder)] == ["reward", "member_2", "member_10"]
    how = {"device": CPU, "trust_remote_code": False}
    ids = sequences(2, seed=3)
    requested = {"pad_id": 0, "microbatch_tokens": 64, "device": CPU}
    scores = score_by_members(load_members(folder, **how), [*ids, None], **requested)
    assert scores.shape == (3, 3) and torch.equal(scores[:2, 1], scores[:2, 2]) and scores[2].isnan().all()
    assert torch.equal(scores[:2, :1], score_by_members(load_members(folder, count=1, **how), ids, **requested))
    assert len(load_members(folder, count=2, **how)) == 2 and (scores[:2, 0] - scores[:2, 1]).abs().min() > 1e-3
