"""The canonical data schema: what prepare_data writes and every later stage reads.

`data/prepared/` holds one Parquet file per use, with these columns:

    pretrain.parquet     id, source, split, text, origin
    sft.parquet          id, source, split, messages, response, origin
    preference.parquet   id, source, split, messages, chosen, rejected, origin
    stepwise.parquet     id, source, split, messages, response, labels, origin
    prompt.parquet       id, source, split, messages, label, origin

messages: the conversation up to the last message of the user or of a tool, a list of {"role", "content"}. Roles: system (optional,
    first), then user and assistant in turn; tool messages answer an assistant that calls tools. `content` is text. Other keys of a message
    are in `extra`, a JSON object: tool_calls, tool_call_id, name, and content in parts as it was; in the first message also `tools`, the
    JSON schemas of the conversation's tools. The column has the field `extra` only if some message needs it.
response, chosen, rejected: text of the assistant's next message. Unpaired feedback is a preference row in which one of
    chosen and rejected is null.
labels: of each step of a stepwise row's response, which reward.step_separator divides: 1 right, 0 neutral, -1 wrong.
label: for verifiable tasks, the expected answer as text; null otherwise.
A source with the key `slices` also gives the values that the gate groups its pairs by, and a curriculum orders prompts by:

    slices.parquet       id (of a preference, stepwise or prompt row), column, value

id: unique within a use and independent of the order of rows: a hash of source and content.
origin: the place of the row's record: a file's path as in params.yaml and its line, or a data set's name and its row; null if the row
    wasn't read from anywhere. Validation names it; trainers don't read it.
split: by a hash of the conversation's beginning, the same in every use. train; validation: evaluated during training; test: for the gate
    and the evaluation; promotion: only for promoting rounds of iterative DPO.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict

import pyarrow as pa
import pyarrow.parquet as pq

Split = Literal["train", "validation", "test", "promotion"]
SPLITS: tuple[Split, ...] = ("train", "validation", "test", "promotion")


class Message(TypedDict):
    role: str
    content: str
    extra: NotRequired[str | None]


MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
WIDE_MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string()), ("extra", pa.string())]))
TEXTS = ("text", "response", "chosen", "rejected")  # columns of one text
ORIGIN = "origin"
_COMMON = [("id", pa.string()), ("source", pa.string()), ("split", pa.string())]
_ORIGIN = (ORIGIN, pa.string())
SCHEMAS: dict[str, pa.Schema] = {
    "pretrain": pa.schema([*_COMMON, ("text", pa.string()), _ORIGIN]),
    "sft": pa.schema([*_COMMON, ("messages", MESSAGES), ("response", pa.string()), _ORIGIN]),
    "preference": pa.schema([*_COMMON, ("messages", MESSAGES), ("chosen", pa.string()), ("rejected", pa.string()), _ORIGIN]),
    "stepwise": pa.schema([*_COMMON, ("messages", MESSAGES), ("response", pa.string()), ("labels", pa.list_(pa.int8())), _ORIGIN]),
    "prompt": pa.schema([*_COMMON, ("messages", MESSAGES), ("label", pa.string()), _ORIGIN]),
}

SLICES_SCHEMA = pa.schema([("id", pa.string()), ("column", pa.string()), ("value", pa.string())])

ROWS_AT_ONCE = 8192  # in memory, of files that need not fit
ROW_GROUP_BYTES = 2**25  # uncompressed, of a file written piece by piece; a smaller file has the same bytes as by `write_rows`


def extras(message: Message) -> dict[str, Any]:
    """Return a message's further keys."""
    return json.loads(message.get("extra") or "{}")


def with_tools(messages: list[Message], tools: list[dict[str, Any]]) -> list[Message]:
    """Return a conversation with the JSON schemas of its tools; unchanged without any."""
    if not tools:
        return messages
    first = {**messages[0], "extra": json.dumps({**extras(messages[0]), "tools": tools}, ensure_ascii=False)}
    return [first, *messages[1:]]


def edgeless(messages: Sequence[Message | None]) -> list[Message | None]:
    """Return the messages without white space at the edges of their texts; a missing message stays None."""
    return [{**m, "content": m["content"].strip()} if m and m["content"] else m for m in messages]


def whole_message(message: Message) -> dict[str, Any]:
    """Return the message as a chat template takes it: role, content (text, or parts if it was in parts) and further keys."""
    return {"role": message["role"], "content": message["content"], **extras(message)}


def joined_parts(parts: list[dict[str, str]]) -> str:
    """Return the text of a message in parts, joined as servers do for a template that takes no parts."""
    return "\n".join(part["text"] for part in parts)


def with_text_behind(message: Message, text: str) -> Message:
    """Return the message with text appended; content in parts gets another part."""
    longer: Message = {**message, "content": message["content"] + text}
    more = extras(message)
    if "content" in more:
        longer["extra"] = json.dumps({**more, "content": [*more["content"], {"type": "text", "text": text}]}, ensure_ascii=False)
    return longer


def with_text(message: Message, text: str) -> Message:
    """Return the message with another text in place of its own, in parts or not."""
    more = {key: value for key, value in extras(message).items() if key != "content"}
    plain: Message = {"role": message["role"], "content": text}
    return {**plain, "extra": json.dumps(more, ensure_ascii=False)} if more else plain


