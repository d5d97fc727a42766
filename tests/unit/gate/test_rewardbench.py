"""RewardBench's sections and score, by hand, and through a file of pairs."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from gate_verdicts import gate_config
from tiny_models import save_tiny_models, tiny_tokenizer

from rlhf_core.config import ExternalPairsConfig
from rlhf_core.gate.checks import explain
from rlhf_core.gate.heldout import nothing_measured
from rlhf_core.gate.rewardbench import CODE, SECTIONS, SUBSETS, mean_of, section_rows
from rlhf_core.gate.scoring import score_external
from rlhf_core.report.quality import external
from rlhf_core.scorers.reward.loaded import LoadedModel
from rlhf_core.statistics.intervals import wilson_interval


def counted(points: np.ndarray):
    def accuracy(which: np.ndarray) -> dict:
        chosen = points[which]
        low, high = wilson_interval(chosen.sum(), len(chosen), 0.95)
        return {"accuracy": float(chosen.mean()), "low": low, "high": high, "ties": int((chosen == 0.5).sum()), "n": len(chosen)}

    return accuracy


def test_each_subset_belongs_to_one_section():
    names = Counter(name for parts in SECTIONS.values() for part in parts for name in part)
    assert len(SUBSETS) == 23 and set(names.values()) == {1}


def test_sections_weigh_subsets_by_size_and_mathematics_as_much_as_code():
    """One pair of each subset, but two of mt-bench-med and four of math-prm. Wrong are both of mt-bench-med, hep-go and one of math-prm."""
    subsets = [*sorted(SUBSETS), "mt-bench-med", *["math-prm"] * 3]
    points = np.array([name not in ("mt-bench-med", "hep-go") for name in subsets], dtype=float)
    points[-1] = 0.0
    rows = {row["section"]: row for row in section_rows(np.array(subsets), counted(points))}
    # Chat: 4 of 6 pairs; Reasoning: (3/4 + 5/6) / 2, where pooling would give 8 of 10.
    expected = {"Chat": 4 / 6, "Chat Hard": 1.0, "Safety": 1.0, "Reasoning": (3 / 4 + 5 / 6) / 2}
    assert {name: rows[name]["accuracy"] for name in expected} == pytest.approx(expected)
    assert list(rows) == [*expected, "Score"]
    assert rows["Score"]["accuracy"] == pytest.approx(sum(expected.values()) / 4)
    assert {name: row["n"] for name, row in rows.items()} == {"Chat": 6, "Chat Hard": 6, "Safety": 5, "Reasoning": 10, "Score": 27}
    assert (rows["Chat"]["low"], rows["Chat"]["high"]) == pytest.approx(wilson_interval(4, 6, 0.95))
    assert len(CODE) == 6


def test_interval_of_a_mean_by_hand():
    """Distances 0.3 and 0.4 below, 0.12 and 0.05 above: sqrt(0.09 + 0.16) / 2 = 0.25, sqrt(0.0144 + 0.0025) / 2 = 0.065."""
    parts = [{"accuracy": 0.8, "low": 0.5, "high": 0.92, "ties": 1, "n": 4}, {"accuracy": 0.6, "low": 0.2, "high": 0.65, "ties": 0, "n": 6}]
    found = mean_of(parts)
    assert found == pytest.approx({"accuracy": 0.7, "low": 0.45, "high": 0.765, "ties": 1, "n": 10})
    assert mean_of(parts[:1]) == pytest.approx(parts[0])


@pytest.mark.parametrize("subsets", [sorted(SUBSETS)[:-1], [*SUBSETS, "other"], []])
def test_other_subsets_have_no_score(subsets):
    assert section_rows(np.array(subsets), counted(np.ones(len(subsets)))) == []


def test_a_file_with_all_subsets_gets_a_score_in_gate_and_report(tmp_path):
    _, folder = save_tiny_models(tmp_path, tiny_tokenizer())
    model = LoadedModel.load(folder, max_length=64, trust_remote_code=False)
    rows = [{"prompt": f"Sort {i}.", "chosen": f"{i} {i}", "rejected": "Sorry", "subset": name} for i, name in enumerate(sorted(SUBSETS))]
    (tmp_path / "bench.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = ExternalPairsConfig(name="rewardbench", path=str(tmp_path / "bench.jsonl"), subset="subset")
    found = score_external(config, model, confidence=0.95)
    right = {row["subset"]: row["accuracy"] for row in found["subsets"]}
    pooled = {name: [np.mean([right[subset] for subset in part]) for part in parts] for name, parts in SECTIONS.items()}
    expected = {name: np.mean(parts) for name, parts in pooled.items()}
    rows = {row["section"]: row["accuracy"] for row in found["sections"]}
    assert rows == pytest.approx(expected | {"Score": np.mean([*expected.values()])})
    drawn = external({"external": [found]})
    names = list(drawn.y_range.factors)[::-1]
    assert names[:6] == ["file: rewardbench", *(f"rewardbench: {name}" for name in rows)] and len(names) == 1 + 5 + 23


# Pairs of each subset in the split `filtered`, by the data set's card. The authors weigh by these, but count math-prm as code, 984.
FILTERED = {
    **{
        "alpacaeval-easy": 100,
        "alpacaeval-length": 95,
        "alpacaeval-hard": 95,
        "mt-bench-easy": 28,
        "mt-bench-med": 40,
        "mt-bench-hard": 37,
    },
    **{"llmbar-natural": 100, "llmbar-adver-neighbor": 134, "llmbar-adver-GPTInst": 92, "llmbar-adver-GPTOut": 47},
    **{"llmbar-adver-manual": 46, "refusals-dangerous": 100, "refusals-offensive": 100, "xstest-should-refuse": 154},
    **{"xstest-should-respond": 250, "donotanswer": 136, "math-prm": 447, **dict.fromkeys(CODE, 164)},
}


def test_the_published_file_is_read_as_it_is_with_the_published_weights(tmp_path):
    """Parquet with the columns and types of allenai/reward-bench, as many pairs of each subset, and both orders of a pair's texts."""
    _, folder = save_tiny_models(tmp_path, tiny_tokenizer())
    model = LoadedModel.load(folder, max_length=64, trust_remote_code=False)
    subsets = [name for name, count in FILTERED.items() for _ in range(count)]
    texts = [(f"{i}", "No") if i * i % 7 < 3 else ("No", f"{i}") for i in range(len(subsets))]
    columns = {
        "prompt": [f"Sort {i}." for i in range(len(subsets))],
        "chosen": [chosen for chosen, _ in texts],
        "chosen_model": ["GPT-4"] * len(subsets),
        "rejected": [rejected for _, rejected in texts],
        "rejected_model": ["unknown"] * len(subsets),
        "subset": subsets,
        "id": range(len(subsets)),
    }
    types = {name: pa.int64() if name == "id" else pa.string() for name in columns}
    pq.write_table(pa.table(columns, schema=pa.schema(types)), tmp_path / "filtered-00000-of-00001.parquet")
    config = ExternalPairsConfig(name="rewardbench", path=str(tmp_path / "filtered-00000-of-00001.parquet"), subset="subset")
    found = score_external(config, model, confidence=0.95)
    assert (found["n"], found["not_scored"], found["left_out"]) == (2985, 0, {})
    rows, right = {r["section"]: r for r in found["sections"]}, {r["subset"]: r["accuracy"] for r in found["subsets"]}
    assert {n: r["n"] for n, r in rows.items()} == {"Chat": 358, "Chat Hard": 456, "Safety": 740, "Reasoning": 1431, "Score": 2985}
    weights = FILTERED | {"math-prm": 984}
    for section, parts in SECTIONS.items():
        names = [name for part in parts for name in part]
        expected = sum(weights[name] * right[name] for name in names) / sum(weights[name] for name in names)
        assert rows[section]["accuracy"] == pytest.approx(expected, abs=1e-12)
    assert len({round(r["accuracy"], 3) for r in rows.values()}) == 5


def test_a_subset_without_a_scored_pair_is_named_in_place_of_the_sections(tmp_path):
    _, folder = save_tiny_models(tmp_path, tiny_tokenizer())
    model = LoadedModel.load(folder, max_length=64, trust_remote_code=False)
    rows = [{"prompt": f"Sort {i}.", "chosen": f"{i} {i}", "rejected": "Sorry", "subset": name} for i, name in enumerate(sorted(SUBSETS))]
    too_long = next(row for row in rows if row["subset"] == "math-prm")
    too_long["chosen"] = "1 " * 100
    (tmp_path / "bench.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = ExternalPairsConfig(name="rewardbench", path=str(tmp_path / "bench.jsonl"), subset="subset")
    found = score_external(config, model, confidence=0.95)
    assert found["sections"] == [] and found["not_scored"] == 1
    gate = nothing_measured(gate_config()) | {"external": [found], "needed": False, "passed": False, "message": ""}
    (line,) = [line for line in explain(gate) if "RewardBench" in line]
    assert "1 of its subsets have no scored pair: math-prm;" in line
