"""Sources that become files, piece by piece."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf_core.config import DataConfig
from rlhf_core.data import schema
from rlhf_core.data.hashing import with_ids
from rlhf_core.data.schema import SCHEMAS, SPLITS, read_rows, read_slices
from rlhf_core.preparation.sources import Mixed, load_source, mix

PAIRS = 60
USES = ["sft", "preference", "prompt"]


@pytest.fixture
def config(tmp_path: Path) -> DataConfig:
    """Two files with the same pairs, some of them twice or with a prompt that comes again; the light one keeps a quarter."""
    pairs = [{"prompt": f"q{i % 50}", "chosen": f"a{i % 55}", "rejected": "b", "kind": f"k{i % 3}"} for i in range(PAIRS)]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    common = {"kind": "file", "path": str(tmp_path / "d.jsonl"), "format": "preference", "uses": USES}
    sources = [common | {"name": "heavy", "weight": 2.0, "slices": {"kind": "kind"}}, common | {"name": "light", "weight": 0.5}]
    return DataConfig.model_validate({"validation_fraction": 0.1, "test_fraction": 0.2, "max_rows": 55, "sources": sources})


def mixed(config: DataConfig, folder: Path) -> Mixed:
    return mix(config, folder / "out", scratch=folder / "aside", seed=0)


def test_rows_are_those_of_the_sources_by_weight_in_their_order(config, tmp_path):
    found = mixed(config, tmp_path)
    loaded = {source.name: load_source(source, seed=0) for source in config.sources}
    for use in USES:
        rows = read_rows(tmp_path / "out", use)
        expected = []
        for name, share in (("heavy", 1.0), ("light", 0.25)):
            identified = with_ids(loaded[name].rows[use], name)
            lowest = sorted(row["id"] for row in identified)[: min(55, round(share * len(identified)))]
            expected += [{k: v for k, v in row.items() if k not in ("slices", "origin")} for row in identified if row["id"] in lowest]
        assert [{k: v for k, v in row.items() if k != "split"} for row in rows] == expected
        counted = {key: sum((row["source"], use, row["split"]) == key for row in rows) for key in found.counts if key[1] == use}
        assert counted == {key: n for key, n in found.counts.items() if key[1] == use}
        assert {row["split"] for row in rows} <= set(SPLITS)
    assert found.uses == USES
    assert found.dropped == {name: {"prompt rows that repeat a conversation": 10} for name in ("heavy", "light")}
    sliced = [row for use in ("preference", "prompt") for row in read_rows(tmp_path / "out", use) if row["source"] == "heavy"]
    assert set(read_slices(tmp_path / "out")) == {row["id"] for row in sliced} and len(sliced) == 55 + 50


def test_pieces_of_any_size_give_the_same_rows(config, tmp_path, monkeypatch):
    whole = mixed(config, tmp_path / "whole")
    monkeypatch.setattr(schema, "ROWS_AT_ONCE", 7)
    monkeypatch.setattr(schema, "ROW_GROUP_BYTES", 500)
    assert mixed(config, tmp_path / "pieces") == whole
    for use in USES:
        assert read_rows(tmp_path / "pieces/out", use) == read_rows(tmp_path / "whole/out", use)
    assert read_slices(tmp_path / "pieces/out") == read_slices(tmp_path / "whole/out")


def test_a_source_without_rows_for_a_use_gets_none_of_the_one_before(config, tmp_path):
    clerk = {"pretrain_lines": 5, "demonstrations": 5, "prompts": 5, "responses_per_prompt": 2, "label_noise": 0.0, "garbled_fraction": 0.0}
    named = {"name": "clerk", "kind": "clerk", "uses": ["prompt"], "weight": 2.0, "clerk": clerk | {"polite_errors_only": False}}
    tree = config.model_dump(mode="json", exclude_unset=True)
    tree["sources"].append(named)
    found = mixed(DataConfig.model_validate(tree), tmp_path)
    assert {use for source, use, _ in found.counts if source == "clerk"} == {"prompt"}
    assert {p.stem for p in (tmp_path / "out").iterdir()} == {*USES, "slices"} and "pretrain" in SCHEMAS


@pytest.mark.long
def test_memory_does_not_grow_with_the_texts(tmp_path):
    """3600 more pairs are 140 MB more when all are in memory at once, and 2 to 13 when a few are."""
    command = [sys.executable, str(Path(__file__).with_name("growth.py")), "mix", str(tmp_path), "1200", "256"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 60 * 1024
