"""The page that lists every key of params.yaml with its values, its default and what it does."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlhf_core.config import Params, SharedTrainingConfig, parse_yaml, read_text
from rlhf_core.config.base import Section, subsection
from tools.explained import Explanation, comments_of, explain, pages_about

INTRODUCTION = """# Keys of params.yaml

Every section and key, made from the configuration's types and the comments of [params.yaml](../params.yaml).
A default is what a run has that doesn't write the key. Items of a list have `[]` in their name.
`rlhf params show KEY` explains a key on the command line, and says which stages a change of it reruns."""
UNHELPFUL = ("decisions", "coming_from", "comparison", "results", "performance")  # pages that name keys without explaining them
MOST_PAGES = 3


def params_page(root: Path) -> str:
    """The page as Markdown, with links as from a file of docs/."""
    text = read_text(root / "params.yaml")
    written, rows = parse_yaml(text, "params.yaml"), Rows(root / "docs", comments_of(text))
    parts = [INTRODUCTION]
    for name, field in Params.model_fields.items():
        section, _ = subsection(field.annotation)
        lines = list(rows.below(section, name, written[name])) if section else [rows.one(name, written[name])]
        shared = "It also has every key of [training](#training)." if _takes_training(section) else ""
        heading = ["| key | values | default | what it does |", "|---|---|---|---|"]
        parts += filter(None, [f"## {name}", _linked(explain(name, rows.comments).text), shared, "\n".join([*heading, *lines])])
    return "\n\n".join(parts) + "\n"


class Rows:
    """Makes the tables' rows; a kind of section that was listed before is referred to."""

    def __init__(self, docs: Path, comments: dict[str, str]) -> None:
        self.docs, self.comments = docs, comments
        self.listed: dict[type[Section], str] = {}

    def below(self, section: type[Section], path: str, written: Any) -> Iterator[str]:
        """The keys of a section and of the sections within it; keys that it takes over from `training` are left out."""
        for name, field in section.model_fields.items():
            key = f"{path}.{name}"
            if _takes_training(section) and name in SharedTrainingConfig.model_fields and key not in self.comments:
                continue
            value = written.get(name, ...) if isinstance(written, dict) else ...
            below, is_list = subsection(field.annotation)
            first = key if below is None else self.listed.setdefault(below, key)
            yield self.one(key, value, "" if first == key else f"Its keys are those of `{first}`.")
            if below is not None and first == key:
                inner = value[0] if is_list and isinstance(value, list) and value else value
                yield from self.below(below, f"{key}[]" if is_list else key, inner)

    def one(self, key: str, written: Any, more: str = "") -> str:
        found = explain(key.replace("[]", ""), self.comments)
        text = re.sub(r"^\w+( \| \w+)+$", "", found.text).rstrip(".")
        told = ". ".join(filter(None, [text, more])) or self._pages(found.key)
        cells = [f"`{key}`", _linked(found.kind), _default(found, written), _linked(told)]
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    def _pages(self, key: str) -> str:
        """The pages that name a key, for one that nothing else explains."""
        pages = [page.name for page in pages_about(key, self.docs) if page.stem not in UNHELPFUL]
        return "see " + ", ".join(f"docs/{name}" for name in pages[:MOST_PAGES]) if pages else ""


def _takes_training(section: type | None) -> bool:
    return section is not None and issubclass(section, SharedTrainingConfig) and section is not SharedTrainingConfig


def _default(found: Explanation, written: Any) -> str:
    """The default as JSON; empty for a section, whose keys follow."""
    if written is ... and found.required:
        return "required"
    value = found.default if written is ... else written
    return "" if found.below and value else f"`{json.dumps(value, ensure_ascii=False)}`"


def _linked(text: str) -> str:
    """A comment with links to the pages that it names, and Markdown's characters escaped outside code."""
    parts = re.split(r"(`[^`]*`)", text)
    parts[::2] = [re.sub(r"([<*_\[\]])", r"\\\1", part).replace("$", "&#36;") for part in parts[::2]]
    return re.sub(r"docs/([\w/\\]+)\.md", lambda found: (page := found[1].replace("\\", "")) and f"[{page}]({page}.md)", "".join(parts))
