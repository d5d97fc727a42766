"""Texts that a chat template has already written, and what stands for something else than text: end tokens, pictures, nothing visible."""

from __future__ import annotations

import re
from collections.abc import Iterable
from numbers import Number
from typing import Any, NamedTuple

from rlhf_core.data.schema import Message

# Tokens that end a turn or a text in well-known models.
END_TOKENS = (
    *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|endoftext|>", "<|end|>", "<|return|>", "<|eos|>", "<|end_of_turn|>"),
    *(
        "<end_of_turn>",
        "<turn|>",
        "</s>",
        "<eos>",
        "[EOS]",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
        "<\uff5cEnd\u2581of\u2581sentence\uff5c>",
    ),
)
# Tokens that begin a turn or name its speaker.
BEGIN_TOKENS = (
    *("<|im_start|>", "<|start_header_id|>", "<|end_header_id|>", "<|begin_of_text|>", "<start_of_turn>", "<|turn>"),
    *("<|system|>", "<|user|>", "<|assistant|>", "<|start|>", "<|message|>", "<|channel|>", "[INST]", "[/INST]", "<<SYS>>", "<</SYS>>"),
    *(
        "<\uff5cUser\uff5c>",
        "<\uff5cAssistant\uff5c>",
        "<\uff5cbegin\u2581of\u2581sentence\uff5c>",
        "<|START_OF_TURN_TOKEN|>",
        "<|END_OF_TURN_TOKEN|>",
    ),
)
PLACEHOLDERS = ("<image>", "<video>", "<audio>", "<|image|>", "<|image_pad|>", "<|vision_start|>", "<start_of_image>", "<image_soft_token>")
PICTURES = ("image", "images", "picture", "pictures", "video", "videos", "audio", "audios")
PICTURE_PARTS = ("image", "image_url", "input_image", "video", "video_url", "audio", "audio_url", "input_audio")
_NOTHING = ("", "none", "null", "false", "nan", "n/a")  # texts that tables have where there is nothing
# White space beyond ASCII's, and characters without width or ink: a text of these looks empty.
_INVISIBLE = (
    "\u0085\u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
    "\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f\u2800\u3164\ufe00-\ufe0f\ufeff\uffa0"
)
VISIBLE = rf"[^\s{_INVISIBLE}]"
_VISIBLE = re.compile(VISIBLE)
_TOKENS = re.compile("|".join(map(re.escape, sorted([*BEGIN_TOKENS, *END_TOKENS], key=len, reverse=True))))
_BEGIN = re.compile(r"(?:<s>|<bos>|<\|begin_of_text\|>|<\|endoftext\|>)?\s*")
_EMPTY_THOUGHTS = re.compile(r"\A\s*<think>\s*</think>")  # with which a generation prompt turns thoughts off
_ROLES = {"system": "system", "user": "user", "assistant": "assistant", "model": "assistant", "tool": "tool", "ipython": "tool"}


class _Family(NamedTuple):
    """How a family of templates writes turns. opening: a pattern with the group role; ends: of the turns."""

    opening: str
    ends: tuple[str, ...]


_FAMILIES = (
    _Family(r"<\|im_start\|>(?P<role>\w+)\n", ("<|im_end|>",)),
    _Family(r"<\|start_header_id\|>(?P<role>\w+)<\|end_header_id\|>\n\n", ("<|eot_id|>",)),
    _Family(r"<start_of_turn>(?P<role>\w+)\n", ("<end_of_turn>",)),
    _Family(r"<\|(?P<role>system|user|assistant)\|>\n?", ("</s>", "<|end|>", "<|endoftext|>")),
)


def is_blank(text: str) -> bool:
    """Return whether nothing in the text is visible: it is empty, or has only white space and characters without width."""
    return _VISIBLE.search(text) is None


def unwrapped(text: str) -> list[Message] | None:
    """Return the conversation that a well-known chat template has written as this text; None if it isn't exactly that.

    A generation prompt at its end, with empty thoughts or without, is no message, nor is an empty system prompt.
    Known: ChatML, Llama 2 and Mistral, Llama 3, Gemma, Zephyr and Phi 3.
    """
    if "<|" not in text and "[INST]" not in text and "<start_of_turn>" not in text:
        return None
    readings = (_instructions(text), *(_turns(text, family) for family in _FAMILIES))
    messages = next((messages for messages in readings if messages), [])
    if messages and messages[0]["role"] == "system" and is_blank(messages[0]["content"]):  # templates write it without being asked to
        messages = messages[1:]
    return messages or None


