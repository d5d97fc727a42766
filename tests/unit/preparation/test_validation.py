"""Every expectation is broken on purpose, alone, and must be caught with the right count and rows."""

from __future__ import annotations

import json
import logging
import re
from copy import deepcopy
from html.parser import HTMLParser
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chat_templates import TEMPLATES, templated
from measured_rows import measured
from strict_limits import strict_limits
from whole_matrix import cells

from rlhf_core.data.schema import SCHEMAS
from rlhf_core.models.tokenizer import build_tokenizer, encode_conversation, turn_end
from rlhf_core.preparation.validation.measures import measure
from rlhf_core.preparation.validation.validate import NO_ID, Finding, summary, validate
from tasks.rounds.validate_round import with_advice

CONFIG = strict_limits(max_length_bias=0.25, min_label_balance=0.2, min_pairs=10, max_reported_ids=3)
MAX_LENGTH = 60
SPLIT = ("train", "train", "train", "validation", "test")
LONG_NO = "No" + ", no" * 9 + "."
Rows = dict[str, list[dict]]


def user(content: str) -> list[dict]:
    return [{"role": "user", "content": content}]


def row(use: str, i: int, **columns) -> dict:
    return {"id": f"{use}{i:02d}", "source": "made", "split": SPLIT[i % 5], **columns}


@pytest.fixture
def rows() -> Rows:
    """Data that satisfies everything: 20 conversations, in sft and prompt once and in preference as one pair."""
    return {
        "pretrain": [row("pretrain", i, text=f"{i} and {i} is {2 * i}") for i in range(20)],
        "sft": [row("sft", i, messages=user(f"Double {i}."), response=f"It is {2 * i}.") for i in range(20)],
        "preference": [
            row("preference", i, messages=user(f"Double {i}."), chosen=f"It is {2 * i}.", rejected=LONG_NO if i % 2 else "No.")
            for i in range(20)
        ],
        "prompt": [row("prompt", i, messages=user(f"Double {i}."), label=None) for i in range(20)],
    }


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer([f"Double {i}. It is {i}. No, no." for i in range(20)], vocab_size=300)


def parquet(table: pa.Table) -> pq.ParquetFile:
    """In memory."""
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    return pq.ParquetFile(sink.getvalue())


def tables(rows: Rows) -> dict[str, pq.ParquetFile]:
    return {use: parquet(pa.Table.from_pylist(content, schema=SCHEMAS[use])) for use, content in rows.items()}


def validated(of: dict[str, pq.ParquetFile], tokenizer, config, **how) -> list[Finding]:
    return validate(of, measured(of, tokenizer), config, **how)


def check(rows: Rows, tokenizer, *, only: str | None = None, **changes) -> list[Finding]:
    """What validation finds in all uses, or in one, which takes less time, with some of CONFIG's limits changed."""
    chosen = rows if only is None else {only: rows[only]}
    findings = validated(tables(chosen), tokenizer, CONFIG.model_copy(update=changes), max_length=MAX_LENGTH)
    return [f for f in findings if only is None or f.use == only]


def failures(findings: list[Finding]) -> list[tuple]:
    return [(f.use, f.name, f.unexpected, f.ids) for f in findings if not f.passed]


def test_sound_data_passes_every_expectation(rows, tokenizer):
    findings = check(rows, tokenizer)
    assert failures(findings) == []
    assert {f.use for f in findings} == {"all", *rows}
    assert all(f.unexpected == 0 for f in findings if f.name not in ("length_bias", "min_pairs"))


