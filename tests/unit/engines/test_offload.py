"""Training engines and frozen models whose states go to the host and back: the same bits, and no memory is left behind."""

from __future__ import annotations

import gc
import warnings
from itertools import product
from pathlib import Path

import pytest
import torch
from tiny_models import PAD, largest_difference, negative_logprob_step, sequences, settings
from whole_matrix import cells

from rlhf_core.config.model import LoraConfig
from rlhf_core.engines.deepspeed.engine import TrainEngine
from rlhf_core.engines.deepspeed.frozen import FrozenModel
from rlhf_core.engines.memory import offload
from rlhf_core.engines.memory.offload import Offloaded, storages_of
from rlhf_core.models.batch import collate_tokens
from rlhf_core.models.build import load_language_model
from rlhf_core.models.forward import PolicyModule
from rlhf_core.models.lora import add_adapters

pytestmark = pytest.mark.usefixtures("world")
BATCHES = [sequences(6, seed=k) for k in range(3)]
LORA = LoraConfig(rank=4, alpha=8.0, dropout=0.0, target_modules="all-linear")
HOW = {
    **{f"zero {stage}, {dtype}": {"zero_stage": stage, "dtype": dtype} for stage in range(4) for dtype in ("float32", "bfloat16")},
    "average": {"zero_stage": 1, "ema_decay": 0.9},
    "lion": {"zero_stage": 2, "optimizer": "lion", "dtype": "bfloat16"},
    "offloaded optimizer": {"zero_stage": 3, "offload_optimizer": True},
}


def engine_of(folder: Path, *, adapters: bool = False, **changes) -> TrainEngine:
    model = load_language_model(folder)
    if adapters:
        add_adapters(model, LORA, seed=0)
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)  # not mapped from the file
    return TrainEngine(PolicyModule(model), settings(**changes))


def step(engine: TrainEngine, batch: list[list[int]]) -> tuple[float, float]:
    return negative_logprob_step(engine, batch, num_loss_tokens=sum(len(s) - 1 for s in batch), microbatch_tokens=40)


def logprobs(engine: TrainEngine) -> torch.Tensor:
    with torch.no_grad():
        return engine(collate_tokens(BATCHES[0], [1] * 6, pad_id=PAD)).logprobs


def bytes_by_storage() -> dict[int, int]:
    """Of all tensors of this process."""
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tensors = [item for item in gc.get_objects() if isinstance(item, torch.Tensor) and item.device.type == "cpu"]
    return {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}


@pytest.mark.parametrize("numbers", [1, 250, 500, 777])
def test_a_storage_comes_back_from_several_pieces_whole(monkeypatch, numbers: int):
    monkeypatch.setattr(offload, "PIECE", 1000)  # bytes, of 250 numbers
    tensor = torch.randn(numbers)
    expected, away = tensor.clone(), Offloaded()
    for _ in range(2):
        away.offload([tensor.untyped_storage()])
        assert tensor.untyped_storage().nbytes() == 0
        away.reload()
        assert torch.equal(tensor, expected)


TURNS = {("zero 0, bfloat16", False), ("zero 1, float32", True), ("zero 2, bfloat16", False), ("zero 3, float32", True)}
TURNS |= {("average", False), ("lion", True), ("offloaded optimizer", False)}


@pytest.mark.parametrize(("how", "adapters"), cells(product(HOW, [False, True]), TURNS))
def test_training_with_turns_has_the_bits_of_training_without(sft_folder: Path, how: str, adapters: bool):
    turning = engine_of(sft_folder, adapters=adapters, **HOW[how])
    undisturbed = engine_of(sft_folder, adapters=adapters, **HOW[how])
    for batch in BATCHES:
        turning.keep("nothing")
        turning.keep("all")
        assert step(turning, batch) == step(undisturbed, batch)
        turning.keep("weights")
        assert torch.equal(logprobs(turning), logprobs(undisturbed))
        assert largest_difference(turning.state_dict(), undisturbed.state_dict()) == 0
        turning.keep("nothing")
        turning.keep("weights")
        assert largest_difference(turning.state_dict(), undisturbed.state_dict()) == 0
        turning.keep("all")


