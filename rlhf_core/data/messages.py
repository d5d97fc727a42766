"""Messages and texts of other people's data sets, checked and brought into the canonical schema."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rlhf_core.config import shown
from rlhf_core.data.schema import Message, joined_parts

ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "bot": "assistant",
    "tool": "tool",
}
FURTHER = ("tool_calls", "tool_call_id", "name")  # what a message may have beside role and content
MAX_CHARACTERS = 2**24  # of a text or a record, four million tokens or so: whatever is longer is no text, and would fill the memory


class Dropped(Exception):
    """This record is left out; the message is the reason under which it is counted."""


def read_messages(value: Any, column: str) -> list[Message]:
    """A list of {role, content}, or {from, value} as ShareGPT has it.

    Raises:
        Dropped: the list is empty.
        ValueError: it is no such list.
    """
    if not isinstance(value, list) or not all(isinstance(m, Mapping) for m in value):
        raise ValueError(f"column {column!r}: expected a list of messages, got {type(value).__name__}; use another format or column")
    if not value:
        raise Dropped("a conversation without messages")
    return [_message(m, column) for m in value]


def _message(message: Mapping[str, Any], column: str) -> Message:
    role, content = message.get("role", message.get("from")), message.get("content", message.get("value"))
    further = {name: message[name] for name in FURTHER if message.get(name)}
    if content is None and "tool_calls" in further:
        content = ""
    if not isinstance(role, str) or role not in ROLES or not isinstance(content, str | list):
        given = shown(repr(role), 60) if isinstance(role, str) else f"of type {type(role).__name__}"
        got = f"a role {given} and content of type {type(content).__name__}"
        raise ValueError(f"column {column!r}: expected messages with role ({', '.join(ROLES)}) and content, got {got}; convert them first")
    if isinstance(content, list):
        parts = _parts(content, column)
        content = joined_parts(parts)
        further |= {"content": parts} if len(parts) > 1 else {}
    if "tool_calls" in further:
        further["tool_calls"] = _tool_calls(further["tool_calls"], column)
    plain: Message = {"role": ROLES[role], "content": read_text(content, column)}
    return {**plain, "extra": _json(further, column)} if further else plain


def _parts(content: list, column: str) -> list[dict[str, str]]:
    """The text parts of a message's content.

    Raises:
        Dropped: a part isn't text.
    """
    if not all(isinstance(part, Mapping) for part in content):
        raise ValueError(f"column {column!r}: expected content as text or a list of parts, got a list of something else; convert it first")
    if any(part.get("type") != "text" for part in content):
        raise Dropped("a message has parts that are not text")
    return [{"type": "text", "text": read_text(part.get("text"), column)} for part in content]


def _tool_calls(calls: Any, column: str) -> list[dict[str, Any]]:
    """With arguments as objects, as chat templates take them; OpenAI's are JSON text."""
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise ValueError(f"column {column!r}: expected tool_calls as a list of objects, got {type(calls).__name__}; convert them first")
    return [{key: _arguments(value) if key in ("arguments", "function") else value for key, value in call.items()} for call in calls]


def _arguments(value: Any) -> Any:
    if isinstance(value, Mapping):  # a function
        return {key: _arguments(inner) if key == "arguments" and isinstance(inner, str) else inner for key, inner in value.items()}
    try:
        parsed = json.loads(value)
    except (TypeError, ValueError, RecursionError):
        return value
    return parsed if isinstance(parsed, dict) else value


def _json(value: dict[str, Any], column: str) -> str:
    try:
        return read_text(json.dumps(value, ensure_ascii=False, allow_nan=False), column)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"column {column!r}: expected tool_calls of JSON values, got: {shown(str(error))}; convert them first") from error


def read_text(value: Any, column: str) -> str:
    """Text; null counts as empty, which validate_data reports."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ValueError(f"column {column!r}: expected text, got {type(value).__name__}; map another column")
    if len(value) > MAX_CHARACTERS:
        raise ValueError(f"column {column!r}: expected at most {MAX_CHARACTERS} characters, got {len(value)}; split or remove it")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"column {column!r}: expected text, got half a character ({error.reason}); write it again as UTF-8") from error
    return value.strip()