# (use, expectation, rows to change and how, ids that are found; default: those that were changed)
TWINS = ("preference03", "preference08")  # both in train
TRIPLE = [{"role": r, "content": "Double 1."} for r in ("user", "assistant", "user")]
BROKEN = [
    ("sft", "nulls.id", {3: {"id": None}}, (NO_ID,)),
    ("sft", "nulls.source", {3: {"source": None}, 5: {"source": None}}, None),
    ("prompt", "nulls.split", {3: {"split": None}}, None),
    ("prompt", "nulls.messages", {3: {"messages": None}}, None),
    ("sft", "nulls.response", {3: {"response": None}}, None),
    ("pretrain", "nulls.text", {3: {"text": None}}, None),
    ("preference", "nulls.chosen_and_rejected", {1: {"chosen": None, "rejected": None}}, None),
    ("sft", "ids_unique", {3: {"id": "sft04"}}, ("sft04", "sft04")),
    ("pretrain", "split_names", {3: {"split": "dev"}}, None),
    ("pretrain", "empty.text", {3: {"text": " \n"}, 8: {"text": ""}}, None),
    ("sft", "empty.response", {3: {"response": "  "}}, None),
    ("sft", "empty.messages", {3: {"messages": user("\t")}}, None),
    ("sft", "empty.messages", {3: {"messages": [{"role": "user", "content": None}]}}, None),
    ("preference", "empty.chosen", {3: {"chosen": ""}}, None),
    ("preference", "empty.rejected", {3: {"rejected": ""}}, None),
    ("preference", "identical_pairs", {3: {"rejected": "It is 6."}, 4: {"rejected": "It is 8.\n"}}, None),
    ("preference", "duplicate_pairs", {8: {"messages": user("Double 3."), "chosen": "It is 6.", "rejected": LONG_NO}}, TWINS),
    ("preference", "contradictory_pairs", {8: {"messages": user("Double 3."), "chosen": LONG_NO, "rejected": "It is 6."}}, TWINS),
    ("pretrain", "too_long", {3: {"text": "8" * 60}}, None),
    ("sft", "too_long", {3: {"response": "8" * 60}}, None),
    ("preference", "too_long", {2: {"rejected": "8" * 60}, 3: {"chosen": "8" * 60}}, None),
    ("prompt", "too_long", {3: {"messages": user("8" * 60)}}, None),
    ("prompt", "role_order", {3: {"messages": TRIPLE[:2]}}, None),
    ("prompt", "role_order", {3: {"messages": [*TRIPLE[:1], *TRIPLE[:1]]}}, None),
    ("sft", "role_order", {3: {"messages": [*TRIPLE[:1], {"role": "system", "content": "Be brief."}, *TRIPLE[2:]]}}, None),
    ("sft", "role_order", {3: {"messages": [{"role": "human", "content": "Double 3."}]}, 4: {"messages": []}}, None),
]


# Every kind of expectation once, each in rows of its own.
TOGETHER = [
    ("pretrain", "nulls.text", {12: {"text": None}}, None),
    ("pretrain", "split_names", {3: {"split": "dev"}}, None),
    ("pretrain", "empty.text", {5: {"text": " \n"}, 8: {"text": ""}}, None),
    ("pretrain", "too_long", {10: {"text": "8" * 60}}, None),
    ("sft", "nulls.id", {1: {"id": None}}, (NO_ID,)),
    ("sft", "nulls.source", {2: {"source": None}}, None),
    ("sft", "nulls.response", {3: {"response": None}}, None),
    ("sft", "ids_unique", {4: {"id": "sft05"}}, ("sft05", "sft05")),
    ("sft", "empty.response", {6: {"response": "  "}}, None),
    ("sft", "empty.messages", {7: {"messages": user("\t")}}, None),
    ("sft", "too_long", {8: {"response": "8" * 60}}, None),
    ("sft", "role_order", {9: {"messages": [{"role": "human", "content": "Double 9."}]}}, None),
    ("preference", "nulls.chosen_and_rejected", {1: {"chosen": None, "rejected": None}}, None),
    ("preference", "empty.chosen", {2: {"chosen": ""}}, None),
    ("preference", "empty.rejected", {3: {"rejected": ""}}, None),
    ("preference", "identical_pairs", {4: {"rejected": "It is 8.\n"}}, None),
    (
        "preference",
        "duplicate_pairs",
        {13: {"messages": user("Double 8."), "chosen": "It is 16.", "rejected": "No."}},
        ("preference08", "preference13"),
    ),
    (
        "preference",
        "contradictory_pairs",
        {10: {"messages": user("Double 5."), "chosen": LONG_NO, "rejected": "It is 10."}},
        ("preference05", "preference10"),
    ),
    ("preference", "too_long", {6: {"rejected": "8" * 60}}, None),
    ("prompt", "nulls.split", {3: {"split": None, "messages": user("Who?")}}, None),
    ("prompt", "nulls.messages", {5: {"messages": None}}, None),
    ("prompt", "too_long", {6: {"messages": user("8" * 60)}}, None),
    ("prompt", "role_order", {11: {"messages": TRIPLE[:2]}}, None),
]


