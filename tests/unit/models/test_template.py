"""The day and the options that are written into a chat template."""

from __future__ import annotations

from datetime import datetime

import pytest
from chat_templates import TEMPLATES, templated
from tiny_models import save_tiny_models, tiny_params
from transformers.utils import chat_template_utils

from rlhf_core.models.template import with_date, with_header, with_options
from rlhf_core.models.tokenizer import encode_conversation, encode_prompt, load_tokenizer, pretrained_tokenizer, response_text

QUESTION = [{"role": "user", "content": "Please sort 4172."}]


def clock(monkeypatch, year: int) -> None:
    class Then(datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(year, 5, 17, tzinfo=tz)

    monkeypatch.setattr(chat_template_utils, "datetime", Then)


def test_the_day_in_a_prompt_is_the_configured_one_whatever_the_clock_says(tmp_path, monkeypatch):
    original = templated("dated")
    original.save_pretrained(tmp_path / "original")
    load_tokenizer(str(tmp_path / "original"), trust_remote_code=False, template_date="2023-12-03").save_pretrained(tmp_path / "saved")
    prompts, unpinned = [], []
    for year in (2025, 2031):
        clock(monkeypatch, year)
        prompts.append(encode_prompt(load_tokenizer(str(tmp_path / "saved"), trust_remote_code=False), QUESTION))
        unpinned.append(original.apply_chat_template(QUESTION, tokenize=False, add_generation_prompt=True))
    assert "Today: 17 May 2025" in unpinned[0] and "Today: 17 May 2031" in unpinned[1]
    assert prompts[0] == prompts[1]
    assert original.decode(prompts[0]) == unpinned[0].replace("17 May 2025", "03 Dec 2023")


def test_a_tokenizer_from_elsewhere_has_a_fixed_day_by_default(tmp_path, monkeypatch):
    templated("dated").save_pretrained(tmp_path)
    clock(monkeypatch, 2031)
    loaded = load_tokenizer(str(tmp_path), trust_remote_code=False)
    assert "Today: 26 Jul 2024" in loaded.decode(encode_prompt(loaded, QUESTION))


def test_every_format_of_the_day_has_its_text():
    template = (
        """{{ strftime_now('%Y-%m-%d') }} {{ strftime_now( "%d {%% x" ) }}|{% for m in messages %}{{ strftime_now("%B") }}{% endfor %}"""
    )
    tokenizer = templated("chatml")
    tokenizer.chat_template = with_date(template, "2024-02-29")
    assert tokenizer.apply_chat_template(QUESTION, tokenize=False) == "2024-02-29 29 {% x|February"
    assert with_date(tokenizer.chat_template, "2020-01-01") == tokenizer.chat_template


def test_a_template_without_a_day_stays_as_it_is():
    assert with_date("{{ messages }}", "2024-02-29") == "{{ messages }}"


def test_a_computed_format_is_refused():
    with pytest.raises(ValueError, match="expected dates written as strftime_now"):
        with_date("{{ strftime_now(form) }}", "2024-02-29")


def test_options_are_saved_with_the_tokenizer_and_a_caller_may_say_otherwise(tmp_path):
    original = templated("thinks")
    original.save_pretrained(tmp_path / "original")
    options = {"enable_thinking": False}
    load_tokenizer(str(tmp_path / "original"), trust_remote_code=False, template_options=options).save_pretrained(tmp_path / "saved")
    saved = load_tokenizer(str(tmp_path / "saved"), trust_remote_code=False)
    how = {"tokenize": False, "add_generation_prompt": True}
    assert saved.apply_chat_template(QUESTION, **how) == original.apply_chat_template(QUESTION, **how, enable_thinking=False)
    assert saved.apply_chat_template(QUESTION, **how, enable_thinking=True) == original.apply_chat_template(QUESTION, **how)
    assert original.apply_chat_template(QUESTION, **how) != saved.apply_chat_template(QUESTION, **how)


@pytest.mark.parametrize("value", [None, True, 3, 0.5, 'it\'s {{ "quoted" }} %} \\ \n 語😀', ["a", {"b": {"c": None}}]])
def test_an_options_value_arrives_as_it_is(value):
    tokenizer = templated("chatml")
    tokenizer.chat_template = with_options("{{ wanted | tojson }}", {"wanted": value})
    plain = templated("chatml")
    plain.chat_template = "{{ wanted | tojson }}"
    assert tokenizer.apply_chat_template(QUESTION, tokenize=False) == plain.apply_chat_template(QUESTION, tokenize=False, wanted=value)


@pytest.mark.parametrize("name", ["enable_thinkin", "messages", "tools", "a b"])
def test_an_option_that_the_template_doesnt_read_is_refused(name):
    with pytest.raises(ValueError, match="template_options: expected variables that the chat template reads, got"):
        with_options("{{ messages }} {{ tools }} {{ enable_thinking }}", {name: 1})


def test_prepare_data_writes_day_and_options_into_the_tokenizer_that_all_stages_read(tmp_path):
    original = templated("thinks")
    original.chat_template = "{{ strftime_now('%Y') }}" + original.chat_template
    sft, _ = save_tiny_models(tmp_path, original)
    how = {"model__path": str(sft), "model__template_date": "2019-01-02", "model__template_options": {"enable_thinking": False}}
    made = pretrained_tokenizer(tiny_params(**how).model)
    prompt = made.decode(encode_prompt(made, QUESTION))
    assert prompt.startswith("2019<|im_start|>") and prompt.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


MUTE = {name: template.partition("{%- if add_generation_prompt")[0] for name, template in TEMPLATES.items() if name != "brackets"}


@pytest.mark.parametrize("name", ["chatml", "trimmed", "role_tokens", "thinks"])
@pytest.mark.parametrize("ending", ["", "\n"])
def test_the_header_of_an_answer_is_part_of_the_prompt_where_a_template_ignores_add_generation_prompt(name, ending, tmp_path, caplog):
    original = templated(name)
    original.chat_template = MUTE[name].rstrip("\n") + ending
    answered = [*QUESTION, {"role": "assistant", "content": "1247."}]
    before = [original.apply_chat_template(m, tokenize=False) for m in (QUESTION, answered, [*answered, *QUESTION])]
    original.save_pretrained(tmp_path / "original")
    made = load_tokenizer(str(tmp_path / "original"), trust_remote_code=False)
    assert "its template ignores add_generation_prompt" in caplog.text
    assert [made.apply_chat_template(m, tokenize=False) for m in (QUESTION, answered, [*answered, *QUESTION])] == before
    ids, start = encode_conversation(made, QUESTION, "1247.")
    assert made.decode(ids[:start]) == templated(name).apply_chat_template(QUESTION, tokenize=False, add_generation_prompt=True)
    assert ids[:start] == encode_prompt(made, QUESTION)
    text = response_text(made, ids[:start], ids[start:])
    assert text == ("<think>\n\n</think>\n\n1247." if name == "thinks" else "1247.")
    made.save_pretrained(tmp_path / "saved")
    assert load_tokenizer(str(tmp_path / "saved"), trust_remote_code=False).chat_template == made.chat_template


def test_headers_that_differ_are_refused_and_white_space_is_none(tmp_path):
    made = templated("chatml")
    made.chat_template = MUTE["chatml"].replace("m.role +", "m.role + (loop.index | string) +")
    made.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="expected a generation prompt where add_generation_prompt is true, got none, and '<"):
        load_tokenizer(str(tmp_path), trust_remote_code=False)
    for name in ("brackets", "chatml", "channels", "endless"):
        made = templated(name)
        assert with_header(made) == made.chat_template == TEMPLATES[name]
