"""From data.sources to everything that stage prepare_data writes: rows, tokenizer, counts and lengths."""

from __future__ import annotations

import logging
import shutil
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlhf_core.config import DataConfig, ModelConfig
from rlhf_core.data.judge import find_judge
from rlhf_core.data.pictures import pictures_of, write_pictures
from rlhf_core.data.schema import SPLITS, WIDE_MESSAGES, open_rows
from rlhf_core.models.tokenizer import new_tokenizer
from rlhf_core.preparation.filters import TemplateRefusals
from rlhf_core.preparation.formats import STEP_SEPARATOR
from rlhf_core.preparation.pictures import PictureStore
from rlhf_core.preparation.samples import Writer
from rlhf_core.preparation.sources import Mixed, mix

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_BINS = 48  # of a histogram of lengths
LENGTH_COLUMNS = ("use", "column", "low", "high", "texts")
Lengths = dict[str, dict[str, Counter[int]]]  # use -> column -> number of tokens -> number of texts

log = logging.getLogger("rlhf")


@dataclass(frozen=True)
class Prepared:
    """Results of `prepare` apart from the rows. lengths: in tokens, by `text_lengths`. pictures: their number; None: the model doesn't
    see.
    """

    config: DataConfig
    mixed: Mixed
    tokenizer: PreTrainedTokenizerBase
    lengths: Lengths
    pictures: int | None = None

    def sources(self) -> dict[str, Any]:
        """Return source -> its description, and its rows by use and split."""
        return {
            source.name: {
                "kind": source.kind,
                "judge": source.judge_name,
                "path": source.path,
                "format": source.format,
                "rows": {use: {split: self.mixed.counts[source.name, use, split] for split in SPLITS} for use in source.uses},
            }
            for source in self.config.sources
        }

    def metrics(self) -> dict[str, Any]:
        """Return counts, and mean lengths in tokens."""
        mixed = self.mixed
        by_split: Counter[tuple[str, str]] = Counter()
        by_source: dict[str, Counter[str]] = {use: Counter() for use in mixed.uses}
        for (source, use, split), count in (+mixed.counts).items():  # without zeros: a use may have lost all its rows
            by_split[use, split] += count
            by_source[use][source] += count
        return {
            "rows": {use: {split: by_split[use, split] for split in SPLITS} for use in mixed.uses},
            "rows_by_source": by_source,
            "records": {source: tally.left_out.read for source, tally in mixed.tallies.items() if tally.left_out.read},
            "dropped": mixed.dropped,
            "dropped_fraction": {source: {use: tally.share(use) for use in tally.read} for source, tally in mixed.tallies.items()},
            **({} if self.pictures is None else {"pictures": self.pictures}),
            "vocabulary_size": len(self.tokenizer),
            "mean_tokens": {
                use: {column: sum(t * n for t, n in of_column.items()) / of_column.total() for column, of_column in columns.items()}
                for use, columns in self.lengths.items()
            },
        }

    def accounts(self) -> Iterator[str]:
        """Yield one line for each source: records read, rows kept for each use and split, and what was left out for which reason."""
        for source in self.config.sources:
            left_out, kept = self.mixed.tallies[source.name].left_out, []
            for use in source.uses:
                of_split = {split: self.mixed.counts[source.name, use, split] for split in SPLITS}
                splits = ", ".join(f"{rows} {split}" for split, rows in of_split.items() if rows)
                kept.append(f"{use} {sum(of_split.values())}" + (f" ({splits})" if splits else ""))
            reasons = "; ".join(f"{count} {reason}" for reason, count in left_out.most_common()) or "nothing"
            read = f"read {left_out.read} records: " if left_out.read else ""
            yield f"{source.name}: {read}kept {', '.join(kept)}; dropped: {reasons}"


def check_judges(config: DataConfig) -> None:
    """Load every source's judge, which is used only in later stages.

    Raises:
        ValueError: a judge can't be loaded.
    """
    for source in config.sources:
        if source.judge_name is not None:
            try:
                find_judge(source.judge_name)
            except ValueError as error:
                raise ValueError(f"source {source.name}: {error}") from error


def prepare(
    config: DataConfig,
    model: ModelConfig,
    folder: Path,
    measured: Path,
    *,
    scratch: Path,
    seed: int,
    tokenizer: PreTrainedTokenizerBase | None,
    writer: Writer | None,
    max_dropped_fraction: float,
    step_separator: str | None = None,
) -> Prepared:
    """Write `<use>.parquet` and slices.parquet to `folder`: the rows of all sources that template and lengths allow.

    Args:
        measured: a folder for the rows' measures.
        scratch: an empty folder for the rows of one source at a time; deleted.
        tokenizer: of the model; None: a new one is trained on the prepared texts.
        writer: the model for sources of kind samples.
        step_separator: `reward.step_separator`.
    Raises:
        ValueError, FileNotFoundError: a source can't be used, or too much of it is dropped.
    """
    options = {"max_dropped_fraction": max_dropped_fraction, "step_separator": step_separator}
    pictures = None if model.vision is None else PictureStore(scratch / "pictures")
    mixed = mix(config, folder, scratch=scratch, seed=seed, writer=writer, pictures=pictures, **options)
    if tokenizer is None:
        rows = (row for use in mixed.uses for part in _parts(mixed, use) for row in part)
        tokenizer = new_tokenizer(rows, vocab_size=model.architecture.vocab_size, sees=model.vision is not None)
    if model.path is not None or any(_has_wide_messages(folder, use) for use in mixed.uses):
        drop_unrenderable(mixed, tokenizer, limit=config.max_unrenderable_fraction)
    lengths = measure_rows(mixed, tokenizer, config, measured, max_length=model.max_length, **options)
    for rows in mixed.rows.values():
        rows.write()
    number = None if pictures is None else write_pictures(folder, _used_pictures(mixed), pictures.files())
    shutil.rmtree(scratch, ignore_errors=True)
    return Prepared(config, mixed, tokenizer, lengths, number)


