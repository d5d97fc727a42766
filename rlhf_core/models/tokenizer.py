"""Tokenizers: one trained on the data or one that comes with a model, and the only way from messages to token ids.

Templated text is tokenized without adding special tokens again: what the template doesn't write isn't there.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from rlhf_core.config import shown
from rlhf_core.data.schema import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

log = logging.getLogger("rlhf")

T = TypeVar("T")
TEXTS_AT_ONCE = 8192
PLAIN_CLASS = "TokenizersBackend"  # what a tokenizer without a class of its own is saved as
PAD, END = "<pad>", "<|end|>"
ROLE_TOKENS = ("<|system|>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
# For a tokenizer that comes without one; written with its own tokens only, since a new one would have no embedding.
PLAIN_TEMPLATE = (
    "{{ bos_token if bos_token else '' }}"
    "{% for message in messages %}{{ message['role'].capitalize() + ':\\n' + message['content'] }}"
    "{{ eos_token if message['role'] == 'assistant' else '' }}{{ '\\n\\n' if not loop.last or add_generation_prompt else '' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:\\n' }}{% endif %}"
)


def build_tokenizer(texts: Iterable[str], *, vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE of at most `vocab_size` tokens, special ones and all 256 bytes included.

    Every digit is a token of its own, any text survives encoding and decoding, and each message ends with the eos token.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, END, *ROLE_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=list(ROLE_TOKENS),
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def use_all_cores() -> None:
    """Let tokenizers train and encode on every core from now on. For processes that fork no other, which could deadlock."""
    os.environ["TOKENIZERS_PARALLELISM"] = "true"


def encode_texts(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], **options: bool) -> Iterator[tuple[str, list[int]]]:
    """Each text and its token ids, nothing added. A tokenizer keeps more of a text than its ids (offsets, masks), so it sees a part of the
    texts at a time.
    """
    options = {"add_special_tokens": False, "return_attention_mask": False, "return_token_type_ids": False, **options}
    for part in in_parts(texts):
        yield from zip(part, tokenizer(part, **options)["input_ids"], strict=True)


def in_parts(items: Sequence[T]) -> Iterator[list[T]]:
    """TEXTS_AT_ONCE of them at a time, in order."""
    for start in range(0, len(items), TEXTS_AT_ONCE):
        yield list(items[start : start + TEXTS_AT_ONCE])


def load_tokenizer(path: str, *, trust_remote_code: bool, chat_template: str | None = None) -> PreTrainedTokenizerBase:
    """A tokenizer from a Hugging Face name or folder, with a pad token and a chat template where it has none.

    Args:
        chat_template: takes the place of its own, and is saved with it.
    Raises:
        ValueError: there is no tokenizer at `path`, or it has no eos token.
    """
    try:
        tokenizer = _read_tokenizer(path, trust_remote_code=trust_remote_code)
    except Exception as error:  # whatever libraries make of another's files
        reason = shown((str(error).strip() or type(error).__name__).splitlines()[0], 600)
        raise ValueError(
            f"tokenizer {path}: expected a Hugging Face folder or a cached name, got: {reason} "
            "Correct model.path, or set HF_HUB_OFFLINE=0 to download"
        ) from error
    if tokenizer.eos_token_id is None:
        raise ValueError(f"tokenizer {path}: expected an eos token, got none; set eos_token in its tokenizer_config.json")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.unk_token or tokenizer.eos_token
        log.warning("tokenizer %s has no pad token: %r pads (masks, not ids, say what is padding)", path, tokenizer.pad_token)
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    if tokenizer.chat_template is None:
        tokenizer.chat_template = PLAIN_TEMPLATE
        log.warning("tokenizer %s has no chat template: a plain one with 'User:' and 'Assistant:' is set and saved with the model", path)
    try:
        tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False, add_generation_prompt=True)
    except Exception as error:  # of a template, which is a program
        got = f"{type(error).__name__}: {shown(str(error))}"
        raise ValueError(f"tokenizer {path}: expected a chat template for a user's message, got {got}; correct it") from error
    return tokenizer


def _read_tokenizer(path: str, *, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """As AutoTokenizer does, whose import takes 5 s and PyTorch with it; a folder that names the plain class needs neither."""
    config = Path(path) / "tokenizer_config.json"
    about = json.loads(config.read_text(encoding="utf-8")) if config.is_file() else {}
    if about.get("tokenizer_class") == PLAIN_CLASS and "auto_map" not in about:
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(path)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)


def encode_prompt(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> list[int]:
    """The ids of a conversation that waits for the assistant: the template with its generation prompt."""
    return list(_encoded_prompt(tokenizer, _frozen(messages))[1])


def encode_conversation(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], response: str) -> tuple[list[int], int]:
    """The ids of prompt, response and one eos, and how many of them are the prompt.

    Prompt and response are tokenized apart, so that the prompt's ids are exactly those of `encode_prompt`, which is what
    the policy sees when it samples. Text in the response that looks like a special token stays text.

    Raises:
        ValueError: the template writes the response differently, so that training and sampling would disagree.
    """
    text, prompt_ids = _encoded_prompt(tokenizer, _frozen(messages))
    if not _copies(tokenizer, tokenizer.chat_template):
        _check_copied(tokenizer, messages, text, response)
    return [*prompt_ids, *_response_ids(tokenizer, response), tokenizer.eos_token_id], len(prompt_ids)


def _frozen(messages: Sequence[Message]) -> tuple[tuple[str, str], ...]:
    return tuple((m["role"], m["content"]) for m in messages)


@lru_cache(maxsize=1024)
def _encoded_prompt(tokenizer: PreTrainedTokenizerBase, messages: tuple[tuple[str, str], ...]) -> tuple[str, tuple[int, ...]]:
    """Text and ids of the prompt; the pairs of one prompt follow each other, so most calls find it here."""
    conversation = [{"role": role, "content": content} for role, content in messages]
    text = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
    return text, tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


@lru_cache(maxsize=1 << 14)
def _response_ids(tokenizer: PreTrainedTokenizerBase, response: str) -> tuple[int, ...]:
    """Ids of a response; one that is compared with several others is tokenized once."""
    return tuple(tokenizer(response, add_special_tokens=False, split_special_tokens=True)["input_ids"])


@lru_cache(maxsize=8)
def _copies(tokenizer: PreTrainedTokenizerBase, template: str) -> bool:
    """Whether the template copies any response as it is, tried on what templates are known to touch: edges, thoughts, lines.

    Asked once, so that only a template that doesn't is rendered again for every response. `template` is the cache's key.
    """
    question, answer = {"role": "user", "content": " a\n"}, {"role": "assistant", "content": "<think>\nb\n</think>\n\nc"}
    for messages in ([question], [question, answer, question]):
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        for response in ("d", " \nd \n", "<think>d</think>e", "d</think>\n\ne", "{{ d }}"):
            if not _with_response(tokenizer, messages, response).startswith(text + response):
                return False
    return True


def _with_response(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], response: str) -> str:
    return tokenizer.apply_chat_template([*messages, {"role": "assistant", "content": response}], tokenize=False)


def _check_copied(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], prompt_text: str, response: str) -> None:
    expected, got = prompt_text + response, _with_response(tokenizer, messages, response)
    if not got.startswith(expected):
        at = next((i for i, (a, b) in enumerate(zip(expected, got, strict=False)) if a != b), len(got))
        raise ValueError(
            f"chat template: expected the response after the generation prompt as it is, {expected[at : at + 40]!r}, "
            f"got {got[at : at + 40]!r} at character {at} of the conversation; strip the response or set a template that copies it"
        )
