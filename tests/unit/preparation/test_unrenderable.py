"""Rows that a chat template refuses, and messages with more than role and text, from a file to a prompt."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from chat_templates import templated

from rlhf_core.config import DataConfig
from rlhf_core.data.schema import MESSAGES, WIDE_MESSAGES, read_rows
from rlhf_core.models.tokenizer import encode_prompt
from rlhf_core.preparation.prepare import drop_unrenderable
from rlhf_core.preparation.sources import Mixed, mix

CALL = {"id": "1", "type": "function", "function": {"name": "sort", "arguments": '{"digits": "4172"}'}}
PARTS = [{"type": "text", "text": "Please sort"}, {"type": "text", "text": "4172."}]
ASKED_IN_PARTS = {"messages": [{"role": "user", "content": PARTS}, {"role": "assistant", "content": [{"type": "text", "text": "1247."}]}]}
WITH_TOOL = {
    "messages": [
        {"role": "user", "content": "Please sort 4172."},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "1247", "tool_call_id": "1"},
        {"role": "assistant", "content": "Sorted: 1247."},
    ]
}


def plain(i: int, **system: str) -> dict:
    before = [{"role": "system", "content": system["system"]}] if system else []
    return {"messages": [*before, {"role": "user", "content": f"Please sort {i}."}, {"role": "assistant", "content": f"{i}."}]}


def mixed(folder: Path, *sources: list[dict]) -> Mixed:
    named = []
    for k, records in enumerate(sources):
        path = folder / f"{k}.jsonl"
        path.write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
        named.append(
            {
                "name": f"s{k}",
                "kind": "file",
                "path": str(path),
                "format": "messages",
                "uses": ["sft", "prompt"],
                "weight": 1.0,
                "columns": {},
            }
        )
    config = DataConfig.model_validate({"validation_fraction": 1e-12, "test_fraction": 1e-12, "sources": named})
    return mix(config, folder / "data", scratch=folder / "scratch", seed=0)


def column(folder: Path, use: str):
    return pq.read_schema(folder / "data" / f"{use}.parquet").field("messages").type


def test_plain_messages_are_stored_as_ever_and_others_with_what_they_have(tmp_path):
    (tmp_path / "a").mkdir()
    mixed(tmp_path / "a", [plain(i) for i in range(5)])
    assert column(tmp_path / "a", "sft").equals(MESSAGES)
    mixed(tmp_path, [plain(i) for i in range(5)], [WITH_TOOL, ASKED_IN_PARTS, plain(7)])
    assert column(tmp_path, "sft").equals(WIDE_MESSAGES) and column(tmp_path, "prompt").equals(WIDE_MESSAGES)
    rows = read_rows(tmp_path / "data", "sft")
    assert len(rows) == 8 and sum(bool(m["extra"]) for r in rows for m in r["messages"]) == 3
    narrow = read_rows(tmp_path / "a" / "data", "sft")
    texts = [(r["id"], r["response"], [(m["role"], m["content"]) for m in r["messages"]]) for r in rows]
    assert [t for t in texts if t[0] in {r["id"] for r in narrow}] == [
        (r["id"], r["response"], [(m["role"], m["content"]) for m in r["messages"]]) for r in narrow
    ]
    assert not list((tmp_path / "data").glob("*.narrow"))


def test_calls_results_and_parts_arrive_in_the_rendering(tmp_path):
    mixed(tmp_path, [WITH_TOOL, ASKED_IN_PARTS])
    by_response = {r["response"]: r["messages"] for r in read_rows(tmp_path / "data", "sft")}
    for name in ("thinks", "dated"):
        tokenizer = templated(name)
        requested = [dict(m) for m in WITH_TOOL["messages"][:-1]]
        requested[1] |= {"content": "", "tool_calls": [{**CALL, "function": {"name": "sort", "arguments": {"digits": "4172"}}}]}
        expected = tokenizer.apply_chat_template(requested, add_generation_prompt=True, return_dict=False)
        assert encode_prompt(tokenizer, by_response["Sorted: 1247."]) == expected
    parts = templated("parts")
    assert encode_prompt(parts, by_response["1247."]) == parts.apply_chat_template(
        ASKED_IN_PARTS["messages"][:1], add_generation_prompt=True, return_dict=False
    )


def dropped(found: Mixed, tokenizer, *, limit: float) -> None:
    drop_unrenderable(found, tokenizer, limit=limit)
    for rows in found.rows.values():
        rows.write()


@pytest.mark.parametrize(("name", "left"), [("chatml", 2), ("thinks", 3)])
def test_calls_that_a_template_would_leave_out_take_their_row_with_them(tmp_path, name, left):
    found = mixed(tmp_path, [plain(1), plain(2), WITH_TOOL])
    dropped(found, templated(name), limit=1.0)
    assert len(read_rows(tmp_path / "data", "sft")) == left
    refused = [reason for reasons in found.dropped.values() for reason in reasons if "calls of tools, which this template" in reason]
    assert bool(refused) == (left == 2)


def test_messages_that_are_no_text_are_dropped_with_a_reason(tmp_path):
    picture = {"messages": [{"role": "user", "content": [{"type": "image", "url": "x"}]}, {"role": "assistant", "content": "A cat."}]}
    calls = {"messages": WITH_TOOL["messages"][:2]}
    found = mixed(tmp_path, [plain(1), picture, calls])
    assert found.dropped == {
        "s0": {"a message has parts with pictures, video or sound": 1, "the last message calls a tool: it is no text": 1}
    }


def test_rows_that_the_template_refuses_are_left_out_and_counted_in_its_words(tmp_path):
    found = mixed(tmp_path, [plain(i) for i in range(30)], [plain(99, system="Be brief."), plain(100)])
    dropped(found, templated("trimmed"), limit=0.05)
    words = "TemplateError: Turns have to go user, model, user"
    assert found.dropped == {"s0": {}, "s1": {f"{use} rows that the chat template refuses ({words})": 1 for use in ("sft", "prompt")}}
    assert +found.counts == Counter({(s, use, "train"): n for s, n in (("s0", 30), ("s1", 1)) for use in ("sft", "prompt")})
    for use in ("sft", "prompt"):
        assert [r["messages"][0]["role"] for r in read_rows(tmp_path / "data", use)] == ["user"] * 31
    assert sorted(p.name for p in (tmp_path / "data").iterdir()) == ["prompt.parquet", "sft.parquet"]


def test_data_that_the_template_takes_stay_the_same_file(tmp_path):
    found = mixed(tmp_path, [plain(i) for i in range(5)])
    before = (tmp_path / "data" / "sft.parquet").stat()
    dropped(found, templated("trimmed"), limit=0.0)
    assert found.dropped == {"s0": {}}
    assert (tmp_path / "data" / "sft.parquet").stat() == before


def test_too_many_rows_that_the_template_refuses_end_it_in_its_words(tmp_path):
    found = mixed(tmp_path, [plain(i, system="Be brief.") for i in range(5)] + [plain(i) for i in range(5, 10)])
    with pytest.raises(ValueError, match=r"sft: expected .* all conversations but 49\.00%, got 5 of 10 refused: TemplateError: Turns have"):
        dropped(found, templated("trimmed"), limit=0.49)
