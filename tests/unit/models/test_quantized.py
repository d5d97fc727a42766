"""4-bit base weights: what is computed, trained on and exported is one and the same rounded model."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import pytest
import torch
from tiny_models import PAD, largest_difference, merged_state_dict, negative_logprob_step, rl_job, sequences, settings
from torch import nn

from rlhf_core.config import LoraConfig
from rlhf_core.engines.deepspeed.engine import TrainEngine
from rlhf_core.models.batch import collate_tokens
from rlhf_core.models.build import load_language_model, load_scalar_model, save_model, scalar_head
from rlhf_core.models.forward import PolicyModule
from rlhf_core.models.lora import BLOCK, QuantizedLinear, add_adapters, quantize_base, without_adapters
from rlhf_core.trainers.rl.rank import TrainerRank
from rlhf_core.types import Sequences

pytestmark = pytest.mark.usefixtures("world")
ROUNDED = LoraConfig(rank=3, alpha=6.0, dropout=0.0, target_modules=["q_proj", "v_proj"], quantize="nf4")
BATCHES = [sequences(6, seed=k) for k in range(4)]
LINEARS = 14  # q, k, v, o, gate, up and down of two layers


def adapted(folder: Path, config: LoraConfig = ROUNDED) -> nn.Module:
    model = load_language_model(folder)
    add_adapters(model, config, seed=0)
    return model


def engine(folder: Path, **changes) -> TrainEngine:
    return TrainEngine(PolicyModule(adapted(folder)), settings(learning_rate=1e-2, schedule=lambda _: 1.0, **changes))


def train(trained: TrainEngine, batches: list[list[list[int]]]) -> list[tuple[float, float]]:
    return [negative_logprob_step(trained, b, num_loss_tokens=sum(len(s) - 1 for s in b), microbatch_tokens=40) for b in batches]


@torch.no_grad()
def logprobs(module, ids: list[list[int]] = BATCHES[0]) -> torch.Tensor:
    return module(collate_tokens(ids, [1] * len(ids), pad_id=PAD)).logprobs


def in_blocks(matrix: torch.Tensor) -> torch.Tensor:
    return nn.functional.pad(matrix.detach().flatten(), (0, -matrix.numel() % BLOCK)).reshape(-1, BLOCK)


@pytest.mark.parametrize(("inputs", "outputs"), [(32, 8), (96, 12), (128, 64), (5, 3)])  # rows that end within a block, and whole ones
def test_each_number_is_one_of_16_values_times_the_largest_of_its_block(inputs: int, outputs: int):
    torch.manual_seed(0)
    plain = nn.Linear(inputs, outputs)
    rounded = QuantizedLinear(plain)
    blocks, kept = in_blocks(plain.weight), in_blocks(rounded.dequantized())
    scales = blocks.abs().amax(1, keepdim=True)
    assert len({round(float(x), 5) for x in (kept / scales).flatten()}) <= 16
    # The values lie closest around 0 and 0.304 apart at the lower end: half of that is the largest error.
    assert float(((blocks - kept) / scales).abs().max()) <= 0.153
    torch.testing.assert_close(kept.abs().amax(1, keepdim=True), scales)  # the largest itself is kept
    assert (rounded.weight.dtype, rounded.weight.numel(), rounded.scales.numel()) == (torch.uint8, blocks.numel() // 2, len(blocks) * 4)


def test_it_computes_and_gives_the_gradient_of_its_matrix_and_bias():
    torch.manual_seed(0)
    rounded, x = QuantizedLinear(nn.Linear(32, 8)), torch.randn(5, 32, requires_grad=True)
    y = rounded(x)
    torch.testing.assert_close(y, x @ rounded.dequantized().t() + rounded.bias)
    y.square().sum().backward()
    torch.testing.assert_close(x.grad, 2 * y.detach() @ rounded.dequantized())


def test_a_cast_of_the_module_leaves_the_matrix_alone():
    rounded = QuantizedLinear(nn.Linear(32, 8))
    before = rounded.dequantized()
    assert torch.equal(copy.deepcopy(rounded).to(torch.bfloat16).dequantized(), before)


def test_all_linear_layers_but_the_head_are_rounded_and_only_adapters_are_trained(sft_folder: Path):
    model = adapted(sft_folder)
    assert sum(isinstance(part, QuantizedLinear) for part in model.modules()) == LINEARS
    assert type(model.get_output_embeddings()) is nn.Linear
    assert {name.split(".")[-3] for name, p in model.named_parameters() if p.requires_grad} == {"lora_A", "lora_B"}


def test_the_export_is_the_model_that_was_trained_and_has_the_plain_ones_names(sft_folder: Path, tmp_path: Path, tokenizer):
    trained = engine(sft_folder)
    before = logprobs(trained.module)
    losses = train(trained, BATCHES[:3])
    assert all(torch.isfinite(torch.tensor(losses)).flatten()) and (logprobs(trained.module) - before).abs().max() > 1e-3
    plain = load_language_model(sft_folder)
    save_model(plain, trained.state_dict(), tokenizer, tmp_path / "export")
    exported = load_language_model(tmp_path / "export")
    assert exported.state_dict().keys() == plain.state_dict().keys()
    torch.testing.assert_close(logprobs(PolicyModule(exported)), logprobs(trained.module), rtol=0, atol=2e-6)


def test_without_adapters_it_is_the_rounded_start_which_is_not_the_plain_model(sft_folder: Path):
    model, start = adapted(sft_folder), load_language_model(sft_folder)
    quantize_base(start, ROUNDED)
    with without_adapters(model):
        assert torch.equal(logprobs(PolicyModule(model)), logprobs(PolicyModule(start)))
    assert (logprobs(PolicyModule(start)) - logprobs(PolicyModule(load_language_model(sft_folder)))).abs().max() > 1e-3
    assert largest_difference(merged_state_dict(model), merged_state_dict(start)) == 0


@pytest.mark.parametrize("zero_stage", [0, 2, 3])
def test_resume_save_load_and_continue_equal_an_uninterrupted_run_bit_for_bit(sft_folder: Path, tmp_path: Path, zero_stage: int):
    whole = engine(sft_folder, zero_stage=zero_stage)
    train(whole, BATCHES)
    first = engine(sft_folder, zero_stage=zero_stage)
    train(first, BATCHES[:2])
    first.save(tmp_path, "engine")
    second = engine(sft_folder, zero_stage=zero_stage)
    second.load(tmp_path, "engine")
    train(second, BATCHES[2:])
    assert largest_difference(whole.state_dict(), second.state_dict()) == 0


def test_a_reward_models_head_is_trained_in_full(model_folders: tuple[Path, Path]):
    model = load_scalar_model(model_folders[1])
    add_adapters(model, ROUNDED, seed=0)
    assert type(scalar_head(model)) is nn.Linear and scalar_head(model).weight.requires_grad
    assert sum(isinstance(part, QuantizedLinear) for part in model.modules()) == LINEARS


@pytest.mark.parametrize("refresh", [None, 3])
def test_in_rl_the_reference_is_the_rounded_start(model_folders: tuple[Path, Path], refresh: int | None):
    changes = {"rl.algorithm": "grpo", "rl.lora": ROUNDED.model_dump(), "rl.kl.refresh_reference_every": refresh}
    rank = TrainerRank(0, 1, rl_job(*model_folders, **changes))
    rank.connect(None)
    seen = rank.forward(Sequences.of(sequences(6, seed=11), [1, 2, 3, 1, 2, 3]))
    torch.testing.assert_close(seen["ref_logprobs"], seen["old_logprobs"], rtol=0, atol=2e-6)


def test_without_bitsandbytes_it_is_refused(sft_folder: Path, monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ValueError, match=r"lora\.quantize: expected bitsandbytes to be installed"):
        adapted(sft_folder)
