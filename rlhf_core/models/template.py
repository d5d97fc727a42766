"""Chat templates: what params.yaml writes into one, and how a template writes an assistant's turn.

What a template would take from its surroundings, the day or options such as `enable_thinking`, is written into it. The template is saved
with the tokenizer, so every stage and every server of the policy renders the same prompt.

What a template puts before a response, how it rewrites the response and what ends the turn is found by rendering: any template works.
docs/templates.md explains both for users.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Sequence
from datetime import date
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from rlhf_core.config import shown
from rlhf_core.data.pictures import PICTURE, pictures_of
from rlhf_core.data.schema import Message, extras, whole_message
from rlhf_core.models.template_trial import too_long
from rlhf_core.models.vision import vision_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# For a base model that continues a text: no roles, the response directly after the prompt, then the end token.
CONTINUATION = (
    "{{ bos_token if bos_token else '' }}"
    "{% for message in messages %}{{ message['content'] }}{{ eos_token if message['role'] == 'assistant' else '' }}{% endfor %}"
)
# ChatML without a system prompt of its own, for a base model whose tokenizer has these two tokens.
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
NAMED = {"continuation": CONTINUATION, "chatml": CHATML}
DEFAULT_DATE = "2024-07-26"  # several templates fall back to it where strftime_now is missing
_ASKS_FOR_DAY = re.compile(r"\bstrftime_now\s*\(")
_FORMAT = re.compile(r"\bstrftime_now\s*\(\s*(?:'([^'\\]*)'|\"([^\"\\]*)\")\s*\)")
_PINNED = "{%- set strftime_now = "
OPEN, CLOSE = "<think>", "</think>"
QUESTION, ANSWER = "Which one?", "That one."  # rendered to find what the template puts around them
_FUNCTION = "find_it"
_CONTROL = re.compile(r"(?!</?[a-z][a-z0-9]*>$)[<\[].+[>\]]")  # an added token in brackets, but no tag of HTML
# Variables that apply_chat_template always passes.
_TAKEN = {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "strftime_now", "raise_exception"}

log = logging.getLogger("rlhf")


def named_template(wanted: str) -> str:
    """Return the template that `model.chat_template` stands for: a name among NAMED, a file that ends in .jinja, or the template itself.

    Raises:
        ValueError: it is none of these.
    """
    from rlhf_core.data.places import locate

    if wanted in NAMED:
        return NAMED[wanted]
    if "{{" in wanted or "{%" in wanted:
        return wanted
    try:
        if wanted.endswith(".jinja"):
            return locate(wanted).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"model.chat_template: expected a readable file, got {wanted} ({error}); correct the path") from error
    raise ValueError(
        f"model.chat_template: expected one of {list(NAMED)}, a .jinja file, or a template with {{{{ }}}} in it, "
        f"got {shown(repr(wanted))}; correct it"
    )


def with_date(template: str, day: str) -> str:
    """Return the template with a fixed day (ISO 8601); unchanged if it doesn't write the day, or has a fixed one already.

    `strftime_now` becomes a look-up of the formats that the template calls it with. A `date_string` that is computed from it follows.

    Raises:
        ValueError: the template calls strftime_now with something else than a literal format.
    """
    if _PINNED in template or not _ASKS_FOR_DAY.search(template):
        return template
    formats = [a or b for a, b in _FORMAT.findall(template)]
    if len(formats) < len(_ASKS_FOR_DAY.findall(template)):
        raise ValueError('chat template: expected dates written as strftime_now("<format>"), got another call of it; write the format out')
    written = {form: date.fromisoformat(day).strftime(form) for form in formats}
    return f"{_PINNED}{_literal(written)}.get %}}\n{template}"


def with_options(template: str, options: dict[str, Any]) -> str:
    """Return the template with defaults for some of its variables, which a caller of apply_chat_template may override.

    Raises:
        ValueError: the template reads no such variable.
    """
    for name in options:
        if name in _TAKEN or not name.isidentifier() or not re.search(rf"\b{name}\b", template):
            raise ValueError(
                f"model.template_options: expected variables that the chat template reads, got {shown(repr(name))}; see its chat_template"
            )
    defaults = (
        f"{{%- if {name} is not defined %}}{{%- set {name} = {_literal(value)} %}}{{%- endif %}}\n" for name, value in options.items()
    )
    return "".join(defaults) + template


def with_header(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the tokenizer's template; if it ignores add_generation_prompt, with the header of an assistant's turn as generation prompt.

    Without it the header would be a part of every response. White space before a response, such as Llama 2's, is no header.

    Raises:
        ValueError: it ignores add_generation_prompt, and writes different headers.
    """
    template, asked = tokenizer.chat_template, [{"role": "user", "content": QUESTION}]
    prompt = render(tokenizer, asked, waits=True)
    if prompt != render(tokenizer, asked, waits=False):
        return template
    talks = [asked, [*asked, {"role": "assistant", "content": ANSWER}, {"role": "user", "content": ANSWER}]]
    headers = {_header(tokenizer, talk, answer) for talk in talks for answer in (ANSWER, QUESTION)}
    if not any(header.strip() for header in headers):
        return template
    header, ending = max(headers, key=len), template.removesuffix("\n")  # a line break at the end is not rendered, in the middle it is
    longer = f"{ending}{{% if add_generation_prompt %}}{{{{ {_literal(header)} }}}}{{% endif %}}"
    tokenizer.chat_template = longer
    written = [render(tokenizer, asked, waits=waits) for waits in (True, False)]
    tokenizer.chat_template = template
    if len(headers) > 1 or written != [prompt + header, prompt]:
        got = " and ".join(shown(repr(h), 60) for h in sorted(headers))
        raise ValueError(
            f"chat template: expected a generation prompt where add_generation_prompt is true, got none, and {got} before an answer; "
            "write `{% if add_generation_prompt %}` and the header of an answer at its end"
        )
    return longer


