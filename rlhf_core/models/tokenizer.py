"""Trains or loads tokenizers, and turns messages into token ids; nothing else does.

Templated text is tokenized without adding special tokens, because only the template writes them.
"""

from __future__ import annotations

import bisect
import contextlib
import json
import logging
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_core.config import ModelConfig, VisionTraining, shown
from rlhf_core.data.pictures import pictures_of
from rlhf_core.data.schema import TEXTS, Message
from rlhf_core.data.tokens import EncodedTurns, beside_pictures
from rlhf_core.models.folder import check_model_folder, locate_model
from rlhf_core.models.response_ids import (
    NO_END,
    encode_texts,
    ids_behind,
    in_parts,
    keeps_borders,
    response_text,
    scored_end,
    trained_end,
)
from rlhf_core.models.small_vision import give_sight
from rlhf_core.models.template import (
    CONTINUATION,
    DEFAULT_DATE,
    Turn,
    TurnEnd,
    Unrenderable,
    copies_response,
    named_template,
    render,
    turn_end,
    with_date,
    with_header,
    with_options,
    written_conversation,
    written_turn,
)
from rlhf_core.models.template_trial import check_limits
from rlhf_core.models.vision import attach, vision_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

__all__ = [
    "TurnEnd",
    "Unrenderable",
    "all_cores",
    "build_tokenizer",
    "copies_response",
    "encode_conversation",
    "encode_prompt",
    "encode_prompts",
    "encode_scored",
    "encode_scored_turns",
    "encode_texts",
    "encode_turns",
    "keeps_borders",
    "load_tokenizer",
    "response_text",
    "stop_ids",
    "turn_end",
    "use_all_cores",
    "write_ends",
]

log = logging.getLogger("rlhf")

PLAIN_CLASS = "TokenizersBackend"  # what a tokenizer without a class of its own is saved as
GENERATION_CONFIG = "generation_config.json"
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

OWN_TEMPLATES = (CHAT_TEMPLATE, PLAIN_TEMPLATE, CONTINUATION)

_NUMBERS: dict[int, int] = {}  # one object for each token id so far, at most the vocabulary


