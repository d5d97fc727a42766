"""Trains process reward models on labelled steps: a response is one sequence, and each end of a step has a score."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import pandas as pd
import torch
from transformers import PreTrainedTokenizerBase

from rlhf_core.algorithms.step_losses import step_cross_entropy
from rlhf_core.config import RewardConfig
from rlhf_core.data.hashing import prompt_name
from rlhf_core.data.heldout import as_step_table
from rlhf_core.data.tokens import Examples
from rlhf_core.engines.deepspeed.engine import TrainEngine, device
from rlhf_core.engines.deepspeed.ranks import merged, own_parts, summed, total
from rlhf_core.models.batch import collate_steps, padded_ends
from rlhf_core.models.steps import check_kept_steps, turn_step_ends
from rlhf_core.models.tokenizer import encode_scored_turns
from rlhf_core.trainers.supervised.encoding import Begin, at_once
from rlhf_core.trainers.supervised.loop import Metrics, Phase, beside_untrained


@dataclass(frozen=True)
class Solution:
    """A response whose steps have labels.

    ids: of conversation and response as the template writes them, the turn's end included.
    ends: positions of the tokens that end a step.    right: whether each step is right.
    """

    ids: list[int]
    ends: list[int]
    right: list[bool]
    row_id: str


def begin_solutions(
    rows: list[dict], tokenizer: PreTrainedTokenizerBase, separator: str, *, max_length: int, begin: Begin = at_once
) -> Callable[[int], tuple[Sequence[Solution], int]]:
    """Begin to encode rows of the use stepwise.

    Returns:
        A function that returns the solutions in the rows' order, and how many were dropped as too long. It takes the number of tokens in
        which prompts are shared, which these aren't.
    Raises:
        ValueError: (the function) the chat template changes a response's steps.
    """
    encoded = begin(encode_scored_turns, tokenizer, [(row["messages"], row["response"]) for row in rows])

    def result(_: int) -> tuple[Sequence[Solution], int]:
        turns = encoded()
        parts = [(i, turn_step_ends(turns, i, tokenizer, separator)) for i in range(len(rows)) if turns.length(i) <= max_length]
        check_kept_steps([rows[i]["id"] for i, ends in parts if len(ends) != len(rows[i]["labels"])], len(rows))

        def solution(i: int, ends: list[int]) -> Solution:
            return Solution(turns.ids(i), ends, [label >= 0 for label in rows[i]["labels"]], rows[i]["id"])

        return Examples(solution, parts), len(rows) - len(parts)

    return result


def step_phase(
    train: Sequence[Solution],
    heldout: Sequence[Solution],
    *,
    steps: int,
    batch_size: int,
    pad_id: int,
    microbatch_tokens: int,
    name: str = "reward",
) -> Phase:
    """Return a phase whose steps' loss is the mean over the labelled steps of the batch, whatever the micro-batches and ranks."""

    def train_batch(engine: TrainEngine, chosen: list[int]) -> Metrics:
        batch = [train[i] for i in chosen]
        number = sum(len(solution.ends) for solution in batch)
        shares, points = [], []
        for part in own_parts([len(s.ids) for s in batch], max_tokens=microbatch_tokens):
            of_part = [batch[i] for i in part.positions]
            scores, right = score_steps(engine, of_part, pad_id=pad_id), _right(of_part).to(device())
            share = step_cross_entropy(scores, right).sum() / number
            engine.backward(share if part.counts else 0.0 * share)
            if part.counts:
                shares.append(share.detach())
                points.append(((scores.detach() >= 0) == right).sum())
        loss, right_ones = summed(total(shares), total(points))
        return {"loss": loss, "accuracy": right_ones / number, "tokens": float(sum(len(s.ids) for s in batch))}

    def evaluate(engine: TrainEngine) -> Metrics:
        (scores,) = score_heldout_steps(engine, heldout, pad_id=pad_id, microbatch_tokens=microbatch_tokens)
        right = _right(heldout)
        losses = step_cross_entropy(scores, right)
        beside = beside_untrained(step_cross_entropy(torch.zeros_like(scores), right), losses, accuracy_error=0.5 / math.sqrt(len(losses)))
        return {"heldout_loss": float(losses.mean()), "heldout_accuracy": float(((scores >= 0) == right).float().mean()), **beside}

    return Phase(name, steps, batch_size, len(train), train_batch, evaluate if heldout else None)


def _right(solutions: Sequence[Solution]) -> torch.Tensor:
    return torch.tensor([right for solution in solutions for right in solution.right])


def score_steps(engine: TrainEngine, solutions: Sequence[Solution], *, pad_id: int) -> torch.Tensor:
    """Return the scores of all steps, solution after solution."""
    batch, places = collate_steps([s.ids for s in solutions], padded_ends([s.ends for s in solutions]), pad_id=pad_id)
    scores = engine(batch.to(device()))
    return scores[places[places >= 0].to(scores.device)]


def score_heldout_steps(engine: TrainEngine, solutions: Sequence[Solution], *, pad_id: int, microbatch_tokens: int) -> tuple[torch.Tensor]:
    """Return the scores of all steps on the CPU, solution after solution; on every rank those of all."""
    starts = [0, *accumulate(len(s.ends) for s in solutions)]
    scores = torch.zeros(starts[-1])
    with torch.no_grad():
        for part in own_parts([len(s.ids) for s in solutions], max_tokens=microbatch_tokens):
            found = score_steps(engine, [solutions[i] for i in part.positions], pad_id=pad_id)
            if part.counts:
                scores[[step for i in part.positions for step in range(starts[i], starts[i + 1])]] = found.float().cpu()
    return (merged(scores),)


class StepTask:
    """How a process reward model learns; see `PairTask`."""

    counted = "heldout_solutions"

    def __init__(self, config: RewardConfig, tokenizer: PreTrainedTokenizerBase, *, max_length: int):
        assert config.step_separator is not None
        self.config, self._tokenizer, self._max_length, self._separator = config, tokenizer, max_length, config.step_separator

    def begin(self, rows: list[dict], begin: Begin) -> Callable[[int], tuple[Sequence[Solution], int]]:
        return begin_solutions(rows, self._tokenizer, self._separator, max_length=self._max_length, begin=begin)

    def phase(self, train: Sequence[Solution], heldout: Sequence[Solution], **settings: Any) -> Phase:
        return step_phase(train, heldout, microbatch_tokens=self.config.microbatch_tokens, **settings)

    def score(self, engine: TrainEngine, heldout: Sequence[Solution], *, pad_id: int) -> tuple[torch.Tensor, ...]:
        return score_heldout_steps(engine, heldout, pad_id=pad_id, microbatch_tokens=self.config.microbatch_tokens)

    def counts(self, train: Sequence[Solution]) -> dict[str, int]:
        return {"solutions": len(train), "labelled_steps": sum(len(s.ends) for s in train)}

    def rows(self, split: str, scores: Sequence[torch.Tensor], solutions: Sequence[Solution], by_id: dict[str, dict]) -> list[tuple]:
        """Rows of `table`.

        Args:
            scores: [steps, members].
        """
        (of_steps,) = scores
        mean, std = of_steps.mean(1), of_steps.std(1, correction=0)
        sizes = [len(s.ends) for s in solutions]
        found = []
        for solution, means, stds in zip(solutions, mean.split(sizes), std.split(sizes), strict=True):
            row = by_id[solution.row_id]
            about = row["id"], row["source"], split, prompt_name(row["messages"])
            found.append((*about, row["labels"], means.tolist(), stds.tolist()))
        return found

    def table(self, rows: list[tuple]) -> pd.DataFrame:
        return as_step_table(rows)
