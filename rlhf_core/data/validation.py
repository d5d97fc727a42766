"""Validation of prepared data with Great Expectations: one suite per use, run in memory, findings as plain values.

Nothing here reaches the network or writes outside the folder for the Data Docs.
"""

from __future__ import annotations

import html
import logging
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import great_expectations as gx
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from great_expectations.core.expectation_validation_result import ExpectationValidationResult
from great_expectations.data_context import EphemeralDataContext
from great_expectations.data_context.types.base import DataContextConfig, InMemoryStoreBackendDefaults, ProgressBarsConfig
from great_expectations.exceptions import GreatExpectationsError
from great_expectations.execution_engine import pandas_execution_engine

from rlhf_core.config import ValidationConfig
from rlhf_core.data.compact import across_uses, measure_table
from rlhf_core.data.docs import make_offline
from rlhf_core.data.expectations import Check, checks_for, leakage_checks, presence_checks, schema_checks
from rlhf_core.data.measures import schema_frame
from rlhf_core.data.origins import places
from rlhf_core.data.schema import MESSAGES, SCHEMAS, WIDE_MESSAGES, read_batches

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ALL_USES = "all"
# What the later stages read: without rows there they have nothing to do.
READ_LATER = (("sft", "train"), ("preference", "train"), ("preference", "test"), ("prompt", "train"), ("prompt", "test"))
IDS_IN_MESSAGE = 5
NO_ID = "(no id)"
DOCS_SITE = "validation"

pandas_execution_engine.HASH_THRESHOLD = 0  # no fingerprints of tables: nothing reads them, and one takes 300 bytes of memory for each row

log = logging.getLogger("rlhf")


@dataclass(frozen=True)
class Finding:
    """What one expectation found in one use.

    checked, unexpected: rows; unexpected is None where the expectation is about the whole table.
    observed: the number that is compared with the limit, in `unit`.
    ids: of unexpected rows, sorted and all of them.
    places: of the first of them, where a check failed: id -> where the row's record stands and how its text starts.
    """

    name: str
    use: str
    meaning: str
    advice: str
    checked: int
    unexpected: int | None
    observed: float
    bound: str
    limit: float
    unit: str
    passed: bool
    ids: tuple[str, ...]
    places: Mapping[str, str] = field(default_factory=dict)

    def message(self) -> str:
        """For people: which expectation, how many rows, the limit, the first ids and where they come from, what to do."""
        if self.unexpected is None:
            return f"{self.use}: {self.name}: expected {self.unit} {self.bound} {self.limit:g}, got {self.observed:.4g}; {self.advice}"
        more = len(self.ids) - IDS_IN_MESSAGE
        ids = ", ".join(f"{i} ({self.places[i]})" if i in self.places else i for i in self.ids[:IDS_IN_MESSAGE]) + (
            f" and {more} more" if more > 0 else ""
        )
        return (
            f"{self.use}: {self.name}: expected that {self.meaning} ({self.unit} that break this: {self.bound} {self.limit:g}), "
            f"got {self.unexpected} of {self.checked} ({self.observed:.4g}): {ids}; {self.advice}"
        )


