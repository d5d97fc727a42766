"""Lays out the site's sources: pages of docs/, and a page for each other file of the repository that they link to."""

from __future__ import annotations

import csv
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

LINK = re.compile(r"(?<=\]\()([^)\s#]*)(#[^)\s]*)?(?=\))")
FENCE = re.compile(r"(^ *```.*?^ *```$)", re.DOTALL | re.MULTILINE)
RENAMED = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md"}
LANGUAGES = {".py": "python", ".yaml": "yaml", ".toml": "toml"}


def lay_out(root: Path, target: Path, made: dict[Path, str]) -> None:
    """Write the sources of all pages into an empty folder `target`: CONTRIBUTING.md and docs/, then what they link to, and so on.

    Args:
        made: texts of further pages, by the paths that they would have in the repository.
    """
    shutil.rmtree(target, ignore_errors=True)
    waiting = [*made, Path("CONTRIBUTING.md"), *(path.relative_to(root) for path in sorted((root / "docs").rglob("*")) if path.is_file())]
    done: set[Path] = set()
    while waiting:
        source = waiting.pop(0)
        if source not in done:
            done.add(source)
            waiting += _lay_out_file(root, source, target, made)


def site_path(source: Path) -> Path:
    """Where the page of a file of the repository is in the site's sources; paths are relative."""
    if str(source) in RENAMED:
        return Path(RENAMED[str(source)])
    below = source.relative_to("docs") if source.parts[0] == "docs" else Path("files") / source
    is_page = below.suffix in (".md", ".svg", ".png")
    return below if is_page else below.with_name(f"{below.name}.md")


def relinked(text: str, source: Path) -> tuple[str, list[Path]]:
    """A page of the repository with its links as the site needs them, and the files that it links to."""
    linked: list[Path] = []

    def replaced(found: re.Match[str]) -> str:
        name, anchor = found[1], found[2] or ""
        if not name or re.match(r"\w+:", name):
            return found[0]
        linked.append(Path(os.path.normpath(source.parent / name)))
        return os.path.relpath(site_path(linked[-1]), site_path(source).parent) + anchor

    parts = FENCE.split(text)
    parts[::2] = [LINK.sub(replaced, part) for part in parts[::2]]
    return "".join(parts), linked


def _lay_out_file(root: Path, source: Path, target: Path, made: dict[Path, str]) -> list[Path]:
    """Write one file's page and return the files that it links to."""
    place = target / site_path(source)
    place.parent.mkdir(parents=True, exist_ok=True)
    if place.suffix != ".md":
        shutil.copyfile(root / source, place)
        return []
    make = MAKERS.get(source.suffix, _code)
    text, linked = make(source, made.get(source) or (root / source).read_text(encoding="utf-8"))
    place.write_text(text, encoding="utf-8")
    return linked


def _markdown(source: Path, text: str) -> tuple[str, list[Path]]:
    return relinked(text, source)


def _code(source: Path, text: str) -> tuple[str, list[Path]]:
    return f"# {source}\n\n```{LANGUAGES.get(source.suffix, 'text')}\n{text.rstrip()}\n```\n", []


def _table(source: Path, text: str) -> tuple[str, list[Path]]:
    rows = [[cell.replace("|", "\\|") for cell in row] for row in csv.reader(text.splitlines())]
    lines = ["| " + " | ".join(row) + " |" for row in [rows[0], ["---"] * len(rows[0]), *rows[1:]]]
    return f"# {source.name}\n\n" + "\n".join(lines) + "\n", []


MAKERS: dict[str, Callable[[Path, str], tuple[str, list[Path]]]] = {".md": _markdown, ".csv": _table}
