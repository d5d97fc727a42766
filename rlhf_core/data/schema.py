"""The canonical data schema: what prepare_data writes and every later stage reads.

`data/prepared/` holds one Parquet file per use, with these columns:

    pretrain.parquet     id, source, split, text
    sft.parquet          id, source, split, messages, response
    preference.parquet   id, source, split, messages, chosen, rejected
    prompt.parquet       id, source, split, messages, label

messages: the conversation up to and including the last user message, a list of {"role", "content"}; roles system, user,
    assistant, alternating after an optional system message.
response, chosen, rejected: text of the assistant's next message. Unpaired feedback is a preference row in which one of
    chosen and rejected is null.
label: for verifiable tasks, the expected answer as text; null otherwise.
A source that says so (`slices`) has beside them what its pairs can be told apart by, for the gate:

    slices.parquet       id (of a preference row), column, value

id: unique within a use, stable under a change of order: a hash of source and content.
split: train, validation or test, by a hash of the conversation, the same in every use.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypedDict

import pyarrow as pa
import pyarrow.parquet as pq

if TYPE_CHECKING:
    import pandas as pd

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = ("train", "validation", "test")


class Message(TypedDict):
    role: str
    content: str


MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
_COMMON = [("id", pa.string()), ("source", pa.string()), ("split", pa.string())]
SCHEMAS: dict[str, pa.Schema] = {
    "pretrain": pa.schema([*_COMMON, ("text", pa.string())]),
    "sft": pa.schema([*_COMMON, ("messages", MESSAGES), ("response", pa.string())]),
    "preference": pa.schema([*_COMMON, ("messages", MESSAGES), ("chosen", pa.string()), ("rejected", pa.string())]),
    "prompt": pa.schema([*_COMMON, ("messages", MESSAGES), ("label", pa.string())]),
}

SLICES_SCHEMA = pa.schema([("id", pa.string()), ("column", pa.string()), ("value", pa.string())])


def write_rows(folder: Path, use: str, rows: list[dict]) -> None:
    """Write the rows of one use; the schema is enforced, so a wrong type raises pyarrow.ArrowInvalid."""
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMAS[use]), folder / f"{use}.parquet", compression="zstd")


def read_rows(folder: Path, use: str, split: Split | None = None) -> list[dict]:
    """The rows of one use, of one split or of all, in file order."""
    filters = None if split is None else [("split", "=", split)]
    return pq.read_table(folder / f"{use}.parquet", filters=filters).to_pylist()


def read_frame(folder: Path, use: str) -> pd.DataFrame:
    return pq.read_table(folder / f"{use}.parquet").to_pandas()


def write_slices(folder: Path, slices: dict[str, dict[str, str]]) -> None:
    """Write id -> column -> value."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{"id": i, "column": column, "value": value} for i, of_row in slices.items() for column, value in of_row.items()]
    pq.write_table(pa.Table.from_pylist(rows, schema=SLICES_SCHEMA), folder / "slices.parquet", compression="zstd")


def read_slices(folder: Path) -> dict[str, dict[str, str]]:
    """id -> column -> value; empty where no source has any."""
    path = folder / "slices.parquet"
    found: dict[str, dict[str, str]] = {}
    for row in pq.read_table(path).to_pylist() if path.is_file() else []:
        found.setdefault(row["id"], {})[row["column"]] = row["value"]
    return found
