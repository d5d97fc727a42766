"""From data.sources to the files of the canonical schema: read, convert, weight, split, write, some thousand rows at a time.

Which rows of a source stay, and their ids, depend on all of its rows. So `mix` first writes each source to a scratch file with ids and
splits, then copies the rows that its weight leaves. Memory: for every row its id and a hash that finds repetitions, eight bytes each. Only
a .json file and the rows of the built-in clerk are read as a whole.
"""

from __future__ import annotations

import logging
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from rlhf_core.config import DataConfig, SourceConfig, shown
from rlhf_core.data.clerk.generator import clerk_rows
from rlhf_core.data.hashing import Ids, SeenKeys, chunks, conversation_text, hexadecimal, kept_by_weight, split_of, split_text, text_hash
from rlhf_core.data.schema import ORIGIN, SCHEMAS, SLICES_SCHEMA, RowWriter, open_rows, read_batches
from rlhf_core.data.shapes import shape_records
from rlhf_core.preparation.drops import DropCounts, Dropped, Misfit, Tally, excerpt
from rlhf_core.preparation.files import file_records
from rlhf_core.preparation.filters import REASONS, KeptRows, contradictory_rows, duplicate_rows, row_fault
from rlhf_core.preparation.formats import STEP_SEPARATOR, convert
from rlhf_core.preparation.notation import AS_MESSAGES, beginning, check_signs, notation_of, with_messages
from rlhf_core.preparation.pictures import PictureStore, SourcePictures
from rlhf_core.preparation.samples import Writer, sample_rows
from rlhf_core.preparation.tables import data_set_records
from rlhf_core.preparation.values import MAX_NAME, RawRecord, find_value, unread_keys
from rlhf_core.progress import counted

MISFITS = 100  # records at the beginning of a source without its format, after which reading stops
NO_ROWS = "nothing in it for the source's uses"
NO_PAIR = "records without a pair of a better and a worse completion"
# Columns that have a meaning in many data sets. They are read only if the source maps them; else a warning names them.
WELL_KNOWN = ("system", "system_prompt", "history", "context", "tools", "functions")
_MESSAGE_COLUMNS = ("prompt", "messages", "chosen", "rejected", "first", "second", "completion")  # our columns that can hold messages
SLICES = pa.field("slices", pa.map_(pa.string(), pa.string()))

log = logging.getLogger("rlhf")
SHAPE_RECORDS = 4000  # of a source of kind shapes


def records_of(source: SourceConfig) -> Iterator[RawRecord]:
    """Return the records of a source of kind file or huggingface, with messages where texts write them down. Raises what `read_source`
    does.
    """
    return with_messages(file_records(source) if source.kind == "file" else data_set_records(source))


def read_source(
    source: SourceConfig,
    *,
    seed: int,
    dropped: DropCounts,
    writer: Writer | None = None,
    records: Iterable[RawRecord] | None = None,
    separator: str | None = None,
    pictures: PictureStore | None = None,
) -> Iterator[tuple[str, dict]]:
    """Yield (use, row) for each row of the uses that the source declares; rows have no id, source and split yet.

    Rows of files and data sets have their `origin`: the file, named as in the params, and the line. A prompt that repeats an earlier one
    is dropped: it would count twice in an evaluation.

    Args:
        dropped: gets the reasons and counts of what is left out; complete after the last row.
        writer: the model that writes the texts of a source of kind samples.
        records: read these instead of `records_of(source)`.
        separator: between the steps of rows of the use stepwise.
        pictures: where the pictures of a model that sees are kept.
    Raises:
        ValueError: a file, a line or a column doesn't match the source, or (after the last row) one of the uses got no row.
        FileNotFoundError: the path doesn't exist.
    """
    if source.kind == "clerk":
        yield from ((use, row) for use in source.uses for row in clerk_rows(source.clerk, use, seed))
        return
    if source.kind == "samples":
        file = None if source.path is None else source.prompts_source
        prompts = None if file is None else (row for _, row in _converted(records_of(file), file, dropped))
        rows = sample_rows(source, seed=seed, writer=writer, dropped=dropped, prompts=prompts)
    else:
        seen = None if pictures is None else SourcePictures(source, pictures)
        records = _own_records(source, seed) if records is None else records
        rows = _converted(records, source, dropped, separator or STEP_SEPARATOR, seen)
    given: Counter[str] = Counter()
    seen = SeenKeys()
    for chunk in chunks(rows):
        keys = [text_hash(conversation_text(row["messages"])) for use, row in chunk if use == "prompt"]
        repeats = iter(seen.count_and_add(np.array(keys, dtype=np.uint64)) > 0)
        for use, row in chunk:
            if use == "prompt" and next(repeats):
                dropped["prompt rows that repeat a conversation"] += 1
            else:
                given[use] += 1
                yield use, row
    for use in source.uses:
        if not given[use]:
            raise ValueError(
                f"source {source.name}: expected rows for {use}, got none from {shown(source.path or 'the model', MAX_NAME)} "
                f"({dropped.summary()}); check its {'rule' if source.kind == 'samples' else 'format and columns'}, "
                f"or take {use} out of its uses"
            )


