"""By how many KB the largest memory grows from so many pairs with long texts to four times as many.

python tests/unit/preparation/growth.py (mix | validate) <folder> <pairs> <rows at once>
"""

from __future__ import annotations

import json
import random
import resource
import sys
from pathlib import Path

from rlhf_core.config import DataConfig, ValidationConfig
from rlhf_core.data import schema
from rlhf_core.data.schema import open_rows
from rlhf_core.preparation.sources import mix

TEXT_BYTES = 2000
WORDS = [f"{a}{b}{c}" for a in "bdfgklmnprst" for b in "aeiou" for c in "bdgklmnprst"]
USES = ["sft", "preference", "prompt"]


def write_pairs(path: Path, count: int) -> None:
    chance = random.Random(0)
    with path.open("w") as file:
        for i in range(count):
            texts = (f"{i} " + " ".join(chance.choices(WORDS, k=TEXT_BYTES // 4)) for _ in range(3))
            file.write(json.dumps(dict(zip(("prompt", "chosen", "rejected"), texts, strict=True))) + "\n")


def prepared(folder: Path, count: int) -> Path:
    write_pairs(folder / "pairs.jsonl", count)
    source = {"name": "s", "kind": "file", "path": str(folder / "pairs.jsonl"), "format": "preference", "uses": USES, "weight": 1.0}
    config = DataConfig.model_validate({"validation_fraction": 0.1, "test_fraction": 0.2, "sources": [source]})
    mix(config, folder / str(count), scratch=folder / "aside", seed=0)
    return folder / str(count)


def validated(folder: Path) -> None:
    from rlhf_core.models.tokenizer import build_tokenizer
    from rlhf_core.preparation.validation.measures import measure_table
    from rlhf_core.preparation.validation.validate import validate

    limits = dict.fromkeys(("empty", "identical", "duplicate", "contradictory", "too_long"), 0.0)
    config = ValidationConfig(
        max_dropped_fraction=0.1,
        **{f"max_{name}_fraction": limit for name, limit in limits.items()},
        max_length_bias=0.5,
        min_label_balance=0.0,
        min_pairs=1,
        max_reported_ids=1,
    )
    tables = {use: open_rows(folder / f"{use}.parquet") for use in USES}
    tokenizer = build_tokenizer(WORDS, vocab_size=400)
    findings = validate(tables, lambda use: measure_table(use, tables[use], tokenizer), config, max_length=10**6)
    assert all(finding.passed for finding in findings)


def peak(what: str, folder: Path, count: int) -> int:
    made = prepared(folder, count)
    if what == "validate":
        validated(made)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


if __name__ == "__main__":
    what, folder, pairs, rows_at_once = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    schema.ROWS_AT_ONCE, schema.ROW_GROUP_BYTES = rows_at_once, 2**20
    before = peak(what, folder, pairs)
    print(peak(what, folder, 4 * pairs) - before)
