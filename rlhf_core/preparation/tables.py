"""Records of Parquet files and of Hugging Face data sets, within limits on the memory that a hostile file may take (docs/security.md)."""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from rlhf_core.config import SourceConfig, shown
from rlhf_core.data.places import data_set_commit, data_sets_cache, locate
from rlhf_core.preparation.values import MAX_NAME, RawRecord
from rlhf_core.provenance.file_hashes import FileHashes, files_below

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict

MAX_RATIO = 200  # unpacked to packed size. Texts shrink to a fifth, one row repeated to a hundredth, zeros to a thousandth
PARQUET_ROWS = 64  # in memory at once: each may hold a long text
PARQUET_FREE_BYTES = 2**26  # unpacked, up to which MAX_RATIO doesn't count: small tables are mostly metadata
BATCH_BYTES = 2**30  # of memory for PARQUET_ROWS
DATA_SET_BYTES = 2**32  # of memory for the library `datasets` to read a row or to convert a file
CALLS = ("tool_calls", "function_call")  # keys of messages that hold objects with different keys


def parquet_records(path: Path, source: SourceConfig) -> Iterator[RawRecord]:
    """Yield the rows of a Parquet file, a few at a time: a million rows may share one stored text, and the sizes in its metadata may be
    wrong.
    """
    number = unpacked = 0
    name = shown(str(path), MAX_NAME)
    try:
        with pq.ParquetFile(path) as file:
            groups = (file.metadata.row_group(group) for group in range(file.num_row_groups))
            _check_unpacked(path, sum(group.total_byte_size for group in groups))
            schema = file.schema_arrow
            features = features_of(schema)
            batches = file.iter_batches(batch_size=PARQUET_ROWS)
            for records in limited((batch.to_pylist() for batch in batches), BATCH_BYTES):
                unpacked += _characters(records)  # counted here: Arrow counts a shared text once
                _check_unpacked(path, unpacked)
                for record in records:
                    number += 1
                    yield RawRecord(f"row {number}", named_classes(drop_added_nulls(record, schema), features, f"{name} row {number}"))
    except MemoryError as error:
        limit = f"expected {PARQUET_ROWS} rows of at most {BATCH_BYTES} bytes in memory, got more after {number} rows"
        raise ValueError(f"{name}: {limit}; use another file") from error
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        got = f"{shown(str(error))} after {number} rows"
        raise ValueError(f"{name}: expected a Parquet file, got: {got}; fetch or convert it again") from error


