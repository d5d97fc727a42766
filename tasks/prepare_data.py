"""Stage prepare_data: sources in, canonical rows, their split and the tokenizer out.

Writes data/prepared/<use>.parquet for the uses that have rows, data/prepared/slices.parquet where sources name columns for the
gate's slices, data/prepared/sources.json (what each source is and gave), models/tokenizer/, metrics/prepare_data.json and
plots/token_lengths.csv. The same parameters give the same bytes.
"""

from __future__ import annotations

import csv
import logging
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_core.config import DataConfig, Params, SourceConfig
from rlhf_core.data.filters import sources_that_drop, too_long
from rlhf_core.data.judge import find_judge
from rlhf_core.data.samples import Writer
from rlhf_core.data.schema import SPLITS, TEXTS, WIDE_MESSAGES, open_rows, read_batches
from rlhf_core.data.sources import Mixed, check_shares, leave_out_rows, mix
from rlhf_core.models.given import given_tokenizer, new_tokenizer
from rlhf_core.paths import METRICS, PLOTS, PREPARED, TOKENIZER
from rlhf_core.stage.files import publish, write_json
from rlhf_core.stage.run import Stage, no_arguments

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_BINS = 48  # of a histogram of lengths
LENGTH_COLUMNS = ("use", "column", "low", "high", "texts")

log = logging.getLogger("rlhf")


def main() -> None:
    with Stage("prepare_data", resumable=False) as stage:
        params = stage.params
        aside, sources = stage.scratch / "prepared", stage.scratch / "sources"
        for folder in (aside, sources):
            shutil.rmtree(folder, ignore_errors=True)
        check_judges(params.data)
        tokenizer = given_tokenizer(params.model)
        writer, limit = own_writer(params, tokenizer), params.validation.max_dropped_fraction
        mixed = mix(params.data, aside, scratch=sources, seed=params.seed, writer=writer, max_dropped_fraction=limit)
        shutil.rmtree(sources, ignore_errors=True)
        tokenizer = tokenizer or new_tokenizer(params.model, _all_rows(aside, mixed.uses))
        if params.model.path is not None or any(has_wide_messages(aside, use) for use in mixed.uses):
            leave_out_unrenderable(aside, mixed, tokenizer, limit=params.data.max_unrenderable_fraction)
        leave_out_too_long(aside, mixed, tokenizer, params.data, max_length=params.model.max_length, limit=limit)
        write_json(aside / "sources.json", describe_sources(params.data, mixed))
        tokenizer.save_pretrained(stage.scratch / "tokenizer")
        publish(aside, PREPARED)
        publish(stage.scratch / "tokenizer", TOKENIZER)
        lengths = {use: token_lengths(_rows(PREPARED, use), tokenizer) for use in mixed.uses}
        metrics = summarize(mixed, lengths, len(tokenizer))
        write_json(METRICS / "prepare_data.json", metrics)
        PLOTS.mkdir(exist_ok=True)
        with (PLOTS / "token_lengths.csv").open("w", newline="", encoding="utf-8") as file:
            table = csv.writer(file, lineterminator="\n")
            table.writerows([LENGTH_COLUMNS, *length_histograms(lengths)])
        for source in params.data.sources:
            log.info("%s", account(source, mixed))


def check_judges(config: DataConfig) -> None:
    """Every source's judge is there, which others ask much later.

    Raises:
        ValueError: one isn't.
    """
    for source in config.sources:
        if source.judge_name is not None:
            try:
                find_judge(source.judge_name)
            except ValueError as error:
                raise ValueError(f"source {source.name}: {error}") from error


def own_writer(params: Params, tokenizer: PreTrainedTokenizerBase | None) -> Writer | None:
    """The model at `model.path`, where a source is made of its samples."""
    if all(source.kind != "samples" for source in params.data.sources):
        return None
    from rlhf_core.models.folder import locate_model
    from rlhf_core.sampling.own_samples import ModelWriter

    return ModelWriter(locate_model(params.model.path, params.model.revision), tokenizer, params.model, seed=params.seed)


def has_wide_messages(folder: Path, use: str) -> bool:
    """Whether messages of a use may have more than role and text, which is all that the built-in template can refuse."""
    schema = open_rows(folder / f"{use}.parquet").schema_arrow
    return "messages" in schema.names and schema.field("messages").type.equals(WIDE_MESSAGES)


def leave_out_unrenderable(folder: Path, mixed: Mixed, tokenizer: PreTrainedTokenizerBase, *, limit: float) -> None:
    """Leave out what the chat template refuses; each of its reasons is one for which rows were dropped."""
    from rlhf_core.data.filters import drop_unrenderable

    for (source, use, split, words), rows in sorted(drop_unrenderable(folder, mixed.uses, tokenizer, limit=limit).items()):
        mixed.counts[source, use, split] -= rows
        reason = f"{use} rows that the chat template refuses ({words})"
        left_out = mixed.tallies[source].left_out
        left_out[reason] += rows
        log.warning("%s: %d %s", source, left_out[reason], reason)


