"""The results of the matrix as a table in a page of the documentation, between two marks."""

from __future__ import annotations

import json
from pathlib import Path

BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
HEADER = "| stage | process or file | fault | exit code | said | left | result of the next run | |\n|---|---|---|---|---|---|---|---|"


def write_table(results: Path, page: Path) -> None:
    """The newest row of each cell, in the order in which the cells were first tried out.

    Raises:
        ValueError: the page has no marks.
    """
    rows = {row["cell"]: row for row in map(json.loads, results.read_text().splitlines())}
    text = page.read_text()
    if BEGIN not in text or END not in text:
        raise ValueError(f"{page}: expected the marks {BEGIN} and {END}, got a page without; put them where the table belongs")
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    lines = [_line(row) for row in rows.values()]
    page.write_text(f"{before}{BEGIN}\n{HEADER}\n" + "\n".join(lines) + f"\n{END}{after}")


def _line(row: dict) -> str:
    shown = [row["stage"], row["process"], row["fault"], row["exit_code"], _escaped(row["said"]), row["left"], row["result"]]
    verdict = "ok" if not row["problems"] else "**not ok**: " + _escaped("; ".join(row["problems"]))
    return "| " + " | ".join(map(str, [*shown, verdict])) + " |"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("_", "\\_").replace("*", "\\*")
