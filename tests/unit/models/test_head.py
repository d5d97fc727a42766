"""Log-probabilities in pieces of rows against those of all logits at once."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from rlhf_core.algorithms.logprobs import token_entropy, token_logprobs
from rlhf_core.models import head as heads
from rlhf_core.models.head import PLAIN, LogitRule, LogprobHead, head_logprobs, use_logprob_head

ROWS, WIDTH, VOCABULARY = 11, 6, 9


@pytest.fixture(params=[4, 11, 256], ids="pieces of {}".format)
def piece_rows(request, monkeypatch) -> int:
    rows = request.param
    monkeypatch.setattr(heads, "pieces", lambda count, weight, at_most=None: [slice(i, i + rows) for i in range(0, count, rows)])
    return rows


@pytest.fixture(params=[True, False], ids=["kept", "computed again"])
def kept(request, monkeypatch) -> bool:
    """Whether the backward pass finds the probabilities."""
    monkeypatch.setattr(heads, "KEPT_BYTES", 1 << 30 if request.param else 0)
    return request.param


def made(
    dtype: torch.dtype = torch.float64, *, rows: int = ROWS, vocabulary: int = VOCABULARY
) -> tuple[nn.Linear, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    head = nn.Linear(WIDTH, vocabulary, bias=False, dtype=dtype)
    with torch.no_grad():
        head.weight.copy_(torch.randn(vocabulary, WIDTH, generator=generator))
    hidden = torch.randn(rows, WIDTH, generator=generator).to(dtype).requires_grad_()
    return head, hidden, torch.randint(vocabulary, (rows,), generator=generator)


RULES = pytest.mark.parametrize("rule", [PLAIN, LogitRule(0.7), LogitRule(cap=2.0), LogitRule(1.5, 2.0)], ids=str)


@RULES
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_they_and_the_entropy_are_those_of_all_logits(piece_rows, kept, temperature: float, rule: LogitRule):
    head, hidden, ids = made()
    logprobs, entropy = head_logprobs(head.weight, hidden, ids, temperature=temperature, with_entropy=True, rule=rule)
    logits = head(hidden) * rule.scale
    logits = logits if rule.cap is None else rule.cap * torch.tanh(logits / rule.cap)
    torch.testing.assert_close(logprobs, token_logprobs(logits, ids, temperature=temperature))
    torch.testing.assert_close(entropy, token_entropy(logits, temperature=temperature).detach())
    assert logprobs.requires_grad and not entropy.requires_grad
    with torch.no_grad():
        alone, nothing = head_logprobs(head.weight, hidden, ids, temperature=temperature, with_entropy=False, rule=rule)
    assert torch.equal(alone, logprobs) and nothing is None


@RULES
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_the_gradient_is_the_functions(piece_rows, kept, temperature: float, rule: LogitRule):
    head, hidden, ids = made()

    def logprobs(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return head_logprobs(head.weight, hidden, ids, temperature=temperature, with_entropy=True, rule=rule)[0]

    assert torch.autograd.gradcheck(logprobs, (hidden, head.weight))


def test_a_bfloat16_model_gets_float32_numbers_and_bfloat16_gradients(piece_rows, kept):
    head, hidden, ids = made(torch.bfloat16)
    logprobs, entropy = head_logprobs(head.weight, hidden, ids, temperature=1.0, with_entropy=True)
    assert logprobs.dtype == entropy.dtype == torch.float32
    ours = torch.autograd.grad(logprobs.sum(), (hidden, head.weight))
    theirs = torch.autograd.grad(token_logprobs(head(hidden), ids, temperature=1.0).sum(), (hidden, head.weight))
    for mine, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, expected, rtol=2e-2, atol=2e-2)


def test_a_frozen_heads_gradient_is_not_computed(piece_rows, kept):
    head, hidden, ids = made()
    gradients, products = [], []
    for frozen in (False, True):
        head.requires_grad_(not frozen)
        hidden.grad = None
        with torch.profiler.profile() as profiler:
            head_logprobs(head.weight, hidden, ids, temperature=1.0, with_entropy=False)[0].sum().backward()
        gradients.append(hidden.grad)
        products.append(sum(event.count for event in profiler.key_averages() if event.key == "aten::mm"))
    assert torch.equal(*gradients) and products[0] - products[1] == len(range(0, ROWS, piece_rows))


class LargestTensor(TorchDispatchMode):
    """The most elements that anything computed has had."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


def test_all_logits_are_never_there_where_they_are_too_many_to_keep(piece_rows, kept):
    head, hidden, ids = made(rows=64, vocabulary=100)
    with LargestTensor() as largest:
        logprobs, _ = head_logprobs(head.weight, hidden, ids, temperature=0.6, with_entropy=True)
        torch.autograd.backward(logprobs, torch.ones(64, dtype=torch.float64))
    rows = 64 if kept else max(WIDTH, min(64, piece_rows))  # the weight has as many elements as WIDTH rows of logits
    assert largest.elements == rows * 100


class Adapted(nn.Linear):
    """A head that does more than its weight says."""


@pytest.mark.parametrize(
    ("head", "can"),
    [(nn.Linear(16, 30, bias=False), True), (nn.Linear(16, 30), False), (Adapted(16, 30, bias=False), False)],
)
def test_only_a_head_that_is_a_plain_weight_becomes_a_logprob_head(head: nn.Linear, can: bool):
    model = tiny_llama()
    model.lm_head = head
    use_logprob_head(model)
    assert isinstance(model.get_output_embeddings(), LogprobHead) == can
    assert model.lm_head.weight is head.weight


def test_a_tied_head_stays_tied_and_all_names_stay():
    model = tiny_llama(tie_word_embeddings=True)
    names = list(model.state_dict())
    use_logprob_head(model)
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert list(model.state_dict()) == names


def tiny_llama(**changes) -> LlamaForCausalLM:
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=30, **shape, **changes))


@pytest.mark.parametrize(("vocabulary", "rows"), [(32_000, 1024), (100_000, 671), (152_000, 512)])
def test_pieces_have_512_to_1024_rows_and_256_mib_between_these_limits(vocabulary: int, rows: int):
    """2^28 / (4 * 32,000) = 2,097; 2^28 / (4 * 100,000) = 671; 2^28 / (4 * 152,000) = 441."""
    assert heads.rows_at_a_time(vocabulary) == rows
