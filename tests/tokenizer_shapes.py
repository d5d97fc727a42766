"""Tokenizers of the common kinds with the chat templates of model families, as strangers bring them."""

from __future__ import annotations

import json
from functools import lru_cache

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEXTS = [
    "It is Paris.", "What is the capital of France?", "Please answer the question: ", "user assistant system\n", "USER: ASSISTANT: ",
    "### Instruction:\n### Response:\n", "[INST] [/INST] model", "It is   blue.", "It is red.\n\n",
] * 10  # fmt: skip
BYTES = [f"<0x{i:02X}>" for i in range(256)]
SPECIAL = ["<unk>", "<s>", "</s>"]
STRIP = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]


def _byte_level() -> Tokenizer:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(TEXTS, trainer)
    return backend


def _with_words() -> Tokenizer:
    """Line breaks and tags of HTML as added tokens that aren't special, as Gemma has them."""
    backend = _byte_level()
    backend.add_tokens(["\n", "\n\n", "<b>", "</b>"])
    return backend


def _sentencepiece(scheme: str) -> Tokenizer:
    backend = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    backend.decoder = decoders.Sequence(STRIP[: None if scheme != "never" else -1])
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always")
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=[*SPECIAL, *BYTES], show_progress=False)
    backend.train_from_iterator(TEXTS, trainer)
    tree = json.loads(backend.to_str())
    tree["added_tokens"] = tree["added_tokens"][: len(SPECIAL)]  # bytes are ordinary tokens
    backend = Tokenizer.from_str(json.dumps(tree))
    if scheme == "legacy":  # Llama 2's files: every text between special tokens begins with a mark
        backend.pre_tokenizer = None
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=False)
    return backend


def _unigram() -> Tokenizer:
    backend = Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always")
    backend.decoder = decoders.Metaspace(replacement="▁", prepend_scheme="always")
    trainer = trainers.UnigramTrainer(vocab_size=200, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False)
    backend.train_from_iterator(TEXTS, trainer)
    return backend


def _wordpiece() -> Tokenizer:
    backend = Tokenizer(models.WordPiece(unk_token="<unk>"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=False)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.train_from_iterator(TEXTS, trainers.WordPieceTrainer(vocab_size=300, special_tokens=SPECIAL, show_progress=False))
    return backend


SHAPES = {
    "byte-level": _byte_level,
    "added words": _with_words,
    "metaspace always": lambda: _sentencepiece("always"),
    "metaspace first": lambda: _sentencepiece("first"),
    "metaspace never": lambda: _sentencepiece("never"),
    "legacy": lambda: _sentencepiece("legacy"),
    "unigram": _unigram,
    "wordpiece": _wordpiece,
}


def _chat(before: str, after: str, *, start: str = "", header: str | None = None) -> str:
    """A template of messages between texts in which ROLE is the role."""
    opened, closed = before.replace("ROLE", "' + m.role + '"), after.replace("ROLE", "' + m.role + '")
    header = before.replace("ROLE", "assistant") if header is None else header
    return (
        f"{start}{{% for m in messages %}}{{{{ '{opened}' + m.content + '{closed}' }}}}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{{{{ '{header}' }}}}{{% endif %}}"
    )


def _by_role(user: str, assistant: str, *, start: str = "", header: str = "") -> str:
    """A template of turns: expressions of `m.content` for the user's and the assistant's."""
    return (
        f"{start}{{% for m in messages %}}{{% if m.role == 'user' %}}{{{{ {user} }}}}{{% else %}}{{{{ {assistant} }}}}{{% endif %}}"
        f"{{% endfor %}}{{% if add_generation_prompt %}}{{{{ '{header}' }}}}{{% endif %}}"
    )


BOS = "{{ bos_token }}"
# name -> (tokens added as special, template)
CHATS: dict[str, tuple[list[str], str]] = {
    "chatml": (["<|im_start|>", "<|im_end|>"], _chat("<|im_start|>ROLE\\n", "<|im_end|>\\n")),
    "llama-2": ([], _by_role("bos_token + '[INST] ' + m.content | trim + ' [/INST]'", "' ' + m.content | trim + ' ' + eos_token")),
    "llama-3": (
        ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
        _chat("<|start_header_id|>ROLE<|end_header_id|>\\n\\n", "<|eot_id|>", start=BOS),
    ),
    "mistral": (["[INST]", "[/INST]"], _by_role("'[INST] ' + m.content + ' [/INST]'", "' ' + m.content + eos_token", start=BOS)),
    "zephyr": ([], _chat("<|ROLE|>\\n", "</s>\\n")),
    "tinyllama": ([], _chat("<|ROLE|>\\n", "</s>\\n", header="<|assistant|>")),
    "gemma": (["<start_of_turn>", "<end_of_turn>"], _chat("<start_of_turn>ROLE\\n", "<end_of_turn>\\n", start=BOS)),
    "vicuna": ([], _by_role("'USER: ' + m.content + ' ASSISTANT:'", "' ' + m.content + eos_token", start=BOS)),
    "alpaca": (
        [],
        _by_role("'### Instruction:\\n' + m.content + '\\n\\n'", "'### Response:\\n' + m.content + eos_token + '\\n\\n'",
                 header="### Response:\\n"),
    ),
    "spaced": ([], _by_role("'User: ' + m.content + '\\n'", "'Assistant: ' + m.content + eos_token", header="Assistant: ")),
}  # fmt: skip


@lru_cache
def shaped(shape: str, chat: str) -> PreTrainedTokenizerFast:
    added, template = CHATS[chat]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=SHAPES[shape](), unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<unk>",
        additional_special_tokens=added,
    )  # fmt: skip
    tokenizer.chat_template = template
    return tokenizer
