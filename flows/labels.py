"""Handles human labels: exports pairs for annotation, and imports the labels as preference data.

    rlhf labels export --round N [--series NAME] | --pairs FILE  --out DIR [--count K] [--seed S]
    rlhf labels import FILE [--export DIR] [--name NAME]

Labels are in data/labels, tracked by git instead of DVC: they are small, can't be recomputed, and so are part of each run's commit. An
import never overwrites labels.
"""

from __future__ import annotations

import datetime
import getpass
import json
import math
import re
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import pyarrow.parquet as pq
from cyclopts import Group, Parameter
from cyclopts.validators import LimitedChoice

from flows.chain.worktree import worktree_path
from rlhf_core.commands import Count, GivenPath, printed, run_module
from rlhf_core.config import shown
from rlhf_core.files import replace_text
from rlhf_core.paths import LABELS, round_folder
from rlhf_core.preparation.labels import KEY, LabelPair, decide, export_pairs, read_key, read_labels, sha256

CONFIDENCE = 0.95


_SOURCE_OF_PAIRS = Group("Pairs", validator=LimitedChoice(min=1))


@printed(ValueError, OSError)
def export(
    *,
    out: GivenPath,
    round_: Annotated[int | None, Parameter("--round", group=_SOURCE_OF_PAIRS)] = None,
    pairs: Annotated[GivenPath | None, Parameter(group=_SOURCE_OF_PAIRS)] = None,
    series: str = "iterative-dpo",
    count: Count | None = None,
    seed: int = 0,
) -> str:
    """Export pairs for annotation.

    Args:
        out: folder to be made.
        round_: pairs of a round of iterative DPO.
        pairs: a Parquet file with id, messages, chosen and rejected (and their scores).
        series: whose round.
        count: upper limit of pairs, sampled with the seed.
        seed: of the sample.
    """
    found, origin = read_pairs(round_, pairs, series)
    number = export_pairs(found, out, count=count, seed=seed, origin=origin)
    return f"{number} pairs in {out}; don't show {KEY} to annotators"


@printed(ValueError, OSError)
def import_(file: GivenPath, /, *, export: GivenPath | None = None, name: str | None = None) -> str:
    """Import labels as preference data.

    Args:
        file: pairs.jsonl with choices, or Label Studio's JSON export.
        export: the export that was labelled; by default the file's folder.
        name: of the source; by default the export's folder.
    """
    return import_labels(file, export or file.parent, name)


def read_pairs(round_: int | None, pairs: Path | None, series: str) -> tuple[list[LabelPair], str]:
    """Return the selected pairs and where they come from. Rows without both responses are skipped.

    Raises:
        ValueError: the file lacks a column. FileNotFoundError: there is no such file.
    """
    if pairs is not None:
        rows, origin = pq.read_table(pairs).to_pylist(), str(pairs)
    else:
        worktree = worktree_path(Path(), series)
        folder = (worktree if worktree.exists() else Path()) / round_folder(round_) / "data"
        rows, origin = _rows_of_round(folder), f"round {round_} of {series}"
    if rows and (missing := [c for c in ("id", "messages", "chosen", "rejected") if c not in rows[0]]):
        raise ValueError(f"{origin}: expected the columns id, messages, chosen and rejected, got none named {', '.join(missing)}")
    return [
        LabelPair(
            *(row[c] for c in ("id", "messages", "chosen", "rejected")), *(_number(row.get(c)) for c in ("chosen_score", "rejected_score"))
        )
        for row in rows
        if row["chosen"] is not None and row["rejected"] is not None
    ], origin


def _rows_of_round(folder: Path) -> list[dict[str, Any]]:
    """Return the round's pairs with their scores. Both files have a row for each prompt with a pair, in the prompts' order."""
    rows = pq.read_table(folder / "preference.parquet").to_pylist()
    samples = pq.read_table(folder / "samples.parquet", columns=["score", "used_as"]).to_pylist()
    scores = {use: [s["score"] for s in samples if s["used_as"] == use] for use in ("chosen", "rejected")}
    return [
        {**row, "chosen_score": chosen, "rejected_score": rejected}
        for row, chosen, rejected in zip(rows, scores["chosen"], scores["rejected"], strict=True)
    ]


def _number(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def import_labels(file: Path, export: Path, name: str | None) -> str:
    """Check the labels, write them to data/labels/<name>.jsonl with their provenance, and return a message for the user."""
    name = name or export.resolve().name
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,79}", name):
        expected = "at most 80 letters, digits, '.', '_' and '-', a letter or digit first"
        raise ValueError(f"name: expected {expected}, got {shown(name)!r}; choose one with --name")
    path = LABELS / f"{name}.jsonl"
    if path.exists():
        raise ValueError(f"{path}: expected a new name, got labels of that name; choose another one with --name")
    key = read_key(export / KEY)
    labels = decide(read_labels(file, key), key, confidence=CONFIDENCE)
    provenance = {
        "imported_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "imported_by": getpass.getuser(),
        "origin": key["origin"],
        "export_sha256": key["sha256"],
        "import_sha256": sha256(file),
        **labels.provenance,
    }
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in labels.rows)
    for file, text in ((path.with_suffix(".json"), json.dumps(provenance, indent=2, ensure_ascii=False) + "\n"), (path, lines)):
        replace_text(file, text)
    return "\n".join([*_counts(labels.provenance), _SOURCE.format(name=name, path=path, provenance=path.with_suffix(".json"))])


def _counts(provenance: dict[str, Any]) -> list[str]:
    counts = "{pairs_exported} pairs exported, {pairs_labelled} labelled, {pairs_decided} decided, {ties_dropped} ties dropped"
    lines = [counts.format(**provenance)]
    for key, what, of in (
        ("agreement_among_annotators", "annotators agree", "pairs"),
        ("agreement_with_scores", "labels agree with the scores", "prompts"),
    ):
        share = provenance[key]
        if share["n"]:
            lines.append(
                f"{what}: {share['value']:.3f} ({share['low']:.3f} to {share['high']:.3f}, n = {share['n']} on {share['clusters']} {of})"
            )
    return lines


_SOURCE = """\
To learn from them, commit {path} and {provenance}, and add to data.sources in params.yaml:
    - name: {name}
      kind: file
      uses: [preference]
      weight: 1.0
      path: {path}
      format: preference"""


main = partial(run_module, "labels")

if __name__ == "__main__":
    sys.exit(main())
