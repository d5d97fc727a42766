"""Texts tokenized together, in the background and by two ranks, beside one at a time."""

from __future__ import annotations

import pytest
from chat_templates import TEMPLATES, templated

from rlhf_core.data.tokens import EncodedTurns
from rlhf_core.models import tokenizer as tokenizers
from rlhf_core.models.tokenizer import encode_scored_turns, encode_turns
from rlhf_core.trainers.encoding import in_background

PROMPT = [{"role": "user", "content": "Please sort 4172."}]
LONGER = [*PROMPT, {"role": "assistant", "content": "<think>\nb\n</think>\n\n1247."}, {"role": "user", "content": "Sort 21."}]
TEXTS = ["12.", " 12.\n", "<think>\n2 and 1.\n</think>\n\n12.", "<|im_end|>", "", "12."]
ASKED = [(messages, text) for messages in (PROMPT, LONGER, PROMPT) for text in TEXTS]
TURNS = [(messages, {"role": "assistant", "content": text}) for messages, text in ASKED]
REFUSED = [{"role": "system", "content": "Be brief."}, *PROMPT]  # by the template `trimmed`


def values(turns: EncodedTurns) -> list[tuple[list[int], int, int]]:
    return [(turns.ids(i), turns.start(i), turns.thoughts[i]) for i in range(len(turns))]


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize(("encode", "asked"), [(encode_turns, TURNS), (encode_scored_turns, ASKED)])
def test_ids_are_those_of_each_conversation_alone(name, encode, asked, monkeypatch):
    tokenizer = templated(name)
    alone = [value for one in asked for value in values(encode(tokenizer, [one]))]
    monkeypatch.setattr(tokenizers, "TEXTS_AT_ONCE", 7)
    assert values(encode(tokenizer, asked)) == alone
    assert values(in_background(encode, tokenizer, asked)()) == alone
