"""The tables that expectations are about: one per use, a row of measured texts for each prepared row.

`measure` templates and tokenizes each distinct text once, in batches, as models.tokenizer.encode_turns does. `measure_table` keeps
only the texts in which a check may find a fault. Stand-ins, which every check treats the same way, replace the others: all counts and
messages are those of the full texts. Repeated rows are found by hashes, then compared by their texts: a hash collision changes no
verdict.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from rlhf_core.data.control import VISIBLE, control_token, end_token, is_blank, without_end_tokens
from rlhf_core.data.hashing import beginning, conversation_text
from rlhf_core.data.schema import SCHEMAS, Message, edgeless, read_batches
from rlhf_core.data.values import ROLE_ORDER
from rlhf_core.models.response_ids import BACK, encode_texts, ids_behind, in_parts, response_text, trained_end
from rlhf_core.models.template import (
    Turn,
    TurnEnd,
    Unrenderable,
    answer_of,
    copies_response,
    for_template,
    render,
    template_tokens,
    turn_end,
    written_turn,
)
from rlhf_core.models.template_trial import too_long
from rlhf_core.models.tokenizer import load_tokenizer, use_all_cores

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# Tokenizer classes that consist of tokenizer.json alone.
PLAIN_TOKENIZERS = ("TokenizersBackend", "PreTrainedTokenizerFast")
# Columns with the texts that a model learns to write.
TEXT_COLUMNS: dict[str, tuple[str, ...]] = {
    "pretrain": ("text",),
    "sft": ("response",),
    "preference": ("chosen", "rejected"),
    "prompt": (),
}

ANY, OTHER = "a", "b"  # two valid texts
DISTINCT = ("id", "pair")  # columns whose values hardly ever repeat
STAND_INS = {
    **dict.fromkeys(("text", "response", "response_decoded", "chosen", "chosen_decoded", "preference"), ANY),
    **dict.fromkeys(("rejected", "rejected_decoded"), OTHER),
    **dict.fromkeys(("conversation", "shortest_message"), ANY),
    "roles": "user",
}


def load_prepared_tokenizer(folder: Path, *, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """The tokenizer that prepare_data saved, without importing torch, which takes seconds, if its class allows."""
    use_all_cores()
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    if settings.get("tokenizer_class") in PLAIN_TOKENIZERS and "auto_map" not in settings:
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(folder)
    return load_tokenizer(str(folder), trust_remote_code=trust_remote_code)


def measure(use: str, rows: Sequence[dict], tokenizer: PreTrainedTokenizerBase) -> pd.DataFrame:
    """The rows of one use with the columns that expectations need; a value is missing where there is nothing to measure.

    All uses: id, source, split, the texts of TEXT_COLUMNS, and tokens: the length of the longest sequence that a trainer makes of the row,
        with the end token (of a prompt: with one token of an answer).
    With messages: conversation (as JSON), beginning (up to the first message of the user, case and white space ignored), roles (joined by
        commas), shortest_message (stripped), template_error (why the chat template refuses the conversation), joined and composed (see
        `_Answer`) and control_token: one that templates write around turns, in a message or a text.
    sft, preference: <text>_decoded: the text after template, encoding and decoding; <text>_end_token: with which it ends as text.
    preference: pair (JSON of the conversation and both texts in sorted order, all stripped), preference (the preferred one), is_pair,
        chosen_is_longer (in tokens: 1, 0 or, for a tie, 0.5), is_chosen (unpaired rows only).
    """
    frame = read_texts(use, rows)
    if use == "pretrain":
        lengths = {text: len(ids) + 1 for text, ids in encode_texts(tokenizer, frame["text"].dropna().unique().tolist())}
        return frame.assign(tokens=frame["text"].map(lengths))
    frame = frame.assign(**_token_columns(frame, TEXT_COLUMNS[use], tokenizer))
    return frame.assign(**pair_columns(frame), **_preference_columns(frame)) if use == "preference" else frame


def read_texts(use: str, rows: Sequence[dict]) -> pd.DataFrame:
    """The columns of `measure` that need no tokenizer, without pair and preference."""
    frame = pd.DataFrame({column: _strings(row[column] for row in rows) for column in ("id", "source", "split", *TEXT_COLUMNS[use])})
    return frame if use == "pretrain" else frame.assign(**_conversation_columns([row["messages"] for row in rows]))


def pair_columns(frame: pd.DataFrame) -> dict[str, pd.Series]:
    """The columns pair and preference. White space at the edges of texts doesn't count."""
    is_pair, is_unpaired = _kinds(frame)
    chosen, rejected = frame["chosen"].str.strip(), frame["rejected"].str.strip()
    sides = [sorted([c, r]) for c, r in zip(chosen.fillna(""), rejected.fillna(""), strict=True)]
    conversations = {text: edgeless(json.loads(text)) for text in frame["conversation"].dropna().unique().tolist()}
    keys = (
        json.dumps([conversations.get(conversation), bool(paired), *texts], ensure_ascii=False)
        for conversation, paired, texts in zip(frame["conversation"], is_pair, sides, strict=True)
    )
    return {
        "pair": _strings(keys).where(frame["conversation"].notna() & (is_pair | is_unpaired)),
        "preference": chosen.where(is_pair, frame["chosen"].notna().map({True: "chosen", False: "rejected"})),
    }


