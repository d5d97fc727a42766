"""Supervised fine-tuning: next-token loss on the assistant's tokens, and a short pretraining for models that start from nothing."""

from __future__ import annotations

from rlhf_core.data.batching import microbatches
from rlhf_core.engines.deepspeed_engine import TrainEngine, device
from rlhf_core.trainers.demonstrations import Demonstration, collate_demonstrations
from rlhf_core.trainers.supervised import Metrics, Phase


def sft_phase(
    name: str,
    train: list[Demonstration],
    heldout: list[Demonstration],
    *,
    steps: int,
    batch_size: int,
    pad_id: int,
    microbatch_tokens: int,
) -> Phase:
    """Optimizer steps whose loss is the mean over the step's trained tokens, whatever the micro-batches."""

    def train_batch(engine: TrainEngine, chosen: list[int]) -> Metrics:
        examples = [train[i] for i in chosen]
        num_loss_tokens = _loss_tokens(examples)
        loss = sum(_backward(engine, part, num_loss_tokens, pad_id) for part in _parts(examples, microbatch_tokens))
        return {"loss": loss, "tokens": float(sum(len(e.ids) for e in examples))}

    def evaluate(engine: TrainEngine) -> Metrics:
        return {"heldout_loss": heldout_loss(engine, heldout, pad_id=pad_id, microbatch_tokens=microbatch_tokens)}

    return Phase(name, steps, batch_size, len(train), train_batch, evaluate if heldout else None)


def heldout_loss(engine: TrainEngine, examples: list[Demonstration], *, pad_id: int, microbatch_tokens: int) -> float:
    """Mean negative log-probability per trained token, in nats."""
    total = sum(float(_negative_logprob(engine, part, pad_id)) for part in _parts(examples, microbatch_tokens))
    return total / _loss_tokens(examples)


def _parts(examples: list[Demonstration], microbatch_tokens: int) -> list[list[Demonstration]]:
    return [[examples[i] for i in part] for part in microbatches([len(e.ids) for e in examples], max_tokens=microbatch_tokens)]


def _loss_tokens(examples: list[Demonstration]) -> int:
    return sum(e.num_trained for e in examples)


def _negative_logprob(engine: TrainEngine, examples: list[Demonstration], pad_id: int):
    batch = collate_demonstrations(examples, pad_id=pad_id).to(device())
    return -engine(batch).logprobs.sum()


def _backward(engine: TrainEngine, examples: list[Demonstration], num_loss_tokens: int, pad_id: int) -> float:
    loss = _negative_logprob(engine, examples, pad_id) / num_loss_tokens
    engine.backward(loss)
    return float(loss.detach())