def build_tokenizer(texts: Iterable[str], *, vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE of at most `vocab_size` tokens, including special tokens and all 256 bytes.

    Every digit is a token, encoding and decoding preserve any text, and each message ends with the eos token.
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


def pretrained_tokenizer(config: ModelConfig, *, weights: bool = True) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer of the model at `config.path`, whose folder is checked first; None if params name no model.

    Args:
        weights: whether the folder must have weights.
    """
    use_all_cores()
    if config.path is None:
        return None
    path, wanted = locate_model(config.path, config.revision), config.chat_template
    check_model_folder(path, weights=weights)
    return load_tokenizer(
        path,
        trust_remote_code=config.trust_remote_code,
        chat_template=None if wanted is None else named_template(wanted),
        template_date=config.template_date,
        template_options=config.template_options,
        vision=config.vision,
    )


def new_tokenizer(rows: Iterable[dict], *, vocab_size: int, sees: bool = False) -> PreTrainedTokenizerBase:
    """Train a tokenizer on the texts of the training split, in the order of its rows.

    Args:
        sees: it gets a processor of pictures.
    """
    texts = (text for row in rows if row["split"] == "train" for text in _texts(row))
    tokenizer = build_tokenizer(texts, vocab_size=vocab_size)
    if sees:
        give_sight(tokenizer)
    return tokenizer


def _texts(row: dict) -> Iterator[str]:
    messages = row.get("messages", [])
    stand_ins = "|".join(picture.stand_in for picture in pictures_of(messages))
    yield from (re.sub(stand_ins, "", message["content"]) if stand_ins else message["content"] for message in messages)
    yield from (row[column] for column in TEXTS if row.get(column))


def use_all_cores() -> None:
    """Let tokenizers train and encode on every core. Not for processes that fork, which could deadlock."""
    os.environ["TOKENIZERS_PARALLELISM"] = "true"


@contextlib.contextmanager
def all_cores(threads: int) -> Iterator[None]:
    """Context with `use_all_cores` and at most `threads` threads, a number that the process's first call fixes."""
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ.setdefault("RAYON_NUM_THREADS", str(threads))
    use_all_cores()
    try:
        yield
    finally:
        os.environ["TOKENIZERS_PARALLELISM"] = "false" if before is None else before


def load_tokenizer(
    path: str,
    *,
    trust_remote_code: bool,
    chat_template: str | None = None,
    template_date: str = DEFAULT_DATE,
    template_options: dict[str, Any] | None = None,
    scores: bool = False,
    vision: VisionTraining | None = None,
) -> PreTrainedTokenizerBase:
    """Load a tokenizer from a Hugging Face name or folder, with a pad token and a chat template where it has none.

    Args:
        chat_template: replaces the tokenizer's own, and is saved with it.
        template_date: the day that the template writes, if it writes one; a template that was saved with a day keeps it.
        template_options: defaults of the template's variables, saved with it.
        scores: the tokenizer is a reward model's. It needs no eos token, but a template of its own, on which the model was trained.
        vision: of a model that sees, whose processor is loaded with the tokenizer.
    Raises:
        ValueError: there is no tokenizer at `path`, or it has no eos token, or a reward model's has no template, or the template's text is
            too long or takes too much time or memory.
    """
    try:
        tokenizer = _read_tokenizer(path, trust_remote_code=trust_remote_code)
    except Exception as error:  # libraries raise anything on damaged files
        reason = shown((str(error).strip() or type(error).__name__).splitlines()[0], 600)
        raise ValueError(
            f"tokenizer {path}: expected a Hugging Face folder or a cached name, got: {reason} "
            "Correct model.path, or set HF_HUB_OFFLINE=0 to download"
        ) from error
    if vision is not None:
        attach(tokenizer, path)
    if tokenizer.eos_token_id is None and not scores:
        raise ValueError(f"tokenizer {path}: expected an eos token, got none; set eos_token in its tokenizer_config.json")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.unk_token or tokenizer.eos_token
        log.warning("tokenizer %s has no pad token: %r pads (masks, not ids, say what is padding)", path, tokenizer.pad_token)
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    if tokenizer.chat_template is None and scores:
        raise ValueError(
            f"tokenizer {path}: expected a reward model's own chat template, which says how its conversations are written, got none; "
            "add a chat_template.jinja that writes what the model was trained on (docs/scorers.md)"
        )
    if tokenizer.chat_template is None:
        tokenizer.chat_template = PLAIN_TEMPLATE
        log.warning("tokenizer %s has no chat template: a plain one with 'User:' and 'Assistant:' is set and saved with the model", path)
    if isinstance(tokenizer.chat_template, dict):  # several, by name
        tokenizer.chat_template = _default_template(path, tokenizer.chat_template)
    if isinstance(tokenizer.chat_template, str):
        tokenizer.chat_template = with_options(with_date(tokenizer.chat_template, template_date), template_options or {})
    if isinstance(tokenizer.chat_template, str) and tokenizer.chat_template not in OWN_TEMPLATES:
        check_limits(path, tokenizer.chat_template, tokenizer.special_tokens_map)
    try:
        if not scores and (template := with_header(tokenizer)) != tokenizer.chat_template:
            log.warning(
                "tokenizer %s: its template ignores add_generation_prompt; the header of an answer is added and saved with it", path
            )
            tokenizer.chat_template = template
        _mark_end(path, tokenizer)
    except Exception as error:  # of a template, which is a program
        got = f"{type(error).__name__}: {shown(str(error))}"
        raise ValueError(f"tokenizer {path}: expected a chat template for a user's message and an answer, got {got}; correct it") from error
    return tokenizer


def _mark_end(path: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Make the token that ends a turn special, so that decoding leaves it out of a response's text."""
    last = turn_end(tokenizer).trained[-1:]  # of a reward model there may be none
    if last and last[0] != tokenizer.eos_token_id and not tokenizer.added_tokens_decoder[last[0]].special:
        token = tokenizer.convert_ids_to_tokens(last[0])
        log.warning("tokenizer %s: its template ends turns with %r, which is now a special token", path, token)
        tokenizer.add_special_tokens({"additional_special_tokens": [token]}, replace_extra_special_tokens=False)


def _default_template(path: str, templates: dict[str, str]) -> str:
    if "default" not in templates:
        raise ValueError(f"tokenizer {path}: expected a chat template named default, got {', '.join(templates)}; set chat_template")
    return templates["default"]


def _read_tokenizer(path: str, *, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """Load a tokenizer by AutoTokenizer, or by the plain class if the folder names it: importing AutoTokenizer takes 5 s and imports
    PyTorch.
    """
    config = Path(path) / "tokenizer_config.json"
    about = json.loads(config.read_text(encoding="utf-8")) if config.is_file() else {}
    if about.get("tokenizer_class") == PLAIN_CLASS and "auto_map" not in about:
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(path)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)


def one_object_each(ids: Iterable[int]) -> list[int]:
    """Return the ids with one int object for each value, so that a data set takes 8 bytes a token instead of 36."""
    ids = list(ids)
    return list(map(_NUMBERS.setdefault, ids, ids))


def encode_prompt(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> list[int]:
    """Return the ids of a conversation with the template's generation prompt.

    Raises:
        Unrenderable: the template refuses the conversation. The functions below raise it too.
    """
    return encode_prompts(tokenizer, [messages])[0]


def encode_prompts(tokenizer: PreTrainedTokenizerBase, conversations: Iterable[Sequence[Message]]) -> list[list[int]]:
    """Return the ids of many conversations by `encode_prompt`."""
    found = []
    for part in in_parts(conversations):
        texts = _prompt_texts(tokenizer, part)
        ids = _distinct_ids(tokenizer, texts)
        found += [ids[text] for text in texts]
    return found


def encode_conversation(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], response: str) -> tuple[list[int], int]:
    """Return the ids of prompt, response and turn end, and how many of them are the prompt.

    The prompt's ids are those of `encode_prompt`, from which the policy samples. The response is the template's rendering of it
    (`written_turn`), in which special tokens stay plain text, with the ids that it has behind the prompt (`ids_behind`). The end is the
    template's (`TurnEnd.trained`).
    """
    turns = encode_turns(tokenizer, [(messages, {"role": "assistant", "content": response})])
    return turns.ids(0), turns.start(0)


def encode_turns(tokenizer: PreTrainedTokenizerBase, conversations: Iterable[tuple[Sequence[Message], Message]]) -> EncodedTurns:
    """Return the ids of many conversations and the messages that follow them, which may call tools, by `encode_conversation`.

    Each distinct text of some thousand conversations is tokenized once.
    """
    found, sees = EncodedTurns(), vision_of(tokenizer) is not None
    for part in in_parts(conversations):
        texts = _prompt_texts(tokenizer, [messages for messages, _ in part])
        turns = [written_turn(tokenizer, messages, answer, prompt) for (messages, answer), prompt in zip(part, texts, strict=True)]
        ids_of = _distinct_ids(tokenizer, texts)
        prompts = {text: found.tokens.add(ids) for text, ids in ids_of.items()}
        written = ids_behind(tokenizer, texts, turns, trained_end(tokenizer), prompt_ids=ids_of)
        for (messages, _), text, turn, behind in zip(part, texts, turns, written, strict=True):
            thoughts = _tokens_of(tokenizer, ids_of[text], behind.ids, turn.thoughts) if turn.thoughts else 0
            found.add(prompts[text], behind.ids, thoughts, pictures_of(messages) if sees else ())
    return found


def encode_scored(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], response: str, *, finished: bool = True) -> list[int]:
    """Return the ids of a whole rendered conversation, the input of a reward model.

    They are those of `encode_conversation` and what the template writes after the turn's end; beside pictures `SeenIds`. A template that
    drops thoughts drops them here too, so that the answer alone is scored. Where the tokenizer joins the prompt's last characters with the
    response's first ones, they are joined here, as when the reward model was trained.

    Args:
        finished: False: without the turn's end and what follows it.
    """
    turns = encode_scored_turns(tokenizer, [(messages, response)], finished=finished)
    return beside_pictures(turns.ids(0), turns.pictures.get(0, ()))


def encode_scored_turns(
    tokenizer: PreTrainedTokenizerBase, conversations: Iterable[tuple[Sequence[Message], str]], *, finished: bool = True
) -> EncodedTurns:
    """Return the ids of many conversations and responses by `encode_scored`."""
    found, sees = EncodedTurns(), vision_of(tokenizer) is not None
    for part in in_parts(conversations):
        before = _prompt_texts(tokenizer, [messages for messages, _ in part])
        bodies = [Turn("", "")] * len(part)
        for i, (messages, response) in enumerate(part):
            whole, answer = (before[i], "") if copies_response(tokenizer) else written_conversation(tokenizer, messages, response)
            if whole.startswith(before[i]):
                turn = written_turn(tokenizer, messages, {"role": "assistant", "content": response}, before[i])
                bodies[i] = turn._replace(thoughts=0)
            else:
                before[i], bodies[i] = whole, Turn("", answer)
        ids_of = _distinct_ids(tokenizer, before)
        prompts = {text: found.tokens.add(ids) for text, ids in ids_of.items()}
        end = scored_end(tokenizer) if finished else NO_END
        written = ids_behind(tokenizer, before, bodies, end, prompt_ids=ids_of)
        for (messages, _), text, behind in zip(part, before, written, strict=True):
            pictures = pictures_of(messages) if sees else ()
            if behind.joined is None:
                found.add(prompts[text], behind.ids, pictures=pictures)
            else:
                found.add(found.tokens.add(ids_of[text][: len(ids_of[text]) - behind.before]), behind.joined, pictures=pictures)
    return found


def stop_ids(tokenizer: PreTrainedTokenizerBase, folder: str | Path) -> tuple[int, ...]:
    """Return the tokens that end a response: the last of the template's turn end, eos, and those of the folder's generation_config.json.

    Raises:
        ValueError: the file is damaged, or its eos_token_id isn't a token id.
    """
    return tuple(dict.fromkeys([turn_end(tokenizer).trained[-1], tokenizer.eos_token_id, *_generation_ends(Path(folder), len(tokenizer))]))


def write_ends(folder: Path, ends: Sequence[int]) -> None:
    """Write the stop tokens to the folder's generation_config.json, unless it has them, so that every engine stops at them."""
    if {*_generation_ends(folder, max(ends) + 1)} == {*ends}:
        return
    path = folder / GENERATION_CONFIG
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    config |= {"eos_token_id": list(ends) if len(ends) > 1 else ends[0]}
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _generation_ends(folder: Path, vocabulary: int) -> list[int]:
    path = folder / GENERATION_CONFIG
    if not path.is_file():
        return []
    try:
        found = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{path}: expected a JSON object, got: {shown(str(error))}; restore or remove it") from error
    ids = found if isinstance(found, list) else [] if found is None else [found]
    if not all(type(token) is int and token >= 0 for token in ids):
        raise ValueError(f"{path}: expected token ids as eos_token_id, got {shown(repr(found))}; correct it")
    return [token for token in ids if token < vocabulary]  # one that the tokenizer doesn't have is never sampled


def _prompt_texts(tokenizer: PreTrainedTokenizerBase, conversations: Sequence[Sequence[Message]]) -> list[str]:
    """Return each conversation as the template writes it before an answer.

    An object that occurs several times, such as the prompt of a pair, is rendered once.
    """
    distinct = {id(messages): messages for messages in conversations}
    texts = {key: render(tokenizer, messages, waits=True) for key, messages in distinct.items()}
    return [texts[id(messages)] for messages in conversations]


def _distinct_ids(tokenizer: PreTrainedTokenizerBase, texts: Iterable[str]) -> dict[str, list[int]]:
    """Return the token ids of each distinct text.

    A single text is cached, because a prompt whose samples are scored one by one comes again and again.
    """
    distinct = list(dict.fromkeys(texts))
    if len(distinct) == 1:
        return {distinct[0]: list(_ids_of_one(tokenizer, distinct[0]))}
    return dict(encode_texts(tokenizer, distinct))


@lru_cache(maxsize=1024)
def _ids_of_one(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[int, ...]:
    return tuple(next(encode_texts(tokenizer, [text]))[1])


def _tokens_of(tokenizer: PreTrainedTokenizerBase, prompt_ids: list[int], ids: list[int], characters: int) -> int:
    """Return the number of leading ids that decode to at least this many characters behind the prompt."""

    def length(count: int) -> int:
        return len(response_text(tokenizer, prompt_ids, ids[:count], special=True))

    return bisect.bisect_left(range(len(ids)), characters, key=length)