def _header(tokenizer: PreTrainedTokenizerBase, messages: list[Message], answer: str) -> str:
    """Return the text that the template writes between a conversation and an answer, without thoughts; empty if it refuses the
    conversation.
    """
    try:
        prompt, whole = (render(tokenizer, m, waits=False) for m in (messages, [*messages, {"role": "assistant", "content": answer}]))
    except Unrenderable:
        return ""
    return whole.removeprefix(prompt).rpartition(answer)[0].partition(OPEN)[0] if whole.startswith(prompt) else ""


def _literal(value: Any) -> str:
    """Return a value in Jinja's syntax: JSON with `none` for null, and a space before `}` because `}}` would end an expression."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_literal(k)}: {_literal(v)}" for k, v in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(_literal, value)) + "]"
    return "none" if value is None else json.dumps(value, ensure_ascii=False)


# Turns


class Unrenderable(ValueError):
    """Raised when the chat template refuses a conversation.

    words: its message.
    """

    def __init__(self, words: str):
        super().__init__(f"chat template: expected a conversation that it renders, got {words}; leave it out or change it")
        self.words = words

    def __reduce__(self):
        return Unrenderable, (self.words,)


class TurnEnd(NamedTuple):
    """What a template writes after an assistant's response, as token ids.

    trained: up to and including the first special token. They are trained on, and the last of them stops sampling. The eos token alone if
        the template writes no special token there; empty without an eos token, which only a reward model's tokenizer may lack.
    after: the rest, such as ChatML's line break. It is never sampled, and part of a conversation that is scored.
    """

    trained: tuple[int, ...]
    after: tuple[int, ...]


class Turn(NamedTuple):
    """The text that follows a prompt, up to the turn's end.

    before: the template's own text, in which special tokens are special.
    text: the response as the template writes it: trimmed, or with its thoughts in the template's layout. It has no special tokens.
    thoughts: characters of before and text together before the answer begins; 0: there are no thoughts.
    ended: the turn's end is included, since a call of tools ends otherwise than an answer.
    """

    before: str
    text: str
    thoughts: int = 0
    ended: bool = False


def render(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], *, waits: bool, tools: Sequence[dict[str, Any]] | None = None
) -> str:
    """Return the conversation as the template writes it.

    Args:
        waits: whether the generation prompt is added.
        tools: JSON schemas of the tools that the model may call; without any, those that the conversation has.

    Raises:
        Unrenderable: the template doesn't take the conversation, or would leave out its calls of tools.
    """
    own = extras(messages[0]).get("tools") if messages and not tools else None
    if own:
        _check_tools(tokenizer, tokenizer.chat_template)
    if any("tool_calls" in extras(message) for message in messages) and not _writes_calls(tokenizer, tokenizer.chat_template):
        raise Unrenderable("calls of tools, which this template leaves out")
    try:
        written = for_template(tokenizer, messages)
        text = tokenizer.apply_chat_template(written, tools=tools or own, tokenize=False, add_generation_prompt=waits)
    except Exception as error:  # of a template, which is a program
        raise Unrenderable(f"{type(error).__name__}: {shown(str(error).strip())}") from error
    return _with_pictures(tokenizer, within_limit(text, messages), messages)


def within_limit(text: str, messages: Sequence[Message]) -> str:
    """Return the rendered conversation, if it isn't far longer than the conversation.

    Raises:
        Unrenderable: the template made it far longer than the conversation.
    """
    if too_long(text, messages):
        raise Unrenderable(f"one of which it makes {len(text)} characters")
    return text


def _with_pictures(tokenizer: PreTrainedTokenizerBase, text: str, messages: Sequence[Message]) -> str:
    """Return the rendered conversation with the tokens of its pictures."""
    vision, pictures = vision_of(tokenizer), pictures_of(messages)
    if vision is None:
        if pictures:
            raise Unrenderable("pictures, which need a model that sees (model.vision)")
        return text
    try:
        whole = vision.expand(text, pictures)
    except Exception as error:  # of a processor, on a picture of a size that it refuses
        raise Unrenderable(f"a picture that the model's processor refuses: {shown(str(error))}") from error
    if whole is None:
        raise Unrenderable(f"{len(pictures)} pictures, for which it writes {text.count(vision.token)} times {vision.token}")
    return whole


def for_template(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return the conversation as the template takes it: text parts are joined for a template that wants text."""
    form = _content_form(tokenizer, tokenizer.chat_template)
    return [_in_form(message, form) for message in messages]


