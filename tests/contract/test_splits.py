"""Who reads which split of the prepared data: the promotion split is for the promotion of rounds alone."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
READERS = [p for folder in ("tasks", "flows", "rlhf_core") for p in sorted((ROOT / folder).rglob("*.py"))]
# What writes and checks all rows, whatever their split.
WHOLE_FILES = {
    *("tasks/validate_data.py", "tasks/rounds/validate_round.py", "rlhf_core/data/schema.py"),
    *("rlhf_core/preparation/filters.py", "rlhf_core/preparation/prepare.py", "rlhf_core/preparation/sources.py"),
}


def calls_of(path: Path, function: str) -> list[ast.Call]:
    tree = ast.parse(path.read_text())
    return [n for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name) and n.func.id == function]


def strings_of(path: Path) -> set[str]:
    return {n.value for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Constant) and isinstance(n.value, str)}


def test_every_reader_of_rows_says_which_split():
    """Otherwise it gets the rows of all of them."""
    calls = {str(p.relative_to(ROOT)): calls_of(p, "read_rows") for p in READERS}
    readers = {path: found for path, found in calls.items() if found}
    assert {"tasks/train_sft.py", "tasks/train_reward.py", "tasks/rounds/evaluate_round.py", "rlhf_core/trainers/rl/data.py"} <= set(
        readers
    )
    assert [path for path, found in readers.items() if any(len(call.args) < 3 for call in found)] == []
    whole = {str(p.relative_to(ROOT)) for p in READERS if calls_of(p, "open_rows")}
    assert whole <= WHOLE_FILES


def test_nothing_but_rounds_reads_the_promotion_split():
    naming = {str(p.relative_to(ROOT)) for p in READERS if "promotion" in strings_of(p) and calls_of(p, "read_rows")}
    assert naming == {"tasks/rounds/sample_round.py", "tasks/rounds/evaluate_round.py", "flows/rounds/series.py"}


def test_a_round_samples_from_training_prompts_and_only_counts_those_of_the_promotion_split():
    tree = ast.parse((ROOT / "tasks/rounds/sample_round.py").read_text())
    values = {ast.unparse(n.targets[0]): ast.unparse(n.value) for n in ast.walk(tree) if isinstance(n, ast.Assign)}
    assert values["rows"] == "rows_of_round(read_rows(PREPARED, 'prompt', 'train'), entry, number, params)"
    assert values["promotion"] == "read_rows(PREPARED, 'prompt', 'promotion')"
    assert len(calls_of(ROOT / "tasks/rounds/sample_round.py", "read_rows")) == 2
    users = {
        name: {ast.unparse(c.func) for c in ast.walk(tree) if isinstance(c, ast.Call) and name in map(ast.unparse, c.args)}
        for name in ("rows", "promotion")
    }
    assert "sample_groups" in users["rows"] and users["promotion"] == {"check_promotion_rows", "promotion_prompts"}
