"""Chatting with a policy: what a model of transformers answers is what is said, over several turns; limits in words; pipes."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf_core.engines.rollout.requests import SamplingSettings
from rlhf_core.preparation.pictures import PictureStore
from rlhf_core.use.chat import NoRoom, Partner, chat, introduction, plain
from rlhf_core.use.choice import choose

ROOT = Path(__file__).parents[3]
GREEDY = SamplingSettings(6, 0.0)


def partner(folder: Path, sampling: SamplingSettings = GREEDY, *, system: str | None = None, max_length: int | None = None) -> Partner:
    return Partner(choose(model=folder), sampling, max_length=max_length, system=system, seed=0, threads=1, trust=False, images=folder)


def by_transformers(folder: Path, messages: list[dict], tokens: int) -> str:
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        ids = model.generate(**prompt, max_new_tokens=tokens, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    return tokenizer.decode(ids, skip_special_tokens=True)


def test_answers_are_those_of_transformers_over_several_turns(sft_folder):
    talk, messages = partner(sft_folder, system="Be brief."), [{"role": "system", "content": "Be brief."}]
    for text in ("Please sort 21.", "And 43?"):
        messages.append({"role": "user", "content": text})
        reply = talk.answer(text)
        assert reply.text == by_transformers(sft_folder, messages, 6) and reply.text
        messages.append({"role": "assistant", "content": reply.text})


def test_a_new_conversation_knows_nothing_of_the_one_before(sft_folder):
    talk = partner(sft_folder)
    first, second = talk.answer("Please sort 21."), talk.answer("Please sort 21.")
    talk.reset()
    assert talk.answer("Please sort 21.") == first and second.text != first.text


def test_drawn_answers_depend_on_seed_and_turn(sft_folder):
    drawn = SamplingSettings(6, 1.0)
    talk, same = partner(sft_folder, drawn), partner(sft_folder, drawn)
    answers = []
    for one in (talk, same):
        found = []
        for _ in range(3):
            one.reset()
            found.append(one.answer("Hello").text)
        answers.append(found)
    assert answers[0] == answers[1] and len(set(answers[0])) > 1


def test_limits_are_explained(sft_folder):
    talk = partner(sft_folder, max_length=24)
    assert (
        "policy" not in introduction([talk], GREEDY)
        and "sft 24" in introduction([talk], GREEDY)
        and "at most 6" in introduction([talk], GREEDY)
    )
    note = talk.answer("a").note
    assert note == "sft: truncated after 6 tokens (--max-new-tokens)"
    with pytest.raises(
        NoRoom, match=r"expected a conversation shorter than the context of 24 tokens, got .*the message was ignored; /reset"
    ):
        talk.answer("b" * 40)
    talk.reset()
    long = SamplingSettings(100, 0.0)
    assert "fills the context of 24 tokens; /reset" in (partner(sft_folder, long, max_length=24).answer("a").note or "")


def test_two_models_answer_one_after_the_other_and_refusals_end_nothing(sft_folder, tmp_path):
    out, notes = io.StringIO(), io.StringIO()
    lines = ["a\n", "\n", "b" * 40 + "\n", "/reset\n", "a\n", "/quit\n", "a\n"]
    chat([partner(sft_folder, max_length=24), partner(sft_folder, SamplingSettings(3, 0.0))], lines, out, notes, PictureStore(tmp_path))
    message = [line for line in out.getvalue().split("sft: ") if line]
    assert len(message) == 4 + 1  # the second model has room for the long message
    assert message[0] == message[3] and message[1] == message[4] and message[0] != message[1]
    assert "the message was ignored" in notes.getvalue() and "a new conversation" in notes.getvalue()


def test_a_system_message_that_the_template_refuses_is_refused_at_the_start(tmp_path, tokenizer, sft_folder):
    import copy
    import shutil

    shutil.copytree(sft_folder, tmp_path / "model")
    other = copy.deepcopy(tokenizer)
    other.chat_template = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system message') }}{% endif %}" + tokenizer.chat_template
    )
    other.save_pretrained(tmp_path / "model")
    (tmp_path / "model/model.safetensors").unlink()  # the weights aren't reached
    (tmp_path / "model/model.safetensors").symlink_to(sft_folder / "model.safetensors")
    with pytest.raises(ValueError, match="no system message"):
        partner(tmp_path / "model", system="Be brief.")


def test_a_model_gives_no_orders_to_the_terminal():
    assert plain("a\x1b[2Jb\n\u202ec") == "a\\x1b[2Jb\n\\u202ec"


@pytest.mark.long
def test_the_command_reads_lines_and_answers_on_standard_output(tmp_path, sft_folder):
    (tmp_path / "models").mkdir()
    (tmp_path / "models/policy").symlink_to(sft_folder)
    done = subprocess.run(
        [sys.executable, "-m", "rlhf_core.use", "chat", "--temperature", "0", "--max-new-tokens", "6", "--threads", "1"],
        input="Please sort 21.\n/quit\nPlease sort 21.\n",
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout == plain(by_transformers(sft_folder, [{"role": "user", "content": "Please sort 21."}], 6)) + "\n"
    assert done.stderr.startswith("Context in tokens, all messages and answers together: policy ")
