"""Optimizers and the average of the weights, in engines at every ZeRO stage."""

from __future__ import annotations

import sys
from itertools import product
from pathlib import Path
from typing import get_args

import pytest
import torch
from tiny_models import PAD, assert_weights_agree, largest_difference, negative_logprob_step, policy_engine, sequences, settings
from whole_matrix import cells

from rlhf_core.config import LoraConfig
from rlhf_core.config.model import Optimizer
from rlhf_core.engines.deepspeed.engine import TrainEngine
from rlhf_core.engines.deepspeed.optimizers import _CHUNK, AVERAGE, OPTIMIZERS, Lion
from rlhf_core.models.batch import collate_tokens
from rlhf_core.models.build import load_language_model
from rlhf_core.models.forward import PolicyModule
from rlhf_core.models.lora import add_adapters

pytestmark = pytest.mark.usefixtures("world")
BATCHES = [sequences(6, seed=k) for k in range(5)]
KINDS = tuple(product((0, 1, 2, 3), ("float32", "bfloat16")))
QUICK_KINDS = {(0, "float32"), (1, "bfloat16"), (2, "float32"), (3, "bfloat16")}
OTHERS = sorted(set(OPTIMIZERS) - {"adamw"})
DECAY = 0.5
Weights = dict[str, torch.Tensor]


def train(engine: TrainEngine, batches: list[list[list[int]]]) -> list[tuple[float, float]]:
    return [negative_logprob_step(engine, b, num_loss_tokens=sum(len(s) - 1 for s in b), microbatch_tokens=40) for b in batches]


def average(engine: TrainEngine) -> Weights:
    with engine.averaged():
        return engine.state_dict()


