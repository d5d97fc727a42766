"""Prepared rows as the chat template and the tokenizer write them: the columns that expectations are about.

Each distinct text of a part is templated and tokenized once, as models.tokenizer.encode_turns does.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from rlhf_core.data.control import control_token, end_token, without_end_tokens
from rlhf_core.data.pictures import pictures_of
from rlhf_core.data.schema import Message, RowWriter, read_batches
from rlhf_core.models.response_ids import BACK, encode_texts, ids_behind, in_parts, response_text, trained_end
from rlhf_core.models.template import (
    Turn,
    TurnEnd,
    Unrenderable,
    answer_of,
    copies_response,
    render,
    template_tokens,
    turn_end,
    written_turn,
)
from rlhf_core.models.vision import Vision, vision_of
from rlhf_core.preparation.formats import STEP_SEPARATOR
from rlhf_core.preparation.validation.tables import with_repeated_pairs, without_sound_texts
from rlhf_core.preparation.validation.texts import TEXT_COLUMNS, kinds, pair_columns, read_texts, strings
from rlhf_core.preparation.values import ROLE_ORDER

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")


def measure(use: str, rows: Sequence[dict], tokenizer: PreTrainedTokenizerBase, *, separator: str = STEP_SEPARATOR) -> pd.DataFrame:
    """Return the rows of one use with the columns that expectations need; a value is missing where there is nothing to measure.

    All uses: id, source, split, the texts of TEXT_COLUMNS, and tokens: the length of the longest sequence that a trainer makes of the row,
        with the end token (of a prompt: with one token of an answer).
    With messages: conversation (as JSON), beginning (up to the first message of the user, case and white space ignored), roles (joined by
        commas), shortest_message (stripped), template_error (why the chat template refuses the conversation), joined and composed (see
        `_Answer`) and control_token: one that templates write around turns, in a message or a text. For a model that sees also
        picture_tokens and due_picture_tokens (see `_picture_columns`).
    sft, preference, stepwise: <text>_decoded: the text after template, encoding and decoding; <text>_end_token: with which it ends as text.
    preference: pair (JSON of the conversation and both texts in sorted order, all stripped), preference (the preferred one), is_pair,
        chosen_is_longer (in tokens: 1, 0 or, for a tie, 0.5), is_chosen (unpaired rows only).
    stepwise: steps and labels (numbers of them), bad_label (the first value that is no label), right_steps and wrong_steps (numbers).

    Args:
        separator: between the steps of stepwise rows.
    """
    frame = read_texts(use, rows)
    if use == "pretrain":
        lengths = {text: len(ids) + 1 for text, ids in encode_texts(tokenizer, frame["text"].dropna().unique().tolist())}
        return frame.assign(tokens=frame["text"].map(lengths).astype(float))
    frame = frame.assign(**_token_columns(frame, TEXT_COLUMNS[use], tokenizer))
    if use == "stepwise":
        return frame.assign(**_step_columns(rows, separator))
    return frame.assign(**pair_columns(frame), **_preference_columns(frame)) if use == "preference" else frame


def measure_table(use: str, table: pq.ParquetFile, tokenizer: PreTrainedTokenizerBase) -> pd.DataFrame:
    """Return `measure` of all rows of a file, with stand-ins for the texts that no check needs."""
    parts = [without_sound_texts(use, measure(use, batch.to_pylist(), tokenizer)) for batch in read_batches(table)]
    parts = parts or [without_sound_texts(use, measure(use, [], tokenizer))]
    frame = pd.DataFrame({name: pd.concat([part.pop(name) for part in parts], ignore_index=True) for name in list(parts[0])})
    return with_repeated_pairs(frame, table)


class MeasuredWriter(RowWriter):
    """Writes rows by `measure` to `<use>.parquet`, for `read_measured`."""

    def __init__(self, folder: Path, use: str, tokenizer: PreTrainedTokenizerBase):
        self._use = use
        nothing = without_sound_texts(use, measure(use, [], tokenizer))
        super().__init__(folder / f"{use}.parquet", pa.Schema.from_pandas(nothing, preserve_index=False))

    def write_measured(self, rows: pd.DataFrame) -> None:
        self.write(pa.RecordBatch.from_pandas(without_sound_texts(self._use, rows), preserve_index=False))


def text_lengths(use: str, measured: pd.DataFrame) -> dict[str, pd.Series]:
    """Return Column of a use's texts, and `messages` -> tokens of each row's text without its end, NaN where none is encoded; a
    conversation has those of its generation prompt too.
    """
    if use == "pretrain":
        return {"text": measured["tokens"] - 1}
    return {column: measured[f"{column}_tokens"] for column in (*TEXT_COLUMNS[use], "messages")}


def _token_columns(frame: pd.DataFrame, texts: tuple[str, ...], tokenizer: PreTrainedTokenizerBase) -> dict[str, pd.Series]:
    """Return the columns tokens, messages_tokens (of the prompt), template_error and, per text, <text>_tokens and <text>_decoded.

    Conversations with roles out of order or with an empty message are not encoded: other checks report them.
    """
    sound = frame["roles"].str.match(ROLE_ORDER).eq(True) & frame["shortest_message"].ne("")
    keys = frame["conversation"].where(sound).tolist()
    conversations = {key: json.loads(key) for key in frame["conversation"][sound].unique().tolist()}
    rendered = {key: _or_refusal(render, tokenizer, messages, waits=True) for key, messages in conversations.items()}
    prompts = {key: text for key, text in rendered.items() if isinstance(text, str)}
    prompt_ids = dict(encode_texts(tokenizer, list(dict.fromkeys(prompts.values()))))

    rows = [
        (key, text)
        for name in texts
        for key, text in zip(keys, frame[name].tolist(), strict=True)
        if key in prompts and isinstance(text, str)
    ]
    answers = _answers(list(dict.fromkeys(rows)), conversations, prompts, prompt_ids, tokenizer)
    own = template_tokens(tokenizer) if conversations else ()
    in_messages = {key: control_token((m["content"] for m in messages), own) for key, messages in conversations.items()}
    columns: dict[str, pd.Series] = {
        "control_token": strings(in_messages.get(key) for key in keys),
        "template_error": strings(str(rendered[key]) if key in rendered and key not in prompts else None for key in keys),
    }
    longest, joined, composed = np.zeros(len(frame)), *np.zeros((2, len(frame)), dtype=bool)
    for name in texts:
        found = [answers.get(row, _NO_ANSWER) for row in zip(keys, frame[name].tolist(), strict=True)]
        columns[f"{name}_tokens"] = pd.Series([answer.tokens for answer in found], dtype=float)
        columns[f"{name}_decoded"] = strings(answer.decoded for answer in found)
        longest = np.fmax(longest, columns[f"{name}_tokens"])
        columns[f"{name}_end_token"] = _of_texts(frame[name], lambda text: end_token(text, own))
        controls = _of_texts(frame[name], lambda text: control_token([without_end_tokens(text, own)], own))
        columns["control_token"] = columns["control_token"].fillna(controls)
        joined |= np.array([answer.joined for answer in found], dtype=bool)
        composed |= np.array([answer.composed for answer in found], dtype=bool)
    prompt_tokens = pd.Series([len(prompt_ids[prompts[key]]) if key in prompts else np.nan for key in keys], dtype=float)
    end = turn_end(tokenizer) if prompts else TurnEnd((0,), ())
    behind = len(end.trained) * bool(texts) + len(end.after) * (len(texts) > 1)
    tokens = {"messages_tokens": prompt_tokens, "tokens": prompt_tokens + longest + (behind or 1)}
    if (vision := vision_of(tokenizer)) is not None:
        columns |= _picture_columns(vision, keys, conversations, prompts, prompt_ids)
    return columns | tokens | {"joined": pd.Series(joined), "composed": pd.Series(composed)}


def _picture_columns(
    vision: Vision,
    keys: list[str],
    conversations: dict[str, list[Message]],
    prompts: dict[str, str],
    prompt_ids: dict[str, list[int]],
) -> dict[str, pd.Series]:
    """Return picture_tokens, those of the prompt, and due_picture_tokens, as many as its pictures take."""
    found = {key: prompt_ids[text].count(vision.filler_id) for key, text in prompts.items()}
    due = {key: vision.num_tokens(pictures_of(conversations[key])) for key in prompts}
    numbers = {"picture_tokens": found, "due_picture_tokens": due}
    return {name: pd.Series([of.get(key, np.nan) for key in keys], dtype=float) for name, of in numbers.items()}


def _of_texts(texts: pd.Series, of: Callable[[str], str | None]) -> pd.Series:
    """Return `of` of each text, computed once for each distinct one; missing where the text is."""
    found = {text: of(text) for text in texts.dropna().unique().tolist()}
    return strings(found.get(text) for text in texts.tolist())


class _Answer(NamedTuple):
    """A response in its conversation.

    tokens: as the template writes it, without its end. decoded: the text that decoding them gives. joined: see `Behind`.
    composed: decoding gives the same text in composed characters (Unicode's NFC), which is no fault.
    """

    tokens: float
    decoded: str | None
    joined: bool = False
    composed: bool = False


_NO_ANSWER = _Answer(np.nan, None)


def _answers(
    rows: list[tuple[str, str]],
    conversations: dict[str, list[Message]],
    prompts: dict[str, str],
    prompt_ids: dict[str, list[int]],
    tokenizer: PreTrainedTokenizerBase,
) -> dict[tuple[str, str], _Answer]:
    """Return (conversation's key, response) -> how it is trained on.

    A template may trim a response and lay out its thoughts, or add empty ones. If it rewrites the answer, training would see another text
    than the policy writes: then `decoded` is that other text.
    """
    found = {}
    for part in in_parts(rows):
        turns = [
            _or_refusal(written_turn, tokenizer, conversations[key], {"role": "assistant", "content": text}, prompts[key])
            for key, text in part
        ]
        found |= {row: _Answer(0, str(turn)) for row, turn in zip(part, turns, strict=True) if not isinstance(turn, Turn)}
        fitting = [(row, turn) for row, turn in zip(part, turns, strict=True) if isinstance(turn, Turn)]
        texts = [prompts[key] for (key, _), _ in fitting]
        written = ids_behind(tokenizer, texts, [turn for _, turn in fitting], trained_end(tokenizer), prompt_ids=prompt_ids)
        decoded: dict[tuple[int, ...], str] = {}
        for (row, _), prompt, behind in zip(fitting, texts, written, strict=True):
            ids = (*prompt_ids[prompt][-BACK:], *behind.ids)
            if ids not in decoded:
                decoded[ids] = _without_end(response_text(tokenizer, prompt_ids[prompt], behind.ids, special=True), tokenizer)
            kept = _rewritten(decoded[ids], conversations[row[0]], row[1], prompt, tokenizer)
            tokens = len(behind.ids) - len(turn_end(tokenizer).trained)
            composed = kept is None and not row[1].isascii() and _composed(row[1]) != row[1] and _composed(row[1]) in decoded[ids]
            found[row] = _Answer(tokens, row[1] if kept is None else kept, behind.joined is not None, composed)
    return found


def _or_refusal(write: Callable[..., T], *conversation: Any, **options: bool) -> T | Unrenderable:
    """Return what `write` makes of a conversation, or the template's refusal."""
    try:
        return write(*conversation, **options)
    except Unrenderable as error:
        return error


def _without_end(text: str, tokenizer: PreTrainedTokenizerBase) -> str:
    return text.removesuffix(tokenizer.decode(turn_end(tokenizer).trained, skip_special_tokens=False))


def _rewritten(decoded: str, messages: list[Message], text: str, prompt: str, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return what the model learns in place of the text `text`; None if it learns the text itself."""
    if not copies_response(tokenizer):
        return None if _composed(decoded).rstrip().endswith(_composed(answer_of(text).strip())) else decoded
    whole = str(_or_refusal(render, tokenizer, [*messages, {"role": "assistant", "content": text}], waits=False))
    if not whole.startswith(prompt + text):  # a template that copies responses may still make exceptions
        return whole.removeprefix(prompt)
    return None if _composed(decoded) == _composed(text) else decoded


def _composed(text: str) -> str:
    return text if text.isascii() else unicodedata.normalize("NFC", text)


def _step_columns(rows: Sequence[dict], separator: str) -> dict[str, pd.Series]:
    labels = [row["labels"] or [] for row in rows]
    return {
        "steps": pd.Series([len((row["response"] or "").split(separator)) for row in rows], dtype=int),
        "labels": pd.Series([len(of_row) for of_row in labels], dtype=int),
        "bad_label": strings(next((str(x) for x in of_row if x not in (1, 0, -1)), None) for of_row in labels),
        "right_steps": pd.Series([sum(x in (1, 0) for x in of_row) for of_row in labels], dtype=int),
        "wrong_steps": pd.Series([sum(x == -1 for x in of_row) for of_row in labels], dtype=int),
    }


def _preference_columns(frame: pd.DataFrame) -> dict[str, pd.Series]:
    is_pair, is_unpaired = kinds(frame)
    measured = is_pair & frame["chosen_tokens"].notna() & frame["rejected_tokens"].notna()
    longer = (np.sign(frame["chosen_tokens"] - frame["rejected_tokens"]) + 1) / 2
    return {
        "is_pair": is_pair.astype(int),
        "chosen_is_longer": longer.where(measured),
        "is_chosen": frame["chosen"].notna().astype(float).where(is_unpaired),
    }