def leave_out_too_long(
    folder: Path, mixed: Mixed, tokenizer: PreTrainedTokenizerBase, config: DataConfig, *, max_length: int, limit: float
) -> None:
    """Leave out the rows that don't fit, of the sources that say so.

    Raises:
        ValueError: with them more than `limit` of a source is left out.
    """
    if names := sources_that_drop(config, "too_long"):
        for use in mixed.uses:
            leaves = too_long(use, folder / f"{use}.parquet", names, tokenizer, max_length=max_length)
            leave_out_rows(folder, mixed, use, leaves, "too_long")
        check_shares(config, mixed, limit)


def account(source: SourceConfig, mixed: Mixed) -> str:
    """One line: what was read of a source, what is kept for each use and split, and what was left out for which reason."""
    tally = mixed.tallies[source.name]
    kept = []
    for use in source.uses:
        of_split = {split: mixed.counts[source.name, use, split] for split in SPLITS}
        splits = ", ".join(f"{rows} {split}" for split, rows in of_split.items() if rows)
        kept.append(f"{use} {sum(of_split.values())}" + (f" ({splits})" if splits else ""))
    reasons = "; ".join(f"{count} {reason}" for reason, count in tally.left_out.most_common()) or "nothing"
    read = f"read {tally.left_out.read} records: " if tally.left_out.read else ""
    return f"{source.name}: {read}kept {', '.join(kept)}; dropped: {reasons}"


def _rows(folder: Path, use: str) -> Iterator[list[dict]]:
    """The rows of one use, a part at a time."""
    return (batch.to_pylist() for batch in read_batches(open_rows(folder / f"{use}.parquet")))


def _all_rows(folder: Path, uses: list[str]) -> Iterator[dict]:
    return (row for use in uses for part in _rows(folder, use) for row in part)


def describe_sources(config: DataConfig, mixed: Mixed) -> dict[str, Any]:
    return {
        source.name: {
            "kind": source.kind,
            "judge": source.judge_name,
            "path": source.path,
            "format": source.format,
            "rows": {use: {split: mixed.counts[source.name, use, split] for split in SPLITS} for use in source.uses},
        }
        for source in config.sources
    }


def summarize(mixed: Mixed, lengths: dict[str, dict[str, Counter[int]]], vocabulary_size: int) -> dict[str, Any]:
    """Counts, and mean lengths in tokens of the texts alone, without the template."""
    by_split: Counter[tuple[str, str]] = Counter()
    by_source: dict[str, Counter[str]] = {use: Counter() for use in mixed.uses}
    for (source, use, split), count in (+mixed.counts).items():  # a use may have lost all
        by_split[use, split] += count
        by_source[use][source] += count
    return {
        "rows": {use: {split: by_split[use, split] for split in SPLITS} for use in mixed.uses},
        "rows_by_source": by_source,
        "records": {source: tally.left_out.read for source, tally in mixed.tallies.items() if tally.left_out.read},
        "dropped": mixed.dropped,
        "dropped_fraction": {source: {use: tally.share(use) for use in tally.read} for source, tally in mixed.tallies.items()},
        "vocabulary_size": vocabulary_size,
        "mean_tokens": {
            use: {column: sum(t * n for t, n in of_column.items()) / of_column.total() for column, of_column in columns.items()}
            for use, columns in lengths.items()
        },
    }


def token_lengths(parts: Iterable[list[dict]], tokenizer: PreTrainedTokenizerBase) -> dict[str, Counter[int]]:
    """Column -> number of tokens -> how many texts have so many; of `messages`, all their contents together."""
    lengths: dict[str, Counter[int]] = {column: Counter() for column in (*TEXTS, "messages")}
    for rows in parts:
        for column in TEXTS:
            lengths[column] += _lengths([row[column] for row in rows if row.get(column)], tokenizer)
        messages = ["\n".join(m["content"] for m in row["messages"]) for row in rows if "messages" in row]
        lengths["messages"] += _lengths(messages, tokenizer)
    return {column: of_column for column, of_column in lengths.items() if of_column}


def _lengths(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> Counter[int]:
    from rlhf_core.models.tokenizer import encode_texts

    counts = Counter(texts)
    lengths: Counter[int] = Counter()
    for text, ids in encode_texts(tokenizer, list(counts)):
        lengths[len(ids)] += counts[text]
    return lengths


def length_histograms(lengths: dict[str, dict[str, Counter[int]]]) -> Iterator[tuple[str, str, int, int, int]]:
    """Rows of LENGTH_COLUMNS: low <= tokens < high, the same whole numbers for all columns of a use, so that they compare."""
    for use, columns in lengths.items():
        longest = max((max(of_column) for of_column in columns.values()), default=0)
        width = -(-(longest + 1) // MAX_BINS)
        for column, of_column in columns.items():
            binned: Counter[int] = Counter()
            for tokens, texts in of_column.items():
                binned[tokens // width] += texts
            for i in range(longest // width + 1):
                yield use, column, i * width, (i + 1) * width, binned[i]


if __name__ == "__main__":
    no_arguments(__doc__)
    main()
