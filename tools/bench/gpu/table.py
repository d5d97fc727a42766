"""Writes the results as Markdown for docs/gpu.md."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tools.bench.gpu.harness import NOT_RUN, PARTS, RAN, Part, Result
from tools.bench.gpu.record import Figure

BEGIN = "<!-- figures: written by python -m tools.bench.gpu --write -->"
END = "<!-- end of figures -->"
REHEARSAL = "**A rehearsal with a tiny shape: it shows that the check runs. No figure here is a GPU's.**"


def markdown(results: Sequence[Result], parts: Sequence[Part] = PARTS) -> str:
    """The results as Markdown with a section per part; parts without a result are marked as not run."""
    by_name = {result.part: result for result in results}
    lines = [REHEARSAL, ""] if any(result.rehearsal for result in results) else []
    for machine in dict.fromkeys(_machine(result) for result in results if result.about):
        lines += [machine, ""]
    for part in parts:
        lines += _section(part, by_name.get(part.name, Result(part.name, NOT_RUN)))
    return "\n".join(lines).rstrip() + "\n"


def _machine(result: Result) -> str:
    return "; ".join(f"{name} {value}" for name, value in result.about.items()) + "."


def _section(part: Part, result: Result) -> list[str]:
    lines = [f"### {part.name}: {part.title}", "", _outcome(result), ""]
    if not result.figures:
        return lines
    lines += ["| figure | median | min to max | unit | note |", "|---|---|---|---|---|"]
    return [*lines, *map(_row, result.figures), ""]


def _outcome(result: Result) -> str:
    where = f" on {result.about['device']}, {result.about['date']}" if result.about and result.outcome != NOT_RUN else ""
    took = f", {result.seconds:.0f} s" if result.seconds else ""
    why = f": {_cell(result.reason)}" if result.reason else ""
    # A skipped test is a figure without a value; a part with such figures only has checked nothing.
    empty = result.outcome == RAN and not any(figure.values for figure in result.figures)
    return f"Outcome: {result.outcome}{', nothing measured' if empty else ''}{took}{where}{why}."


def _row(figure: Figure) -> str:
    spread = f"{_number(min(figure.values))} to {_number(max(figure.values))}" if len(figure.values) > 1 else ""
    median = "none" if figure.median is None else _number(figure.median)
    return f"| {_cell(figure.what)} | {median} | {spread} | {_cell(figure.unit)} | {_cell(figure.note)} |"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def put_into(document: Path, results: Sequence[Result]) -> None:
    """Replace the text between a document's markers.

    Raises:
        ValueError: a result is from a rehearsal, or the document has no markers.
    """
    if rehearsed := [result.part for result in results if result.rehearsal]:
        raise ValueError(f"--write: expected results of a GPU, got a rehearsal's of {', '.join(rehearsed)}; give other folders")
    text = document.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{document}: expected the lines {BEGIN!r} and {END!r}, got none; put them where the figures belong")
    document.write_text(f"{before}{BEGIN}\n\n{markdown(results)}\n{END}{after}", encoding="utf-8")
