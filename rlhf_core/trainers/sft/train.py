"""Supervised fine-tuning: the next-token loss on the assistant's tokens, or on all tokens of a text for pretraining."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_core.config import ConditionalSftConfig, ModelConfig, RejectionSamplingConfig, SftConfig
from rlhf_core.engines.deepspeed.engine import TrainEngine, device
from rlhf_core.engines.deepspeed.ranks import own_parts, summed, total
from rlhf_core.models.build import load_language_model
from rlhf_core.models.forward import PolicyModule
from rlhf_core.models.lora import add_adapters
from rlhf_core.models.tokenizer import encode_turns
from rlhf_core.trainers.supervised.demonstrations import (
    Demonstration,
    collate_demonstrations,
    demonstrations_of,
    encode_texts,
    trained_turns,
)
from rlhf_core.trainers.supervised.encoding import in_background
from rlhf_core.trainers.supervised.loop import Metrics, Phase, TrainLoop, engine_settings, train_loop, train_phase

if TYPE_CHECKING:
    from rlhf_core.models.vision import Sight
    from rlhf_core.stage.training import TrainRun

COLUMNS = ("step", "phase", "loss", "heldout_loss", "learning_rate", "grad_norm")

Rows = list[dict[str, Any]]


def sft_phase(
    name: str,
    train: Sequence[Demonstration],
    heldout: Sequence[Demonstration],
    *,
    steps: int,
    batch_size: int,
    pad_id: int,
    microbatch_tokens: int,
    sight: Sight | None = None,
) -> Phase:
    """Return a phase whose steps' loss is the mean over the step's trained tokens, whatever the micro-batches and ranks."""

    def train_batch(engine: TrainEngine, chosen: list[int]) -> Metrics:
        examples = [train[i] for i in chosen]
        num_loss_tokens, shares = sum(e.num_trained for e in examples), []
        for part, counts in _own_parts(examples, microbatch_tokens):
            loss = _negative_logprob(engine, part, pad_id, sight) / num_loss_tokens
            engine.backward(loss if counts else 0.0 * loss)
            shares += [loss.detach()] if counts else []
        return {"loss": summed(total(shares))[0], "tokens": float(sum(len(e.ids) for e in examples))}

    def evaluate(engine: TrainEngine) -> Metrics:
        return {"heldout_loss": heldout_loss(engine, heldout, pad_id=pad_id, microbatch_tokens=microbatch_tokens, sight=sight)}

    return Phase(name, steps, batch_size, len(train), train_batch, evaluate if heldout else None)


def heldout_loss(
    engine: TrainEngine, examples: Sequence[Demonstration], *, pad_id: int, microbatch_tokens: int, sight: Sight | None = None
) -> float:
    """Return the mean negative log-probability per trained token, in nats."""
    losses = [_negative_logprob(engine, part, pad_id, sight) * counts for part, counts in _own_parts(examples, microbatch_tokens)]
    return summed(total(losses))[0] / sum(e.num_trained for e in examples)


def _own_parts(examples: Sequence[Demonstration], microbatch_tokens: int) -> list[tuple[list[Demonstration], bool]]:
    """Return this rank's micro-batches, and whether each counts."""
    parts = own_parts([len(e.ids) for e in examples], max_tokens=microbatch_tokens)
    return [([examples[i] for i in part.positions], part.counts) for part in parts]


def _negative_logprob(engine: TrainEngine, examples: list[Demonstration], pad_id: int, sight: Sight | None):
    batch = collate_demonstrations(examples, pad_id=pad_id, sight=sight).to(device())
    return -engine(batch).logprobs.sum()


