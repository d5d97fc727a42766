"""Trains directly on preferences, from rows to a trained engine: the DPO family on pairs, KTO on single responses.

`train_on_pairs` and `train_on_examples` encode rows, load policy and reference, and run the training loop of trainers.supervised.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_core.config import DpoConfig, KtoConfig, ModelConfig
from rlhf_core.data.batching import batch_indices
from rlhf_core.data.schema import Message
from rlhf_core.data.tokens import EncodedTurns, Examples
from rlhf_core.engines.deepspeed.engine import TrainEngine, device
from rlhf_core.engines.deepspeed.frozen import FrozenModel
from rlhf_core.engines.deepspeed.ranks import data_parallel_size, merged, on_rank_zero
from rlhf_core.files import replacing
from rlhf_core.models.build import load_language_model
from rlhf_core.models.forward import PolicyModule
from rlhf_core.models.lora import add_adapters, quantize_base, without_adapters
from rlhf_core.models.probe import shares_prefixes
from rlhf_core.models.tokenizer import encode_turns, load_tokenizer, one_object_each
from rlhf_core.models.vision import sight
from rlhf_core.progress import Bar
from rlhf_core.trainers.preference.objectives import (
    Continuation,
    Example,
    Microbatch,
    Pair,
    PairObjective,
    Reference,
    ResponseForward,
    ResponseObjective,
    mismatched,
    no_reference,
)
from rlhf_core.trainers.supervised.encoding import Begin, at_once, in_background
from rlhf_core.trainers.supervised.loop import Phase, TrainLoop, engine_settings, train_phase

# Of the curves; kl is KTO's baseline.
COLUMNS = (
    *("step", "phase", "loss"),
    *("reward_accuracy", "reward_margin", "chosen_reward", "rejected_reward", "chosen_logprob", "rejected_logprob"),
    *("kl", "heldout_loss", "heldout_accuracy", "heldout_margin", "learning_rate", "grad_norm"),
)

SIDES = ("chosen", "rejected")

log = logging.getLogger("rlhf")


@dataclass(frozen=True)
class PreferenceRun:
    """One training run, apart from its rows and its section of params.yaml.

    start: Hugging Face folder with model and tokenizer, which are the policy's start and the reference.
    scratch: folder for these rows, start, steps and settings only, in which an interrupted run finds its checkpoint and the reference's
        log-probabilities.
    loop: result of `train_loop(run, config, COLUMNS, first_step=...)`.
    steps: number of steps, in place of the section's steps and epochs.
    prepared: folder with the pictures of rows that have some.
    """

    start: Path
    model: ModelConfig
    scratch: Path
    loop: TrainLoop
    steps: int | None = None
    prepared: Path = Path()

    def steps_over(self, config: DpoConfig | KtoConfig, num_examples: int) -> int:
        return self.steps or config.steps_over(num_examples, per_step=config.batch_size)

    def batches(self, config: DpoConfig | KtoConfig, num_examples: int) -> list[list[int]]:
        """Return the positions of each step's examples, as the training loop draws them."""
        options = {"batch_size": config.batch_size, "num_examples": num_examples, "seed": self.loop.seed}
        return [batch_indices(step, **options) for step in range(self.steps_over(config, num_examples))]

    def load_model(self) -> PreTrainedModel:
        load_options = {"trust_remote_code": self.model.trust_remote_code, "vision": self.model.vision}
        return load_language_model(self.start, training_dtype=self.model.dtype, **load_options)

    def load_tokenizer(self) -> PreTrainedTokenizerBase:
        return load_tokenizer(str(self.start), trust_remote_code=self.model.trust_remote_code, vision=self.model.vision)


class Trained(NamedTuple):
    """The result of training.

    model: the model as it was loaded, for `save_model`; the trained weights are `engine.state_dict()`.
    metrics: loss (its name), pairs or examples, dropped_too_long, and the metrics of `train_phase`.
    """

    engine: TrainEngine
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    metrics: dict[str, Any]


