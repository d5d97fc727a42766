"""Where rows of prepared data come from and how they start, for a message about them."""

from __future__ import annotations

from collections.abc import Collection

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rlhf_core.data.schema import ORIGIN, read_batches
from rlhf_core.data.tally import named, start_of

_READ = ("id", ORIGIN, "messages", "text")


def places(file: pq.ParquetFile, ids: Collection[str]) -> dict[str, str]:
    """id -> where the row's record stands and how its text starts, of the ids that the file has."""
    wanted = pa.array(sorted(ids), type=pa.string())
    found: dict[str, str] = {}
    for batch in read_batches(file, [name for name in _READ if name in file.schema_arrow.names]) if ids else ():
        for row in batch.filter(pc.is_in(batch["id"], value_set=wanted)).to_pylist():
            found.setdefault(row["id"], named(row.get(ORIGIN), start_of(row)))
    return found
