"""What the gate shows a reward model."""

from __future__ import annotations

import torch
from chat_templates import templated

from rlhf_core.gate.scoring import LoadedModel

QUESTION = [{"role": "user", "content": "Please sort 4172."}]


def test_a_conversation_is_shown_as_the_models_template_writes_it_and_one_that_it_refuses_is_not():
    tokenizer = templated("trimmed")
    model = LoadedModel([], tokenizer, 1000, torch.device("cpu"))
    whole = [*QUESTION, {"role": "assistant", "content": " 1247.\n"}]
    assert model.encode(QUESTION, " 1247.\n") == tokenizer.apply_chat_template(whole, return_dict=False)
    assert model.encode([{"role": "system", "content": "Be brief."}, *QUESTION], "1247.") is None
