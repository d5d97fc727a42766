"""Each option of another library leads to keys of params.yaml that exist, or says that there is none."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rlhf_core.config import Params
from rlhf_core.config.base import section_keys

PAGE = (Path(__file__).parents[2] / "docs/coming_from.md").read_text()
ROWS = [row for row in re.findall(r"^\| (.+?) \| (.+?) \|(.*)\|$", PAGE, re.MULTILINE) if row[1] != "here"]
KEYS = {re.sub(r"\.0\b", "", key) for key in section_keys(Params)}
LIBRARIES = ("TRL", "OpenRLHF", "verl", "LLaMA-Factory")


@pytest.mark.parametrize("library", LIBRARIES)
def test_every_library_has_a_table(library):
    section = PAGE.split(f"\n## {library}\n")[1].split("\n## ")[0]
    assert len(re.findall(r"^\| [`-]", section, re.MULTILINE)) > 20


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_a_row_names_keys_of_ours_or_says_none(row):
    _, here, _ = row
    named = [code.partition(":")[0] for code in re.findall(r"`([^`]+)`", here)]
    keys = [name for name in named if "." in name]
    assert keys or re.match(r"none|no option|a scorer", here)
    assert [name for name in keys if name not in KEYS] == []
