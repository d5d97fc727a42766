"""Shapes of known data sets, records that are left out, and what errors about files say."""

from __future__ import annotations

import gzip
import json
import logging
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlhf_core.config import SourceConfig
from rlhf_core.preparation.sources import load_source

SYSTEM = {"role": "system", "content": "Be brief."}
Q1, A1 = {"role": "user", "content": "First question"}, {"role": "assistant", "content": "First answer"}
Q2 = {"role": "user", "content": "SECOND"}
TURNS = [SYSTEM, Q1, A1, Q2]
GOOD, BAD = {"role": "assistant", "content": "good"}, {"role": "assistant", "content": "bad"}
PAIR = {"prompt": "q", "chosen": "a", "rejected": "b"}


def source(path: Path | str, format: str = "preference", uses: tuple[str, ...] = ("preference",), **more) -> SourceConfig:
    given = {"name": "mine", "kind": "file", "path": str(path), "format": format, "uses": list(uses), "weight": 1.0}
    return SourceConfig.model_validate(given | more)


def load(folder: Path, *records, format: str = "preference", uses: tuple[str, ...] = ("preference",), **more):
    (folder / "d.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
    return load_source(source(folder / "d.jsonl", format, uses, **more), seed=0)


def refusal(folder: Path, *records, **more) -> str:
    with pytest.raises(ValueError) as error:
        load(folder, *records, **more)
    return str(error.value)


@pytest.mark.parametrize("prompt", ["First question", " SECOND\n", [SYSTEM, Q1], [Q1], TURNS, [Q1, A1, Q2]])
def test_the_conversation_that_holds_the_prompt_is_kept_whole(tmp_path, prompt):
    """As UltraFeedback (first question), ORPO mixes (last question) and others (the beginning) have it."""
    [row] = load(tmp_path, {"prompt": prompt, "chosen": [*TURNS, GOOD], "rejected": [*TURNS, BAD]}).rows["preference"]
    assert (row["messages"], row["chosen"], row["rejected"]) == (TURNS, "good", "bad")


@pytest.mark.parametrize(
    ("prompt", "turns"),
    [(TURNS, []), (TURNS, [Q2]), ([SYSTEM, Q1], [A1, Q2]), (TURNS, None)],
    ids=["answers alone", "the last question again", "going on", "messages without a list"],
)
def test_a_prompt_with_what_follows_it_is_kept_whole(tmp_path, prompt, turns):
    sides = (GOOD, BAD) if turns is None else ([*turns, GOOD], [*turns, BAD])
    [row] = load(tmp_path, {"prompt": prompt, "chosen": sides[0], "rejected": sides[1]}).rows["preference"]
    assert (row["messages"], row["chosen"], row["rejected"]) == (TURNS, "good", "bad")


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (
            {"prompt": "Another one", "chosen": [*TURNS, GOOD], "rejected": [*TURNS, BAD]},
            "the turns before the answer don't hold the prompt",
        ),
        ({"prompt": "First question", "chosen": [*TURNS, GOOD], "rejected": [Q1, BAD]}, "the prompts of chosen and rejected differ"),
        ({"prompt": None, "chosen": "I think the sum is 0 good", "rejected": "I think the sum is 0 bad!"}, "prompt is null"),
        ({"prompt": " \r\n", "chosen": "a", "rejected": "b"}, "prompt is empty"),
        ({"prompt": "q", "chosen": None, "rejected": "b"}, "chosen is null"),
        ({"prompt": "q", "chosen": "a", "rejected": [GOOD]}, "chosen and rejected are of two kinds"),
        ({"prompt": "q", "chosen": "a"}, "no column rejected"),
        ({"prompt": "q", "chosen": "a", "rejected": float("nan")}, "rejected is NaN"),
        ({"prompt": "q", "chosen": [GOOD], "rejected": float("nan")}, "rejected is NaN"),
        ({"prompt": 7, "chosen": "a", "rejected": "b"}, "prompt is no text"),
        ({"chosen": "a b", "rejected": "a c"}, "no column prompt"),
        ({"chosen": [GOOD], "rejected": [BAD]}, "the prompt doesn't end with a message of the user or of a tool"),
        ({"chosen": [Q1, Q2, GOOD], "rejected": [Q1, Q2, BAD]}, "the turns are out of order"),
        ({"chosen": [Q1, {"role": "robot", "content": "x"}], "rejected": [Q1, BAD]}, "a message has an unknown role"),
    ],
)
def test_a_record_that_cannot_be_used_is_counted_with_its_place(tmp_path, record, reason):
    loaded = load(tmp_path, record, PAIR)  # the first one, so that nothing has fitted before it
    assert [row["origin"] for row in loaded.rows["preference"]] == [f"{tmp_path}/d.jsonl line 2"]
    left = loaded.dropped
    assert (dict(left), left.records, left.read) == ({reason: 1}, 1, 2)
    [example] = left.examples[reason]
    assert example.where == f"{tmp_path}/d.jsonl line 1"
    assert example.excerpt[:200] == json.dumps(record)[:200]


