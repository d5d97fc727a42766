"""Files that are written and read piece by piece."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlhf_core.data import schema
from rlhf_core.data.schema import SCHEMAS, RowWriter, open_rows, read_batches, read_rows, write_rows

ROWS = [
    {"id": f"i{i}", "source": "s", "split": "train", "messages": [{"role": "user", "content": "q" * i}], "response": "r" * i}
    for i in range(50)
]


def write(folder, rows=ROWS):
    with RowWriter(folder / "sft.parquet", SCHEMAS["sft"]) as file:
        for row in rows:
            file.add(row)
    return folder / "sft.parquet"


def test_a_small_file_has_the_bytes_of_one_that_is_written_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(schema, "ROWS_AT_ONCE", 7)
    write_rows(tmp_path / "whole", "sft", ROWS)
    assert write(tmp_path / "pieces").read_bytes() == (tmp_path / "whole/sft.parquet").read_bytes()


def test_a_large_file_has_several_row_groups_and_the_same_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(schema, "ROWS_AT_ONCE", 7)
    monkeypatch.setattr(schema, "ROW_GROUP_BYTES", 1000)
    path = write(tmp_path)
    assert pq.read_metadata(path).num_row_groups > 1
    assert read_rows(tmp_path, "sft") == ROWS
    batches = list(read_batches(open_rows(path)))
    assert max(batch.num_rows for batch in batches) <= 7
    assert [row for batch in batches for row in batch.to_pylist()] == [row | {"origin": None} for row in ROWS]


def test_without_rows_there_is_no_file_and_a_wrong_type_is_refused(tmp_path):
    assert not write(tmp_path / "none", []).exists()
    with pytest.raises(pa.ArrowTypeError):
        write(tmp_path / "wrong", [ROWS[0] | {"response": 3.5}])


def test_a_damaged_page_is_refused_with_advice(tmp_path):
    rows = [{"id": str(i), "source": "s", "split": "train", "text": f"line {i * 7919 % 1000} of many"} for i in range(5000)]
    write_rows(tmp_path, "pretrain", rows)
    path = tmp_path / "pretrain.parquet"
    damaged = bytearray(path.read_bytes())
    middle = len(damaged) // 2
    damaged[middle : middle + 200] = bytes(200)
    path.write_bytes(damaged)
    with pytest.raises(ValueError, match=r"prepared data: expected whole Parquet files, got: .*; run prepare_data again"):
        list(read_batches(open_rows(path)))
