"""One record of a data set, seen through the source's mapping of columns: its prompt, answers and label, read and checked."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from rlhf_core.config import SourceConfig, shown
from rlhf_core.data.control import is_blank, unwrapped, without_end_tokens
from rlhf_core.data.schema import Message
from rlhf_core.preparation.drops import Dropped, Misfit
from rlhf_core.preparation.notation import Notation
from rlhf_core.preparation.transcripts import prompt_messages
from rlhf_core.preparation.values import kind, read_messages, read_scalar, read_text

PLAIN = Notation()


class Record:
    """One record, seen through the source's column mapping."""

    def __init__(
        self, values: Mapping[str, Any], source: SourceConfig, notation: Notation = PLAIN, start: str | None = None, separator: str = ""
    ):
        """Read a record of a source.

        Args:
            start: the text with which answers begin and that isn't a part of them; None: the record's prompt, where notation says so.
            separator: between the steps of a response.
        """
        self.values = values
        self.source = source
        self.notation = notation
        self.separator = separator
        self._start = start
        self._templated = False

    def inside(self, values: Mapping[str, Any]) -> Record:
        """Return a part of this record, such as a completion in a list."""
        return Record(values, self.source, self.notation, self.start)

    @property
    def start(self) -> str:
        """The text with which the record's answers begin."""
        if self._start is None:
            prompt = self.get("prompt") if self.notation.whole_texts and self.has("prompt") else None
            self._start = read_text(prompt, "prompt") if isinstance(prompt, str) else ""
        return self._start

    def has(self, name: str) -> bool:
        """Return whether the mapping names one of our columns, or the record has it under our name."""
        return name in self.source.columns or name in self.values

    def get(self, name: str) -> Any:
        """Return the value of one of our columns.

        Raises:
            Misfit: the record doesn't have that column.
        """
        return self.at(self.source.columns.get(name, name), wanted_for=name)

    def optional(self, name: str) -> Any:
        """Return the value of a column that may be missing unless the mapping names it."""
        return self.get(name) if name in self.source.columns else self.values.get(name)

    def mapped(self, name: str) -> Any:
        """Return the value of a column that is read only if the mapping names it."""
        return self.get(name) if name in self.source.columns else None

    def text(self, name: str) -> str:
        return read_text(self.get(name), self.source.columns.get(name, name))

    def messages(self, name: str) -> list[Message]:
        """Return a completion, as text or as messages of which the last one is the assistant's."""
        return self.completion(self.get(name), name)

    def completion(self, value: Any, name: str) -> list[Message]:
        """Return a completion that is this value, as `messages` returns that of a column.

        Raises:
            Dropped: the text doesn't begin with the prompt, as those of other records do.
        """
        if isinstance(value, list | Mapping):
            return read_messages(value, name)
        text = read_text(value, name)
        if not self.start and (written := written_conversation(text)):
            return written
        beginnings = ((text, self.start), (text.lstrip(), self.start.strip()))
        answer = next((whole.removeprefix(start) for whole, start in beginnings if whole.startswith(start)), None)
        if answer is None:
            raise Dropped(f"{name} doesn't begin with the prompt, as other answers do")
        return [as_message("assistant", answer.removeprefix(" ").strip("\n") if self.notation.transcripts else answer)]

    def prompt(self) -> list[Message]:
        """Return the prompt, as text or as messages; never empty."""
        value = self.get("prompt")
        if isinstance(value, list | Mapping):
            return read_messages(value, "prompt")
        return self.question(read_text(value, "prompt"), "prompt")

    def question(self, text: str, name: str) -> list[Message]:
        """Return the user's message with a text, or the messages of a chat template that has written it. Then answers lose its end
        tokens.
        """
        if is_blank(text):
            raise Dropped(f"{name} is empty")
        messages = unwrapped(text)
        self._templated = messages is not None and messages[-1]["role"] == "user"
        return messages if self._templated else prompt_messages(text, transcripts=self.notation.transcripts)

    def answer(self, text: str) -> str:
        """Return an answer's text, without end tokens at its end if they are to be stripped."""
        return without_end_tokens(text) if self.source.strip_end_tokens or self._templated else text

    def label(self) -> str | None:
        """Return the expected answer, stripped; extracted by `label_pattern` where the source has one. A list or a mapping is JSON.

        Raises:
            Dropped: the pattern doesn't match.
        """
        value = self.optional("label")
        if value is None:
            return None
        is_nested = isinstance(value, list | Mapping)
        text = read_scalar(json.dumps(value, ensure_ascii=False, default=str) if is_nested else value, "label")
        if self.source.label_pattern is None:
            return text
        match = re.search(self.source.label_pattern, text)
        if match is None:
            raise Dropped("label_pattern finds nothing in the label")
        return match.group(1 if match.re.groups else 0).strip()

    def at(self, path: str, *, wanted_for: str) -> Any:
        """Follow a dotted path; a column whose own name has dots comes first."""
        if path in self.values:
            return self.values[path]
        value: Any = self.values
        for part in path.split("."):
            if not isinstance(value, Mapping) or part not in value:
                there = ", ".join(map(str, value)) if isinstance(value, Mapping) else kind(value)
                got = f"{shown(there)}; map {wanted_for} in the source's columns"
                raise Misfit(f"expected a column {path!r} for {wanted_for!r}, got {got}", f"no column {path}")
            value = value[part]
        return value


def written_conversation(text: str) -> list[Message] | None:
    """Return the messages of a text that a chat template has written, if the last one is an answer."""
    messages = unwrapped(text)
    return messages if messages and messages[-1]["role"] == "assistant" else None


def as_message(role: str, text: str) -> Message:
    return {"role": role, "content": text}
