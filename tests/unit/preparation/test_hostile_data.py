"""Data files that somebody broke, or made to break us: all of their rows, or an error that says where."""

from __future__ import annotations

import gzip
import json
import os
import resource
import subprocess
import sys
import zlib
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[2]))
from gate_pairs import write_slices
from hostile import NASTY_VALUES, is_clear, mangled
from whole_matrix import cells

from rlhf_core.config import SourceConfig
from rlhf_core.data.schema import SCHEMAS
from rlhf_core.preparation import tables
from rlhf_core.preparation.sources import Loaded, load_source
from rlhf_core.preparation.values import MAX_CHARACTERS

ROOT = Path(__file__).parents[3]
PAIR = {"prompt": "What is 1 + 1?", "chosen": "2", "rejected": "3", "label": "2"}
CSV = b'prompt,chosen,rejected,label\r\n"What, is ""1 + 1""?",2,3,2\r\nb,c,d,2\r\n'
HH = {"chosen": "\n\nHuman: hello\n\nAssistant: hi", "rejected": "\n\nHuman: hello\n\nAssistant: go"}
CONVERSATION = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}], "label": 1}
GRADED = {"prompt": "q", "completions": [{"completion": "a", "good": True}, {"completion": "b", "good": "0"}]}
FORMATS = {
    "preference": (PAIR, ("preference", "prompt", "sft")),
    "hh": (HH, ("preference", "prompt")),
    "instruction": ({"instruction": "do", "input": "it", "output": "done", "label": "x"}, ("sft", "prompt")),
    "messages": (CONVERSATION, ("sft", "prompt")),
    "unpaired": ({"prompt": "q", "completion": "a", "label": True}, ("preference",)),
    "graded": (GRADED, ("preference", "sft")),
    "prompt": ({"prompt": "q", "label": 2}, ("prompt",)),
    "text": ({"text": "t"}, ("pretrain",)),
}


def lines(*records) -> bytes:
    return b"".join(json.dumps(r).encode() + b"\n" for r in records)


def load(path: Path, format: str = "preference", **more) -> Loaded:
    given = {"name": "mine", "kind": "file", "path": str(path), "format": format, "uses": list(FORMATS[format][1]), "weight": 1.0}
    return load_source(SourceConfig.model_validate(given | more), seed=0)


def assert_whole_or_refused(path: Path, format: str = "preference", **more) -> str | None:
    """Rows that the schema takes, or a clear message that names the file; None: rows."""
    try:
        loaded = load(path, format, **more)
    except (ValueError, FileNotFoundError) as error:
        assert is_clear(str(error)) and path.name in str(error), str(error)[:500]
        return str(error)
    for use, rows in loaded.rows.items():
        whole = [{"id": "i", "source": "s", "split": "train", **{k: v for k, v in row.items() if k != "slices"}} for row in rows]
        pa.Table.from_pylist(whole, schema=SCHEMAS[use])
        write_slices(path.parent / "slices", {f"i{n}": row["slices"] for n, row in enumerate(rows) if "slices" in row})
    return None


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("d.jsonl", lines(PAIR, PAIR, PAIR)),
        ("d.json", json.dumps([PAIR, PAIR]).encode()),
        ("d.csv", CSV),
        ("d.jsonl.gz", gzip.compress(lines(PAIR, PAIR), mtime=0)),
    ],
)
@settings(max_examples=60)
@given(data=st.data())
def test_any_broken_file_gives_all_rows_or_an_error_with_its_place(tmp_path_factory, name, content, data):
    path = tmp_path_factory.getbasetemp() / name
    path.write_bytes(data.draw(mangled(content)))
    assert_whole_or_refused(path, slices={"length": "label"})


@settings(max_examples=60)
@given(data=st.data())
def test_any_broken_parquet_file_gives_all_rows_or_an_error_with_its_place(tmp_path_factory, data):
    folder = tmp_path_factory.getbasetemp()
    pq.write_table(pa.Table.from_pylist([PAIR, PAIR]), folder / "whole.parquet")
    (folder / "d.parquet").write_bytes(data.draw(mangled((folder / "whole.parquet").read_bytes())))
    assert_whole_or_refused(folder / "d.parquet")