def _used_pictures(mixed: Mixed) -> set[str]:
    """Return the hashes of the pictures of all kept rows."""
    batches = (batch for use in mixed.uses if use != "pretrain" for batch in mixed.rows[use].batches(["messages"]))
    return {picture.sha256 for batch in batches for messages in batch["messages"].to_pylist() for picture in pictures_of(messages)}


def _parts(mixed: Mixed, use: str) -> Iterator[list[dict]]:
    """Return the kept rows of one use, some thousand at a time."""
    return (batch.to_pylist() for batch in mixed.rows[use].batches())


def _has_wide_messages(folder: Path, use: str) -> bool:
    """Return whether messages of a use may have more than role and text: nothing else can be refused by the built-in template."""
    schema = open_rows(folder / f"{use}.parquet").schema_arrow
    return "messages" in schema.names and schema.field("messages").type.equals(WIDE_MESSAGES)


def drop_unrenderable(mixed: Mixed, tokenizer: PreTrainedTokenizerBase, *, limit: float) -> None:
    """Drop the rows whose conversation the chat template refuses, and count them under the template's message.

    Args:
        limit: the largest share of a use's rows that may be dropped.
    Raises:
        ValueError: more would be dropped.
    """
    refusals = TemplateRefusals(tokenizer)
    dropped: Counter[tuple[str, str]] = Counter()
    for use in (use for use in mixed.uses if use != "pretrain"):
        refused, messages = refusals.of_rows(mixed.rows[use])
        if len(messages) > limit * len(refused):
            most_common = "; ".join(message for message, _ in Counter(messages).most_common(3))
            raise ValueError(
                f"{use}: expected a chat template that renders all conversations but {limit:.2%}, got {len(messages)} of {len(refused)} "
                f"refused: {most_common}; correct the data, use another template, or raise data.max_unrenderable_fraction"
            )
        for row, message in zip(mixed.drop(use, refused), messages, strict=True):
            dropped[row["source"], f"{use} rows that the chat template refuses ({message})"] += 1
    for (source, reason), rows in sorted(dropped.items()):
        mixed.tallies[source].left_out[reason] += rows
        log.warning("%s: %d %s", source, rows, reason)


def measure_rows(
    mixed: Mixed,
    tokenizer: PreTrainedTokenizerBase,
    config: DataConfig,
    folder: Path,
    *,
    max_length: int,
    max_dropped_fraction: float,
    step_separator: str | None = None,
) -> Lengths:
    """Measure the rows for validate_data, and drop those that don't fit, of the sources with `drop: [too_long]`. Returns the lengths.

    Args:
        folder: for the measures.
        max_dropped_fraction: the largest share of a source that may be dropped.
        step_separator: between the steps of rows of the use stepwise.
    Raises:
        ValueError: more would be dropped.
    """
    from rlhf_core.preparation.validation.measures import MeasuredWriter, measure, text_lengths

    names, lengths = {source.name for source in config.sources if "too_long" in source.drop}, {}
    for use in mixed.uses:
        counts, masks = defaultdict(Counter), []
        with MeasuredWriter(folder, use, tokenizer) as file:
            for batch in mixed.rows[use].batches():
                rows = measure(use, batch.to_pylist(), tokenizer, separator=step_separator or STEP_SEPARATOR)
                masks.append((rows["source"].isin(names) & rows["tokens"].gt(max_length)).to_numpy(dtype=bool))
                kept = rows[~masks[-1]].reset_index(drop=True)
                file.write_measured(kept)
                for column, tokens in text_lengths(use, kept).items():
                    counts[column].update(map(int, tokens.dropna()))
        mixed.drop_as("too_long", use, np.concatenate(masks))
        lengths[use] = {column: of_column for column, of_column in counts.items() if of_column}
    mixed.check_shares(config, max_dropped_fraction)
    return {use: lengths[use] for use in mixed.uses}


def length_histograms(lengths: Lengths) -> Iterator[tuple[str, str, int, int, int]]:
    """Yield rows of LENGTH_COLUMNS: low <= tokens < high. All columns of a use have the same bins, so they can be compared."""
    for use, columns in lengths.items():
        longest = max((max(of_column) for of_column in columns.values()), default=0)
        width = -(-(longest + 1) // MAX_BINS)
        for column, of_column in columns.items():
            binned: Counter[int] = Counter()
            for tokens, texts in of_column.items():
                binned[tokens // width] += texts
            for i in range(longest // width + 1):
                yield use, column, i * width, (i + 1) * width, binned[i]
