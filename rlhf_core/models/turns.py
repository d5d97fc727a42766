"""How a chat template writes an assistant's turn: what it puts before a response, what it makes of the response, and what ends the turn.

All of it is found by rendering, so it holds for any template. docs/templates.md says the same for users.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from rlhf_core.config import shown
from rlhf_core.data.schema import Message, extras, whole_message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OPEN, CLOSE = "<think>", "</think>"
_FUNCTION = "find_it"
_QUESTION, _ANSWER = "Which one?", "That one."  # what is rendered to see what the template puts around them


class Unrenderable(ValueError):
    """The chat template refuses a conversation, in its own words."""

    def __init__(self, words: str):
        super().__init__(f"chat template: expected a conversation that it renders, got {words}; leave it out or change it")
        self.words = words

    def __reduce__(self):
        return Unrenderable, (self.words,)


class TurnEnd(NamedTuple):
    """What a template writes after an assistant's response, as token ids.

    trained: up to and including the first special token: learned, and its last token stops sampling. The eos token alone where the
        template writes no special token there; nothing where there is no eos token either, which only a reward model's tokenizer may lack.
    after: what follows, such as ChatML's line break: never sampled, and part of a conversation that is scored.
    """

    trained: tuple[int, ...]
    after: tuple[int, ...]


class Turn(NamedTuple):
    """What follows a prompt, as text, up to the turn's end.

    before: the template's own words, in which special tokens are special.
    text: the response as the template writes it: trimmed, or with its thoughts in the template's layout. Special tokens in it are text.
    thoughts: characters, of before and text together, up to where the answer begins; 0: there are no thoughts.
    ended: the turn's end is in it: a call of tools that ends otherwise than an answer.
    """

    before: str
    text: str
    thoughts: int = 0
    ended: bool = False


def render(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], *, waits: bool) -> str:
    """The conversation as the template writes it; `waits`: with the generation prompt.

    Raises:
        Unrenderable: the template doesn't take the conversation, or would leave out its calls of tools.
    """
    if any("tool_calls" in extras(message) for message in messages) and not _writes_calls(tokenizer, tokenizer.chat_template):
        raise Unrenderable("calls of tools, which this template leaves out")
    try:
        return tokenizer.apply_chat_template(for_template(tokenizer, messages), tokenize=False, add_generation_prompt=waits)
    except Exception as error:  # of a template, which is a program
        raise Unrenderable(f"{type(error).__name__}: {shown(str(error).strip())}") from error


def for_template(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The conversation as the template takes it: parts of text are joined for one that wants text."""
    form = _content_form(tokenizer, tokenizer.chat_template)
    return [_in_form(message, form) for message in messages]


def turn_end(tokenizer: PreTrainedTokenizerBase) -> TurnEnd:
    """What the template ends an assistant's last turn with."""
    return _end(tokenizer, tokenizer.chat_template)[1]