def test_violations_of_every_kind_are_found_beside_each_other(rows, tokenizer):
    for use, _, changes, _ in TOGETHER:
        for i, columns in changes.items():
            rows[use][i] |= columns
    expected = {(use, name, ids or tuple(rows[use][i]["id"] for i in changes)) for use, name, changes, ids in TOGETHER}
    assert {(use, name, ids) for use, name, _, ids in failures(check(rows, tokenizer))} == expected


@pytest.mark.long
@pytest.mark.parametrize(("use", "name", "changes", "ids"), BROKEN, ids=[f"{use}-{name}-{i}" for i, (use, name, *_) in enumerate(BROKEN)])
def test_each_violation_is_caught_alone(rows, tokenizer, use, name, changes, ids):
    for i, columns in changes.items():
        rows[use][i] |= columns
    found = ids or tuple(rows[use][i]["id"] for i in changes)
    assert failures(check(rows, tokenizer, only=use)) == [(use, name, len(found), found)]


def test_wrong_columns_break_the_schema_and_skip_other_checks(rows, tokenizer):
    prepared = tables(rows)
    prepared["sft"] = parquet(prepared["sft"].read().drop_columns(["response"]).append_column("answer", pa.array(["x"] * 20)))
    prepared["prompt"] = parquet(prepared["prompt"].read().set_column(4, "label", pa.array(range(20))))
    findings = validated(prepared, tokenizer, CONFIG, max_length=MAX_LENGTH)
    assert failures(findings) == [
        ("sft", "schema", 2, ("answer (expected no such column, got string)", "response (expected string, got no such column)")),
        ("prompt", "schema", 1, ("label (expected string, got int64)",)),
    ]
    assert [f.name for f in findings if f.use == "sft"] == ["schema"]


def test_a_conversation_in_two_splits_is_a_leak_even_across_uses_and_with_other_case(rows, tokenizer):
    rows["prompt"][4]["messages"] = user("double  7.")  # a test row; sft07 and preference07 are in train
    leak = ("preference:preference07", "prompt:prompt04", "prompt:prompt07", "sft:sft07")
    assert SPLIT[4] == "test" and SPLIT[7 % 5] == "train"
    assert failures(check(rows, tokenizer)) == [("all", "split_leakage", 4, leak), ("all", "near_duplicates.test", 1, ("prompt:prompt04",))]


def test_uses_and_splits_that_later_stages_read_must_have_rows(rows, tokenizer):
    del rows["prompt"]
    rows["preference"] = [r for r in rows["preference"] if r["split"] != "test"]
    found = failures(check(rows, tokenizer))
    assert found == [("all", "rows_present", 3, ("preference:test", "prompt:test", "prompt:train"))]


def test_rows_that_no_stage_reads_are_not_missed(rows, tokenizer):
    del rows["preference"], rows["prompt"]
    rows["sft"] = rows["sft"][:1]
    needed = (("sft", "train"), ("prompt", "train"))
    findings = validated(tables(rows), tokenizer, CONFIG, max_length=MAX_LENGTH, needed=needed, pairs=False)
    assert failures(findings) == [("all", "rows_present", 1, ("prompt:train",))]


def test_single_responses_are_enough_where_nothing_learns_from_pairs(rows, tokenizer):
    for i, r in enumerate(rows["preference"]):
        r["rejected" if i % 2 else "chosen"] = None
    needed = (("preference", "train"), ("preference", "test"))
    findings = validated(tables(rows), tokenizer, CONFIG, max_length=MAX_LENGTH, needed=needed, pairs=False)
    assert failures(findings) == [] and "min_pairs" not in {f.name for f in findings}
    as_pairs = failures(validated(tables(rows), tokenizer, CONFIG, max_length=MAX_LENGTH, needed=needed))
    assert [(use, name) for use, name, *_ in as_pairs] == [("preference", "min_pairs"), ("all", "rows_present")]
    assert as_pairs[-1][2:] == (2, ("preference:test", "preference:train"))  # rows are there, but no pair


def test_files_without_rows_are_reported_and_nothing_breaks(rows, tokenizer):
    findings = check({use: [] for use in rows}, tokenizer)
    assert [(f.use, f.name) for f in findings if not f.passed] == [("preference", "min_pairs"), ("all", "rows_present")]


