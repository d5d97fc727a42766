"""Only what has changed of the weights is sent: the same bits arrive as if all were sent, whichever engine gets them and after any loss."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from actors_here import HerePeer
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import save_tiny_dropout, save_tiny_experts, save_tiny_models
from torch import nn
from transfers import ReceiverPeer, adapters_of, counted, new_sender, same_bits, source_of, sum_of

from rlhf_core.config import LoraConfig
from rlhf_core.engines.rollout.open import RolloutActor
from rlhf_core.engines.transfer import gloo
from rlhf_core.engines.transfer.changes import ROW, SentLayers, apply_changes, changed_numbers, digest, pack_changes
from rlhf_core.engines.transfer.sender import Target
from rlhf_core.models.build import load_language_model
from rlhf_core.models.lora import add_adapters

IDS = [5, 6, 7, 8]


def flat_of(numbers: list[int]) -> torch.Tensor:
    """Bytes of 16-bit numbers."""
    return torch.tensor(numbers, dtype=torch.int16).view(torch.uint8)


@given(size=st.integers(1, 3 * ROW), seed=st.integers(0, 2**31 - 1), share=st.sampled_from([0.0, 0.001, 0.05, 0.5, 1.0]))
@settings(max_examples=100, deadline=None)
def test_changes_of_any_positions_give_the_new_bits(size: int, seed: int, share: float):
    generator = torch.Generator().manual_seed(seed)
    old = torch.randint(-(2**15), 2**15, (size,), generator=generator).to(torch.int16)
    new = torch.where(torch.rand(old.shape, generator=generator) < share, old ^ 1, old)
    differs = changed_numbers(old.view(torch.uint8), new.view(torch.uint8))
    assert differs.tolist() == (old != new).tolist()
    changes = pack_changes(new.view(torch.uint8), differs)
    assert len(changes) == 2 * -(-size // ROW) + 3 * int(differs.sum())
    assert apply_changes(old.view(torch.uint8), changes) and torch.equal(old, new)


def test_a_layer_is_sent_whole_where_its_changes_have_more_than_a_quarter_of_its_bytes():
    """Two rows of 256 numbers, 1024 bytes: 4 bytes of counts and 84 changes of 3 bytes make 256, and 85 make 259. A sign of zero counts."""
    old = torch.zeros(512, dtype=torch.bfloat16)
    for count, pays in ((84, True), (85, False)):
        new = old.clone()
        new[:count] = -0.0
        layers = SentLayers()
        layers.renew(0, old.view(torch.uint8))
        sent = layers.renew(0, new.view(torch.uint8))
        assert (sent.changes is not None and len(sent.changes) == 256) is pays and layers.changed == count


@pytest.mark.parametrize("damage", ["shorter", "longer", "count", "place", "negative"])
def test_bytes_that_are_no_changes_of_this_layer_are_refused(damage: str):
    """A row of 8 numbers, of which number 2 has changed: a count of 2 bytes, a value of 2 and a place of 1."""
    old, new = flat_of([1, 2, 3, 4, 5, 6, 7, 8]), flat_of([1, 2, 9, 4, 5, 6, 7, 8])
    changes = pack_changes(new, changed_numbers(old, new))
    assert changes.tolist() == [1, 0, 9, 0, 2]
    bad = {
        "shorter": changes[:-1],
        "longer": torch.cat([changes, changes[:1]]),
        "count": torch.tensor([2, 0, 9, 0, 2], dtype=torch.uint8),
        "place": torch.tensor([1, 0, 9, 0, 200], dtype=torch.uint8),
        "negative": torch.tensor([0, 255, 9, 0, 2], dtype=torch.uint8),
    }[damage]
    assert not apply_changes(old, bad) and old.view(torch.int16).tolist() == [1, 2, 3, 4, 5, 6, 7, 8]


def test_a_layer_keeps_its_version_until_its_bytes_change():
    layers = SentLayers()
    first = layers.renew(0, flat_of([1, 2, 3, 4] * 4))
    same = layers.renew(0, flat_of([1, 2, 3, 4] * 4))
    other = layers.renew(0, flat_of([1, 2, 3, 4] * 3 + [1, 2, 3, 5]))
    assert first.changes is None and (same.version, same.before, len(same.changes)) == (first.version, first.version, 0)
    assert other.version != other.before == first.version and (layers.numbers, layers.changed) == (32, 1)
    assert layers.renew(0, flat_of([1, 2, 3, 4])).changes is None  # other tensors


def test_places_of_equal_values_count_in_the_digest():
    assert digest(flat_of([1, 2, 3, 4])) != digest(flat_of([2, 1, 3, 4]))
    assert 0 <= digest(flat_of([7])) < 2**63


def actor(folder: Path) -> RolloutActor:
    return RolloutActor(
        0, backend="pytorch", model_path=str(folder), max_length=64, dtype="bfloat16", max_concurrent_sequences=8, threads=1, seed=0,
        trust_remote_code=False, gpu_memory_fraction=0.3,
    )  # fmt: skip


class Trained:
    """A bfloat16 model with float32 masters, of which an update moves each number by the learning rate."""

    def __init__(self, model: nn.Module, *, learning_rate: float):
        self.model, self._learning_rate = model, learning_rate
        self._masters = [p.detach().float() for p in model.parameters()]
        self._generator = torch.Generator().manual_seed(0)

    @torch.no_grad()
    def update(self) -> None:
        for parameter, master in zip(self.model.parameters(), self._masters, strict=True):
            master.add_(self._learning_rate * torch.randn(master.shape, generator=self._generator))
            parameter.copy_(master)


def folder_of(family: str, folder: Path, tokenizer) -> Path:
    if family == "gpt2":  # a tied head
        return save_tiny_dropout(folder, tokenizer, "gpt2")[0]
    return save_tiny_models(folder, tokenizer)[0] if family == "llama" else save_tiny_experts(folder, tokenizer, family)


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3_moe"])
def test_twenty_updates_reach_pytorchs_engines_bit_for_bit(tokenizer, tmp_path: Path, family: str):
    """The second engine is replaced after ten updates, and gets all weights once; the first keeps getting what changed."""
    folder = folder_of(family, tmp_path, tokenizer)
    model = load_language_model(folder, training_dtype="bfloat16").to(torch.bfloat16)
    trained, sender = Trained(model, learning_rate=1e-5), new_sender(send_changes=True)
    own = {name: tensor for name, tensor in model.state_dict().items() if name not in model.all_tied_weights_keys}
    source = source_of(model, lambda weights: {name: t for name, t in weights.items() if name not in model.all_tied_weights_keys})
    engines = [actor(folder), actor(folder)]
    targets = [Target(k, HerePeer(engine), "gloo", 1) for k, engine in enumerate(engines)]
    whole = sum(spec.nbytes for layer in source.specs for spec in layer)
    for version in range(1, 21):
        trained.update()
        if version == 11:
            engines[1] = actor(folder)
            targets[1] = Target(1, HerePeer(engines[1]), "gloo", 1)
        answers, lost, traffic = counted(sender, targets, source, version=version, ids=IDS)
        assert not lost and {found for found, _ in answers.values()} == {version} and not traffic.resent
        for engine in engines:
            assert same_bits(engine._engine.own_weights(), own)
        first, replaced = version == 1, version == 11
        assert traffic.nbytes < 0.3 * whole or first or replaced
        assert traffic.nbytes >= 2 * whole if first else traffic.nbytes < 1.15 * whole
        assert first or 0 < traffic.changed < 0.1 * traffic.numbers


@pytest.fixture
def processes() -> Iterator[list[ReceiverPeer]]:
    started: list[ReceiverPeer] = []
    yield started
    for peer in started:
        peer.close()


def two_layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(4096, 8, bias=False) for _ in range(4))}).to(torch.bfloat16)


def sums(model: nn.Module) -> list[float]:
    return [sum_of({name: p.detach()}) for name, p in model.named_parameters()]


def test_an_engine_killed_in_a_transfer_is_replaced_by_one_that_gets_all(processes):
    """The one that stays gets what changed, also of layers that the lost one didn't get."""
    trained, sender = Trained(two_layers(), learning_rate=1e-6), new_sender(send_changes=True)
    source, whole = source_of(trained.model), 4 * 2 * 8 * 4096
    processes += [ReceiverPeer(), ReceiverPeer(2, after=2)]
    targets = [Target(k, peer, "gloo", 1) for k, peer in enumerate(processes)]
    assert counted(sender, targets, source, version=1, ids=IDS)[:2] == ({k: (1, sums(trained.model)) for k in (0, 1)}, {})
    trained.update()
    answers, lost, traffic = counted(sender, targets, source, version=2, ids=IDS)
    assert answers == {0: (2, sums(trained.model))} and lost == {1: "a dead process"} and traffic.nbytes < 0.3 * whole
    processes.append(ReceiverPeer())
    targets[1] = Target(1, processes[2], "gloo", 1)
    answers, lost, traffic = counted(sender, targets[1:], source, version=2, ids=IDS)
    assert (answers, lost) == ({1: (2, sums(trained.model))}, {}) and traffic.nbytes == whole + 4 * gloo.HEADER_BYTES
    trained.update()
    answers, lost, traffic = counted(sender, targets, source, version=3, ids=IDS)
    assert (answers, lost) == ({k: (3, sums(trained.model)) for k in (0, 1)}, {}) and traffic.nbytes < 0.3 * whole


