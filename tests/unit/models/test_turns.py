"""Ids of prompt, response and end, beside what apply_chat_template makes of the whole conversation, for templates of every shape."""

from __future__ import annotations

import json

import pytest
import torch
from chat_templates import ENDS, TEMPLATES, templated
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from rlhf_core.data.schema import with_tools
from rlhf_core.models.build import save_model
from rlhf_core.models.tokenizer import (
    Unrenderable,
    encode_conversation,
    encode_prompt,
    encode_scored,
    encode_turns,
    load_tokenizer,
    response_text,
    stop_ids,
    turn_end,
)

QUESTION = [{"role": "user", "content": "Please sort 4172."}]
HISTORY = [*QUESTION, {"role": "assistant", "content": "Certainly: 1247."}, {"role": "user", "content": "Quick, sort 21."}]
RESPONSE = "Certainly: 12."
THOUGHTFUL = "<think>\nThe digits are 2 and 1.\n</think>\n\nCertainly: 12."


def rendered(tokenizer, messages, response=None, **how) -> list[int]:
    """As the library tokenizes a conversation, with a response or waiting for one."""
    whole = messages if response is None else [*messages, {"role": "assistant", "content": response}]
    if tokenizer.chat_template == TEMPLATES["parts"]:
        whole = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in whole]
    return tokenizer.apply_chat_template(whole, add_generation_prompt=response is None, return_dict=False, **how)


@pytest.fixture(params=TEMPLATES)
def tokenizer(request):
    made = templated(request.param)
    made.init_kwargs["name"] = request.param
    return made


def test_the_end_of_a_turn_is_the_templates(tokenizer):
    end, after = ENDS[tokenizer.init_kwargs["name"]]
    assert tokenizer.decode(turn_end(tokenizer).trained) == end
    assert tokenizer.decode(turn_end(tokenizer).after) == after


@pytest.mark.parametrize("messages", [QUESTION, HISTORY])
def test_prompt_response_and_end_are_the_rendering_of_the_whole_conversation(tokenizer, messages):
    whole, scored = rendered(tokenizer, messages, RESPONSE), encode_scored(tokenizer, messages, RESPONSE)
    ids, start = encode_conversation(tokenizer, messages, RESPONSE)
    assert ids[:start] == encode_prompt(tokenizer, messages) == rendered(tokenizer, messages)
    name = tokenizer.init_kwargs["name"]
    assert scored == ([*whole, tokenizer.eos_token_id] if name == "endless" else whole)
    if name != "distilled":
        assert ids + list(turn_end(tokenizer).after) == scored


def test_the_text_of_a_sampled_response_is_the_answer_without_what_the_template_writes_before_it(tokenizer):
    ids, start = encode_conversation(tokenizer, QUESTION, RESPONSE)
    thoughts = {"thinks": "<think>\n\n</think>\n\n", "distilled": "\n</think>\n\n"}.get(tokenizer.init_kwargs["name"], "")
    assert response_text(tokenizer, ids[:start], ids[start:]).strip() == (thoughts + RESPONSE).strip()


def test_thoughts_are_in_the_templates_layout():
    tokenizer = templated("thinks")
    for response in (THOUGHTFUL, "<think>The digits are 2 and 1.</think>Certainly: 12."):
        ids, start = encode_conversation(tokenizer, HISTORY, response)
        assert tokenizer.decode(ids[start:]) == THOUGHTFUL + "<|im_end|>"
        assert [*ids, *turn_end(tokenizer).after] == rendered(tokenizer, HISTORY, THOUGHTFUL)
    ids, start = encode_conversation(tokenizer, HISTORY, RESPONSE)
    assert tokenizer.decode(ids[start:]) == "<think>\n\n</think>\n\nCertainly: 12.<|im_end|>"


