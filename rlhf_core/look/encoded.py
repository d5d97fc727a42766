"""Rows as the trainers have them: token ids and which of them are trained on, by the trainers' own functions."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlhf_core.config import Params
from rlhf_core.models.tokenizer import encode_conversation, encode_prompt, encode_scored
from rlhf_core.trainers.demonstrations import Demonstration, encode_demonstrations, encode_texts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BACK = 4  # tokens before one that its text may depend on: a space, or the bytes of one character
TORN = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True)
class Sequence:
    """One sequence that goes through a model.

    name: of the use and, of a pair, its side. ids, trained: [T]; trained: the loss or the compared log-probability is of this token.
    remark: for people.
    """

    name: str
    ids: list[int]
    trained: list[bool]
    remark: str = ""


def sequences(use: str, row: dict, tokenizer: PreTrainedTokenizerBase, params: Params) -> list[Sequence]:
    """What a row of a use becomes, whether it is too long or not.

    Raises:
        Unrenderable: the chat template doesn't take the conversation.
    """
    if use == "pretrain":
        return [_of_demonstration("pretrain", d) for d in encode_texts([row], tokenizer, max_length=sys.maxsize)[0]]
    if use == "sft":
        how = {"train_on": params.sft.train_on, "train_on_thoughts": params.sft.train_on_thoughts}
        return [_of_demonstration("sft", d) for d in encode_demonstrations([row], tokenizer, max_length=sys.maxsize, **how)[0]]
    if use == "prompt":
        ids = encode_prompt(tokenizer, row["messages"])
        label = row.get("label")
        return [Sequence("prompt", ids, [False] * len(ids), "no label" if label is None else f"label {label!r}")]
    return list(_sides(row, tokenizer))


def _sides(row: dict, tokenizer: PreTrainedTokenizerBase) -> Iterator[Sequence]:
    paired = row["chosen"] is not None and row["rejected"] is not None
    for side in ("chosen", "rejected"):
        if row[side] is not None:
            ids, start = encode_conversation(tokenizer, row["messages"], row[side])
            name = f"preference, {side}" if paired else f"kto, {'desirable' if side == 'chosen' else 'undesirable'}"
            scored = len(encode_scored(tokenizer, row["messages"], row[side]))
            remark = (
                f"the reward model reads {scored}, as the template writes the whole conversation" if paired and scored != len(ids) else ""
            )
            yield Sequence(name, ids, [False] * start + [True] * (len(ids) - start), remark)


def _of_demonstration(name: str, demonstration: Demonstration) -> Sequence:
    trained = [i >= demonstration.start for i in range(len(demonstration.ids))]
    for first, end in demonstration.skipped:
        trained[first:end] = [False] * (end - first)
    return Sequence(name, demonstration.ids, trained)


def pieces(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[tuple[str, int, int]]:
    """The text of the ids in parts: text, first token, end. A part is one token, or the tokens that one character is made of."""

    def decode(first: int, end: int) -> str:
        return tokenizer.decode(ids[first:end], skip_special_tokens=False, clean_up_tokenization_spaces=False)

    found, start = [], 0
    for end in range(1, len(ids) + 1):
        back = max(0, start - BACK)
        before, text = decode(back, start), decode(back, end)
        if (text.endswith(TORN) and end < len(ids) and end - start < BACK) or not text.startswith(before):
            continue
        found.append((text.removeprefix(before), start, end))
        start = end
    if start < len(ids):
        found.append((decode(start, len(ids)), start, len(ids)))
    return found
