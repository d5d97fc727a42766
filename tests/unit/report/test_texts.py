"""Texts of others are shown as text, in HTML and Markdown; figures have a fixed form."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_workspace import (
    make_workspace,
)

from rlhf_core.config import load_params
from rlhf_core.report.colors import MAX_POINTS, thin
from rlhf_core.report.files import read_inputs
from rlhf_core.report.page import json_for_html, render
from rlhf_core.report.texts import MAX_TEXT, markdown_block, markdown_text, measured, number, signed, visible


@given(st.text())
def test_json_in_the_page_can_not_end_its_element(text):
    encoded = json_for_html({"title": text})
    assert "<" not in encoded and encoded.isascii()
    assert json.loads(encoded) == {"title": text}


def test_what_can_not_be_seen_is_shown_by_number():
    assert visible("a\0b\x1b\u202ec\u2028d\n\te") == "a⟨U+0000⟩b⟨U+001B⟩⟨U+202E⟩c⟨U+2028⟩d\n\te"
    assert visible("\N{ZERO WIDTH JOINER}שלום") == "\N{ZERO WIDTH JOINER}שלום"
    assert visible("x" * (MAX_TEXT + 1500)) == "x" * MAX_TEXT + " […1,500 more characters]"


MARKS = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"


def test_nothing_in_a_page_changes_the_direction_of_reading(tmp_path, monkeypatch):
    """Whether or not a template asks for it: in texts, names, keys and figures."""
    workspace = make_workspace(tmp_path / "run", hostile=True)
    monkeypatch.chdir(workspace)
    inputs = read_inputs(load_params(), fingerprint="0" * 64)
    marked = replace(
        inputs,
        title=f"title {MARKS}",
        packages={f"torch{MARKS}": f"2{MARKS}"},
        outs={f"models/{MARKS}": f"md5{MARKS}"},
        external=[(f"data.sources.{MARKS}", f"{MARKS}.jsonl", f"0{MARKS}")],
        files={f"metrics/{MARKS}": "0" * 64},
        gate=json.loads(
            json.dumps(inputs.gate).replace('"sort"', json.dumps(f"sort{MARKS}")).replace('"category"', json.dumps(f"cat{MARKS}"))
        ),
        data=json.loads(json.dumps(inputs.data).replace('"clerk"', json.dumps(f"clerk{MARKS}"))),
        fingerprint=f"{MARKS}" * 9,
    )
    page = render(marked)
    assert not set(MARKS) & set(page) and "⟨U+202E⟩" in page
    assert not re.search(r"\\u(061c|200[ef]|202[a-e]|206[6-9])", page.partition('id="figures">')[2].partition("</script>")[0])


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("accuracy 0.9 (0.8 to 1.0), needs max_too_long", "accuracy 0.9 (0.8 to 1.0), needs max_too_long"),
        ("![x](http://evil/p.png)", r"!\[x\](http:\//evil/p.png)"),
        ("<img src=x onerror=y>", r"\<img src=x onerror=y\>"),
        ("see www.evil.example or a@b", r"see www\.evil.example or a\@b"),
        ("`a` ```b\n# c | d ~~~", r"\`a\` \`\`\`b # c \| d \~\~\~"),
        ("r\u202etl &lt;", r"r⟨U+202E⟩tl \&lt;"),
    ],
)
def test_text_of_others_is_only_text_in_markdown(text, written):
    assert markdown_text(text) == written


def test_nothing_ends_a_block_of_code_but_its_own_end():
    assert markdown_block("a\n```\n[x](y)\u202e") == "````\na\n```\n[x](y)⟨U+202E⟩\n````"
    assert markdown_block("plain `b`") == "```\nplain `b`\n```"


def test_figures_as_text():
    assert [number(v) for v in (None, 0, 0.4606, 8.1e-6, -2.5, 12_345.6)] == ["–", "0", "0.461", "8.10e-06", "−2.5", "12,346"]
    assert [measured(v, "score") for v in (None, float("nan"), -0.273, 3.0)] == ["–", "–", "−0.27", "3.00"]
    assert [signed(v, "share") for v in (0.352, -0.02, 0.0, -0.0001)] == ["+35.2", "−2.0", "0.0", "0.0"]


def test_long_curves_are_thinned_and_keep_their_ends():
    rows = thin(pd.DataFrame({"step": np.arange(25_000)}))
    assert len(rows) == MAX_POINTS and rows["step"].iloc[[0, -1]].tolist() == [0, 24_999]
    gaps = rows["step"].diff().dropna()
    assert gaps.min() >= 25 and gaps.max() <= 26
