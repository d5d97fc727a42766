"""From a path to the readings that fit, and for each reading the records as they are trained on, with counts."""

from __future__ import annotations

import codecs
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from rlhf_core.config import ConfigError, Params, SourceConfig, shown
from rlhf_core.config.data import FORMATS
from rlhf_core.data.control import end_token, unwrapped
from rlhf_core.data.hashing import split_of, split_text
from rlhf_core.data.places import is_data_file, locate
from rlhf_core.data.schema import SCHEMAS, TEXTS
from rlhf_core.look.columns import Column, columns_of
from rlhf_core.look.guess import Reading, propose
from rlhf_core.look.known import known_as
from rlhf_core.look.resolve import resolve_readings, unread_answers, unread_columns, unread_marks, unreadable_marks
from rlhf_core.preparation.drops import DropCounts, Dropped, Misfit
from rlhf_core.preparation.files import files_of_split
from rlhf_core.preparation.formats import convert
from rlhf_core.preparation.notation import beginning, check_signs, notation_of
from rlhf_core.preparation.pictures import COLUMNS as PICTURE_COLUMNS
from rlhf_core.preparation.pictures import PictureStore, SourcePictures
from rlhf_core.preparation.sources import read_source, records_of
from rlhf_core.preparation.values import RawRecord

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlhf_core.look.rows import Sequence, UseCounts
    from rlhf_core.preparation.near_duplicates import Compared

GUESSED_FROM = 2000  # records of the sample, at most
GUESSED_CHARACTERS = 2**27  # of the sample, at most
# Top-level columns that are usually part of the conversation.
MEANINGFUL = {
    *("system", "system_prompt", "history", "tools", "functions", "input", "context", "instruction", "reasoning_content", "thinking"),
    *("response", "output", "completion", "answer"),
}
MANY = 0.1  # share of the records left out above which a reading gets a warning
ENDED = 0.01  # share of the records with an end token as text above which it is stripped: the default of max_end_token_fraction
VOCAB_SIZE = 2000  # of the tokenizer that is trained where neither a model nor its vocabulary is named
MOSTLY = 0.5  # of the best reading's converted records, which another reading must reach to be offered


@dataclass(frozen=True)
class Place:
    """Where the data is and how it is read: the keys of a source that don't depend on its format."""

    kind: str
    path: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def source(self, format_: str, uses: Iterable[str], columns: Mapping[str, Any], options: Mapping[str, Any]) -> SourceConfig:
        """Return the source of this place with a format.

        Raises:
            ConfigError: the keys contradict each other.
        """
        given = {**self.options, **options, "columns": dict(columns), "uses": list(uses)}
        try:
            return SourceConfig(name=name_of(self.path), kind=self.kind, path=self.path, format=format_, weight=1.0, **given)
        except ValidationError as error:
            lines = (f"{'.'.join(map(str, e['loc']))}: {e['msg']}" if e["loc"] else e["msg"] for e in error.errors())
            raise ConfigError("; ".join(shown(line, 600).removeprefix("Value error, ") for line in lines)) from error


@dataclass(frozen=True)
class TriedReading:
    """A reading that was tried on the sample.

    taken: number of converted records. refused: why the reading doesn't fit; None if it does.
    """

    reading: Reading
    source: SourceConfig
    taken: int
    refused: str | None


@dataclass(frozen=True)
class Guess:
    """What the sample may be.

    known: the name of a well-known data set with such columns. records: the sample; whole: whether the data has no others.
    fitting: the readings to choose from; a single one is the guess. others: readings that don't fit, or that a fitting one includes.
    unreadable: a message about marks that no reading reads. chosen: the format, if the user chose it.
    aside: files of a folder that aren't read, since they name another split.
    """

    known: str | None
    columns: Mapping[str, Column]
    records: list[RawRecord]
    whole: bool
    fitting: list[TriedReading]
    others: list[TriedReading]
    unreadable: str | None
    chosen: str | None = None
    aside: tuple[str, ...] = ()


