"""Stage validate_data: check the prepared data against every expectation, and stop the chain before training if one fails.

Reads data/prepared and data/measured. Always writes the verdict to metrics/validation.json, and the Data Docs for people. If an
expectation fails, the stage ends with an error that names expectations, counts and rows.
"""

from __future__ import annotations

import logging

from rlhf_core.config import needs_pairs, rows_needed
from rlhf_core.data.schema import open_tables
from rlhf_core.paths import DATA_ACCEPTED, DATA_DOCS, MEASURED, PREPARED, STAGE_METRICS
from rlhf_core.stage.files import publish, write_json
from rlhf_core.stage.run import Stage, StageRefused, no_arguments

log = logging.getLogger("rlhf")


def main() -> None:
    with Stage("validate_data", resumable=False) as stage:
        tables = open_tables(PREPARED)
        logging.getLogger("great_expectations").setLevel(logging.WARNING)
        # Imported late because it takes seconds: invalid params and unreadable files are refused first.
        from rlhf_core.preparation.validation.tables import read_measured
        from rlhf_core.preparation.validation.validate import summary, validate

        params, docs = stage.params, stage.scratch / "data_docs"
        findings = validate(
            tables,
            lambda use: read_measured(MEASURED, use, tables[use]),
            params.validation,
            max_length=params.model.max_length,
            needed=rows_needed(params),
            pairs=needs_pairs(params),
            external=params.gate.external if params.reward.enabled else (),
            docs=docs,
        )
        write_json(STAGE_METRICS["validate_data"], summary(findings, tables, max_reported_ids=params.validation.max_reported_ids))
        if docs.is_dir():
            publish(docs, DATA_DOCS)
        for finding in findings:
            if finding.name == "too_long" and finding.passed and finding.unexpected:
                log.info("%s: %d of %d rows are too long; later stages drop them", finding.use, finding.unexpected, finding.checked)
        failed = [finding.message() for finding in findings if not finding.passed]
        if failed:
            failed.append(f"{len(failed)} of {len(findings)} expectations failed; nothing is trained on this data")
            raise StageRefused("\n".join(failed))
        write_json(DATA_ACCEPTED, {"accepted": True})
        log.info("%d expectations met by %d rows", len(findings), sum(table.metadata.num_rows for table in tables.values()))


if __name__ == "__main__":
    no_arguments(__doc__)
    main()
