"""Values of a user's records, checked: texts, numbers, truth values and messages.

What is wrong with a single record raises `Dropped`; a value that doesn't fit the source's format raises `Misfit`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from datetime import date, time
from decimal import Decimal
from typing import Any, NamedTuple

from rlhf_core.config import shown
from rlhf_core.data.control import PICTURE_PARTS, PICTURES, is_filled
from rlhf_core.data.pictures import PICTURE, Picture
from rlhf_core.data.schema import Message, joined_parts
from rlhf_core.preparation.drops import Dropped, Misfit

MAX_NAME = 500  # characters of a file's name, in a row's origin
MAX_CHARACTERS = 2**24  # of a text or a record, some four million tokens; anything longer is no text and would fill the memory
ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "tool_response": "tool",
    "function_call": "assistant",
    "tool_call": "assistant",
}
CALLS = ("function_call", "tool_call")  # ShareGPT's roles whose content is one or several tool calls as JSON
ROLE_ORDER = r"^(?:system,)?user(?:,assistant,(?:user|tool(?:,tool)*(?:,user)?))*$"  # of the messages before a response
FURTHER = ("tool_calls", "tool_call_id", "name", "reasoning_content")  # keys that a message may have in addition to role and content
CONTENT = (  # content that rows have no place for
    *("thinking", "thinking_content", "thought", "thoughts", "reasoning", "reasoning_text", "reasoning_details", "refusal"),
    *("text", "parts", "image", "images", "audio", "audios", "input_audio", "video", "videos", "file", "files", "attachments", "documents"),
)
# Words for true and false, in lower case. -1 is not among them: next to -1, 0 is neutral (`read_boolean`).
YES_AND_NO = (
    *(("true", "false"), ("1", "0"), ("1.0", "0.0"), ("yes", "no"), ("good", "bad"), ("up", "down"), ("y", "n"), ("t", "f")),
    *(("thumbs up", "thumbs down"), ("thumbs_up", "thumbs_down"), ("\N{THUMBS UP SIGN}", "\N{THUMBS DOWN SIGN}")),
    *(("like", "dislike"), ("liked", "disliked"), ("accept", "reject"), ("accepted", "rejected"), ("chosen", "rejected")),
    *(("positive", "negative"), ("desirable", "undesirable"), ("helpful", "unhelpful"), ("right", "wrong"), ("correct", "incorrect")),
    *(("pass", "fail"), ("passed", "failed"), ("ok", "not ok")),
)
BOOLEANS = {word: meaning for words in YES_AND_NO for word, meaning in zip(words, (True, False), strict=True)}
SIGNS = {"1": True, "+1": True, "1.0": True, "-1": False, "-1.0": False}  # in a column with -1
_KNOWN = {"role", "from", "content", "value", "function_call", *FURTHER, *CONTENT}
_IN_ORDER = re.compile(ROLE_ORDER)


class RawRecord(NamedTuple):
    """A record of a user's data. where: its file and line, safe to print; note: what was assumed in reading it, for errors."""

    where: str
    values: dict[str, Any]
    note: str = ""


def find_value(values: Mapping[str, Any], path: str | list[str]) -> Any:
    """Return the value of one column or several, as `Record.at` finds it; None where it is missing."""
    if isinstance(path, list):
        return [find_value(values, one) for one in path]
    if path in values or "." not in path:
        return values.get(path)
    value: Any = values
    for part in path.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def read_text(value: Any, column: str) -> str:
    """Return a text with line feeds as its only line breaks, and with the white space at its edges.

    Raises:
        Dropped: the value is null.
        Misfit: the value is no text.
    """
    if value is None:
        raise Dropped(f"{column} is null")
    if not isinstance(value, str):
        if isinstance(value, float) and not math.isfinite(value):
            raise not_finite(value, column)
        raise Misfit(f"column {column!r}: expected text, got {kind(value)}; map another column, or convert it", f"{column} is no text")
    if len(value) > MAX_CHARACTERS:
        message = f"column {column!r}: expected at most {MAX_CHARACTERS} characters, got {len(value)}; split or remove it"
        raise Misfit(message, f"{column} is too long for any text")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        message = f"column {column!r}: expected text, got half a character ({error.reason}); write it again as UTF-8"
        raise Misfit(message, f"{column} has half a character") from error
    return value.replace("\r\n", "\n").replace("\r", "\n") if "\r" in value else value


