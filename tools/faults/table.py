"""The results of the matrix as a table in a page of the documentation, between two marks."""

from __future__ import annotations

import json
import re
from pathlib import Path

BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
HEADER = "| stage | process or file | fault | exit code | said | left | result of the next run | |\n|---|---|---|---|---|---|---|---|"


def write_table(results: Path, page: Path, cells: list[str]) -> None:
    """The newest row of each cell, in the order of `cells`, and the names of those that were never tried out.

    Raises:
        ValueError: the page has no marks.
    """
    rows = {row["cell"]: row for row in map(json.loads, results.read_text().splitlines())}
    text = page.read_text()
    if BEGIN not in text or END not in text:
        raise ValueError(f"{page}: expected the marks {BEGIN} and {END}, got a page without; put them where the table belongs")
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    lines = [_line(rows[name]) for name in cells if name in rows]
    missing = ", ".join(f"`{name}`" for name in cells if name not in rows)
    rest = f"\nNot tried out yet ({len(cells) - len(lines)} of {len(cells)} cells): {missing}.\n" if missing else ""
    page.write_text(f"{before}{BEGIN}\n{HEADER}\n" + "\n".join(lines) + f"\n{rest}{END}{after}")


def _line(row: dict) -> str:
    shown = [row["stage"], row["process"], row["fault"], row["exit_code"], _escaped(row["said"]), row["left"], row["result"]]
    verdict = "ok" if not row["problems"] else "**not ok**: " + _escaped("; ".join(row["problems"]))
    return "| " + " | ".join(map(str, [*shown, verdict])) + " |"


def _escaped(text: str) -> str:
    """For a cell of a table; numbers of processes, hosts and jobs differ from run to run."""
    text = re.sub(r"process \d+ on [0-9.]+", "process N on HOST", re.sub(r"rlhf-[0-9a-f]{12}-[0-9a-f]{8}", "ID", text))
    return text.replace("|", "\\|").replace("<", "&lt;").replace("_", "\\_").replace("*", "\\*")
