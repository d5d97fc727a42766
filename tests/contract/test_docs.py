"""What the pages name exists: links with their anchors, modules and functions, files of the repository, keys of params.yaml."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import get_args

import pytest
from cyclopts import CycloptsError, MissingArgumentError
from pydantic import BaseModel

from rlhf_core.commands import tree
from rlhf_core.config import Params

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
ROOMS = ("flows", "tasks", "rlhf_core", "tools", "tests", "docs", "recipes", "rounds", "rewards")
EXAMPLES = {"rewards/mine.py", "my_data.py", "rounds/rounds.md", "rounds/rounds.svg"}  # a user's files; files of a series of rounds
OLD_KEYS = {"iterative.promotion.confidence"}
pytestmark = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


@cache
def tracked() -> frozenset[str]:
    """Files of the repository and their folders."""
    done = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True)
    files = [Path(line) for line in done.stdout.splitlines()]
    return frozenset(str(path) for file in files for path in (file, *file.parents))


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def inline_code(page: Path) -> list[str]:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    if page.name == "coming_from.md":  # whose tables begin with other libraries' options
        text = re.sub(r"^\| .*? \|", "|", text, flags=re.MULTILINE)
    return re.findall(r"`([^`\n]+)`", text)


def test_links_lead_to_files_and_headings(page):
    missing = []
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"https?:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            missing.append(target)
    assert missing == []


def test_commands_name_modules_that_can_be_run(page):
    modules = {name for name in re.findall(r"python -m ([\w.]+\w)", page.read_text()) if name.split(".")[0] in ROOMS}
    missing = [name for name in modules if not {f"{name.replace('.', '/')}{end}" for end in (".py", "/__main__.py")} & tracked()]
    assert missing == []


def test_commands_of_rlhf_are_accepted(page):
    """In blocks of code and in backticks; what stands for something, as [SECTION] or ..., is left out."""
    blocks = re.findall(r"```.*?```|^ {4}.*$", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()] + inline_code(page)
    wrong = []
    for line in lines:
        found = re.match(r"\s*(?:\S*/|.*\| )?rlhf (.*)", line)
        if not found or "--help" in line:
            continue
        words = [word for word in shlex.split(re.sub(r"\[[^]]*\]|\.\.\.", "", found[1]), comments=True) if word != "&"]
        try:
            tree().parse_args(words, exit_on_error=False, print_error=False)
        except MissingArgumentError:
            pass  # `rlhf runs show`, in a sentence
        except CycloptsError as error:
            wrong.append(f"{line}: {error}")
    assert wrong == []


def test_files_of_the_repository_exist(page):
    words = {word.rstrip("/").partition(":")[0] for code in inline_code(page) for word in re.split(r"[\s,]", code) if "/" in word}
    named = {word for word in words if word.split("/")[0] in ROOMS}
    exact = {name for name in named if not re.search(r"[<>*{}$]|NAME|SERIES", name)}
    assert sorted(exact - tracked() - EXAMPLES) == []


def test_modules_in_backticks_and_functions_named_after_them_exist(page):
    """`x.py`, `folder/x.py`, `x.py: function`, `x.py: Class.method, function`."""
    missing = []
    for code in inline_code(page):
        found = re.fullmatch(r"([\w/]+\.py)(?:: ([\w., ]+))?", code)
        if not found or code in EXAMPLES:
            continue
        files = [ROOT / name for name in tracked() if f"/{name}".endswith(f"/{found[1]}")]
        texts = [file.read_text(encoding="utf-8") for file in files]
        names = re.findall(r"\w+", found[2] or "")
        if not any(all(re.search(rf"^(\s*(async )?(def|class) )?{name}\b", text, re.MULTILINE) for name in names) for text in texts):
            missing.append(code)
    assert missing == []


def test_keys_of_params_exist(page):
    keys = {code.partition("=")[0].partition(":")[0].strip() for code in inline_code(page)}
    named = {key for key in keys if re.fullmatch(r"[a-z]\w*(\.\w+)+", key) and key.split(".")[0] in Params.model_fields}
    files = {key for key in named if key.endswith((".json", ".yaml", ".py", ".csv", ".md"))}
    assert sorted(key for key in named - files - OLD_KEYS if not is_key([Params], key.split("."))) == []


def is_key(owners: list[type], names: list[str]) -> bool:
    """Whether any of the models, or what they hold, has a field by these names; a mapping has any."""
    if not names:
        return True
    fields = [owner.model_fields[names[0]].annotation for owner in owners if names[0] in owner.model_fields]
    if not fields:
        return False
    held = [part for field in fields for part in parts(field)]
    return dict in held or is_key([part for part in held if isinstance(part, type) and issubclass(part, BaseModel)], names[1:])


def parts(annotation: object) -> Iterator[object]:
    """A type and the types within it."""
    origin = getattr(annotation, "__origin__", None)
    yield origin or annotation
    for part in get_args(annotation):
        yield from parts(part)
