"""Where rows come from: the built-in clerk, files, Hugging Face data sets, and a model's own samples.

Every error names the file and, where it has one, the line, and what was there instead.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rlhf_core.config import SourceConfig, shown
from rlhf_core.data.clerk import clerk_rows
from rlhf_core.data.dropped import LeftOut
from rlhf_core.data.formats import convert
from rlhf_core.data.memory import limited, limited_memory
from rlhf_core.data.messages import MAX_CHARACTERS, Dropped
from rlhf_core.data.samples import Writer, sample_rows
from rlhf_core.data.schema import ORIGIN
from rlhf_core.data.seen import Seen, in_parts
from rlhf_core.data.split import conversation_text, text_key

# What no data set has and a hostile file may: see docs/security.md.
MAX_JSON_BYTES = 2**30  # of a .json file, which is read as a whole
GZIP_FREE_BYTES = 2**22  # unpacked, before the ratio counts
MAX_RATIO = 200  # texts shrink to a fifth, a row again and again to a hundredth; zeros to a thousandth
PARQUET_ROWS = 64  # in memory at once; a text of them may be long
PARQUET_FREE_BYTES = 2**26  # as GZIP_FREE_BYTES; small tables are mostly what Parquet says of them
BATCH_BYTES = 2**30  # of memory, for PARQUET_ROWS
DATA_SET_BYTES = 2**32  # of memory, for the library `datasets` to read a row or to convert a file


@dataclass(frozen=True)
class Loaded:
    """What one source gave.

    Attributes:
        rows: use -> rows without id, source and split.
        dropped: reason -> records left out.
    """

    rows: dict[str, list[dict]]
    dropped: dict[str, int]


def load_source(source: SourceConfig, *, seed: int) -> Loaded:
    """All rows of a source in memory. Raises what `read_source` does."""
    rows: dict[str, list[dict]] = {use: [] for use in source.uses}
    dropped = LeftOut()
    for use, row in read_source(source, seed=seed, dropped=dropped):
        rows[use].append(row)
    return Loaded(rows, dict(sorted(dropped.items())))


def read_source(source: SourceConfig, *, seed: int, dropped: LeftOut, writer: Writer | None = None) -> Iterator[tuple[str, dict]]:
    """Use and row, one after the other, for the uses the source is declared for; of its prompts a hash of each stays in memory.

    Args:
        dropped: counts, by reason, the records that are left out; complete after the last row.
        writer: the model whose samples a source of kind samples is made of.
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
        records = _file_records(locate(source.path)) if source.kind == "file" else _hub_records(source)
        rows = _converted(records, source, dropped)
    given: Counter[str] = Counter()
    for use, row in _without_repeated_prompts(rows, dropped):
        given[use] += 1
        yield use, row
    for use in source.uses:
        if not given[use]:
            raise ValueError(
                f"source {source.name}: expected rows for {use}, got none from {source.path or 'the model'} "
                f"(left out: {dict(dropped) or 'nothing'}); check its {'rule' if source.kind == 'samples' else 'format and columns'}, "
                f"or take {use} out of its uses"
            )


def _converted(records: Iterable[tuple[str, dict[str, Any]]], source: SourceConfig, dropped: LeftOut) -> Iterator[tuple[str, dict]]:
    here = str(locate(source.path))
    for where, values in records:
        dropped.read += 1
        origin = shown(
            source.path + where.removeprefix(here) if where.startswith(here) else where, 500
        )  # in params, the same in every clone
        try:
            converted = convert(values, source)
        except Dropped as reason:
            dropped.add(str(reason), origin, values)
            continue
        except ValueError as error:
            raise ValueError(f"source {source.name}: {where}: {error}") from error
        yield from ((use, {**row, ORIGIN: origin}) for use in source.uses for row in converted.get(use, []))


def _without_repeated_prompts(rows: Iterable[tuple[str, dict]], dropped: Counter[str]) -> Iterator[tuple[str, dict]]:
    """A prompt that comes twice would count twice in an evaluation. Of each, 8 bytes of a hash stay in memory.

    Of 10**7 prompts two others are taken for the same with a chance of 10**-5.
    """
    seen = Seen()
    for part in in_parts(rows):
        keys = [text_key(conversation_text(row["messages"]))[:8] for use, row in part if use == "prompt"]
        again = iter(seen.count_and_add(np.frombuffer(b"".join(keys), dtype=np.uint64)) > 0)
        for use, row in part:
            if use == "prompt" and next(again):
                dropped["prompt rows that repeat a conversation"] += 1
            else:
                yield use, row


def locate(path: str) -> Path:
    """A path relative to the workspace. In a git worktree, one that isn't there is taken relative to the main checkout.

    Runs with overrides work in worktrees under runs/; data that git doesn't track, and paths that leave the checkout
    such as ../shared/data, are found from there too.
    """
    here, link = Path(path), Path(".git")
    if not here.is_absolute() and not _exists(here) and link.is_file():
        repository = Path(link.read_text(encoding="utf-8").removeprefix("gitdir:").strip()).parents[1]
        if _exists(repository.parent / path):
            return repository.parent / path
    return here