@pytest.mark.parametrize("how", cells(HOW, ["zero 0, float32", "zero 2, bfloat16", "zero 3, bfloat16", "average", "offloaded optimizer"]))
def test_no_memory_of_an_engine_is_left_when_nothing_stays(sft_folder: Path, how: str):
    """Neither weights nor gradients, master weights, moments and buffers of DeepSpeed; but for tiny things, such as counters."""
    others = bytes_by_storage()
    engine = engine_of(sft_folder, **HOW[how])
    step(engine, BATCHES[0])
    engine.keep("all")
    held = sum(own_bytes(engine, others).values())
    engine.keep("weights")
    kept = sum(own_bytes(engine, others).values())
    engine.keep("nothing")
    left = own_bytes(engine, others)
    assert sum(left.values()) < 0.05 * kept and 0 < kept < 0.5 * held, left
    engine.keep("all")
    step(engine, BATCHES[1])


def own_bytes(engine: TrainEngine, others: dict[int, int]) -> dict[int, int]:
    """Of storages that came with the engine, but for copies on the host."""
    away = [*engine._on_device._weights._away, *engine._on_device._states._away]
    copies = {piece.untyped_storage()._cdata for *_, copy in away for piece in copy}
    return {key: size for key, size in bytes_by_storage().items() if key not in others and key not in copies and size > 64}


@pytest.mark.parametrize("zero_stage", [0, 3])
def test_a_frozen_model_computes_the_same_after_a_stay_on_the_host(sft_folder: Path, zero_stage: int):
    model = FrozenModel(PolicyModule(load_language_model(sft_folder)), dtype="bfloat16", zero_stage=zero_stage, offload=False)
    batch = collate_tokens(BATCHES[0], [1] * 6, pad_id=PAD)

    def computed() -> torch.Tensor:
        with model.in_use() as module, torch.no_grad():
            return module(batch).logprobs

    before = computed()
    model.keep("nothing")
    with pytest.raises(RuntimeError, match="forward: expected weights on the device, got nothing; reload it first"):
        computed()
    model.keep("all")
    assert torch.equal(computed(), before)


def test_what_is_on_the_host_refuses_to_work(sft_folder: Path, tmp_path: Path):
    engine = engine_of(sft_folder, zero_stage=2, ema_decay=0.9)
    engine.keep("weights")
    output = engine(collate_tokens(BATCHES[0], [1] * 6, pad_id=PAD)).logprobs.sum()
    refused = {
        "backward": lambda: engine.backward(output),
        "step": engine.step,
        "saving": lambda: engine.save(tmp_path, "engine"),
        "loading": lambda: engine.load(tmp_path, "engine"),
        "average of the weights": engine.exchange_average,
    }
    for what, call in refused.items():
        with pytest.raises(RuntimeError, match=f"{what}: expected all on the device, got weights"):
            call()
    engine.keep("nothing")
    for call in (lambda: logprobs(engine), engine.state_dict):
        with pytest.raises(RuntimeError, match="expected weights on the device, got nothing"):
            call()


def test_views_of_a_storage_move_together_and_discarded_memory_comes_back_empty():
    whole = torch.arange(12.0)
    part, other = whole[4:8].view(2, 2), torch.ones(3)
    found = storages_of([part, whole, torch.empty(0)], device=torch.device("cpu"))
    assert len(found) == 1
    offloaded = Offloaded()
    offloaded.offload(found.values())
    offloaded.discard([other.untyped_storage()])
    assert whole.untyped_storage().nbytes() == other.untyped_storage().nbytes() == 0
    offloaded.reload()
    assert part.tolist() == [[4.0, 5.0], [6.0, 7.0]] and float(whole.sum()) == 66
    part[0, 0] = 100.0
    assert whole[4] == 100 and other.untyped_storage().nbytes() == 12