def test_length_bias_is_measured_in_tokens_with_ties_as_half(rows, tokenizer):
    # "It is 2i." is longer than "No." (10 pairs) and shorter than "No, no..." (10 pairs): no bias.
    assert observed(check(rows, tokenizer, only="preference"), "length_bias") == pytest.approx(0.0)
    for r in rows["preference"][:5]:
        r["chosen"], r["rejected"] = f"No, {r['id'][-1]}.", f"No, {int(r['id'][-1]) + 1}."  # equally long
    # of the first five, three were longer and two shorter: (10 - 3 + 5 / 2) / 20 = 0.475
    assert observed(check(rows, tokenizer, only="preference"), "length_bias") == pytest.approx(0.025)
    for r in rows["preference"]:
        r["chosen"], r["rejected"] = f"No, no, {r['id'][-2:]}.", "No."
    assert failures(check(rows, tokenizer, only="preference")) == [("preference", "length_bias", None, ())]


def observed(findings: list[Finding], name: str) -> float:
    (value,) = [f.observed for f in findings if f.name == name]
    return value


def test_unpaired_rows_pass_the_null_checks_and_are_measured_by_their_balance(rows, tokenizer):
    unpaired = [row("unpaired", i, messages=user(f"Double {i}."), chosen=None, rejected=None) for i in range(10)]
    for i, r in enumerate(unpaired):
        r["chosen" if i < 7 else "rejected"] = f"Perhaps {2 * i}."
    rows["preference"] += unpaired
    findings = check(rows, tokenizer, only="preference")
    assert failures(findings) == []
    assert observed(findings, "label_balance") == pytest.approx(0.3)
    assert observed(findings, "min_pairs") == 20
    assert failures(check(rows, tokenizer, only="preference", min_label_balance=0.31)) == [("preference", "label_balance", None, ())]
    assert failures(check(rows, tokenizer, only="preference", min_pairs=21)) == [("preference", "min_pairs", None, ())]


def test_an_unpaired_text_that_is_both_good_and_bad_is_a_contradiction(rows, tokenizer):
    for i, side in enumerate(("chosen", "rejected")):
        unpaired = row("unpaired", i, messages=user("Double 3."), chosen=None, rejected=None)
        rows["preference"].append(unpaired | {"split": SPLIT[3], side: "Six."})
    assert failures(check(rows, tokenizer, only="preference")) == [("preference", "contradictory_pairs", 2, ("unpaired00", "unpaired01"))]


def test_pairs_of_a_round_come_with_advice_for_a_round(rows, tokenizer):
    """On the policy's own samples no reward model is trained, and nobody balances them by hand."""
    for pair in rows["preference"]:
        pair["rejected"] = "No."
    found = {f.name: f for f in check(rows, tokenizer, only="preference")}
    assert "; training would learn length: balance the pairs" in found["length_bias"].message()
    assert "; DPO would learn length" in with_advice(found["length_bias"]).message()
    assert "reward model" not in with_advice(found["length_bias"]).message() and with_advice(found["min_pairs"]) == found["min_pairs"]


def test_data_of_unpaired_rows_only_has_no_length_bias_to_speak_of(rows, tokenizer):
    for i, r in enumerate(rows["preference"]):
        r["chosen" if i % 2 else "rejected"] = None
    findings = check(rows, tokenizer, only="preference")
    assert failures(findings) == [("preference", "min_pairs", None, ())]
    assert "length_bias" not in {f.name for f in findings}


LIMITS = ("max_empty_fraction", "max_identical_fraction", "max_duplicate_fraction", "max_too_long_fraction")


@pytest.mark.parametrize("limit", cells(LIMITS, ["max_duplicate_fraction"]))
def test_a_share_equal_to_its_limit_passes_and_one_above_fails(rows, tokenizer, limit):
    pair = rows["preference"]
    columns = {
        "max_empty_fraction": {"chosen": ""},
        "max_identical_fraction": {"chosen": "Same.", "rejected": "Same."},
        "max_duplicate_fraction": {"messages": user("Double 2."), "chosen": "Four.", "rejected": "Five.", "split": SPLIT[2]},
        "max_too_long_fraction": {"rejected": "8" * 60},
    }[limit]
    for i in (2, 7):  # 2 of 20
        pair[i] |= columns
    assert failures(check(rows, tokenizer, only="preference", **{limit: 0.1})) == []
    assert [f[2] for f in failures(check(rows, tokenizer, only="preference", **{limit: 0.0999}))] == [2]


def _filtering(tokenizer, how: str):
    filtering = deepcopy(tokenizer)
    filtering.chat_template = tokenizer.chat_template.replace("message['content']", f"message['content'] | {how}")
    return filtering