@pytest.mark.parametrize("damage", ["value", "place", "base"])
def test_a_damaged_layer_is_noticed_by_name_and_sent_whole(processes, damage: str):
    """On the way a bit of the changes flips, or in the engine one of the bytes that they are applied to."""
    trained, sender = Trained(two_layers(), learning_rate=1e-6), new_sender(send_changes=True)
    source = source_of(trained.model)
    processes.append(ReceiverPeer(damage=(2, damage)))
    targets = [Target(0, processes[0], "gloo", 1)]
    counted(sender, targets, source, version=1, ids=IDS)
    for version in (2, 3):
        trained.update()
        answers, lost, traffic = counted(sender, targets, source, version=version, ids=IDS)
        assert (answers, lost) == ({0: (version, sums(trained.model))}, {})
        assert traffic.resent == (["engine 0: layer of layers.2.weight"] if version == 2 else [])


def test_places_behind_the_last_number_change_nothing():
    old = torch.zeros(2 * 10, dtype=torch.uint8)
    new = old.clone()
    new[[0, 18]] = 1
    changes = pack_changes(new, changed_numbers(old, new))
    assert apply_changes(old.clone(), changes)
    changes[-2] = 200  # of the first of two
    assert not apply_changes(old, changes) and not old.any()


class DividedPeer:
    """An engine over several processes."""

    key = "divided"

    def __init__(self, workers: list[ReceiverPeer]):
        self._workers, self._thread = workers, ThreadPoolExecutor(1)

    def submit(self, method: str, *args: Any) -> Future:
        calls = [worker.submit(method, *args) for worker in self._workers]
        return self._thread.submit(lambda: [call.result() for call in calls])

    def answer(self, call: Future, timeout: float) -> Any:
        first, *others = call.result(timeout)
        assert others == [first] * len(others)
        return first


