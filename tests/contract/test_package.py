"""What an installation of the project puts beside other packages."""

from __future__ import annotations

import tomllib
from collections import Counter
from pathlib import Path

from setuptools import find_packages

ROOT = Path(__file__).parents[2]


def test_an_installation_has_one_import_package():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    found = find_packages(str(ROOT), **settings["packages"]["find"])
    assert {name.partition(".")[0] for name in found} == {"rlhf_core"}


def test_no_two_test_files_have_one_name():
    """pytest imports them by their names alone and would leave one out."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []
