"""Validation counts held-out and external prompts that training has again, and limits them."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from measured_rows import measured
from strict_limits import strict_limits

from rlhf_core.config import ExternalPairsConfig
from rlhf_core.data.schema import write_rows
from rlhf_core.models.tokenizer import build_tokenizer
from rlhf_core.preparation.validation.validate import Finding, summary, validate

PROMPTS = 60
SPLITS = ("train", "train", "train", "validation", "test", "promotion")


def row(use: str, i: int, split: str, text: str) -> dict:
    shared = {"id": f"{use}{i:02d}", "source": "made", "split": split, "messages": [{"role": "user", "content": text}]}
    texts = {"prompt": {"label": None}, "sft": {"response": "It is."}, "preference": {"chosen": "It is.", "rejected": "It was."}}
    return {**shared, **texts[use], "origin": f"{use}.jsonl line {i + 1}"}


def prompts() -> list[dict]:
    """Different ones: 10 of each split that is held out."""
    return [row("prompt", i, SPLITS[i % 6], f"Which colour has house {i} of the street?") for i in range(PROMPTS)]


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer(["Which colour has house 12 of the street? It is. It was."], vocab_size=300)


def found(folder: Path, uses: dict[str, list[dict]], tokenizer, external=(), **limits: float) -> dict[str, Finding]:
    """Validation's findings about prompts in training, by name."""
    for use, rows in uses.items():
        write_rows(folder, use, rows)
    tables = {use: pq.ParquetFile(folder / f"{use}.parquet") for use in uses}
    findings = validate(
        tables, measured(tables, tokenizer), strict_limits(**limits), max_length=100, needed=(), pairs=False, external=external
    )
    assert json.dumps(summary(findings, tables, max_reported_ids=5))  # figures for the report
    return {f.name: f for f in findings if f.name.startswith(("near_duplicates", "contained_prompts"))}


def test_different_prompts_are_counted_as_none(tmp_path, tokenizer):
    findings = found(tmp_path, {"prompt": prompts()}, tokenizer)
    groups = ("test", "validation", "promotion")
    assert {*findings} == {f"{kind}.{group}" for kind in ("near_duplicates", "contained_prompts") for group in groups}
    assert all(f.passed and f.unexpected == 0 and f.checked == 10 for f in findings.values())


def test_a_repeated_prompt_of_another_use_is_named_with_both_places(tmp_path, tokenizer):
    again = [row("sft", i, "train", f"which colour has house {i} of the stre\u200bet") for i in (4, 10)]
    findings = found(tmp_path, {"sft": again, "prompt": prompts()}, tokenizer)
    assert [name for name, f in findings.items() if not f.passed] == ["near_duplicates.test"]
    near = findings["near_duplicates.test"]
    assert (near.unexpected, near.checked, near.ids, near.limit) == (2, 10, ("prompt:prompt04", "prompt:prompt10"), 0.02)
    message = near.message()
    assert "prompt:prompt04 (prompt.jsonl line 5: 'Which colour has house 4 of the street?'; training has sft.jsonl line 5: " in message
    assert "got 2 of 10 (0.2)" in message and "validation.max_near_duplicate_fraction" in message


def test_the_limit_decides_and_the_count_stays(tmp_path, tokenizer):
    again = [row("sft", 4, "train", "Which colour has house 4 of the street??")]
    near = found(tmp_path, {"sft": again, "prompt": prompts()}, tokenizer, max_near_duplicate_fraction=0.1)["near_duplicates.test"]
    assert near.passed and near.unexpected == 1 and near.observed == 0.1


def test_prefixed_short_prompts_are_limited_apart(tmp_path, tokenizer):
    def findings(count: int) -> dict[str, Finding]:
        again = [row("sft", i, "train", f"Tell me. Which colour has house {i} of the street?") for i in range(4, 6 * count, 6)]
        return found(tmp_path, {"sft": again, "prompt": prompts()}, tokenizer)

    few, many = findings(2), findings(3)
    assert all(f.passed for f in few.values()) and few["contained_prompts.test"].unexpected == 2
    assert [name for name, f in many.items() if not f.passed] == ["contained_prompts.test"]
    contained = many["contained_prompts.test"]
    assert contained.unexpected == 3 and "validation.max_contained_fraction" in contained.message()


def test_external_pairs_of_the_gate_are_compared_with_training(tmp_path, tokenizer):
    texts = ["Which colour has house 1 of the street", "Which colour has house 4 of the street", "Whose is it?"]
    pairs = [{"prompt": text, "chosen": "a", "rejected": "b"} for text in texts]
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench/test-0.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    external = [ExternalPairsConfig(name="bench", path=str(tmp_path / "bench"))]
    findings = found(tmp_path, {"prompt": prompts()}, tokenizer, external)
    near = findings["near_duplicates.gate.external.bench"]
    assert (near.unexpected, near.checked, near.passed) == (1, 3, False)  # the second is a test prompt, which training lacks
    assert near.ids == (f"gate.external.bench:{tmp_path}/bench/test-0.jsonl line 1",)
    assert "training has prompt.jsonl line 2" in near.message()
    with pytest.raises(FileNotFoundError, match=r"nothing\.jsonl: expected a data file"):
        found(tmp_path, {"prompt": prompts()}, tokenizer, [ExternalPairsConfig(name="gone", path=str(tmp_path / "nothing.jsonl"))])


def test_incomplete_rows_are_left_to_other_checks(tmp_path, tokenizer):
    broken = [{**row("sft", i, "train", "a"), "messages": m} for i, m in enumerate([None, [], [None], [{"role": "user", "content": None}]])]
    broken += [{**row("sft", 9, "test", "Which colour has house 1 of the street?"), "id": None}]
    assert all(f.passed for f in found(tmp_path, {"sft": broken, "prompt": prompts()}, tokenizer).values())