def train_on_pairs(train_rows: list[dict], heldout_rows: list[dict], config: DpoConfig, run: PreferenceRun) -> Trained:
    """Train on pairs with a loss of PREFERENCE_LOSSES.

    Args:
        train_rows, heldout_rows: rows of the preference schema (messages, chosen, rejected); unpaired rows are left out. Without held-out
            rows there is no evaluation.
    Raises:
        Interrupted: a stop was requested, and the state is saved.
        ValueError: no pair is left to train on.
    """
    tokenizer = run.load_tokenizer()
    begun = [begin_pairs(rows, tokenizer, max_length=run.model.max_length, begin=in_background) for rows in (train_rows, heldout_rows)]
    num_rows = len(train_rows)
    del train_rows, heldout_rows  # their texts' memory
    model = run.load_model()
    (train, dropped), (heldout, _) = (encoded() for encoded in begun)
    if not train:
        raise ValueError(
            f"preference data: expected rows with a chosen and a rejected response of at most {run.model.max_length} tokens with their "
            f"prompt, got none of {num_rows}; raise model.max_length, or take the method kto for single responses"
        )
    used = dict.fromkeys(i for batch in run.batches(config, len(train)) for i in batch)
    items = (side for pairs in ((train[i] for i in used), heldout) for pair in pairs for side in pair)
    forward, reference = _forward_and_reference(model, items, tokenizer, config, run)
    trained = _train(model, PairObjective(config, forward, reference), train, list(heldout), run)
    counts = {"loss": config.loss, "pairs": len(train), "dropped_too_long": dropped}
    return Trained(trained[0], model, tokenizer, counts | trained[1])


def train_on_examples(train_rows: list[dict], heldout_rows: list[dict], config: KtoConfig, run: PreferenceRun) -> Trained:
    """Train on single responses with a loss of UNPAIRED_LOSSES; a pair counts as two of them. The rest is as for `train_on_pairs`."""
    tokenizer = run.load_tokenizer()
    begun = [begin_examples(rows, tokenizer, max_length=run.model.max_length, begin=in_background) for rows in (train_rows, heldout_rows)]
    num_rows = len(train_rows)
    del train_rows, heldout_rows  # their texts' memory
    model = run.load_model()
    (train, dropped), (heldout, _) = (encoded() for encoded in begun)
    if not train:
        raise ValueError(
            f"preference data: expected responses of at most {run.model.max_length} tokens with their prompt, got none in "
            f"{num_rows} rows; raise model.max_length"
        )
    heldout = list(heldout)
    items = example_items(train, heldout, run.batches(config, len(train)), config, max_length=run.model.max_length)
    forward, reference = _forward_and_reference(model, items, tokenizer, config, run)
    trained = _train(model, ResponseObjective(config, forward, reference, run.model.max_length), train, heldout, run)
    counts = {"loss": config.loss, "examples": len(train), "dropped_too_long": dropped}
    return Trained(trained[0], model, tokenizer, counts | trained[1])


def begin_pairs(
    rows: list[dict], tokenizer: PreTrainedTokenizerBase, *, max_length: int, begin: Begin = at_once
) -> Callable[[], tuple[Sequence[Pair], int]]:
    """Begin to encode rows with messages, chosen and rejected. Unpaired rows (one side null) are left out.

    Returns:
        A function that waits for the pairs, and the number of pairs dropped because a side has too many tokens: truncated, it would look
        complete.
    """
    encoded = begin(encode_turns, tokenizer, [turn for row in rows if None not in (row["chosen"], row["rejected"]) for turn in _turns(row)])

    def result() -> tuple[Sequence[Pair], int]:
        turns = encoded()
        kept = [(i,) for i in range(0, len(turns), 2) if max(turns.length(i), turns.length(i + 1)) <= max_length]
        return Examples(lambda i: Pair(*_continuations(turns, i, i + 1)), kept), len(turns) // 2 - len(kept)

    return result