@dataclass(frozen=True)
class Inspection:
    """A reading's records as they are trained on, and the counts.

    samples: (place of a record, its rows' sequences or the template's refusals).
    dropped: what was left out, and the number of records read.
    repeats: split that is held out -> its prompts, compared with training.
    """

    tried: TriedReading
    tokenizer: PreTrainedTokenizerBase
    dropped: DropCounts
    samples: list[tuple[str, list[Sequence | str]]]
    counts: Mapping[str, UseCounts]
    repeats: Mapping[str, list[Compared]]


def name_of(path: str) -> str:
    """Return a valid name for the source, from its path."""
    stem = re.sub(r"(\.(jsonl|json|csv|tsv|parquet))?(\.gz)?$", "", Path(path).name, flags=re.IGNORECASE)
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", stem).strip("-.") or "data"


def place_of(path: str, options: Mapping[str, Any]) -> Place:
    """Return a file, a folder or the name of a data set on the hub. Options that are None are left out.

    Raises:
        FileNotFoundError: the path can only be a file's, and there is no such file.
        ValueError: an option is for the other kind.
    """
    there = locate(path)
    saved = any((there / name).exists() for name in ("dataset_dict.json", "state.json"))
    if there.exists() or there.is_symlink():
        kind = "huggingface" if saved else "file"
    elif path.startswith((".", "/", "~")) or path.count("/") > 1 or is_data_file(path) or path.lower().endswith(".gz"):
        raise FileNotFoundError(
            f"{shown(path)}: expected a data file, a folder or the name of a data set, got nothing there; correct the path"
        )
    else:
        kind = "huggingface"
    given = {key: value for key, value in options.items() if value is not None}
    of_other = (("subset",) if there.is_dir() else ("subset", "dataset_split")) if kind == "file" else ("delimiter", "encoding")
    if wrong := [key for key in of_other if key in given]:
        raise ValueError(f"{shown(path)}: expected no {wrong[0]} of kind {kind}, got {shown(given[wrong[0]])}; take it out")
    try:
        codecs.lookup(given.get("encoding", "utf-8"))
    except (LookupError, ValueError) as error:
        raise ValueError(f"encoding: expected a name such as utf-8 or cp1252, got {shown(given['encoding'])}; correct it") from error
    return Place(kind, path, given)


def files_aside(place: Place) -> tuple[str, ...]:
    """Return the names of a folder's files that aren't read, since they name another split."""
    folder = locate(place.path)
    if place.kind != "file" or not folder.is_dir():
        return ()
    _, aside = files_of_split(folder, place.source("text", ["pretrain"], {}, {}).dataset_split)
    return tuple(str(file.relative_to(folder)) for file in aside)


def sample_of(place: Place, limit: int) -> tuple[list[RawRecord], bool]:
    """Return the first records, and whether there are no others; nothing beyond the limit is read."""
    anything = place.source("text", ["pretrain"], {}, {})
    records: list[RawRecord] = []
    characters = 0
    for record in records_of(anything):
        records.append(record)
        characters += len(str(record.values))
        if len(records) == limit or characters > GUESSED_CHARACTERS:
            return records, False
    return records, True


def guess(
    place: Place,
    records: list[RawRecord],
    *,
    whole: bool,
    format_: str | None,
    columns: Mapping[str, Any],
    pictures: PictureStore | None = None,
) -> Guess:
    """Return the readings that fit the sample.

    Args:
        format_, columns: the user's choice; no other readings are tried.
        pictures: keeps those of the records, for a model that sees.
    """
    found = columns_of([record.values for record in records])
    named = {ours: theirs for ours, theirs in columns.items() if isinstance(theirs, str) and theirs in found}
    readings = _chosen(propose(found, named), format_, columns)
    tried = [try_reading(place, reading, records, pictures) for reading in readings]
    fits = [t for t in tried if t.refused is None]
    if whole or not fits:
        _check_columns(columns, found)
    best = max((t.taken for t in fits), default=0)
    fits = [t for t in fits if t.taken >= MOSTLY * best]
    kept = resolve_readings([t.reading for t in fits], found) if format_ is None else [t.reading for t in fits]
    fitting = [_with_warnings(t, found) for t in sorted(fits, key=lambda t: t.reading.doubtful) if t.reading in kept]
    others = [t for t in tried if t.reading not in kept]
    judged = any("preference" in t.source.uses for t in fitting)
    read = [t.reading for t in fitting]
    unreadable = None if judged else unreadable_marks(found, read) or (None if columns else unread_answers(found, read))
    known = known_as(found, read)
    return Guess(known, found, records, whole, fitting, others, None if format_ is not None else unreadable, format_, files_aside(place))


