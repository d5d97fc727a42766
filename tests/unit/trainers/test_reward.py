"""Reward model training: pairs grouped by conversation give what pairs one by one would give."""

from __future__ import annotations

from pathlib import Path

import pytest
import supervised_ranks
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import PAD, assert_weights_agree, scalar_engine, sequences, tensor_bytes, tiny_params

from rlhf_core.checkpoint.settings import StoreSettings
from rlhf_core.checkpoint.store import CheckpointStore
from rlhf_core.models.batch import collate_tokens
from rlhf_core.models.build import load_scalar_model, scalar_head
from rlhf_core.models.forward import ScalarModule
from rlhf_core.models.tokenizer import encode_conversation, load_tokenizer
from rlhf_core.trainers.reward.ensemble import train_ensemble
from rlhf_core.trainers.reward.train import Comparison, encode_comparisons, reward_phase, score_heldout
from rlhf_core.trainers.supervised.loop import TrainLoop

pytestmark = pytest.mark.usefixtures("world")
PAIRS = [[(0, 1), (0, 2), (2, 1)], [(1, 0)], [(0, 3), (3, 1), (2, 0), (1, 2)], [(0, 1)], [(1, 0), (1, 0)], [(0, 0)]]
COMPARISONS = [
    Comparison(1000, sequences(1 + max(map(max, pairs)), seed=k), pairs, [f"{k}-{n}" for n in range(len(pairs))])
    for k, pairs in enumerate(PAIRS)
]


def phase(train: list[Comparison], heldout: list[Comparison] | None = None, *, microbatch_tokens: int = 50, **loss: float):
    loss = {"margin": 0.3, "centering_coef": 0.02, **loss}
    return reward_phase(train, heldout or [], steps=3, batch_size=4, pad_id=PAD, microbatch_tokens=microbatch_tokens, **loss)


def naive_scores(folder: Path, comparisons: list[Comparison]) -> tuple[torch.Tensor, torch.Tensor]:
    """Chosen and rejected of every pair, each sequence alone and as often as a pair has it."""
    module = ScalarModule(load_scalar_model(folder))
    sides = [[c.sequences[pair[side]] for c in comparisons for pair in c.pairs] for side in (0, 1)]
    chosen, rejected = (torch.cat([module(collate_tokens([ids], [len(ids) - 1], pad_id=PAD)) for ids in side]) for side in sides)
    return chosen, rejected