def test_a_mapping_that_fits_no_record_is_refused_with_the_first(tmp_path):
    records = [{"question": f"q{i}", "better": "a", "worse": "b"} for i in range(500)]
    printed = refusal(tmp_path, *records)
    assert "d.jsonl line 1: expected a column 'chosen' for 'chosen', got question, better, worse; map chosen" in printed
    assert 'the record: {"question": "q0", "better": "a"' in printed


def test_after_a_hundred_records_without_the_format_no_further_one_is_read(tmp_path):
    assert "line 1: expected a column" in refusal(tmp_path, *[{"x": "y"}] * 100, PAIR)
    assert load(tmp_path, *[{"x": "y"}] * 99, PAIR).dropped == {"no column chosen": 99}


def test_text_pairs_without_a_prompt_need_the_users_word(tmp_path):
    record = {"chosen": "Sum? 0 good", "rejected": "Sum? 0 bad"}
    assert "set its implicit_prompt: true" in refusal(tmp_path, record)
    [row] = load(tmp_path, record, implicit_prompt=True).rows["preference"]
    assert (row["messages"][0]["content"], row["chosen"], row["rejected"]) == ("Sum? 0", " good", " bad")
    assert load(tmp_path, record, record | {"prompt": None}, implicit_prompt=True).dropped == {"prompt is null": 1}


def test_the_first_examples_are_shown_safely_and_short(tmp_path):
    nasty = [{"prompt": None, "chosen": f"{i}\x1b[2J\u202e" + "x" * 10_000, "rejected": "b"} for i in range(5)]
    examples = load(tmp_path, *nasty, PAIR).dropped.examples["prompt is null"]
    assert [e.where.rpartition(" ")[2] for e in examples] == ["1", "2", "3"]
    assert all(e.excerpt.isprintable() and len(e.excerpt) == 203 for e in examples)


def test_roles_tools_and_parts_of_openai_are_kept(tmp_path):
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "Be brief."}]},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "c1"},
        {"role": "assistant", "content": "It is 2."},
    ]
    old = [*messages[1:2], {"role": "assistant", "content": None, "function_call": call["function"]}]
    old += [{"role": "function", "name": "add", "content": "2"}, messages[-1]]
    [row, older] = load(tmp_path, {"messages": messages}, {"messages": old}, format="messages", uses=("sft",)).rows["sft"]
    assert [(m["role"], m["content"]) for m in row["messages"]] == [
        *[("system", "Be brief."), ("user", "one\ntwo"), ("assistant", ""), ("tool", "2")]
    ]
    assert json.loads(row["messages"][2]["extra"]) == {"tool_calls": [{**call, "function": {"name": "add", "arguments": {"a": 1}}}]}
    assert json.loads(row["messages"][3]["extra"]) == {"tool_call_id": "c1"}
    assert json.loads(older["messages"][1]["extra"])["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}
    assert json.loads(older["messages"][2]["extra"]) == {"name": "add"} and older["messages"][2]["role"] == "tool"


def test_calls_of_tools_in_sharegpt_are_kept(tmp_path):
    """As LLaMA-Factory writes them."""
    turns = [
        ("human", "Weather?"),
        ("function_call", '{"name": "look", "arguments": {"at": 1}}'),
        ("observation", '{"c": 20}'),
        ("gpt", "Mild."),
    ]
    messages = [{"from": who, "value": printed} for who, printed in turns]
    broken = [messages[0], messages[1] | {"value": "look(1)"}, *messages[2:]]
    columns = {"messages": "conversations"}
    loaded = load(tmp_path, {"conversations": broken}, {"conversations": messages}, format="messages", uses=("sft",), columns=columns)
    [row] = loaded.rows["sft"]
    assert [(m["role"], m["content"]) for m in row["messages"]] == [("user", "Weather?"), ("assistant", ""), ("tool", '{"c": 20}')]
    call = {"type": "function", "function": {"name": "look", "arguments": {"at": 1}}}
    assert json.loads(row["messages"][1]["extra"]) == {"tool_calls": [call]} and row["response"] == "Mild."
    assert loaded.dropped == {"a call of a tool is no JSON with a name": 1}


def test_one_strange_conversation_is_left_out_not_the_source(tmp_path):
    strange = [
        [{"role": "narrator", "content": "x"}, GOOD],
        [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}, GOOD],
        [{"role": "user", "content": None}, GOOD],
        [{"role": "user", "content": ["x"]}, GOOD],
        [Q1, {"role": "assistant", "content": "x", "tool_calls": {"a": 1}}],
        [Q1, {"role": "assistant", "content": None, "tool_calls": [{"a": 1}]}],
        [Q1, {"role": "assistant", "content": "x", "reasoning_content": "Hm."}],
        [Q1, SYSTEM, GOOD],
        [],
    ]
    records = [{"messages": messages} for messages in [[Q1, GOOD], *strange]]
    loaded = load(tmp_path, *records, format="messages", uses=("sft",))
    assert len(loaded.rows["sft"]) == 1 and sorted(loaded.dropped.values()) == [1] * 9, loaded.dropped