def read_scalar(value: Any, column: str) -> str:
    """Return a text, a number or a truth value as text, stripped: 18.0 as 18, and a truth value as true or false."""
    if isinstance(value, float) and not math.isfinite(value):
        raise not_finite(value, column)
    if value is not None and not isinstance(value, str | int | float | Decimal | date | time):
        message = f"column {column!r}: expected text or a number, got {kind(value)}; map another column"
        raise Misfit(message, f"{column} is neither text nor a number")
    try:
        text = plain_number(value) if isinstance(value, bool | float | Decimal) else str(value)
    except ValueError as error:  # Python refuses to write integers of thousands of digits
        message = f"column {column!r}: expected a number, got one of thousands of digits; correct it"
        raise Misfit(message, f"{column} is a number of thousands of digits") from error
    return read_text(text, column).strip()


def read_boolean(value: Any, column: str, *, signed: bool = False) -> bool:
    """Read True or False, also from 1 or 0, or from one of BOOLEANS: CSV files have text only.

    Args:
        signed: the column has 1 and -1; 0 is neither.
    Raises:
        Dropped: the value is null, or neutral.
        Misfit: the value is something else.
    """
    if value is None:
        raise Dropped(f"{column} is null")
    small = isinstance(value, int | float) and value in (-1, 0, 1)
    key = value.strip().lower() if isinstance(value, str) else plain_number(value) if small else None
    if signed and key in ("0", "0.0"):
        raise Dropped(f"{column} is 0, between 1 and -1")
    meanings = SIGNS if signed else BOOLEANS
    if key not in meanings:
        got = str(value) if isinstance(value, float) else kind(value)
        wanted = "1 or -1" if signed else "true or false"
        raise Misfit(f"column {column!r}: expected {wanted}, got {got}; convert it first", f"{column} is neither true nor false")
    return meanings[key]


def plain_number(value: float | Decimal) -> str:
    """Return a number or a truth value as JSON has it. A whole number loses its fraction: tables turn 18 into 18.0 where another row has no
    value.
    """
    if isinstance(value, bool):
        return str(value).lower()
    whole = not isinstance(value, int) and math.isfinite(value) and abs(value) < 2**53 and value == int(value)
    return str(int(value)) if whole else str(value)


def read_number(value: Any, column: str) -> float:
    """Read a finite number, also from text: CSV files have text only.

    Raises:
        Dropped: the value is null.
        Misfit: the value is no such number.
    """
    if value is None:
        raise Dropped(f"{column} is null")
    try:
        number = float(read_scalar(value, column))
    except ValueError as error:
        if isinstance(error, Misfit):
            raise
        raise Misfit(f"column {column!r}: expected a number, got {kind(value)}; map another column", f"{column} is no number") from error
    if not math.isfinite(number):
        raise Misfit(f"column {column!r}: expected a finite number, got {kind(value)}; map another column", f"{column} is no number")
    return number


def not_finite(value: float, column: str) -> Misfit:
    """Return the error for NaN, which is what pandas makes of a missing value, or for an infinite number."""
    name = "NaN (no value)" if math.isnan(value) else "an infinite number"
    reason = f"{column} is {'NaN' if math.isnan(value) else 'infinite'}"
    return Misfit(f"column {column!r}: expected text or a finite number, got {name}; correct or remove the record", reason)


def pictures(where: str, reason: str) -> Misfit:
    """Return the error for pictures, video and sound."""
    return Misfit(
        f"{where}: expected text alone, got pictures, video or sound; for pictures set model.vision (docs/vision.md), otherwise take such "
        "records out, or the column if the texts do without it",
        reason,
    )