@settings(max_examples=100)
@given(format=st.sampled_from(sorted(FORMATS)), value=st.sampled_from(NASTY_VALUES), deep=st.booleans(), data=st.data())
@example(format="prompt", value=float("nan"), deep=False, data=None)
def test_any_value_of_any_column_is_taken_or_refused_with_its_line(tmp_path_factory, format, value, deep, data):
    record = dict(FORMATS[format][0])
    key = "label" if data is None else data.draw(st.sampled_from(sorted(record)))
    inner = record[key]
    if deep and isinstance(inner, list):
        record[key] = [*inner[:-1], {**inner[-1], data.draw(st.sampled_from(sorted(inner[-1]))): value}]
    else:
        record[key] = value
    try:
        line = lines(FORMATS[format][0], record)
    except (TypeError, ValueError, RecursionError):  # not a value of JSON
        return
    path = tmp_path_factory.getbasetemp() / "values.jsonl"
    path.write_bytes(line)
    message = assert_whole_or_refused(path, format)
    # A -1 among the marks makes the first line's boolean the odd one.
    assert message is None or "line 2" in message or (value == -1 and "expected 1 or -1" in message)


@pytest.mark.parametrize("label", [float("nan"), float("inf")])
def test_a_label_that_is_none_is_no_expected_answer(tmp_path, label):
    """`nan` as the expected answer would score every response as wrong."""
    (tmp_path / "d.jsonl").write_bytes(lines({"prompt": "q", "label": label}))
    assert "line 1: column 'label': expected " in assert_whole_or_refused(tmp_path / "d.jsonl", "prompt")
    pq.write_table(pa.Table.from_pylist([{"prompt": "q", "label": label}]), tmp_path / "d.parquet")
    assert "row 1: column 'label': expected " in assert_whole_or_refused(tmp_path / "d.parquet", "prompt")


def test_a_row_of_a_billion_characters_is_refused_where_it_begins(tmp_path):
    """As a sparse file of zeros; nothing near that size is read."""
    for name, head in (("d.jsonl", lines(PAIR)), ("d.csv", CSV), ("d.json", b"[")):
        with (tmp_path / name).open("wb") as file:
            file.write(head)
            file.truncate(1_200_000_000)
        message = assert_whole_or_refused(tmp_path / name)
        assert f"of at most {MAX_CHARACTERS}" in message or "bytes" in message, message


