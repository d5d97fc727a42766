"""Rows without padding: the same hidden states, losses and gradients as padded rows, of every family whose layers are attention.

FlashAttention needs a GPU; attention_by_lengths.py stands in its place.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from attention_by_lengths import BY_LENGTHS, attend_by_lengths, registered
from model_families import FAMILIES, OTHERS, VOCABULARY
from transformers import PreTrainedModel
from transformers.modeling_flash_attention_utils import prepare_fa_kwargs_from_position_ids

from rlhf_core.models.attention import attention_arguments
from rlhf_core.models.backend import Backend
from rlhf_core.models.batch import Branches, TokenBatch, collate_branches, collate_tokens
from rlhf_core.models.build import trunk
from rlhf_core.models.forward import PolicyModule
from rlhf_core.models.packing import pack, packs

STATEFUL = ("falcon_h1", "jamba", "bamba", "recurrent_gemma", "mamba2", "qwen3_next", "qwen3_5")
OTHER_LAYERS = ("llama4", "falcon_7b", "falcon_40b", "falcon_rw", "gpt_neo", "biogpt")  # chunks; attention of their own
ALL = FAMILIES | OTHERS
PACKED = [name for name in ALL if name not in (*STATEFUL, *OTHER_LAYERS)]


@pytest.fixture
def flash() -> Iterator[None]:
    with registered():
        yield


def with_lengths(name: str) -> PreTrainedModel:
    return attend_by_lengths(ALL[name]())


def with_padding(name: str) -> PreTrainedModel:
    model = ALL[name]()
    model.set_attn_implementation("eager")  # sdpa leaves out the softcap of Gemma 2
    return model


def batch_of(lengths: tuple[int, ...] = (60, 3, 41, 17)) -> TokenBatch:
    made = torch.Generator().manual_seed(1)
    rows = [torch.randint(2, VOCABULARY, (n,), generator=made).tolist() for n in lengths]
    return collate_tokens(rows, [1 + n // 2 for n in lengths], pad_id=0)


def states(model: PreTrainedModel, batch: TokenBatch, *, routed: torch.Tensor | None = None):
    rows, positions = batch.selected.nonzero(as_tuple=True)
    return Backend().hidden_states(model, batch, rows, positions, routed=routed)


def test_a_packed_row_by_hand():
    batch = TokenBatch(torch.tensor([[5, 6, 7, 8], [9, 0, 0, 0], [3, 4, 0, 0]]), torch.zeros(3, 4, dtype=torch.bool))
    packed = pack(batch, torch.tensor([0, 2]), torch.tensor([2, 1]))
    assert packed.batch.input_ids.tolist() == [[5, 6, 7, 3, 4]]  # nothing of the second sequence, nor of the first after what is needed
    assert packed.batch.position_ids.tolist() == [[0, 1, 2, 0, 1]] and packed.batch.segments.tolist() == [[1, 1, 1, 3, 3]]
    assert packed.index[[0, 2], [2, 1]].tolist() == [2, 4]
    assert packed.batch.selected.tolist() == [[False, False, True, False, True]]
    routed = torch.tensor([[False] * 4, [True] + [False] * 3, [False] * 4])
    packed = pack(batch, torch.tensor([0, 2]), torch.tensor([2, 1]), routed=routed)
    assert packed.batch.input_ids.tolist() == [[5, 6, 7, 9, 3, 4]]
    assert packed.of(routed).tolist() == [[False, False, False, True, False, False]]


def test_the_lengths_are_those_that_transformers_finds_in_the_positions(flash: None):
    row = pack(batch_of(), *batch_of().selected.nonzero(as_tuple=True)).batch
    given = attention_arguments(with_lengths("llama"), row)
    (ends, _), (longest, _) = prepare_fa_kwargs_from_position_ids(given["position_ids"])
    assert given["cu_seq_lens_q"].tolist() == ends.tolist() == [0, 60, 63, 104, 121] and given["cu_seq_lens_q"].dtype == torch.int32
    assert given["max_length_q"] == given["max_length_k"] == longest == 60
    assert torch.equal(given["cu_seq_lens_k"], given["cu_seq_lens_q"])


@pytest.mark.parametrize("name", PACKED)
def test_hidden_states_and_gradients_without_padding_are_those_with_it(name: str, flash: None):
    found = []
    batch = batch_of((30, 3, 21, 17)) if name in ("phi3_longrope", "llama_dynamic") else batch_of()
    for model in (with_padding(name), with_lengths(name)):
        assert packs(model, batch) == (model.config._attn_implementation == BY_LENGTHS)
        hidden, _ = states(model, batch)
        (hidden * torch.linspace(-1, 1, hidden.shape[-1])).sum().backward()
        gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        found.append((hidden.detach(), gradients))
    (padded, expected), (packed, gradients) = found
    torch.testing.assert_close(packed, padded, rtol=1e-5, atol=1e-5 * float(padded.abs().max()))
    assert gradients.keys() == expected.keys()
    for parameter, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[parameter], rtol=1e-4, atol=2e-5 * float(expected[parameter].abs().max()) + 1e-7)


@pytest.mark.parametrize("name", ["llama_tied", "gemma2", "qwen2_window", "gpt2"])
def test_log_probabilities_without_padding_are_those_with_it(name: str, flash: None):
    padded, packed = (PolicyModule(model)(batch_of()).logprobs for model in (with_padding(name), with_lengths(name)))
    torch.testing.assert_close(packed, padded, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_router_logits_of_the_routed_tokens_are_in_the_same_order(name: str, flash: None):
    batch = batch_of()
    routed = torch.zeros_like(batch.selected)
    routed[0, ::3], routed[1, :3], routed[3, 5] = True, True, True
    padded, packed = (states(model, batch, routed=routed) for model in (with_padding(name), with_lengths(name)))
    assert packed[1].shape == (2 * int(routed.sum()), 4)
    torch.testing.assert_close(packed[1], padded[1], rtol=0, atol=1e-4)
    torch.testing.assert_close(packed[0], padded[0], rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", [*STATEFUL, *OTHER_LAYERS])
def test_models_with_states_chunks_or_attention_of_their_own_stay_padded(name: str, flash: None):
    assert not packs(with_lengths(name), batch_of())


def test_shared_prefixes_single_rows_and_other_attention_stay_as_they_are(flash: None):
    model = with_lengths("llama")
    shared = collate_branches([Branches([5, 6], [[7, 8], [9]])] * 2, pad_id=0, every_token=True)
    assert not packs(model, shared) and not packs(model, batch_of((9,))) and not packs(ALL["llama"](), batch_of())
    nothing = TokenBatch(batch_of().input_ids, torch.zeros_like(batch_of().selected))
    assert states(ALL["llama"](), nothing)[0].shape == (0, 64)


@pytest.mark.parametrize("name", ["qwen2", "mistral", "gemma3"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_masks_by_blocks_give_a_packed_row_the_same_numbers(name: str, attention: str):
    """Other implementations can compute packed rows too; they don't, since it costs more."""
    model, batch = ALL[name](), batch_of()
    model.set_attn_implementation(attention)
    rows, positions = batch.selected.nonzero(as_tuple=True)
    packed = pack(batch, rows, positions)
    arguments = attention_arguments(model, packed.batch)
    hidden = trunk(model)(input_ids=packed.batch.input_ids, use_cache=False, **arguments).last_hidden_state[
        0, packed.index[rows, positions]
    ]
    expected = states(model, batch)[0]
    torch.testing.assert_close(hidden, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