def finetune(
    run: TrainRun,
    start: Path,
    train: Sequence[Demonstration],
    heldout: Sequence[Demonstration],
    config: RejectionSamplingConfig | ConditionalSftConfig,
    tokenizer: PreTrainedTokenizerBase,
) -> dict[str, Any]:
    """Train on demonstrations that a stage has made, as in rejection sampling and conditional SFT. Every rank calls this.

    Args:
        start: Hugging Face folder of the model to start from.
        tokenizer: tokenizer that is saved with the model.
    Returns:
        Metrics of `train_phase`.
    Raises:
        Interrupted: a stop was requested; the state is saved.
    """
    model, loop = run.params.model, train_loop(run, config, COLUMNS, first_step=0)
    steps = config.steps_over(len(train), per_step=config.batch_size)
    sizes = {"steps": steps, "batch_size": config.batch_size, "microbatch_tokens": config.microbatch_tokens}
    phase = sft_phase("sft", train, heldout, pad_id=tokenizer.pad_token_id, **sizes)
    language_model = load_language_model(start, trust_remote_code=model.trust_remote_code, training_dtype=model.dtype)
    settings = engine_settings(config, steps=steps, learning_rate=config.learning_rate, dtype=model.dtype, seed=loop.seed)
    add_adapters(language_model, config.lora, seed=loop.seed)
    engine = TrainEngine(PolicyModule(language_model), settings)
    metrics = train_phase(engine, phase, loop)
    run.save_model(language_model, engine.state_dict(), tokenizer)
    return metrics


def pretrain(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: Rows,
    config: SftConfig,
    *,
    model_config: ModelConfig,
    loop: TrainLoop,
) -> tuple[dict[str, torch.Tensor], int]:
    """Pretrain a model with random weights for a short time on plain text. The model can't be used afterwards.

    Returns:
        The trained weights, on every rank, and the number of steps.
    """
    examples, _ = encode_texts(rows, tokenizer, max_length=model_config.max_length)
    batch_size = config.pretrain.batch_size
    steps = config.pretrain.steps_over(len(examples), per_step=batch_size)
    phase = sft_phase(
        "pretrain",
        examples,
        [],
        steps=steps,
        batch_size=batch_size,
        pad_id=tokenizer.pad_token_id,
        microbatch_tokens=config.microbatch_tokens,
    )
    settings = engine_settings(config, steps=steps, learning_rate=config.pretrain.learning_rate, dtype=model_config.dtype, seed=loop.seed)
    engine = TrainEngine(PolicyModule(model), settings)
    train_phase(engine, phase, replace(loop, keep_best=False, max_minutes=None))
    weights = engine.state_dict(every_rank=True)
    engine.close()
    return weights, steps


def begin_demonstrations(
    rows: Rows, tokenizer: PreTrainedTokenizerBase, config: SftConfig, *, max_length: int
) -> Callable[[], tuple[Sequence[Demonstration], int]]:
    """Begin to encode demonstrations in the background, and return a collective function that waits for `encode_demonstrations`' result."""
    turns = [trained_turns(row, config.train_on) for row in rows]
    counts = list(map(len, turns))
    encoded = in_background(encode_turns, tokenizer, [turn for of_row in turns for turn in of_row])
    return lambda: demonstrations_of(encoded(), counts, max_length=max_length, train_on_thoughts=config.train_on_thoughts)


def train_on_demonstrations(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    begun: Sequence[Callable[[], tuple[Sequence[Demonstration], int]]],
    config: SftConfig,
    *,
    model_config: ModelConfig,
    loop: TrainLoop,
    sight: Sight | None = None,
) -> tuple[TrainEngine, dict[str, Any]]:
    """Train by SFT, with adapters if configured. Return the engine and the stage's metrics.

    Args:
        begun: what `begin_demonstrations` returned for the training rows and for the held-out ones.
        sight: of a model that sees.
    """
    (train, dropped), (heldout, _) = (encoded() for encoded in begun)
    parts = {"pad_id": tokenizer.pad_token_id, "microbatch_tokens": config.microbatch_tokens, "sight": sight}
    steps = config.steps_over(len(train), per_step=config.batch_size)
    phase = sft_phase("sft", train, list(heldout), steps=steps, batch_size=config.batch_size, **parts)
    settings = engine_settings(config, steps=steps, learning_rate=config.learning_rate, dtype=model_config.dtype, seed=loop.seed)
    parameters = sum(p.numel() for p in model.parameters())
    add_adapters(model, config.lora, seed=loop.seed)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    engine = TrainEngine(PolicyModule(model), settings)
    metrics = {"demonstrations": len(train), "dropped_too_long": dropped, "parameters": parameters, "trained_parameters": trained}
    return engine, metrics | train_phase(engine, phase, loop)