def kind(value: Any) -> str:
    """Return a short description of a value, for a message."""
    if value is None:
        return "null"
    if isinstance(value, str):
        return shown(repr(value[:60]), 60)
    if isinstance(value, bool) or (isinstance(value, int) and value.bit_length() < 64):
        return f"{type(value).__name__} {value}"
    return type(value).__name__


def read_messages(value: Any, column: str) -> list[Message]:
    """Read a list of {role, content}, or of ShareGPT's {from, value}; a single message is a list of one.

    Raises:
        Dropped: the list is null or empty, or a message has content that the schema has no place for.
        Misfit: the value is no such list.
    """
    if value is None:
        raise Dropped(f"{column} is null")
    messages = [value] if isinstance(value, Mapping) else value
    if not isinstance(messages, list) or not all(isinstance(m, Mapping) for m in messages):
        got = f"{kind(value)}; use another format or column"
        raise Misfit(f"column {column!r}: expected a list of messages, got {got}", f"{column} is no list of messages")
    if not messages:
        raise Dropped("a conversation without messages")
    return [_message(m, column) for m in messages]


def read_tools(value: Any, column: str) -> list[dict[str, Any]]:
    """Read JSON schemas of tools: a list of objects, or of texts in JSON, or one such text; empty and null are no tools.

    Objects lose keys without a value, which tables give to each object of a column if one has them.

    Raises:
        Misfit: the value is something else.
    """
    if _is_empty(value):
        return []
    try:
        tools = json.loads(value) if isinstance(value, str) else value
        tools = [json.loads(tool) if isinstance(tool, str) else _without_nulls(tool) for tool in tools]
        read_text(json.dumps(tools, ensure_ascii=False, allow_nan=False), column)
    except Misfit:
        raise
    except (TypeError, ValueError, RecursionError):
        tools = [None]
    if not all(isinstance(_tool_name(tool), str) for tool in tools):
        message = f"column {column!r}: expected a list of tools as JSON schemas, each with a name, got {kind(value)}; convert it first"
        raise Misfit(message, "tools are no list of JSON schemas")
    return tools


def _tool_name(tool: Any) -> Any:
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    return function.get("name") if isinstance(function, dict) else None


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def in_order(messages: list[Message]) -> bool:
    """Return whether an assistant's message can follow: system first if at all, user and assistant in turn, tools after a call."""
    return _IN_ORDER.match(",".join(message["role"] for message in messages)) is not None


def unread_keys(value: Any) -> set[str]:
    """Return keys, with a value, of a list of messages or of a single one that `read_messages` doesn't read."""
    messages = [value] if isinstance(value, Mapping) else value if isinstance(value, list) else []
    maps = (message for message in messages if isinstance(message, Mapping))
    return {key for message in maps for key in message if key not in _KNOWN and not _is_empty(message[key])}


def _message(message: Mapping[str, Any], column: str) -> Message:
    role, content = _either(message, "role", "from"), _either(message, "content", "value")
    further = {name: message[name] for name in FURTHER if message.get(name)}
    if message.get("function_call"):  # OpenAI's key before tool_calls
        if "tool_calls" in further:
            raise Dropped("a message has both function_call and tool_calls")
        further["tool_calls"] = [{"type": "function", "function": message["function_call"]}]
    if content is None and "tool_calls" in further:
        content = ""
    if not isinstance(role, str) or role.lower() not in ROLES:
        got = shown(repr(role), 60) if isinstance(role, str) else kind(role)
        raise Misfit(
            f"column {column!r}: expected messages with role (one of {', '.join(ROLES)}) and content, got a role {got}; convert them first",
            "a message has an unknown role",
        )
    if beside := next((key for key in PICTURES if is_filled(message.get(key))), None):
        raise pictures(f"{beside} in a message of column {column!r}", f"a message has {beside} beside its text")
    if beside := next((key for key in CONTENT if key not in PICTURES and not _is_empty(message.get(key))), None):
        raise Dropped(f"a message has {beside} beside its text")
    if content is None:
        raise Dropped("a message has no content")
    other = message.get("value")
    if isinstance(other, str) and not _is_empty(other) and not (isinstance(content, str) and content.strip() == other.strip()):
        raise Dropped("a message has a content and another value")
    if role.lower() in CALLS and "tool_calls" not in further:
        further["tool_calls"], content = _calls_in_content(content, column), ""
    if isinstance(content, list):
        parts = _parts(content, column)
        content = joined_parts(parts)
        further |= {"content": parts} if len(parts) > 1 or any(part["type"] == PICTURE for part in parts) else {}
    if "tool_calls" in further:
        further["tool_calls"] = _tool_calls(further["tool_calls"], column)
    plain: Message = {"role": ROLES[role.lower()], "content": read_text(content, column)}
    if not further:
        return plain
    try:
        return {**plain, "extra": read_text(json.dumps(further, ensure_ascii=False, allow_nan=False), column)}
    except Misfit:
        raise
    except (TypeError, ValueError, RecursionError) as error:
        message = f"column {column!r}: expected tool_calls of JSON values, got: {shown(str(error))}; convert them first"
        raise Misfit(message, "tool_calls are no JSON") from error


