"""Gradient checkpointing: the same numbers from fewer bytes, in training and in evaluation mode."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tiny_models import lively
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
)

from rlhf_core.config import LoraConfig
from rlhf_core.models.batch import Branches, collate_branches, collate_tokens
from rlhf_core.models.build import disable_dropout
from rlhf_core.models.forward import CPU, GENERAL, PolicyModule, ScalarModule
from rlhf_core.models.lora import add_adapters
from rlhf_core.models.recompute import recompute_layers, recomputes_layers

HIDDEN, LAYERS = 16, 6
SHAPE = {"hidden_size": HIDDEN, "intermediate_size": 32, "num_hidden_layers": LAYERS, "num_attention_heads": 2, "num_key_value_heads": 2}
LLAMA = LlamaConfig(vocab_size=60, num_labels=1, pad_token_id=0, **SHAPE)
LORA = LoraConfig(rank=2, alpha=4.0, dropout=0.0, target_modules="all-linear")
GENERATOR = torch.Generator().manual_seed(5)
SEQUENCES = [torch.randint(1, 60, (n,), generator=GENERATOR).tolist() for n in (17, 23, 31)]
BATCH = collate_tokens(SEQUENCES, [1, 5, 9], pad_id=0)
SHARED = collate_branches([Branches(SEQUENCES[0], [ids[:9] for ids in SEQUENCES])], pad_id=0, every_token=True)


def llama() -> PreTrainedModel:
    return LlamaForCausalLM(LLAMA)


def adapted() -> PreTrainedModel:
    model = llama()
    add_adapters(model, LORA, seed=0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    return model


def gpt2() -> PreTrainedModel:
    shape = {"n_embd": HIDDEN, "n_layer": LAYERS, "n_head": 2, "n_positions": 64}
    return GPT2LMHeadModel(GPT2Config(vocab_size=60, resid_pdrop=0.3, embd_pdrop=0.3, attn_pdrop=0.3, **shape))


def mixtral() -> PreTrainedModel:
    return MixtralForCausalLM(MixtralConfig(vocab_size=60, num_local_experts=4, **SHAPE))


def made(kind: Callable[[], PreTrainedModel], *, recompute: bool) -> nn.Module:
    """In float64, which the general backend alone computes; experts can't."""
    torch.manual_seed(0)
    model = lively(kind())
    model = model if kind is mixtral else model.double()
    module = PolicyModule(model) if model.get_output_embeddings() is not None else ScalarModule(model)
    if recompute:
        recompute_layers(module, "gradient_checkpointing")
    return module


def scores() -> PreTrainedModel:
    return LlamaForSequenceClassification(LLAMA)


def output(module: nn.Module, batch=BATCH) -> torch.Tensor:
    return module(batch) if isinstance(module, ScalarModule) else module(batch, with_entropy=True).logprobs


def gradients(module: nn.Module, batch=BATCH) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    torch.manual_seed(1)  # for dropout
    loss = output(module, batch).square().mean()
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("training", [True, False], ids=["training mode", "evaluation mode"])
@pytest.mark.parametrize("kind", [llama, adapted, gpt2, mixtral, scores], ids=lambda kind: kind.__name__)
def test_loss_and_gradients_are_those_without_it(kind: Callable[[], PreTrainedModel], training: bool):
    plain, recomputed = (made(kind, recompute=recompute) for recompute in (False, True))
    for module in (plain, recomputed):
        module.train()
        if not training:
            disable_dropout(module)
    (loss, expected), (found_loss, found) = gradients(plain), gradients(recomputed)
    assert float(found_loss) == pytest.approx(float(loss), rel=1e-12)
    assert found.keys() == expected.keys() and len(found) >= 4 * LAYERS
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-6, atol=1e-6 * float(gradient.abs().max()), msg=name)


def test_a_shared_prefix_is_recomputed_with_its_mask():
    plain, recomputed = (made(llama, recompute=recompute) for recompute in (False, True))
    (loss, expected), (found_loss, found) = gradients(plain, SHARED), gradients(recomputed, SHARED)
    assert float(found_loss) == pytest.approx(float(loss), rel=1e-12)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-6, atol=1e-6 * float(gradient.abs().max()), msg=name)


def saved_bytes(module: nn.Module) -> int:
    """Of the tensors that a forward pass keeps for the backward pass, each storage once, parameters left out."""
    own = {p.untyped_storage().data_ptr() for p in module.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = output(module)
    assert result.requires_grad  # and so all of it is alive
    return sum(kept.values())


@pytest.mark.parametrize("kind", [llama, adapted, scores], ids=lambda kind: kind.__name__)
def test_a_layer_keeps_its_input_alone(kind: Callable[[], PreTrainedModel]):
    """Each of the layers one row of HIDDEN numbers of 8 bytes for each token, of padding too. Around the layers: the embedding's ids, the
    last norm and the head with its hidden states, which are less than four such inputs.
    """
    plain, recomputed = (saved_bytes(made(kind, recompute=recompute)) for recompute in (False, True))
    one = 8 * HIDDEN * BATCH.input_ids.numel()
    assert LAYERS * one <= recomputed <= (LAYERS + 6) * one
    assert recomputed < plain / 5


def test_the_probabilities_of_the_vocabulary_are_not_kept():
    module = made(llama, recompute=True)
    assert not module.model.get_output_embeddings().keeps_probabilities
    assert made(llama, recompute=False).model.get_output_embeddings().keeps_probabilities


def test_the_models_own_layers_compute():
    torch.manual_seed(0)
    module = PolicyModule(llama())
    assert module.backend is CPU and not recomputes_layers(module)
    recompute_layers(module, "gradient_checkpointing")
    assert module.backend is GENERAL and recomputes_layers(module)


def test_without_gradients_a_layer_runs_once():
    module = made(llama, recompute=True)
    seen = []
    for layer in module.model.model.layers:
        layer.self_attn.register_forward_hook(lambda *_: seen.append(1))
    with torch.no_grad():
        output(module)
    assert len(seen) == LAYERS
    output(module).sum().backward()
    assert len(seen) == 3 * LAYERS


def test_a_model_without_such_layers_is_refused():
    with pytest.raises(ValueError, match=r"training.gradient_checkpointing: expected false for a model .* got true for Linear"):
        recompute_layers(nn.Linear(2, 2), "training.gradient_checkpointing")
