"""Files of every kind, wrong files of every kind, and Hugging Face folders."""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlhf_core.config import SourceConfig
from rlhf_core.data.places import locate
from rlhf_core.preparation.sources import load_source

RECORDS = [{"prompt": f"q{i}, wörtlich", "chosen": f"a{i}\nund", "rejected": "b"} for i in range(3)]
REAL = Path(__file__).parents[3] / "../shared/data"
needs_real_data = pytest.mark.skipif(not REAL.exists(), reason="the real data sets are not here: ../shared/data, beside the checkout")


def source(path: Path | str, format: str = "preference", uses: tuple[str, ...] = ("preference",), **more) -> SourceConfig:
    settings = {"name": "mine", "kind": "file", "path": str(path), "format": format, "uses": list(uses), "weight": 1.0}
    return SourceConfig.model_validate(settings | more)


def pairs(path: Path) -> list[tuple[str, str, str]]:
    return [(r["messages"][0]["content"], r["chosen"], r["rejected"]) for r in load_source(source(path), seed=0).rows["preference"]]


def as_json_lines(records) -> str:
    return "".join(json.dumps(r) + "\n" for r in records)


def as_csv(records, delimiter: str = ",") -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, list(records[0]), delimiter=delimiter)
    writer.writeheader()
    writer.writerows(records)
    return out.getvalue()


WRITERS = {
    "d.jsonl": lambda path, records: path.write_text(as_json_lines(records), encoding="utf-8"),
    "d.jsonl.gz": lambda path, records: path.write_bytes(gzip.compress(as_json_lines(records).encode())),
    "d.json": lambda path, records: path.write_text(json.dumps(records, indent=1), encoding="utf-8"),
    "d.json.gz": lambda path, records: path.write_bytes(gzip.compress(json.dumps(records).encode())),
    "d.csv.gz": lambda path, records: path.write_bytes(gzip.compress(as_csv(records).encode())),
    "d.tsv.gz": lambda path, records: path.write_bytes(gzip.compress(as_csv(records, delimiter="\t").encode())),
    "lines.json": lambda path, records: path.write_text(as_json_lines(records), encoding="utf-8-sig"),
    "pretty.json": lambda path, records: path.write_text("\n".join(json.dumps(r, indent=2) for r in records), encoding="utf-8"),
    "data.json": lambda path, records: path.write_text(json.dumps({"version": 1, "data": records}), encoding="utf-8"),
    "sep.csv": lambda path, records: path.write_text("sep=;\r\n" + as_csv(records, delimiter=";"), encoding="utf-8-sig", newline=""),
    "enum.parquet": lambda path, records: pq.write_table(
        pa.table({key: pa.array([r[key] for r in records]).dictionary_encode() for key in records[0]}), path
    ),
    "d.csv": lambda path, records: path.write_text(as_csv(records), encoding="utf-8-sig", newline=""),
    "d.parquet": lambda path, records: pq.write_table(pa.Table.from_pylist(records), path),
}
EXPECTED = [(r["prompt"], r["chosen"], "b") for r in RECORDS]


@pytest.mark.parametrize("name", WRITERS)
def test_every_kind_of_file_gives_the_same_rows(tmp_path, name):
    WRITERS[name](tmp_path / name, RECORDS)
    assert pairs(tmp_path / name) == EXPECTED