def test_all_processes_of_an_engine_get_a_layer_again_that_is_damaged_in_one(processes):
    trained, sender = Trained(two_layers(), learning_rate=1e-6), new_sender(send_changes=True)
    source, whole = source_of(trained.model), 4 * 2 * 8 * 4096
    processes += [ReceiverPeer(), ReceiverPeer(worker=1, damage=(1, "base"))]
    targets = [Target(0, DividedPeer(processes), "gloo", 2)]
    for version in (1, 2, 3):
        trained.update()
        answers, lost, traffic = counted(sender, targets, source, version=version, ids=IDS)
        assert (answers, lost) == ({0: (version, sums(trained.model))}, {})
        assert traffic.resent == (["engine 0: layer of layers.1.weight"] if version == 2 else [])
        assert traffic.nbytes < 0.55 * whole or version == 1


def test_layers_that_no_update_changes_cost_a_header(processes):
    model, sender = two_layers(), new_sender(send_changes=True)
    processes.append(ReceiverPeer())
    targets = [Target(0, processes[0], "gloo", 1)]
    for version in (1, 2):
        answers, _, traffic = counted(sender, targets, source_of(model), version=version, ids=IDS)
        assert answers == {0: (version, sums(model))}
    assert traffic.nbytes == 4 * gloo.HEADER_BYTES and (traffic.numbers, traffic.changed) == (4 * 8 * 4096, 0)


def test_adapters_are_sent_with_their_changes(tokenizer, tmp_path: Path, processes):
    folder = save_tiny_models(tmp_path, tokenizer)[0]
    model = load_language_model(folder, training_dtype="bfloat16")
    add_adapters(model, LoraConfig(rank=2, alpha=6.0, dropout=0.0, target_modules="all-linear"), seed=0)
    model.to(torch.bfloat16)
    processes.append(ReceiverPeer(folder=folder))
    targets, sender, source = [Target(0, processes[0], "gloo", 1)], new_sender(send_changes=True), adapters_of(model, folder)
    sizes = []
    for version in range(1, 6):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.view(-1)[version] += 0.25
        answers, _, traffic = counted(sender, targets, source, version=version, ids=IDS)
        assert answers == {0: (version, [sum_of(layer) for layer in source_of(model).layers()])}
        sizes.append(traffic.nbytes)
    assert max(sizes[1:]) < sizes[0] / 4