@pytest.mark.parametrize("given", [THOUGHTFUL, THOUGHTFUL.removeprefix("<think>\n"), THOUGHTFUL.removeprefix("<think>")])
def test_thoughts_that_the_prompt_opens_follow_it_and_are_not_scored(given):
    tokenizer = templated("distilled")
    ids, start = encode_conversation(tokenizer, QUESTION, given)
    expected = THOUGHTFUL.removeprefix("<think>\n") if given != THOUGHTFUL.removeprefix("<think>") else given
    assert tokenizer.decode(ids[:start]).endswith("<|assistant|><think>\n")
    assert tokenizer.decode(ids[start:]) == expected + "<eos>"
    assert encode_scored(tokenizer, QUESTION, given) == rendered(tokenizer, QUESTION, given)


def test_an_answer_without_thoughts_gets_empty_ones_where_the_prompt_opens_them():
    tokenizer = templated("distilled")
    ids, _ = encode_conversation(tokenizer, QUESTION, RESPONSE)
    assert tokenizer.decode(ids).endswith("<|assistant|><think>\n\n</think>\n\nCertainly: 12.<eos>")


def test_thoughts_that_are_special_tokens_are_tokens_and_other_special_tokens_text():
    for special in (False, True):
        tokenizer = templated("thinks", thoughts_are_special=special)
        ids, start = encode_conversation(tokenizer, QUESTION, THOUGHTFUL.replace("digits", "<|im_end|>"))
        open_id, close_id, end = tokenizer.convert_tokens_to_ids(["<think>", "</think>", "<|im_end|>"])
        assert [ids[start:].count(token) for token in (open_id, close_id, end)] == [1, 1, 1] and ids[-1] == end


@pytest.mark.parametrize("response", [" Certainly: 12.", "Certainly: 12.\n", "\n\n Certainly: 12. \t", " ", ""])
def test_white_space_at_the_edges_of_a_response_is_trained_on_and_scored_as_the_template_leaves_it(tokenizer, response):
    ids, start = encode_conversation(tokenizer, QUESTION, response)
    whole = rendered(tokenizer, QUESTION, response)
    scored = encode_scored(tokenizer, QUESTION, response)
    assert tokenizer.decode(scored) == tokenizer.decode(whole) + ("<eos>" if tokenizer.init_kwargs["name"] == "endless" else "")
    assert ids[:start] == encode_prompt(tokenizer, QUESTION)


def test_what_ends_a_response_is_the_templates_end_eos_and_the_folders(tmp_path):
    tokenizer = templated("chatml")
    im_end, eot = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|eot|>"])
    assert stop_ids(tokenizer, tmp_path) == (im_end, tokenizer.eos_token_id)
    (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": [{eot}, {im_end}]}}')
    assert stop_ids(tokenizer, tmp_path) == (im_end, tokenizer.eos_token_id, eot)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 99999}')
    assert stop_ids(tokenizer, tmp_path) == (im_end, tokenizer.eos_token_id)


@pytest.mark.parametrize("content", ["[", "[1]", '{"eos_token_id": "</s>"}', '{"eos_token_id": [true]}'])
def test_a_damaged_generation_config_is_refused(tmp_path, content):
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(ValueError, match=r"generation_config\.json: expected"):
        stop_ids(templated("chatml"), tmp_path)


def test_a_conversation_that_the_template_refuses_is_named_in_the_templates_words():
    messages = [{"role": "system", "content": "Be brief."}, *QUESTION]
    with pytest.raises(Unrenderable, match="that it renders, got TemplateError: Turns have to go user, model, user"):
        encode_prompt(templated("trimmed"), messages)


