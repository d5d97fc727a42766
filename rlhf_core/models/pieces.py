"""The text of each token of a response, for readers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BEFORE = 4  # preceding tokens that a token's text may depend on


def token_pieces(
    tokenizer: PreTrainedTokenizerBase, prompt_ids: Sequence[int], response_ids: Sequence[int], *, special: bool = True
) -> list[str]:
    """Return the text that each token of a response adds after its prompt; that of special tokens is "" unless `special`.

    The last token of a character that several tokens encode has the character; those before it have "". Where the tokenizer can't decode
    token by token (bytes that are no text, or a tokenizer in Python alone), each token is decoded by itself.
    """
    if getattr(tokenizer, "backend_tokenizer", None) is not None:
        from tokenizers.decoders import DecodeStream

        stream = DecodeStream(ids=list(prompt_ids[-BEFORE:]), skip_special_tokens=not special)
        try:
            return [stream.step(tokenizer.backend_tokenizer, token) or "" for token in response_ids]
        except Exception as error:  # tokenizers has no class of its own for it
            if "Invalid prefix" not in str(error):
                raise
    return [tokenizer.decode([token], skip_special_tokens=not special) for token in response_ids]
