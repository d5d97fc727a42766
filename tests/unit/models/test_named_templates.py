"""Templates that params.yaml names, and where a model is looked for."""

from __future__ import annotations

import pytest
from tiny_models import save_tiny_models, tiny_params, tiny_tokenizer

from rlhf_core.config import ConfigError
from rlhf_core.models.folder import locate_model
from rlhf_core.models.template import CHATML, CONTINUATION, named_template, turn_end
from rlhf_core.models.tokenizer import encode_conversation, encode_prompt, load_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_models(tmp_path_factory.mktemp("models"), tiny_tokenizer())[0]


def test_the_continuation_template_is_the_prompt_the_response_and_the_end(folder):
    tokenizer = load_tokenizer(str(folder), trust_remote_code=False, chat_template=named_template("continuation"))
    messages = [{"role": "user", "content": "Please sort 41."}]
    ids, start = encode_conversation(tokenizer, messages, " Certainly: 14.")
    plain = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("Please sort 41.", " Certainly: 14.")]
    assert ids == [*plain[0], *plain[1], tokenizer.eos_token_id] and start == len(plain[0])


def test_the_continuation_template_begins_with_a_token_where_there_is_one(folder):
    tokenizer = load_tokenizer(str(folder), trust_remote_code=False, chat_template=named_template("continuation"))
    without = encode_prompt(tokenizer, [{"role": "user", "content": "Sort 41."}])
    tokenizer.bos_token = "<|user|>"
    ids = encode_prompt(tokenizer, [{"role": "user", "content": "Sort 41."}])
    assert ids[1:] == without
    assert ids == [tokenizer.bos_token_id, *tokenizer("Sort 41.", add_special_tokens=False)["input_ids"]]


def test_a_given_template_is_saved_with_the_model(folder, tmp_path):
    load_tokenizer(str(folder), trust_remote_code=False, chat_template=CONTINUATION).save_pretrained(tmp_path)
    assert load_tokenizer(str(tmp_path), trust_remote_code=False).chat_template == CONTINUATION


def test_a_template_by_name_file_and_text(tmp_path):
    (tmp_path / "mine.jinja").write_text("{{ messages[0]['content'] }}")
    assert named_template("continuation") == CONTINUATION
    assert named_template(str(tmp_path / "mine.jinja")) == named_template("{{ messages[0]['content'] }}")
    with pytest.raises(
        ValueError, match=r"model.chat_template: expected one of \['continuation', 'chatml'\], a .jinja file, .*got 'continue'"
    ):
        named_template("continue")
    with pytest.raises(ValueError, match=r"model.chat_template: expected a readable file, got .*none.jinja"):
        named_template(str(tmp_path / "none.jinja"))


def test_chatml_ends_each_turn_with_its_token():
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = CHATML
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]
    asked = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == asked
    assert turn_end(tokenizer).trained == (tokenizer.convert_tokens_to_ids("<|im_end|>"),)


def test_a_template_that_fails_is_refused_with_the_tokenizer(folder):
    with pytest.raises(ValueError, match="expected a chat template for a user's message and an answer, got"):
        load_tokenizer(str(folder), trust_remote_code=False, chat_template="{{ nobody.knows }}")


def test_a_template_needs_a_model():
    with pytest.raises(ConfigError, match=r"model.chat_template: expected null without model.path"):
        tiny_params(model__chat_template="continuation")


def test_a_model_is_found_from_a_worktree_of_a_run(tmp_path, monkeypatch):
    """As data is: relative to the main checkout, where it isn't there relative to the worktree."""
    (tmp_path / "shared/model").mkdir(parents=True)
    main, worktree = tmp_path / "project", tmp_path / "project/runs/one"
    (main / ".git/worktrees/one").mkdir(parents=True)
    worktree.mkdir(parents=True)
    (worktree / ".git").write_text(f"gitdir: {main}/.git/worktrees/one\n")
    monkeypatch.chdir(worktree)
    assert locate_model("../shared/model") == str(main / "../shared/model")
    monkeypatch.chdir(main)
    assert locate_model("../shared/model") == "../shared/model"
    assert locate_model("some/name") == "some/name" and locate_model("gpt2") == "gpt2"


@pytest.mark.parametrize("path", ["../nowhere/model", "./model", "a/b/c"])
def test_a_missing_folder_says_how_to_get_a_model(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ValueError, match=r"model.path: expected a folder with a pretrained model, got .* nothing there, relative to .*HF_HUB_OFFLINE=0"
    ):
        locate_model(path)