def _characters(value: Any) -> int:
    """Return the total length of the texts inside a value."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_characters, value.values()))
    return sum(map(_characters, value)) if isinstance(value, list) else 0


def _check_unpacked(path: Path, unpacked: int) -> None:
    """Check that so many unpacked bytes aren't too many for the file's size. Raises ValueError."""
    size = path.stat().st_size
    if unpacked > max(PARQUET_FREE_BYTES, MAX_RATIO * size):
        raise ValueError(
            f"{shown(str(path), MAX_NAME)}: expected at most {MAX_RATIO} times its size of {size} bytes when unpacked, got more; "
            "make it JSON lines if that is right"
        )


def data_set_records(source: SourceConfig) -> Iterator[RawRecord]:
    """Yield the records of a Hugging Face data set, by name (from the cache unless HF_HUB_OFFLINE=0) or from a local folder."""
    from datasets import Dataset, DatasetDict, load_dataset

    subject = f"source {source.name}: data set {shown(source.path, MAX_NAME)}"
    folder = locate(source.path)
    try:
        with limited_memory(DATA_SET_BYTES):
            if any((folder / name).exists() for name in ("dataset_dict.json", "state.json")):
                data = _saved(folder.resolve())
            elif folder.exists():
                data = _converted_folder(folder.resolve(), source)
            else:
                data = load_dataset(source.path, source.subset, split=source.dataset_split, revision=_commit(source))
    except MemoryError as error:
        raise ValueError(f"{subject}: expected at most {DATA_SET_BYTES} bytes to read it, got more; use another data set") from error
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
    data.info.features = _undecoded(data.features)  # `cast` would write a copy of the data set into its folder
    schema, number = data.features.arrow_schema, 0
    features = features_of(schema)
    try:
        for number, record in enumerate(limited(data, DATA_SET_BYTES), start=1):
            where = f"{shown(source.path, MAX_NAME)} row {number}"
            yield RawRecord(where, named_classes(drop_added_nulls(record, schema), features, where))
    except MemoryError as error:
        got = f"more after row {number}"
        raise ValueError(f"{subject}: expected at most {DATA_SET_BYTES} bytes to read a row, got {got}; use another data set") from error


def _undecoded(feature: Any) -> Any:
    """Return the features without the decoding of pictures, which are read as bytes and paths."""
    from datasets import Features, Image, List

    if isinstance(feature, Image):
        return Image(decode=False)
    if isinstance(feature, List):
        return List(_undecoded(feature.feature), length=feature.length)
    if isinstance(feature, dict):
        return (
            type(feature)({name: _undecoded(inner) for name, inner in feature.items()})
            if isinstance(feature, Features)
            else {name: _undecoded(inner) for name, inner in feature.items()}
        )
    return feature


def _commit(source: SourceConfig) -> str | None:
    """Return the commit at which a data set of the hub is read, as stage hash_inputs records it; None: the library reports that there is
    none.

    Raises:
        ValueError: the hub may not be reached, and the cache holds another commit than the source's revision. The library would read it.
    """
    commit = data_set_commit(source.path, source.revision, source.subset)
    if commit is None and source.revision is not None:
        raise ValueError(f"revision {shown(source.revision)} isn't the one that the cache has, or that was prepared last in it")
    return commit


class _Outside(ValueError):
    """A folder's data are outside of it, where stage hash_inputs doesn't track them."""


def _saved(folder: Path) -> Dataset | DatasetDict:
    """Open a data set that `save_to_disk` wrote.

    Raises:
        _Outside: see `_check_below`.
    """
    from datasets import DatasetDict, load_from_disk

    data = load_from_disk(str(folder), keep_in_memory=False)  # in memory it wouldn't list its files
    for part in data.values() if isinstance(data, DatasetDict) else [data]:
        _check_below(folder, (entry["filename"] for entry in part.cache_files))
    return data


def _converted_folder(folder: Path, source: SourceConfig) -> Dataset:
    """Open a folder of data files. The library converts them into its cache, into a folder for each content.

    The library itself would tell contents apart by the files' times, which a copy may keep.

    Raises:
        _Outside: see `_check_below`.
    """
    from datasets import load_dataset, load_dataset_builder

    cache = str(data_sets_cache() / ".by_content" / FileHashes(Path()).of(folder).sha256)
    builder = load_dataset_builder(str(folder), source.subset, cache_dir=cache)
    files = builder.config.data_files or {}
    _check_below(folder, (name.rpartition("::")[2] for names in files.values() for name in names))  # archive.zip after ::
    return load_dataset(str(folder), source.subset, split=source.dataset_split, cache_dir=cache)


def _check_below(folder: Path, names: Iterable[str]) -> None:
    """Check that all of the files are among those that stage hash_inputs hashes.

    Args:
        folder: absolute, without links.
    Raises:
        _Outside: one isn't.
    """
    hashed = set(files_below(folder))
    for name in names:
        if (file := Path(name)).parent.resolve() / file.name not in hashed:  # a linked file is hashed, a linked folder isn't
            raise _Outside(f"expected data files in the folder, got {shown(name, MAX_NAME)}; put it there, and name it by its path in it")


def drop_added_nulls(record: dict[str, Any], schema: pa.Schema) -> dict[str, Any]:
    """Return the record, changed in place, without the nulls that a table adds to its tool calls.

    A table gives all objects of a column the same keys: {"city": "Rome"} becomes {"city": "Rome", "amount": null} if another row has an
    amount. Such nulls look like the user's own. Calls that are JSON text keep theirs.
    """
    for field in schema:
        _drop_nulls(record.get(field.name), field.type, inside=field.name in CALLS)
    return record


def _drop_nulls(value: Any, of: pa.DataType, *, inside: bool) -> None:
    is_list = pa.types.is_list(of) or pa.types.is_large_list(of) or pa.types.is_fixed_size_list(of)
    if isinstance(value, dict) and pa.types.is_struct(of):
        for field in of:
            if inside and value.get(field.name) is None:
                value.pop(field.name, None)
            else:
                _drop_nulls(value.get(field.name), field.type, inside=inside or field.name in CALLS)
    elif isinstance(value, list) and is_list and pa.types.is_nested(of.value_type):
        for inner in value:
            _drop_nulls(inner, of.value_type, inside=inside)


def features_of(schema: pa.Schema) -> dict[str, Any]:
    """Return the columns whose numbers have names, as the library `datasets` describes them in a table's metadata; empty if none has."""
    try:
        features = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))["info"]["features"]
        return {name: feature for name, feature in features.items() if '"ClassLabel"' in json.dumps(feature)}
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
        return {}


def named_classes(record: dict[str, Any], features: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the record, changed in place, with the classes' names instead of their numbers: 0 may be called good.

    Raises:
        ValueError: a number has no name.
    """
    for name, feature in features.items():
        if name in record:
            record[name] = _named(record[name], feature, f"{where}: column {shown(repr(name), 60)}")
    return record


def _named(value: Any, feature: Any, where: str) -> Any:
    if isinstance(value, list):
        inner = feature.get("feature", feature) if isinstance(feature, dict) else feature[0] if isinstance(feature, list) else feature
        return [_named(item, inner, where) for item in value]
    if not isinstance(feature, dict):
        return value
    if isinstance(value, dict):  # a list of objects may be stored as an object of lists
        inner = feature.get("feature", feature) if isinstance(feature.get("_type"), str) else feature
        return {key: _named(item, inner.get(key), where) for key, item in value.items()} if isinstance(inner, dict) else value
    names = feature.get("names") if feature.get("_type") == "ClassLabel" else None
    if not isinstance(names, list) or not isinstance(value, int) or value == -1:  # -1: no label
        return None if names and value == -1 else value
    if not 0 <= value < len(names):
        raise ValueError(f"{where}: expected the number of one of {len(names)} classes, got {value}; correct it")
    return names[value]


@contextmanager
def limited_memory(more: int) -> Iterator[None]:
    """Raise MemoryError if the code inside takes `more` bytes beyond what the process has now, before the machine runs out of memory.

    Exact to about 1 GiB, which Arrow's allocator reserves. Linux only: elsewhere there is no limit.
    """
    if sys.platform != "linux":
        yield
        return
    pa.allocate_buffer(1)  # the allocator's reserve then counts as memory that the process has
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData:"))
    limit = int(line.split()[1]) * 1024 + more
    if soft != resource.RLIM_INFINITY and soft < limit:
        yield
        return
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def limited(items: Iterable[Any], more: int) -> Iterator[Any]:
    """Yield the items, each made with at most `more` bytes. Raises MemoryError if one takes more."""
    iterator = iter(items)
    end = object()
    while True:
        with limited_memory(more):
            item = next(iterator, end)
        if item is end:
            return
        yield item