def _own_records(source: SourceConfig, seed: int) -> Iterator[RawRecord]:
    if source.kind != "shapes":
        return records_of(source)
    return (RawRecord(f"record {number}", values) for number, values in enumerate(shape_records(SHAPE_RECORDS, seed), start=1))


def _converted(
    records: Iterable[RawRecord],
    source: SourceConfig,
    dropped: DropCounts,
    separator: str = STEP_SEPARATOR,
    pictures: SourcePictures | None = None,
) -> Iterator[tuple[str, dict]]:
    """Yield the rows of all records that can be converted.

    Raises:
        ValueError: no record has the source's format, or -1 occurs among marks that are read as 1 and 0.
    """
    refusal: ValueError | None = None  # of the first record that doesn't have the format
    misfits, fits = 0, False
    first, records = beginning(records)
    notation = notation_of([record.values for record in first], source)
    assumed = [record.note for record in first[:1] if AS_MESSAGES in record.note]
    for sentence in (*assumed, *notation.read, *notation.unsure):
        log.warning("source %s: %s", source.name, sentence)
    for where, values, note in records:
        dropped.read += 1
        if columns := _unmapped_columns(values, source):
            dropped.unmapped.update(columns)
        if keys := _unread_message_keys(values, source):
            dropped.count_message_keys(keys)
        try:
            check_signs(values, source, notation)
        except ValueError as error:
            raise ValueError(f"source {source.name}: {where}: {error}") from error
        try:
            converted = convert(values, source, notation, separator=separator, pictures=pictures)
        except Dropped as reason:
            dropped.add(str(reason), where, values)
            continue
        except Misfit as error:
            dropped.add(error.reason, where, values)
            misfits += 1
            record = f"{excerpt(values)}{f'; {note}' if note else ''}"
            refusal = refusal or ValueError(f"source {source.name}: {where}: {error} (the record: {record})")
            if not fits and misfits == MISFITS:
                raise refusal from error
            continue
        fits = True
        rows = [(use, row) for use in source.uses for row in converted.get(use, [])]
        if not rows:
            dropped.mention(NO_ROWS, where, values)
        elif "preference" in source.uses and not converted.get("preference"):
            dropped.mention(NO_PAIR, where, values)
        yield from ((use, {**row, ORIGIN: where}) for use, row in rows)
    if refusal is not None and not fits:
        raise refusal
    for column, number in dropped.unmapped.items():
        log.warning(
            "source %s: %d records have a column %r, which is not used; if it belongs to the conversation, map it in the source's "
            "columns, or leave these records out",
            *(source.name, number, column),
        )
    if dropped.message_keys:
        counts = (f"{key!r} ({number} record{'s' * (number > 1)})" for key, number in dropped.message_keys.most_common())
        log.warning("source %s: messages have keys that are not used: %s", source.name, ", ".join(counts))