def test_a_quoted_field_that_does_not_end_is_refused(tmp_path):
    """Each of its lines is short, and all of them are one text."""
    (tmp_path / "d.csv").write_bytes(CSV + b'"' + b"word word word\n" * (MAX_CHARACTERS // 15 + 9))
    assert "expected CSV, got: field larger than field limit" in assert_whole_or_refused(tmp_path / "d.csv")


def test_a_text_over_the_limit_is_counted_or_refused(tmp_path):
    long = {**PAIR, "chosen": "x" * (MAX_CHARACTERS + 1)}
    pq.write_table(pa.Table.from_pylist([PAIR, long]), tmp_path / "d.parquet")
    loaded = load(tmp_path / "d.parquet")
    assert (len(loaded.rows["preference"]), loaded.dropped) == (1, {"chosen is too long for any text": 1})
    pq.write_table(pa.Table.from_pylist([long]), tmp_path / "d.parquet")
    refused = f"row 1: column 'chosen': expected at most {MAX_CHARACTERS} characters, got {MAX_CHARACTERS + 1}"
    assert refused in assert_whole_or_refused(tmp_path / "d.parquet")


def bomb(path: Path, part: bytes, times: int, head: bytes = b"") -> None:
    """`part` so many times, gzipped; of any length in a moment."""
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    with path.open("wb") as file:
        file.write(packer.compress(head))
        for _ in range(times):
            file.write(packer.compress(part))
        file.write(packer.flush())


@pytest.mark.parametrize(
    "part",
    [(b" " * 9999 + b"\n") * 100, b"0" * 2**20, lines({**PAIR, "prompt": "q" * 9999}) * 100],
    ids=["blank lines", "one row", "a row again and again"],
)
def test_a_gzip_bomb_is_refused_before_it_fills_the_memory(tmp_path, part):
    bomb(tmp_path / "d.jsonl.gz", part, 30, lines(PAIR))
    message = assert_whole_or_refused(tmp_path / "d.jsonl.gz")
    assert "expected" in message and ("times its size" in message or "characters" in message), message


BOMBS = {  # name -> rows, characters of one text, how it is written
    "a dictionary": (1000, 1_600_000, {}),
    "shared beginnings": (100, 1_600_000, {"use_dictionary": False, "column_encoding": {"chosen": "DELTA_BYTE_ARRAY"}}),
    "one page": (2, 100_000_000, {"use_dictionary": False}),
    "long texts": (64, 40_000_000, {}),
}
READ_PARQUET = """
import resource, sys
from tests.unit.preparation.test_hostile_data import Path, _refusal
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(_refusal(Path(sys.argv[1])))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.parametrize("kind", cells(BOMBS, ["a dictionary"]))
def test_a_parquet_file_that_unpacks_to_gigabytes_is_refused_in_little_memory(tmp_path, kind):
    """In a process of its own, whose memory is measured."""
    rows, characters, how = BOMBS[kind]
    path = tmp_path / "d.parquet"
    pq.write_table(repeated(rows, characters, dense="use_dictionary" in how), path, compression="zstd", **how)
    assert path.stat().st_size < 20_000
    done = subprocess.run([sys.executable, "-c", READ_PARQUET, str(path)], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    message, kilobytes = done.stdout.strip().splitlines()
    assert "at most 200 times its size" in message or "rows of at most 1073741824 bytes" in message
    assert int(kilobytes) < 300_000, done.stdout


def repeated(rows: int, characters: int, *, dense: bool = False) -> pa.Table:
    """A table of pairs whose chosen responses are one text."""
    chosen = pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), pa.array(["x" * characters]))
    return pa.table({"prompt": ["q"] * rows, "chosen": chosen.dictionary_decode() if dense else chosen, "rejected": ["b"] * rows})


def test_a_batch_that_does_not_fit_is_refused_whatever_the_file_says(tmp_path, monkeypatch):
    """As of a file whose figures lie: neither its ratio nor its own sizes stop it."""
    monkeypatch.setattr(tables, "PARQUET_FREE_BYTES", 2**40)
    monkeypatch.setattr(tables, "BATCH_BYTES", 2**28)
    pq.write_table(repeated(64, 60_000_000), tmp_path / "d.parquet")
    assert "expected 64 rows of at most 268435456 bytes in memory, got more after 0 rows" in _refusal(tmp_path / "d.parquet")
    assert resource.getrlimit(resource.RLIMIT_DATA)[0] == resource.RLIM_INFINITY


def test_a_table_of_repeated_texts_is_no_bomb(tmp_path):
    prompt = "You are a helpful assistant. " * 20
    records = [{"prompt": f"{prompt}What is {i} + {i}?", "chosen": f"It is {2 * i}.", "rejected": "I don't know."} for i in range(5000)]
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "d.parquet", compression="zstd")
    assert len(load(tmp_path / "d.parquet").rows["preference"]) == 5000


def test_a_text_that_compresses_well_is_no_bomb(tmp_path):
    records = [{**PAIR, "prompt": f"What is {i} + {i}?"} for i in range(20_000)]
    (tmp_path / "d.jsonl.gz").write_bytes(gzip.compress(lines(*records)))
    assert len(load(tmp_path / "d.jsonl.gz").rows["preference"]) == 20_000


def test_what_a_folder_holds_is_read_whole_or_refused(tmp_path):
    """A link that leads nowhere, a pipe and a file without permission would otherwise be left out, or waited for."""
    (tmp_path / "a.jsonl").write_bytes(lines(PAIR))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(lines(PAIR))
    linked = tmp_path / "b.jsonl"
    linked.symlink_to(elsewhere)
    assert len(load(tmp_path).rows["preference"]) == 2
    elsewhere.unlink()
    assert "b.jsonl: expected a file, got a link to nothing" in _refusal(tmp_path)
    linked.unlink()
    linked.symlink_to("b.jsonl")
    assert "b.jsonl: expected a file, got a link to nothing" in _refusal(tmp_path)
    linked.unlink()
    os.mkfifo(linked)
    for path in (tmp_path, linked):
        assert "b.jsonl: expected a file, got something else" in _refusal(path)
    linked.unlink()
    linked.symlink_to("/dev/zero")
    for path in (tmp_path, linked):
        assert "b.jsonl: expected a file, got something else" in _refusal(path)


def _refusal(path: Path) -> str:
    with pytest.raises(ValueError) as error:
        load(path)
    assert is_clear(str(error.value))
    return str(error.value)


def test_a_column_that_comes_twice_is_refused(tmp_path):
    (tmp_path / "d.csv").write_bytes(b"prompt,chosen,rejected,chosen\na,b,c,d\n")
    assert "d.csv line 1: expected different columns, got chosen twice" in assert_whole_or_refused(tmp_path / "d.csv")


def test_a_folder_that_links_to_itself_is_read_once(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(lines(PAIR))
    (tmp_path / "again").symlink_to(tmp_path)
    assert len(load(tmp_path).rows["preference"]) == 1


@pytest.mark.parametrize("path", ["\x00", "a\x00.jsonl", "\ud800.jsonl", "x" * 5000 + ".jsonl", "../" * 2000 + "d.jsonl"])
def test_a_path_that_can_not_be_one_is_refused(path):
    with pytest.raises((ValueError, FileNotFoundError)) as error:
        load(Path(path))
    assert "expected" in str(error.value)