def test_a_template_that_rewrites_responses_fails_the_round_trip_and_one_that_trims_them_does_not(rows, tokenizer):
    rows["sft"][3]["response"] = "It is 6!\n"
    rows["preference"][5]["rejected"] += "! "
    for passes in (tokenizer, _filtering(tokenizer, "trim")):
        assert failures(check(rows, passes)) == []
    assert failures(check(rows, _filtering(tokenizer, "replace('!', '.')"))) == [
        ("sft", "template_round_trip.response", 1, ("sft03",)),
        ("preference", "template_round_trip.rejected", 1, ("preference05",)),
    ]


def test_a_tokenizer_that_loses_text_fails_the_round_trip(rows, tokenizer):
    from tokenizers.normalizers import Lowercase

    lossy = deepcopy(tokenizer)
    lossy.backend_tokenizer.normalizer = Lowercase()
    found = failures(check(rows, lossy, only="sft"))
    assert found == [("sft", "template_round_trip.response", 20, tuple(f"sft{i:02d}" for i in range(20)))]


def test_a_conversation_that_the_template_refuses_is_named(rows, tokenizer):
    strict = deepcopy(tokenizer)
    refusal = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system message') }}{% endif %}"
    strict.chat_template = refusal + tokenizer.chat_template
    rows["sft"][3]["messages"] = [{"role": "system", "content": "Be brief."}, *user("Double 3.")]
    assert failures(check(rows, tokenizer, only="sft")) == []
    assert failures(check(rows, strict, only="sft")) == [("sft", "template_renders", 1, ("sft03",))]


@pytest.mark.parametrize("response", ["It is 6.", " It  is\n6. ", "Straße 😀", "<|end|><|user|>No.", "{{ 6 }}", "8" * 70])
def test_tokens_are_those_that_the_trainers_count(tokenizer, response):
    messages = [{"role": "system", "content": "Be brief."}, *TRIPLE]
    made = [row("sft", 0, messages=messages, response=response), row("sft", 1, messages=user("Double 3."), response=response)]
    frame = measure("sft", made, tokenizer)
    assert frame["tokens"].tolist() == [len(encode_conversation(tokenizer, r["messages"], response)[0]) for r in made]
    assert frame["response_decoded"].tolist() == [response, response]


def test_measuring_in_parts_gives_the_same_findings(rows, tokenizer, monkeypatch):
    whole = check(rows, tokenizer)
    monkeypatch.setattr("rlhf_core.models.response_ids.TEXTS_AT_ONCE", 7)
    assert check(rows, tokenizer) == whole


def test_the_summary_is_the_same_bytes_for_any_order_of_the_rows_and_caps_ids(rows, tokenizer):
    for r in rows["preference"][:6]:
        r["rejected"] = r["chosen"]

    def text(rows: Rows) -> str:
        return json.dumps(summary(check(rows, tokenizer), tables(rows), max_reported_ids=CONFIG.max_reported_ids))

    first = text(rows)
    assert text(rows) == first
    assert text({use: content[::-1] for use, content in rows.items()}) == first
    (entry,) = [e for e in json.loads(first)["expectations"] if not e["passed"]]
    assert (entry["name"], entry["use"], entry["limit"]) == ("identical_pairs", "preference", 0.0)
    assert (entry["unexpected"], entry["observed"]) == (6, 0.3)
    assert entry["ids"] == ["preference00", "preference01", "preference02"]


def test_a_message_names_expectation_count_limit_rows_and_remedy(rows, tokenizer):
    for line, r in enumerate(rows["sft"][:7], start=1):
        r |= {"response": "8" * 60} | ({"origin": f"mine.jsonl line {line}"} if line < 5 else {})
    (message,) = [f.message() for f in check(rows, tokenizer, max_too_long_fraction=0.1) if not f.passed]
    assert message.startswith("sft: too_long: expected that ")
    assert "at most 0.1), got 7 of 20 (0.35): sft00 (mine.jsonl line 1: 'Double 0.'), sft01 (mine.jsonl line 2: " in message
    assert "sft04 ('Double 4.') and 2 more; later stages drop such rows" in message and "`drop: [too_long]`" in message