@torch.no_grad()
def test_a_saved_policy_stops_at_the_templates_end(tmp_path):
    tokenizer = templated("chatml")
    im_end, prompt = tokenizer.convert_tokens_to_ids("<|im_end|>"), torch.tensor([encode_prompt(tokenizer, QUESTION)])
    shape = {"vocab_size": len(tokenizer), "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**shape, eos_token_id=tokenizer.eos_token_id, pad_token_id=0, bos_token_id=None))
    hidden = model.model(prompt).last_hidden_state[0, -1]
    model.lm_head.weight.copy_(torch.zeros(len(tokenizer), 16))
    model.lm_head.weight[im_end] = hidden
    save_model(model, model.state_dict(), tokenizer, tmp_path)
    assert json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"] == [im_end, tokenizer.eos_token_id]
    answer = AutoModelForCausalLM.from_pretrained(tmp_path).generate(prompt, max_new_tokens=5, do_sample=False)
    assert answer[0, prompt.shape[1] :].tolist() == [im_end]


CALL = {"type": "function", "function": {"name": "sort", "arguments": {"digits": "4172"}}}
TOOLS = [*QUESTION, {"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "content": "1247"}]
STORED = [*QUESTION, {"role": "assistant", "content": "", "extra": json.dumps({"tool_calls": [CALL]})}, TOOLS[2]]


@pytest.mark.parametrize("name", ["thinks", "dated"])
def test_calls_of_tools_and_their_results_arrive_in_the_prompt_and_a_call_can_be_a_turn(name):
    tokenizer = templated(name)
    ids, start = encode_conversation(tokenizer, STORED, RESPONSE)
    assert ids[:start] == rendered(tokenizer, TOOLS)
    assert '"digits": "4172"' in tokenizer.decode(ids[:start]) and "1247" in tokenizer.decode(ids[:start])
    turns = encode_turns(tokenizer, [(STORED[:1], STORED[1])])
    call, start = turns.ids(0), turns.start(0)
    assert [*call, *turn_end(tokenizer).after] == tokenizer.apply_chat_template(TOOLS[:2], return_dict=False)
    assert call[:start] == rendered(tokenizer, QUESTION)


SCHEMA = {"type": "object", "properties": {"digits": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "sort", "description": "Sortiert für dich.", "parameters": SCHEMA}}
WITH_TOOLS = "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}"


def test_tools_of_a_conversation_are_what_apply_chat_template_makes_of_them(caplog):
    tokenizer = templated("thinks")
    stored = with_tools(STORED, [TOOL])
    assert encode_prompt(tokenizer, stored) == encode_prompt(tokenizer, stored) == encode_prompt(tokenizer, STORED)
    assert caplog.text.count("expected descriptions of the tools that conversations have, got none") == 1
    tokenizer.chat_template = WITH_TOOLS + tokenizer.chat_template
    ids, start = encode_conversation(tokenizer, stored, RESPONSE)
    assert ids[:start] == encode_prompt(tokenizer, stored) == rendered(tokenizer, TOOLS, tools=[TOOL])
    assert encode_scored(tokenizer, stored, RESPONSE) == rendered(tokenizer, TOOLS, RESPONSE, tools=[TOOL])
    assert '"tools": [' not in tokenizer.decode(ids) and "für dich" in tokenizer.decode(ids)
    assert encode_prompt(tokenizer, STORED) == rendered(tokenizer, TOOLS) != ids[:start]


def test_parts_are_joined_for_a_template_that_wants_text_and_kept_for_one_that_knows_them():
    parts = [{"role": "user", "content": [{"type": "text", "text": "Please sort"}, {"type": "text", "text": "4172."}]}]
    joined = [{"role": "user", "content": "Please sort\n4172."}]
    stored = [{**joined[0], "extra": json.dumps({"content": parts[0]["content"]})}]
    assert encode_prompt(templated("chatml"), stored) == encode_prompt(templated("chatml"), joined)
    apart = templated("parts")
    assert encode_prompt(apart, stored) == apart.apply_chat_template(parts, add_generation_prompt=True, return_dict=False)
    assert encode_prompt(apart, stored) != encode_prompt(apart, joined)


def test_an_end_that_is_not_a_special_token_becomes_one_and_is_no_text(tmp_path):
    tokenizer = templated("chatml")
    tokenizer.add_tokens(["[over]"])
    tokenizer.chat_template = tokenizer.chat_template.replace("<|im_end|>", "[over]")
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(str(tmp_path), trust_remote_code=False)
    ids, start = encode_conversation(loaded, QUESTION, RESPONSE)
    assert tokenizer.decode(ids[start:], skip_special_tokens=True) == RESPONSE + "[over]"
    assert loaded.decode(ids[start:], skip_special_tokens=True) == RESPONSE
    assert (ids, start) == encode_conversation(tokenizer, QUESTION, RESPONSE) and len(loaded) == len(tokenizer)
    assert loaded.bos_token == "<bos>" and loaded.convert_tokens_to_ids("<|im_end|>") in loaded.all_special_ids
