"""Supervised fine-tuning: the next-token loss on the assistant's tokens, or on all tokens of a text for pretraining."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_core.config import ConditionalSftConfig, ModelConfig, RejectionSamplingConfig, SftConfig
from rlhf_core.data.batching import microbatches
from rlhf_core.engines.deepspeed_engine import TrainEngine, device
from rlhf_core.models.build import load_language_model
from rlhf_core.models.forward import PolicyModule
from rlhf_core.models.lora import add_adapters
from rlhf_core.trainers.demonstrations import Demonstration, collate_demonstrations, encode_demonstrations, encode_texts
from rlhf_core.trainers.supervised import Metrics, Phase, TrainLoop, engine_settings, evaluate, train_phase

COLUMNS = ("step", "phase", "loss", "heldout_loss", "learning_rate", "grad_norm")

Rows = list[dict[str, Any]]


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
        num_loss_tokens, total = sum(e.num_trained for e in examples), 0.0
        for part in _parts(examples, microbatch_tokens):
            loss = _negative_logprob(engine, part, pad_id) / num_loss_tokens
            engine.backward(loss)
            total += float(loss.detach())
        return {"loss": total, "tokens": float(sum(len(e.ids) for e in examples))}

    def evaluate(engine: TrainEngine) -> Metrics:
        return {"heldout_loss": heldout_loss(engine, heldout, pad_id=pad_id, microbatch_tokens=microbatch_tokens)}

    return Phase(name, steps, batch_size, len(train), train_batch, evaluate if heldout else None)


def heldout_loss(engine: TrainEngine, examples: list[Demonstration], *, pad_id: int, microbatch_tokens: int) -> float:
    """Mean negative log-probability per trained token, in nats."""
    total = sum(float(_negative_logprob(engine, part, pad_id)) for part in _parts(examples, microbatch_tokens))
    return total / sum(e.num_trained for e in examples)


def _parts(examples: list[Demonstration], microbatch_tokens: int) -> list[list[Demonstration]]:
    return [[examples[i] for i in part] for part in microbatches([len(e.ids) for e in examples], max_tokens=microbatch_tokens)]


def _negative_logprob(engine: TrainEngine, examples: list[Demonstration], pad_id: int):
    batch = collate_demonstrations(examples, pad_id=pad_id).to(device())
    return -engine(batch).logprobs.sum()


class Finetuned(NamedTuple):
    """model: as loaded, for `save_model`; the trained weights are `engine.state_dict()`.

    metrics: steps, and heldout_loss where there is held-out data.
    """

    engine: TrainEngine
    model: PreTrainedModel
    metrics: dict[str, Any]


def finetune(
    start: Path,
    train: list[Demonstration],
    heldout: list[Demonstration],
    config: RejectionSamplingConfig | ConditionalSftConfig,
    *,
    pad_id: int,
    model: ModelConfig,
    loop: TrainLoop,
) -> Finetuned:
    """`config.steps` optimizer steps on demonstrations that a stage has made, as in rejection sampling and conditional SFT.

    Args:
        start: Hugging Face folder.
    Raises:
        Interrupted: a stop was requested; the state is saved.
    """
    sizes = {"steps": config.steps, "batch_size": config.batch_size, "microbatch_tokens": config.microbatch_tokens}
    phase = sft_phase("sft", train, heldout, pad_id=pad_id, **sizes)
    language_model = load_language_model(start, trust_remote_code=model.trust_remote_code, training_dtype=model.dtype)
    settings = engine_settings(config, steps=config.steps, learning_rate=config.learning_rate, dtype=model.dtype, seed=loop.seed)
    add_adapters(language_model, config.lora, seed=loop.seed)
    engine = TrainEngine(PolicyModule(language_model), settings)
    train_phase(engine, phase, loop)
    metrics = evaluate(engine, phase.evaluate) if phase.evaluate is not None else {}
    return Finetuned(engine, language_model, {"steps": config.steps, **metrics})


def pretrain(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: Rows,
    config: SftConfig,
    *,
    model_config: ModelConfig,
    loop: TrainLoop,
) -> int:
    """A short pretraining on plain text, in place, of a model with random weights. Returns the number of steps."""
    examples, _ = encode_texts(rows, tokenizer, max_length=model_config.max_length)
    steps, batch_size = config.pretrain.steps, config.pretrain.batch_size
    how = {"pad_id": tokenizer.pad_token_id, "microbatch_tokens": config.microbatch_tokens}
    phase = sft_phase("pretrain", examples, [], steps=steps, batch_size=batch_size, **how)
    settings = engine_settings(config, steps=steps, learning_rate=config.pretrain.learning_rate, dtype=model_config.dtype, seed=loop.seed)
    # A copy, since an engine leaves its hooks on the module that it trains.
    engine = TrainEngine(PolicyModule(copy.deepcopy(model)), settings)
    train_phase(engine, phase, loop)
    model.load_state_dict(engine.state_dict())
    return steps


def train_on_demonstrations(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    train_rows: Rows,
    heldout_rows: Rows,
    config: SftConfig,
    *,
    model_config: ModelConfig,
    loop: TrainLoop,
) -> tuple[TrainEngine, dict[str, Any]]:
    """SFT with adapters, if configured. Returns the engine and the stage's metrics."""
    how = {"max_length": model_config.max_length, "train_on": config.train_on, "train_on_thoughts": config.train_on_thoughts}
    train, dropped = encode_demonstrations(train_rows, tokenizer, **how)
    heldout, _ = encode_demonstrations(heldout_rows, tokenizer, **how)
    parts = {"pad_id": tokenizer.pad_token_id, "microbatch_tokens": config.microbatch_tokens}
    phase = sft_phase("sft", train, heldout, steps=config.steps, batch_size=config.batch_size, **parts)
    settings = engine_settings(config, steps=phase.steps, learning_rate=config.learning_rate, dtype=model_config.dtype, seed=loop.seed)
    parameters = sum(p.numel() for p in model.parameters())
    add_adapters(model, config.lora, seed=loop.seed)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    engine = TrainEngine(PolicyModule(model), settings)
    train_phase(engine, phase, loop)
    metrics = {"demonstrations": len(train), "dropped_too_long": dropped, "parameters": parameters, "trained_parameters": trained}
    return engine, metrics | (evaluate(engine, phase.evaluate) if phase.evaluate is not None else {})