def test_a_folder_is_read_in_the_order_of_its_names(tmp_path):
    for i, name in enumerate(("c.jsonl", "b.csv", "a.parquet")):
        WRITERS[f"d.{name.split('.')[1]}"](tmp_path / name, RECORDS[i : i + 1])
    (tmp_path / "README.md").write_text("not data")
    assert pairs(tmp_path) == EXPECTED[::-1]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "d.jsonl",
            b'{"prompt": "q", "chosen": "a", "rejected": "b"}\n\n{"prompt": \n',
            r"d\.jsonl line 3: expected JSON, got '{\"prompt\":'",
        ),
        ("d.jsonl", b'["a"]\n', r"d\.jsonl line 1: expected a JSON object, got list: .* name it \.json"),
        ("d.jsonl", b'{"a": 1}\n["a"]\n', r"d\.jsonl line 2: expected a JSON object, got list: .* write one object per record"),
        (
            "d.jsonl",
            b'{"prompt": "q", "chosen": "a"}\n',
            r"source mine: .*d\.jsonl line 1: expected a column 'rejected' .*, got prompt, chosen",
        ),
        ("d.jsonl", '{"prompt": "ä"}\n'.encode("latin-1"), r"d\.jsonl: expected UTF-8, got byte 0xe4"),
        ("d.jsonl", b"", r"d\.jsonl: expected at least one record, got an empty file"),
        ("d.json", b"", r"d\.json: expected at least one record, got an empty file"),
        ("d.json", b'{"data": []}', r"d\.json: expected at least one record, got an empty file"),
        ("d.json", b'{"data": [{"a": 1}], "test": [{"a": 1}]}', r"expected a list of objects, .* got one object with the keys data, test"),
        ("d.json", b'{"prompt": ["q"], "chosen": ["a"]}', r"keys prompt, chosen; put .* \(pandas: orient='records'\)"),
        ("d.json", b"7", r"d\.json: expected a list of objects, got int"),
        ("d.json", b'{"a": 1}\n{"a": 2}\n{"a"\n', r"d\.json: expected JSON, .* in line 4 column 1"),
        (
            "d.jsonl",
            b'{\n  "prompt": "q"\n}\n',
            r"line 1: expected one JSON object a line, got '{': .* over several lines; name the file \.json",
        ),
        ("d.jsonl", b"[\n]", r"line 1: expected one JSON object a line, got '\['"),
        ("d.csv", b"sep=;\nprompt;chosen;rejected\nq;a\n", r"d\.csv line 3: expected 3 fields as in the header, got 2"),
        ("d.json", b'[\n{"a": 1},\n{]', r"d\.json: expected JSON, .*line 3 column 2"),
        ("d.csv", b"prompt,chosen,rejected\nq,a,b\nq,a\n", r"d\.csv line 3: expected 3 fields as in the header, got 2"),
        ("d.csv", b"prompt,chosen,rejected\nq,a,b,c\n", r"d\.csv line 2: expected 3 fields as in the header, got 4"),
        ("d.csv", b"prompt,chosen,rejected\n", r"d\.csv: expected at least one record"),
        ("d.csv", b'a\tb\n"q"x\ty\n', r"d\.csv line 2: expected CSV, got: '\\t' expected after"),
        ("d.jsonl.gz", b"{}", r"d\.jsonl\.gz: expected a complete gzip file"),
        ("d.jsonl.gz", gzip.compress(b'{"prompt": "q"}' * 9, mtime=0)[:-9], r"d\.jsonl\.gz: expected a complete gzip file"),
        ("d.parquet", b"PAR1 or not", r"d\.parquet: expected a Parquet file"),
        ("d.txt", b"hello", r"d\.txt: expected a name that ends in \.jsonl"),
    ],
)
def test_wrong_files_are_named_with_their_place(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        pairs(tmp_path / name)


def test_missing_paths_and_folders_without_data(tmp_path):
    with pytest.raises(FileNotFoundError, match="expected a data file or folder, got nothing there"):
        pairs(tmp_path / "none.jsonl")
    with pytest.raises(ValueError, match="got a folder without any"):
        pairs(tmp_path)


def test_dropped_records_are_counted_and_nothing_left_is_an_error(tmp_path):
    good, bad = {"chosen": "Say a", "rejected": "Say b"}, {"chosen": "yes", "rejected": "no"}
    (tmp_path / "d.jsonl").write_text(as_json_lines([good, bad, bad]))
    mine = source(tmp_path / "d.jsonl", implicit_prompt=True)
    loaded = load_source(mine, seed=0)
    assert (len(loaded.rows["preference"]), loaded.dropped) == (1, {"chosen and rejected share no beginning": 2})
    (tmp_path / "d.jsonl").write_text(as_json_lines([bad]))
    nothing = r"got none .*\(left out: {'chosen and rejected share no beginning': 1}; the first: .*d\.jsonl line 1: {\"chosen\": \"yes\""
    with pytest.raises(ValueError, match=nothing):
        load_source(mine, seed=0)


def test_a_repeated_prompt_is_kept_once_and_counted(tmp_path):
    (tmp_path / "d.jsonl").write_text(as_json_lines([{"prompt": "q"}, {"prompt": "Q "}, {"prompt": "r"}]))
    loaded = load_source(source(tmp_path / "d.jsonl", "prompt", ("prompt",)), seed=0)
    assert [r["messages"][0]["content"] for r in loaded.rows["prompt"]] == ["q", "r"]
    assert loaded.dropped == {"prompt rows that repeat a conversation": 1}


def test_a_worktree_finds_data_beside_the_main_checkout(tmp_path, monkeypatch):
    main = tmp_path / "home" / "main"
    worktree = main / "runs" / "one"
    worktree.mkdir(parents=True)
    (worktree / ".git").write_text(f"gitdir: {main}/.git/worktrees/one\n")
    (tmp_path / "home" / "shared").mkdir()
    monkeypatch.chdir(worktree)
    assert locate("../shared").resolve() == tmp_path / "home" / "shared"
    assert locate("../elsewhere") == Path("../elsewhere")  # for the error message
    (main / "runs" / "shared").mkdir()
    assert locate("../shared") == Path("../shared")  # what is there counts


TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=30)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=5), name=st.sampled_from(["d.jsonl", "d.json", "d.csv", "d.jsonl.gz"]))
def test_any_text_survives_any_kind_of_file(tmp_path, texts, name):
    """Quotes, commas, line breaks of every script: what was written is read, with LF for CRLF and CR."""
    WRITERS[name](tmp_path / name, [{"prompt": "q", "chosen": a, "rejected": b} for a, b in texts])
    assert [(c, r) for _, c, r in pairs(tmp_path / name)] == [(plain(a), plain(b)) for a, b in texts]


