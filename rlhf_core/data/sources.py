"""Sources."""

from __future__ import annotations

import logging
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from rlhf_core.config import DataConfig, SourceConfig, shown
from rlhf_core.data.clerk.generator import clerk_rows
from rlhf_core.data.drops import Dropped, LeftOut, Misfit, Tally, excerpt
from rlhf_core.data.files import file_records
from rlhf_core.data.filters import REASONS, contradictory, fault, sources_that_drop, take_out
from rlhf_core.data.formats import convert, message_keys, unmapped
from rlhf_core.data.hashing import Ids, Seen, conversation_text, hexadecimal, in_parts, kept, key_of, split_of
from rlhf_core.data.samples import Writer, sample_rows
from rlhf_core.data.schema import ORIGIN, SCHEMAS, SLICES_SCHEMA, RowWriter, open_rows, read_batches, slice_rows
from rlhf_core.data.tables import data_set_records
from rlhf_core.data.values import MAX_NAME, Found
from rlhf_core.progress import counted

if TYPE_CHECKING:
    pass

MISFITS = 100  # records in a row without the source's format, at its beginning, after which no further one is read
EMPTY_HANDED = "nothing in it for the source's uses"
NO_PAIR = "graded records without a pair: all completions are good, or all bad"

log = logging.getLogger("rlhf")

SLICES = pa.field("slices", pa.map_(pa.string(), pa.string()))


@dataclass(frozen=True)
class Loaded:
    """What one source gave.

    Attributes:
        rows: use -> rows without id, source and split.
        dropped: reason -> records left out, and the first of them.
    """

    rows: dict[str, list[dict]]
    dropped: LeftOut


def load_source(source: SourceConfig, *, seed: int) -> Loaded:
    """All rows of a source in memory. Raises what `read_source` does."""
    rows: dict[str, list[dict]] = {use: [] for use in source.uses}
    dropped = LeftOut()
    for use, row in read_source(source, seed=seed, dropped=dropped):
        rows[use].append(row)
    return Loaded(rows, dropped)


def records_of(source: SourceConfig) -> Iterator[Found]:
    """Of a source of kind file or huggingface. Raises what `read_source` does."""
    return file_records(source) if source.kind == "file" else data_set_records(source)


def read_source(
    source: SourceConfig,
    *,
    seed: int,
    dropped: LeftOut,
    writer: Writer | None = None,
    records: Iterable[Found] | None = None,
) -> Iterator[tuple[str, dict]]:
    """Use and row, one after the other, for the uses the source is declared for; of its prompts a hash of each stays in memory.

    Rows of files and data sets have their `origin`: the file, named as in the params, and the line.

    Args:
        dropped: counts, by reason, the records that are left out; complete after the last row.
        writer: the model whose samples a source of kind samples is made of.
        records: instead of all of `records_of`.
    Raises:
        ValueError: a file, a line or a column is not what the source says, or (after the last row) there is nothing for one of the uses.
        FileNotFoundError: the path doesn't exist.
    """
    if source.kind == "clerk":
        yield from ((use, row) for use in source.uses for row in clerk_rows(source.clerk, use, seed))
        return
    if source.kind == "samples":
        rows = sample_rows(source, seed=seed, writer=writer, dropped=dropped)
    else:
        rows = _converted(records_of(source) if records is None else records, source, dropped)
    given: Counter[str] = Counter()
    for use, row in _without_repeated_prompts(rows, dropped):
        given[use] += 1
        yield use, row
    for use in source.uses:
        if not given[use]:
            raise ValueError(
                f"source {source.name}: expected rows for {use}, got none from {shown(source.path or 'the model', MAX_NAME)} "
                f"({dropped.told()}); check its {'rule' if source.kind == 'samples' else 'format and columns'}, "
                f"or take {use} out of its uses"
            )


def _converted(records: Iterable[Found], source: SourceConfig, dropped: LeftOut) -> Iterator[tuple[str, dict]]:
    """The rows of all records that can be converted.

    Raises:
        ValueError: no record has the source's format.
    """
    refused: ValueError | None = None  # the first record's, as long as none has fitted
    misfits, fits = 0, False
    for where, values, note in records:
        dropped.read += 1
        if columns := unmapped(values, source):
            dropped.unmapped.update(columns)
        if keys := message_keys(values, source):
            dropped.ignore(keys)
        try:
            converted = convert(values, source)
        except Dropped as reason:
            dropped.add(str(reason), where, values)
            continue
        except Misfit as error:
            dropped.add(error.reason, where, values)
            misfits += 1
            refused = refused or _refusal(source, where, error, values, note)
            if not fits and misfits == MISFITS:
                raise refused from error
            continue
        fits = True
        rows = [(use, row) for use in source.uses for row in converted.get(use, [])]
        if not rows:
            dropped.mention(EMPTY_HANDED, where, values)
        elif "preference" in source.uses and not converted.get("preference"):
            dropped.mention(NO_PAIR, where, values)
        yield from ((use, {**row, ORIGIN: where}) for use, row in rows)
    if refused is not None and not fits:
        raise refused
    for column, number in dropped.unmapped.items():
        log.warning(
            "source %s: %d records have a column %r, which is not used; if it belongs to the conversation, map it in the source's "
            "columns, or leave these records out",
            *(source.name, number, column),
        )
    if dropped.message_keys:
        counts = (f"{key!r} ({number} record{'s' * (number > 1)})" for key, number in dropped.message_keys.most_common())
        log.warning("source %s: messages have keys that are not used: %s", source.name, ", ".join(counts))


def _refusal(source: SourceConfig, where: str, error: Misfit, values: dict, note: str) -> ValueError:
    """The error of a source of which no record can be used."""
    return ValueError(f"source {source.name}: {where}: {error} (the record: {excerpt(values)}{f'; {note}' if note else ''})")


def _without_repeated_prompts(rows: Iterable[tuple[str, dict]], dropped: Counter[str]) -> Iterator[tuple[str, dict]]:
    """A prompt that comes twice would count twice in an evaluation. Of each, 8 bytes of a hash stay in memory (`key_of`)."""
    seen = Seen()
    for part in in_parts(rows):
        keys = [key_of(conversation_text(row["messages"])) for use, row in part if use == "prompt"]
        again = iter(seen.count_and_add(np.array(keys, dtype=np.uint64)) > 0)
        for use, row in part:
            if use == "prompt" and next(again):
                dropped["prompt rows that repeat a conversation"] += 1
            else:
                yield use, row


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