def schema_frame(use: str, found: dict[str, str]) -> pd.DataFrame:
    """A row for each column of a use: id (the column and what is wrong with it), and its expected and found type, as text."""
    wanted = {field.name: str(field.type) for field in SCHEMAS[use]}
    nothing = "no such column"
    columns = [(name, wanted.get(name, nothing), found.get(name, nothing)) for name in sorted({*wanted, *found})]
    ids = [name if want == got else f"{name} (expected {want}, got {got})" for name, want, got in columns]
    return pd.DataFrame({"id": _strings(ids), "expected": _strings(c[1] for c in columns), "found": _strings(c[2] for c in columns)})


def _strings(values) -> pd.Series:
    return pd.Series(list(values), dtype="str")


def _conversation_columns(conversations: list[list[Message] | None]) -> dict[str, pd.Series]:
    """Computed once for each distinct conversation: most have many rows."""
    keys = [None if messages is None else json.dumps(messages, ensure_ascii=False) for messages in conversations]
    distinct = {key: messages for key, messages in zip(keys, conversations, strict=True) if messages is not None}
    views = {key: _views(messages) for key, messages in distinct.items()}
    nothing = (None, None, None)
    columns = list(zip(*(views.get(key, nothing) for key in keys), strict=True)) or [(), (), ()]
    names = ("roles", "shortest_message", "beginning")
    return {"conversation": _strings(keys), **{name: _strings(column) for name, column in zip(names, columns, strict=True)}}


def _views(messages: list[Message | None]) -> tuple[str, str | None, str]:
    """Roles, the shortest message and the canonical text of the beginning; nulls count as empty texts."""
    filled: list[Message] = [
        {"role": (m or {}).get("role") or "", "content": (m or {}).get("content") or "", "extra": (m or {}).get("extra")} for m in messages
    ]
    shortest = min((("" if is_blank(m["content"]) else m["content"].strip()) or m["extra"] or "" for m in filled), key=len, default=None)
    return ",".join(m["role"] for m in filled), shortest, conversation_text(beginning(filled))


