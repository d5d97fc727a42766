"""Direct alignment: the DPO family on pairs, KTO on single responses.

`train_on_pairs` and `train_on_examples` go from rows to a trained engine; the stages and the rounds of iterative DPO call them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_core.config import REFERENCE_FREE, DpoConfig, KtoConfig, ModelConfig
from rlhf_core.data.batching import batch_indices
from rlhf_core.engines.deepspeed_engine import TrainEngine, device
from rlhf_core.models.build import frozen, load_language_model
from rlhf_core.models.forward import PolicyModule
from rlhf_core.models.lora import add_adapters, quantize_base
from rlhf_core.models.probe import shares_prefixes
from rlhf_core.models.tokenizer import load_tokenizer
from rlhf_core.trainers.preference.data import Continuation, ResponseForward, encode_examples, encode_pairs
from rlhf_core.trainers.preference.objectives import PairObjective, ResponseObjective, example_items, pair_items, preference_phase
from rlhf_core.trainers.preference.reference import Reference, live_reference, no_reference, precomputed_reference
from rlhf_core.trainers.supervised import Phase, TrainLoop, engine_settings, evaluate, train_phase

# Of the curves; kl is KTO's baseline.
COLUMNS = (
    *("step", "phase", "loss"),
    *("reward_accuracy", "reward_margin", "chosen_reward", "rejected_reward", "chosen_logprob", "rejected_logprob"),
    *("kl", "heldout_loss", "heldout_accuracy", "heldout_margin", "learning_rate", "grad_norm"),
)


@dataclass(frozen=True)
class PreferenceRun:
    """One piece of training, apart from its rows and its section of params.yaml.

    start: a Hugging Face folder with its tokenizer; the reference too.
    steps: optimizer steps, in the place of the section's own.
    scratch: a folder of this work alone, that is of these rows, this start and these steps and settings: a run that was interrupted finds
        its checkpoint and the reference's log-probabilities there.
    loop: what `Stage.loop(config, COLUMNS, first_step=...)` returns.
    """

    start: Path
    steps: int
    model: ModelConfig
    scratch: Path
    loop: TrainLoop

    def batches(self, batch_size: int, num_examples: int) -> list[list[int]]:
        """The examples of each step, as the training loop draws them."""
        seed = self.loop.seed
        return [batch_indices(step, batch_size=batch_size, num_examples=num_examples, seed=seed) for step in range(self.steps)]


class Trained(NamedTuple):
    """What training leaves behind.

    model: as loaded, for `save_model`; the trained weights are `engine.state_dict()`.
    metrics: loss (its name), steps, pairs or examples, dropped_too_long, and the held-out figures at the end.
    """

    engine: TrainEngine
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    metrics: dict[str, Any]


def train_on_pairs(train_rows: list[dict], heldout_rows: list[dict], config: DpoConfig, run: PreferenceRun) -> Trained:
    """DPO or a relative of it.

    Args:
        train_rows, heldout_rows: of the preference schema (messages, chosen, rejected); unpaired ones are left out. Without held-out rows
            nothing is evaluated.
    Raises:
        Interrupted: a stop was asked for; the state is saved.
        ValueError: no pair is left to train on.
    """
    tokenizer = load_tokenizer(str(run.start), trust_remote_code=run.model.trust_remote_code)
    train, dropped = encode_pairs(train_rows, tokenizer, max_length=run.model.max_length)
    heldout, _ = encode_pairs(heldout_rows, tokenizer, max_length=run.model.max_length)
    if not train:
        raise ValueError(
            f"preference data: expected rows with a chosen and a rejected response of at most {run.model.max_length} tokens with their "
            f"prompt, got none of {len(train_rows)}; raise model.max_length, or take the method kto for single responses"
        )
    items = pair_items(train, heldout, run.batches(config.batch_size, len(train)))
    model, forward, reference = _models("none" if config.loss in REFERENCE_FREE else config.reference, items, tokenizer, config, run)
    phase = preference_phase(PairObjective(config, forward, reference), train, heldout, steps=run.steps)
    engine, heldout_metrics = _train(model, phase, config, run)
    counts = {"loss": config.loss, "steps": run.steps, "pairs": len(train), "dropped_too_long": dropped}
    return Trained(engine, model, tokenizer, counts | heldout_metrics)


def train_on_examples(train_rows: list[dict], heldout_rows: list[dict], config: KtoConfig, run: PreferenceRun) -> Trained:
    """KTO or its relative on single responses, a pair being two of them. Otherwise as `train_on_pairs`."""
    tokenizer = load_tokenizer(str(run.start), trust_remote_code=run.model.trust_remote_code)
    train, dropped = encode_examples(train_rows, tokenizer, max_length=run.model.max_length)
    heldout, _ = encode_examples(heldout_rows, tokenizer, max_length=run.model.max_length)
    if not train:
        raise ValueError(
            f"preference data: expected responses of at most {run.model.max_length} tokens with their prompt, got none in "
            f"{len(train_rows)} rows; raise model.max_length"
        )
    items = example_items(train, heldout, run.batches(config.batch_size, len(train)), config, max_length=run.model.max_length)
    model, forward, reference = _models(config.reference, items, tokenizer, config, run)
    objective = ResponseObjective(config, forward, reference, run.model.max_length)
    phase = preference_phase(objective, train, heldout, steps=run.steps)
    engine, heldout_metrics = _train(model, phase, config, run)
    counts = {"loss": config.loss, "steps": run.steps, "examples": len(train), "dropped_too_long": dropped}
    return Trained(engine, model, tokenizer, counts | heldout_metrics)


def _load(run: PreferenceRun) -> PreTrainedModel:
    return load_language_model(run.start, trust_remote_code=run.model.trust_remote_code, training_dtype=run.model.dtype)


def _models(
    kind: str, items: list[Continuation], tokenizer: PreTrainedTokenizerBase, config: DpoConfig | KtoConfig, run: PreferenceRun
) -> tuple[PreTrainedModel, ResponseForward, Reference]:
    """The policy to be, how responses go through it, and the reference.

    Args:
        kind: precomputed | live | none.
        items: all that training and evaluation will ask of the reference.
    """
    model = _load(run)
    shares = shares_prefixes(model, device=device(), max_length=run.model.max_length)
    forward = ResponseForward(tokenizer.pad_token_id, shares, config.microbatch_tokens)

    def reference() -> PolicyModule:
        start = _load(run)
        quantize_base(start, config.lora)
        return frozen(PolicyModule(start), device=device(), dtype=getattr(torch, run.model.dtype))

    if kind == "none":
        return model, forward, no_reference
    if kind == "live":
        return model, forward, live_reference(reference(), forward)
    return model, forward, precomputed_reference(reference, items, forward, path=run.scratch / "reference.pt")


def _train(model: PreTrainedModel, phase: Phase, config: DpoConfig | KtoConfig, run: PreferenceRun) -> tuple[TrainEngine, dict[str, float]]:
    """The engine at the end of the phase, and its held-out figures."""
    seed = run.loop.seed
    settings = engine_settings(config, steps=run.steps, learning_rate=config.learning_rate, dtype=run.model.dtype, seed=seed)
    add_adapters(model, config.lora, seed=seed)
    engine = TrainEngine(PolicyModule(model), settings)
    train_phase(engine, phase, run.loop)
    return engine, {} if phase.evaluate is None else evaluate(engine, phase.evaluate)
