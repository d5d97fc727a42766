"""Ids of responses behind their prompts and of what reward models read, beside transformers' own of the whole conversation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from classifiers import own_scores_alone, save_classifier, tiny_classifier
from tiny_models import MAX_LENGTH, tiny_params
from tokenizer_shapes import CHATS, SHAPES, shaped

from rlhf_core.gate.scoring import LoadedModel
from rlhf_core.look import page
from rlhf_core.look.look import guess, inspect_reading, place_of, sample_of
from rlhf_core.models.tokenizer import encode_conversation, encode_prompt, encode_scored, response_text, turn_end
from rlhf_core.preparation.validation.measures import measure
from rlhf_core.scorers.reward.input import RewardModelInput
from rlhf_core.trainers.preference.train import begin_pairs
from rlhf_core.types import Prompt

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
HISTORY = [*QUESTION, {"role": "assistant", "content": "It is Paris."}, {"role": "user", "content": "Is it red?"}]
RESPONSES = ("It is Paris.", " It is", "\n\nIt is red.", "It")
ALL = [(shape, chat) for shape in SHAPES for chat in CHATS]


def whole(tokenizer, messages, response: str) -> list[int]:
    return tokenizer.apply_chat_template([*messages, {"role": "assistant", "content": response}], return_dict=False)


@pytest.mark.parametrize(("shape", "chat"), ALL)
def test_ids_are_those_of_the_whole_conversation_where_the_prompt_is_its_beginning(shape, chat):
    tokenizer = shaped(shape, chat)
    for messages in (QUESTION, HISTORY):
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        for response in RESPONSES:
            expected = whole(tokenizer, messages, response)
            ids, start = encode_conversation(tokenizer, messages, response)
            assert encode_scored(tokenizer, messages, response) == expected
            assert ids[:start] == prompt == encode_prompt(tokenizer, messages)
            if expected[:start] == prompt:
                assert [*ids, *turn_end(tokenizer).after] == expected
            else:  # the split that keeps the text
                assert tokenizer.decode([*ids, *turn_end(tokenizer).after]) == tokenizer.decode(expected)


def test_the_shapes_and_templates_have_both_cases_and_alone_most_responses_would_begin_with_another_token():
    apart, marked = set(), set()
    for shape, chat in ALL:
        tokenizer, alone = shaped(shape, chat), shaped(shape, chat)("It is Paris.", add_special_tokens=False)["input_ids"]
        expected, (ids, start) = whole(tokenizer, QUESTION, "It is Paris."), encode_conversation(tokenizer, QUESTION, "It is Paris.")
        apart |= {(shape, chat)} if expected[:start] != ids[:start] else set()
        marked |= {(shape, chat)} if ids[start:][: len(alone)] != alone else set()
    assert {shape for shape, chat in apart if chat == "spaced"} >= {"legacy", "metaspace always", "unigram"}
    assert apart - {(shape, "spaced") for shape in SHAPES} == {
        ("byte-level", "llama-3")
    }  # GPT-2's pattern divides line breaks before a word
    assert {(shape, "zephyr") for shape in ("legacy", "metaspace always", "metaspace first", "unigram")} <= marked
    assert {shape for shape, chat in marked if chat == "zephyr"} & {"byte-level", "wordpiece"} == set()


@pytest.mark.parametrize(("shape", "chat"), [pair for pair in ALL if pair[0] != "unigram"])  # whose pieces include </s> itself
def test_special_tokens_in_a_response_are_text_behind_any_prompt(shape, chat):
    tokenizer, response = shaped(shape, chat), "It</s> is<s> red"
    ids, start = encode_conversation(tokenizer, QUESTION, response)
    ends = turn_end(tokenizer)
    assert not set(ids[start : -len(ends.trained)]) & {tokenizer.bos_token_id, tokenizer.eos_token_id}
    assert encode_scored(tokenizer, QUESTION, response) == [*ids, *ends.after]
    plain, _ = encode_conversation(tokenizer, QUESTION, response.replace("</s>", "").replace("<s>", ""))
    assert ids[start] == plain[start]  # the mark of a word, or none
    if shape != "wordpiece":  # which puts spaces between characters
        assert response_text(tokenizer, ids[:start], ids[start:], special=True).strip().startswith(response)


@pytest.mark.parametrize(("shape", "chat"), [pair for pair in ALL if pair[0] != "wordpiece"])
def test_the_text_of_sampled_ids_is_the_response(shape, chat):
    tokenizer = shaped(shape, chat)
    for response in ("It is Paris.", "It"):
        ids, start = encode_conversation(tokenizer, QUESTION, response)
        text = response_text(tokenizer, ids[:start], ids[start:])
        assert text.strip() == response
        if chat in ("chatml", "zephyr", "llama-3", "gemma", "alpaca"):
            assert text == response
    assert "".join(measure("sft", [row(response="It is Paris.")], tokenizer)["response_decoded"]) == "It is Paris."


@pytest.mark.parametrize("chat", ["continuation"])
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape != "wordpiece"])
def test_a_space_at_the_beginning_of_a_continuation_stays_in_the_text(shape, chat):
    from rlhf_core.models.template import CONTINUATION

    tokenizer = shaped(shape, "zephyr")
    before, tokenizer.chat_template = tokenizer.chat_template, CONTINUATION
    try:
        asked = [{"role": "user", "content": "What is"}]
        ids, start = encode_conversation(tokenizer, asked, " Paris.")
        assert ids == whole(tokenizer, asked, " Paris.")
        assert response_text(tokenizer, ids[:start], ids[start:]) == " Paris."
    finally:
        tokenizer.chat_template = before


def row(**texts: str) -> dict:
    return {"id": "", "source": "", "split": "", "messages": QUESTION, **texts}


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("shape", ["byte-level", "metaspace first", "legacy"])
def test_a_ready_made_reward_model_scores_as_transformers_does(shape: str, chat: str, tmp_path: Path):
    tokenizer = shaped(shape, chat)
    how = {"vocab_size": len(tokenizer), "max_position_embeddings": 128, "pad_token_id": tokenizer.pad_token_id}
    folder = save_classifier(tmp_path, "llama", tokenizer, **how)
    asked = [(messages, response) for messages in (QUESTION, HISTORY) for response in RESPONSES]
    expected = own_scores_alone(tiny_classifier("llama", **how), [whole(tokenizer, *one) for one in asked])[:, 0].tolist()
    assert LoadedModel.load(folder, max_length=128, trust_remote_code=False).score_texts(asked) == pytest.approx(expected, abs=1e-5)
    prompts = [Prompt("p", "mine", messages, encode_prompt(tokenizer, messages), None) for messages, _ in asked]
    sampled = [encode_conversation(tokenizer, *one)[0][len(prompt.prompt_ids) :] for one, prompt in zip(asked, prompts, strict=True)]
    other = shaped("wordpiece", "chatml")
    read = RewardModelInput(tokenizer, other, max_length=500)
    for prompt, ids, (messages, response) in zip(prompts, sampled, asked, strict=True):
        (found,) = read.sequences([(prompt, ids, True)])
        text = response.strip() if chat == "llama-2" else response  # which trims
        if chat not in ("llama-2", "vicuna", "mistral", "alpaca", "tinyllama"):  # the template's own space or header is sampled too
            assert found == whole(other, messages, text)


def test_a_shared_reward_model_reads_sampled_ids_only_where_no_tokens_are_joined():
    for chat, joined in (("zephyr", False), ("spaced", True)):
        tokenizer = shaped("legacy", chat)
        prompt = Prompt("p", "mine", QUESTION, encode_prompt(tokenizer, QUESTION), None)
        ids = encode_conversation(tokenizer, QUESTION, "It is Paris.")[0][len(prompt.prompt_ids) :]
        (found,) = RewardModelInput(tokenizer, tokenizer, max_length=500).sequences([(prompt, ids, True)])
        assert found == whole(tokenizer, QUESTION, "It is Paris.")
        assert joined == (found[: len(prompt.prompt_ids)] != prompt.prompt_ids)


@pytest.mark.parametrize(("chat", "said"), [("spaced", True), ("zephyr", False)])
def test_look_says_where_a_response_is_tokenized_apart_and_shows_what_is_trained(chat: str, said: bool, tmp_path: Path):
    tokenizer, path = shaped("legacy", chat), tmp_path / "pairs.jsonl"
    path.write_text(json.dumps({"prompt": QUESTION[0]["content"], "chosen": "It is Paris.", "rejected": "It is red."}) + "\n")
    place = place_of(str(path), {})
    sample, all_read = sample_of(place, 10)
    (tried,) = guess(place, sample, whole=all_read, format_=None, columns={}).fitting
    found = inspect_reading(tried, sample, tiny_params(model__max_length=4 * MAX_LENGTH), tokenizer, show=1)
    lines = list(page.describe_inspection(found, tiny_params(), colour=False, every_token=False))
    assert any("whose response is tokenized apart" in line for line in lines) == said
    pairs, _ = begin_pairs([row(chosen="It is Paris.", rejected="It is red.")], tokenizer, max_length=10**6)()
    sides = [[*side.prompt_ids, *side.response_ids] for side in (pairs[0].chosen, pairs[0].rejected)]
    assert [s.ids for _, sequences in found.samples for s in sequences if "preference" in s.name] == sides
