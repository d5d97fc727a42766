"""Checks that a model's embedding has a row for every token that its tokenizer writes: tokens are often added without resizing."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from rlhf_core.config import number_of, shown

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger("rlhf")


def check_rows(tokenizer: PreTrainedTokenizerBase, rows: int, *, subject: str) -> None:
    """Check that every token of the template, and each that pads, begins or ends a text, has a row in the embedding.

    Further tokens without a row, as for pictures in Gemma 3, may stay if no text contains them.

    Args:
        rows: number of rows of the embedding.
        subject: what the tokenizer belongs to, for the message.
    Raises:
        ValueError: naming the tokens without a row.
    """
    outside = {token: number for token, number in tokenizer.get_vocab().items() if number >= rows}
    if not outside:
        return
    template = tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else ""
    special = {tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id}
    written = [token for token, number in sorted(outside.items(), key=lambda item: item[1]) if number in special or token in template]
    if written:
        names = ", ".join(f"{shown(token, 40)} ({outside[token]})" for token in written[:4])
        raise ValueError(
            f"{subject}: expected its tokenizer and chat template to write tokens below the {rows} rows of its embedding, got "
            f"{names}; resize it (resize_token_embeddings({max(outside.values()) + 1}), then save_pretrained), or choose tokens with rows"
        )
    others = ", ".join(shown(token, 40) for token in list(outside)[:4])
    log.warning("%s: no text may contain %s without a row in the embedding: %s", subject, number_of(len(outside), "token"), others)
