"""A policy with adapters sent to engines: they get A and B, and have the very weights of the policy."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from actors_here import HerePeer
from model_families import FAMILIES
from tiny_models import rl_job, save_tiny_dropout, save_tiny_experts, save_tiny_models
from torch import nn
from transfers import ReceiverPeer, adapters_of, at_an_engine, new_sender, same_bits, send, sent_bytes, source_of, sum_of, whole_weights

from rlhf_core.config import LoraConfig
from rlhf_core.engines.rollout.open import RolloutActor
from rlhf_core.engines.transfer.sender import Target
from rlhf_core.models import lora
from rlhf_core.models.build import load_language_model, save_model
from rlhf_core.models.lora import add_adapters
from rlhf_core.models.weights import checkpoint_names, read_state_dict
from rlhf_core.trainers.rl.rank import TrainerRank

IDS = [5, 6, 7, 8]
RANK = 2
LORA = {"rank": RANK, "alpha": 6.0, "dropout": 0.0, "target_modules": "all-linear"}


def folder_of(family: str, folder: Path, tokenizer) -> Path:
    if family == "gpt2":  # transposed matrices, biases, a tied head
        return save_tiny_dropout(folder, tokenizer, "gpt2")[0]
    return save_tiny_models(folder, tokenizer)[0] if family == "llama" else save_tiny_experts(folder, tokenizer, family)


def adapted(folder: Path, dtype: str = "float32", **changes) -> nn.Module:
    """With adapters that have learned something."""
    model = load_language_model(folder, training_dtype=dtype)
    add_adapters(model, LoraConfig(**LORA | changes), seed=0)
    learn(model, seed=1)
    return model


def learn(model: nn.Module, *, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))


def trained_bytes(model: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "mixtral", "qwen3_moe", "gpt2"])
def test_engines_get_the_bits_of_merged_weights_from_adapters_alone(tokenizer, tmp_path: Path, family: str, dtype: str):
    """The folder is in float32."""
    folder = folder_of(family, tmp_path, tokenizer)
    model = adapted(folder, dtype)
    names = partial(checkpoint_names, model)
    source, merged = adapters_of(model, folder, names), whole_weights(source_of(model, names))
    assert same_bits(at_an_engine(source, folder), merged)
    assert sent_bytes(source) == trained_bytes(model) < sent_bytes(source_of(model, names)) / 3
    learn(model, seed=2)
    assert not same_bits(at_an_engine(source, folder), merged)
    assert same_bits(at_an_engine(source, folder), whole_weights(source_of(model, names)))


@pytest.mark.parametrize("inside", [False, True], ids=["folder's names", "model's names"])
@pytest.mark.parametrize("family", FAMILIES)
def test_engines_of_every_family_get_the_bits_of_merged_weights(tokenizer, tmp_path: Path, family: str, inside: bool):
    made = FAMILIES[family]()
    save_model(made, made.state_dict(), tokenizer, tmp_path)
    model = adapted(tmp_path)

    def names(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {n: t for n, t in weights.items() if n not in model.all_tied_weights_keys} if inside else checkpoint_names(model, weights)

    source = adapters_of(model, tmp_path, names)
    assert same_bits(at_an_engine(source, tmp_path), whole_weights(source_of(model, names)))
    if not inside:  # DeepSeek's routers have buffers of 16 bytes
        assert trained_bytes(model) <= sent_bytes(source) <= trained_bytes(model) + 16


def test_what_is_trained_beside_adapters_is_sent_too(tokenizer, tmp_path: Path):
    folder = folder_of("llama", tmp_path, tokenizer)
    model = adapted(folder)
    model.model.norm.weight.requires_grad_(True)
    model.model.layers[0].self_attn.q_proj.base_layer.weight.requires_grad_(True)
    source = adapters_of(model, folder)
    for seed in (1, 2):  # first while the weights are the folder's
        assert same_bits(at_an_engine(source, folder), whole_weights(source_of(model)))
        learn(model, seed=seed)
    # The first matrix replaces its own A and B, of 16 x 2 numbers each.
    assert sent_bytes(source) == trained_bytes(model) - 4 * 2 * 16 * RANK


def test_only_adapters_of_weights_that_are_sent_whole_are_merged(tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = folder_of("llama", tmp_path, tokenizer)
    model = adapted(folder)
    model.model.norm.weight.requires_grad_(True)
    attention = model.model.layers[1].self_attn
    attention.q_proj.base_layer.weight.requires_grad_(True)
    source, merged = adapters_of(model, folder), []
    assert source.specs
    correct = lora.corrected

    def corrected(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, **how) -> torch.Tensor:
        merged.append(a.data_ptr())
        return correct(weight, a, b, **how)

    monkeypatch.setattr(lora, "corrected", corrected)
    list(source.layers())
    assert merged == [attention.q_proj.lora_A["default"].weight.data_ptr()]


def test_experts_are_sent_whole_where_one_of_their_layer_is_trained(tokenizer, tmp_path: Path):
    """In the folder each expert has a weight of its own."""
    folder = folder_of("qwen3_moe", tmp_path, tokenizer)
    model = adapted(folder)
    model.model.layers[1].mlp.experts.down_proj.requires_grad_(True)
    names = partial(checkpoint_names, model)
    source = adapters_of(model, folder, names)
    for seed in (1, 2):  # first while the weights are the folder's
        assert same_bits(at_an_engine(source, folder), whole_weights(source_of(model, names)))
        learn(model, seed=seed)
    sent = [{spec.name for spec in layer} for layer in source.specs]
    assert not any(".experts." in name for name in sent[1]) and sum(".experts." in name for name in sent[2]) == 3 * 4


def test_layers_of_4_bits_are_sent_whole_and_frozen_weights_are_not(tokenizer, tmp_path: Path):
    folder = folder_of("llama", tmp_path, tokenizer)
    model = adapted(folder, quantize="nf4", target_modules=["q_proj"])
    source = adapters_of(model, folder)
    assert same_bits(at_an_engine(source, folder), whole_weights(source_of(model)))
    assert {spec.name.rsplit(".", 2)[1] for layer in source.specs for spec in layer} == {
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    }


def test_weights_that_the_folder_has_otherwise_are_sent_whole(tokenizer, tmp_path: Path):
    folder = folder_of("llama", tmp_path, tokenizer)
    model = adapted(folder)
    changed = read_state_dict(folder)
    changed["model.layers.1.mlp.up_proj.weight"][3, 4] += 0.1
    changed["model.embed_tokens.weight"][5, 6] += 0.1
    save_model(load_language_model(folder), changed, tokenizer, folder)
    source = adapters_of(model, folder)
    assert same_bits(at_an_engine(source, folder), whole_weights(source_of(model)))
    names = [spec.name for layer in source.specs for spec in layer if not spec.name.endswith((".lora_A", ".lora_B"))]
    assert names == ["model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight"]


def actor(folder: Path) -> RolloutActor:
    return RolloutActor(
        0, backend="pytorch", model_path=str(folder), max_length=64, dtype="float32", max_concurrent_sequences=8, threads=1, seed=0,
        trust_remote_code=False, gpu_memory_fraction=0.3,
    )  # fmt: skip


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_a_rank_sends_adapters_and_pytorchs_engines_compute_what_it_computes(model_folders, tokenizer, tmp_path: Path, family: str):
    """Also what was kept. The engine of qwen3_moe has one tensor for all experts, which is sent whole."""
    folder = folder_of(family, tmp_path, tokenizer)
    overrides = {"rl.algorithm": "grpo", "rl.lora": LORA, "rl.rollout.backend": "pytorch", "rl.rollout.max_lag": 1}
    overrides |= {"rl.kl.placement": "loss", "rl.kl.estimator": "k3"}
    trainer = TrainerRank(0, 1, rl_job(folder, model_folders[1], **overrides), ["policy", "reference"], adapters_alone=True)
    trainer.connect(None)
    engines, model = [actor(folder), actor(folder)], trainer.roles.language_model
    targets = [Target(k, HerePeer(engine), "gloo", 1) for k, engine in enumerate(engines)]
    experts = 4 * sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    expected = trained_bytes(model) + experts
    learn(model, seed=1)
    sent = trainer.send_weights(targets[:1], version=1, ids=IDS)
    assert sent.traffic.nbytes == expected and sent.answers[0][0] == 1
    assert sent.answers[0][1] == pytest.approx(sent.probe, abs=1e-5)
    merged = whole_weights(source_of(model, trainer._engine_names))
    assert same_bits(engines[0]._engine.own_weights(), merged)
    learn(model, seed=2)
    assert trainer.send_weights(targets[1:], version=1, ids=IDS, kept=True).traffic.nbytes == expected
    assert same_bits(engines[1]._engine.own_weights(), merged)
    assert trainer.send_weights(targets, version=2, ids=IDS).traffic.nbytes == 2 * expected
    for engine in engines:
        assert same_bits(engine._engine.own_weights(), whole_weights(source_of(model, trainer._engine_names)))


@pytest.fixture
def processes() -> Iterator[list[ReceiverPeer]]:
    started: list[ReceiverPeer] = []
    yield started
    for peer in started:
        peer.close()


def test_an_engine_that_replaces_a_lost_one_gets_adapters_too(tokenizer, tmp_path: Path, processes):
    folder = folder_of("llama", tmp_path, tokenizer)
    model, sender = adapted(folder), new_sender()
    source = adapters_of(model, folder)

    def expected(version: int) -> tuple[int, list[float]]:
        return version, [sum_of(layer) for layer in source_of(model).layers()]

    processes += [ReceiverPeer(folder=folder), ReceiverPeer(2, folder=folder)]
    targets = [Target(k, peer, "gloo", 1) for k, peer in enumerate(processes)]
    assert send(sender, targets, source, version=1, ids=[]) == ({0: expected(1)}, {1: "a dead process"})
    processes.append(ReceiverPeer(folder=folder))
    targets[1] = Target(1, processes[2], "gloo", 1)
    assert send(sender, targets[1:], source, version=1, ids=[]) == ({1: expected(1)}, {})
    learn(model, seed=2)
    assert send(sender, targets, source, version=2, ids=[]) == ({0: expected(2), 1: expected(2)}, {})