class RowWriter:
    """Writes a Parquet file piece by piece, in row groups; without rows there is no file.

    The schema is enforced: a wrong type raises a pyarrow.ArrowException. Messages get the field `extra` with the first row that needs it;
    the rows before it are then rewritten.
    """

    def __init__(self, path: Path, schema: pa.Schema):
        self._path, self._schema = path, schema
        self._rows: list[dict] = []
        self._batches: list[pa.RecordBatch] = []
        self._waiting = 0  # bytes of the batches
        self._file: pq.ParquetWriter | None = None

    def __enter__(self) -> RowWriter:
        return self

    def __exit__(self, kind, error, traceback) -> None:
        if error is None:
            self._convert()
            self._flush()
        if self._file is not None:
            self._file.close()

    def add(self, row: dict) -> None:
        self._rows.append(row)
        if len(self._rows) >= ROWS_AT_ONCE:
            self._convert()

    def write(self, batch: pa.RecordBatch) -> None:
        if _is_wide(batch.schema) and not _is_wide(self._schema):
            self._widen()
        if _is_wide(self._schema) and not _is_wide(batch.schema):
            batch = pa.RecordBatch.from_pylist(batch.to_pylist(), schema=self._schema)
        if batch.num_rows:
            self._batches.append(batch)
            self._waiting += batch.nbytes
        if self._waiting >= ROW_GROUP_BYTES:
            self._flush()

    def _widen(self) -> None:
        waiting, self._batches, self._waiting = self._batches, [], 0
        self._schema = _widened(self._schema)
        if self._file is not None:
            self._file.close()
            self._file = None
            narrow = self._path.rename(self._path.with_suffix(".narrow"))
            for batch in read_batches(open_rows(narrow)):
                self.write(batch)
            narrow.unlink()
        for batch in waiting:
            self.write(batch)

    def _convert(self) -> None:
        if not _is_wide(self._schema) and _need_extra(self._rows):
            self._widen()
        for batch in pa.Table.from_pylist(self._rows, schema=self._schema).to_batches():  # several if a column has over 2 GB
            self.write(batch)
        self._rows = []

    def _flush(self) -> None:
        table = pa.Table.from_batches(self._batches, schema=self._schema).combine_chunks()
        self._batches, self._waiting = [], 0
        if table.num_rows:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._file or pq.ParquetWriter(self._path, self._schema, compression="zstd")
            self._file.write_table(table)


def _is_wide(schema: pa.Schema) -> bool:
    return "messages" in schema.names and "extra" in [field.name for field in schema.field("messages").type.value_type]


def _widened(schema: pa.Schema) -> pa.Schema:
    return schema.set(schema.get_field_index("messages"), pa.field("messages", WIDE_MESSAGES))


def _need_extra(rows: list[dict]) -> bool:
    return any(isinstance(m, dict) and m.get("extra") for row in rows for m in row.get("messages") or ())


def write_rows(folder: Path, use: str, rows: list[dict]) -> None:
    """Write the rows of one use; the schema is enforced, so a wrong type raises pyarrow.ArrowInvalid."""
    folder.mkdir(parents=True, exist_ok=True)
    schema = _widened(SCHEMAS[use]) if _need_extra(rows) else SCHEMAS[use]
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), folder / f"{use}.parquet", compression="zstd")


def read_rows(folder: Path, use: str, split: Split | None = None) -> list[dict]:
    """Return the rows of one use, of one split or of all, in file order, without their origin."""
    path, filters = folder / f"{use}.parquet", None if split is None else [("split", "=", split)]
    columns = [name for name in pq.read_schema(path).names if name != ORIGIN]
    return pq.read_table(path, columns=columns, filters=filters).to_pylist()


def open_rows(path: Path) -> pq.ParquetFile:
    """Open a file for `read_batches`. Pre-buffering would keep all of it in memory."""
    return pq.ParquetFile(path, pre_buffer=False)


def open_tables(folder: Path) -> dict[str, pq.ParquetFile]:
    """Open the files of the uses that have rows, for `read_batches`.

    Raises:
        ValueError: a file is not Parquet.
    """
    tables = {}
    for path in (folder / f"{use}.parquet" for use in SCHEMAS):
        if path.exists():
            try:
                tables[path.stem] = open_rows(path)
            except pa.ArrowInvalid as error:
                raise ValueError(f"{path}: expected a Parquet file, got: {error}; run prepare_data again") from error
    return tables


def read_batches(file: pq.ParquetFile, columns: list[str] | None = None) -> Iterator[pa.RecordBatch]:
    """Yield the rows in order, at most ROWS_AT_ONCE in memory. (A pyarrow Dataset holds ten times as many, even without read-ahead.)

    Raises:
        ValueError: the file is damaged.
    """
    try:
        yield from file.iter_batches(batch_size=ROWS_AT_ONCE, columns=columns)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"prepared data: expected whole Parquet files, got: {error}; run prepare_data again") from error


def read_slices(folder: Path) -> dict[str, dict[str, str]]:
    """Return the slices as id -> column -> value; empty if no source has slices."""
    path = folder / "slices.parquet"
    found: dict[str, dict[str, str]] = {}
    for row in pq.read_table(path).to_pylist() if path.is_file() else []:
        found.setdefault(row["id"], {})[row["column"]] = row["value"]
    return found
