"""Steps of a response: where a process reward model gives its scores, in training and afterwards."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from rlhf_core.models.pieces import token_pieces

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlhf_core.data.tokens import EncodedTurns


def step_ends(tokenizer: PreTrainedTokenizerBase, prompt_ids: Sequence[int], response_ids: Sequence[int], separator: str) -> list[int]:
    """Return the positions in a response's ids of the tokens that end a step.

    A step ends with the token that completes the separator behind it, the last step with the response's last token. White space between
    separators is no step, and special tokens have no text. A response of nothing but white space has one step.
    """
    pieces = token_pieces(tokenizer, prompt_ids, response_ids, special=False)
    text, lengths = "".join(pieces), list(accumulate(map(len, pieces)))
    ends, start = [], 0
    while (at := text.find(separator, start)) >= 0:
        behind = at + len(separator)
        if text[start:at].strip():
            ends.append(bisect_left(lengths, behind))
        start = behind
    if ends and not text[start:].strip():
        ends.pop()
    return [*ends, len(pieces) - 1]


def turn_step_ends(turns: EncodedTurns, i: int, tokenizer: PreTrainedTokenizerBase, separator: str) -> list[int]:
    """Return the positions in `turns.ids(i)` of the tokens that end a step of its turn."""
    ids, start = turns.ids(i), turns.start(i)
    return [start + end for end in step_ends(tokenizer, ids[:start], ids[start:], separator)]


def check_kept_steps(changed: Sequence[str], count: int) -> None:
    """Check that the chat template kept the steps of labelled responses.

    Args:
        changed: ids of the rows whose response has other steps. count: number of all rows.
    Raises:
        ValueError: it changed some.
    """
    if changed:
        raise ValueError(
            f"train_reward: expected the chat template to keep the steps of responses, got others in {len(changed)} of {count} "
            f"({changed[0]} the first); take another template, or a reward.step_separator that the template doesn't write"
        )
