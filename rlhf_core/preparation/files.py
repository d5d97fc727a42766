"""Data files, record by record: JSON lines, JSON and CSV here, Parquet in `tables`; with limits on what a hostile file may hold.

Every error names the file, the line if there is one, and what was there instead. docs/security.md lists the limits.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import itertools
import json
import logging
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlhf_core.config import SourceConfig, shown
from rlhf_core.config.data import ALL_FILES
from rlhf_core.data.places import base_of, exists, locate
from rlhf_core.preparation.drops import excerpt
from rlhf_core.preparation.tables import MAX_RATIO, parquet_records
from rlhf_core.preparation.values import MAX_CHARACTERS, MAX_NAME, RawRecord
from rlhf_core.provenance.file_hashes import entries_below

MAX_JSON_BYTES = 2**30  # of a .json file, which is read as a whole
GZIP_FREE_BYTES = 2**22  # unpacked, up to which MAX_RATIO doesn't count
DELIMITERS = (",", ";", "\t", "|")  # tried on a header
MAX_HEADER_LINES = 100
LISTS = ("data", "records", "rows", "examples", "items", "instances")  # keys of a .json file's object that hold its records
_SPACE = re.compile(r"[ \t\r\n]*")
_SEPARATOR = re.compile(r'"?sep=(.)"?\r?\n?', re.IGNORECASE)  # first line by which spreadsheets name a delimiter
SHOWN_FILES = 5
# Split -> words for it in names of files, those of the library `datasets`.
SPLIT_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}

log = logging.getLogger("rlhf")

Reader = Callable[[Path, SourceConfig], Iterator[RawRecord]]


def file_records(source: SourceConfig) -> Iterator[RawRecord]:
    """Yield the records of a file, or of a folder's files of the source's split in the order of their names.

    Raises:
        ValueError, FileNotFoundError: there is no such file, or it can't be read.
    """
    path = locate(source.path)
    if not exists(path):
        got = f"nothing there; correct the path{base_of(source.path)}"
        raise FileNotFoundError(f"{_name(path)}: expected a data file or folder, got {got}")
    files, aside = files_of_split(path, source.dataset_split) if path.is_dir() else ([path], [])
    if aside:
        names = ", ".join(shown(str(file.relative_to(path)), MAX_NAME) for file in aside[:SHOWN_FILES])
        more = f" and {len(aside) - SHOWN_FILES} more" if len(aside) > SHOWN_FILES else ""
        log.warning("source %s: files of other splits by their names are not read: %s%s", source.name, names, more)
    for file in files:
        reader = _reader(file)
        if reader is None:
            raise ValueError(
                f"{_name(file)}: expected a name that ends in {', '.join(_READERS)}, got {shown(file.name)}; convert or rename it"
            )
        if not file.is_file():  # reading a pipe would block; a broken link would be skipped silently
            got = "something else" if file.exists() else "a link to nothing"
            raise ValueError(f"{_name(file)}: expected a file, got {got}; correct or remove it")
        name = shown(str(Path(source.path) / file.relative_to(path)), MAX_NAME)  # as in the params, also where the file was found elsewhere
        count = 0
        try:
            for place, record, note in reader(file, source):
                count += 1
                yield RawRecord(f"{name} {place}", record, note)
        except UnicodeError as error:
            raise _undecodable(file, source, error, count) from error
        except (gzip.BadGzipFile, zlib.error, EOFError) as error:
            raise ValueError(f"{_name(file)}: expected a complete gzip file, got: {error}; fetch it again") from error
        except OSError as error:
            raise ValueError(
                f"{_name(file)}: expected a readable file, got: {error.strerror}; correct its permissions or its disk"
            ) from error
        if count == 0:
            raise ValueError(f"{_name(file)}: expected at least one record, got an empty file; remove it or correct the source's path")


def files_of_split(folder: Path, split: str) -> tuple[list[Path], list[Path]]:
    """Return the data files of a folder that belong to a split by their names, and the others; both sorted.

    A word of SPLIT_WORDS, or the split itself, stands in a name or in a folder's name between characters that are no letters. The split
    train has the files that name no other split, and ALL_FILES every file.

    Raises:
        ValueError: no file ends as data files do, or none is of the split.
    """
    files = sorted(p for p in entries_below(folder) if _reader(p))
    if not files:
        raise ValueError(
            f"{_name(folder)}: expected files that end in {', '.join(_READERS)}, got a folder without any; correct the source's path"
        )
    if split == ALL_FILES:
        return files, []
    names = {file: file.relative_to(folder).as_posix().lower() for file in files}
    if split == "train":
        held_out = [word for other, words in SPLIT_WORDS.items() if other != "train" for word in words]
        chosen = [file for file in files if _has_word(names[file], SPLIT_WORDS["train"]) or not _has_word(names[file], held_out)]
    else:
        chosen = [file for file in files if _has_word(names[file], SPLIT_WORDS.get(split, (split.lower(),)))]
    if not chosen:
        there = shown(", ".join(str(file.relative_to(folder)) for file in files[:SHOWN_FILES]), MAX_NAME)
        raise ValueError(
            f"{_name(folder)}: expected files of the split {shown(split)} by their names, got {there}; set the source's dataset_split to "
            f"theirs, or to {ALL_FILES} if all of them may be trained on"
        )
    return chosen, [file for file in files if file not in set(chosen)]


def _has_word(name: str, words: Iterable[str]) -> bool:
    return re.search(rf"(?<![a-z])({'|'.join(map(re.escape, words))})(?![a-z])", name) is not None


def _name(path: Path) -> str:
    """Return a file's name in an error."""
    return shown(str(path), MAX_NAME)