def _unmapped_columns(values: Mapping[str, Any], source: SourceConfig) -> list[str]:
    """Return the columns of WELL_KNOWN that the record fills and the source doesn't map."""
    filled = [name for name in WELL_KNOWN if values.get(name)]
    if not filled:
        return []
    mapped = {path for theirs in source.columns.values() for path in ([theirs] if isinstance(theirs, str) else theirs)}
    return [name for name in filled if name not in mapped]


def _unread_message_keys(values: Mapping[str, Any], source: SourceConfig) -> set[str]:
    """Return the keys of the record's messages that no format reads. They don't hold content, which would drop the record."""
    conversations = [find_value(values, source.columns.get(name, name)) for name in _MESSAGE_COLUMNS]
    if source.format in ("graded", "ranked"):
        graded = find_value(values, source.columns.get("completions", "completions"))
        items = [item for item in graded if isinstance(item, Mapping)] if isinstance(graded, list) else []
        conversations += [find_value(item, source.columns.get("completion", "completion")) for item in items]
    return {key for value in conversations for key in unread_keys(value)}


@dataclass(frozen=True)
class Loaded:
    """One source in memory. rows: use -> rows without id, source and split; dropped: what was left out."""

    rows: dict[str, list[dict]]
    dropped: DropCounts


def load_source(source: SourceConfig, *, seed: int) -> Loaded:
    """Read all rows of a source into memory. Raises what `read_source` does."""
    loaded = Loaded({use: [] for use in source.uses}, DropCounts())
    for use, row in read_source(source, seed=seed, dropped=loaded.dropped):
        loaded.rows[use].append(row)
    return loaded


@dataclass(frozen=True)
class Mixed:
    """What `mix` wrote, and what is dropped of it later.

    counts: (source, use, split) -> rows.
    tallies: source -> what became of its records.
    rows: use -> the rows of its file.
    """

    counts: Counter[tuple[str, str, str]]
    tallies: dict[str, Tally]
    rows: dict[str, KeptRows] = field(compare=False)

    @property
    def dropped(self) -> dict[str, dict[str, int]]:
        """Source -> reason -> records or rows left out."""
        return {source: dict(sorted(tally.left_out.items())) for source, tally in self.tallies.items()}

    @property
    def uses(self) -> list[str]:
        """The uses that have rows, in the order of SCHEMAS."""
        return [use for use in SCHEMAS if any(use == of and rows for (_, of, _), rows in self.counts.items())]

    def drop(self, use: str, dropped: np.ndarray) -> Iterator[dict]:
        """Drop the rows of a mask over a use's kept rows, [rows] bool, also from `counts`; yields them."""
        for row in self.rows[use].drop(dropped):
            self.counts[row["source"], use, row["split"]] -= 1
            yield row

    def drop_as(self, kind: str, use: str, dropped: np.ndarray) -> None:
        """Drop the rows of a mask and count them under one of REASONS."""
        for row in self.drop(use, dropped):
            self.tallies[row["source"]].drop_row(REASONS[kind], use, row, later=True)

    def check_shares(self, config: DataConfig, limit: float) -> None:
        """Check that at most the share `limit` of each source was dropped. Raises ValueError."""
        for source in config.sources:
            self.tallies[source.name].check(source.name, source.uses, limit=limit)


