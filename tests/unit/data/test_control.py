"""White space at the edges of texts, texts that a template has written, end tokens, pictures, and texts that look empty."""

from __future__ import annotations

import json
import time
import unicodedata
from pathlib import Path

import pytest
from chat_templates import templated
from measured_rows import measured
from strict_limits import strict_limits
from tokenizer_shapes import CHATS, shaped

from rlhf_core.config import SourceConfig
from rlhf_core.data.control import control_token, end_token, is_blank, is_filled, placeholder, unwrapped, without_end_tokens
from rlhf_core.data.schema import open_tables, write_rows
from rlhf_core.look.__main__ import main
from rlhf_core.look.look import guess, place_of, sample_of
from rlhf_core.look.rows import COMPOSED, UseCounts
from rlhf_core.models.template import CONTINUATION, template_tokens
from rlhf_core.models.tokenizer import encode_conversation
from rlhf_core.preparation.drops import Dropped, Misfit
from rlhf_core.preparation.filters import row_fault
from rlhf_core.preparation.formats import convert
from rlhf_core.preparation.sources import load_source
from rlhf_core.preparation.validation.validate import validate

QUESTION = [{"role": "user", "content": "Tell me about the fox."}]
KIND = [{"role": "system", "content": "You are kind."}, *QUESTION]
ANSWER = {"role": "assistant", "content": "It is red."}
ZERO_WIDTH = "\u200b \ufeff\u200d\n"


def source(format_: str = "preference", **keys) -> SourceConfig:
    uses = {"prompt": ["prompt"], "messages": ["sft", "prompt"], "instruction": ["sft", "prompt"]}.get(
        format_, ["sft", "preference", "prompt"]
    )
    return SourceConfig(**{"name": "mine", "kind": "file", "path": "x.jsonl", "format": format_, "uses": uses, **keys})


def pair(prompt, chosen: str = "a", rejected: str = "b", **columns) -> dict:
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected, **columns}


def failures(folder: Path, tokenizer, rows: dict[str, list[dict]], **limits) -> dict[str, int | None]:
    """Failed checks by name -> rows."""
    for use, of_use in rows.items():
        made = [{"id": f"{use}{i:03}", "source": "mine", "split": "train", "label": None, **row} for i, row in enumerate(of_use)]
        write_rows(folder, use, [{k: v for k, v in row.items() if k != "label" or use == "prompt"} for row in made])
    tables = open_tables(folder)
    found = validate(tables, measured(tables, tokenizer), strict_limits(**limits), max_length=200, needed=[("sft", "train")])
    return {f.name: f.unexpected for f in found if not f.passed}


# White space


def test_a_continuation_has_the_tokens_of_prompt_and_answer_as_one_text():
    """TRL's standard preference: the space belongs to the answer's first word."""
    (row,) = convert(pair("The sky is", " blue.", " green."), source())["preference"]
    assert (row["messages"][0]["content"], row["chosen"], row["rejected"]) == ("The sky is", " blue.", " green.")
    tokenizer = templated("chatml")
    tokenizer.chat_template = CONTINUATION
    ids, start = encode_conversation(tokenizer, row["messages"], row["chosen"])
    assert tokenizer.decode(ids) == "<bos>The sky is blue.<eos>" and tokenizer.convert_ids_to_tokens(ids)[start].startswith("Ġ")
    assert ids[1:-1] == tokenizer("The sky is blue.", add_special_tokens=False)["input_ids"]
    (row,) = convert({"chosen": "The sky is blue.", "rejected": "The sky is green."}, source(implicit_prompt=True))["preference"]
    assert (row["messages"][0]["content"], row["chosen"], row["rejected"]) == ("The sky is", " blue.", " green.")