def _undecodable(file: Path, source: SourceConfig, error: UnicodeError, count: int) -> ValueError:
    """Return the error for a file with another encoding, with the likely one."""
    got, likely = shown(str(error)), "its name, such as cp1252"
    if isinstance(error, UnicodeDecodeError):
        there = error.object[error.start : error.start + 2]
        got = f"byte {there[0]:#04x}"
        likely = "utf-16" if there in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else likely
    wanted = "UTF-8" if source.encoding == "utf-8" else source.encoding
    todo = f"convert it to UTF-8, or set the source's encoding to {likely}"
    return ValueError(f"{_name(file)}: expected {wanted}, got {got} after about {count} records; {todo}")


def _reader(path: Path) -> Reader | None:
    return next((reader for ending, reader in _READERS.items() if path.name.lower().endswith(ending)), None)


def _json_lines(path: Path, source: SourceConfig) -> Iterator[RawRecord]:
    with _open_text(path, source.encoding) as file:
        name = _name(path)
        for number, line in enumerate(_lines(file, path), start=1):
            if line.strip():
                value = _parse_line(line, f"{name} line {number}")
                if isinstance(value, list) and number == 1:
                    raise ValueError(
                        f"{name} line 1: expected a JSON object, got list: {excerpt(value)}; if it has all records, name it .json"
                    )
                yield RawRecord(f"line {number}", _object(value, f"{name} line {number}"))


def _json(path: Path, source: SourceConfig) -> Iterator[RawRecord]:
    """Read a JSON file, all of it in memory: a list of objects, an object with the list under one of LISTS, or objects after each other."""
    if (size := path.stat().st_size) > MAX_JSON_BYTES:
        raise ValueError(
            f"{_name(path)}: expected at most {MAX_JSON_BYTES} bytes, got {size}; make it JSON lines, which are read one by one"
        )
    with _open_text(path, source.encoding) as file:
        text = file.read()
    if not text.strip():
        return
    name = _name(path)
    values = _json_values(text, name)
    records = _listed(values[0], name) if len(values) == 1 else values
    for number, record in enumerate(records, start=1):
        yield RawRecord(f"record {number}", _object(record, f"{name} record {number}"))