def _chosen(readings: list[Reading], format_: str | None, columns: Mapping[str, Any]) -> list[Reading]:
    """Readings with the format and columns that the user chose."""
    known = {name for of in ([format_] if format_ else FORMATS) for name in FORMATS[of][1]}
    if unknown := sorted(set(columns) - known):
        raise ConfigError(f"--columns: expected names among {sorted(known)}, got {shown(unknown[0])}; map ours to theirs")
    fits = [r for r in readings if format_ in (None, r.format) and set(columns) <= set(FORMATS[r.format][1])]
    if format_ is not None and not fits:
        fits = [Reading(format_, {}, ("you chose the format",))]
    chosen: list[Reading] = []
    agreeing = [r for r in fits if all(r.columns.get(ours, ours) == theirs for ours, theirs in columns.items())]
    for reading in agreeing or fits:
        options = {key: value for key, value in reading.options.items() if key != "implicit_prompt" or "prompt" not in columns}
        mapped = replace(reading, columns={**reading.columns, **columns}, options=options)
        if all(mapped.columns != other.columns or mapped.format != other.format for other in chosen):
            chosen.append(mapped)
    return chosen


def _check_columns(columns: Mapping[str, Any], found: Mapping[str, Column]) -> None:
    """Check that the sample has every column that the user named.

    Raises:
        ConfigError: the user named a column that no record of the sample has.
    """
    for ours, theirs in columns.items():
        for path in theirs if isinstance(theirs, list) else [theirs]:
            if path not in found and path.partition(".")[0] not in found:
                there = ", ".join(name for name in found if "." not in name)
                raise ConfigError(
                    f"--columns {shown(ours)}={shown(path)}: expected a column of the data, got none named {shown(path)}; "
                    f"the columns are: {shown(there, 400)}"
                )


def try_reading(place: Place, reading: Reading, records: list[RawRecord], pictures: PictureStore | None = None) -> TriedReading:
    """Convert the sample as prepare_data would; the reading's uses are those that get rows."""
    source = place.source(reading.format, FORMATS[reading.format][0], reading.columns, reading.options)
    notation = notation_of([record.values for record in beginning(records)[0]], source)
    reading = replace(reading, why=(*reading.why, *notation.read), unsure=(*reading.unsure, *notation.unsure))
    if notation.whole_texts:
        reading = replace(reading, options={**reading.options, "implicit_prompt": True})
        source = source.model_copy(update={"implicit_prompt": True})
    if notation.transcripts:
        reading = replace(reading, options={**reading.options, "transcripts": True})
        source = source.model_copy(update={"transcripts": True})
    seen = None if pictures is None else SourcePictures(source, pictures)
    taken, dropped, uses, refused = 0, DropCounts(), Counter[str](), ""
    ends, templated = Counter[str](), 0
    for where, values, note in records:
        try:
            check_signs(values, source, notation)
        except ValueError as error:
            return TriedReading(reading, source, 0, f"{where}: {error}")
        try:
            rows = convert(values, source, notation, pictures=seen)
        except Dropped as reason:
            dropped.add(str(reason), where, values)
            continue
        except Misfit as error:
            dropped.add(error.reason, where, values)
            refused = refused or f"{where}: {error}{f'; {note}' if note else ''}"
            continue
        taken += 1
        ends.update(_end_tokens(rows))
        templated += any(isinstance(value, str) and unwrapped(value) is not None for value in values.values())
        uses.update(use for use, of_use in rows.items() if of_use)
    if not taken:
        return TriedReading(reading, source, 0, refused or dropped.summary())
    given = [use for use in source.uses if uses[use]]
    if dropped.records > MANY * len(records):
        unsure = f"{dropped.records} of {len(records)} records are left out, most often since: {shown(dropped.most_common(1)[0][0])}"
        reading = replace(reading, unsure=(*reading.unsure, unsure))
    strips = sum(ends.values()) > ENDED * taken
    if ends:
        token, count = ends.most_common(1)[0]
        done = "strip_end_tokens takes it off" if strips else "it stays, since strip_end_tokens would change all such answers"
        unsure = f"{count} records have an answer that ends in {token!r} as text, an end token: {done}"
        reading = replace(reading, unsure=(*reading.unsure, unsure))
    if templated:
        why = f"{templated} records have a text that a chat template has written, which is read as its messages"
        reading = replace(reading, why=(*reading.why, why))
    changes = {"uses": given, "strip_end_tokens": strips}
    return TriedReading(replace(reading, uses=tuple(given)), source.model_copy(update=changes), taken, None)


