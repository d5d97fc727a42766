"""Where rows come from: the built-in clerk, files, and Hugging Face data sets.

Every error names the file and, where it has one, the line, and what was there instead.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rlhf_core.config import SourceConfig
from rlhf_core.data.clerk import clerk_rows
from rlhf_core.data.formats import Dropped, convert
from rlhf_core.data.split import conversation_text


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
    """All rows of a source for the uses it is declared for.

    Raises:
        ValueError: a file, a line or a column is not what the source says, or there is nothing for one of the uses.
        FileNotFoundError: the path doesn't exist.
    """
    if source.kind == "clerk":
        return Loaded({use: clerk_rows(source.clerk, use, seed) for use in source.uses}, {})
    records = _file_records(locate(source.path)) if source.kind == "file" else _hub_records(source)
    rows: dict[str, list[dict]] = {use: [] for use in source.uses}
    dropped: Counter[str] = Counter()
    for where, values in records:
        try:
            converted = convert(values, source)
        except Dropped as reason:
            dropped[str(reason)] += 1
            continue
        except ValueError as error:
            raise ValueError(f"source {source.name}: {where}: {error}") from error
        for use in source.uses:
            rows[use] += converted.get(use, [])
    rows["prompt"] = _distinct(rows.get("prompt", []), dropped)
    for use in source.uses:
        if not rows[use]:
            raise ValueError(
                f"source {source.name}: expected rows for {use}, got none from {source.path} (left out: {dict(dropped) or 'nothing'}); "
                f"check its format and columns, or take {use} out of its uses"
            )
    return Loaded({use: rows[use] for use in source.uses}, dict(sorted(dropped.items())))


def locate(path: str) -> Path:
    """A path relative to the workspace. In a git worktree, one that isn't there is taken relative to the main checkout.

    Runs with overrides work in worktrees under runs/; data that git doesn't track, and paths that leave the checkout
    such as ../shared/data, are found from there too.
    """
    here, link = Path(path), Path(".git")
    if not here.is_absolute() and not here.exists() and link.is_file():
        repository = Path(link.read_text(encoding="utf-8").removeprefix("gitdir:").strip()).parents[1]
        if (repository.parent / path).exists():
            return repository.parent / path
    return here


def _distinct(prompts: list[dict], dropped: Counter[str]) -> list[dict]:
    """The first row of each conversation: a prompt that comes twice would count twice in an evaluation."""
    first: dict[str, dict] = {}
    for row in prompts:
        first.setdefault(conversation_text(row["messages"]), row)
    if len(first) < len(prompts):
        dropped["prompt rows that repeat a conversation"] = len(prompts) - len(first)
    return list(first.values())


def _file_records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Where each record stands and the record, of a file or of all files of a folder in the order of their names."""
    if not path.exists():
        raise FileNotFoundError(f"{path}: expected a data file or folder, got nothing there; correct the path, relative to {Path.cwd()}")
    files = sorted(p for p in path.rglob("*") if p.is_file() and _reader(p)) if path.is_dir() else [path]
    if not files:
        raise ValueError(f"{path}: expected files that end in {', '.join(_READERS)}, got a folder without any; correct the source's path")
    for file in files:
        reader = _reader(file)
        if reader is None:
            raise ValueError(f"{file}: expected a name that ends in {', '.join(_READERS)}, got {file.name}; convert or rename it")
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
        if count == 0:
            raise ValueError(f"{file}: expected at least one record, got an empty file; remove it or correct the source's path")


def _reader(path: Path) -> Callable[[Path], Iterator[tuple[str, dict[str, Any]]]] | None:
    return next((reader for ending, reader in _READERS.items() if path.name.lower().endswith(ending)), None)


def _json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with _open_text(path) as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield f" line {number}", _object(_parse(line, f"{path} line {number}"), f"{path} line {number}")


def _json(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """A JSON file with a list of objects."""
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
    csv.field_size_limit(2**31 - 1)  # the default refuses texts over 131072 characters
    with _open_text(path, newline="") as file:
        reader = csv.DictReader(file, strict=True)
        try:
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
    number = 0
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches():
                for record in batch.to_pylist():
                    number += 1
                    yield f" row {number}", record
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path}: expected a Parquet file, got: {error}; fetch or convert it again") from error


_READERS: dict[str, Callable[[Path], Iterator[tuple[str, dict[str, Any]]]]] = {
    ".jsonl": _json_lines,
    ".jsonl.gz": _json_lines,
    ".json": _json,
    ".csv": _csv,
    ".parquet": _parquet,
}


def _open_text(path: Path, newline: str | None = None) -> io.TextIOBase:
    """UTF-8 text, plain or gzipped, with or without a byte-order mark."""
    opener = gzip.open if path.name.lower().endswith(".gz") else open
    return opener(path, "rt", encoding="utf-8-sig", newline=newline)


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        place = f" (line {error.lineno} column {error.colno})" if error.lineno > 1 else f" (column {error.colno})"
        raise ValueError(f"{where}: expected JSON, got {text.strip()[:60]!r}: {error.msg}{place}; correct it") from error
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits, brackets of thousands of levels
        raise ValueError(f"{where}: expected JSON, got {text.strip()[:60]!r}: {error}; correct it") from error


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
        if (saved / "dataset_dict.json").exists() or (saved / "state.json").exists():
            data = load_from_disk(str(saved))
        else:
            data = load_dataset(str(saved) if saved.exists() else source.path, source.subset, split=source.dataset_split)
    except (OSError, ValueError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"{subject}: expected a cached name or a local folder, got: {reason}; "
            "correct path, subset or dataset_split, or set HF_HUB_OFFLINE=0 to download"
        ) from error
    if isinstance(data, DatasetDict):
        if source.dataset_split not in data:
            raise ValueError(f"{subject}: expected a split {source.dataset_split!r}, got {list(data)}; set dataset_split")
        data = data[source.dataset_split]
    assert isinstance(data, Dataset)
    for number, record in enumerate(data, start=1):
        yield f"{source.path} row {number}", record
