"""Tokens without a row in the embedding: refused where the template or padding writes them."""

from __future__ import annotations

import logging

import pytest

from rlhf_core.models.rows import check_rows
from tests.tiny_models import tiny_tokenizer


def added(*tokens: str):
    """A tokenizer of 300 tokens and these."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(tokens)}, replace_extra_special_tokens=False)
    return tokenizer


def test_a_tokenizer_with_rows_for_all_tokens_or_more_rows_passes():
    check_rows(tiny_tokenizer(), 300, subject="model m")
    check_rows(tiny_tokenizer(), 512, subject="model m")


def test_tokens_of_the_template_without_rows_are_refused_with_the_size_to_set():
    tokenizer = added("<|im_start|>", "<|im_end|>")
    tokenizer.chat_template = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    with pytest.raises(
        ValueError, match=r"model m: expected .* below the 300 rows .*, got <\|im_start\|> \(300\), <\|im_end\|> \(301\)"
    ) as raised:
        check_rows(tokenizer, 300, subject="model m")
    assert "resize_token_embeddings(302)" in str(raised.value)


@pytest.mark.parametrize("name", ["pad_token", "eos_token", "bos_token", "unk_token"])
def test_a_token_that_pads_or_ends_without_a_row_is_refused(name: str):
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({name: "[NEW]"})
    with pytest.raises(ValueError, match=r"got \[NEW\] \(300\); resize it"):
        check_rows(tokenizer, 300, subject="model m")


def test_a_further_token_without_a_row_is_named_in_the_log(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING, logger="rlhf"):
        check_rows(added("<image_soft_token>"), 300, subject="model m")
    assert "model m: no text may contain 1 token without a row in the embedding: <image_soft_token>" in caplog.text