def test_a_chat_treats_white_space_as_its_template_does():
    (row,) = convert(pair(" Sort 41.\n", "\n14 ", "no"), source())["preference"]
    kept, trimmed = templated("chatml"), templated("trimmed")
    texts = [tokenizer.decode(encode_conversation(tokenizer, row["messages"], row["chosen"])[0]) for tokenizer in (kept, trimmed)]
    assert texts[0] == "<|im_start|>user\n Sort 41.\n<|im_end|>\n<|im_start|>assistant\n\n14 <|im_end|>"
    assert texts[1] == "<bos><start_of_turn>user\nSort 41.<end_of_turn>\n<start_of_turn>model\n14<end_of_turn>"


def test_white_space_at_edges_makes_no_prompts_differ():
    talk = [{"role": "user", "content": "Hello "}, ANSWER]
    other = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": " No."}]
    (row,) = convert({"prompt": "Hello\n", "chosen": talk, "rejected": other}, source())["preference"]
    assert (row["chosen"], row["rejected"]) == ("It is red.", " No.")
    with pytest.raises(Dropped, match="prompt is empty"):
        convert(pair(" \n"), source())


# Templates


@pytest.mark.parametrize("chat", ["chatml", "llama-3", "zephyr", "gemma", "llama-2", "mistral"])
@pytest.mark.parametrize("messages", [QUESTION, [*QUESTION, ANSWER, *QUESTION], KIND])
def test_a_text_that_a_template_has_written_is_read_as_its_messages(chat, messages):
    tokenizer = shaped("byte-level", chat)
    if chat in ("llama-2", "mistral") and messages is KIND:
        pytest.skip("has no system message")
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert unwrapped(prompt) == messages
    whole = tokenizer.apply_chat_template([*messages, ANSWER], tokenize=False)
    assert unwrapped(whole) == [*messages, ANSWER]
    worse = tokenizer.apply_chat_template([*messages, {**ANSWER, "content": "No."}], tokenize=False)
    end = whole.removeprefix(prompt).strip().removeprefix("It is red.").strip()
    for made in (pair(prompt, "It is red." + end, "No." + end), pair(prompt, whole, worse)):
        (row,) = convert(made, source())["preference"]
        assert (row["messages"], row["chosen"], row["rejected"]) == (messages, "It is red.", "No.")
    (row,) = convert({"chosen": whole, "rejected": worse}, source())["preference"]
    assert (row["messages"], row["chosen"], row["rejected"]) == (messages, "It is red.", "No.")
    assert convert({"prompt": prompt}, source("prompt"))["prompt"][0]["messages"] == messages
    made = {"instruction": prompt, "output": "It is red." + end}
    assert convert(made, source("instruction"))["sft"] == [{"messages": messages, "response": "It is red."}]


def test_the_system_message_of_llama_2_is_found():
    text = "<s>[INST] <<SYS>>\nYou are kind.\n<</SYS>>\n\nTell me about the fox. [/INST] It is red. </s><s>[INST] And? [/INST]"
    assert unwrapped(text) == [*KIND, ANSWER, {"role": "user", "content": "And?"}]


@pytest.mark.parametrize(
    "text",
    [
        "What does <|im_start|> mean?", "<|im_start|>user\nHello<|im_end|> there", "<|im_start|>user\nHello<|im_start|>assistant\n",
        "<|im_start|>wizard\nHello<|im_end|>\n", "Hello [INST] there", "[INST] a [INST] b [/INST]", "<|user|>Hello<|assistant|>",
        "<start_of_turn>user\nHello", "", "[INST]", "if a<|b|>c:",
    ],
)  # fmt: skip
def test_a_text_that_is_not_exactly_a_templates_stays_a_text(text):
    assert unwrapped(text) is None
    if text:
        assert convert(pair(text), source())["preference"][0]["messages"] == [{"role": "user", "content": text}]