def test_a_system_column_counts_where_it_is_mapped_and_is_named_where_not(tmp_path, caplog):
    record = PAIR | {"system": "Be brief.", "history": [["x", "y"]]}
    with caplog.at_level(logging.WARNING, logger="rlhf"):
        [row] = load(tmp_path, record, PAIR).rows["preference"][:1]
    assert row["messages"] == [{"role": "user", "content": "q"}]
    assert [r.getMessage().partition(";")[0] for r in caplog.records] == [
        "source mine: 1 records have a column 'system', which is not used",
        "source mine: 1 records have a column 'history', which is not used",
    ]
    loaded = load(tmp_path, record, record | {"system": None}, columns={"system": "system"})
    assert [len(row["messages"]) for row in loaded.rows["preference"]] == [2, 1]
    assert loaded.dropped.unmapped == {"history": 2}


def test_a_system_column_and_another_system_message_are_one_too_many(tmp_path):
    records = [{"messages": [SYSTEM, Q1, GOOD], "system": text} for text in ("Be brief.", "Be long.")]
    loaded = load(tmp_path, *records, format="messages", uses=("sft",), columns={"system": "system"})
    assert loaded.rows["sft"][0]["messages"] == [SYSTEM, Q1]
    assert loaded.dropped == {"the column system and the conversation have different system messages": 1}


def test_a_history_that_is_no_pairs_is_left_out(tmp_path):
    records = [{"instruction": "i", "output": "o", "history": history} for history in ([["q", "a"]], None, [["q"]], "q")]
    loaded = load(tmp_path, *records, format="instruction", uses=("sft",), columns={"history": "history"})
    assert [len(row["messages"]) for row in loaded.rows["sft"]] == [3, 1]
    assert loaded.dropped == {"history is no list of [question, answer]": 2}


def test_what_gives_no_row_is_counted(tmp_path):
    feedback = [{"prompt": "q", "completion": "a", "label": label} for label in (True, False, None)]
    loaded = load(tmp_path, *feedback, format="unpaired", uses=("sft",))
    assert loaded.dropped == {"nothing in it for the source's uses": 1, "label is null": 1}
    assert loaded.dropped.records == 1  # the other one is as it should be
    graded = [{"prompt": "q", "completions": [{"completion": "a", "good": True}, {"completion": "b", "good": good}]} for good in (0, 1)]
    loaded = load(tmp_path, *graded, format="graded", uses=("sft", "preference"))
    assert loaded.dropped == {"records without a pair of a better and a worse completion": 1}
    assert loaded.dropped.records == 0


def test_line_ends_of_every_kind_are_one(tmp_path):
    transcript = "\r\n\r\nHuman: one\r\ntwo\r\n\r\nAssistant: "
    [row] = load(tmp_path, {"chosen": transcript + "a\rb", "rejected": transcript + "c"}, format="hh").rows["preference"]
    assert (row["messages"], row["chosen"]) == ([{"role": "user", "content": "one\ntwo"}], "a\nb")


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
@pytest.mark.parametrize("name", ["d.csv", "d.tsv"])
def test_a_table_is_read_with_the_delimiter_of_its_header(tmp_path, name, delimiter):
    lines = [["prompt", '"chosen, or; so"', "rejected"], ["q", '"a, b; c | d"', "b"]]
    (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + "\r\n".join(map(delimiter.join, lines)).encode())
    reported = {"delimiter": delimiter} if name == "d.tsv" and delimiter != "\t" else {}
    mine = source(tmp_path / name, columns={"chosen": "chosen, or; so"}, **reported)
    assert load_source(mine, seed=0).rows["preference"][0]["chosen"] == "a, b; c | d"