def _exists(path: Path) -> bool:
    """Whether there is something, be it a link to nothing.

    Raises:
        ValueError: it can't be the path of anything.
    """
    try:
        return os.path.lexists(path) and (path.is_symlink() or path.exists())
    except (OSError, ValueError) as error:
        raise ValueError(f"{shown(str(path))}: expected a path, got: {shown(str(error))}; correct it") from error


def _file_records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Where each record stands and the record, of a file or of all files of a folder in the order of their names."""
    if not _exists(path):
        got = "nothing there; correct the path, relative to the project's folder"
        raise FileNotFoundError(f"{shown(str(path))}: expected a data file or folder, got {got}")
    files = sorted(p for p in path.rglob("*") if _reader(p) and not p.is_dir()) if path.is_dir() else [path]
    if not files:
        raise ValueError(f"{path}: expected files that end in {', '.join(_READERS)}, got a folder without any; correct the source's path")
    for file in files:
        reader = _reader(file)
        if reader is None:
            raise ValueError(f"{file}: expected a name that ends in {', '.join(_READERS)}, got {file.name}; convert or rename it")
        if not file.is_file():  # a pipe would be waited for, a link to nothing left out
            got = "something else" if file.exists() else "a link to nothing"
            raise ValueError(f"{file}: expected a file, got {got}; correct or remove it")
        count = 0
        try:
            for where, record in reader(file):
                count += 1
                yield f"{file}{where}", record
        except UnicodeDecodeError as error:
            got = f"byte {error.object[error.start]:#04x} after about {count} records"
            raise ValueError(f"{file}: expected UTF-8, got {got}; convert it to UTF-8") from error
        except (gzip.BadGzipFile, zlib.error, EOFError) as error:
            raise ValueError(f"{file}: expected a complete gzip file, got: {error}; fetch it again") from error
        except OSError as error:
            raise ValueError(f"{file}: expected a readable file, got: {error.strerror}; correct its permissions or its disk") from error
        if count == 0:
            raise ValueError(f"{file}: expected at least one record, got an empty file; remove it or correct the source's path")


def _reader(path: Path) -> Callable[[Path], Iterator[tuple[str, dict[str, Any]]]] | None:
    return next((reader for ending, reader in _READERS.items() if path.name.lower().endswith(ending)), None)


def _json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with _open_text(path) as file:
        for number, line in enumerate(_lines(file, path), start=1):
            if line.strip():
                yield f" line {number}", _object(_parse(line, f"{path} line {number}"), f"{path} line {number}")


def _json(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """A JSON file with a list of objects, all of it in memory."""
    if (size := path.stat().st_size) > MAX_JSON_BYTES:
        raise ValueError(f"{path}: expected at most {MAX_JSON_BYTES} bytes, got {size}; make it JSON lines, which are read one by one")
    with _open_text(path) as file:
        text = file.read()
    if not text.strip():
        return
    records = _parse(text, str(path))
    if not isinstance(records, list):
        raise ValueError(f"{path}: expected a list of objects, got {type(records).__name__}; name it .jsonl if it has one object a line")
    for number, record in enumerate(records, start=1):
        yield f" record {number}", _object(record, f"{path} record {number}")


def _csv(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    csv.field_size_limit(MAX_CHARACTERS)  # the default refuses texts over 131072 characters
    with _open_text(path, newline="") as file:
        reader = csv.DictReader(_lines(file, path), strict=True)
        try:
            if twice := [column for column, n in Counter(reader.fieldnames).items() if n > 1]:
                raise ValueError(f"{path} line 1: expected different columns, got {shown(twice[0])} twice; rename one")
            for record in reader:
                if None in record or None in record.values():
                    fields = sum(v is not None for k, v in record.items() if k is not None) + len(record.get(None, []))
                    raise ValueError(
                        f"{path} line {reader.line_num}: expected {len(reader.fieldnames)} fields as in the header, got {fields}; "
                        "quote fields that contain commas"
                    )
                yield f" line {reader.line_num}", record
        except csv.Error as error:
            raise ValueError(f"{path} line {reader.line_num}: expected CSV, got: {error}; correct that line") from error


def _parquet(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Rows, a few at a time: a text that is kept once may stand in a million of them, and what a file says of its size may be a lie."""
    number = unpacked = 0
    try:
        with pq.ParquetFile(path) as file:
            groups = (file.metadata.row_group(group) for group in range(file.num_row_groups))
            _check_unpacked(path, sum(group.total_byte_size for group in groups))
            batches = file.iter_batches(batch_size=PARQUET_ROWS)
            for records in limited((batch.to_pylist() for batch in batches), BATCH_BYTES):
                unpacked += _characters(records)  # not what Arrow says of the batch: of a text that it keeps once, that is one
                _check_unpacked(path, unpacked)
                for record in records:
                    number += 1
                    yield f" row {number}", record
    except MemoryError as error:
        got = f"more after {number} rows"
        raise ValueError(
            f"{path}: expected {PARQUET_ROWS} rows of at most {BATCH_BYTES} bytes in memory, got {got}; don't use it"
        ) from error
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        got = f"{shown(str(error))} after {number} rows"
        raise ValueError(f"{path}: expected a Parquet file, got: {got}; fetch or convert it again") from error


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
            f"{path}: expected at most {MAX_RATIO} times its size of {size} bytes when unpacked, got more; "
            "make it JSON lines if that is right"
        )


