"""Token ids of a response that follows its prompt, and the text of sampled ids.

SentencePiece-like tokenizers mark the beginning of a text as they mark the beginning of a word, so a response by itself begins with another
token than after its prompt. Here it has the ids of the whole conversation. Only the end of the prompt, from the last added token on, is
tokenized again with the response: tokenizers split texts at added tokens first.
"""

from __future__ import annotations

import itertools
import re
import string
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from rlhf_core.models.template import ANSWER, CLOSE, OPEN, QUESTION, Turn, end_texts, render, turn_end, written_turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")
TEXTS_AT_ONCE = 4096
STARTS = ("", "\n", ":", "~")  # behind one of these any tokenizer gives a text the tokens that it has inside a text
WORDS = (*(f"{word} " for word in ("It is", "The", "This", "To", "Yes", "No", "Sure", "We", "You")), *string.ascii_letters, *string.digits)
BACK = 4  # preceding tokens that a token's text may depend on: a space, or the bytes of one character
TORN = "\N{REPLACEMENT CHARACTER}"


class End(NamedTuple):
    """The text or ids that follow a turn.

    text: as the template writes it; "": only `ids` follow, such as an eos token that the template doesn't write.
    """

    text: str
    ids: tuple[int, ...]


class Behind(NamedTuple):
    """The ids of a turn and its end that follow a prompt.

    ids: ids that follow the prompt's.
    joined: None, or the prompt's ids at its end, and `ids`, as the tokenizer gives them for the whole conversation: it joins characters of
        the prompt with those of the turn.
    before: how many of the prompt's ids `joined` replaces.
    """

    ids: list[int]
    joined: list[int] | None = None
    before: int = 0


class _Context(NamedTuple):
    """The end of a prompt on which a response's ids depend."""

    text: str
    ids: tuple[int, ...]


class _Traits(NamedTuple):
    """How a tokenizer treats special tokens and the beginning of a text.

    added: id -> text of tokens at which texts are split. special: those that a response has as plain text.
    begins_anew: a text behind an added token has the ids of the text by itself. keeps_spaces: ids tell whether a word follows a space.
    """

    added: Mapping[int, str]
    special: frozenset[int]
    begins_anew: bool
    keeps_spaces: bool


def encode_texts(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], **options: bool) -> Iterator[tuple[str, list[int]]]:
    """Yield the token ids of each text, without special tokens.

    Texts are tokenized in parts, since a tokenizer's output also holds offsets and masks.
    """
    options = {"add_special_tokens": False, "return_attention_mask": False, "return_token_type_ids": False, **options}
    for part in in_parts(texts):
        yield from zip(part, tokenizer(part, **options)["input_ids"], strict=True)


def in_parts(items: Iterable[T]) -> Iterator[list[T]]:
    """Splits items into parts of TEXTS_AT_ONCE, in order."""
    rest = iter(items)
    while part := list(itertools.islice(rest, TEXTS_AT_ONCE)):
        yield part


def trained_end(tokenizer: PreTrainedTokenizerBase) -> End:
    """Return the part of a turn's end that is trained on."""
    return End(end_texts(tokenizer)[0], turn_end(tokenizer).trained)


def scored_end(tokenizer: PreTrainedTokenizerBase) -> End:
    """Return a turn's end together with what the template writes after it."""
    end = turn_end(tokenizer)
    return End("".join(end_texts(tokenizer)), (*end.trained, *end.after))


NO_END = End("", ())


def ids_behind(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str], turns: Sequence[Turn], end: End, *, prompt_ids: Mapping[str, list[int]]
) -> list[Behind]:
    """Return the ids of each turn and its end that follow its prompt.

    Special tokens in a response are plain text, except tags of thoughts. Where the prompt's ids aren't the beginning of the whole
    conversation's, the turn has ids that decode to its text behind the prompt's.

    Args:
        prompts: the prompt of each turn.
        end: end that follows each turn that isn't `ended`.
        prompt_ids: ids of each prompt.
    """
    contexts = _contexts(tokenizer, prompt_ids)
    keys = [(contexts[prompt], turn) for prompt, turn in zip(prompts, turns, strict=True)]
    distinct = list(dict.fromkeys(keys))
    texts = [context.text + turn.before + turn.text + ("" if turn.ended else end.text) for context, turn in distinct]
    opened = {key: context.text + turn.before for key in distinct for context, turn in [key] if turn.before}
    ids_of = dict(encode_texts(tokenizer, list(dict.fromkeys([*texts, *opened.values()]))))
    found, traits = {}, _traits(tokenizer, len(tokenizer))
    for key, text in zip(distinct, texts, strict=True):
        context, turn = key
        begun = ids_of[opened[key]] if turn.before else list(context.ids)
        found[key] = _behind(tokenizer, traits, context, turn, NO_END if turn.ended else end, ids_of[text], begun)
    return [found[key] for key in keys]


