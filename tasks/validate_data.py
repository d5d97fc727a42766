"""Stage validate_data: what prepare_data wrote must satisfy every expectation, or the chain stops before any training.

Reads data/prepared and models/tokenizer. The verdict is always in metrics/validation.json, whatever it is, and for people
in the Data Docs; a violation then ends the stage with an error that names expectations, counts and rows.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from rlhf_core.config import needs_pairs, rows_needed
from rlhf_core.data.schema import SCHEMAS, open_rows
from rlhf_core.paths import DATA_DOCS, METRICS, PREPARED, TOKENIZER
from rlhf_core.stage.files import publish, write_json
from rlhf_core.stage.run import Stage, StageFailed, no_arguments

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Classes that are nothing but tokenizer.json: loading one doesn't take the seconds that importing torch takes.
PLAIN_TOKENIZERS = ("TokenizersBackend", "PreTrainedTokenizerFast")

log = logging.getLogger("rlhf")


def main() -> None:
    with Stage("validate_data", resumable=False) as stage:
        tables = read_tables(PREPARED)
        logging.getLogger("great_expectations").setLevel(logging.WARNING)
        from rlhf_core.data.validation.validate import summary, validate  # takes seconds; parameters and files can be read by now

        config = stage.params.validation
        tokenizer = load(TOKENIZER, trust_remote_code=stage.params.model.trust_remote_code)
        docs = stage.scratch / "data_docs"
        wanted = {"needed": rows_needed(stage.params), "pairs": needs_pairs(stage.params)}
        findings = validate(tables, tokenizer, config, max_length=stage.params.model.max_length, docs=docs, **wanted)
        write_json(METRICS / "validation.json", summary(findings, tables, max_reported_ids=config.max_reported_ids))
        if docs.is_dir():
            publish(docs, DATA_DOCS)
        for finding in findings:
            if finding.name == "too_long" and finding.passed and finding.unexpected:
                log.info("%s: %d of %d rows are too long; later stages drop them", finding.use, finding.unexpected, finding.checked)
        failed = [finding.message() for finding in findings if not finding.passed]
        if failed:
            failed.append(f"{len(failed)} of {len(findings)} expectations failed; nothing is trained on this data")
            raise StageFailed("\n".join(failed))
        write_json(METRICS / "data_accepted.json", {"accepted": True})
        log.info("%d expectations met by %d rows", len(findings), sum(table.metadata.num_rows for table in tables.values()))


def read_tables(folder: Path) -> dict[str, pq.ParquetFile]:
    """The tables of the uses that have a file, to be read piece by piece.

    Raises:
        ValueError: a file is not Parquet.
    """
    tables = {}
    for path in (folder / f"{use}.parquet" for use in SCHEMAS):
        if path.exists():
            try:
                tables[path.stem] = open_rows(path)
            except pa.ArrowInvalid as error:
                raise ValueError(f"{path}: expected a Parquet file, got: {error}; run prepare_data again") from error
    return tables


def load(folder: Path, *, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """The prepared tokenizer, without importing torch where its class allows."""
    from rlhf_core.models.tokenizer import load_tokenizer, use_all_cores

    use_all_cores()
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    if settings.get("tokenizer_class") in PLAIN_TOKENIZERS and "auto_map" not in settings:
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(folder)
    return load_tokenizer(str(folder), trust_remote_code=trust_remote_code)


if __name__ == "__main__":
    no_arguments(__doc__)
    main()
