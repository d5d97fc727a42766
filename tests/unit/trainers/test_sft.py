"""SFT: which tokens count, and a loss that doesn't depend on how the step is cut."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import PAD, assert_weights_agree, policy_engine, sequences

from rlhf_core.models import head as heads
from rlhf_core.models.batch import collate_tokens
from rlhf_core.models.build import load_language_model
from rlhf_core.models.forward import PolicyModule
from rlhf_core.models.tokenizer import encode_conversation
from rlhf_core.trainers.sft.train import heldout_loss, sft_phase
from rlhf_core.trainers.supervised.demonstrations import Demonstration, encode_demonstrations, encode_texts

pytestmark = pytest.mark.usefixtures("world")
TRAIN = [
    Demonstration(ids, 1 + k % 4, ((len(ids) - 3, len(ids) - 1),) if len(ids) - 3 > 1 + k % 4 and k % 2 else ())
    for k, ids in enumerate(sequences(12, seed=4, longest=20))
]


def conversation(question: str, response: str) -> dict:
    return {"messages": [{"role": "user", "content": question}], "response": response}


def three_steps(folder: Path, microbatch_tokens: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    engine = policy_engine(folder)
    phase = sft_phase("sft", TRAIN, [], steps=3, batch_size=8, pad_id=PAD, microbatch_tokens=microbatch_tokens)
    losses = []
    for step in range(3):
        losses.append(phase.train_batch(engine, [(8 * step + k) % 12 for k in range(8)])["loss"])
        engine.step()
    return losses, engine.state_dict()


def test_token_mean_loss_is_the_same_for_any_microbatches(sft_folder: Path):
    losses, weights = three_steps(sft_folder, 10_000)
    for microbatch_tokens in (45, 1):
        cut_losses, cut_weights = three_steps(sft_folder, microbatch_tokens)
        assert cut_losses == pytest.approx(losses, rel=1e-5)
        assert_weights_agree(cut_weights, weights)


def hugging_face_loss(model, examples: list[Demonstration]) -> float:
    """transformers' own loss, over a padded batch whose labels are -100 where nothing counts."""
    width = max(len(e.ids) for e in examples)
    input_ids = torch.tensor([e.ids + [PAD] * (width - len(e.ids)) for e in examples])
    labels = torch.tensor([[-100] * e.start + e.ids[e.start :] + [-100] * (width - len(e.ids)) for e in examples])
    for row, (first, end) in ((row, span) for row, e in enumerate(examples) for span in e.skipped):
        labels[row, first:end] = -100
    mask = torch.tensor([[1] * len(e.ids) + [0] * (width - len(e.ids)) for e in examples])
    with torch.no_grad():
        return float(model(input_ids=input_ids, attention_mask=mask, labels=labels).loss)


def test_loss_equals_hugging_faces_own(sft_folder: Path):
    engine = policy_engine(sft_folder)
    phase = sft_phase("sft", TRAIN, [], steps=1, batch_size=8, pad_id=PAD, microbatch_tokens=45)
    assert any(e.skipped for e in TRAIN[:8])
    expected = hugging_face_loss(load_language_model(sft_folder), TRAIN[:8])
    assert phase.train_batch(engine, list(range(8)))["loss"] == pytest.approx(expected, rel=1e-5)
    with torch.no_grad():
        assert heldout_loss(engine, TRAIN[:8], pad_id=PAD, microbatch_tokens=45) == pytest.approx(expected, rel=1e-5)


def test_only_the_assistants_tokens_are_learned(sft_folder: Path, tokenizer, monkeypatch: pytest.MonkeyPatch):
    """The vocabulary's projection sees the states that predict them, and no others: not the prompt's, not padding's."""
    ids, start = encode_conversation(tokenizer, [{"role": "user", "content": "Please sort 41."}], "14")
    model = load_language_model(sft_folder)
    seen: list[torch.Tensor] = []
    monkeypatch.setattr(heads, "head_logprobs", lambda weight, hidden, *_, **__: (seen.append(hidden), None))
    PolicyModule(model)(collate_tokens([ids, [*ids, 7, 7, 7]], [start, start], pad_id=PAD, ends=[len(ids), len(ids)]))
    states = model.model(input_ids=torch.tensor([ids])).last_hidden_state[0, start - 1 : len(ids) - 1]
    torch.testing.assert_close(seen, [torch.cat([states, states])], rtol=0, atol=1e-5)


def test_the_assistants_tokens_are_the_response_and_its_end(tokenizer):
    (example,), dropped = encode_demonstrations([conversation("Please sort 41.", "14")], tokenizer, max_length=64)
    assert dropped == 0
    assert tokenizer.decode(example.ids[: example.start]) == "<|user|>Please sort 41.<|end|><|assistant|>"
    assert tokenizer.decode(example.ids[example.start :]) == "14<|end|>"


def test_demonstrations_that_are_too_long_are_dropped_and_counted_never_cut(tokenizer):
    rows = [conversation("Please sort 41.", "14"), conversation("Please sort 41.", "14 " * 30)]
    lengths = [len(encode_conversation(tokenizer, r["messages"], r["response"])[0]) for r in rows]
    for max_length, kept in ((lengths[1], lengths), (lengths[1] - 1, lengths[:1])):
        examples, dropped = encode_demonstrations(rows, tokenizer, max_length=max_length)
        assert ([len(e.ids) for e in examples], dropped) == (kept, 2 - len(kept))


def test_texts_are_learned_from_their_second_token_to_their_end(tokenizer):
    (example,), dropped = encode_texts([{"text": "sort 41"}, {"text": "41 " * 200}], tokenizer, max_length=64)
    assert (example.ids, example.start, dropped) == ([*tokenizer("sort 41")["input_ids"], tokenizer.eos_token_id], 1, 1)
    assert encode_texts([], tokenizer, max_length=64) == ([], 0)