def end_token(text: str, own: Iterable[str] = ()) -> str | None:
    """Return the first of the tokens at the text's end that are in END_TOKENS or `own`; None if there is none."""
    return _cut(text, (*END_TOKENS, *own))[1]


def without_end_tokens(text: str, own: Iterable[str] = ()) -> str:
    """Return the text without the tokens of END_TOKENS and `own` at its end, and without the white space around them."""
    return _cut(text, (*END_TOKENS, *own))[0]


def _cut(text: str, tokens: tuple[str, ...]) -> tuple[str, str | None]:
    """Return the text without these tokens at its end, and the first of them there.

    `</s>` stays where an `<s>` inside the text is open: HTML for struck text.
    """
    if text.lstrip().find("<s>") > 0:
        tokens = tuple(token for token in tokens if token != "</s>")
    found, end = None, len(text.rstrip())
    while text.endswith(tokens, 0, end):
        found = max((token for token in tokens if text.endswith(token, 0, end)), key=len)
        end -= len(found)
        while end and text[end - 1].isspace():
            end -= 1
    return (text if found is None else text[:end]), found


def control_token(texts: Iterable[str], own: Iterable[str] = ()) -> str | None:
    """Return the first token in the texts that a chat template writes around turns: a well-known one, or one of `own`."""
    own = tuple(own)
    for text in texts:
        if ("<" in text or "[" in text) and (found := _TOKENS.search(text)):
            return found[0]
        if found := next((token for token in own if token in text), None):
            return found
    return None


def placeholder(text: str) -> str | None:
    """Return the placeholder of a picture, video or sound at the beginning or end of a text or of one of its lines.

    A token with its closing tag in the text, such as `</video>`, is an element of HTML, SVG or RSS.
    """
    if "<" not in text or not any(token in text for token in PLACEHOLDERS):
        return None
    lines = [line.strip() for line in text.splitlines()]
    tokens = [token for token in PLACEHOLDERS if token in text and f"</{token[1:]}" not in text]
    return next((token for line in lines for token in tokens if line.startswith(token) or line.endswith(token)), None)


def is_filled(value: Any, *, inside: bool = False) -> bool:
    """Return whether the value of a column for pictures or sound has some: bytes, a text other than `none` and the like, or a list or
    object of such values or of numbers. A number or truth value by itself says whether there are pictures, or how many.
    """
    if isinstance(value, dict | list | tuple):
        return any(is_filled(item, inside=True) for item in (value.values() if isinstance(value, dict) else value))
    if isinstance(value, Number):
        return inside and not isinstance(value, bool) and value == value  # NaN, which stands for a missing value, differs from itself
    if isinstance(value, str):
        return value.strip().lower() not in _NOTHING
    return bool(value)


def _turns(text: str, family: _Family) -> list[Message] | None:
    opening, ends = re.compile(family.opening), "|".join(map(re.escape, family.ends))
    own = re.compile(rf"{family.opening}|{ends}")
    at = _BEGIN.match(text).end()
    messages: list[Message] = []
    while at < len(text):
        opened = opening.match(text, at)
        role = _ROLES.get(opened["role"].lower()) if opened else None
        if role is None:
            return None
        following = own.search(text, opened.end())
        content = text[opened.end() : following.start() if following else len(text)]
        if following is None or opening.match(text, following.start()):  # a turn without an end is a generation prompt, or the last answer
            if following is not None or role != "assistant":
                return None
            return messages if is_blank(_EMPTY_THOUGHTS.sub("", content)) else [*messages, {"role": role, "content": content}]
        messages.append({"role": role, "content": content})
        at = re.compile(r"\s*").match(text, following.end()).end()
    return messages


def _instructions(text: str) -> list[Message] | None:
    """Return the turns between [INST] and [/INST], whose template trims them; None if the text isn't exactly such turns."""
    before, *turns = text.split("[INST]")
    if before.strip() not in ("", "<s>"):
        return None
    messages: list[Message] = []
    for number, turn in enumerate(turns, start=1):
        asked, closed, answer = turn.partition("[/INST]")
        answer = answer.strip()
        if number < len(turns):
            answer = answer.removesuffix("<s>").rstrip()
        answer = answer.removesuffix("</s>").rstrip()
        if not closed or "</s>" in answer or "[/INST]" in answer or (not answer and number < len(turns)):
            return None
        if not messages and asked.lstrip().startswith("<<SYS>>"):
            system, _, asked = asked.lstrip().removeprefix("<<SYS>>").partition("<</SYS>>")
            messages.append({"role": "system", "content": system.strip()})
        messages += [{"role": "user", "content": asked.strip()}, *([{"role": "assistant", "content": answer}] if answer else [])]
    return messages
