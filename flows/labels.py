"""Handles human labels: exports pairs for annotation, and imports the labels as preference data.

    python -m flows.labels export --round N [--series NAME] | --pairs FILE  --out DIR [--count K] [--seed S]
    python -m flows.labels import FILE [--export DIR] [--name NAME]

Labels are in data/labels, tracked by git instead of DVC: they are small, can't be recomputed, and so are part of each run's commit. An
import never overwrites labels.
"""

from __future__ import annotations

import argparse
import datetime
import getpass
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from flows.chain.worktree import worktree_path
from rlhf_core.config import shown
from rlhf_core.files import replace_text
from rlhf_core.paths import LABELS, round_folder
from rlhf_core.preparation.labels import KEY, LabelPair, decide, export_pairs, read_key, read_labels, sha256

CONFIDENCE = 0.95


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """The arguments of the command line."""
    parser = argparse.ArgumentParser(prog="python -m flows.labels", description="Human labels: export pairs, import labels.")
    commands = parser.add_subparsers(dest="command", required=True)
    out = commands.add_parser("export", help="pairs for annotation")
    what = out.add_mutually_exclusive_group(required=True)
    what.add_argument("--round", type=int, metavar="N", help="pairs of a round of iterative DPO")
    what.add_argument("--pairs", type=Path, metavar="FILE", help="a Parquet file with id, messages, chosen and rejected (and their scores)")
    out.add_argument("--series", default="iterative-dpo", metavar="NAME", help="whose round (default: %(default)s)")
    out.add_argument("--out", type=Path, required=True, metavar="DIR")
    out.add_argument("--count", type=int, metavar="K", help="upper limit of pairs, sampled with the seed")
    out.add_argument("--seed", type=int, default=0)
    back = commands.add_parser("import", help="labels back in")
    back.add_argument("file", type=Path, help="pairs.jsonl with choices, or Label Studio's JSON export")
    back.add_argument("--export", type=Path, metavar="DIR", help="the export that was labelled (default: the file's folder)")
    back.add_argument("--name", metavar="NAME", help="of the source (default: the export's folder)")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    try:
        if options.command == "export":
            pairs, origin = read_pairs(options)
            number = export_pairs(pairs, options.out, count=options.count, seed=options.seed, origin=origin)
            print(f"{number} pairs in {options.out}; don't show {KEY} to annotators")
        else:
            print(import_labels(options.file, options.export or options.file.parent, options.name))
    except (ValueError, OSError) as error:
        print(f"labels: {error}", file=sys.stderr)
        return 2
    return 0


def read_pairs(options: argparse.Namespace) -> tuple[list[LabelPair], str]:
    """Return the selected pairs and where they come from. Rows without both responses are skipped.

    Raises:
        ValueError: the file lacks a column. FileNotFoundError: there is no such file.
    """
    if options.pairs is not None:
        rows, origin = pq.read_table(options.pairs).to_pylist(), str(options.pairs)
    else:
        worktree = worktree_path(Path(), options.series)
        folder = (worktree if worktree.exists() else Path()) / round_folder(options.round) / "data"
        rows, origin = _rows_of_round(folder), f"round {options.round} of {options.series}"
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


if __name__ == "__main__":
    sys.exit(main())