def plain(text: str) -> str:
    return re.sub("\r\n?", "\n", text)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=200), name=st.sampled_from(sorted(WRITERS)))
def test_any_bytes_give_rows_or_an_error_that_names_the_file(tmp_path, content, name):
    (tmp_path / name).write_bytes(content)
    try:
        assert pairs(tmp_path / name)
    except ValueError as error:
        assert name in str(error)


def test_a_hugging_face_folder_as_saved_to_disk(tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.DatasetDict({"extra": datasets.Dataset.from_list(RECORDS)}).save_to_disk(tmp_path / "set")
    hub = source(tmp_path / "set", kind="huggingface", dataset_split="extra")
    assert [r["chosen"] for r in load_source(hub, seed=0).rows["preference"]] == [r["chosen"] for r in RECORDS]
    with pytest.raises(ValueError, match=r"expected a split 'train', got \['extra'\]"):
        load_source(source(tmp_path / "set", kind="huggingface"), seed=0)


def test_a_name_that_is_not_cached_is_an_error_at_once():
    with pytest.raises(ValueError, match="source mine: data set nobody/nothing-here: expected a cached name or a local folder"):
        load_source(source("nobody/nothing-here", kind="huggingface"), seed=0)


@needs_real_data
def test_gsm8k_solutions_give_2429_pairs():
    columns = {
        "prompt": "question",
        "completions": ["6b_finetuning", "6b_verification", "175b_finetuning", "175b_verification"],
        "completion": "solution",
        "good": "is_correct",
    }
    loaded = load_source(source(REAL / "gsm8k/example_model_solutions.jsonl.gz", "graded", columns=columns), seed=0)
    assert len(loaded.rows["preference"]) == 2429


@needs_real_data
def test_hh_rlhf_gives_2307_pairs_and_counts_the_5_whose_prompts_differ():
    loaded = load_source(source(REAL / "hh-rlhf/harmless-base-test.jsonl.gz", "hh"), seed=0)
    assert len(loaded.rows["preference"]) == 2307
    assert loaded.dropped == {"the prompts of chosen and rejected differ": 5}
    for row in loaded.rows["preference"]:
        roles = [m["role"] for m in row["messages"]]
        assert roles == ["user", "assistant"] * (len(roles) // 2) + ["user"]


@needs_real_data
def test_gsm8k_questions_have_their_number_as_label():
    mapping = {"columns": {"prompt": "question", "label": "answer"}, "label_pattern": r"####\s*(\S+)"}
    rows = load_source(source(REAL / "gsm8k/test.jsonl.gz", "prompt", ("prompt",), **mapping), seed=0).rows["prompt"]
    assert len(rows) == 1319
    assert [r["label"] for r in rows[:4]] == ["18", "3", "70000", "540"]