def response_text(
    tokenizer: PreTrainedTokenizerBase, prompt_ids: Sequence[int], response_ids: Sequence[int], *, special: bool = False
) -> str:
    """Return the text of a response's ids as it stands after the prompt. Decoded alone, a response may lose a space at its beginning.

    Args:
        special: keep special tokens. Otherwise they are left out, and so is the text that the template writes before every answer, such as
            the name of a channel.
    """
    header = () if special else _header_ids(tokenizer, tokenizer.chat_template)
    if header and tuple(response_ids[: len(header)]) == header:
        response_ids = response_ids[len(header) :]
    traits, decode_options = _traits(tokenizer, len(tokenizer)), {"skip_special_tokens": not special}
    before = list(prompt_ids[-BACK:])
    if not before or before[-1] in traits.added:
        before = [] if traits.begins_anew else _plain(tokenizer, STARTS[2])
    for first in range(len(before) - 1, -1, -1) if traits.keeps_spaces else ():
        start = tokenizer.decode(before[first:], **decode_options)
        whole = tokenizer.decode([*before[first:], *response_ids], **decode_options)
        if not start.startswith(TORN) and whole.startswith(start):
            return whole.removeprefix(start)
    return tokenizer.decode(list(response_ids), **decode_options)


def keeps_borders(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the ids of prompt, answer and end, one after the other, are those of the whole conversation, for answers in plain
    words.
    """
    return _keeps_borders(tokenizer, tokenizer.chat_template)


@lru_cache(maxsize=8)
def _keeps_borders(tokenizer: PreTrainedTokenizerBase, template: str) -> bool:
    """Compute `keeps_borders`; `template` is only part of the cache's key."""
    prompt, end = render(tokenizer, [{"role": "user", "content": QUESTION}], waits=True), scored_end(tokenizer)
    ids = {prompt: next(encode_texts(tokenizer, [prompt]))[1]}
    turns = [Turn("", word + ANSWER) for word in ("", *WORDS)]
    whole, bare = (ids_behind(tokenizer, [prompt] * len(turns), turns, e, prompt_ids=ids) for e in (end, NO_END))
    return all(found.joined is None and found.ids == [*alone.ids, *end.ids] for found, alone in zip(whole, bare, strict=True))


@lru_cache(maxsize=8)
def _header_ids(tokenizer: PreTrainedTokenizerBase, template: str | None) -> tuple[int, ...]:
    """Return the ids of the text with special tokens that the template writes between every generation prompt and answer, without
    thoughts.
    """
    if template is None:
        return ()
    asked = [{"role": "user", "content": QUESTION}]
    prompt = render(tokenizer, asked, waits=True)
    begun = {written_turn(tokenizer, asked, {"role": "assistant", "content": text}, prompt).before for text in (ANSWER, QUESTION)}
    before = begun.pop()
    if begun or not before.strip() or OPEN in before:
        return ()
    whole, ids = (next(encode_texts(tokenizer, [text]))[1] for text in (prompt + before, prompt))
    return tuple(whole[len(ids) :]) if whole[: len(ids)] == ids else ()


@lru_cache(maxsize=8)
def _traits(tokenizer: PreTrainedTokenizerBase, size: int) -> _Traits:
    """Return how the tokenizer treats special tokens; `size` is only part of the cache's key, since tokens may be added."""
    tokens = tokenizer.added_tokens_decoder
    added = {number: token.content for number, token in tokens.items()}
    special = {number for number, token in tokens.items() if token.special and token.content not in (OPEN, CLOSE)}
    alone, anew = _plain(tokenizer, ANSWER), True
    if tokenizer.eos_token_id in added:
        anew = next(encode_texts(tokenizer, [added[tokenizer.eos_token_id] + ANSWER]))[1][1:] == alone
    spaced, joined = (_plain(tokenizer, text) for text in (f"{QUESTION} {ANSWER}", f"{QUESTION}{ANSWER}"))
    return _Traits(added, frozenset(special - {tokenizer.unk_token_id}), anew, spaced != joined)


def _contexts(tokenizer: PreTrainedTokenizerBase, prompt_ids: Mapping[str, list[int]]) -> dict[str, _Context]:
    """Return the context of each prompt: from its last added token on; the whole prompt if it has none."""
    added = _traits(tokenizer, len(tokenizer)).added
    firsts = {text: next((i for i in range(len(ids) - 1, -1, -1) if ids[i] in added), -1) for text, ids in prompt_ids.items()}
    starts = {text: text.rfind(added[prompt_ids[text][first]]) for text, first in firsts.items() if first >= 0}
    ends = {text: text[start:] for text, start in starts.items() if start >= 0}
    ids_of = dict(encode_texts(tokenizer, list(dict.fromkeys(ends.values()))))

    def context(text: str, ids: list[int]) -> _Context:
        end = ends.get(text)
        own = ids[firsts[text] :]
        return _Context(text, tuple(ids)) if end is None or ids_of[end] != own else _Context(end, tuple(own))

    return {text: context(text, ids) for text, ids in prompt_ids.items()}


def _behind(
    tokenizer: PreTrainedTokenizerBase, traits: _Traits, context: _Context, turn: Turn, end: End, ids: list[int], begun: list[int]
) -> Behind:
    """Return the ids of a turn after its prompt, from the ids of context, turn and end as one text.

    Args:
        begun: the ids of the context and `turn.before` as one text.
    """
    start = len(context.ids)
    fits = tuple(ids[:start]) == context.ids
    written = ids if end.text else [*ids, *end.ids]
    expected = [*begun, *end.ids]
    literal = tokenizer.unk_token is not None and tokenizer.unk_token in turn.text
    plain = not literal and [i for i in written if i in traits.special] == [i for i in expected if i in traits.special]
    if plain and fits:
        return Behind(written[start:])
    if plain:  # the prompt's end and the turn's beginning are joined
        opened = begun[start:] if tuple(begun[:start]) == context.ids else _kept(tokenizer, context.ids, turn.before, split=False)
        return Behind([*opened, *_kept(tokenizer, [*context.ids, *opened], turn.text), *end.ids], written, start)
    text = turn.before + turn.text
    last = next((i for i in range(len(begun) - 1, start - 1, -1) if begun[i] in traits.added), start - 1)
    base_ids = [*context.ids, *begun[start : last + 1]]
    head = 0 if last < start else turn.before.rfind(traits.added[begun[last]]) + len(traits.added[begun[last]])
    behind = _plain_behind(tokenizer, context.text + text[:head], base_ids, text[head:])
    return Behind([*base_ids[start:], *behind, *end.ids])


def _plain_behind(tokenizer: PreTrainedTokenizerBase, base: str, base_ids: list[int], text: str) -> list[int]:
    """Return the ids of a text after `base`, with special tokens as plain text. Tags of thoughts stay tokens where the tokenizer has
    them.
    """
    traits, pieces = _traits(tokenizer, len(tokenizer)), [text]
    if CLOSE in text and CLOSE in traits.added.values():
        pieces = [piece for piece in re.split(f"({OPEN}|{CLOSE})", text) if piece]
    found: list[int] = []
    for piece in pieces:
        tag = len(pieces) > 1 and piece in (OPEN, CLOSE)
        ids = _plain(tokenizer, piece, split=False) if tag else _piece_behind(tokenizer, base, base_ids, piece)
        found += ids
        base, base_ids = piece, ids
    return found


def _piece_behind(tokenizer: PreTrainedTokenizerBase, base: str, base_ids: list[int], text: str) -> list[int]:
    traits = _traits(tokenizer, len(tokenizer))
    last = next((added for i in reversed(base_ids) if (added := traits.added.get(i)) is not None), None)
    tail = base if last is None else base.rpartition(last)[2]
    for start in [tail] if tail else STARTS[:1] if traits.begins_anew else STARTS[1:]:
        whole, begun = _plain(tokenizer, start + text), _plain(tokenizer, start)
        if whole[: len(begun)] == begun:
            return whole[len(begun) :]
    return _kept(tokenizer, base_ids, text)


def _kept(tokenizer: PreTrainedTokenizerBase, before: Sequence[int], text: str, *, split: bool = True) -> list[int]:
    """Return ids that decode to the text after the ids `before`; unless `split` is False, special tokens in it are plain text."""
    for start in STARTS:
        whole, begun = _plain(tokenizer, start + text, split=split), _plain(tokenizer, start, split=split)
        ids = whole[len(begun) :]
        if whole[: len(begun)] == begun and response_text(tokenizer, before, ids, special=True) == text:
            return ids
    return _plain(tokenizer, text, split=split)


def _plain(tokenizer: PreTrainedTokenizerBase, text: str, *, split: bool = True) -> list[int]:
    """Return the ids of a text by itself. With `split`, special tokens in it are plain text."""
    return next(encode_texts(tokenizer, [text], split_special_tokens=split))[1]
