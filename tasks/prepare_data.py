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
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rlhf_core.config import DataConfig, ModelConfig
from rlhf_core.data.schema import SCHEMAS, SPLITS, write_rows, write_slices
from rlhf_core.data.sources import load_source
from rlhf_core.data.split import conversation_text, keep_share, split_of, with_ids
from tasks.stage import METRICS, PLOTS, PREPARED, TOKENIZER, Stage, publish, write_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Prepared = dict[str, list[dict]]  # use -> rows of the canonical schema

MAX_BINS = 48  # of a histogram of lengths
LENGTH_COLUMNS = ("use", "column", "low", "high", "texts")

log = logging.getLogger("rlhf")


def main() -> None:
    with Stage("prepare_data", resumable=False) as stage:
        params = stage.params
        rows, dropped = prepare(params.data, seed=params.seed)
        tokenizer = make_tokenizer(params.model, rows)
        aside = stage.scratch / "prepared"
        shutil.rmtree(aside, ignore_errors=True)
        for use, of_use in rows.items():
            write_rows(aside, use, of_use)
        if slices := {row["id"]: row["slices"] for row in rows.get("preference", []) if "slices" in row}:
            write_slices(aside, slices)
        write_json(aside / "sources.json", describe_sources(params.data, rows))
        tokenizer.save_pretrained(stage.scratch / "tokenizer")
        publish(aside, PREPARED)
        publish(stage.scratch / "tokenizer", TOKENIZER)
        lengths = {use: token_lengths(of_use, tokenizer) for use, of_use in rows.items()}
        metrics = summarize(rows, dropped, lengths, len(tokenizer))
        write_json(METRICS / "prepare_data.json", metrics)
        PLOTS.mkdir(exist_ok=True)
        with (PLOTS / "token_lengths.csv").open("w", newline="", encoding="utf-8") as file:
            table = csv.writer(file, lineterminator="\n")
            table.writerows([LENGTH_COLUMNS, *length_histograms(lengths)])
        for use, of_split in metrics["rows"].items():
            log.info("%s: %s", use, ", ".join(f"{count} {split}" for split, count in of_split.items()))


def prepare(config: DataConfig, *, seed: int) -> tuple[Prepared, dict[str, dict[str, int]]]:
    """The rows of all sources, mixed by weight and split, and per source how many records were left out and why."""
    heaviest = max(source.weight for source in config.sources)
    rows: Prepared = {use: [] for use in SCHEMAS}
    dropped: dict[str, dict[str, int]] = {}
    for source in config.sources:
        loaded = load_source(source, seed=seed)
        dropped[source.name] = loaded.dropped
        for use, of_use in loaded.rows.items():
            kept = keep_share(with_ids(of_use, source.name), source.weight / heaviest, config.max_rows)
            for row in kept:
                row["split"] = _split(row, config)
            rows[use] += kept
    return {use: of_use for use, of_use in rows.items() if of_use}, dropped


def _split(row: dict, config: DataConfig) -> str:
    text = row["text"] if "text" in row else conversation_text(row["messages"])
    return split_of(text, validation_fraction=config.validation_fraction, test_fraction=config.test_fraction)


def make_tokenizer(config: ModelConfig, rows: Prepared) -> PreTrainedTokenizerBase:
    """The tokenizer of the model at `config.path`; without one, a new one trained on the texts of the training split."""
    from rlhf_core.models.tokenizer import build_tokenizer, load_tokenizer, use_all_cores

    use_all_cores()
    if config.path is not None:
        return load_tokenizer(config.path, trust_remote_code=config.trust_remote_code)
    texts = (text for of_use in rows.values() for row in of_use if row["split"] == "train" for text in _texts(row))
    return build_tokenizer(texts, vocab_size=config.architecture.vocab_size)


def _texts(row: dict) -> Iterator[str]:
    yield from (message["content"] for message in row.get("messages", []))
    yield from (row[column] for column in ("text", "response", "chosen", "rejected") if row.get(column))


def describe_sources(config: DataConfig, rows: Prepared) -> dict[str, Any]:
    counts = Counter((row["source"], use, row["split"]) for use, of_use in rows.items() for row in of_use)
    return {
        source.name: {
            "kind": source.kind,
            "path": source.path,
            "format": source.format,
            "rows": {use: {split: counts[source.name, use, split] for split in SPLITS} for use in source.uses},
        }
        for source in config.sources
    }


def summarize(
    rows: Prepared, dropped: dict[str, dict[str, int]], lengths: dict[str, dict[str, Counter[int]]], vocabulary_size: int
) -> dict[str, Any]:
    """Counts, and mean lengths in tokens of the texts alone, without the template."""
    by_split = {use: Counter(row["split"] for row in of_use) for use, of_use in rows.items()}
    by_source = {use: Counter(row["source"] for row in of_use) for use, of_use in rows.items()}
    return {
        "rows": {use: {split: counts[split] for split in SPLITS} for use, counts in by_split.items()},
        "rows_by_source": {use: dict(counts) for use, counts in by_source.items()},
        "dropped": dropped,
        "vocabulary_size": vocabulary_size,
        "mean_tokens": {
            use: {column: sum(t * n for t, n in of_column.items()) / of_column.total() for column, of_column in columns.items()}
            for use, columns in lengths.items()
        },
    }


def token_lengths(rows: list[dict], tokenizer: PreTrainedTokenizerBase) -> dict[str, Counter[int]]:
    """Column -> number of tokens -> how many texts have so many; of `messages`, all their contents together."""
    columns = {column: [row[column] for row in rows if row.get(column)] for column in ("text", "response", "chosen", "rejected")}
    columns["messages"] = ["\n".join(m["content"] for m in row["messages"]) for row in rows if "messages" in row]
    return {column: _lengths(texts, tokenizer) for column, texts in columns.items() if texts}


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
    main()
