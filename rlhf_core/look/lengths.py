"""Chooses the lengths in tokens of sequences (prompt and response) and of sampled responses."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rlhf_core.look.facts import DataFacts
from rlhf_core.look.methods import Choice
from rlhf_core.look.rows import quantile

KEPT = 0.98  # of the rows, where the model's positions allow; a sample's quantile is a little off
NEEDED = 0.95  # of the rows: fewer are a recipe that hides its loss
STEPS = ((1024, 64), (4096, 256), (1 << 60, 1024))  # lengths up to the first number are multiples of the second
ROOM = 1.25  # of sampled responses over the demonstrations' 0.98 quantile
OWN_ANSWERS, OWN_ANSWERS_ON_CPU = 512, 256  # tokens of a chat model's own answers, which the data doesn't show
ALL_KEPT = 1024  # tokens; where the longest row has no more, none is left out
FEWEST_NEW, MOST_NEW = 32, 512  # tokens of answers in the evaluation


@dataclass(frozen=True)
class Lengths:
    """The proposed lengths in tokens.

    max_length: value for model.max_length. new_tokens: length of a sampled response, in RL and in the evaluation.
    left_out: for each use the share of rows that are too long, or that leave a response of RL no room.
    forced: the model's positions leave out more than NEEDED allows.
    """

    max_length: int
    new_tokens: int
    left_out: dict[str, float]
    forced: bool

    @property
    def worst(self) -> tuple[float, str]:
        """The largest share that is left out, with its use."""
        return max(((share, use) for use, share in self.left_out.items()), default=(0.0, ""))


def round_up(tokens: float) -> int:
    """Return the smallest round length, such as 512 or 768, that is at least the given one."""
    step = next(step for most, step in STEPS if tokens <= most)
    return max(1, math.ceil(tokens / step)) * step


def propose_lengths(data: DataFacts, choice: Choice, positions: int | None, *, given: int | None, on_gpu: bool) -> Lengths:
    """Return the shortest round lengths that keep the share KEPT of each use's rows, or all rows if they are short.

    Prompts must leave room for a sampled response within the model's positions.

    Args:
        on_gpu: whether answers are sampled on a GPU.
        given: model.max_length, chosen by the user.
    """
    most = given or positions
    new = _new_tokens(data, choice, most, OWN_ANSWERS if on_gpu or choice.name == "grpo" else OWN_ANSWERS_ON_CPU)
    trained = [use for use in choice.uses if use != "prompt"]
    wanted = [_kept(data, use, 0) for use in trained if use in data.uses]
    wanted.append(_kept(data, "prompt", new) if "prompt" in data.uses else new + FEWEST_NEW)  # room for answers in RL and evaluation
    length = given or round_up(max(wanted))
    if most is not None:
        length = min(length, most)
    room = new if choice.name == "grpo" else 0
    left_out = {use: _longer(data, use, length - (room if use == "prompt" else 0)) for use in choice.uses if use in data.uses}
    return Lengths(length, new, left_out, forced=max(left_out.values(), default=0.0) > 1 - NEEDED)


def _kept(data: DataFacts, use: str, room: int) -> float:
    """Sequence length that keeps all rows of a use with so much room, or the share KEPT if all would take more than ALL_KEPT tokens."""
    lengths = data.uses[use].lengths
    longest = quantile(lengths, 1.0) + room
    return longest if longest <= ALL_KEPT else quantile(lengths, KEPT) + room


def _longer(data: DataFacts, use: str, length: int) -> float:
    counts = data.uses[use]
    return counts.longer_than(length) / max(1, counts.lengths.total())


def _new_tokens(data: DataFacts, choice: Choice, most: int | None, own: int) -> int:
    """Length of a sampled response: more than SFT teaches by some room, or `own` for a chat model's own answers; at most half of the
    positions.
    """
    shown = quantile(data.responses, KEPT)
    if not choice.sft:
        wanted = max(own, round_up(ROOM * shown)) if choice.name == "grpo" else own
    elif choice.name == "grpo":
        wanted = round_up(ROOM * shown)
    else:
        wanted = min(MOST_NEW, max(FEWEST_NEW, round_up(quantile(data.responses, NEEDED))))
    return wanted if most is None else max(1, min(wanted, most // 2))
