"""From sources to files of the canonical schema, a few thousand rows at a time.

Which rows of a source stay, and their ids, depend on all of them. So each source is first laid aside with ids and splits, and what its
weight leaves of it is copied. Meanwhile the id of every row is in memory and a hash of it, which tells what comes again (`Ids`; of a
prompt another one, in `read_source`), eight bytes each. Not read in pieces: a .json file, and the rows of the built-in clerk.
"""

from __future__ import annotations

from array import array
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from rlhf_core.config import DataConfig, SourceConfig
from rlhf_core.data.dropping import REASONS, contradictory, fault, sources_that_drop, take_out
from rlhf_core.data.samples import Writer
from rlhf_core.data.schema import SCHEMAS, SLICES_SCHEMA, RowWriter, open_rows, read_batches, slice_rows
from rlhf_core.data.seen import in_parts
from rlhf_core.data.sources import read_source
from rlhf_core.data.split import Ids, conversation_text, hexadecimal, kept, split_of
from rlhf_core.data.tally import Tally
from rlhf_core.progress import counted

SLICES = pa.field("slices", pa.map_(pa.string(), pa.string()))


@dataclass(frozen=True)
class Mixed:
    """What was written; what is left out of the files afterwards is counted here too.

    counts: (source, use, split) -> rows.
    tallies: source -> what its records came to.
    """

    counts: Counter[tuple[str, str, str]]
    tallies: dict[str, Tally]

    @property
    def dropped(self) -> dict[str, dict[str, int]]:
        """Source -> reason -> records or rows left out."""
        return {source: dict(sorted(tally.left_out.items())) for source, tally in self.tallies.items()}

    @property
    def uses(self) -> list[str]:
        """Those that have rows, in the order of SCHEMAS."""
        return [use for use in SCHEMAS if any(use == of and rows for (_, of, _), rows in self.counts.items())]


def mix(
    config: DataConfig, folder: Path, *, scratch: Path, seed: int, writer: Writer | None = None, max_dropped_fraction: float = 1.0
) -> Mixed:
    """Write the rows of all sources, mixed by weight and split: `<use>.parquet` for the uses that have rows, and slices.parquet.

    Args:
        writer: for sources of kind samples.
        max_dropped_fraction: of what a source could have given for a use.
    Raises:
        What `read_source` does.
        ValueError: more of a source is left out than that.
    """
    heaviest = max(source.weight for source in config.sources)
    counts: Counter[tuple[str, str, str]] = Counter()
    tallies = {}
    with ExitStack() as stack:
        schemas = SCHEMAS | {"slices": SLICES_SCHEMA}
        files = {name: stack.enter_context(RowWriter(folder / f"{name}.parquet", schema)) for name, schema in schemas.items()}
        for source in config.sources:
            ids, tally = _lay_aside(source, config, scratch, seed=seed, writer=writer)
            tallies[source.name] = tally
            tally.check(source.name, source.uses, limit=max_dropped_fraction)
            for use, of_use in ids.items():
                stays = kept(of_use, source.weight / heaviest, config.max_rows)
                splits = _copy(_aside(scratch, use), stays, files[use], files["slices"])
                counts.update({(source.name, use, split): rows for split, rows in splits.items()})
                tally.mixed[use] = splits.total()
    mixed = Mixed(counts, tallies)
    if (names := sources_that_drop(config, "contradictory")) and (folder / "preference.parquet").exists():
        leaves = contradictory(folder / "preference.parquet", names)
        leave_out_rows(folder, mixed, "preference", leaves, "contradictory")
        check_shares(config, mixed, max_dropped_fraction)
    return mixed


def leave_out_rows(folder: Path, mixed: Mixed, use: str, leaves: np.ndarray, kind: str) -> None:
    """Take the rows of a mask, [rows] bool, out of a use's file for one of REASONS, and count them in `mixed`."""
    for row in take_out(folder / f"{use}.parquet", leaves):
        mixed.counts[row["source"], use, row["split"]] -= 1
        mixed.tallies[row["source"]].leave_out_row(REASONS[kind], use, row, later=True)


def check_shares(config: DataConfig, mixed: Mixed, limit: float) -> None:
    for source in config.sources:
        mixed.tallies[source.name].check(source.name, source.uses, limit=limit)


def _aside(scratch: Path, use: str) -> Path:
    return scratch / f"{use}.parquet"


def _lay_aside(
    source: SourceConfig, config: DataConfig, scratch: Path, *, seed: int, writer: Writer | None
) -> tuple[dict[str, np.ndarray], Tally]:
    """Write all rows of a source, with ids, splits and slices; return the ids by use, of those that have rows, and what was left out."""
    tally = Tally()
    numbers = {use: array("Q") for use in source.uses}
    ids = {use: Ids(source.name) for use in source.uses}
    with ExitStack() as stack:
        files = {use: stack.enter_context(RowWriter(_aside(scratch, use), SCHEMAS[use].append(SLICES))) for use in source.uses}
        rows = counted(read_source(source, seed=seed, dropped=tally.left_out, writer=writer), f"rows of {source.name}")
        for part in in_parts(rows):
            for use, of_use in _without_faults(part, source, tally).items():
                of_part = ids[use].of_next(of_use)
                numbers[use].frombytes(of_part.tobytes())
                for row_id, row in zip(of_part.tolist(), of_use, strict=True):
                    files[use].add({"id": hexadecimal(row_id), "source": source.name, "split": _split(row, config), **row})
    return {use: np.frombuffer(of_use, dtype=np.uint64) for use, of_use in numbers.items() if of_use}, tally


def _without_faults(part: list[tuple[str, dict]], source: SourceConfig, tally: Tally) -> dict[str, list[dict]]:
    """Use -> rows, without those that the source drops for what they are alone, which are counted."""
    kept: dict[str, list[dict]] = {use: [] for use in source.uses}
    for use, row in part:
        tally.read[use] += 1
        if (kind := fault(row, source.drop)) is None:
            kept[use].append(row)
        else:
            tally.leave_out_row(REASONS[kind], use, row)
    return kept


def _split(row: dict, config: DataConfig) -> str:
    text = row["text"] if "text" in row else conversation_text(row["messages"])
    return split_of(
        text,
        validation_fraction=config.validation_fraction,
        test_fraction=config.test_fraction,
        promotion_fraction=config.promotion_fraction,
    )


def _copy(path: Path, stays: np.ndarray, rows: RowWriter, slices: RowWriter) -> Counter[str]:
    """Copy the rows that stay; return how many there are of each split."""
    splits: Counter[str] = Counter()
    start = 0
    for batch in read_batches(open_rows(path)):
        part = batch.filter(pa.array(stays[start : start + batch.num_rows]))
        start += batch.num_rows
        rows.write(part.drop_columns([SLICES.name]))
        splits.update(part["split"].to_pylist())
        for row_id, of_row in zip(part["id"].to_pylist(), part[SLICES.name].to_pylist(), strict=True):
            for row in slice_rows(row_id, of_row or ()):
                slices.add(row)
    return splits
