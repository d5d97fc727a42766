"""Prompts that write several turns as one text, as messages."""

from __future__ import annotations

import json
import re
from typing import Any

from rlhf_core.config import shown
from rlhf_core.data.schema import Message
from rlhf_core.preparation.drops import Dropped, Misfit
from rlhf_core.preparation.values import ROLES, in_order, read_text

_HH_TURN = re.compile(r"(?:\A|\n\n)(Human|Assistant):")
_NAMES = r"(?:#{1,3} ?)?(Human|HUMAN|User|USER|Assistant|ASSISTANT|AI|System|SYSTEM) ?:"
_APART, _CLOSE = (re.compile(rf"(?:\A|{breaks}){_NAMES}") for breaks in (r"\n\n", r"\n[ \t]*"))
_BEGINNING = re.compile(rf"\s*{_NAMES}")
_SPEAKERS = {"ai": "assistant"}
_STEERLM = re.compile(r"\n?<extra_id_[01]>(System|User|Assistant)\n?")  # as in HelpSteer; the first turn may have no mark
STEERLM_MARK = "<extra_id_"


def prompt_messages(text: str, *, transcripts: bool) -> list[Message]:
    """Return a prompt's text as a message of the user, or as several messages if it is written as turns.

    Args:
        transcripts: the source's prompts are transcripts of `Human:` and `Assistant:` turns, or of other names.
    Raises:
        Dropped: this one isn't, or has turns that can't be told apart.
    """
    if _STEERLM.search(text):
        turns = _without_open_turn(_turns(text, _STEERLM))
        if any(STEERLM_MARK in turn["content"] for turn in turns):
            raise Dropped(f"the prompt has {STEERLM_MARK}...> inside a turn")
        return turns
    if not transcripts:
        return [_message("user", text)]
    if (found := transcript(text)) is None:
        raise Dropped("the prompt is no transcript, as those of other records are")
    return found


def transcript(text: str) -> list[Message] | None:
    """Return the messages before the answer, of a text that begins with a speaker's name; None if it has no such turns."""
    text = text.strip()
    if not _BEGINNING.match(text):
        return None
    apart = _turns(text, _APART)
    messages = _without_open_turn(joined(apart if len(apart) > 1 else _turns(text, _CLOSE)))
    return messages if in_order(messages) else None


def holds_turns(text: str) -> bool:
    """Return whether a text begins with a speaker's name and has turns of the user and of the assistant."""
    text = text.strip()
    return _BEGINNING.match(text) is not None and {"user", "assistant"} <= {turn["role"] for turn in _turns(text, _CLOSE)}


def hh_turns(text: str) -> list[Message]:
    """Return the turns of one of Anthropic's transcripts as they stand.

    Raises:
        Misfit: the text has no turns.
    """
    before, *parts = _HH_TURN.split(text)
    if not parts or before.strip():
        got = f"{shown(repr(text[:60]))}; use another format"
        raise Misfit(
            f"expected a transcript of 'Human:' and 'Assistant:' turns, got {got}", "no transcript of 'Human:' and 'Assistant:' turns"
        )
    return [_message(ROLES[who.lower()], turn.strip()) for who, turn in zip(parts[::2], parts[1::2], strict=True)]


def _turns(text: str, mark: re.Pattern[str]) -> list[Message]:
    before, *parts = mark.split(text)
    first = [_message("user", before.strip())] if before.strip() else []
    speakers = [_SPEAKERS.get(who.lower(), who.lower()) for who in parts[::2]]
    return [*first, *(_message(ROLES[who], said.strip()) for who, said in zip(speakers, parts[1::2], strict=True))]


def _without_open_turn(turns: list[Message]) -> list[Message]:
    """Return the turns without the assistant's empty turn at the end, which waits for the answer."""
    return turns[:-1] if turns and turns[-1] == _message("assistant", "") else turns


def joined(turns: list[Message]) -> list[Message]:
    """Return the turns with consecutive ones of one speaker joined into one message."""
    messages: list[Message] = []
    for turn in turns:
        if messages and messages[-1]["role"] == turn["role"]:
            messages[-1] = _message(turn["role"], f"{messages[-1]['content']}\n\n{turn['content']}")
        else:
            messages.append(turn)
    return messages


def listed_turns(text: Any) -> list[Any] | None:
    """Return a list of texts that is written as JSON in a text, as arena logs have their turns; None if it is none."""
    if not isinstance(text, str) or not text.lstrip().startswith("["):
        return None
    try:
        turns = json.loads(text)
    except (ValueError, RecursionError):
        return None
    texts = isinstance(turns, list) and turns and all(turn is None or isinstance(turn, str) for turn in turns)
    return turns if texts else None


def interleaved(questions: list[Any] | None, answers: list[Any] | None) -> list[Message]:
    """Return a conversation from the texts of the user and those of the assistant.

    Raises:
        Dropped: there isn't a text of each for every turn.
    """
    if questions is None or answers is None or len(questions) != len(answers):
        raise Dropped("prompt and answers are no lists of the same number of turns")
    pairs = zip(questions, answers, strict=True)
    return [_message(role, read_text(text, "turn")) for pair in pairs for role, text in zip(("user", "assistant"), pair, strict=True)]


def _message(role: str, text: str) -> Message:
    return {"role": role, "content": text}
