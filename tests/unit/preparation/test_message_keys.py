"""What a message has beside role and content: content drops the record, other keys are counted and named."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from rlhf_core.config import SourceConfig
from rlhf_core.preparation.sources import Loaded, load_source

ASKED = {"role": "user", "content": "q"}


def load(folder: Path, *records, format: str = "messages", use: str = "sft", **more) -> Loaded:
    (folder / "d.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
    about = {"name": "mine", "kind": "file", "path": str(folder / "d.jsonl"), "format": format, "uses": [use], "weight": 1.0}
    return load_source(SourceConfig.model_validate(about | more), seed=0)


def talk(**beside) -> dict:
    return {"messages": [ASKED, {"role": "assistant", "content": "a", **beside}]}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *[("thinking", "Hm."), ("reasoning", "Hm."), ("reasoning_details", [{"text": "Hm."}]), ("images", ["i.png"])],
        *[("audio", {"id": "x"}), ("video", "v.mp4"), ("refusal", "No."), ("text", "More.")],
    ],
)
def test_content_beside_the_text_drops_the_record(tmp_path, key, value):
    loaded = load(tmp_path, talk(**{key: value}), talk(**{key: None}), talk(**{key: type(value)()}))
    assert len(loaded.rows["sft"]) == 2
    assert loaded.dropped == {f"a message has {key} beside its text": 1} and loaded.dropped.records == 1


def test_a_refusal_in_the_place_of_a_text_is_named(tmp_path):
    loaded = load(tmp_path, talk(content=None, refusal="No."), talk())
    assert loaded.dropped == {"a message has refusal beside its text": 1}


def test_content_without_a_part_is_an_empty_text(tmp_path):
    loaded = load(tmp_path, talk(content=[]), talk())
    assert len(loaded.rows["sft"]) + loaded.dropped.records == 2 and loaded.rows["sft"][-1]["response"] == "a"


def test_other_keys_are_counted_by_record_and_named_once(tmp_path, caplog):
    records = [
        talk(weight=0, id="m1"),
        {"messages": [ASKED | {"id": "1"}, {"role": "assistant", "content": "a", "id": "2"}]},
        talk(id=None),
    ]
    with caplog.at_level(logging.WARNING, logger="rlhf"):
        loaded = load(tmp_path, *records)
    assert len(loaded.rows["sft"]) == 3 and not loaded.dropped
    assert loaded.dropped.message_keys == {"id": 2, "weight": 1}
    [message] = [r.getMessage() for r in caplog.records]
    assert message.startswith("source mine: messages have keys that are not used: 'id' (2 records), 'weight' (1 record)")


def test_keys_of_all_sides_are_counted_through_the_mapping(tmp_path):
    pair = {
        "asked": {"messages": [ASKED | {"p": 1}]},
        "chosen": [talk()["messages"][1] | {"c": 1}],
        "rejected": {**talk()["messages"][1], "r": 1},
    }
    loaded = load(tmp_path, pair, format="preference", use="preference", columns={"prompt": "asked.messages"})
    assert loaded.dropped.message_keys == {"p": 1, "c": 1, "r": 1}


def test_endless_different_keys_are_not_all_kept(tmp_path):
    records = [talk(**{f"k{i}\x1b" + "x" * 1000: 1}) for i in range(500)]
    keys = load(tmp_path, *records).dropped.message_keys
    assert len(keys) <= 100 and all(key.isprintable() and len(key) < 100 for key in keys)


@pytest.mark.parametrize("empty", ["", " \n", None, []])
def test_an_empty_content_gives_way_to_the_value(tmp_path, empty):
    loaded = load(tmp_path, {"messages": [ASKED, {"role": "", "from": "gpt", "content": empty, "value": "ANSWER"}]})
    assert loaded.rows["sft"][0]["response"] == "ANSWER"


def test_an_empty_text_alone_stays_one(tmp_path):
    assert load(tmp_path, talk(content="", value=None)).rows["sft"][0]["response"] == ""


def test_two_different_texts_in_one_message_drop_the_record(tmp_path):
    loaded = load(tmp_path, talk(value="b"), talk(value="a "), talk(value=0.5))
    assert [row["response"] for row in loaded.rows["sft"]] == ["a", "a"]
    assert loaded.dropped == {"a message has a content and another value": 1}