def _token_columns(frame: pd.DataFrame, texts: tuple[str, ...], tokenizer: PreTrainedTokenizerBase) -> dict[str, pd.Series]:
    """tokens, template_error and, per text, <text>_tokens and <text>_decoded.

    Conversations with roles out of order or with an empty message are not encoded: other checks report them.
    """
    sound = frame["roles"].str.match(ROLE_ORDER).eq(True) & frame["shortest_message"].ne("")
    keys = frame["conversation"].where(sound).tolist()
    conversations = {key: json.loads(key) for key in frame["conversation"][sound].unique().tolist()}
    rendered = dict(zip(conversations, _render(tokenizer, list(conversations.values()), add_generation_prompt=True), strict=True))
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
        "control_token": _strings(in_messages.get(key) for key in keys),
        "template_error": _strings(str(rendered[key]) if key in rendered and key not in prompts else None for key in keys),
    }
    longest, joined, composed = np.zeros(len(frame)), *np.zeros((2, len(frame)), dtype=bool)
    for name in texts:
        found = [answers.get(row, _NO_ANSWER) for row in zip(keys, frame[name].tolist(), strict=True)]
        columns[f"{name}_tokens"] = pd.Series([answer.tokens for answer in found], dtype=float)
        columns[f"{name}_decoded"] = _strings(answer.decoded for answer in found)
        longest = np.fmax(longest, columns[f"{name}_tokens"])
        columns[f"{name}_end_token"] = _of_texts(frame[name], lambda text: end_token(text, own))
        controls = _of_texts(frame[name], lambda text: control_token([without_end_tokens(text, own)], own))
        columns["control_token"] = columns["control_token"].fillna(controls)
        joined |= np.array([answer.joined for answer in found], dtype=bool)
        composed |= np.array([answer.composed for answer in found], dtype=bool)
    prompt_tokens = pd.Series([len(prompt_ids[prompts[key]]) if key in prompts else np.nan for key in keys], dtype=float)
    end = turn_end(tokenizer) if prompts else TurnEnd((0,), ())
    behind = len(end.trained) * bool(texts) + len(end.after) * (len(texts) > 1)
    return columns | {"tokens": prompt_tokens + longest + (behind or 1), "joined": pd.Series(joined), "composed": pd.Series(composed)}


def _of_texts(texts: pd.Series, of: Callable[[str], str | None]) -> pd.Series:
    """`of` of each text, computed once for each distinct one; missing where the text is."""
    found = {text: of(text) for text in texts.dropna().unique().tolist()}
    return _strings(found.get(text) for text in texts.tolist())


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
    """(conversation's key, response) -> how it is trained on.

    A template may trim a response and lay out its thoughts, or add empty ones. If it rewrites the answer, training would see another text
    than the policy writes: then `decoded` is that other text.
    """
    found = {}
    for part in in_parts(rows):
        complete = _render(tokenizer, [[*conversations[key], {"role": "assistant", "content": text}] for key, text in part])
        turns = [_turn(tokenizer, conversations[key], text, prompts[key]) for key, text in part]
        fitting = [(row, turn, whole) for row, turn, whole in zip(part, turns, complete, strict=True) if isinstance(turn, Turn)]
        found |= {row: _Answer(0, str(turn)) for row, turn in zip(part, turns, strict=True) if not isinstance(turn, Turn)}
        texts = [prompts[key] for (key, _), _, _ in fitting]
        written = ids_behind(tokenizer, texts, [turn for _, turn, _ in fitting], trained_end(tokenizer), prompt_ids=prompt_ids)
        decoded: dict[tuple[int, ...], str] = {}
        for (row, turn, whole), prompt, behind in zip(fitting, texts, written, strict=True):
            ids = (*prompt_ids[prompt][-BACK:], *behind.ids)
            if ids not in decoded:
                decoded[ids] = _without_end(response_text(tokenizer, prompt_ids[prompt], behind.ids, special=True), tokenizer)
            kept = _keeps_answer(decoded[ids], row[1], turn, str(whole), prompt, tokenizer)
            tokens = len(behind.ids) - len(turn_end(tokenizer).trained)
            composed = kept is None and not row[1].isascii() and _composed(row[1]) != row[1] and _composed(row[1]) in decoded[ids]
            found[row] = _Answer(tokens, row[1] if kept is None else kept, behind.joined is not None, composed)
    return found


def _turn(tokenizer: PreTrainedTokenizerBase, messages: list[Message], text: str, prompt: str) -> Turn | Unrenderable:
    try:
        return written_turn(tokenizer, messages, {"role": "assistant", "content": text}, prompt)
    except Unrenderable as error:
        return error


def _without_end(text: str, tokenizer: PreTrainedTokenizerBase) -> str:
    return text.removesuffix(tokenizer.decode(turn_end(tokenizer).trained, skip_special_tokens=False))


