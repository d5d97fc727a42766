"""Where rows come from: the built-in clerk, files, Hugging Face data sets, and a model's own samples."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rlhf_core.config import SourceConfig, shown
from rlhf_core.data.clerk.generator import clerk_rows
from rlhf_core.data.columnar import drop_added_nulls
from rlhf_core.data.dropped import Dropped, LeftOut, Misfit, excerpt
from rlhf_core.data.files import MAX_NAME, Found, file_records
from rlhf_core.data.formats import convert
from rlhf_core.data.memory import limited, limited_memory
from rlhf_core.data.places import data_set_commit, data_sets_cache, locate
from rlhf_core.data.record import message_keys, unmapped
from rlhf_core.data.samples import Writer, sample_rows
from rlhf_core.data.schema import ORIGIN
from rlhf_core.data.seen import Seen, in_parts, key_of
from rlhf_core.data.split import conversation_text
from rlhf_core.provenance.file_hashes import FileHashes, files_below

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict

DATA_SET_BYTES = 2**32  # of memory, for the library `datasets` to read a row or to convert a file
MISFITS = 100  # records in a row without the source's format, at its beginning, after which no further one is read
EMPTY_HANDED = "nothing in it for the source's uses"
NO_PAIR = "graded records without a pair: all completions are good, or all bad"

log = logging.getLogger("rlhf")


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
    return file_records(source) if source.kind == "file" else _hub_records(source)


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


def _commit(source: SourceConfig) -> str | None:
    """At which a data set of the hub is read, the one that stage hash_inputs records; None: there is none, as the library then says.

    Raises:
        ValueError: the cache, which alone may be asked, has another one than the source wants. The library would take that.
    """
    commit = data_set_commit(source.path, source.revision, source.subset)
    if commit is None and source.revision is not None:
        raise ValueError(f"revision {shown(source.revision)} isn't the one that the cache has, or that was prepared last in it")
    return commit


class _Outside(ValueError):
    """A folder's data are elsewhere, where nothing watches them."""


def _saved(folder: Path) -> Dataset | DatasetDict:
    """What `save_to_disk` has written.

    Raises:
        _Outside: see `_check_below`.
    """
    from datasets import DatasetDict, load_from_disk

    data = load_from_disk(str(folder), keep_in_memory=False)  # in memory it wouldn't tell its files
    for part in data.values() if isinstance(data, DatasetDict) else [data]:
        _check_below(folder, (entry["filename"] for entry in part.cache_files))
    return data


def _converted_folder(folder: Path, source: SourceConfig) -> Dataset:
    """A folder of data files, which the library converts into its cache: a part of its own for each content.

    The library itself tells contents apart by the files' times, which a copy may keep.

    Raises:
        _Outside: see `_check_below`.
    """
    from datasets import load_dataset, load_dataset_builder

    content = FileHashes(Path()).of(folder).sha256
    cache = str(data_sets_cache() / ".by_content" / content)
    builder = load_dataset_builder(str(folder), source.subset, cache_dir=cache)
    files = builder.config.data_files or {}
    _check_below(folder, (name.rpartition("::")[2] for names in files.values() for name in names))  # archive.zip after ::
    return load_dataset(str(folder), source.subset, split=source.dataset_split, cache_dir=cache)


def _check_below(folder: Path, names: Iterable[str]) -> None:
    """All of the files are among those that stage hash_inputs hashes.

    Args:
        folder: absolute, without links.
    Raises:
        _Outside: one isn't.
    """
    hashed = set(files_below(folder))
    for name in names:
        if (file := Path(name)).parent.resolve() / file.name not in hashed:  # a linked file is hashed, a linked folder isn't
            raise _Outside(f"expected data files in the folder, got {shown(name, MAX_NAME)}; put it there, and name it by its path in it")


def _hub_records(source: SourceConfig) -> Iterator[Found]:
    """The records of a Hugging Face data set, by name (from the cache unless HF_HUB_OFFLINE=0) or from a local folder."""
    from datasets import Dataset, DatasetDict, load_dataset

    subject = f"source {source.name}: data set {shown(source.path, MAX_NAME)}"
    saved = locate(source.path)
    is_saved = any((saved / name).exists() for name in ("dataset_dict.json", "state.json"))
    try:
        with limited_memory(DATA_SET_BYTES):
            if is_saved:
                data = _saved(saved.resolve())
            elif saved.exists():
                data = _converted_folder(saved.resolve(), source)
            else:
                data = load_dataset(source.path, source.subset, split=source.dataset_split, revision=_commit(source))
    except MemoryError as error:
        raise ValueError(f"{subject}: expected one that is read within {DATA_SET_BYTES} bytes, got more; don't use it") from error
    except _Outside as error:
        raise ValueError(f"{subject}: {error}") from error
    except (OSError, ValueError) as error:
        reason = shown((str(error).strip() or type(error).__name__).splitlines()[0], 400)
        raise ValueError(
            f"{subject}: expected a cached name or a local folder, got: {reason}; "
            "correct path, subset, dataset_split or revision, or set HF_HUB_OFFLINE=0 to download"
        ) from error
    if isinstance(data, DatasetDict):
        if source.dataset_split not in data:
            raise ValueError(f"{subject}: expected a split {source.dataset_split!r}, got {list(data)}; set dataset_split")
        data = data[source.dataset_split]
    assert isinstance(data, Dataset)
    schema, number = data.features.arrow_schema, 0
    try:
        for number, record in enumerate(limited(data, DATA_SET_BYTES), start=1):
            yield Found(f"{shown(source.path, MAX_NAME)} row {number}", drop_added_nulls(record, schema))
    except MemoryError as error:
        got = f"more after row {number}"
        raise ValueError(f"{subject}: expected rows that are read within {DATA_SET_BYTES} bytes, got {got}; don't use it") from error
