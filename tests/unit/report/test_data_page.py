"""docs/tables/formats.md: every block is a file and a source; what comes out is what the page says, with nothing lost."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlhf_core.config import SourceConfig, parse_yaml
from rlhf_core.config.data import FORMATS
from rlhf_core.look.look import guess, place_of, sample_of
from rlhf_core.preparation.sources import load_source
from rlhf_core.preparation.steps import TAG

PAGE = (Path(__file__).parents[3] / "docs" / "tables" / "formats.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```yaml\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)
QUESTION, GOOD, BAD = "2+2?", "4", "5"  # in every record, so that it is known what has to come out


def written(block: str, folder: Path) -> tuple[Path, list[dict], dict[str, Any]]:
    """The block's file, its records and the keys of its source."""
    lines = [line.removeprefix("# ") for line in block.splitlines() if line.startswith("# ")]
    name = lines.pop(0) if re.fullmatch(r"[\w.]+", lines[0]) else "data.jsonl"
    path = folder / name
    keys = parse_yaml("\n".join(line for line in block.splitlines() if not line.startswith("# ")), "block")
    if path.suffix == ".csv":
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        header, *rows = (line.split(keys["delimiter"]) for line in lines)
        return path, [dict(zip(header, row, strict=True)) for row in rows], keys
    records = [json.loads(line) for line in lines]
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(records), path)
    else:
        path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path, records, keys


def source_of(path: Path, keys: dict[str, Any]) -> SourceConfig:
    uses = list(FORMATS[keys["format"]][0])
    return SourceConfig.model_validate({"name": "mine", "kind": "file", "path": str(path), "uses": uses, "weight": 1.0, **keys})


def texts(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [text for key, inner in value.items() if key not in ("role", "from", "type") for text in texts(inner)]
    return [text for inner in value for text in texts(inner)] if isinstance(value, list) else [value] if isinstance(value, str) else []


def read_by(record: dict, source: SourceConfig) -> list[Any]:
    """The values of the columns that the source reads, but for marks."""
    found = []
    for ours in (name for name in FORMATS[source.format][1] if name not in ("good", "preference", "winner")):
        theirs = source.columns.get(ours, ours)
        for path in theirs if isinstance(theirs, list) else [theirs]:
            value: Any = record
            for part in path.split("."):
                value = value.get(part) if isinstance(value, dict) else None
            found.append(None if source.format == "unpaired" and ours == "label" else value)
    return found


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: f"{re.search('format: (.*)', block)[1]}-{len(block)}")
class TestBlock:
    def test_every_use_gets_the_question_and_the_answers(self, block, tmp_path):
        path, records, keys = written(block, tmp_path)
        loaded = load_source(source_of(path, keys), seed=0)
        assert loaded.dropped.records == 0 and loaded.dropped.read == len(records)
        for use, rows in loaded.rows.items():
            assert rows, use
            for row in rows:
                if use == "pretrain":
                    assert QUESTION in row["text"]
                    continue
                assert any(m["role"] == "user" and QUESTION in m["content"] for m in row["messages"])
                good = [row[name] for name in ("response", "chosen") if row.get(name) and min(row.get("labels") or [1]) >= 0]
                assert all(GOOD in text and BAD not in text for text in good)
                assert BAD in (row.get("rejected") or BAD) and GOOD not in (row.get("rejected") or BAD)
                if use == "prompt" and "label" in keys.get("columns", {}) and keys["format"] != "unpaired":
                    assert row["label"] == GOOD
                if use == "preference" and "topic" in keys.get("slices", {}):
                    assert row["slices"] == {"topic": "sums"}

    def test_no_word_of_a_column_that_is_read_is_lost(self, block, tmp_path):
        path, records, keys = written(block, tmp_path)
        source = source_of(path, keys)
        rows = [row for rows in load_source(source, seed=0).rows.values() for row in rows]
        kept = set(re.findall(r"\w+", json.dumps(rows, ensure_ascii=False).replace("\\n", " ")))
        for record in records:
            given = {word for text in texts(read_by(record, source)) for word in re.findall(r"\w+", text)}
            notation = {"Human", "Assistant"} if source.format in ("hh", "ranked") else {TAG} if source.format == "math_shepherd" else set()
            assert given and given - kept <= notation

    def test_the_look_guesses_the_source_that_the_page_shows(self, block, tmp_path):
        path, _, keys = written(block, tmp_path)
        place = place_of(str(path), {})
        sample, whole = sample_of(place, 2000)
        (tried,) = guess(place, sample, whole=whole, format_=None, columns={}).fitting
        assert (tried.source.format, dict(tried.source.columns)) == (keys["format"], keys.get("columns", {}))
        assert tried.source.label_pattern == keys.get("label_pattern")
        assert tried.source.implicit_prompt == keys.get("implicit_prompt")
        assert tried.source.uses == list(FORMATS[keys["format"]][0])


@pytest.mark.parametrize("format_", FORMATS)
def test_each_format_has_a_section_with_its_uses_and_columns(format_):
    section = re.search(rf"^### {format_}\n(.*?)^##", PAGE, flags=re.DOTALL | re.MULTILINE)[1]
    uses, columns = FORMATS[format_]
    message = re.search(r"^Uses (.*?)\. Columns? (.*?)\.(?:\s|$)", section, flags=re.DOTALL | re.MULTILINE)
    assert set(re.findall(r"\b(?:pretrain|sft|preference|stepwise|prompt)\b", re.sub(r"\(.*?\)", "", message[1]))) == set(uses)
    assert all(re.search(rf"\b{column}\b", message[2]) for column in columns), message[2]
    assert f"format: {format_}\n" in section


def test_every_key_of_a_source_is_listed():
    section = PAGE.split("## Keys of a source")[1].split("\n## ")[0]
    named = {key for line in section.splitlines() if line.startswith("- `") for key in re.findall(r"`(\w+)`", line.split(": ")[0])}
    assert set(SourceConfig.model_fields) <= named


def test_links_within_the_page_lead_somewhere():
    headings = {heading.lower().replace(" ", "-") for heading in re.findall(r"^#+ (.*)$", PAGE, flags=re.MULTILINE)}
    assert set(re.findall(r"\(#([\w-]+)\)", PAGE)) <= headings
    assert all((Path(__file__).parents[3] / "docs/tables" / name).is_file() for name in re.findall(r"\(([\w./]+\.md)\)", PAGE))


def test_marks_become_pairs_of_the_best_and_the_worst_response(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    marks = [("a", "4", 3), ("a", "5", 0), ("a", "four or five", 1), ("b", "equal", 2), ("b", "equal too", 2), ("c", "alone é", 4)]
    records = [{"prompt": p, "response": r, "helpfulness": m, "correctness": m, "coherence": 4} for p, r, m in marks]
    Path("helpsteer.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    (snippet,) = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)
    exec(snippet, {})
    rows = load_source(source_of(Path("pairs.jsonl"), {"format": "preference"}), seed=0).rows["preference"]
    assert [(row["messages"][0]["content"], row["chosen"], row["rejected"]) for row in rows] == [("a", "4", "5")]