def _json_values(text: str, name: str) -> list[Any]:
    """Return the JSON values of a text, usually one; several if each is a record on a line, or over several lines."""
    decoder, values, at = json.JSONDecoder(), [], 0
    while at < len(text):
        try:
            value, end = decoder.raw_decode(text, _SPACE.match(text, at).end())
        except (ValueError, RecursionError) as error:
            raise _no_json(text, name, error) from error
        values.append(value)
        at = _SPACE.match(text, end).end()
    return values


def _listed(value: Any, name: str) -> list[Any]:
    """Return the records of a file that is one JSON value.

    Raises:
        ValueError: it is neither a list nor an object with a list of records.
    """
    if isinstance(value, list):
        return value
    if not isinstance(value, dict):
        raise ValueError(f"{name}: expected a list of objects, got {type(value).__name__}; write one object per record")
    lists = [key for key, of in value.items() if isinstance(of, list) and (key in LISTS or any(isinstance(item, dict) for item in of))]
    if len(lists) == 1 and lists[0] in LISTS:
        return value[lists[0]]
    got = f"one object with the keys {shown(', '.join(map(str, value)), 200)}"
    todo = "put the records of one list into a list (pandas: orient='records'), or name it .jsonl if it has one object a line"
    raise ValueError(f"{name}: expected a list of objects, or an object with one under 'data', got {got}; {todo}")


def _csv(path: Path, source: SourceConfig) -> Iterator[RawRecord]:
    """Read a table with a header. If the source names no delimiter, a .csv file's header decides it."""
    csv.field_size_limit(MAX_CHARACTERS)  # the default refuses texts over 131072 characters
    with _open_text(path, source.encoding, newline="") as file:
        lines = _lines(file, path)
        header = _header(lines)
        named = _SEPARATOR.fullmatch(header[0]) if header else None
        if named:
            header = _header(lines)
        before = int(named is not None)  # lines before the header
        if header and not "".join(header).strip():
            raise ValueError(f"{_name(path)} line {before + 1}: expected a header with the columns' names, got an empty line; remove it")
        told = "\t" if path.name.lower().removesuffix(".gz").endswith(".tsv") else named and named[1]
        delimiter = source.delimiter or told or _delimiter(header, path)
        note = f"its fields are separated by {_delimiter_name(delimiter)}; set the source's delimiter if that is wrong"
        reader = csv.DictReader(itertools.chain(header, lines), delimiter=delimiter, strict=True)
        try:
            if twice := [column for column, n in Counter(reader.fieldnames).items() if n > 1]:
                raise ValueError(f"{_name(path)} line {before + 1}: expected different columns, got {shown(twice[0])} twice; rename one")
            for record in reader:
                if None in record or None in record.values():
                    fields = sum(v is not None for k, v in record.items() if k is not None) + len(record.get(None, []))
                    where = f"{_name(path)} line {before + reader.line_num}"
                    raise ValueError(
                        f"{where}: expected {len(reader.fieldnames)} fields as in the header, got {fields}: {excerpt(record)}; "
                        f"quote fields that contain {_delimiter_name(delimiter)}, or set the source's delimiter"
                    )
                yield RawRecord(f"line {before + reader.line_num}", record, note)
        except csv.Error as error:
            raise ValueError(  # DictReader counts a line when it has read it
                f"{_name(path)} line {before + reader.reader.line_num}: expected CSV, got: {shown(str(error))}; correct that line ({note})"
            ) from error


def _header(lines: Iterator[str]) -> list[str]:
    """Return the lines of the header: several if a quoted name contains line breaks."""
    header = list(itertools.islice(lines, 1))
    while sum(line.count('"') for line in header) % 2 and len(header) < MAX_HEADER_LINES and (more := next(lines, "")):
        header.append(more)
    return header


