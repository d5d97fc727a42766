"""The trunk on the tokens that count, against the model's own forward: states, gradients, and what it declines."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel, Qwen2Config, Qwen2Model

from rlhf_core.config import LoraConfig
from rlhf_core.models.batch import Branches, collate_branches, collate_tokens
from rlhf_core.models.cpu import layout, packed
from rlhf_core.models.cpu.layout import GroupBlock, _cuts, _whole_sequences, layout_of, visible_branches
from rlhf_core.models.cpu.packed import can_pack, packed_states
from rlhf_core.models.lora import add_adapters, without_adapters


@pytest.fixture(params=[5, 1000], ids="pieces of {}".format, autouse=True)
def piece_rows(request, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "piece_rows", lambda count, weight: request.param)


def llama(heads: int = 4, key_value_heads: int = 4, **settings) -> LlamaModel:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "vocab_size": 50, "max_position_embeddings": 64}
    model = LlamaModel(LlamaConfig(**shape, num_attention_heads=heads, num_key_value_heads=key_value_heads, **settings))
    for parameter in model.parameters():  # norms too: ones would hide a weight that is left out
        torch.nn.init.normal_(parameter, std=0.5)
    return model


def gradients(model: LlamaModel, states: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(1)
    (states * torch.randn_like(states)).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def assert_same(model: LlamaModel, ids: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, **attention) -> None:
    mask = {} if not attention else {"position_ids": attention["position_ids"], "attention_mask": visible_branches(attention["segments"])}
    expected = model(input_ids=ids, use_cache=False, **mask).last_hidden_state[rows, positions]
    found = packed_states(model, ids, rows, positions, **attention)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)
    wanted, got = gradients(model, expected), gradients(model, found)
    for name in wanted:
        torch.testing.assert_close(got[name], wanted[name], rtol=0, atol=2e-5 * float(wanted[name].abs().max()), msg=name)


@pytest.mark.parametrize("key_value_heads", [4, 2, 1])
def test_rows_of_any_length_in_any_order_give_the_models_states_and_gradients(key_value_heads: int):
    model = llama(key_value_heads=key_value_heads)
    torch.manual_seed(2)
    ids = torch.randint(1, 50, (7, 20))
    wanted = torch.zeros(7, 20, dtype=torch.bool)
    for row, (first, last) in enumerate([(3, 5), (0, 19), (2, 2), (10, 17), (0, 0), (6, 7)]):  # nothing is wanted of the last row
        wanted[row, first : last + 1] = True
    assert_same(model, ids, *wanted.nonzero(as_tuple=True))


def test_a_position_that_is_wanted_twice_counts_twice():
    ids = torch.randint(1, 50, (2, 6))
    assert_same(llama(), ids, torch.tensor([0, 0, 1, 1, 1]), torch.tensor([4, 4, 2, 5, 2]))


def test_branches_see_their_prefix_and_themselves():
    rows = [Branches([1, 2, 3, 4], [[5, 6], [7], [8, 9, 10]]), Branches([11, 12], [[13, 14, 15, 16]]), Branches([17], [[18], [19]])]
    batch = collate_branches(rows, pad_id=0, every_token=True)
    at, predicted_by, _ = batch.predictions()
    assert_same(llama(), batch.input_ids, at, predicted_by, position_ids=batch.position_ids, segments=batch.segments)


LONG_BRANCHES = [
    Branches([1, 2, 3, 4], [[5, 6, 20, 21, 22, 23], [7], list(range(24, 32)), [8, 9, 10]]),
    Branches([17], [[18, 40, 41], [19, 42, 43, 44]]),
    Branches([11, 12], [[13, 14, 15, 16]]),
    Branches([], [[33, 34], [35, 36, 37]]),
]


@pytest.mark.parametrize("key_value_heads", [4, 2])
@pytest.mark.parametrize("last_row", ["whole", "no branch", "half a branch"])
def test_branches_that_attend_as_whole_sequences_give_the_same(key_value_heads: int, last_row: str, monkeypatch: pytest.MonkeyPatch):
    """Also where the tokens of a row end within a branch, or with its prefix."""
    seen = []
    monkeypatch.setattr(layout, "COPYING_PAYS", 0)
    monkeypatch.setattr(layout, "_whole_sequences", lambda *args, **how: seen.append(1) or _whole_sequences(*args, **how))
    batch = collate_branches(LONG_BRANCHES, pad_id=0)
    wanted = batch.segments >= 0
    if last_row != "whole":
        wanted[0, 4 if last_row == "no branch" else 12 :] = False
    attention = {"position_ids": batch.position_ids, "segments": batch.segments}
    assert_same(llama(key_value_heads=key_value_heads), batch.input_ids, *wanted.nonzero(as_tuple=True), **attention)
    assert seen


GROUPS = [
    Branches([1, 2, 3, 4, 9], [[5, 6, 20, 21, 22, 23], [7], [8, 9, 10]]),
    Branches([17], [[18, 40, 41, 45, 46, 47], [19, 42, 43], [33]]),
    Branches([11, 12, 13], [[14, 15, 16]]),
    Branches([11, 12, 13], [[14], [28], [29], [30, 31]]),
    Branches(list(range(1, 8)), [[35], [36, 37], [38]]),
]


def blocks_of(model: LlamaModel, batch, wanted: torch.Tensor):
    return layout_of(model, batch.input_ids, *wanted.nonzero(as_tuple=True), batch.position_ids, None, batch.segments).blocks


@pytest.mark.parametrize("key_value_heads", [4, 2])
@pytest.mark.parametrize("half_a_response", [False, True])
def test_groups_whose_responses_attend_to_one_prefix_give_the_same(
    key_value_heads: int, half_a_response: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(layout, "RESPONSES", 2.8)
    batch, model = collate_branches(GROUPS, pad_id=0), llama(key_value_heads=key_value_heads)
    wanted = batch.segments >= 0
    if half_a_response:
        wanted[0, 14:] = False
    blocks = blocks_of(model, batch, wanted)
    # Of rows with three responses those of up to 11 and 9 tokens are alike, that of up to 7 is not.
    assert [(b.groups, b.responses) for b in blocks] == [(1, 1), (2, 3), (1, 3), (1, 4)] and all(type(b) is GroupBlock for b in blocks)
    attention = {"position_ids": batch.position_ids, "segments": batch.segments}
    assert_same(model, batch.input_ids, *wanted.nonzero(as_tuple=True), **attention)


@pytest.mark.parametrize(
    ("rows", "grouped"),
    [
        ([Branches([1] * 3, [[2] * 17] * 3)], True),  # three responses, prefixes are 9 of 60 tokens
        ([Branches([1] * 3, [[2] * 17] * 2)], False),  # two responses
        ([Branches([1] * 3, [[2] * 18] * 3)], False),  # 9 of 63 tokens
        ([Branches([1] * 3, [[2] * 17] * 4), Branches([1] * 3, [[2] * 17] * 2)], True),  # three on average
        ([Branches([1] * 3, [[2] * 17] * 5), Branches([], [[2] * 3])], False),  # a row without a prefix
        ([Branches([1] * 40, [[2] * 216] * 3)], True),  # 256 tokens
        ([Branches([1] * 41, [[2] * 216] * 3)], False),
    ],
)
def test_many_short_responses_to_a_prompt_attend_as_a_group(rows: list[Branches], grouped: bool):
    batch = collate_branches(rows, pad_id=0)
    blocks = blocks_of(llama(), batch, batch.selected)
    assert all((type(block) is GroupBlock) == grouped for block in blocks)


def test_a_long_prefix_of_short_branches_is_not_copied(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(layout, "COPYING_PAYS", 0)
    monkeypatch.setattr(layout, "_whole_sequences", None)
    batch = collate_branches([Branches(list(range(1, 31)), [[n] for n in range(31, 39)])], pad_id=0)
    attention = {"position_ids": batch.position_ids, "segments": batch.segments}
    assert_same(llama(), batch.input_ids, *batch.selected.nonzero(as_tuple=True), **attention)


ALIKE = [
    [5, 6, 7, 8, 9, 10],
    [5, 6, 7, 20, 21],
    [5, 6, 7, 8, 9, 10],  # the first once more
    [5, 6],
    [7, 8, 9, 10],  # as the first one goes on, but with nothing before it
    [5, 6, 7, 20, 22, 23, 24],
]


@pytest.mark.parametrize("key_value_heads", [4, 2])
def test_what_rows_begin_with_alike_is_computed_once(key_value_heads: int):
    model, batch = llama(key_value_heads=key_value_heads), collate_tokens(ALIKE, [0] * len(ALIKE), pad_id=0)
    wanted = batch.selected.nonzero(as_tuple=True)
    beginnings = {tuple(ids[:k]) for ids in ALIKE for k in range(1, len(ids) + 1)}
    assert len(layout_of(model, batch.input_ids, *wanted, None, None, None).ids) == len(beginnings)
    assert_same(model, batch.input_ids, *wanted)


def test_rows_that_begin_alike_at_other_positions_are_not_the_same():
    ids, position_ids = torch.tensor([[5, 6, 7], [5, 6, 7]]), torch.tensor([[0, 1, 2], [10, 11, 12]])
    layout = layout_of(llama(), ids, torch.tensor([0, 1]), torch.tensor([2, 2]), position_ids, None, None)
    assert len(layout.ids) == 6


def test_branches_without_a_prefix_of_which_nothing_is_shared():
    """As long sequences one by one, not as they come."""
    branches = [list(range(1, 13)), *([first, *range(20, 30)] for first in range(13, 19)), list(range(30, 50))]
    batch, model = collate_branches([Branches([], branches)], pad_id=0), llama()
    wanted = (batch.segments >= 0).nonzero(as_tuple=True)
    layout = layout_of(model, batch.input_ids, *wanted, batch.position_ids, None, batch.segments)
    assert layout.copies is None and len(layout.blocks) > 1
    assert_same(model, batch.input_ids, *wanted, position_ids=batch.position_ids, segments=batch.segments)


SAME_PREFIX = [
    [Branches([1, 2, 3, 4], [[5, 6, 7], [5, 6], [8]]), Branches([1, 2, 3, 9], [[5, 6], [10], [11, 12]])],
    [Branches([1, 2, 3, 4], [[5, 6, 7], [5, 6]]), Branches([1, 2], [[3, 4, 5], [10]])],
    [Branches([1, 2, 3, 4], [[5, 6, 7], [5, 6]]), Branches([], [[1, 2, 3, 4, 5, 6, 8], [1, 2, 13]])],
]


@pytest.mark.parametrize("rows", SAME_PREFIX, ids=["groups", "two responses", "a row without a prefix"])
@pytest.mark.parametrize("copying_pays", [0, 1000])
def test_what_branches_of_different_rows_begin_with_alike_is_computed_once(
    rows: list[Branches], copying_pays: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(layout, "COPYING_PAYS", copying_pays)
    batch, model = collate_branches(rows, pad_id=0), llama()
    wanted = (batch.segments >= 0).nonzero(as_tuple=True)
    beginnings = {tuple([*row.prefix, *ids][:k]) for row in rows for ids in row.branches for k in range(1, len(row.prefix + ids) + 1)}
    assert len(layout_of(model, batch.input_ids, *wanted, batch.position_ids, None, batch.segments).ids) == len(beginnings)
    assert_same(model, batch.input_ids, *wanted, position_ids=batch.position_ids, segments=batch.segments)


def test_where_nothing_is_wanted_every_weight_has_a_gradient_of_zeros():
    """ZeRO adds the gradients of all ranks in the order in which they come: a rank with nothing to learn from must have them too."""
    model = llama()
    nowhere = torch.zeros(0, dtype=torch.long)
    states = packed_states(model, torch.randint(1, 50, (2, 6)), nowhere, nowhere)
    assert states.shape == (0, 32)
    assert all(not grad.any() for grad in gradients(model, states).values())


def test_nothing_that_comes_after_the_last_wanted_token_matters():
    model, ids = llama(), torch.randint(1, 50, (3, 12))
    rows, positions = torch.tensor([0, 1, 2]), torch.tensor([4, 11, 7])
    changed = ids.clone()
    changed[0, 5:] = changed[2, 8:] = 0
    torch.testing.assert_close(packed_states(model, changed, rows, positions), packed_states(model, ids, rows, positions), rtol=0, atol=0)


def test_the_padding_tokens_embedding_gets_no_gradient_as_in_the_model():
    model = llama(pad_token_id=7)
    ids = torch.tensor([[1, 7, 2, 7, 3]])
    assert_same(model, ids, torch.tensor([0, 0]), torch.tensor([3, 4]))
    assert not model.embed_tokens.weight.grad[7].any()


def test_a_frozen_model_needs_no_gradient():
    model = llama().requires_grad_(False)
    assert not packed_states(model, torch.tensor([[1, 2, 3]]), torch.tensor([0]), torch.tensor([2])).requires_grad


def test_derivatives_by_finite_differences():
    model = llama(heads=2, key_value_heads=2).double()
    ids = torch.randint(1, 50, (3, 5))
    rows, positions = torch.tensor([0, 1, 1, 2]), torch.tensor([4, 2, 1, 0])
    weights = [model.layers[0].self_attn.q_proj.weight, model.layers[1].mlp.gate_proj.weight, model.layers[2].input_layernorm.weight]

    def states(*_):
        return packed_states(model, ids, rows, positions)

    assert torch.autograd.gradcheck(states, weights, fast_mode=True)


def test_attention_takes_rows_of_similar_length_together():
    # 20 * 0.75 = 15: 15 still fits, 14 doesn't; 14 * 0.75 = 10.5; a row without tokens has no place
    assert _cuts([20, 16, 15, 14, 11, 10, 1, 0]) == [(3, 20), (2, 14), (1, 10), (1, 1)]


def adapted_llama(target_modules: str | list[str] = "all-linear", *, dropout: float = 0.0, **settings) -> LlamaModel:
    """Frozen, with trained adapters of rank 3."""
    model = LlamaForCausalLM(llama(**settings).config)
    model.model.load_state_dict(llama(**settings).state_dict())
    model.requires_grad_(False)
    add_adapters(model, LoraConfig(rank=3, alpha=6.0, dropout=dropout, target_modules=target_modules), seed=0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # zeros would hide a correction that is left out
            torch.nn.init.normal_(parameter, std=0.2)
    return model.model


@pytest.mark.parametrize("target_modules", ["all-linear", ["q_proj", "v_proj"], ["up_proj", "o_proj"], ["down_proj", "gate_proj"]], ids=str)
def test_adapters_give_the_models_states_and_their_own_gradients(target_modules):
    model, rows = adapted_llama(target_modules, key_value_heads=2), [Branches([1, 2, 3], [[5, 6], [7]]), Branches([11, 12], [[13, 14, 15]])]
    batch = collate_branches(rows, pad_id=0, every_token=True)
    at, predicted_by, _ = batch.predictions()
    mask = {"position_ids": batch.position_ids, "attention_mask": visible_branches(batch.segments)}
    assert can_pack(model)
    found = packed_states(model, batch.input_ids, at, predicted_by, position_ids=batch.position_ids, segments=batch.segments)
    expected = model(input_ids=batch.input_ids, use_cache=False, **mask).last_hidden_state[at, predicted_by]
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * 3 * (7 if target_modules == "all-linear" else 2)  # A and B of each layer's matrices
    weights = torch.randn_like(found)
    wanted, got = (torch.autograd.grad((states * weights).sum(), list(trained.values())) for states in (expected, found))
    for name, a, b in zip(trained, wanted, got, strict=True):
        assert a.abs().max() > 0
        torch.testing.assert_close(b, a, rtol=0, atol=2e-5 * float(a.abs().max()), msg=name)
    with without_adapters(model):
        plain = model(input_ids=batch.input_ids, use_cache=False, **mask).last_hidden_state[at, predicted_by]
        again = packed_states(model, batch.input_ids, at, predicted_by, position_ids=batch.position_ids, segments=batch.segments)
    torch.testing.assert_close(again, plain, rtol=0, atol=2e-5)
    assert (plain - expected).abs().max() > 0.01


def test_adapters_with_dropout_or_beside_trained_weights_are_left_to_the_model():
    model = adapted_llama(dropout=0.5)
    assert can_pack(model.eval()) and not can_pack(model.train())
    with without_adapters(model):
        assert can_pack(model)
    model = adapted_llama()
    model.layers[0].input_layernorm.weight.requires_grad_(True)
    assert not can_pack(model)


def test_what_it_doesnt_know_is_left_to_the_model(monkeypatch: pytest.MonkeyPatch):
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 50, "num_attention_heads": 4}
    assert can_pack(llama())
    monkeypatch.setattr(packed, "multiplies_bfloat16", lambda: True)
    assert can_pack(llama().bfloat16())
    mixed = llama().bfloat16()
    mixed.layers[1].mlp.down_proj.float()
    assert not can_pack(mixed)
    monkeypatch.setattr(packed, "multiplies_bfloat16", lambda: False)
    assert not can_pack(llama().bfloat16())
    assert not can_pack(llama(attention_bias=True))
    assert not can_pack(llama(attention_dropout=0.1))
    assert not can_pack(llama(hidden_act="gelu"))
    assert not can_pack(llama(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}))
    assert not can_pack(Qwen2Model(Qwen2Config(**shape)))
    wrapped = llama()
    wrapped.layers[1].mlp.down_proj = torch.nn.Sequential(wrapped.layers[1].mlp.down_proj)
    assert not can_pack(wrapped)
    partitioned = llama()
    partitioned.embed_tokens.weight.ds_id = 0  # as ZeRO 3 marks its own
    assert not can_pack(partitioned)