@pytest.mark.parametrize(
    "text",
    [
        "<|system|>\n</s>\n<|user|>\nTell me about the fox.</s>\n<|assistant|>\n",
        "[INST] <<SYS>>\n\n<</SYS>>\n\nTell me about the fox. [/INST]",
        "<|im_start|>user\nTell me about the fox.<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
    ],
)
def test_empty_system_prompts_and_empty_thoughts_are_no_messages(text):
    assert unwrapped(text) == QUESTION and unwrapped("<|system|>\n</s>\n") is None


def test_control_tokens_in_texts_have_a_limit(tmp_path):
    rows = [{"messages": QUESTION, "response": f"It is {i}."} for i in range(20)]
    assert failures(tmp_path / "a", templated("chatml"), {"sft": rows}) == {}
    rows[3] = {"messages": [{"role": "user", "content": "Say <|im_start|>user"}], "response": "No."}
    rows[5] = {"messages": QUESTION, "response": "[INST] So. [/INST] No."}
    assert failures(tmp_path / "b", templated("chatml"), {"sft": rows}) == {"templated": 2}
    assert failures(tmp_path / "c", templated("chatml"), {"sft": rows}, max_templated_fraction=0.1) == {}
    rows[7] = {"messages": [{"role": "user", "content": "Say <|stop|>"}], "response": "No."}  # no well-known one
    assert failures(tmp_path / "d", templated("role_tokens"), {"sft": rows}) == {"templated": 3}


# End tokens


@pytest.mark.parametrize(
    ("text", "token", "left"),
    [
        ("It is red.</s>", "</s>", "It is red."),
        ("Red. <|im_end|>\n", "<|im_end|>", "Red."), ("a<|eot_id|><|end_of_text|>", "<|eot_id|>", "a"),
        ("<p><s>old</s>", None, "<p><s>old</s>"), ("<s> It is red.</s>", "</s>", "<s> It is red."),
        ("Use </s> here", None, "Use </s> here"), ("a ", None, "a "), ("<|endoftext|>", "<|endoftext|>", ""),
    ],
)  # fmt: skip
def test_end_tokens_at_the_end_are_found_and_taken_off_where_asked(text, token, left):
    assert (end_token(text), without_end_tokens(text)) == (token, left)
    assert convert(pair("p", text), source())["preference"][0]["chosen"] == text
    rows = convert(pair("p", text), source(strip_end_tokens=True))
    assert (rows["preference"][0]["chosen"], rows["sft"][0]["response"]) == (left, left)


def test_end_tokens_as_text_have_a_limit(tmp_path):
    rows = [{"messages": QUESTION, "chosen": f"It is {i}.", "rejected": f"No, {i}."} for i in range(20)]
    rows[3]["chosen"] += "</s>"
    rows[4]["rejected"] += "<|stop|>"  # the template's own
    made = {"preference": rows, "sft": [{"messages": QUESTION, "response": "It is."}]}
    assert failures(tmp_path / "a", templated("role_tokens"), made) == {"end_token.chosen": 1, "end_token.rejected": 1}
    assert failures(tmp_path / "b", templated("role_tokens"), made, max_end_token_fraction=0.05) == {}


@pytest.mark.parametrize(("ended", "strips"), [(1, False), (2, True)])
def test_look_strips_end_tokens_above_the_limit_of_validation(ended, strips, tmp_path):
    path = tmp_path / "d.jsonl"
    path.write_text("".join(json.dumps(pair(f"Tell {i}.", f"It is {i}.{'</s>' * (i < ended)}", f"No {i}.")) + "\n" for i in range(150)))
    place = place_of(str(path), {})
    (tried,) = guess(place, *sample_of(place, 150)[:1], whole=True, format_=None, columns={}).fitting
    assert tried.source.strip_end_tokens is strips and any("'</s>' as text" in line for line in tried.reading.unsure)