def copies_response(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the template writes every response behind the generation prompt as it is: prompt, sampled ids and turn end are then what it
    makes of the whole conversation.
    """
    return _copies(tokenizer, tokenizer.chat_template)


def written_turn(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], answer: Message) -> Turn:
    """What follows the prompt of `messages` where the assistant's message is `answer`.

    It is what the template writes there. Where the template writes no such thing, since it drops thoughts for which its generation prompt
    asks, it is the response with its thoughts, which are empty if it has none.

    Raises:
        Unrenderable: the template doesn't take the conversation.
    """
    response, calls = answer["content"], "tool_calls" in extras(answer)
    if copies_response(tokenizer) and not calls:
        return _with_thoughts(Turn("", response))
    prompt, whole = render(tokenizer, messages, waits=True), render(tokenizer, [*messages, answer], waits=False)
    if whole.startswith(prompt):
        written, end = whole.removeprefix(prompt), _end(tokenizer, tokenizer.chat_template)[0]
        body = written.removesuffix(end)
        if calls:
            return _with_thoughts(Turn(body, "", ended=not written.endswith(end)))
        return _with_thoughts(_split(body, response))
    return _with_thoughts(Turn("", _behind(prompt, response if _keeps_edges(tokenizer, tokenizer.chat_template) else response.strip())))


def written_conversation(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], response: str) -> tuple[str, str]:
    """The whole conversation as the template writes it, up to the end of its last turn: before the answer, and the answer."""
    whole = render(tokenizer, [*messages, {"role": "assistant", "content": response}], waits=False)
    whole = whole.removesuffix(_end(tokenizer, tokenizer.chat_template)[0])
    for text in (response, response.strip(), answer_of(response).strip()):
        if text and whole.endswith(text):
            return whole.removesuffix(text), text
    return whole, ""


def answer_of(response: str) -> str:
    """The response without its thoughts."""
    return response.rpartition(CLOSE)[2].lstrip("\n") if CLOSE in response else response


def _split(body: str, response: str) -> Turn:
    """Tell the template's own words from the response; where it rewrites the response, all of it counts as response."""
    for text in (response, response.strip()):
        if text and body.endswith(text):
            return Turn(body.removesuffix(text), text)
    return Turn("", body)


def _behind(prompt: str, response: str) -> str:
    """A response behind a prompt that the template doesn't write so: its thoughts are open, closed, or neither there."""
    if prompt.rstrip().endswith(OPEN):
        newline = "" if prompt.endswith("\n") else "\n"
        if CLOSE not in response:
            return f"{newline}\n{CLOSE}\n\n{response}"
        if not response.lstrip().startswith(OPEN):
            return response
        inside = response.lstrip().removeprefix(OPEN)
        return inside if newline else inside.removeprefix("\n")
    return answer_of(response) if prompt.rstrip().endswith(CLOSE) else response


def _with_thoughts(turn: Turn) -> Turn:
    """With the number of characters before the answer: up to the last closing tag and the white space behind it."""
    written = turn.before + turn.text
    if CLOSE not in written:
        return turn
    answer = written.rpartition(CLOSE)[2].lstrip()
    return turn._replace(thoughts=len(written) - len(answer))


@lru_cache(maxsize=8)
def _end(tokenizer: PreTrainedTokenizerBase, template: str) -> tuple[str, TurnEnd]:
    """Text and ids of what follows an assistant's last response. Here and below `template` is the cache's key."""
    whole = render(tokenizer, [{"role": "user", "content": _QUESTION}, {"role": "assistant", "content": _ANSWER}], waits=False)
    _, found, text = whole.rpartition(_ANSWER)
    if not found:
        raise ValueError(f"chat template: expected the assistant's message in what it writes, got {shown(repr(whole))}; correct it")
    ids = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
    first = next((i for i, token in enumerate(ids) if token in special_ids(tokenizer)), None)
    if first is None:
        return text, TurnEnd((), ids) if tokenizer.eos_token_id is None else TurnEnd((tokenizer.eos_token_id,), ())
    return text, TurnEnd(ids[: first + 1], ids[first + 1 :])


def special_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Tokens that no text has: special ones, and those that were added for a template without being marked as special."""
    return {tokenizer.eos_token_id, *tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}


@lru_cache(maxsize=8)
def _copies(tokenizer: PreTrainedTokenizerBase, template: str) -> bool:
    """Tried on what templates are known to touch: edges, thoughts, lines. Asked once, so that only a template that doesn't is rendered
    again for every response.
    """
    question, answer = {"role": "user", "content": " a\n"}, {"role": "assistant", "content": "<think>\nb\n</think>\n\nc"}
    for messages in ([question], [question, answer, question]):
        text = render(tokenizer, messages, waits=True)
        for response in ("d", " \nd \n", "<think>d</think>e", "d</think>\n\ne", "{{ d }}"):
            if not render(tokenizer, [*messages, {"role": "assistant", "content": response}], waits=False).startswith(text + response):
                return False
    return True


@lru_cache(maxsize=8)
def _keeps_edges(tokenizer: PreTrainedTokenizerBase, template: str) -> bool:
    padded = f" \n{_ANSWER} \n"
    return padded in render(tokenizer, [{"role": "user", "content": _QUESTION}, {"role": "assistant", "content": padded}], waits=False)


@lru_cache(maxsize=8)
def _writes_calls(tokenizer: PreTrainedTokenizerBase, template: str) -> bool:
    """Whether a call's function is in what the template writes. One that refuses the trial is left to say so of the conversation."""
    call = {"id": "call00000", "type": "function", "function": {"name": _FUNCTION, "arguments": {}}}
    messages = [{"role": "user", "content": _QUESTION}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    try:
        return _FUNCTION in tokenizer.apply_chat_template(messages, tokenize=False)
    except Exception:  # of a template, which is a program
        return True


@lru_cache(maxsize=8)
def _content_form(tokenizer: PreTrainedTokenizerBase, template: str) -> str:
    """What the template takes as a message's content: "text", "parts" or "both"."""

    def takes(content) -> bool:
        try:
            text = tokenizer.apply_chat_template([{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True)
        except Exception:  # of a template, which is a program
            return False
        return _QUESTION in text and _ANSWER in text and "'type'" not in text and '"type"' not in text

    if not takes([{"type": "text", "text": _QUESTION}, {"type": "text", "text": _ANSWER}]):
        return "text"
    return "both" if takes(_QUESTION + _ANSWER) else "parts"


def _in_form(message: Message, form: str) -> dict[str, Any]:
    whole = whole_message(message)
    if form == "text":
        return {**whole, "content": message["content"]}
    if form == "parts" and isinstance(whole["content"], str):
        return {**whole, "content": [{"type": "text", "text": whole["content"]}]}
    return whole


def conversation_key(messages: Sequence[Message]) -> str:
    """Equal for equal conversations, and all there is to know of one."""
    return json.dumps(list(messages), ensure_ascii=False)
