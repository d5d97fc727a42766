"""Token ids between the sampled turns of a conversation: the end of a turn, what is put in, and the next generation prompt.

Sampled ids stay as they are. The template renders the conversation with a marker in place of each sampled turn, and only the text behind
the last marker is tokenized. So no sampled token is ever decoded and encoded again, whatever the template does with earlier turns.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from rlhf_core.config import shown
from rlhf_core.data.schema import Message
from rlhf_core.models.response_ids import encode_texts
from rlhf_core.models.template import ANSWER, QUESTION, Unrenderable, end_texts, render, turn_end

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MARKER = "qzreply"  # no white space or signs, which templates change

log = logging.getLogger("rlhf")


def prompt_ids(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[int]:
    """Return the ids of a conversation with its tools' schemas and the generation prompt."""
    return _encode(tokenizer, render(tokenizer, messages, waits=True, tools=tools))


def ids_behind_reply(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], replies: Collection[int], last: int, *, tools: Sequence[dict[str, Any]]
) -> list[int]:
    """Return the ids that follow the last reply's, up to the next generation prompt.

    Args:
        messages: the whole conversation.    replies: positions of the messages that were sampled.
        last: the last id that was sampled. If it is the one with which the template ends a turn, it isn't repeated.
    Raises:
        Unrenderable: the template doesn't take the conversation, or changes the marker.
    """
    marker = _marker(messages)
    marked = [{"role": m["role"], "content": marker} if i in replies else m for i, m in enumerate(messages)]
    _, found, behind = render(tokenizer, marked, waits=True, tools=tools).rpartition(marker)
    if not found:
        raise Unrenderable("one whose replies it leaves out or changes")
    end, trained = end_texts(tokenizer)[0], list(turn_end(tokenizer).trained)
    if not end or not behind.startswith(end):
        return _inside(tokenizer, behind)
    ids = _encode(tokenizer, behind)
    if ids[: len(trained)] != trained:
        ids = [*trained, *_encode(tokenizer, behind.removeprefix(end))]
    return ids[len(trained) :] if last == trained[-1] else ids


def check_turns(tokenizer: PreTrainedTokenizerBase, tools: Sequence[dict[str, Any]]) -> None:
    """Check that the chat template continues a conversation after a reply, also with a tool's message if there are tools.

    Raises:
        ValueError: it doesn't.
    """
    _check(tokenizer, tokenizer.chat_template, bool(tools))
    names = [tool["function"]["name"] for tool in tools]
    asked: list[Message] = [{"role": "user", "content": QUESTION}]
    if left := [name for name in names if name not in render(tokenizer, asked, waits=True, tools=tools)]:
        _tell_left_out(tuple(left))


@lru_cache(maxsize=8)
def _check(tokenizer: PreTrainedTokenizerBase, template: str, has_tools: bool) -> None:
    """`template` is only the cache's key."""
    for role in ("user", *["tool"] * has_tools):
        messages: list[Message] = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": MARKER}]
        try:
            text = render(tokenizer, [*messages, {"role": role, "content": ANSWER}], waits=True)
        except Unrenderable as error:
            got = error.words
        else:
            behind = text.rpartition(MARKER)[2] if MARKER in text else ""
            follows = ANSWER in behind and behind.startswith(end_texts(tokenizer)[0])
            got = None if follows else f"it written as {shown(repr(text))}"
        if got is not None:
            raise ValueError(
                f"rl.environment: expected a chat template that writes a message of role {role} behind a reply, which ends as a last one "
                f"does, got {got}; set model.chat_template to one that does (docs/agents.md)"
            )


@lru_cache(maxsize=8)  # once in a run
def _tell_left_out(names: tuple[str, ...]) -> None:
    log.warning(
        "rl.environment: the chat template leaves out the descriptions of the tools %s: the model knows of them only what it was taught",
        ", ".join(names),
    )


def _marker(messages: Sequence[Message]) -> str:
    marker = MARKER
    while any(marker in m["content"] for m in messages):
        marker += "q"
    return marker


def _inside(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the ids of a text as they are inside of a longer one."""
    before, whole = _encode(tokenizer, ANSWER), _encode(tokenizer, ANSWER + text)
    return whole[len(before) :] if whole[: len(before)] == before else _encode(tokenizer, text)


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(next(encode_texts(tokenizer, [text]))[1])