class Validator:
    """A Great Expectations context in memory; each call of `run` adds a suite and its result to the Data Docs."""

    def __init__(self):
        config = DataContextConfig(
            store_backend_defaults=InMemoryStoreBackendDefaults(),
            analytics_enabled=False,
            progress_bars=ProgressBarsConfig(globally=False, metric_calculations=False),
        )
        self._context: EphemeralDataContext = gx.get_context(mode="ephemeral", project_config=config)
        self._source = self._context.data_sources.add_pandas("prepared")

    def run(self, suite_name: str, use: str, frame: pd.DataFrame, checks: list[Check]) -> list[Finding]:
        """Check a table with a column `id`. Findings come in the order of the checks.

        Raises:
            RuntimeError: an expectation couldn't be computed, which is a fault of ours.
        """
        for check in checks:
            check.expectation.description = check.meaning
            check.expectation.meta = {"name": check.name}
        batch = self._source.add_dataframe_asset(suite_name).add_batch_definition_whole_dataframe("all rows")
        suite = self._context.suites.add(gx.ExpectationSuite(name=suite_name, expectations=[check.expectation for check in checks]))
        definition = gx.ValidationDefinition(name=suite_name, data=batch, suite=suite)
        result = self._context.validation_definitions.add(definition).run(
            batch_parameters={"dataframe": _escaped(frame)},
            result_format={
                "result_format": "COMPLETE",
                "unexpected_index_column_names": ["id"],
                "return_unexpected_index_query": False,
            },
        )
        seen = self._source.get_execution_engine().batch_manager  # which keeps every table
        seen.reset_batch_cache()
        seen.batch_data_cache.clear()
        by_name = {r.expectation_config.meta["name"]: r for r in result.results}
        return [_finding(use, check, by_name[check.name], rows=len(frame)) for check in checks]

    def write_docs(self, folder: Path) -> None:
        """The Data Docs, a site of HTML files that load nothing from elsewhere. They contain times, so no two runs write the same.

        Raises:
            OSError, GreatExpectationsError: they couldn't be written.
        """
        backend = {"class_name": "TupleFilesystemStoreBackend", "base_directory": str(folder.absolute())}
        site = {"class_name": "SiteBuilder", "site_index_builder": {"class_name": "DefaultSiteIndexBuilder"}, "store_backend": backend}
        self._context.add_data_docs_site(DOCS_SITE, site)
        self._context.build_data_docs(site_names=[DOCS_SITE])
        make_offline(folder)


def validate(
    tables: dict[str, pq.ParquetFile],
    tokenizer: PreTrainedTokenizerBase,
    config: ValidationConfig,
    *,
    max_length: int,
    reward_model: bool = True,
    needed: Sequence[tuple[str, str]] = READ_LATER,
    docs: Path | None = None,
) -> list[Finding]:
    """Every check of every use. `tables` has those that prepare_data made; `docs`: a folder for the Data Docs.

    A use whose schema is wrong is not looked at further. Findings don't depend on the order of the rows.

    Args:
        reward_model: whether one is trained, for which there must be preferences.
        needed: uses and splits in which there must be rows.
    """
    validator, findings, places = Validator(), [], {}
    for use in (u for u in SCHEMAS if u in tables):
        schema = validator.run(f"schema of {use}", use, schema_frame(use, _types(use, tables[use].schema_arrow)), schema_checks())
        findings += schema
        if all(f.passed for f in schema):
            frame, places[use] = measure_table(use, tables[use], tokenizer)
            findings += validator.run(use, use, frame, checks_for(use, frame, config, max_length=max_length))
            del frame  # before the next one is made
    findings += validator.run("rows", ALL_USES, _row_counts(tables, needed, reward_model=reward_model), presence_checks())
    findings += validator.run("splits", ALL_USES, across_uses(tables, places), leakage_checks())
    if docs is not None:
        _write_docs(validator, docs)
    return _located(findings, tables)


def _located(findings: list[Finding], tables: dict[str, pq.ParquetFile]) -> list[Finding]:
    """Those that failed with the places of the rows that their messages name; one pass over each file that has such rows."""
    asked: dict[str, set[str]] = {}
    for finding in (f for f in findings if not f.passed):
        for use, row_id in _named_rows(finding):
            asked.setdefault(use, set()).add(row_id)
    found = {use: places(tables[use], ids) for use, ids in asked.items() if use in tables}
    return [replace(f, places=_places(f, found)) if not f.passed else f for f in findings]


def _places(finding: Finding, found: dict[str, dict[str, str]]) -> dict[str, str]:
    named = zip(finding.ids, _named_rows(finding), strict=False)
    return {shown: found[use][row_id] for shown, (use, row_id) in named if row_id in found.get(use, {})}


def _named_rows(finding: Finding) -> list[tuple[str, str]]:
    """Use and id of the rows that the message names."""
    ids = finding.ids[:IDS_IN_MESSAGE]
    return [tuple(i.split(":", 1)) for i in ids if ":" in i] if finding.use == ALL_USES else [(finding.use, i) for i in ids]