def begin_examples(
    rows: list[dict], tokenizer: PreTrainedTokenizerBase, *, max_length: int, begin: Begin = at_once
) -> Callable[[], tuple[Sequence[Example], int]]:
    """Begin to encode the single responses of rows with messages, chosen (desirable) and rejected (undesirable), of which one may be null.

    Returns:
        A function that waits for the responses, and the number dropped as too long.
    """
    desirable = [side == "chosen" for row in rows for side in SIDES if row[side] is not None]
    encoded = begin(encode_turns, tokenizer, [turn for row in rows for turn in _turns(row)])

    def result() -> tuple[Sequence[Example], int]:
        turns = encoded()
        kept = [(i, desirable[i]) for i in range(len(turns)) if turns.length(i) <= max_length]
        return Examples(lambda i, good: Example(*_continuations(turns, i), good), kept), len(turns) - len(kept)

    return result


def _turns(row: dict) -> Iterator[tuple[list[Message], Message]]:
    """Return a row's conversation with each of its responses."""
    return ((row["messages"], {"role": "assistant", "content": row[side]}) for side in SIDES if row[side] is not None)


def _continuations(turns: EncodedTurns, *numbers: int) -> list[Continuation]:
    """Return the continuations of some turns, which follow one prompt."""
    prompt = tuple(one_object_each(turns.tokens[turns.prompts[numbers[0]]]))
    pictures = turns.pictures.get(numbers[0], ())
    return [Continuation(prompt, tuple(one_object_each(turns.tokens[turns.turns[i]])), pictures) for i in numbers]


