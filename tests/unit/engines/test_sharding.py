"""Offloading, gradient checkpointing and the head in pieces with DeepSpeed, and frozen models that are sharded or on the host."""

from __future__ import annotations

import copy
from itertools import product
from pathlib import Path

import pytest
import torch
from tiny_models import (
    PAD,
    assert_weights_agree,
    largest_difference,
    negative_logprob_step,
    policy_engine,
    rl_job,
    scalar_engine,
    sequences,
    tensor_bytes,
)
from transfers import at_an_engine, same_bits, whole_weights
from whole_matrix import cells

from rlhf_core.config import LoraConfig
from rlhf_core.engines.deepspeed.engine import TrainEngine
from rlhf_core.engines.deepspeed.frozen import FrozenModel
from rlhf_core.engines.transfer.adapter_source import AdapterSource
from rlhf_core.engines.transfer.source import PolicySource
from rlhf_core.models import head as heads
from rlhf_core.models.batch import collate_tokens
from rlhf_core.models.build import load_language_model, load_scalar_model, save_model
from rlhf_core.models.cpu import packed
from rlhf_core.models.forward import PolicyModule, ScalarModule
from rlhf_core.models.lora import add_adapters
from rlhf_core.models.recompute import recomputes_layers
from rlhf_core.models.weights import frozen
from rlhf_core.trainers.rl.rank import TrainerRank
from rlhf_core.types import Sequences
from tests.tiny_models import settings

pytestmark = pytest.mark.usefixtures("world")
BATCHES = [sequences(6, seed=k) for k in range(3)]
LORA = LoraConfig(rank=2, alpha=4.0, dropout=0.0, target_modules="all-linear")


def train(engine: TrainEngine, batches: list[list[list[int]]] = BATCHES) -> list[tuple[float, float]]:
    return [negative_logprob_step(engine, b, num_loss_tokens=sum(len(s) - 1 for s in b), microbatch_tokens=40) for b in batches]


def assert_alike(steps: list[tuple[float, float]], expected: list[tuple[float, float]]) -> None:
    for (loss, norm), (expected_loss, expected_norm) in zip(steps, expected, strict=True):
        assert loss == pytest.approx(expected_loss, rel=1e-5) and norm == pytest.approx(expected_norm, rel=1e-4)


OFFLOADED = [
    *({"zero_stage": stage, "offload_optimizer": True} for stage in (1, 2, 3)),
    {"zero_stage": 3, "offload_parameters": True},
    {"zero_stage": 3, "offload_optimizer": True, "offload_parameters": True},
]


@pytest.mark.parametrize("changes", OFFLOADED, ids=lambda c: "-".join(f"{k}={v}" for k, v in c.items()))
def test_offloading_changes_no_weight_and_a_checkpoint_holds_what_is_on_the_host(sft_folder: Path, tmp_path: Path, changes: dict):
    plain, offloaded, resumed = policy_engine(sft_folder), *(policy_engine(sft_folder, **changes) for _ in range(2))
    expected = train(plain)
    first = train(offloaded, BATCHES[:2])
    offloaded.save(tmp_path, "engine")
    last = train(offloaded, BATCHES[2:])
    assert_alike(first + last, expected)
    assert_weights_agree(offloaded.state_dict(), plain.state_dict())
    resumed.load(tmp_path, "engine")
    assert train(resumed, BATCHES[2:]) == last
    assert largest_difference(resumed.state_dict(), offloaded.state_dict()) == 0


@pytest.mark.parametrize("changes", OFFLOADED[2:], ids=lambda c: "-".join(f"{k}={v}" for k, v in c.items()))
def test_offloading_learns_in_bfloat16(sft_folder: Path, changes: dict):
    engine = policy_engine(sft_folder, dtype="bfloat16", learning_rate=1e-2, schedule=lambda step: 1.0, **changes)
    losses = [loss for loss, _ in train(engine, [BATCHES[0]] * 8)]
    assert losses[-1] < losses[0] - 0.5


def test_discarded_gradients_leave_no_trace_on_the_host(sft_folder: Path):
    changes = {"zero_stage": 3, "offload_optimizer": True, "offload_parameters": True}
    disturbed, undisturbed = (policy_engine(sft_folder, **changes) for _ in range(2))
    for batch in BATCHES:
        disturbed.backward(disturbed(collate_tokens(batch[:2], [1, 1], pad_id=PAD)).logprobs.sum())
        disturbed.discard()
        assert train(disturbed, [batch]) == train(undisturbed, [batch])
    assert largest_difference(disturbed.state_dict(), undisturbed.state_dict()) == 0