def test_look_counts_end_tokens_and_its_recipe_takes_them_off(tmp_path, capsys):
    path = tmp_path / "ended.jsonl"
    path.write_text("".join(json.dumps(pair(f"Tell me {i}.", f"It is {i}.</s>", f"No {i}.")) + "\n" for i in range(12)))
    assert main([str(path)]) == 0
    out = capsys.readouterr().out
    assert "12 records have an answer that ends in '</s>' as text" in out and "strip_end_tokens: true" in out
    assert "It is 0.<|end|>" in out and "end token (" not in out
    path.write_text(
        "".join(json.dumps(pair(f"<|im_start|>user\nTell me {i}.<|im_end|>\n<|im_start|>assistant\n")) + "\n" for i in range(12))
    )
    assert main([str(path)]) == 0
    out = capsys.readouterr().out
    assert "12 records have a text that a chat template has written" in out and "<|user|>Tell me 0.<|end|>" in out
    path.write_text("".join(json.dumps(pair(f"<|im_start|>user\nTell me {i}.")) + "\n" for i in range(12)))
    assert main([str(path)]) == 0
    assert "12 templated (100.0%); validation.max_templated_fraction is 0.01: validate_data stops" in capsys.readouterr().out


# Pictures

ASKED = [{"role": "user", "content": "What is it?"}, ANSWER]


@pytest.mark.parametrize(
    ("format_", "record"),
    [
        ("preference", pair("What is it?", image={"bytes": None, "path": "0.jpg"})),
        ("messages", {"messages": ASKED, "images": ["0.jpg"]}),
        ("messages", {"messages": [{"role": "user", "content": "<image>What is it?"}, ANSWER]}),
        ("messages", {"messages": [{"role": "user", "content": "What is it?\n<image>"}, ANSWER]}),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]}, ANSWER]}),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, ANSWER]}),
        ("messages", {"messages": [{"role": "user", "content": "What is it?", "images": ["a.png"]}, ANSWER]}),
        ("prompt", {"prompt": "What is it?", "video": "a.mp4"}),
    ],
)
def test_pictures_are_refused_in_a_sentence(format_, record, tmp_path):
    with pytest.raises(Misfit, match=r"expected text alone, got pictures, video or sound; for pictures set model.vision"):
        convert(record, source(format_))
    path = tmp_path / "pictures.jsonl"
    path.write_text(json.dumps(record) + "\n")
    with pytest.raises(ValueError, match=r"source mine: .*pictures.jsonl line 1: .* got pictures, video or sound; "):
        load_source(source(format_, path=str(path)), seed=0)


def test_records_without_pictures_stay_and_those_with_some_are_counted(tmp_path):
    path = tmp_path / "some.jsonl"
    records = [{"messages": ASKED, "images": []}, {"messages": ASKED, "images": None}, {"messages": ASKED, "images": ["0.jpg"]}]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    loaded = load_source(source("messages", path=str(path)), seed=0)
    assert len(loaded.rows["sft"]) == 2 and loaded.dropped["column images has pictures, video or sound"] == 1
    mapped = {"prompt": "What is it?", "chosen": "a", "rejected": "b", "image": "a fox"}
    assert convert(mapped, source(slices={"subject": "image"}))["preference"][0]["slices"] == {"subject": "a fox"}
    assert placeholder("write an <image> tag") is None and is_blank("") and control_token(["a < b"]) is None


@pytest.mark.parametrize("value", [False, True, 0, 2, 1.0, float("nan"), "none", " N/A ", "null", b"", {"bytes": None, "path": None}, [[]]])
def test_a_column_that_says_there_are_no_pictures_has_none(value):
    assert convert(pair("q", images=value), source())["preference"]
    assert convert({"messages": [{**QUESTION[0], "audio": value}, ANSWER]}, source("messages"))["sft"]


@pytest.mark.parametrize("value", [b"x", "a.png", {"array": [0.0, 0.1]}, [{"bytes": b"x"}]])
def test_a_column_with_pictures_or_sound_is_filled(value):
    assert is_filled(value)