def _keeps_answer(decoded: str, text: str, turn: Turn, whole: str, prompt: str, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """None if the model learns the text `text`; else what it learns instead."""
    if copies_response(tokenizer):
        if not whole.startswith(prompt + text):  # a template that copies responses may still make exceptions
            return whole.removeprefix(prompt)
        return None if _composed(decoded) == _composed(text) else decoded
    return None if _composed(decoded).rstrip().endswith(_composed(answer_of(text).strip())) else decoded


def _composed(text: str) -> str:
    return text if text.isascii() else unicodedata.normalize("NFC", text)


def _kinds(frame: pd.DataFrame) -> tuple[pd.Series, pd.Series]:
    """Masks: rows that are pairs, and rows with one text only."""
    return frame["chosen"].notna() & frame["rejected"].notna(), frame["chosen"].notna() ^ frame["rejected"].notna()


def _preference_columns(frame: pd.DataFrame) -> dict[str, pd.Series]:
    is_pair, is_unpaired = _kinds(frame)
    measured = is_pair & frame["chosen_tokens"].notna() & frame["rejected_tokens"].notna()
    longer = (np.sign(frame["chosen_tokens"] - frame["rejected_tokens"]) + 1) / 2
    return {
        "is_pair": is_pair.astype(int),
        "chosen_is_longer": longer.where(measured),
        "is_chosen": frame["chosen"].notna().astype(float).where(is_unpaired),
    }


def _render(tokenizer: PreTrainedTokenizerBase, conversations: list[list[Message]], **options: bool) -> list[str | Unrenderable]:
    """Each conversation as the chat template writes it, or the template's refusal."""
    if not conversations:
        return []
    prepared = [for_template(tokenizer, conversation) for conversation in conversations]
    try:
        texts = tokenizer.apply_chat_template(prepared, tokenize=False, **options)
    except Exception:  # a template is a program and may raise anything; one by one, to find the conversation
        texts = None
    if texts is None or any(map(too_long, texts, conversations)):
        return [_render_one(tokenizer, conversation, **options) for conversation in conversations]
    return texts


def _render_one(tokenizer: PreTrainedTokenizerBase, conversation: list[Message], **options: bool) -> str | Unrenderable:
    try:
        return render(tokenizer, conversation, waits=options.get("add_generation_prompt", False))
    except Unrenderable as error:
        return error


def measure_table(use: str, table: pq.ParquetFile, tokenizer: PreTrainedTokenizerBase) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Two tables: `measure` of all rows with stand-ins; and each row's conversation (hash of its beginning) and split.

    The second table is empty for a use without conversations.
    """
    frames, places = [], [pd.DataFrame()]
    for rows in _parts(table):
        measured = measure(use, rows, tokenizer)
        frames.append(_without_sound_texts(use, measured))
        if "beginning" in measured:
            places.append(pd.DataFrame({"conversation": _hashes(measured["beginning"]), "split": measured["split"]}))
    frame = pd.DataFrame({name: pd.concat([part.pop(name) for part in frames], ignore_index=True) for name in list(frames[0])})
    if "pair" in frame:
        _restore_repeated_pairs(frame, table)
    place = pd.concat(places, ignore_index=True)
    return _narrow(frame), place.astype({"split": "category"}) if len(place) else place


def across_uses(tables: dict[str, pq.ParquetFile], places: dict[str, pd.DataFrame]) -> pd.DataFrame:
    """All conversations of all uses: id (`<use>:<id>`), beginning, split; stand-ins unless a beginning is in two splits.

    Args:
        places: use -> the second table of `measure_table`.
    """
    places = {use: of_use for use, of_use in places.items() if len(of_use)}
    if not places:
        return pd.DataFrame(columns=["id", "beginning", "split"])
    splits = pd.CategoricalDtype(sorted(set().union(*(of_use["split"].cat.categories for of_use in places.values()))))
    rows = pd.concat({use: of_use.astype({"split": splits}) for use, of_use in places.items()})
    distinct = rows.dropna().drop_duplicates()["conversation"]
    leaked = rows["conversation"].isin(distinct[distinct.duplicated()]) & rows["split"].notna()
    texts = [read_texts(use, _rows_at(tables[use], leaked[use])) for use in places]
    found = pd.concat(of_use.assign(id=f"{use}:" + of_use["id"]) for use, of_use in zip(places, texts, strict=True))
    present = {"id": slice(None), "beginning": rows["conversation"].notna(), "split": rows["split"].notna()}
    columns = {name: _mostly_blank(found[name], leaked.to_numpy(), present[name]) for name in present}
    return pd.DataFrame(columns)


def _mostly_blank(found: pd.Series, where: np.ndarray, present: pd.Series | slice) -> pd.Categorical:
    """Categories, one byte a row: the texts `found` at the rows of the mask `where`, a stand-in at other rows that are `present`."""
    texts = pd.Categorical([ANY, *found])
    codes = np.full(len(where), -1, dtype=np.int8 if len(texts.categories) < 128 else np.int32)
    codes[present] = texts.codes[0]
    codes[where] = texts.codes[1:]
    return pd.Categorical.from_codes(codes, dtype=texts.dtype)


def _narrow(frame: pd.DataFrame) -> pd.DataFrame:
    """With texts as categories, which take one byte for a stand-in; the same categories in all columns, so that columns can be compared."""
    texts = [name for name in frame.select_dtypes("str") if name not in DISTINCT]
    categories = sorted(set().union(*(frame[name].dropna().unique() for name in texts)))
    kind = pd.CategoricalDtype(pd.Index(categories, dtype="str"))
    columns = {}
    for name in list(frame):  # one by one: only one column is in memory twice
        column = frame.pop(name)
        columns[name] = column.astype(kind) if name in texts else column
    return pd.DataFrame(columns)


def _parts(table: pq.ParquetFile) -> Iterator[list[dict]]:
    """The rows, some thousand at a time; one empty part if there are none."""
    parts = (batch.to_pylist() for batch in read_batches(table))
    yield next(parts, [])
    yield from parts


def _without_sound_texts(use: str, measured: pd.DataFrame) -> pd.DataFrame:
    """With stand-ins for texts without faults, and a hash in place of each pair."""
    sound = _sound(use, measured)
    columns = {name: measured[name].mask(sound & measured[name].notna(), text) for name, text in STAND_INS.items() if name in measured}
    if "pair" in measured:
        columns["pair"] = _hashes(measured["pair"]).astype("str")
    unused = ["beginning", "joined", "composed", *(f"{text}_tokens" for text in TEXT_COLUMNS[use])]
    return measured.drop(columns=unused, errors="ignore").assign(**columns)


def _sound(use: str, measured: pd.DataFrame) -> pd.Series:
    """Rows whose texts pass every check on single rows. A missing text passes and stays missing."""
    sound = pd.Series(True, index=measured.index)
    for text in TEXT_COLUMNS[use]:
        sound &= measured[text].str.contains(VISIBLE) | measured[text].isna()
        if (decoded := f"{text}_decoded") in measured:
            sound &= measured[text].eq(measured[decoded]) | measured[decoded].isna()
    if use != "pretrain":
        sound &= measured["roles"].str.fullmatch(ROLE_ORDER).eq(True) & measured["shortest_message"].str.strip().ne("")
    if use == "preference":
        sound &= measured["chosen"].str.strip().ne(measured["rejected"].str.strip())
    return sound


def _hashes(texts: pd.Series) -> pd.Series:
    """A 64-bit hash of each text; missing where the text is."""
    hashes = pd.util.hash_array(texts.fillna("").to_numpy(object), categorize=False)
    return pd.Series(hashes, index=texts.index, dtype="UInt64").mask(texts.isna())


def _restore_repeated_pairs(frame: pd.DataFrame, table: pq.ParquetFile) -> None:
    """Put the texts of pair and preference back where several rows have the same pair."""
    repeated = frame["pair"].duplicated(keep=False) & frame["pair"].notna()
    columns = pair_columns(read_texts("preference", _rows_at(table, repeated)))
    for name, column in columns.items():
        frame.loc[repeated, name] = column.to_numpy()


def _rows_at(table: pq.ParquetFile, wanted: pd.Series) -> list[dict]:
    """The rows where a mask, [rows] bool, is true."""
    found: list[dict] = []
    start = 0
    for batch in read_batches(table) if wanted.any() else ():
        found += batch.filter(pa.array(wanted.iloc[start : start + batch.num_rows])).to_pylist()
        start += batch.num_rows
    return found