def mix(
    config: DataConfig,
    folder: Path,
    *,
    scratch: Path,
    seed: int,
    writer: Writer | None = None,
    max_dropped_fraction: float = 1.0,
    step_separator: str | None = None,
    pictures: PictureStore | None = None,
) -> Mixed:
    """Write the rows of all sources, weighted and split: `<use>.parquet` for the uses that have rows, and slices.parquet. Rows that are
    dropped then are in the files until `KeptRows.write`.

    Args:
        writer: the model for sources of kind samples.
        max_dropped_fraction: of what a source could have given for a use.
        step_separator: between the steps of rows of the use stepwise.
        pictures: where the pictures of a model that sees are kept.
    Raises:
        What `read_source` does.
        ValueError: more than `max_dropped_fraction` of a source is dropped.
    """
    heaviest = max(source.weight for source in config.sources)
    mixed = Mixed(Counter(), {}, {})
    with ExitStack() as stack:
        schemas = SCHEMAS | {"slices": SLICES_SCHEMA}
        files = {name: stack.enter_context(RowWriter(folder / f"{name}.parquet", schema)) for name, schema in schemas.items()}
        for source in config.sources:
            tally = mixed.tallies[source.name] = Tally()
            ids = _write_source(source, config, scratch, tally, seed=seed, writer=writer, separator=step_separator, pictures=pictures)
            tally.check(source.name, source.uses, limit=max_dropped_fraction)
            for use, of_use in ids.items():
                stays = kept_by_weight(of_use, source.weight / heaviest, config.max_rows)
                splits = _copy(scratch / f"{use}.parquet", stays, files[use], files["slices"])
                mixed.counts.update({(source.name, use, split): rows for split, rows in splits.items()})
                tally.mixed[use] = splits.total()
    mixed.rows.update({use: KeptRows(folder / f"{use}.parquet") for use in mixed.uses})
    for kind, rows_of in (("contradictory", contradictory_rows), ("duplicate", duplicate_rows)):
        names = {source.name for source in config.sources if kind in source.drop}
        if names and "preference" in mixed.uses:
            mixed.drop_as(kind, "preference", rows_of(mixed.rows["preference"], names))
            mixed.check_shares(config, max_dropped_fraction)
    return mixed


def _write_source(
    source: SourceConfig,
    config: DataConfig,
    scratch: Path,
    tally: Tally,
    *,
    seed: int,
    writer: Writer | None,
    separator: str | None,
    pictures: PictureStore | None,
) -> dict[str, np.ndarray]:
    """Write all rows of a source to `scratch`, with ids, splits and slices. Returns use -> ids, [rows] uint64, of the uses with rows."""
    numbers = {use: array("Q") for use in source.uses}
    ids = {use: Ids(source.name) for use in source.uses}
    fractions = {name: getattr(config, name) for name in ("validation_fraction", "test_fraction", "promotion_fraction")}
    with ExitStack() as stack:
        files = {use: stack.enter_context(RowWriter(scratch / f"{use}.parquet", SCHEMAS[use].append(SLICES))) for use in source.uses}
        read = read_source(source, seed=seed, dropped=tally.left_out, writer=writer, separator=separator, pictures=pictures)
        rows = counted(read, f"rows of {source.name}")
        for chunk in chunks(rows):
            kept: dict[str, list[dict]] = {use: [] for use in source.uses}
            for use, row in chunk:
                tally.read[use] += 1
                if (fault := row_fault(row, source.drop)) is None:
                    kept[use].append(row)
                else:
                    tally.drop_row(REASONS[fault], use, row)
            for use, of_use in kept.items():
                of_chunk = ids[use].assign(of_use)
                numbers[use].frombytes(of_chunk.tobytes())
                for row_id, row in zip(of_chunk.tolist(), of_use, strict=True):
                    split = split_of(split_text(row), **fractions)
                    files[use].add({"id": hexadecimal(row_id), "source": source.name, "split": split, **row})
    return {use: np.frombuffer(of_use, dtype=np.uint64) for use, of_use in numbers.items() if of_use}


def _copy(path: Path, stays: np.ndarray, rows: RowWriter, slices: RowWriter) -> Counter[str]:
    """Copy the rows that stay. Returns the number of rows of each split."""
    splits: Counter[str] = Counter()
    start = 0
    for batch in read_batches(open_rows(path)):
        part = batch.filter(pa.array(stays[start : start + batch.num_rows]))
        start += batch.num_rows
        rows.write(part.drop_columns([SLICES.name]))
        splits.update(part["split"].to_pylist())
        for row_id, of_row in zip(part["id"].to_pylist(), part[SLICES.name].to_pylist(), strict=True):
            for column, value in of_row or ():
                slices.add({"id": row_id, "column": column, "value": value})
    return splits
