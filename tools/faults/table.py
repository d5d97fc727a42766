"""The results of the matrix as a table in a documentation page, between two marks: one row for the faults
and stages of a process that ended with one exit code."""

from __future__ import annotations

import json
import re
from pathlib import Path

BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
HEADER = "| process or file | fault | stages | exit code |\n|---|---|---|---|"


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
    tried = [rows[name] for name in cells if name in rows]
    stages: dict[tuple, list[str]] = {}
    for row in tried:
        stages.setdefault((row["process"], row["exit_code"], row["fault"]), []).append(row["stage"])
    faults: dict[tuple, list[str]] = {}
    for (process, code, fault), where in stages.items():
        faults.setdefault((process, code, ", ".join(where)), []).append(fault)
    lines = [f"| {process} | {', '.join(what)} | {where} | {code} |" for (process, code, where), what in faults.items()]
    failed = [f"- `{row['cell']}`: {_escaped('; '.join(row['problems']))}" for row in tried if row["problems"]]
    lines += ["", f"All {len(tried)} cells passed." if not failed else f"{len(failed)} of {len(tried)} cells failed:", *failed]
    missing = ", ".join(f"`{name}`" for name in cells if name not in rows)
    rest = f"\nNot tried ({len(cells) - len(tried)} of {len(cells)} cells): {missing}.\n" if missing else ""
    page.write_text(f"{before}{BEGIN}\n{HEADER}\n" + "\n".join(lines) + f"\n{rest}{END}{after}")


def _escaped(text: str) -> str:
    """For a cell of a table; numbers of processes, hosts and jobs differ from run to run."""
    text = re.sub(r"process \d+ on [0-9.]+", "process N on HOST", re.sub(r"rlhf-[0-9a-f]{12}-[0-9a-f]{8}", "ID", text))
    return text.replace("|", "\\|").replace("<", "&lt;").replace("_", "\\_").replace("*", "\\*")
