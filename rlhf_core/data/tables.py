"""Tables."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from rlhf_core.config import SourceConfig, shown
from rlhf_core.data.places import data_set_commit, data_sets_cache, locate
from rlhf_core.data.values import MAX_NAME, Found
from rlhf_core.provenance.file_hashes import FileHashes, files_below

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict

MAX_RATIO = 200  # texts shrink to a fifth, a row again and again to a hundredth; zeros to a thousandth
PARQUET_ROWS = 64  # in memory at once; a text of them may be long
PARQUET_FREE_BYTES = 2**26  # as GZIP_FREE_BYTES; small tables are mostly what Parquet says of them
BATCH_BYTES = 2**30  # of memory, for PARQUET_ROWS

DATA_SET_BYTES = 2**32  # of memory, for the library `datasets` to read a row or to convert a file

CALLS = ("tool_calls", "function_call")  # keys of messages, with objects in them that differ in their keys


def parquet_records(path: Path, source: SourceConfig) -> Iterator[Found]:
    """Rows, a few at a time: a text that is kept once may stand in a million of them, and what a file says of its size may be a lie."""
    number = unpacked = 0
    try:
        with pq.ParquetFile(path) as file:
            groups = (file.metadata.row_group(group) for group in range(file.num_row_groups))
            _check_unpacked(path, sum(group.total_byte_size for group in groups))
            schema = file.schema_arrow
            batches = file.iter_batches(batch_size=PARQUET_ROWS)
            for records in limited((batch.to_pylist() for batch in batches), BATCH_BYTES):
                unpacked += _characters(records)  # not what Arrow says of the batch: of a text that it keeps once, that is one
                _check_unpacked(path, unpacked)
                for record in records:
                    number += 1
                    yield Found(f"row {number}", drop_added_nulls(record, schema))
    except MemoryError as error:
        got = f"more after {number} rows"
        raise ValueError(
            f"{shown(str(path), MAX_NAME)}: expected {PARQUET_ROWS} rows of at most {BATCH_BYTES} bytes in memory, got {got}; don't use it"
        ) from error
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        got = f"{shown(str(error))} after {number} rows"
        raise ValueError(f"{shown(str(path), MAX_NAME)}: expected a Parquet file, got: {got}; fetch or convert it again") from error


def _characters(value: Any) -> int:
    """Of all texts in it."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_characters, value.values()))
    return sum(map(_characters, value)) if isinstance(value, list) else 0


def _check_unpacked(path: Path, unpacked: int) -> None:
    """Raises ValueError: a Parquet file holds more than its size allows for."""
    size = path.stat().st_size
    if unpacked > max(PARQUET_FREE_BYTES, MAX_RATIO * size):
        raise ValueError(
            f"{shown(str(path), MAX_NAME)}: expected at most {MAX_RATIO} times its size of {size} bytes when unpacked, got more; "
            "make it JSON lines if that is right"
        )


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


def data_set_records(source: SourceConfig) -> Iterator[Found]:
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


def drop_added_nulls(record: dict[str, Any], schema: pa.Schema) -> dict[str, Any]:
    """The record, without the nulls in its tool calls.

    A table gives all objects of a column the keys of all of them: {"city": "Rome"} becomes {"city": "Rome", "amount": null} where another
    row has an amount. Such nulls and a user's own can't be told apart; calls that are JSON text keep theirs.
    """
    for field in schema:
        _drop(record.get(field.name), field.type, inside=field.name in CALLS)
    return record


def _drop(value: Any, of: pa.DataType, *, inside: bool) -> None:
    if isinstance(value, dict) and pa.types.is_struct(of):
        for field in of:
            if inside and value.get(field.name) is None:
                value.pop(field.name, None)
            else:
                _drop(value.get(field.name), field.type, inside=inside or field.name in CALLS)
    elif isinstance(value, list) and _is_list(of) and pa.types.is_nested(of.value_type):
        for inner in value:
            _drop(inner, of.value_type, inside=inside)


def _is_list(of: pa.DataType) -> bool:
    return pa.types.is_list(of) or pa.types.is_large_list(of) or pa.types.is_fixed_size_list(of)


@contextmanager
def limited_memory(more: int) -> Iterator[None]:
    """What runs inside may take so many bytes more than the process has now; then it gets a MemoryError in the place of the machine's.

    Exact to about 1 GiB, which Arrow's allocator takes in advance. Only on Linux, whose kernel counts.
    """
    if sys.platform != "linux":
        yield
        return
    pa.allocate_buffer(1)  # what the allocator takes in advance is then counted before the limit
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = _data_bytes() + more
    if soft != resource.RLIM_INFINITY and soft < limit:
        yield
        return
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def limited(items: Iterable[Any], more: int) -> Iterator[Any]:
    """The items, each made within so many bytes. Raises MemoryError where one takes more."""
    iterator = iter(items)
    end = object()
    while True:
        with limited_memory(more):
            item = next(iterator, end)
        if item is end:
            return
        yield item


def _data_bytes() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData:"))
    return int(line.split()[1]) * 1024
