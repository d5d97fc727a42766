"""The table of held-out prompts, and of external ones, with the training rows that nearly have them or contain them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rlhf_core.config import ExternalPairsConfig
from rlhf_core.data.schema import SPLITS, Message, Split, read_batches
from rlhf_core.preparation.near_duplicates import Named, compare
from rlhf_core.preparation.sources import load_source

COLUMNS = ("group", "id", "near", "contained")


def prompts_repeated_in_training(tables: Mapping[str, pq.ParquetFile], external: Sequence[ExternalPairsConfig]) -> pd.DataFrame:
    """Return a row for each distinct prompt that training should not have, at most near_duplicates.MAX_PROMPTS of a group.

    Columns: group (a split, or gate.external.<name>); id (`<use>:<id>`, or `<group>:<origin>`); near and contained: the id of a training
    row, or missing (rlhf_core/preparation/near_duplicates.py).

    Args:
        tables: use -> prepared rows.
    Raises:
        ValueError, FileNotFoundError: external pairs can't be read.
    """
    heldout = {split: _rows(tables, split) for split in SPLITS if split != "train"}
    compared = compare({**heldout, **{f"gate.external.{e.name}": _external(e) for e in external}}, lambda: _rows(tables, "train"))
    rows = [(group, prompt.name, prompt.near, prompt.contained) for group, prompts in compared.items() for prompt in prompts]
    return pd.DataFrame(rows, columns=COLUMNS, dtype="str")


def _rows(tables: Mapping[str, pq.ParquetFile], split: Split) -> Iterator[Named]:
    """Yield the conversations of a split. Rows without an id or with an incomplete message are left out: other checks report them."""
    for use, table in tables.items():
        if "messages" in table.schema_arrow.names:
            for batch in read_batches(table, ["id", "split", "messages"]):
                for row in batch.filter(pc.fill_null(pc.equal(batch["split"], pa.scalar(split)), False)).to_pylist():
                    if row["id"] is not None and _is_complete(row["messages"]):
                        yield f"{use}:{row['id']}", row["messages"]


def _is_complete(messages: Sequence[Message | None] | None) -> bool:
    return bool(messages) and all(m is not None and m["role"] is not None and m["content"] is not None for m in messages)


def _external(config: ExternalPairsConfig) -> Iterator[Named]:
    for row in load_source(config.source(), seed=0).rows["preference"]:
        yield f"gate.external.{config.name}:{row['origin']}", row["messages"]