def test_each_distinct_response_scored_once_gives_the_loss_and_gradient_of_naive_pairs(reward_folder: Path):
    module = ScalarModule(load_scalar_model(reward_folder))
    difference, total = [], []
    for c in COMPARISONS:
        for a, b in c.pairs:
            scores = [module(collate_tokens([c.sequences[i]], [len(c.sequences[i]) - 1], pad_id=PAD)) for i in (a, b)]
            difference.append(scores[0] - scores[1])
            total.append(scores[0] + scores[1])
    loss = (torch.nn.functional.softplus(-(torch.cat(difference) - 0.3)) + 0.02 * torch.cat(total) ** 2).mean()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(module.parameters(), 1e9)
    engine = scalar_engine(reward_folder)
    metrics = phase(COMPARISONS).train_batch(engine, list(range(6)))
    assert metrics["loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
    assert engine.step() == pytest.approx(float(norm), rel=1e-4)


def test_token_mean_loss_here_over_pairs_is_the_same_for_any_microbatches(reward_folder: Path):
    results = []
    for microbatch_tokens in (10_000, 50, 1):
        engine = scalar_engine(reward_folder)
        made = phase(COMPARISONS, microbatch_tokens=microbatch_tokens)
        metrics = []
        for rows in ([0, 1, 2, 3], [4, 5, 0, 1], [2, 3, 4, 5]):
            metrics.append(made.train_batch(engine, rows))
            engine.step()
        results.append((metrics, engine.state_dict()))
    (expected, weights), *others = results
    for metrics, cut_weights in others:
        assert [m["loss"] for m in metrics] == pytest.approx([m["loss"] for m in expected], rel=1e-5)
        assert [m["accuracy"] for m in metrics] == [m["accuracy"] for m in expected]
        assert_weights_agree(cut_weights, weights)


def scores_by_last_id(folder: Path) -> tuple[ScalarModule, list[int]]:
    """A reward model whose score rises with a sequence's last id, whatever stands before; and the padded tokens of each of its calls.

    Its layers add nothing, an id is embedded as an angle, and the head reads the sine.
    """
    model = load_scalar_model(folder)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        angles = torch.arange(300) / 300
        model.model.embed_tokens.weight.zero_()[:, :2] = torch.stack([angles.cos(), angles.sin()], dim=1)
        scalar_head(model).weight.zero_()[0, 1] = 1.0
    calls: list[int] = []
    module = ScalarModule(model)
    module.register_forward_pre_hook(lambda _module, inputs: calls.append(inputs[0].input_ids.numel()))
    return module, calls


def test_rm_accuracy_is_weighted_by_example_and_ties_are_half(reward_folder: Path):
    # Of three conversations with 1, 2 and 1 pairs: right; a tie and a wrong one; right. Mean over batches would be another number.
    comparisons = [
        Comparison(1000, [[9], [5]], [(0, 1)], ["a"]),
        Comparison(1000, [[7, 7, 7], [5, 7], [8]], [(0, 1), (1, 2)], ["b", "c"]),
        Comparison(1000, [[3, 1], [2]], [(1, 0)], ["d"]),
    ]
    module, _ = scores_by_last_id(reward_folder)
    for microbatch_tokens in (1, 4, 1000):
        with torch.no_grad():
            metrics = phase([], comparisons, microbatch_tokens=microbatch_tokens, margin=0.0).evaluate(module)
        assert metrics["heldout_accuracy"] == (1 + 0.5 + 0 + 1) / 4


def test_a_shared_prompt_changes_neither_loss_nor_weights(reward_folder: Path):
    prompt = sequences(1, seed=9, shortest=14)[0]
    results = []
    for max_shared_tokens in (1000, 0):
        comparisons = [Comparison(max_shared_tokens, [[*prompt, *ids] for ids in c.sequences], c.pairs, c.row_ids) for c in COMPARISONS]
        assert [len(c.rows) for c in comparisons[:3]] == ([1, 1, 1] if max_shared_tokens else [3, 2, 4])
        engine = scalar_engine(reward_folder)
        made = phase(comparisons, microbatch_tokens=90)
        metrics = []
        for rows in ([0, 1, 2, 3], [4, 5, 0, 1]):
            metrics.append(made.train_batch(engine, rows))
            engine.step()
        results.append((metrics, engine.state_dict()))
    (shared, weights), (alone, expected) = results
    assert [m["loss"] for m in shared] == pytest.approx([m["loss"] for m in alone], rel=5e-5)
    assert [m["tokens"] for m in shared] == [m["tokens"] for m in alone]
    assert_weights_agree(weights, expected)


def test_held_out_scores_come_in_the_order_of_the_pairs_for_any_microbatches(reward_folder: Path):
    engine = scalar_engine(reward_folder)
    chosen, rejected = naive_scores(reward_folder, COMPARISONS)
    for microbatch_tokens in (1, 50, 10_000):
        scores = score_heldout(engine, COMPARISONS, pad_id=PAD, microbatch_tokens=microbatch_tokens)
        torch.testing.assert_close(scores, (chosen.detach(), rejected.detach()), rtol=0, atol=2e-6)
        assert not scores[0].requires_grad


@settings(max_examples=25)
@given(
    shapes=st.lists(st.lists(st.integers(1, 20), min_size=1, max_size=4), min_size=1, max_size=8),
    microbatch_tokens=st.integers(1, 200),
)
def test_microbatches_of_comparisons_keep_to_the_budget(reward_folder: Path, shapes: list[list[int]], microbatch_tokens: int):
    """Padded together, not one by one: many short responses beside one long one are as wide as the long one."""
    comparisons = [Comparison(1000, [[5] * n for n in lengths], [(0, 0)], ["x"]) for lengths in shapes]
    module, calls = scores_by_last_id(reward_folder)
    score_heldout(module, comparisons, pad_id=PAD, microbatch_tokens=microbatch_tokens)
    alone = max(len(lengths) * max(lengths) for lengths in shapes)
    assert max(calls) <= max(microbatch_tokens, alone)


# From rows to comparisons


def row(name: str, chosen: str | None, rejected: str | None, question: str = "Please sort 41.") -> dict:
    return {"id": name, "messages": [{"role": "user", "content": question}], "chosen": chosen, "rejected": rejected}


def test_pairs_of_a_conversation_share_their_distinct_responses(tokenizer):
    rows = [row("a", "14", "41"), row("b", "x", "y", "Quick, 9."), row("c", "14", "no"), row("d", "no", "41"), row("e", "41", "x")]
    comparisons, dropped = encode_comparisons(rows, tokenizer, max_length=64, max_shared_tokens=1000)
    assert dropped == 0
    assert [c.row_ids for c in comparisons] == [["a", "c", "d", "e"], ["b"]]
    assert [c.pairs for c in comparisons] == [[(0, 1), (0, 2), (2, 1), (1, 3)], [(0, 1)]]
    expected = [encode_conversation(tokenizer, rows[0]["messages"], text)[0] for text in ("14", "41", "no", "x")]
    assert comparisons[0].sequences == expected


def test_rm_truncation_pairs_that_are_too_long_are_dropped_and_counted_never_cut(tokenizer):
    long = "14 " * 40
    rows = [row("a", "14", "41"), row("b", long, "41"), row("c", "14", long), row("d", long, long, "Quick, 9."), row("e", "no", "14")]
    comparisons, dropped = encode_comparisons(rows, tokenizer, max_length=40, max_shared_tokens=1000)
    assert dropped == 3
    assert [c.row_ids for c in comparisons] == [["a", "e"]]
    assert all(ids[-1] == tokenizer.eos_token_id and tokenizer.decode(ids).endswith(("14<|end|>", "41<|end|>", "no<|end|>"))
               for c in comparisons for ids in c.sequences)  # fmt: skip


def test_a_response_is_dropped_at_one_token_too_many(tokenizer):
    needed = max(len(encode_conversation(tokenizer, row("a", "", "")["messages"], text)[0]) for text in ("1 4", "41"))
    assert encode_comparisons([row("a", "1 4", "41")], tokenizer, max_length=needed, max_shared_tokens=1000)[1] == 0
    assert encode_comparisons([row("a", "1 4", "41")], tokenizer, max_length=needed - 1, max_shared_tokens=1000) == ([], 1)


def test_unpaired_rows_are_left_out_and_not_counted_as_too_long(tokenizer):
    comparisons, dropped = encode_comparisons(
        [row("a", "14", None), row("b", None, "41"), row("c", "14", "41")], tokenizer, max_length=64, max_shared_tokens=1000
    )
    assert ([c.row_ids for c in comparisons], dropped) == ([["c"]], 0)


@pytest.mark.parametrize("zero_stage", [0, 2])
def test_each_member_of_an_ensemble_is_freed_before_the_next(sft_folder: Path, tmp_path: Path, zero_stage: int):
    taken: list[int] = []

    def loop(*, first_step: int, seed: int) -> TrainLoop:
        return TrainLoop(
            seed=seed,
            checkpoint_every=100,
            eval_every=100,
            first_step=first_step,
            checkpoints=lambda phase: CheckpointStore(tmp_path / phase, StoreSettings(zero_stage=zero_stage)),
            metrics_log=lambda step: supervised_ranks.Curves(),
            stop_requested=lambda: False,
        )

    def save(*_: object, part: str) -> None:
        taken.append(tensor_bytes() - before)

    config = supervised_ranks.Case("reward", str(tmp_path), {"ensemble": 3, "zero_stage": zero_stage}).config
    splits = {split: supervised_ranks.rows(16) for split in ("train", "validation", "test")}
    tokenizer = load_tokenizer(str(sft_folder), trust_remote_code=False)
    before = tensor_bytes()
    train_ensemble(sft_folder, splits.__getitem__, tokenizer, config, model=tiny_params().model, seed=0, loop=loop, save=save)
    assert len(taken) == 3 and max(taken) < 1.05 * taken[0]