def summary(findings: list[Finding], tables: dict[str, pq.ParquetFile], *, max_reported_ids: int) -> dict[str, Any]:
    """Findings as what metrics/validation.json holds: the same bytes for the same rows, whatever their order."""
    observed: dict[str, dict[str, float]] = {}
    for finding in findings:
        observed.setdefault(finding.use, {})[finding.name] = finding.observed
    return {
        "passed": all(f.passed for f in findings),
        "checked": len(findings),
        "failed": sum(not f.passed for f in findings),
        "rows": {use: table.metadata.num_rows for use, table in tables.items()},
        "observed": observed,
        "expectations": [_entry(f, max_reported_ids) for f in findings],
    }


def _entry(finding: Finding, max_reported_ids: int) -> dict[str, Any]:
    keys = ("name", "use", "meaning", "checked", "unexpected", "observed", "bound", "limit", "unit", "passed")
    return {key: getattr(finding, key) for key in keys} | {"ids": list(finding.ids[:max_reported_ids])}


def _finding(use: str, check: Check, result: ExpectationValidationResult, *, rows: int) -> Finding:
    if any(error["raised_exception"] for error in _exceptions(result.exception_info)):
        raise RuntimeError(f"{use}: {check.name}: expected a result, got {result.exception_info}; this is a fault of the check")
    if check.of_observed is None:
        checked = int(result.result["element_count"]) - int(result.result.get("missing_count") or 0)
        unexpected = int(result.result["unexpected_count"])
        observed = unexpected / checked if checked else 0.0
        found = [row["id"] for row in result.result.get("unexpected_index_list") or ()]
        ids = tuple(sorted(html.unescape(id_) if isinstance(id_, str) else NO_ID for id_ in found))
    else:
        checked, unexpected, ids = rows, None, ()
        observed = check.of_observed(float(result.result["observed_value"]))
    assert not math.isnan(observed)
    named = {"name": check.name, "use": use, "meaning": check.meaning, "advice": check.advice, "unit": check.unit}
    compared = {"observed": observed, "bound": check.bound, "limit": check.limit, "passed": bool(result.success)}
    return Finding(checked=checked, unexpected=unexpected, ids=ids, **named, **compared)


def _escaped(frame: pd.DataFrame) -> pd.DataFrame:
    """The texts of the data as the Data Docs can show them, which don't escape HTML. Texts stay as equal or different as they were."""
    texts = [c for c in frame if frame[c].dtype == "str" and frame[c].str.contains(r"[&<>\"']").any()]  # a copy of these alone
    narrow = {c: frame[c].cat.rename_categories(html.escape) for c in frame.select_dtypes("category")}
    return frame.assign(**narrow, **{c: frame[c].map(html.escape, na_action="ignore") for c in texts})


def _exceptions(info: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Great Expectations reports one exception flat, and several by the metric that raised."""
    yield from [info] if "raised_exception" in info else info.values()


def _types(use: str, schema: pa.Schema) -> dict[str, str]:
    """Column types as text; equal types read like those of SCHEMAS, which Parquet files name a little differently. Messages may be wide."""
    expected = {field.name: field.type for field in SCHEMAS[use]}
    schema = schema if "origin" in schema.names else schema.append(pa.field("origin", pa.string()))  # rows need none
    accepted = {name: [kind, WIDE_MESSAGES] if kind.equals(MESSAGES) else [kind] for name, kind in expected.items()}
    return {f.name: str(expected[f.name] if any(f.type.equals(k) for k in accepted.get(f.name, ())) else f.type) for f in schema}


def _row_counts(tables: dict[str, pq.ParquetFile], needed: Sequence[tuple[str, str]], *, reward_model: bool) -> pd.DataFrame:
    """id (`<use>:<split>`) and rows, of what later stages read."""
    read = [(use, split) for use, split in needed if reward_model or use != "preference"]
    counts = {use: _splits(table) for use, table in tables.items() if "split" in table.schema_arrow.names}
    rows = [counts.get(use, Counter())[split] for use, split in read]
    return pd.DataFrame({"id": [f"{use}:{split}" for use, split in read], "rows": rows})


def _splits(table: pq.ParquetFile) -> Counter[Any]:
    return Counter(split for batch in read_batches(table, ["split"]) for split in batch["split"].to_pylist())


def _write_docs(validator: Validator, folder: Path) -> None:
    try:
        validator.write_docs(folder)
    except (OSError, GreatExpectationsError) as error:
        log.warning("Data Docs: expected to write %s, got %s; the result itself is not affected", folder, error)