@pytest.mark.parametrize(
    ("content", "reported", "message"),
    [
        ("prompt#chosen#rejected\nq#a#b\n", {}, r"got prompt#chosen#rejected; .*separated by ','; set the source's delimiter"),
        ("prompt;chosen;rejected\nq;a\n", {}, r"line 2: expected 3 fields .*, got 2: {.prompt.: .q., .*; quote fields that contain ';'"),
        (
            "prompt,chosen;x\nq,a;b\n",
            {},
            r"expected a header that one delimiter splits best, got 2 of each with ',' and ';'; set the source's delimiter",
        ),
        ("\nprompt,chosen,rejected\nq,a,b\n", {}, r"line 1: expected a header with the columns' names, got an empty line"),
        ("prompt;chosen;rejected\nq;a;b\n", {"delimiter": ","}, r"got prompt;chosen;rejected; .*separated by ','"),
    ],
)
def test_errors_about_a_table_name_its_delimiter(tmp_path, content, reported, message):
    (tmp_path / "d.csv").write_text(content)
    with pytest.raises(ValueError, match=message):
        load_source(source(tmp_path / "d.csv", **reported), seed=0)
    if "#" in content:
        assert load_source(source(tmp_path / "d.csv", delimiter="#"), seed=0).rows["preference"][0]["chosen"] == "a"


@pytest.mark.parametrize("encoding", ["cp1252", "utf-16"])
@pytest.mark.parametrize("name", ["d.csv", "d.jsonl", "d.jsonl.gz", "d.json"])
def test_other_encodings_are_named_and_read(tmp_path, name, encoding):
    record = PAIR | {"chosen": "Käse, wörtlich"}
    text = {"d.csv": 'prompt,chosen,rejected\nq,"Käse, wörtlich",b\n', "d.json": json.dumps([record], ensure_ascii=False)}
    content = text.get(name, json.dumps(record, ensure_ascii=False) + "\n").encode(encoding)
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    with pytest.raises(ValueError, match=f"expected UTF-8, got byte 0x.. .*set the source's encoding to .*{encoding}"):
        load_source(source(tmp_path / name), seed=0)
    assert load_source(source(tmp_path / name, encoding=encoding), seed=0).rows["preference"][0]["chosen"] == "Käse, wörtlich"


def test_missing_values_of_pandas_are_named(tmp_path):
    printed = refusal(tmp_path, PAIR | {"chosen": float("nan")})
    assert "line 1: column 'chosen': expected text or a finite number, got NaN (no value); correct or remove the record" in printed
    assert load(tmp_path, PAIR, PAIR | {"chosen": float("-inf")}).dropped == {"chosen is infinite": 1}


def test_an_origin_is_the_path_of_the_params(tmp_path, monkeypatch):
    """Not where a worktree finds it."""
    main = tmp_path / "main"
    worktree = main / "runs" / "one"
    for folder in (worktree, main / "sets" / "b"):
        folder.mkdir(parents=True)
    (worktree / ".git").write_text(f"gitdir: {main}/.git/worktrees/one\n")
    (main / "sets" / "a.jsonl").write_text(json.dumps(PAIR) + "\n")
    pq.write_table(pa.Table.from_pylist([PAIR, PAIR]), main / "sets" / "b" / "c.parquet")
    monkeypatch.chdir(worktree)
    origins = [row["origin"] for row in load_source(source("sets"), seed=0).rows["preference"]]
    assert origins == ["sets/a.jsonl line 1", "sets/b/c.parquet row 1", "sets/b/c.parquet row 2"]


def test_tests_of_programs_are_labels_in_json(tmp_path):
    """As MBPP (a list of assert statements) and APPS (inputs and outputs) have them, in JSON lines and in Parquet."""
    records = [{"text": f"Square {n}.", "tests": ["assert f(3) == 9", "assert f('é') is None"]} for n in range(2)]
    columns = {"prompt": "text", "label": "tests"}
    rows = load(tmp_path, *records, {"text": "Double.", "tests": {"inputs": ["1"]}}, format="prompt", uses=("prompt",), columns=columns)
    assert [json.loads(row["label"]) for row in rows.rows["prompt"]] == [records[0]["tests"]] * 2 + [{"inputs": ["1"]}]
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "d.parquet")
    loaded = load_source(source(tmp_path / "d.parquet", "prompt", ("prompt",), columns=columns), seed=0)
    assert [row["label"] for row in loaded.rows["prompt"]] == [row["label"] for row in rows.rows["prompt"]][:2]