def _delimiter(header: list[str], path: Path) -> str:
    """Return the one of DELIMITERS that splits a header into the most columns; a comma if none splits it.

    Raises:
        ValueError: two delimiters give the same number of columns.
    """
    columns = {delimiter: 0 for delimiter in DELIMITERS}
    for delimiter in DELIMITERS:
        with suppress(csv.Error, StopIteration):
            columns[delimiter] = len(next(csv.reader(header, delimiter=delimiter, strict=True)))
    most = [delimiter for delimiter, number in columns.items() if number == max(columns.values())]
    if len(most) > 1 and max(columns.values()) > 1:
        got = f"{columns[most[0]]} of each with {' and '.join(map(_delimiter_name, most))}"
        raise ValueError(f"{_name(path)} line 1: expected a header that one delimiter splits best, got {got}; set the source's delimiter")
    return most[0]


def _delimiter_name(delimiter: str) -> str:
    return "tabs" if delimiter == "\t" else shown(repr(delimiter))


_READERS: dict[str, Reader] = {
    ".jsonl": _json_lines,
    ".jsonl.gz": _json_lines,
    ".json": _json,
    ".json.gz": _json,
    ".csv": _csv,
    ".csv.gz": _csv,
    ".tsv": _csv,
    ".tsv.gz": _csv,
    ".parquet": parquet_records,
}


def _open_text(path: Path, encoding: str, newline: str | None = None) -> io.TextIOBase:
    """Open a text, plain or gzipped, with or without a byte-order mark."""
    opener = _Unzipped if path.name.lower().endswith(".gz") else Path.open
    utf8 = codecs.lookup(encoding).name == "utf-8"
    return io.TextIOWrapper(opener(path, "rb"), encoding="utf-8-sig" if utf8 else encoding, newline=newline)


class _Unzipped(gzip.GzipFile):
    """A gzip file that is read up to MAX_RATIO times its size: a small file may unpack to terabytes."""

    def __init__(self, path: Path, mode: str):
        super().__init__(path, mode)
        self._path, self._size, self._unpacked = path, path.stat().st_size, 0

    def read1(self, size: int = -1) -> bytes:
        """Read as io.TextIOWrapper asks for it.

        Raises:
            ValueError: more than the limit was unpacked.
        """
        part = super().read1(size)
        self._unpacked += len(part)
        if self._unpacked > max(GZIP_FREE_BYTES, MAX_RATIO * self._size):
            raise ValueError(
                f"{_name(self._path)}: expected at most {MAX_RATIO} times its size of {self._size} bytes when unpacked, got more; "
                "unpack it yourself if that is right"
            )
        return part


def _lines(file: io.TextIOBase, path: Path) -> Iterator[str]:
    """Yield the lines of a file.

    Raises:
        ValueError: a line is longer than MAX_CHARACTERS.
    """
    number = 0
    while line := file.readline(MAX_CHARACTERS + 1):
        number += 1
        if len(line) > MAX_CHARACTERS:
            raise ValueError(
                f"{_name(path)} line {number}: expected a line of at most {MAX_CHARACTERS} characters, got more; split or remove it"
            )
        yield line


def _parse_line(line: str, where: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:  # also numbers of thousands of digits, brackets of thousands of levels
        if line.strip() in ("{", "[", "[{") and where.endswith("line 1"):
            got = f"{line.strip()!r}: the beginning of one over several lines"
            raise ValueError(f"{where}: expected one JSON object a line, got {got}; name the file .json") from error
        raise _no_json(line, where, error) from error


def _no_json(text: str, where: str, error: ValueError | RecursionError) -> ValueError:
    message = str(error)
    if isinstance(error, json.JSONDecodeError):
        place = f"in {f'line {error.lineno} ' if error.lineno > 1 else ''}column {error.colno}"
        message = f"{error.msg.removesuffix(' at')} {place}"  # "Invalid control character at"
    return ValueError(f"{where}: expected JSON, got {text[:200].strip()[:60]!r}: {message}; correct it")


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{where}: expected a JSON object, got {type(value).__name__}: {excerpt(value)}; write one object per record")
    return value
