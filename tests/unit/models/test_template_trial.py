"""Chat templates that would take all time or memory: refused before this process renders them."""

from __future__ import annotations

import time

import pytest
from chat_templates import TEMPLATES, templated

from rlhf_core.models import template_trial
from rlhf_core.models.template import Unrenderable, render
from rlhf_core.models.template_trial import GROWTH, SPARE, check_limits, too_long
from rlhf_core.models.tokenizer import load_tokenizer

QUESTION = [{"role": "user", "content": "Which one?"}]
BOMBS = {
    "constant": ("{{ 'a' * 3000000000 }}", "memory|MiB"),
    "sum": ("{% set n = namespace(t='a') %}{% for i in range(40) %}{% set n.t = n.t + n.t %}{% endfor %}{{ n.t }}", "memory|MiB"),
    "loops": ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "1 s of"),
    "power": ("{{ (9 ** 9) ** (9 ** 8) % 2 }}", "1 s of"),
    "width": ("{{ '%2000000d' | format(1) }}", "2000000 characters"),
    "turns": ("{% for m in messages %}{{ (m.content * 5000) if messages | length > 9 }}{% endfor %}", r"\d+ characters"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_template_beyond_the_limits_is_refused(name, monkeypatch):
    monkeypatch.setattr(template_trial, "CPU_SECONDS", 1)
    template, got = BOMBS[name]
    expected = rf"^tokenizer folder: expected a chat template for conversations, got one .*({got}).*; don't use it$"
    with pytest.raises(ValueError, match=expected):
        check_limits("folder", template, {})


def test_a_folder_with_such_a_template_is_refused_when_it_is_loaded(tmp_path):
    templated("chatml").save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(BOMBS["constant"][0])
    began = time.monotonic()
    with pytest.raises(ValueError, match=r"expected a chat template for conversations, got one .*MiB"):
        load_tokenizer(str(tmp_path), trust_remote_code=False)
    assert time.monotonic() - began < 60


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_of_every_family_pass_and_are_tried_once(name, monkeypatch):
    made = templated(name)
    generation = "{% generation %}" + TEMPLATES["chatml"] + "{% endgeneration %}{% for x in [1] %}{% break %}{% endfor %}"
    template_trial._problem.cache_clear()
    for template in (TEMPLATES[name], generation):
        check_limits("folder", template, made.special_tokens_map)
    monkeypatch.setattr(template_trial.subprocess, "run", None)  # a second process would fail
    check_limits("folder", TEMPLATES[name], made.special_tokens_map)


def test_a_text_far_longer_than_its_conversation_is_refused_by_row():
    """What the trial's conversations don't show: this one grows for a single word."""
    made = templated("chatml")
    made.chat_template = "{{ 'a' * 2000000 if 'bomb' in messages[0].content else messages[0].content }}"
    check_limits("folder", made.chat_template, {})
    assert render(made, QUESTION, waits=True) == "Which one?"
    with pytest.raises(Unrenderable, match="one of which it makes 2000000 characters"):
        render(made, [{"role": "user", "content": "a bomb"}], waits=True)
    word = "a" * SPARE
    assert not too_long(word * 10, [{"role": "user", "content": word}])
    assert too_long(word * (GROWTH + 3), [{"role": "user", "content": word}])
