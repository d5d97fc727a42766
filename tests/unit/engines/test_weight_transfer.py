"""Weights sent to engines a layer at a time: the bits that arrive, what a transfer holds in memory, and engines that are lost in it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from threading import Timer
from typing import Any

import pytest
import torch
from actors_here import HerePeer
from tiny_models import save_tiny_experts, save_tiny_models
from torch import nn
from transfers import ReceiverPeer, new_sender, send, source_of

from rlhf_core.config import LoraConfig
from rlhf_core.engines.rollout.open import RolloutActor
from rlhf_core.engines.transfer.gloo import pack_layer, unpack_layer
from rlhf_core.engines.transfer.sender import END_SECONDS, Target
from rlhf_core.engines.transfer.source import by_size, layer_of, specs_of
from rlhf_core.models.build import load_language_model
from rlhf_core.models.lora import add_adapters, weight_units
from rlhf_core.models.weights import checkpoint_names

IDS = [5, 6, 7, 8]
MIXED = {
    "half": torch.randn(3, 5).bfloat16(),
    "turned": torch.randn(4, 6).T,
    "scalar": torch.tensor(2.5),
    "byte": torch.tensor([1, 2, 3], dtype=torch.uint8),
    "double": torch.randn(3, dtype=torch.float64),
}


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("model.model.layers.3.mlp.experts.7.w1", ("model", "model", "layers", "3")),
        ("model.model.embed_tokens", None),
        ("", None),
    ],
)
def test_a_layer_is_named_by_the_first_number(name: str, layer: tuple[str, ...] | None):
    assert layer_of(name) == layer


def test_a_packed_layer_gives_back_every_dtype_and_shape():
    layer = by_size(MIXED)
    for name, tensor in unpack_layer(pack_layer(layer), specs_of(layer)).items():
        assert tensor.dtype == MIXED[name].dtype and tensor.shape == MIXED[name].shape and torch.equal(tensor, MIXED[name])


@pytest.fixture(params=["llama", "adapters", "mixtral", "qwen3_moe"])
def model(request, tokenizer, tmp_path: Path) -> nn.Module:
    if request.param in ("mixtral", "qwen3_moe"):
        return load_language_model(save_tiny_experts(tmp_path, tokenizer, request.param))
    found = load_language_model(save_tiny_models(tmp_path, tokenizer)[0])
    if request.param == "adapters":
        add_adapters(found, LoraConfig(rank=2, alpha=4.0, dropout=0.0, target_modules="all-linear", quantize=None), seed=0)
        for name, parameter in found.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.1)
    return found


def merged(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor for unit in weight_units(model) for name, tensor in unit.weights().items()}


@torch.no_grad()
def test_layers_are_the_bits_and_names_of_the_whole_model(model: nn.Module):
    source = source_of(model, lambda weights: checkpoint_names(model, weights))
    layers = [{name: tensor.clone() for name, tensor in layer.items()} for layer in source.layers()]
    expected = checkpoint_names(model, merged(model))
    assert len(layers) == 4  # embedding, two layers, norm and head
    assert sum(map(len, layers)) == len(expected)
    for layer, specs in zip(layers, source.specs, strict=True):
        assert specs == specs_of(layer)
        for name, tensor in layer.items():
            assert torch.equal(tensor, expected[name]) and tensor.dtype == expected[name].dtype
    assert list(source.layers(needed=False)) == [{}, {}, {}, {}]


def actor(folder: Path) -> RolloutActor:
    return RolloutActor(
        0, backend="pytorch", model_path=str(folder), max_length=64, dtype="float32", max_concurrent_sequences=8, threads=1, seed=0,
        trust_remote_code=False, gpu_memory_fraction=0.3,
    )  # fmt: skip


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_pytorchs_engines_get_the_bits_of_the_trainer(tokenizer, tmp_path: Path, family: str):
    folder = save_tiny_models(tmp_path, tokenizer)[0] if family == "llama" else save_tiny_experts(tmp_path, tokenizer, family)
    engines, trainer, sender = [actor(folder), actor(folder)], load_language_model(folder), new_sender()
    targets = [Target(k, HerePeer(engine), "gloo", 1) for k, engine in enumerate(engines)]
    before = engines[0].probe(IDS)
    for version in (1, 2):
        with torch.no_grad():
            for parameter in trainer.parameters():
                parameter.add_(0.02 * torch.randn_like(parameter))
        answers, lost = send(sender, targets, source_of(trainer), version=version, ids=IDS)
        assert not lost and {found for found, _ in answers.values()} == {version}
        expected = trainer.state_dict()
        for k, engine in enumerate(engines):
            assert answers[k][1] == engine.probe(IDS) != before
            assert all(torch.equal(tensor, expected[name]) for name, tensor in engine._engine._model.state_dict().items())


def test_weights_of_another_model_are_refused(tokenizer, tmp_path: Path):
    peer = HerePeer(actor(save_tiny_experts(tmp_path / "a", tokenizer)))
    other = load_language_model(save_tiny_models(tmp_path / "b", tokenizer)[0])
    with pytest.raises(ValueError, match="weights: expected those of the engine's model, got others, or none, for "):
        send(new_sender(), [Target(0, peer, "gloo", 1)], source_of(other), version=1, ids=IDS)


LAYERS, WIDTH = 48, 1 << 20  # 4 MB a layer


@pytest.fixture
def large() -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(WIDTH, 1, bias=False) for _ in range(LAYERS))})


@pytest.fixture
def processes() -> Iterator[list[ReceiverPeer]]:
    started: list[ReceiverPeer] = []
    yield started
    for peer in started:
        peer.close()


def sums(model: nn.Module) -> list[float]:
    return [float(layer.weight.detach().double().sum()) for layer in model["layers"]]


@pytest.mark.parametrize(
    ("number", "timeout", "reason"),
    [
        pytest.param(signal.SIGKILL, 20.0, "a dead process", id="SIGKILL"),
        pytest.param(signal.SIGSTOP, 5.0, "no answer within 5 s", id="SIGSTOP", marks=pytest.mark.long),
    ],
)
def test_an_engine_lost_in_a_transfer_is_named_and_the_next_one_gets_all(
    large: nn.Module, processes, number: int, timeout: float, reason: str
):
    """The other engine gets all weights of the same transfer, and keeps its connection."""
    sender = new_sender(timeout=timeout)
    processes += [ReceiverPeer(), ReceiverPeer(5, number)]
    targets = [Target(k, peer, "gloo", 1) for k, peer in enumerate(processes)]
    began = time.monotonic()
    answers, lost = send(sender, targets, source_of(large), version=1, ids=[])
    assert time.monotonic() - began < 30.0
    assert answers == {0: (1, sums(large))} and lost == {1: reason}
    processes.append(ReceiverPeer())
    assert send(sender, [Target(1, processes[2], "gloo", 1)], source_of(large), version=1, ids=[]) == ({1: (1, sums(large))}, {})
    targets[1] = Target(1, processes[2], "gloo", 1)
    assert send(sender, targets, source_of(large), version=2, ids=[]) == ({k: (2, sums(large)) for k in (0, 1)}, {})


class VanishingPeer(ReceiverPeer):
    """Takes no further layer and closes no connection; a second later its death is known."""

    def __init__(self) -> None:
        super().__init__(5, signal.SIGSTOP)

    def submit(self, method: str, *args: Any) -> Future:
        call, lost = super().submit(method, *args), Future()
        if method != "receive_weights":
            return call
        Timer(1.0, lost.set_exception, [EOFError()]).start()
        return lost


def test_a_dead_engine_whose_connection_stays_open_costs_no_timeout(large: nn.Module, processes):
    processes += [ReceiverPeer(), VanishingPeer()]
    targets, timeout = [Target(k, peer, "gloo", 1) for k, peer in enumerate(processes)], 40.0
    began = time.monotonic()
    answers, lost = send(new_sender(timeout=timeout), targets, source_of(large), version=1, ids=[])
    assert time.monotonic() - began < timeout / 2
    assert answers == {0: (1, sums(large))} and lost == {1: "a dead process"}


@pytest.mark.long
@pytest.mark.parametrize("begun", [True, False], ids=["in the transfer", "before it"])
def test_engines_that_hang_are_waited_for_at_the_same_time(large: nn.Module, processes, begun: bool):
    processes += [ReceiverPeer(5 if begun else None, signal.SIGSTOP) for _ in range(4)]
    for peer in [] if begun else processes:
        os.kill(peer.process.pid, signal.SIGSTOP)
    targets = [Target(k, peer, "gloo", 1) for k, peer in enumerate(processes)]
    began = time.monotonic()
    answers, lost = send(new_sender(timeout=2.0), targets, source_of(large), version=1, ids=[])
    assert time.monotonic() - began < 2.0 + 2 * END_SECONDS < 4 * END_SECONDS
    assert answers == {} and list(lost) == [0, 1, 2, 3]


def test_an_engine_that_is_dead_before_the_transfer_is_named(large: nn.Module, processes):
    processes.append(ReceiverPeer())
    processes[0].close()
    answers, lost = send(new_sender(timeout=3.0), [Target(0, processes[0], "gloo", 1)], source_of(large), version=1, ids=[])
    assert answers == {} and lost == {0: "a dead process"}


def test_a_transfer_holds_two_layers_and_not_the_model(large: nn.Module, processes):
    processes.append(ReceiverPeer())
    targets, sender = [Target(0, processes[0], "gloo", 1)], new_sender()
    send(sender, targets, source_of(large), version=1, ids=[])
    grown = []
    for pid in ("self", processes[0].process.pid):
        Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak counts from here
        grown.append((pid, memory(pid, "VmRSS")))
    send(sender, targets, source_of(large), version=2, ids=[])
    for pid, before in grown:
        assert memory(pid, "VmHWM") - before < LAYERS * 4 * WIDTH / 4  # two of 48 layers, and what else the process touched meanwhile


def memory(pid: int | str, name: str) -> int:
    """Bytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024
