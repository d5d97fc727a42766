"""The training engine against plain PyTorch, against itself at other ZeRO stages, and against itself interrupted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import PAD, assert_weights_agree, largest_difference, negative_logprob_step, policy_engine, sequences, settings

from rlhf_core.engines.deepspeed.engine import TrainEngine, equal_count
from rlhf_core.models.batch import collate_tokens
from rlhf_core.models.build import load_language_model
from rlhf_core.models.forward import PolicyModule

pytestmark = pytest.mark.usefixtures("world")
BATCHES = [sequences(6, seed=k) for k in range(4)]


def tokens(ids: list[list[int]]) -> int:
    return sum(len(s) - 1 for s in ids)


def train(engine: TrainEngine, batches: list[list[list[int]]], microbatch_tokens: int = 40) -> list[tuple[float, float]]:
    return [negative_logprob_step(engine, b, num_loss_tokens=tokens(b), microbatch_tokens=microbatch_tokens) for b in batches]


@pytest.mark.parametrize("max_grad_norm", [0.2, 1000.0])
def test_steps_equal_a_plain_adamw_loop(sft_folder: Path, max_grad_norm: float):
    engine = policy_engine(sft_folder, max_grad_norm=max_grad_norm)
    module = PolicyModule(load_language_model(sft_folder))
    matrices = [p for p in module.parameters() if p.ndim > 1]
    vectors = [p for p in module.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}], lr=3e-3, betas=(0.9, 0.95)
    )
    for step, batch in enumerate(BATCHES):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 / (1 + step)
        assert engine.learning_rate == pytest.approx(3e-3 / (1 + step))
        loss = -module(collate_tokens(batch, [1] * len(batch), pad_id=PAD)).logprobs.mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(module.parameters(), max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        engine_loss, engine_norm = negative_logprob_step(engine, batch, num_loss_tokens=tokens(batch), microbatch_tokens=40)
        assert engine_loss == pytest.approx(float(loss), rel=1e-5)
        assert engine_norm == pytest.approx(float(norm), rel=1e-4)
        assert (float(norm) > max_grad_norm) == (max_grad_norm < 1)
    assert_weights_agree(engine.state_dict(), module.model.state_dict())


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_every_zero_stage_equals_stage_0_on_one_rank(sft_folder: Path, zero_stage: int):
    plain, sharded = policy_engine(sft_folder), policy_engine(sft_folder, zero_stage=zero_stage)
    for (loss, norm), (sharded_loss, sharded_norm) in zip(train(plain, BATCHES), train(sharded, BATCHES), strict=True):
        assert sharded_loss == pytest.approx(loss, rel=1e-5)
        assert sharded_norm == pytest.approx(norm, rel=1e-4)
    assert_weights_agree(plain.state_dict(), sharded.state_dict())  # ZeRO 3 takes the model's own forward


@pytest.mark.parametrize("zero_stage", [0, 2, 3])
def test_resume_save_load_and_continue_equal_an_uninterrupted_run(sft_folder: Path, tmp_path: Path, zero_stage: int):
    whole, first, second = (policy_engine(sft_folder, zero_stage=zero_stage) for _ in range(3))
    expected = train(whole, BATCHES)
    train(first, BATCHES[:2])
    first.save(tmp_path, "engine")
    second.load(tmp_path, "engine")
    assert second.learning_rate == first.learning_rate
    assert train(second, BATCHES[2:]) == expected[2:]
    assert largest_difference(second.state_dict(), whole.state_dict()) == 0


@pytest.mark.parametrize("how", ["plain", "zero 1", "zero 2", "zero 3", "bfloat16", "zero 2 bfloat16"])
def test_discarded_gradients_leave_no_trace(sft_folder: Path, how: str):
    """Bit for bit as without them: parameters, moments, schedule, and the buffers that the next gradients are added to."""
    changes = {"zero_stage": int(how[5]) if how.startswith("zero") else 0, "dtype": "bfloat16" if "bfloat16" in how else "float32"}
    disturbed, undisturbed = (policy_engine(sft_folder, **changes) for _ in range(2))
    for batch in BATCHES[:3]:
        for part in (batch[:2], batch[2:]):
            disturbed.backward(disturbed(collate_tokens(part, [1] * len(part), pad_id=PAD)).logprobs.sum())
        before = disturbed.state_dict()
        disturbed.discard()
        assert largest_difference(disturbed.state_dict(), before) == 0
        assert disturbed.learning_rate == undisturbed.learning_rate
        assert train(disturbed, [batch]) == train(undisturbed, [batch])
    assert largest_difference(disturbed.state_dict(), undisturbed.state_dict()) == 0


def test_loading_what_was_never_saved_says_so(sft_folder: Path, tmp_path: Path):
    with pytest.raises(ValueError, match="expected the state of a training engine, got nothing"):
        policy_engine(sft_folder).load(tmp_path, "engine")


def test_weights_have_their_hugging_face_names_and_are_copies(sft_folder: Path):
    engine = policy_engine(sft_folder)
    state = engine.state_dict()
    assert state.keys() == load_language_model(sft_folder).state_dict().keys()
    before = {name: tensor.clone() for name, tensor in state.items()}
    train(engine, BATCHES[:1])
    assert largest_difference(state, before) == 0
    assert largest_difference(state, engine.state_dict()) > 1e-4


@pytest.mark.parametrize("zero_stage", [0, 1, 2])
def test_adams_first_step_in_bfloat16_is_the_learning_rate(sft_folder: Path, zero_stage: int):
    """lr * m / sqrt(v), both corrected for their start at 0: the gradient's sign times lr. Counted as a second step it is 0.735 of that:
    0.1 / 0.19 over the root of 0.05 / 0.0975. Weights decay by 1 - lr * 0.1, once.
    """
    engine = policy_engine(sft_folder, dtype="bfloat16", zero_stage=zero_stage, learning_rate=2.0**-6, schedule=lambda step: 1.0)
    before = engine.state_dict()["lm_head.weight"].float()
    negative_logprob_step(engine, sequences(8, seed=0), num_loss_tokens=60, microbatch_tokens=1000)
    moved = engine.state_dict()["lm_head.weight"].float() - before * (1 - 2.0**-6 * 0.1)
    expected = torch.full_like(moved, 2.0**-6)
    assert float(((moved.abs() - expected).abs() <= 2.0**-8 * before.abs() + 2.0**-9).float().mean()) > 0.99


def test_bfloat16_learns_and_hands_out_what_it_computes_with(sft_folder: Path):
    engine = policy_engine(sft_folder, dtype="bfloat16", learning_rate=1e-2, schedule=lambda step: 1.0)
    losses = [loss for loss, _ in train(engine, [BATCHES[0]] * 8)]
    assert losses[-1] < losses[0] - 0.5
    assert {t.dtype for t in engine.state_dict().values()} == {torch.bfloat16}


def test_one_rank_keeps_its_microbatches():
    assert equal_count([[3, 1], [0]]) == [[3, 1], [0]]


def test_frozen_parameters_are_left_alone(sft_folder: Path):
    module = PolicyModule(load_language_model(sft_folder))
    module.model.get_input_embeddings().requires_grad_(False)
    engine = TrainEngine(module, settings())
    before = engine.state_dict()
    train(engine, BATCHES[:2])
    after = engine.state_dict()
    assert torch.equal(after["model.embed_tokens.weight"], before["model.embed_tokens.weight"])
    assert not torch.equal(after["lm_head.weight"], before["lm_head.weight"])