@pytest.mark.parametrize(
    "code", ["<video>\n  <source src='a'>\n</video>", "<svg>\n<image>\n</image>\n</svg>", "<audio>\nNo sound.\n</audio>"]
)
def test_elements_of_html_are_no_placeholders(code):
    assert placeholder(code) is None and convert(pair("Show it.", code), source())["preference"][0]["chosen"] == code
    assert placeholder(f"{code}\n<|image|>") == "<|image|>"


# Texts that look empty


def test_characters_without_width_are_empty(tmp_path):
    assert is_blank(ZERO_WIDTH) and not is_blank("\u200ba") and not is_blank("\u0301a")
    assert row_fault({"messages": QUESTION, "response": ZERO_WIDTH}, ["empty"]) == "empty"
    assert row_fault({"messages": [{"role": "user", "content": ZERO_WIDTH}], "response": "a"}, ["empty"]) == "empty"
    with pytest.raises(Dropped, match="prompt is empty"):
        convert(pair(ZERO_WIDTH), source())
    rows = [{"messages": QUESTION, "response": text} for text in (*("a", "b", "c"), ZERO_WIDTH, "\u00a0\u2003")]
    assert failures(tmp_path, templated("chatml"), {"sft": rows}) == {"empty.response": 2}


def test_decomposed_characters_pass_and_are_trained_as_the_tokenizer_writes_them(tmp_path):
    from tokenizers import normalizers

    tokenizer, text = templated("chatml"), unicodedata.normalize("NFD", "Zoë is naïve.")
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    assert text != unicodedata.normalize("NFC", text)
    rows = [{"messages": QUESTION, "response": "It is."}, {"messages": QUESTION, "response": text}]
    assert failures(tmp_path / "a", tokenizer, {"sft": rows}) == {}
    ids, start = encode_conversation(tokenizer, QUESTION, text)
    assert tokenizer.decode(ids[start:-1]) == "Zoë is naïve."
    counts = UseCounts("sft")
    counts.add(rows, tokenizer)
    assert counts.objections(200) == {COMPOSED: 1}
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    assert failures(tmp_path / "b", tokenizer, {"sft": rows}) == {"template_round_trip.response": 2}


@pytest.mark.parametrize("chat", CHATS)
def test_what_templates_write_around_turns_is_found_in_texts(chat):
    text = shaped("byte-level", chat).apply_chat_template(ASKED, tokenize=False)
    assert control_token([text]) == {**dict.fromkeys(("vicuna", "alpaca", "spaced"), "</s>"), "llama-2": "[INST]", "mistral": "[INST]",
        "chatml": "<|im_start|>", "llama-3": "<|start_header_id|>", "gemma": "<start_of_turn>"}.get(chat, "<|user|>")  # fmt: skip


@pytest.mark.parametrize(
    "text", ["</s>" * 200_000, " " * 800_000 + "a", "[INST]" * 100_000, "<|im_start|>user\n" * 50_000, "[INST]" + " " * 800_000]
)
def test_long_texts_take_no_longer_than_they_are(text):
    begun = time.perf_counter()
    unwrapped(text)
    end_token(text), without_end_tokens(text), control_token([text], ["<x>"]), placeholder(text), is_blank(text)
    assert time.perf_counter() - begun < 20  # squared it would be minutes; here it is a second at most


def test_line_breaks_and_html_as_added_tokens_are_no_control_tokens(tmp_path):
    tokenizer = shaped("added words", "gemma")
    assert {"\n", "<b>"} <= {token.content for token in tokenizer.added_tokens_decoder.values() if not token.special}
    assert set(template_tokens(tokenizer)) >= {"<start_of_turn>", "<end_of_turn>"}
    rows = [{"messages": [{"role": "user", "content": "Tell me\nmore."}], "response": "It is <b>red</b>.\n\nIt is."}]
    assert failures(tmp_path, tokenizer, {"sft": rows}) == {}