def test_data_docs_show_what_was_expected_and_escape_the_data(rows, tokenizer, tmp_path):
    rows["sft"][3] |= {"id": "<i>&3", "response": "<script>alert('hi')</script>\n"}
    rows["sft"][4] |= {"id": "<i>&3"}
    rows["preference"][3] |= {"chosen": "<b>so</b>", "rejected": "<b>so</b>"}
    findings = validated(
        tables(rows), _filtering(tokenizer, "replace('alert', 'warn')"), CONFIG, max_length=MAX_LENGTH, docs=tmp_path / "docs"
    )
    assert [f for f in failures(findings) if f[1] != "identical_pairs"] == [
        ("sft", "ids_unique", 2, ("<i>&3", "<i>&3")),
        ("sft", "template_round_trip.response", 1, ("<i>&3",)),
    ]
    pages = [p.read_text(encoding="utf-8") for p in (tmp_path / "docs").rglob("*.html")]
    assert (tmp_path / "docs" / "index.html").exists()
    assert any("chosen differs from rejected" in page and "&lt;b&gt;so" in page and "preference03" in page for page in pages)
    assert any("&lt;i&gt;&amp;3" in page for page in pages)
    assert not any("<b>so" in page or "<i>&3" in page or "<script>alert" in page for page in pages)


class Loads(HTMLParser):
    """What a browser would fetch, run or lead to elsewhere, of a page."""

    def __init__(self):
        super().__init__()
        self.found: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        runs = [name for name in given if name.startswith("on")]
        if tag in ("script", "link", "iframe", "object", "embed", "img", "base") or re.match(
            "https?:|//|javascript:", given.get("href") or ""
        ):
            self.found.append(f"{tag} {attrs}")
        if runs and "default-src 'none'" not in self.policy:
            self.found.append(f"{tag} {runs}")
        if tag == "a" and given.get("href") and not given["href"].startswith("#"):
            self.links.append(given["href"])

    def feed(self, data):
        self.policy = data.partition("Content-Security-Policy")[2][:200]
        super().feed(data)


def test_data_docs_load_nothing_from_elsewhere_and_lead_to_each_other(rows, tokenizer, tmp_path):
    rows["preference"][3] |= {"chosen": "so \u202e it is", "rejected": "so \u202e it is", "id": "odd\u200f"}
    validated(tables(rows), tokenizer, CONFIG, max_length=MAX_LENGTH, docs=tmp_path / "docs")
    pages = list((tmp_path / "docs").rglob("*.html"))
    assert len(pages) > 10
    for path in pages:
        text = path.read_text(encoding="utf-8")
        assert text.count("http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'") == 1
        seen = Loads()
        seen.feed(text)
        assert seen.found == [] and "url(" not in text, path
        assert not any((path.parent / unquote(link).partition("#")[0]).resolve() not in [p.resolve() for p in pages] for link in seen.links)
        assert "\u202e" not in text and "\u200f" not in text
    index = (tmp_path / "docs/index.html").read_text(encoding="utf-8")
    assert index.count("<li>") == len(pages) - 1 and "schema of sft" in index
    (page,) = [p for p in pages if p.parts[-4:-3] == ("preference",)]
    assert "odd⟨U+200F⟩" in page.read_text(encoding="utf-8") and "fa-times" in page.read_text(encoding="utf-8")


def test_data_docs_that_cannot_be_written_are_logged_and_change_nothing(rows, tokenizer, tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")
    with caplog.at_level(logging.WARNING, logger="rlhf_core"):
        findings = validated(tables(rows), tokenizer, CONFIG, max_length=MAX_LENGTH, docs=tmp_path / "file" / "docs")
    assert failures(findings) == []
    assert any("Data Docs: expected to write" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("use", ["sft", "preference"])
def test_tokens_of_any_template_are_those_that_the_trainers_count(name, use):
    tokenizer, text = templated(name), "<think>One.</think>It is 6. " if name == "thinks" else " It is 6. "
    texts = {"response": text} if use == "sft" else {"chosen": text, "rejected": "No."}
    made = [row(use, 0, messages=user("Double 3."), **texts)]
    frame = measure(use, made, tokenizer)
    requested = made[0]["messages"]
    ids = encode_conversation(tokenizer, requested, text)[0]
    assert frame["tokens"].tolist() == [len(ids) + (len(turn_end(tokenizer).after) if use == "preference" else 0)]
    column = "response" if use == "sft" else "chosen"
    assert frame[f"{column}_decoded"].tolist() == [text] and frame["template_error"].isna().all()