def _end_tokens(rows: Mapping[str, list[dict]]) -> set[str]:
    """Return the end tokens, as text, with which a record's answers end."""
    answers = (row[name] for of_use in rows.values() for row in of_use for name in TEXTS if name != "text" and row.get(name))
    return {token for answer in answers if (token := end_token(answer)) is not None}


def _with_warnings(tried: TriedReading, columns: Mapping[str, Column]) -> TriedReading:
    """Return the reading with the columns that it leaves unread, and warnings about some of them."""
    aside = [path for path in unread_columns(tried.reading, columns) if tried.source.images is None or path not in PICTURE_COLUMNS]
    meant = [path for path in aside if path in MEANINGFUL]
    warnings = [f"column {shown(path, 60)} is not read, though it may belong to the conversation" for path in meant]
    if marks := [shown(path, 60) for path in unread_marks(tried.reading, columns)]:
        warnings.append(f"{', '.join(marks)} may mark the responses: every response would be learned, good or bad")
    unread = tuple(shown(path, 60) for path in aside if path not in meant)
    return replace(tried, reading=replace(tried.reading, unsure=(*tried.reading.unsure, *warnings), unread=unread))


def inspect_reading(
    tried: TriedReading,
    records: Iterable[RawRecord],
    params: Params,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    show: int,
    pictures: PictureStore | None = None,
) -> Inspection:
    """Read all records with `read_source`, count them and keep the first ones as sequences.

    Args:
        tokenizer: of the model; None: a new one is trained on the sample's texts, as prepare_data trains it on those of all sources.
        show: number of records to keep.
        pictures: as for `guess`.
    Raises:
        What `read_source` does.
    """
    from rlhf_core.look.repeats import Repeats
    from rlhf_core.look.rows import Counting, sequences
    from rlhf_core.models.template import Unrenderable

    dropped = DropCounts()
    rows = read_source(tried.source, seed=params.seed, dropped=dropped, records=records, pictures=pictures)
    if tokenizer is None:
        first = list(islice(rows, GUESSED_FROM * 8))
        tokenizer = _own_tokenizer(first, params)
        rows = chain(first, rows)
    counting, repeats = Counting(tokenizer), Repeats(params)
    samples: dict[str, list[Sequence | str]] = {}
    for use, row in rows:
        where = row["origin"]
        if where in samples or len(samples) < show:
            of_record = samples.setdefault(where, [])
            try:
                of_record += sequences(use, row, tokenizer, params)
            except Unrenderable as error:
                of_record.append(f"{use}: {error}")
        counting.add(use, row)
        repeats.add(where, row)
    return Inspection(tried, tokenizer, dropped, list(samples.items()), counting.done(), repeats.counted())


def _own_tokenizer(rows: list[tuple[str, dict]], params: Params) -> PreTrainedTokenizerBase:
    """A tokenizer trained on the training split's texts, use after use, as in prepare_data; of VOCAB_SIZE tokens if params name no size."""
    from rlhf_core.models.tokenizer import new_tokenizer

    data = params.data
    fractions = {name: getattr(data, name) for name in ("validation_fraction", "test_fraction", "promotion_fraction")}
    in_order = (row for use in SCHEMAS for of, row in rows if of == use)
    texts = ({**row, "split": split_of(split_text(row), **fractions)} for row in in_order)
    shape = params.model.architecture
    return new_tokenizer(texts, vocab_size=VOCAB_SIZE if shape is None else shape.vocab_size)
