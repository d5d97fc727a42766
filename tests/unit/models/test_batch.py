"""Rows with a shared beginning against the whole sequences one by one: same scores, same gradients."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import PAD, lively, sequences
from transformers import BloomConfig, BloomForSequenceClassification, GPT2Config, GPT2ForSequenceClassification, GPT2LMHeadModel

from rlhf_core.models.batch import (
    Branches,
    collate_branches,
    collate_tokens,
    continue_prefix,
    group_by_prefix,
    separate,
    share_prefix,
    shared_row,
)
from rlhf_core.models.build import load_language_model, load_scalar_model
from rlhf_core.models.forward import PolicyModule, ScalarModule
from rlhf_core.models.probe import can_share_prefixes, shares_prefixes

PREFIX, *ENDS = sequences(6, seed=4)
WHOLE = [[*PREFIX, *end] for end in ENDS]
SMALL = {"vocab_size": 300, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "num_labels": 1}


def test_a_shared_row_by_hand():
    batch = collate_branches([Branches([7, 8], [[5], [6, 9]]), Branches([], [[4, 3]])], pad_id=PAD)
    assert batch.input_ids.tolist() == [[7, 8, 5, 6, 9], [4, 3, 0, 0, 0]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 2, 3], [0, 1, 0, 0, 0]]
    assert batch.selected.tolist() == [[False, False, True, False, True], [False, True, False, False, False]]
    visible = batch.mask()
    assert visible[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 0, 1, 0],
        [1, 1, 0, 1, 1],
    ]
    assert visible[1, 0, :2, :2].int().tolist() == [[1, 0], [1, 1]]
    assert batch.predicted_by[0].tolist() == [-1, 0, 1, 1, 3]
    assert visible.any(-1).all()  # padding sees something too: a softmax over nothing would be NaN


def test_every_token_of_each_branch_by_hand():
    """The first token of each branch is predicted by the last one of the prefix."""
    batch = collate_branches([Branches([7, 8], [[5], [6, 9]]), Branches([4], [[3]])], pad_id=PAD, every_token=True)
    assert batch.selected.tolist() == [[False, False, True, True, True], [False, True, False, False, False]]
    rows, predicted_by, ids = (x.tolist() for x in batch.predictions())
    assert list(zip(rows, predicted_by, ids, strict=True)) == [(0, 1, 5), (0, 1, 6), (0, 3, 9), (1, 0, 3)]


def test_a_row_without_a_prefix_has_no_log_probability_of_its_first_token():
    with pytest.raises(AssertionError):
        collate_branches([Branches([], [[5, 6]])], pad_id=PAD, every_token=True)


def test_a_given_beginning_is_shared_where_that_pays_and_never_more_than_it():
    # 8 + 4 + 4 = 16 tokens against 24; the branches' own common beginning stays theirs.
    branches = [[5, 5, 5, 1], [5, 5, 5, 2]]
    assert continue_prefix([7] * 8, branches) == [Branches([7] * 8, branches)]
    assert continue_prefix([7] * 8, branches, shared=False) == [Branches([7] * 8, [ids]) for ids in branches]
    assert continue_prefix([7], branches) == [Branches([7], branches)]  # 9 against 10
    longer = [[5] * 5, [6] * 5]
    assert continue_prefix([7], longer) == [Branches([7], [ids]) for ids in longer]  # 11 against 12
    assert continue_prefix([7] * 8, branches[:1]) == [Branches([7] * 8, branches[:1])]


def test_the_common_beginning_leaves_a_token_for_each_branch():
    assert shared_row([[1, 2, 3], [1, 2, 3, 4], [1, 2]]) == Branches([1], [[2, 3], [2, 3, 4], [2]])
    assert shared_row([[1, 2], [3]]) == Branches([], [[1, 2], [3]])
    assert shared_row([[1, 2, 3]]) == Branches([1, 2], [[3]])


def test_rows_are_shared_only_where_that_saves_a_quarter():
    # 8 common tokens and 4 + 4 others: 16 in one row against 24 in two. 2 common ones: 10 against 12.
    assert share_prefix([[1] * 8 + [2] * 4, [1] * 8 + [3] * 4], max_tokens=99) == [Branches([1] * 8, [[2] * 4, [3] * 4])]
    few = [[1] * 2 + [2] * 4, [1] * 2 + [3] * 4]
    assert share_prefix(few, max_tokens=99) == separate(few) == [Branches([], ids) for ids in ([few[0]], [few[1]])]
    assert share_prefix([[1, 2, 3]], max_tokens=99) == separate([[1, 2, 3]])


def test_a_shared_row_stays_within_the_budget_and_a_larger_one_is_halved():
    four = [[1] * 8 + [k] * 4 for k in range(2, 6)]  # 8 + 4 x 4 = 24 tokens in one row, 8 + 2 x 4 = 16 in each of two
    assert share_prefix(four, max_tokens=24) == [shared_row(four)]
    assert share_prefix(four, max_tokens=23) == [shared_row(four[:2]), shared_row(four[2:])]
    assert share_prefix(four, max_tokens=15) == share_prefix(four, max_tokens=0) == separate(four)


def test_a_group_of_long_responses_is_split_by_the_budget_of_a_micro_batch():
    group = [[1] * 512 + [k] * 2048 for k in range(2, 10)]  # in one row 512 + 8 x 2,048 = 16,896 tokens
    assert group_by_prefix(group, [512] * 8, max_tokens=16_896) == [[*range(8)]]
    assert group_by_prefix(group, [512] * 8, max_tokens=8192) == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert group_by_prefix(group, [512] * 8, max_tokens=1024) == [[i] for i in range(8)]


def test_groups_are_of_consecutive_sequences_with_the_same_prefix():
    sequences = [[1, 2, 5], [1, 2, 6], [1, 3, 5], [1, 2, 5]]
    assert group_by_prefix(sequences, [2] * 4, max_tokens=99) == [[0, 1], [2], [3]]
    assert group_by_prefix(sequences, [2, 1, 1, 1], max_tokens=99) == [[0], [1, 2, 3]]


def test_prefixes_are_shared_on_a_cpu_only(reward_folder: Path):
    model = load_scalar_model(reward_folder)
    assert shares_prefixes(model, device=torch.device("cpu"), max_length=64)
    assert not shares_prefixes(model, device=torch.device("cuda"), max_length=64)


def test_plain_rows_need_no_mask():
    assert collate_branches(separate(WHOLE), pad_id=PAD).mask() is None


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_scores_and_gradients_of_branches_are_those_of_whole_sequences(reward_folder: Path, family: str):
    if family == "llama":
        model = load_scalar_model(reward_folder)
    else:
        torch.manual_seed(0)
        model = lively(GPT2ForSequenceClassification(GPT2Config(n_embd=16, n_layer=2, n_head=2, **SMALL))).eval()
    module = ScalarModule(model)
    weights = torch.arange(1.0, 6.0)
    alone = torch.cat([module(collate_branches([Branches([], [ids])], pad_id=PAD)) for ids in WHOLE])
    (alone * weights).sum().backward()
    expected = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    module.zero_grad()
    together = module(collate_branches([shared_row(WHOLE[:3]), Branches(PREFIX, [ENDS[3]]), Branches([], [WHOLE[4]])], pad_id=77))
    (together * weights).sum().backward()
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-5)
    assert float(alone.detach().std()) > 0.01  # they differ enough for a mix-up to show
    for name, parameter in module.named_parameters():
        if name in expected:
            torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-3, atol=1e-4 * float(expected[name].abs().max()))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_log_probabilities_and_gradients_of_branches_are_those_of_whole_sequences(sft_folder: Path, family: str):
    if family == "llama":
        model = load_language_model(sft_folder)
    else:
        torch.manual_seed(0)
        model = lively(GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=2, n_head=2, **SMALL))).eval()
    module = PolicyModule(model)
    start = len(PREFIX)
    alone = torch.cat([module(collate_tokens([ids], [start], pad_id=PAD)).logprobs for ids in WHOLE])
    weights = torch.linspace(0.1, 1.0, len(alone))
    (alone * weights).sum().backward()
    expected = {name: p.grad.clone() for name, p in module.named_parameters()}
    module.zero_grad()
    rows = [Branches(PREFIX, ENDS[:3]), Branches(PREFIX, [ENDS[3]]), Branches(PREFIX, [ENDS[4]])]
    together = module(collate_branches(rows, pad_id=77, every_token=True)).logprobs
    (together * weights).sum().backward()
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-5)
    assert float(alone.detach().std()) > 0.3  # they differ enough for a mix-up to show
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-3, atol=1e-4 * float(expected[name].abs().max()))


def test_a_model_that_can_not_share_is_found_out(reward_folder: Path):
    assert can_share_prefixes(load_scalar_model(reward_folder))
    torch.manual_seed(0)
    bloom = BloomForSequenceClassification(BloomConfig(hidden_size=16, n_layer=2, n_head=2, **SMALL))  # positions from the mask itself
    assert not can_share_prefixes(lively(bloom).eval())
