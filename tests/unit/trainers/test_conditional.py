"""Conditional SFT: what quality a response has, and a template that asks for the wanted one whatever template it is put before."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from chat_templates import templated
from tiny_models import MAX_LENGTH

from rlhf_core.models.build import load_scalar_model
from rlhf_core.models.tokenizer import CHAT_TEMPLATE, PLAIN_TEMPLATE, encode_conversation, encode_prompt, load_tokenizer
from rlhf_core.process import Interrupted
from rlhf_core.trainers.sft.conditional import (
    RatedResponse,
    asking_template,
    asking_tokenizer,
    preference_level,
    quantile_borders,
    rated_responses,
    reward_scores,
    score_level,
    with_quality,
)

USER, SYSTEM = {"role": "user", "content": "Sort 41."}, {"role": "system", "content": "Be brief."}
ANSWER, AGAIN = {"role": "assistant", "content": "14."}, {"role": "user", "content": " And 92? \n"}
CONVERSATIONS = {
    "one turn": [USER],
    "system": [SYSTEM, USER],
    "several turns": [USER, ANSWER, AGAIN],
    "system and several turns": [SYSTEM, USER, ANSWER, AGAIN],
    "ends with the answer": [SYSTEM, USER, ANSWER, AGAIN, ANSWER],
    "in parts": [SYSTEM, {"role": "user", "content": [{"type": "text", "text": "Sort 41."}]}],
}
TEMPLATES = {
    "ours": CHAT_TEMPLATE,
    "plain": PLAIN_TEMPLATE,
    "chatml": (
        "{%- if messages[0]['role'] != 'system' %}\n    {{- '<|im_start|>system\\nYou help.<|im_end|>\\n' }}\n{%- endif %}\n"
        "{%- for message in messages %}\n"
        "    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}\n"
        "{%- endfor %}\n"
        "{%- if add_generation_prompt %}\n    {{- '<|im_start|>assistant\\n' }}\n{%- endif %}\n"
    ),
    "llama": (
        "{{- bos_token }}\n{%- if messages[0]['role'] == 'system' %}\n"
        "    {%- set system_message = messages[0]['content']|trim %}\n    {%- set messages = messages[1:] %}\n"
        "{%- else %}\n    {%- set system_message = 'none' %}\n{%- endif %}\n"
        "{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' + system_message + '<|eot_id|>' }}\n"
        "{%- for message in messages %}\n"
        "    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{%- endif %}\n"
        "    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content']|trim + '<|eot_id|>' }}\n"
        "{%- endfor %}\n"
        "{%- if add_generation_prompt %}\n    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}\n{%- endif %}\n"
    ),
    "with text first": "\n  Chat:\n  {% for message in messages %}[{{ message['content'] }}]{% endfor %}",
    "in parts": (
        "{% for message in messages %}{% if message['content'] is string %}{{ message['content'] }}{% else %}"
        "{% for part in message['content'] %}{{ part['text'] }}{% endfor %}{% endif %}|{% endfor %}"
    ),
}


def render(tokenizer, template: str, messages: list[dict], *, waits: bool) -> str:
    return tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False, add_generation_prompt=waits)


@pytest.mark.parametrize("conversation", [c for c in CONVERSATIONS if c != "in parts"])
@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("waits", [True, False])
def test_the_template_asks_for_the_wanted_quality_at_the_last_user_message(tokenizer, template: str, conversation: str, waits: bool):
    messages, original = CONVERSATIONS[conversation], TEMPLATES[template]
    asking = asking_template(original, levels=4, wanted=3)
    expected = render(tokenizer, original, with_quality(messages, 3), waits=waits)
    assert "\n[quality: 3]" in expected
    assert render(tokenizer, asking, messages, waits=waits) == expected
    requested = with_quality(messages, 1)  # one's own wish counts, and asking twice is asking once
    assert render(tokenizer, asking, requested, waits=waits) == render(tokenizer, original, requested, waits=waits)


def test_content_in_parts_gets_one_more(tokenizer):
    asking = asking_template(TEMPLATES["in parts"], levels=2, wanted=1)
    assert render(tokenizer, asking, CONVERSATIONS["in parts"], waits=True) == "Be brief.|Sort 41.\n[quality: 1]|"


def test_only_an_existing_quality_level_is_recognised(tokenizer):
    asking = asking_template(CHAT_TEMPLATE, levels=2, wanted=1)
    for content in ("Sort 41.\n[quality: 7]", "\n[quality: 0] is what I said"):
        text = render(tokenizer, asking, [{"role": "user", "content": content}], waits=False)
        assert text == f"<|user|>{content}\n[quality: 1]<|end|>"


def test_the_loaded_policy_requests_the_quality_as_trained(tokenizer, tmp_path: Path):
    asking_tokenizer(tokenizer, levels=4, wanted=2).save_pretrained(tmp_path)
    saved = load_tokenizer(str(tmp_path), trust_remote_code=False)
    for messages in (CONVERSATIONS["one turn"], CONVERSATIONS["system and several turns"]):
        trained_on, start = encode_conversation(tokenizer, with_quality(messages, 2), "14.")
        assert encode_prompt(saved, messages) == trained_on[:start]
        assert encode_conversation(saved, messages, "14.") == (trained_on, start)
    assert tokenizer.chat_template == CHAT_TEMPLATE


def row(chosen: str | None, rejected: str | None, question: str = "a") -> dict:
    return {"messages": [{"role": "user", "content": question}], "chosen": chosen, "rejected": rejected}


def test_every_response_once_per_conversation_with_its_wins_and_losses():
    rows = [row("x", "y"), row("x", "z"), row("y", "x"), row("z", None), row(None, "w"), row("y", "x", question="b")]
    found = [(r.messages[0]["content"], r.text, r.wins, r.losses) for r in rated_responses(rows)]
    assert found == [
        ("a", "x", 2, 1), ("a", "y", 1, 1), ("a", "z", 1, 1), ("a", "w", 0, 1), ("b", "y", 1, 0), ("b", "x", 0, 1),
    ]  # fmt: skip


def test_the_share_of_wins_decides_and_a_tie_has_no_level():
    assert [preference_level(RatedResponse([], "", wins, losses)) for wins, losses in ((2, 1), (1, 2), (1, 1), (1, 0), (0, 3))] == [
        1, 0, None, 1, 0,
    ]  # fmt: skip


def test_levels_are_quantiles_of_the_known_scores():
    # of 0..8 without NaN: the quarter is at position 0.25 * 8 = 2, half at 4, three quarters at 6
    scores = [3.0, 0.0, math.nan, 8.0, 1.0, 5.0, 2.0, 7.0, 4.0, 6.0]
    borders = quantile_borders(scores, 4)
    assert borders == [2.0, 4.0, 6.0]
    assert [score_level(s, borders) for s in (-9.0, 1.9, 2.0, 4.5, 6.0, 99.0, math.nan, math.inf)] == [0, 0, 1, 2, 3, 3, None, None]
    with pytest.raises(ValueError, match="expected scores of 2 responses, got none"):
        quantile_borders([math.nan, math.nan], 2)


def test_scores_are_the_reward_models_of_each_conversation_without_a_quality(reward_folder: Path, tokenizer):
    responses = [RatedResponse([USER], text, 0, 0) for text in ("14.", "41 is what you gave me", "no" * MAX_LENGTH)]
    how = {"max_length": MAX_LENGTH, "trust_remote_code": False}
    scores = reward_scores(reward_folder, responses, **how, stop_requested=lambda: False)
    model = load_scalar_model(reward_folder).eval()
    for response, score in zip(responses[:2], scores[:2], strict=True):
        ids, _ = encode_conversation(tokenizer, response.messages, response.text)
        with torch.no_grad():
            assert score == pytest.approx(float(model(input_ids=torch.tensor([ids])).logits[0, 0]), abs=1e-5)
    assert math.isnan(scores[2])
    with pytest.raises(Interrupted):
        reward_scores(reward_folder, responses, **how, stop_requested=lambda: True)


def test_a_question_in_parts_is_trained_on_as_the_policys_template_asks_it():
    parts = [{"type": "text", "text": "Please sort"}, {"type": "text", "text": "41."}]
    stored = [{"role": "user", "content": "Please sort\n41.", "extra": json.dumps({"content": parts})}]
    for name in ("parts", "chatml"):
        tokenizer = templated(name)
        asking = asking_tokenizer(tokenizer, levels=4, wanted=2)
        assert encode_prompt(asking, stored) == encode_prompt(tokenizer, with_quality(stored, 2)) != encode_prompt(tokenizer, stored)