def _either(message: Mapping[str, Any], key: str, other: str) -> Any:
    """Return the value of the key that is filled. Tables have both keys in each message if some messages have one and some the other."""
    value, instead = message.get(key), message.get(other)
    return value if instead is None or not _is_empty(value) else instead


def _is_empty(value: Any) -> bool:
    """Return whether the value has no content; 0 and false have."""
    return value is None or (not value.strip() if isinstance(value, str) else isinstance(value, Mapping | list) and not value)


def _parts(content: list, column: str) -> list[dict[str, Any]]:
    """Return the parts of a message's content: texts, and pictures that `preparation.pictures` has read.

    Raises:
        Dropped: a part is something else.
    """
    if not all(isinstance(part, Mapping) for part in content):
        message = f"column {column!r}: expected content as text or a list of parts, got a list of something else; convert it first"
        raise Misfit(message, "a message's content is neither text nor parts")
    seen = [isinstance(part.get("picture"), Picture) for part in content]
    if any(part.get("type") in PICTURE_PARTS and not known for part, known in zip(content, seen, strict=True)):
        raise pictures(f"a message of column {column!r}", "a message has parts with pictures, video or sound")
    if any(part.get("type") != "text" and not known for part, known in zip(content, seen, strict=True)):
        raise Dropped("a message has parts that are not text")
    return [
        part["picture"].part if known else {"type": "text", "text": read_text(part.get("text"), column)}
        for part, known in zip(content, seen, strict=True)
    ]


def _calls_in_content(content: Any, column: str) -> list[dict[str, Any]]:
    """Return tool calls that are a message's content: JSON of {name, arguments}, or of a list of them."""
    try:
        parsed = json.loads(content)
    except (TypeError, ValueError, RecursionError):
        parsed = None
    calls = [parsed] if isinstance(parsed, dict) else parsed
    if not isinstance(calls, list) or not calls or not all(isinstance(c, dict) and isinstance(c.get("name"), str) for c in calls):
        message = f"column {column!r}: expected a call of a tool as JSON with a name and arguments, got {kind(content)}; convert it first"
        raise Misfit(message, "a call of a tool is no JSON with a name")
    return [{"type": "function", "function": call} for call in calls]


def _tool_calls(calls: Any, column: str) -> list[dict[str, Any]]:
    """Return tool calls with their arguments as objects, as chat templates take them; OpenAI's arguments are JSON text."""
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        message = f"column {column!r}: expected tool_calls as a list of objects, got {kind(calls)}; convert them first"
        raise Misfit(message, "tool_calls are no list of objects")
    return [{key: _parsed_arguments(value) if key in ("arguments", "function") else value for key, value in c.items()} for c in calls]


def _parsed_arguments(value: Any) -> Any:
    if isinstance(value, Mapping):  # a function
        return {key: _parsed_arguments(inner) if key == "arguments" and isinstance(inner, str) else inner for key, inner in value.items()}
    try:
        parsed = json.loads(value)
    except (TypeError, ValueError, RecursionError):
        return value
    return parsed if isinstance(parsed, dict) else value
