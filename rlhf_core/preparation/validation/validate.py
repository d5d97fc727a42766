"""Validation of prepared data with Great Expectations: one suite per use, run in memory; findings are plain values.

Nothing here uses the network or writes outside the folder for the Data Docs, which are made to open offline.
"""

from __future__ import annotations

import html
import logging
import math
import re
import shutil
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import great_expectations as gx
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from great_expectations.core.expectation_validation_result import ExpectationValidationResult
from great_expectations.data_context import EphemeralDataContext
from great_expectations.data_context.types.base import DataContextConfig, InMemoryStoreBackendDefaults, ProgressBarsConfig
from great_expectations.exceptions import GreatExpectationsError
from great_expectations.execution_engine import pandas_execution_engine

from rlhf_core.config import ExternalPairsConfig, ValidationConfig, reordering_shown
from rlhf_core.data.schema import MESSAGES, ORIGIN, SCHEMAS, WIDE_MESSAGES, read_batches
from rlhf_core.preparation.drops import located, start_of
from rlhf_core.preparation.validation.expectations import Check, checks_for, leakage_checks, presence_checks, repeat_checks, schema_checks
from rlhf_core.preparation.validation.repeats import prompts_repeated_in_training
from rlhf_core.preparation.validation.tables import across_uses, narrow, schema_frame

ALL_USES = "all"
# Rows that later stages need with a reward model and RL; `config.rows_needed` has them for each method.
READ_LATER = (("sft", "train"), ("preference", "train"), ("preference", "test"), ("prompt", "train"), ("prompt", "test"))
SIDES = ("chosen", "rejected")
IDS_IN_MESSAGE = 5
NO_ID = "(no id)"
DOCS_SITE = "validation"

pandas_execution_engine.HASH_THRESHOLD = 0  # no table fingerprints: nothing reads them, and one takes 300 bytes of memory a row

log = logging.getLogger("rlhf")

POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 1.5rem auto; max-width: 75rem; padding: 0 1rem; color: #222; background: #fff; }
table { border-collapse: collapse; margin: .5rem 0 1.5rem; }
th, td { border: 1px solid #ccc; padding: .3rem .6rem; vertical-align: top; text-align: left; }
.fa-check-circle::before { content: "\\2714"; color: #17803d; } .fa-times::before { content: "\\2718"; color: #c0262d; }
.fa-exclamation-triangle::before { content: "\\26A0"; }
.modal, .card.mb-3, .btn, .btn-group, .cta-footer, footer, form, input { display: none; }
.sticky, .ge-breadcrumbs { position: static; } .nav, .ge-breadcrumbs { list-style: none; padding-left: 0; }
"""
_SCRIPT = re.compile(
    r"<script\b.*?</script\s*>|<link\b[^>]*>|<style\b.*?</style\s*>|<img\b[^>]*>|<iframe\b.*?</iframe\s*>", re.DOTALL | re.IGNORECASE
)
_OUTSIDE = re.compile(r"<a\b[^>]*href=[\"']https?:[^>]*>(.*?)</a\s*>", re.DOTALL | re.IGNORECASE)
_INDEX = "index.html"

_READ = ("id", ORIGIN, "messages", "text")


@dataclass(frozen=True)
class Finding:
    """The result of one expectation on one use.

    checked, unexpected: rows; unexpected is None for an expectation about the whole table.
    observed: the number that is compared with the limit, in `unit`.
    ids: of all unexpected rows, sorted.
    places: for the first ids of a failed check: id -> the origin of the row's record and the start of its text.
    repeated_by: id -> the id of a training row that repeats the row.
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
    repeated_by: Mapping[str, str] = field(default_factory=dict)

    def message(self) -> str:
        """Return a message for people: expectation, limit, number of rows, the first ids with their origin, and what to do."""
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
    """A Great Expectations context in memory. Each call of `run` adds a suite and its result to the Data Docs."""

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
            RuntimeError: an expectation couldn't be computed, which is a bug of the check.
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
        batches = self._source.get_execution_engine().batch_manager  # it would keep every table
        batches.reset_batch_cache()
        batches.batch_data_cache.clear()
        by_name = {r.expectation_config.meta["name"]: r for r in result.results}
        return [_finding(use, check, by_name[check.name], rows=len(frame)) for check in checks]

    def write_docs(self, folder: Path) -> None:
        """Write the Data Docs, HTML files that load nothing from elsewhere. They contain times, so no two runs write the same bytes.

        Raises:
            OSError, GreatExpectationsError: the files couldn't be written.
        """
        backend = {"class_name": "TupleFilesystemStoreBackend", "base_directory": str(folder.absolute())}
        site = {"class_name": "SiteBuilder", "site_index_builder": {"class_name": "DefaultSiteIndexBuilder"}, "store_backend": backend}
        self._context.add_data_docs_site(DOCS_SITE, site)
        self._context.build_data_docs(site_names=[DOCS_SITE])
        make_offline(folder)


def validate(
    tables: dict[str, pq.ParquetFile],
    measured: Callable[[str], pd.DataFrame],
    config: ValidationConfig,
    *,
    max_length: int,
    needed: Sequence[tuple[str, str]] = READ_LATER,
    pairs: bool = True,
    external: Sequence[ExternalPairsConfig] = (),
    docs: Path | None = None,
) -> list[Finding]:
    """Run every check on every use. Findings don't depend on the order of the rows.

    A use with a wrong schema gets no other checks.

    Args:
        tables: use -> the file that prepare_data wrote.
        measured: use -> its measured rows (`read_measured`, `measure_table`); called for the uses with the right schema.
        needed: uses and splits that must have rows.
        pairs: whether the method learns from pairs; then there must be enough pairs, and single responses with a label don't count.
        external: pairs whose prompts must not be in training either.
        docs: a folder for the Data Docs.
    Raises:
        ValueError, FileNotFoundError: external pairs or measured rows can't be read.
    """
    validator, findings, places = Validator(), [], {}
    for use in (u for u in SCHEMAS if u in tables):
        schema = validator.run(f"schema of {use}", use, schema_frame(use, _types(use, tables[use].schema_arrow)), schema_checks())
        findings += schema
        if all(f.passed for f in schema):
            frame = measured(use)
            if "beginning" in frame:
                places[use] = pd.DataFrame({"conversation": frame.pop("beginning"), "split": frame["split"].astype("category")})
            frame = narrow(frame)
            findings += validator.run(use, use, frame, checks_for(use, frame, config, max_length=max_length, pairs=pairs))
            del frame  # only one use's table is in memory at a time
    findings += validator.run("rows", ALL_USES, _row_counts(tables, needed, pairs=pairs), presence_checks())
    findings += validator.run("splits", ALL_USES, across_uses(tables, places), leakage_checks())
    findings += _repeats(validator, {use: tables[use] for use in places}, config, external)
    if docs is not None:
        _write_docs(validator, docs)
    return _located(findings, tables)


def _repeats(
    validator: Validator, tables: dict[str, pq.ParquetFile], config: ValidationConfig, external: Sequence[ExternalPairsConfig]
) -> list[Finding]:
    frame = prompts_repeated_in_training(tables, external)
    if frame.empty:
        return []
    repeated_by = dict(zip(frame["id"], frame["near"].fillna(frame["contained"]), strict=True))
    findings = validator.run("prompts in training", ALL_USES, frame, repeat_checks(frame["group"].unique().tolist(), config))
    return [replace(f, repeated_by={i: repeated_by[i] for i in f.ids[:IDS_IN_MESSAGE]}) for f in findings]


def _located(findings: list[Finding], tables: dict[str, pq.ParquetFile]) -> list[Finding]:
    """Return the findings, failed ones with the places of the rows that their messages name; each file that has such rows is read once."""
    wanted: dict[str, set[str]] = {}
    for finding in (f for f in findings if not f.passed):
        for use, row_id in _named_rows(finding):
            wanted.setdefault(use, set()).add(row_id)
    found = {use: locate_rows(tables[use], ids) for use, ids in wanted.items() if use in tables}
    return [replace(f, places=_places(f, found)) if not f.passed else f for f in findings]


def _places(finding: Finding, found: dict[str, dict[str, str]]) -> dict[str, str]:
    """Return id -> place for the rows that the message names, where it is known, with the place of the training row that repeats it."""
    places = {}
    for shown_id in finding.ids[:IDS_IN_MESSAGE]:
        (use, row_id), repeat = _use_and_id(finding, shown_id), finding.repeated_by.get(shown_id)
        known = [found[use][row_id]] if row_id in found.get(use, {}) else []
        if repeat is not None:
            of_use, of_id = _use_and_id(finding, repeat)
            known.append(f"training has {found.get(of_use, {}).get(of_id, repeat)}")
        if known:
            places[shown_id] = "; ".join(known)
    return places


def _named_rows(finding: Finding) -> list[tuple[str, str]]:
    """Return (use, id) of the rows that the message names."""
    ids = finding.ids[:IDS_IN_MESSAGE]
    return [_use_and_id(finding, i) for i in (*ids, *(finding.repeated_by[i] for i in ids if i in finding.repeated_by))]


def _use_and_id(finding: Finding, shown_id: str) -> tuple[str, str]:
    use, _, row_id = shown_id.partition(":") if finding.use == ALL_USES else (finding.use, "", shown_id)
    return use, row_id


def summary(findings: list[Finding], tables: dict[str, pq.ParquetFile], *, max_reported_ids: int) -> dict[str, Any]:
    """Return the content of metrics/validation.json: the same for the same rows in any order."""
    keys = ("name", "use", "meaning", "checked", "unexpected", "observed", "bound", "limit", "unit", "passed")
    observed: dict[str, dict[str, float]] = {}
    for finding in findings:
        observed.setdefault(finding.use, {})[finding.name] = finding.observed
    return {
        "passed": all(f.passed for f in findings),
        "checked": len(findings),
        "failed": sum(not f.passed for f in findings),
        "rows": {use: table.metadata.num_rows for use, table in tables.items()},
        "observed": observed,
        "expectations": [{**{k: getattr(f, k) for k in keys}, "ids": list(f.ids[:max_reported_ids])} for f in findings],
    }


def _finding(use: str, check: Check, result: ExpectationValidationResult, *, rows: int) -> Finding:
    info = result.exception_info  # flat for a single exception, else by the metric that raised
    if any(error["raised_exception"] for error in ([info] if "raised_exception" in info else info.values())):
        raise RuntimeError(f"{use}: {check.name}: expected a result, got {info}; this is a bug of the check, report it")
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
    """Return the table with HTML characters escaped, which the Data Docs don't do. Equal texts stay equal, different ones different."""
    texts = [c for c in frame if frame[c].dtype == "str" and frame[c].str.contains(r"[&<>\"']").any()]  # copy no other columns
    narrow = {c: frame[c].cat.rename_categories(html.escape) for c in frame.select_dtypes("category")}
    return frame.assign(**narrow, **{c: frame[c].map(html.escape, na_action="ignore") for c in texts})


def _types(use: str, schema: pa.Schema) -> dict[str, str]:
    """Return column types as text, written as in SCHEMAS where they are equal: Parquet files name some differently. Messages may be
    wide.
    """
    expected = {field.name: field.type for field in SCHEMAS[use]}
    schema = schema if "origin" in schema.names else schema.append(pa.field("origin", pa.string()))  # the column is optional
    accepted = {name: [kind, WIDE_MESSAGES] if kind.equals(MESSAGES) else [kind] for name, kind in expected.items()}
    return {f.name: str(expected[f.name] if any(f.type.equals(k) for k in accepted.get(f.name, ())) else f.type) for f in schema}


def _row_counts(tables: dict[str, pq.ParquetFile], needed: Sequence[tuple[str, str]], *, pairs: bool) -> pd.DataFrame:
    """Return the table of presence_checks: id (`<use>:<split>`) and rows."""
    counts = {use: _splits(table, SIDES if pairs and use == "preference" else ()) for use, table in tables.items()}
    rows = [counts.get(use, Counter())[split] for use, split in needed]
    return pd.DataFrame({"id": [f"{use}:{split}" for use, split in needed], "rows": rows})


def _splits(table: pq.ParquetFile, filled: Sequence[str]) -> Counter[Any]:
    """Split -> rows in which the columns `filled` aren't null; empty if the table lacks a column."""
    columns = ["split", *filled]
    if not set(columns) <= set(table.schema_arrow.names):
        return Counter()
    found: Counter[Any] = Counter()
    for batch in read_batches(table, columns):
        found.update(split for split, *texts in zip(*(batch[c].to_pylist() for c in columns), strict=True) if None not in texts)
    return found


def _write_docs(validator: Validator, folder: Path) -> None:
    try:
        validator.write_docs(folder)
    except (OSError, GreatExpectationsError) as error:
        log.warning("Data Docs: expected to write %s, got %s; the result itself is not affected", folder, error)


_HEAD = f'<head><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{POLICY}"><style>{STYLE}</style>'


def make_offline(folder: Path) -> None:
    """Make the Data Docs in a folder open offline, without scripts and files from elsewhere, and write an index of links.

    The pages take style sheets, scripts, icons and images from five hosts, and a script draws the list of pages. The results themselves
    are in the pages' text.
    """
    pages = sorted(path for path in folder.rglob("*.html") if path != folder / _INDEX)
    for path in pages:
        path.write_text(offline(path.read_text(encoding="utf-8")), encoding="utf-8")
    (folder / _INDEX).write_text(index([path.relative_to(folder) for path in pages]), encoding="utf-8")
    shutil.rmtree(folder / "static", ignore_errors=True)


def offline(page: str) -> str:
    """Return a page without scripts, images, styles and outside links, with its own style and a policy that loads nothing."""
    page = _OUTSIDE.sub(r"\1", _SCRIPT.sub("", page))
    return reordering_shown(re.sub(r"<head\b[^>]*>", lambda _: _HEAD, page, count=1))


def index(pages: list[Path]) -> str:
    """Return the list of pages: results first, then expectations."""
    parts = []
    for kind, title in (("validations", "Results"), ("expectations", "Expectations")):
        links = [
            f'<li><a href="{quote(page.as_posix())}">{html.escape(page.parts[1].removesuffix(".html"))}</a></li>'
            for page in pages
            if page.parts[0] == kind
        ]
        parts.append(f"<h2>{title}</h2>\n<ul>\n" + "\n".join(links) + "\n</ul>")
    body = "\n".join(parts)
    return f"<!DOCTYPE html>\n<html>\n{_HEAD}<title>Data Docs</title></head>\n<body>\n<h1>Data Docs</h1>\n{body}\n</body>\n</html>\n"


def locate_rows(file: pq.ParquetFile, ids: Collection[str]) -> dict[str, str]:
    """Return id -> origin of the row's record and start of its text, for the ids that the file has."""
    wanted = pa.array(sorted(ids), type=pa.string())
    found: dict[str, str] = {}
    for batch in read_batches(file, [name for name in _READ if name in file.schema_arrow.names]) if ids else ():
        for row in batch.filter(pc.is_in(batch["id"], value_set=wanted)).to_pylist():
            found.setdefault(row["id"], located(row.get(ORIGIN), start_of(row)))
    return found