@pytest.mark.parametrize("disable_dropout", [False, True])
@pytest.mark.parametrize("zero_stage", [0, 2, 3])
def test_gradient_checkpointing_changes_no_weight(sft_folder: Path, zero_stage: int, disable_dropout: bool):
    plain = policy_engine(sft_folder)
    recomputed = policy_engine(sft_folder, zero_stage=zero_stage, gradient_checkpointing=True, disable_dropout=disable_dropout)
    assert recomputes_layers(recomputed.module)
    assert_alike(train(recomputed), train(plain))
    assert_weights_agree(recomputed.state_dict(), plain.state_dict())


def adapted_engine(folder: Path, **changes) -> TrainEngine:
    model = load_language_model(folder)
    add_adapters(model, LORA, seed=0)
    return TrainEngine(PolicyModule(model), settings(**changes))


@pytest.mark.parametrize("changes", [{"gradient_checkpointing": True}, {"offload_optimizer": True, "offload_parameters": True}], ids=str)
def test_zero_3_trains_adapters_alike(sft_folder: Path, changes: dict):
    plain, sharded = adapted_engine(sft_folder), adapted_engine(sft_folder, zero_stage=3, **changes)
    assert_alike(train(sharded), train(plain))
    assert_weights_agree(sharded.state_dict(), plain.state_dict())