def example_items(
    train: Sequence[Example], heldout: Sequence[Example], batches: list[list[int]], config: KtoConfig, *, max_length: int
) -> Iterator[Continuation]:
    """Yield all items whose reference log-probabilities are needed for training on these batches and for evaluation."""
    steps = (([train[i] for i in batch], 1) for batch in batches)
    for examples, shift in itertools.chain(steps, [(heldout, len(heldout) // 2)]):
        yield from (e.continuation for e in examples)
        yield from mismatched(examples, config, shift=shift, max_length=max_length)


# Policy and reference


def _forward_and_reference(
    model: PreTrainedModel,
    items: Iterable[Continuation],
    tokenizer: PreTrainedTokenizerBase,
    config: DpoConfig | KtoConfig,
    run: PreferenceRun,
) -> tuple[ResponseForward, Reference]:
    """Return how responses go through the model that will be trained, and the reference.

    Args:
        items: all items that the reference will be evaluated on.
    """
    seeing = sight(tokenizer, run.prepared)
    shares = seeing is None and shares_prefixes(model, device=device(), max_length=run.model.max_length)
    forward = ResponseForward(tokenizer.pad_token_id, shares, config.microbatch_tokens, seeing)

    def load_reference() -> FrozenModel:
        start = run.load_model()
        quantize_base(start, config.lora)
        return FrozenModel(PolicyModule(start), dtype=run.model.dtype, zero_stage=config.zero_stage, offload=config.offload_frozen)

    kind = config.reference_kind
    if kind == "none":
        return forward, no_reference
    if kind == "policy":
        return forward, policy_reference(forward)
    if kind == "live":
        return forward, live_reference(load_reference(), forward)
    return forward, precomputed_reference(load_reference, items, forward, path=run.scratch / "reference.pt")


def policy_reference(forward: ResponseForward) -> Reference:
    """Return a reference that computes with the policy without its adapters and dropout, which is the model that training starts from."""

    @torch.no_grad()
    def logprobs(engine: TrainEngine, microbatches: list[Microbatch]) -> list[torch.Tensor]:
        with without_adapters(engine.module):
            return [forward.logprobs(engine, part.groups) for part in microbatches]

    return logprobs


def live_reference(reference: FrozenModel, forward: ResponseForward) -> Reference:
    """Return a reference that computes a forward pass for each micro-batch. Weights on the host move to the device once for all of them."""

    @torch.no_grad()
    def logprobs(engine: TrainEngine, microbatches: list[Microbatch]) -> list[torch.Tensor]:
        with reference.in_use() as module:
            return [forward.logprobs(module, part.groups) for part in microbatches]

    return logprobs


def precomputed_reference(
    load: Callable[[], FrozenModel], items: Iterable[Continuation], forward: ResponseForward, *, path: Path
) -> Reference:
    """Return a reference that looks up log-probabilities of all distinct items, which are computed once by all ranks and kept in `path`.

    A file with the same items is read instead.

    Args:
        load: function that loads the model; called only if log-probabilities must be computed, after which the model is freed.
        path: file in a folder for one reference model only, because the file identifies its items and not its model.
    """
    distinct: dict[bytes, Continuation] = {}
    for item in items:
        distinct.setdefault(item.digest, item)
    of_items = hashlib.sha256(b"".join(distinct)).hexdigest()

    def read() -> dict[str, Any] | None:
        found = torch.load(path, weights_only=True) if path.exists() else {"items": None}
        return found if found["items"] == of_items else None

    def write() -> None:
        with replacing(path) as aside:
            torch.save(kept, aside)

    kept = on_rank_zero(read, subject="reference")
    if kept is not None:
        log.info("reference: reusing the log-probabilities of %d responses from an earlier start", len(distinct))
    else:
        reference = load()
        with reference.in_use() as module:
            kept = {"items": of_items, "logprobs": _compute(module, list(distinct.values()), forward)}
        reference.close()
        del reference
        on_rank_zero(write, subject="reference")
    table = dict(zip(distinct, kept["logprobs"].tolist(), strict=True))
    del distinct  # the table's keys are all that is needed of it

    def logprobs(engine: TrainEngine, microbatches: list[Microbatch]) -> list[torch.Tensor]:
        digests = ([item.digest for group in part.groups for item in group.items] for part in microbatches)
        return [torch.tensor([table[digest] for digest in of_share], device=device()) for of_share in digests]

    return logprobs


@torch.no_grad()
def _compute(module: nn.Module, items: list[Continuation], forward: ResponseForward) -> torch.Tensor:
    """Return log-probabilities summed over response tokens, [items], on the CPU; on every rank those of all items."""
    sums = torch.zeros(len(items))
    with Bar("response of the reference", len(items)) as bar:

        def forward_part(part: Microbatch) -> None:
            logprobs = forward.logprobs(module, part.groups).float().cpu()
            if part.counts:
                positions = [i for group in part.groups for i in group.positions]
                sums[positions] = logprobs
                bar.step(data_parallel_size() * len(positions))

        module.backend.map(forward_part, forward.microbatches(items))
    return merged(sums)


# The training loop


def _train(
    model: PreTrainedModel, objective: PairObjective | ResponseObjective, train: Sequence[Any], heldout: list[Any], run: PreferenceRun
) -> tuple[TrainEngine, dict[str, float]]:
    """Return the trained engine, and the metrics of `train_phase`."""
    config, seed = objective.config, run.loop.seed
    steps = run.steps_over(config, len(train))
    phase = Phase(
        "preference",
        steps,
        config.batch_size,
        len(train),
        train_batch=lambda engine, positions: objective.train_batch(engine, [train[i] for i in positions]),
        evaluate=(lambda engine: objective.evaluate(engine, heldout)) if heldout else None,
    )
    settings = engine_settings(config, steps=steps, learning_rate=config.learning_rate, dtype=run.model.dtype, seed=seed)
    add_adapters(model, config.lora, seed=seed)
    engine = TrainEngine(PolicyModule(model), settings)
    return engine, train_phase(engine, phase, run.loop)
