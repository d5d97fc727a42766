"""SFT of a trained model on demonstrations that a stage has made: what rejection sampling and conditional SFT share."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedModel

from rlhf_core.config import ConditionalSftConfig, ModelConfig, RejectionSamplingConfig
from rlhf_core.engines.deepspeed_engine import TrainEngine
from rlhf_core.models.build import load_language_model
from rlhf_core.models.forward import PolicyModule
from rlhf_core.models.lora import add_adapters
from rlhf_core.trainers.demonstrations import Demonstration
from rlhf_core.trainers.sft import sft_phase
from rlhf_core.trainers.supervised import engine_settings, evaluate, train_phase

COLUMNS = ("step", "phase", "loss", "heldout_loss", "learning_rate", "grad_norm")


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
    loop: dict[str, Any],
) -> Finetuned:
    """`config.steps` optimizer steps on `train`.

    Args:
        start: Hugging Face folder.
        loop: what `Stage.loop(config, COLUMNS, first_step=0)` returns.
    Raises:
        Interrupted: a stop was asked for; the state is saved.
    """
    phase = sft_phase(
        "sft",
        train,
        heldout,
        steps=config.steps,
        batch_size=config.batch_size,
        pad_id=pad_id,
        microbatch_tokens=config.microbatch_tokens,
    )
    language_model = load_language_model(start, trust_remote_code=model.trust_remote_code, training_dtype=model.dtype)
    seed = loop["settings"].seed
    settings = engine_settings(config, steps=config.steps, learning_rate=config.learning_rate, dtype=model.dtype, seed=seed)
    add_adapters(language_model, config.lora, seed=seed)
    engine = TrainEngine(PolicyModule(language_model), settings)
    train_phase(engine, phase, **loop)
    metrics = evaluate(engine, phase.evaluate) if phase.evaluate is not None else {}
    return Finetuned(engine, language_model, {"steps": config.steps, **metrics})