_READERS: dict[str, Callable[[Path], Iterator[tuple[str, dict[str, Any]]]]] = {
    ".jsonl": _json_lines,
    ".jsonl.gz": _json_lines,
    ".json": _json,
    ".csv": _csv,
    ".parquet": _parquet,
}


def _open_text(path: Path, newline: str | None = None) -> io.TextIOBase:
    """UTF-8 text, plain or gzipped, with or without a byte-order mark."""
    opener = _Unzipped if path.name.lower().endswith(".gz") else Path.open
    return io.TextIOWrapper(opener(path, "rb"), encoding="utf-8-sig", newline=newline)


class _Unzipped(gzip.GzipFile):
    """What a gzip file unpacks to, as long as that isn't out of all proportion to its size."""

    def __init__(self, path: Path, mode: str):
        super().__init__(path, mode)
        self._path, self._size, self._unpacked = path, path.stat().st_size, 0

    def read1(self, size: int = -1) -> bytes:
        """What the text above asks for.

        Raises:
            ValueError: it is a bomb.
        """
        part = super().read1(size)
        self._unpacked += len(part)
        if self._unpacked > max(GZIP_FREE_BYTES, MAX_RATIO * self._size):
            raise ValueError(
                f"{self._path}: expected at most {MAX_RATIO} times its size of {self._size} bytes when unpacked, got more; "
                "unpack it yourself if that is right"
            )
        return part


def _lines(file: io.TextIOBase, path: Path) -> Iterator[str]:
    """The lines of a file, none of which may be longer than MAX_CHARACTERS.

    Raises:
        ValueError: one is.
    """
    number = 0
    while line := file.readline(MAX_CHARACTERS + 1):
        number += 1
        if len(line) > MAX_CHARACTERS:
            raise ValueError(f"{path} line {number}: expected a line of at most {MAX_CHARACTERS} characters, got more; split or remove it")
        yield line


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        place = f" (line {error.lineno} column {error.colno})" if error.lineno > 1 else f" (column {error.colno})"
        raise ValueError(f"{where}: expected JSON, got {text[:200].strip()[:60]!r}: {error.msg}{place}; correct it") from error
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits, brackets of thousands of levels
        raise ValueError(f"{where}: expected JSON, got {text[:200].strip()[:60]!r}: {error}; correct it") from error


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{where}: expected a JSON object, got {type(value).__name__}; write one object per record")
    return value


def _hub_records(source: SourceConfig) -> Iterator[tuple[str, dict[str, Any]]]:
    """The records of a Hugging Face data set, by name (from the cache unless HF_HUB_OFFLINE=0) or from a local folder."""
    from datasets import Dataset, DatasetDict, load_dataset, load_from_disk

    subject = f"source {source.name}: data set {source.path}"
    saved = locate(source.path)
    try:
        with limited_memory(DATA_SET_BYTES):
            if (saved / "dataset_dict.json").exists() or (saved / "state.json").exists():
                data = load_from_disk(str(saved))
            else:
                data = load_dataset(str(saved) if saved.exists() else source.path, source.subset, split=source.dataset_split)
    except MemoryError as error:
        raise ValueError(f"{subject}: expected one that is read within {DATA_SET_BYTES} bytes, got more; don't use it") from error
    except (OSError, ValueError) as error:
        reason = shown((str(error).strip() or type(error).__name__).splitlines()[0], 400)
        raise ValueError(
            f"{subject}: expected a cached name or a local folder, got: {reason}; "
            "correct path, subset or dataset_split, or set HF_HUB_OFFLINE=0 to download"
        ) from error
    if isinstance(data, DatasetDict):
        if source.dataset_split not in data:
            raise ValueError(f"{subject}: expected a split {source.dataset_split!r}, got {list(data)}; set dataset_split")
        data = data[source.dataset_split]
    assert isinstance(data, Dataset)
    number = 0
    try:
        for number, record in enumerate(limited(data, DATA_SET_BYTES), start=1):
            yield f"{source.path} row {number}", record
    except MemoryError as error:
        got = f"more after row {number}"
        raise ValueError(f"{subject}: expected rows that are read within {DATA_SET_BYTES} bytes, got {got}; don't use it") from error