def test_zero_3_gathers_what_is_sent_whole_beside_adapters(sft_folder: Path, tokenizer, tmp_path: Path):
    """The engines' folder has other numbers in one matrix."""
    changed = model_weights(sft_folder)
    changed["model.layers.1.mlp.up_proj.weight"] += 0.1
    save_model(load_language_model(sft_folder), changed, tokenizer, tmp_path)
    engine = adapted_engine(sft_folder, zero_stage=3)
    train(engine)

    def names(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return weights

    source = AdapterSource(engine.module, names, tmp_path)
    assert same_bits(at_an_engine(source, tmp_path), whole_weights(PolicySource(engine.module, names)))
    whole = [spec.name for layer in source.specs for spec in layer if not spec.name.endswith((".lora_A", ".lora_B"))]
    assert whole == ["model.layers.1.mlp.up_proj.weight"]


def test_zero_3_trains_a_scalar_head_with_gradient_checkpointing(reward_folder: Path):
    def scores_step(engine: TrainEngine, ids: list[list[int]]) -> float:
        loss = engine(collate_tokens(ids, [len(s) - 1 for s in ids], pad_id=PAD)).square().mean()
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    plain, sharded = scalar_engine(reward_folder), scalar_engine(reward_folder, zero_stage=3, gradient_checkpointing=True)
    for batch in BATCHES:
        assert scores_step(sharded, batch) == pytest.approx(scores_step(plain, batch), rel=1e-4)
    assert_weights_agree(sharded.state_dict(), plain.state_dict())


@pytest.mark.parametrize("kept", [True, False])
def test_zero_3_projects_the_vocabulary_in_pieces(sft_folder: Path, monkeypatch: pytest.MonkeyPatch, kept: bool):
    """Of 16 rows: no tensor has as many numbers as the logits of all rows, unless the probabilities are kept."""
    for name, value in (("MOST_ROWS", 16), ("LEAST_ROWS", 16), ("CACHED_BYTES", 0), ("KEPT_BYTES", 1 << 30 if kept else 0)):
        monkeypatch.setattr(heads, name, value)
    engine, batch = policy_engine(sft_folder, zero_stage=3), collate_tokens(BATCHES[0], [1] * 6, pad_id=PAD)
    rows, vocabulary = int(batch.selected.sum()), 300
    assert rows > 40
    with LargestProduct() as largest:
        engine.backward(engine(batch).logprobs.sum())
    assert largest.rows == 16
    assert (largest.elements >= rows * vocabulary) == kept


class LargestProduct(torch.utils._python_dispatch.TorchDispatchMode):
    """Most rows of a matrix product with a row for each word of the vocabulary, and the most elements of any result."""

    rows = elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.elements = max(self.elements, result.numel())
            if func is torch.ops.aten.mm.default and result.shape[-1] == 300:
                self.rows = max(self.rows, len(result))
        return result


# Frozen models


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("zero_stage", "offload"), [(0, True), (3, False), (3, True)])
def test_a_frozen_model_computes_the_same_wherever_its_weights_are(
    sft_folder: Path, dtype: str, zero_stage: int, offload: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(packed, "multiplies_bfloat16", lambda: False)  # ZeRO 3 has the model's own forward, which rounds otherwise
    batch = collate_tokens(BATCHES[0], [1] * 6, pad_id=PAD)
    model = load_language_model(sft_folder, training_dtype=dtype)
    expected = frozen(PolicyModule(copy.deepcopy(model)), device=torch.device("cpu"), dtype=getattr(torch, dtype))
    found = FrozenModel(PolicyModule(model), dtype=dtype, zero_stage=zero_stage, offload=offload)
    with torch.no_grad(), found.in_use() as module:
        torch.testing.assert_close(module(batch).logprobs, expected(batch).logprobs, rtol=0, atol=1e-5)
    assert not any(p.requires_grad for p in module.parameters())
    assert largest_difference(found.state_dict(), {n: t.to(getattr(torch, dtype)) for n, t in model_weights(sft_folder).items()}) == 0


def model_weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_language_model(folder).state_dict()


@pytest.mark.parametrize("zero_stage", [0, 3])
def test_a_frozen_model_takes_the_weights_of_a_trained_one(sft_folder: Path, zero_stage: int):
    policy = adapted_engine(sft_folder, zero_stage=zero_stage)
    train(policy)
    reference = FrozenModel(PolicyModule(load_language_model(sft_folder)), dtype="float32", zero_stage=zero_stage, offload=False)
    reference.load(policy.weights())
    assert largest_difference(reference.state_dict(), policy.state_dict()) == 0
    assert largest_difference(reference.state_dict(), model_weights(sft_folder)) > 1e-4


@pytest.mark.parametrize("changes", [{"offload_frozen": True}, {"zero_stage": 3}, {"zero_stage": 3, "offload_frozen": True}], ids=str)
def test_a_rank_gets_the_same_from_frozen_models_wherever_their_weights_are(model_folders: tuple[Path, Path], changes: dict):
    plain, elsewhere = (connected(model_folders, c) for c in ({}, changes))
    for rank in (plain, elsewhere):
        rank.seen = rank.forward(Sequences.of(BATCHES[0], [1] * 6)), rank.score_by_reward_model("reward_model", [*BATCHES[1], None])
    (outputs, scores), (found, found_scores) = plain.seen, elsewhere.seen
    assert outputs.keys() == found.keys() == {"old_logprobs", "ref_logprobs", "values"}
    for name, values in outputs.items():
        torch.testing.assert_close(found[name], values, rtol=0, atol=1e-5)
    torch.testing.assert_close(found_scores, scores, rtol=0, atol=1e-5, equal_nan=True)


def connected(folders: tuple[Path, Path], changes: dict) -> TrainerRank:
    rank = TrainerRank(0, 1, rl_job(*folders, **{"rl.algorithm": "ppo"}, **{f"rl.trainer.{k}": v for k, v in changes.items()}))
    rank.connect(rank.address())
    return rank


def test_a_reward_model_that_is_offloaded_scores_as_before(reward_folder: Path):
    module = FrozenModel(ScalarModule(load_scalar_model(reward_folder)), dtype="float32", zero_stage=0, offload=True)
    host = {name: p.data_ptr() for name, p in module.module.named_parameters()}
    with module.in_use():
        pass
    assert {name: p.data_ptr() for name, p in module.module.named_parameters()} == host


# Engines that aren't used any more


EVERY_STAGE = [{"zero_stage": 0}, {"zero_stage": 1}, {"zero_stage": 2}, *OFFLOADED, {"zero_stage": 3}]
QUICK_STAGES = [
    ({"zero_stage": 0}, "bfloat16"),
    ({"zero_stage": 2}, "float32"),
    ({"zero_stage": 3}, "float32"),
    (OFFLOADED[-1], "bfloat16"),
]


@pytest.mark.parametrize(("changes", "dtype"), cells(product(EVERY_STAGE, ["float32", "bfloat16"]), QUICK_STAGES), ids=str)
def test_a_closed_engine_keeps_no_memory(sft_folder: Path, changes: dict, dtype: str):
    before = tensor_bytes()
    engine = policy_engine(sft_folder, dtype=dtype, ema_decay=0.9, **changes)
    train(engine, BATCHES[:1])
    used = tensor_bytes() - before
    engine.close()
    del engine
    assert tensor_bytes() - before < 0.01 * used


def test_a_closed_frozen_model_that_is_sharded_keeps_no_memory(sft_folder: Path):
    before = tensor_bytes()
    reference = FrozenModel(PolicyModule(load_language_model(sft_folder)), dtype="float32", zero_stage=3, offload=False)
    used = tensor_bytes() - before
    reference.close()
    del reference
    assert tensor_bytes() - before < 0.01 * used
