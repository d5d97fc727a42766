"""Tokenizers: the trained one, foreign ones with gaps, and the border between prompt and response."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from rlhf_core.models import response_ids
from rlhf_core.models.tokenizer import build_tokenizer, encode_conversation, encode_prompt, encode_texts, load_tokenizer

TEXTS = ["Please sort 4172.", "Certainly: 1247.", "Quick, give the largest of 309.", "Sorry, I can't help with that."] * 20
TOKENIZER = build_tokenizer(TEXTS, vocab_size=330)
QUESTION = [{"role": "user", "content": "Please sort 4172."}]
HISTORY = [{"role": "system", "content": "Be brief."}, *QUESTION, {"role": "assistant", "content": "Certainly: 1247."}, *QUESTION]


def test_every_digit_is_a_token_of_its_own():
    assert [t for t in TOKENIZER.tokenize("10247") if t] == list("10247")
    assert not [t for t in TOKENIZER.get_vocab() if len(t.replace("Ġ", "")) > 1 and any(c.isdigit() for c in t)]


def test_special_tokens_and_size():
    assert len(TOKENIZER) <= 330
    assert TOKENIZER.pad_token_id != TOKENIZER.eos_token_id
    assert TOKENIZER.bos_token is None
    assert TOKENIZER("a")["input_ids"] == TOKENIZER("a", add_special_tokens=False)["input_ids"]


def test_the_template_written_out():
    text = TOKENIZER.apply_chat_template(HISTORY, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|system|>Be brief.<|end|><|user|>Please sort 4172.<|end|><|assistant|>Certainly: 1247.<|end|>"
        "<|user|>Please sort 4172.<|end|><|assistant|>"
    )
    assert TOKENIZER.decode(encode_prompt(TOKENIZER, HISTORY)) == text


@pytest.mark.parametrize("count", [0, 1, 3, 4, 6])
def test_texts_are_encoded_in_parts_as_they_would_be_at_once(count, monkeypatch):
    monkeypatch.setattr(response_ids, "TEXTS_AT_ONCE", 3)
    texts = TEXTS[:count]
    assert list(encode_texts(TOKENIZER, texts)) == [(text, TOKENIZER(text)["input_ids"]) for text in texts]


@settings(max_examples=60, deadline=None)
@given(st.text(st.characters(codec="utf-8"), max_size=40))
def test_any_text_survives(text):
    assert TOKENIZER.decode(TOKENIZER(text, split_special_tokens=True)["input_ids"]) == text


@settings(max_examples=60, deadline=None)
@given(prompt=st.text(st.characters(codec="utf-8"), max_size=30), response=st.text(st.characters(codec="utf-8"), max_size=30))
def test_the_prompt_is_a_prefix_and_one_eos_ends_the_response(prompt, response):
    messages = [{"role": "user", "content": prompt}]
    ids, prompt_length = encode_conversation(TOKENIZER, messages, response)
    assert ids[:prompt_length] == encode_prompt(TOKENIZER, messages)
    assert ids[prompt_length:].count(TOKENIZER.eos_token_id) == 1
    assert ids[-1] == TOKENIZER.eos_token_id
    assert TOKENIZER.decode(ids[prompt_length:-1]) == response


def test_a_response_cannot_smuggle_in_special_tokens():
    ids, prompt_length = encode_conversation(TOKENIZER, QUESTION, "a<|end|><|user|>b<pad>")
    assert not set(ids[prompt_length:-1]) & set(TOKENIZER.all_special_ids)
    assert TOKENIZER.decode(ids[prompt_length:-1]) == "a<|end|><|user|>b<pad>"


def test_saved_and_loaded_it_is_the_same(tmp_path, caplog):
    TOKENIZER.save_pretrained(tmp_path)
    with caplog.at_level(logging.WARNING):
        loaded = load_tokenizer(str(tmp_path), trust_remote_code=False)
    assert not caplog.records
    assert encode_conversation(loaded, HISTORY, "Gladly: 7.") == encode_conversation(TOKENIZER, HISTORY, "Gladly: 7.")
    assert (loaded.eos_token, loaded.pad_token, loaded.bos_token) == ("<|end|>", "<pad>", None)


def test_training_is_deterministic(tmp_path):
    for name in ("a", "b"):
        build_tokenizer(TEXTS, vocab_size=330).save_pretrained(tmp_path / name)
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()


def foreign_tokenizer(**special) -> PreTrainedTokenizerFast:
    """A base model's tokenizer: characters as tokens, a BOS that it puts before every text, no pad token, no template."""
    vocabulary = {c: i for i, c in enumerate(["<s>", "</s>", *map(chr, range(32, 127)), "\n"])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=" "))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", **{"eos_token": "</s>"} | special)


def test_a_foreign_tokenizer_gets_pad_and_template_without_new_tokens(tmp_path, caplog):
    foreign_tokenizer().save_pretrained(tmp_path)
    with caplog.at_level(logging.WARNING):
        loaded = load_tokenizer(str(tmp_path), trust_remote_code=False)
    assert "no pad token" in caplog.text and "no chat template" in caplog.text
    assert (len(loaded), loaded.pad_token) == (98, "</s>")
    ids, prompt_length = encode_conversation(loaded, [{"role": "user", "content": "hi"}], "ho")
    assert loaded.convert_ids_to_tokens(ids) == ["<s>", *"User:\nhi\n\nAssistant:\nho", "</s>"]  # one BOS, one EOS
    assert prompt_length == len(["<s>", *"User:\nhi\n\nAssistant:\n"])


def test_a_tokenizer_without_eos_is_refused(tmp_path):
    foreign_tokenizer(eos_token=None).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="expected an eos token, got none"):
        load_tokenizer(str(tmp_path), trust_remote_code=False)


def test_no_tokenizer_is_an_error_with_the_path(tmp_path):
    with pytest.raises(ValueError, match=f"tokenizer {tmp_path}: expected a Hugging Face folder"):
        load_tokenizer(str(tmp_path), trust_remote_code=False)


STRIPPING = TOKENIZER.chat_template.replace("message['content']", "message['content'] | trim")
THINKING = TOKENIZER.chat_template.replace(
    "message['content']", "('<think></think>' if loop.last and message['role'] == 'assistant' else '') + message['content']"
)


@pytest.mark.parametrize("response", [" padded", "padded\n"])
def test_a_response_is_trained_on_as_the_template_trims_it(response):
    tokenizer = build_tokenizer(TEXTS, vocab_size=330)
    tokenizer.chat_template = STRIPPING
    assert encode_conversation(tokenizer, QUESTION, response) == encode_conversation(TOKENIZER, QUESTION, "padded")


def test_what_a_template_puts_before_a_response_is_trained_on():
    tokenizer = build_tokenizer(TEXTS, vocab_size=330)
    tokenizer.chat_template = THINKING
    ids, start = encode_conversation(tokenizer, QUESTION, "anything")
    assert tokenizer.decode(ids[start:]) == "<think></think>anything<|end|>"


def test_a_template_that_strips_is_fine_with_stripped_responses():
    tokenizer = build_tokenizer(TEXTS, vocab_size=330)
    tokenizer.chat_template = STRIPPING
    assert encode_conversation(tokenizer, HISTORY, "Gladly: 7.") == encode_conversation(TOKENIZER, HISTORY, "Gladly: 7.")