def turn_end(tokenizer: PreTrainedTokenizerBase) -> TurnEnd:
    """Return the token ids with which the template ends an assistant's last turn."""
    return _end(tokenizer, tokenizer.chat_template)[1]


def end_texts(tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """Return the texts of `turn_end`: trained and after; both empty if its ids aren't the template's text."""
    return _end(tokenizer, tokenizer.chat_template)[2]


def copies_response(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the template copies every response unchanged after the generation prompt.

    Prompt, sampled ids and turn end together are then the rendered conversation.
    """
    return _copies(tokenizer, tokenizer.chat_template)


def written_turn(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], answer: Message, prompt: str) -> Turn:
    """Return the turn that follows `prompt`, the rendered `messages`, for the assistant's message `answer`.

    It is the template's own rendering, unless that doesn't continue the prompt: some templates drop thoughts that their generation prompt
    opens. Then it is the response with its thoughts, which may be empty.

    Raises:
        Unrenderable: the template doesn't take the conversation.
    """
    response, calls = answer["content"], "tool_calls" in extras(answer)
    if copies_response(tokenizer) and not calls:
        return _with_thoughts(Turn("", response))
    whole = render(tokenizer, [*messages, answer], waits=False)
    if whole.startswith(prompt):
        written, end = whole.removeprefix(prompt), _end(tokenizer, tokenizer.chat_template)[0]
        body = written.removesuffix(end)
        if calls:
            return _with_thoughts(Turn(body, "", ended=not written.endswith(end)))
        return _with_thoughts(_split(body, response))
    return _with_thoughts(Turn("", _behind(prompt, response if _keeps_edges(tokenizer, tokenizer.chat_template) else response.strip())))


def written_conversation(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], response: str) -> tuple[str, str]:
    """Return the rendered conversation without the end of its last turn, split into the text before the answer and the answer."""
    whole = render(tokenizer, [*messages, {"role": "assistant", "content": response}], waits=False)
    whole = whole.removesuffix(_end(tokenizer, tokenizer.chat_template)[0])
    for text in (response, response.strip(), answer_of(response).strip()):
        if text and whole.endswith(text):
            return whole.removesuffix(text), text
    return whole, ""


def answer_of(response: str) -> str:
    """Return the response without its thoughts."""
    return response.rpartition(CLOSE)[2].lstrip("\n") if CLOSE in response else response


def _split(body: str, response: str) -> Turn:
    """Split a turn into the template's own text and the response. If the template rewrites the response, all of it counts as response."""
    for text in (response, response.strip()):
        if text and body.endswith(text):
            return Turn(body.removesuffix(text), text)
    return Turn("", body)


def _behind(prompt: str, response: str) -> str:
    """Return the turn for a response after a generation prompt that the template's rendering doesn't continue.

    The prompt may open or close thoughts.
    """
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
    """Return the turn with `thoughts` set: characters up to the last closing tag and the white space after it."""
    written = turn.before + turn.text
    if CLOSE not in written:
        return turn
    answer = written.rpartition(CLOSE)[2].lstrip()
    return turn._replace(thoughts=len(written) - len(answer))


@lru_cache(maxsize=8)
def _end(tokenizer: PreTrainedTokenizerBase, template: str) -> tuple[str, TurnEnd, tuple[str, str]]:
    """Return the text and ids that follow an assistant's last response, and `end_texts`. `template` is only part of the cache's key."""
    whole = render(tokenizer, [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}], waits=False)
    before, found, text = whole.rpartition(ANSWER)
    if not found:
        raise ValueError(f"chat template: expected the assistant's message in what it writes, got {shown(repr(whole))}; correct it")
    alone, of_whole, head = (tuple(tokenizer(t, add_special_tokens=False)["input_ids"]) for t in (text, whole, before + found))
    ids = of_whole[len(head) :] if of_whole[: len(head)] == head else alone
    first = next((i for i, token in enumerate(ids) if token in special_ids(tokenizer)), None)
    if first is None:
        end = TurnEnd((), ids) if tokenizer.eos_token_id is None else TurnEnd((tokenizer.eos_token_id,), ())
        return text, end, ("", "" if end.trained else text)
    token = tokenizer.convert_ids_to_tokens(ids[first])
    split = text.find(token) + len(token)
    return text, TurnEnd(ids[: first + 1], ids[first + 1 :]), (text[:split], text[split:]) if token in text else ("", "")


def special_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Return ids that plain text never gives: special tokens, and tokens that were added for a template without being marked as special."""
    return {tokenizer.eos_token_id, *tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}


def template_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """Return the control tokens that the template writes around turns: special ones, and others in brackets that aren't HTML tags."""
    return _template_tokens(tokenizer, tokenizer.chat_template)


@lru_cache(maxsize=8)
def _template_tokens(tokenizer: PreTrainedTokenizerBase, template: str) -> tuple[str, ...]:
    asked = [{"role": "user", "content": QUESTION}]
    texts = (render(tokenizer, asked, waits=True), render(tokenizer, [*asked, {"role": "assistant", "content": ANSWER}], waits=False))
    ids = {token for text in texts for token in tokenizer(text, add_special_tokens=False)["input_ids"]}
    added, special = tokenizer.added_tokens_decoder, {tokenizer.eos_token_id, *tokenizer.all_special_ids}
    own = {i for i in ids & special_ids(tokenizer) if i in special or added[i].special or _CONTROL.fullmatch(added[i].content)}
    return tuple(tokenizer.convert_ids_to_tokens(sorted(own - {tokenizer.unk_token_id})))


@lru_cache(maxsize=8)
def _copies(tokenizer: PreTrainedTokenizerBase, template: str) -> bool:
    """Finds `copies_response` by trying what templates are known to change: white space at the edges, thoughts, line breaks."""
    question, answer = {"role": "user", "content": " a\n"}, {"role": "assistant", "content": "<think>\nb\n</think>\n\nc"}
    for messages in ([question], [question, answer, question]):
        text = render(tokenizer, messages, waits=True)
        for response in ("d", " \nd \n", "<think>d</think>e", "d</think>\n\ne", "{{ d }}"):
            if not render(tokenizer, [*messages, {"role": "assistant", "content": response}], waits=False).startswith(text + response):
                return False
    return True


@lru_cache(maxsize=8)
def _keeps_edges(tokenizer: PreTrainedTokenizerBase, template: str) -> bool:
    padded = f" \n{ANSWER} \n"
    return padded in render(tokenizer, [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": padded}], waits=False)


@lru_cache(maxsize=8)
def _writes_calls(tokenizer: PreTrainedTokenizerBase, template: str) -> bool:
    """Return whether the template writes tool calls. True if it refuses the trial: it will refuse the conversation too, with a reason."""
    call = {"id": "call00000", "type": "function", "function": {"name": _FUNCTION, "arguments": {}}}
    messages = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    try:
        return _FUNCTION in tokenizer.apply_chat_template(messages, tokenize=False)
    except Exception:  # of a template, which is a program
        return True


@lru_cache(maxsize=8)
def _check_tools(tokenizer: PreTrainedTokenizerBase, template: str) -> None:
    """Warn, once, if the template leaves out descriptions of tools."""
    tool = {"type": "function", "function": {"name": _FUNCTION, "description": "", "parameters": {"type": "object", "properties": {}}}}
    try:
        text = tokenizer.apply_chat_template([{"role": "user", "content": QUESTION}], tools=[tool], tokenize=False)
    except Exception:  # of a template, which is a program; it will refuse the conversation too, with a reason
        return
    if _FUNCTION not in text:
        log.warning("chat template: expected descriptions of the tools that conversations have, got none; calls are learned without")


@lru_cache(maxsize=8)
def _content_form(tokenizer: PreTrainedTokenizerBase, template: str) -> str:
    """Return the form in which the template takes a message's content: "text", "parts" or "both"."""

    def takes(content) -> bool:
        try:
            text = tokenizer.apply_chat_template([{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True)
        except Exception:  # of a template, which is a program
            return False
        return QUESTION in text and ANSWER in text and "'type'" not in text and '"type"' not in text

    if not takes([{"type": "text", "text": QUESTION}, {"type": "text", "text": ANSWER}]):
        return "text"
    return "both" if takes(QUESTION + ANSWER) else "parts"


def _in_form(message: Message, form: str) -> dict[str, Any]:
    whole = whole_message(message)
    whole.pop("tools", None)  # an argument of its own
    if isinstance(whole["content"], list):
        whole["content"] = [{"type": "image"} if part["type"] == PICTURE else part for part in whole["content"]]
    if form == "text":
        return {**whole, "content": message["content"]}
    if form == "parts" and isinstance(whole["content"], str):
        return {**whole, "content": [{"type": "text", "text": whole["content"]}]}
    return whole


def conversation_key(messages: Sequence[Message]) -> str:
    """Return a string that determines the conversation: equal for equal conversations."""
    return json.dumps(list(messages), ensure_ascii=False)