def by_hand(after: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    """Averages of the weights after each step, which count DECAY^(n-1), ..., DECAY, 1."""
    shares = [DECAY ** (len(after) - 1 - k) for k in range(len(after))]
    return [sum(share * w.double() for share, w in zip(shares, weights, strict=True)) / sum(shares) for weights in zip(*after, strict=True)]


def test_every_optimizer_of_the_configuration_is_there_and_no_other():
    assert set(OPTIMIZERS) == set(get_args(Optimizer))


def test_lion_by_hand():
    """lr 0.1, decay 0.5, betas 0.5 and 0.75. Gradients 1, -0.25 and -1 for the first number, none for the second, which only decays.

    Step 1: m = 0, sign(0.5 * 1) = 1: p = 2 * 0.95 - 0.1 = 1.8, m = 0.25. Step 2: sign(0.125 - 0.125) = 0: p = 1.8 * 0.95 = 1.71,
    m = 0.1875 - 0.0625 = 0.125. Step 3: sign(0.0625 - 0.5) = -1: p = 1.71 * 0.95 + 0.1 = 1.7245.
    """
    parameter = torch.nn.Parameter(torch.tensor([2.0, 4.0], dtype=torch.float64))
    optimizer = Lion([{"params": [parameter], "weight_decay": 0.5}], lr=0.1, betas=(0.5, 0.75))
    for gradient, expected in ((1.0, [1.8, 3.8]), (-0.25, [1.71, 3.61]), (-1.0, [1.7245, 3.4295])):
        parameter.grad = torch.tensor([gradient, 0.0], dtype=torch.float64)
        optimizer.step()
        torch.testing.assert_close(parameter.detach(), torch.tensor(expected, dtype=torch.float64))


def test_lion_updates_the_pieces_of_a_large_parameter_as_a_whole_one():
    generator = torch.Generator().manual_seed(0)
    values, gradients = torch.randn(_CHUNK + 3, generator=generator), torch.randn(_CHUNK + 3, generator=generator)
    in_pieces = torch.nn.Parameter(values.clone())
    whole = torch.nn.Parameter(torch.stack([values, values]).t())  # its numbers don't lie one after the other
    in_pieces.grad, whole.grad = gradients.clone(), torch.stack([gradients, gradients]).t()
    for parameter in (in_pieces, whole):
        Lion([{"params": [parameter], "weight_decay": 0.1}], lr=0.1, betas=(0.9, 0.95)).step()
    assert torch.equal(in_pieces, whole[:, 0])


def test_eight_bit_moments_take_the_first_step_of_adamw_and_stay_near_it(sft_folder: Path):
    """The first step is computed before the moments are rounded. Only embeddings and head have 4,096 numbers and 8 bits."""
    exact, rounded = (policy_engine(sft_folder, optimizer=name) for name in ("adamw", "adamw_8bit"))
    assert train(exact, BATCHES[:1]) == train(rounded, BATCHES[:1])
    assert largest_difference(exact.state_dict(), rounded.state_dict()) < 1e-6
    for engine in (exact, rounded):
        train(engine, BATCHES[1:])
    assert 1e-6 < largest_difference(exact.state_dict(), rounded.state_dict()) < 3e-3  # a whole step


@pytest.mark.parametrize(("optimizer", "most"), [("adamw", 8.0), ("adamw_8bit", 2.1), ("lion", 4.0)])
def test_bytes_of_state_for_each_parameter(sft_folder: Path, optimizer: str, most: float):
    """As docs/training.md says; ZeRO has all parameters in two flat pieces."""
    engine = policy_engine(sft_folder, optimizer=optimizer, zero_stage=2)
    train(engine, BATCHES[:1])
    found = {
        p: sum(t.nbytes for t in s.values() if isinstance(t, torch.Tensor) and t.numel() > 256)
        for p, s in engine._torch_optimizer.state.items()
    }
    largest = max(found, key=torch.Tensor.numel)
    assert 0.95 * most < found[largest] / largest.numel() <= most


def test_eight_bits_without_bitsandbytes_are_refused(sft_folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", None)
    with pytest.raises(ValueError, match="optimizer: expected bitsandbytes for adamw_8bit, got no such package"):
        policy_engine(sft_folder, optimizer="adamw_8bit")


def test_lions_state_is_one_number_a_parameter(sft_folder: Path):
    engine = policy_engine(sft_folder, optimizer="lion")
    train(engine, BATCHES[:1])
    state = list(engine._torch_optimizer.state.values())
    assert [list(s) for s in state] == [["exp_avg"]] * len(state)
    assert sum(s["exp_avg"].numel() for s in state) == sum(p.numel() for p in engine.module.parameters())


@pytest.mark.parametrize(("optimizer", "zero_stage"), cells(product(OTHERS, [1, 2, 3]), {("adamw_8bit", 2), ("lion", 3)}))
def test_every_zero_stage_equals_stage_0_with_other_optimizers(sft_folder: Path, optimizer: str, zero_stage: int):
    plain, sharded = (policy_engine(sft_folder, optimizer=optimizer, zero_stage=stage) for stage in (0, zero_stage))
    for (loss, norm), (sharded_loss, sharded_norm) in zip(train(plain, BATCHES), train(sharded, BATCHES), strict=True):
        assert sharded_loss == pytest.approx(loss, rel=1e-3 if optimizer == "adamw_8bit" else 1e-5)
        assert sharded_norm == pytest.approx(norm, rel=1e-2 if optimizer == "adamw_8bit" else 1e-4)
    if optimizer == "adamw_8bit":  # the 8 bits of a moment are those of its block; with ZeRO a block may have numbers of several parameters
        assert largest_difference(plain.state_dict(), sharded.state_dict()) < 3e-3
    else:
        assert_weights_agree(plain.state_dict(), sharded.state_dict())


@pytest.mark.parametrize(("optimizer", "zero_stage"), cells(product(OTHERS, [0, 2, 3]), {("adamw_8bit", 3), ("lion", 2)}))
def test_resume_equals_an_uninterrupted_run_with_other_optimizers(sft_folder: Path, tmp_path: Path, optimizer: str, zero_stage: int):
    whole, first, second = (policy_engine(sft_folder, optimizer=optimizer, zero_stage=zero_stage) for _ in range(3))
    expected = train(whole, BATCHES)
    train(first, BATCHES[:2])
    first.save(tmp_path, "engine")
    second.load(tmp_path, "engine")
    assert train(second, BATCHES[2:]) == expected[2:]
    assert largest_difference(second.state_dict(), whole.state_dict()) == 0


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_betas_are_those_of_the_settings(sft_folder: Path, tmp_path: Path, optimizer: str):
    """Also after a checkpoint with others."""
    first, other = (policy_engine(sft_folder, optimizer=optimizer, betas=betas) for betas in ((0.9, 0.95), (0.5, 0.6)))
    train(first, BATCHES[:2])
    train(other, BATCHES[:2])
    assert largest_difference(first.state_dict(), other.state_dict()) > 1e-4
    first.save(tmp_path, "engine")
    other.load(tmp_path, "engine")
    assert {group["betas"] for group in other._torch_optimizer.param_groups} == {(0.5, 0.6)}


def test_a_large_eps_shortens_the_steps_of_adamw(sft_folder: Path):
    start = load_language_model(sft_folder).state_dict()
    usual, short = (policy_engine(sft_folder, weight_decay=0.0, eps=eps) for eps in (1e-8, 1e3))
    for engine in (usual, short):
        train(engine, BATCHES[:1])
    assert largest_difference(short.state_dict(), start) < largest_difference(usual.state_dict(), start) / 1000


@pytest.mark.parametrize(("saved", "loaded"), [("adamw", "lion"), ("lion", "adamw")])
def test_a_checkpoint_of_another_optimizer_is_refused(sft_folder: Path, tmp_path: Path, saved: str, loaded: str):
    engine = policy_engine(sft_folder, optimizer=saved)
    train(engine, BATCHES[:1])
    engine.save(tmp_path, "engine")
    with pytest.raises(ValueError, match=f"expected the state of (this model and of )?{loaded}, got "):
        policy_engine(sft_folder, optimizer=loaded).load(tmp_path, "engine")


@pytest.mark.parametrize(("zero_stage", "dtype"), KINDS)
def test_the_average_is_that_of_the_weights_after_each_step(sft_folder: Path, zero_stage: int, dtype: str):
    engine = policy_engine(sft_folder, zero_stage=zero_stage, dtype=dtype, ema_decay=DECAY)
    state, masters, weights = engine._torch_optimizer.state, [], []
    for batch in BATCHES:
        train(engine, [batch])
        masters.append([p.detach().clone() for p in state])
        weights.append(list(engine.state_dict().values()))
    for found, expected in zip(state.values(), by_hand(masters), strict=True):
        assert found[AVERAGE].dtype == torch.float32
        torch.testing.assert_close(found[AVERAGE].double(), expected, rtol=1e-6, atol=1e-7)
    live = engine.state_dict()
    for found, expected in zip(average(engine).values(), by_hand(weights), strict=True):
        rounding = 2.0**-6 if dtype == "bfloat16" else 1e-6  # of weights with 8 bits, before and after the average
        torch.testing.assert_close(found.double(), expected, rtol=rounding, atol=1e-3 * rounding)
    assert largest_difference(average(engine), live) > 5e-4
    assert largest_difference(engine.state_dict(), live) == 0


@pytest.mark.parametrize(("zero_stage", "dtype"), cells(KINDS, QUICK_KINDS))
def test_an_average_that_was_looked_at_and_resumed_equals_an_undisturbed_one(sft_folder: Path, tmp_path: Path, zero_stage: int, dtype: str):
    whole, first, second = (policy_engine(sft_folder, zero_stage=zero_stage, dtype=dtype, ema_decay=DECAY) for _ in range(3))
    plain = policy_engine(sft_folder, zero_stage=zero_stage, dtype=dtype)
    expected = train(whole, BATCHES)
    assert train(plain, BATCHES) == expected
    train(first, BATCHES[:3])
    average(first)
    first.save(tmp_path, "engine")
    second.load(tmp_path, "engine")
    assert largest_difference(average(second), average(first)) == 0
    assert train(second, BATCHES[3:]) == expected[3:]
    assert largest_difference(average(second), average(whole)) == 0
    assert largest_difference(second.state_dict(), whole.state_dict()) == largest_difference(plain.state_dict(), whole.state_dict()) == 0


@pytest.mark.parametrize(("optimizer", "zero_stage"), cells(product(["adamw", "lion"], [1, 2, 3]), {("adamw", 3), ("lion", 2)}))
def test_on_the_host_steps_and_average_are_the_same(sft_folder: Path, tmp_path: Path, optimizer: str, zero_stage: int):
    """Within rounding: DeepSpeed adds up the gradients' norm in another order on the host."""
    how = {"optimizer": optimizer, "zero_stage": zero_stage, "ema_decay": DECAY}
    offloaded = how | {"offload_optimizer": True} | ({"offload_parameters": True} if zero_stage == 3 else {})
    device, host, resumed = (policy_engine(sft_folder, **changes) for changes in (how, offloaded, offloaded))
    for on_device, on_host in zip(train(device, BATCHES), train(host, BATCHES), strict=True):
        assert on_host == pytest.approx(on_device, rel=1e-5)
    assert_weights_agree(average(device), average(host))
    assert_weights_agree(device.state_dict(), host.state_dict())
    assert {state[AVERAGE].device.type for state in host._torch_optimizer.state.values()} == {"cpu"}
    host.save(tmp_path, "engine")
    resumed.load(tmp_path, "engine")
    assert largest_difference(average(resumed), average(host)) == 0
    assert train(resumed, BATCHES[:1]) == train(host, BATCHES[:1])


def test_what_is_computed_with_the_average_is_of_the_average(sft_folder: Path):
    engine, plain = policy_engine(sft_folder, ema_decay=DECAY), PolicyModule(load_language_model(sft_folder))
    train(engine, BATCHES)
    plain.model.load_state_dict(average(engine))
    batch = collate_tokens(BATCHES[0], [1] * len(BATCHES[0]), pad_id=PAD)
    with engine.averaged(), torch.no_grad():
        torch.testing.assert_close(engine(batch).logprobs, plain(batch).logprobs)


def test_before_the_first_step_the_average_is_the_initial_weights(sft_folder: Path):
    engine = policy_engine(sft_folder, ema_decay=DECAY)
    assert largest_difference(average(engine), load_language_model(sft_folder).state_dict()) == 0


def test_a_discarded_step_leaves_the_average_alone(sft_folder: Path):
    disturbed, undisturbed = (policy_engine(sft_folder, ema_decay=DECAY) for _ in range(2))
    for batch in BATCHES[:3]:
        disturbed.backward(disturbed(collate_tokens(batch, [1] * len(batch), pad_id=PAD)).logprobs.sum())
        disturbed.discard()
        assert train(disturbed, [batch]) == train(undisturbed, [batch])
    assert largest_difference(average(disturbed), average(undisturbed)) == 0


def with_adapters(folder: Path, **changes) -> TrainEngine:
    model = load_language_model(folder)
    add_adapters(model, LoraConfig(rank=2, alpha=4.0, dropout=0.0, target_modules="all-linear"), seed=0)
    return TrainEngine(PolicyModule(model), settings(ema_decay=DECAY, **changes))


def test_with_adapters_their_matrices_are_averaged_and_then_merged(sft_folder: Path):
    engine, expected = (with_adapters(sft_folder) for _ in range(2))
    after = []
    for batch in BATCHES[:3]:
        train(engine, [batch])
        after.append([p.detach().clone() for p in engine.module.parameters() if p.requires_grad])
    with torch.no_grad():
        for p, mean in zip((p for p in expected.module.parameters() if p.requires_grad), by_hand(after), strict=True):
            p.copy_(mean)
    assert largest_difference(average(engine), expected.state_dict()) < 1e-6
    assert largest_difference(average(engine), engine.state_dict()) > 1e-4


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_the_average_of_adapters_is_the_same_at_every_zero_stage(sft_folder: Path, zero_stage: int):
    plain, sharded = with_adapters(sft_folder), with_adapters(sft_folder, zero_stage=zero_stage)
    for engine in (plain, sharded):
        train(engine, BATCHES[:3])
    assert_weights_agree(average(plain), average(sharded))
