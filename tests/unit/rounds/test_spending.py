"""The ledger of comparisons: what a series may spend after all others that improve the same model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from clerk_params import CLERK_PARAMS

from rlhf_core.config import ConfigError, PromotionConfig, load_params
from rlhf_core.rounds.pins import BudgetPin
from rlhf_core.rounds.spending import LEDGER, begin_comparison, improved, record_rounds

ROOT = Path(__file__).parents[3]
SFT, OTHER = "sft of a", "sft of b"


def config(rounds: int = 1, error_budget: float = 0.05) -> PromotionConfig:
    return PromotionConfig(metric="win_rate", prompts=1000, error_budget=error_budget, rounds=rounds, min_advantage=0.0)


def begin(root: Path, series: str, number: int = 1, *, outcome: str | None = "kept", improves: str = SFT, **settings) -> BudgetPin:
    """The budget of a comparison, which then ends so."""
    budget, _ = begin_comparison(series, number, improves, config(**settings), root)
    record_rounds(series, improves, [(number, budget, outcome)], root)
    return budget


def test_what_a_series_improves_is_its_start_and_base_model():
    params = load_params(CLERK_PARAMS)
    assert improved(params) == "sft of the built-in model"
    other = params.model_copy(update={"iterative": params.iterative.model_copy(update={"start": "registry"})})
    assert improved(other) == "registry of the built-in model"


def test_thirty_new_series_share_one_budget(tmp_path):
    """Each alone would have a level of 0.04."""
    budgets = [begin(tmp_path, f"night-{k}") for k in range(30)]
    assert [b.comparison for b in budgets] == list(range(1, 31))
    assert [b.level for b in budgets[:3]] == pytest.approx([0.04, 0.005, 0.01 / 6])  # 0.05 * 0.2 / (2 * 1), 0.05 * 0.2 / (3 * 2)
    assert sum(b.level for b in budgets) == pytest.approx(0.05 - 0.01 / 30) and budgets[1].spent == pytest.approx(0.04)
    assert begin(tmp_path, "of another model", improves=OTHER).level == pytest.approx(0.04)


def test_a_new_series_is_told_what_was_spent_before(tmp_path):
    begin(tmp_path, "first")
    begin(tmp_path, "second", outcome="accepted")
    _, before = begin_comparison("third", 1, SFT, config(), tmp_path)
    assert before.series == ("first", "second") and before.spent == pytest.approx(0.04)
    assert begin_comparison("third", 2, SFT, config(), tmp_path)[1] == before  # its own aren't among them


def test_levels_are_those_of_one_series_with_refused_rounds_and_acceptances(tmp_path):
    even = 0.04 / 30
    outcomes = ["kept", "none", "accepted", "accepted", "kept", None, "kept"]
    budgets = [begin(tmp_path, f"series-{k % 3}", k + 1, outcome=outcome, rounds=30) for k, outcome in enumerate(outcomes)]
    assert [b.comparison for b in budgets] == [1, 2, 2, 3, 4, 5, 6]
    assert [b.level for b in budgets] == pytest.approx([even, even, even, 2 * even, 3 * even, even, even])
    assert [b.spent for b in budgets] == pytest.approx([0, even, even, even, even, 4 * even, 5 * even])  # an open one counts as spent


def test_settings_that_differ_spend_no_more_than_the_budget_and_then_nothing(tmp_path):
    levels = [begin(tmp_path, "a", k, rounds=1).level for k in (1, 2)]
    levels += [begin(tmp_path, "b", k, rounds=5).level for k in (1, 2)]
    # 0.04 and 0.005 of 0.05 are spent; 0.16 of 0.05 would be more than is left, so 0.8 of 0.005, and then of 0.001.
    assert levels[2:] == pytest.approx([0.004, 0.0008])
    levels += [begin(tmp_path, "b", k, rounds=5).level for k in range(3, 20)]
    assert min(levels) > 0 and sum(levels) < 0.05
    expected = r"expected more than the 0\.05 that comparisons of sft of a have spent \(series a, b\), got 0\.02; raise it knowingly"
    with pytest.raises(ConfigError, match=expected):
        begin(tmp_path, "c", error_budget=0.02)
    assert begin(tmp_path, "c", rounds=30, error_budget=0.1).level == pytest.approx(0.08 / 30)


def test_a_clone_takes_its_series_from_the_pins_once(tmp_path):
    pins = [(1, BudgetPin(comparison=1, level=0.04, spent=0.0), "kept"), (2, BudgetPin(comparison=2, level=0.005, spent=0.04), "none")]
    for _ in range(2):
        record_rounds("cloned", SFT, pins, tmp_path)
    assert len((tmp_path / LEDGER.name).read_text().splitlines()) == 4
    found = begin(tmp_path, "cloned", 3)
    assert (found.comparison, found.spent) == (2, 0.04) and found.level == pytest.approx(0.005)


def test_a_name_that_is_used_again_is_another_series(tmp_path):
    begin(tmp_path, "a", outcome="accepted")
    assert begin(tmp_path, "a", outcome="kept").comparison == 2
    outcomes = [line.get("outcome") for line in map(json.loads, (tmp_path / LEDGER.name).read_text().splitlines())]
    assert outcomes == [None, "accepted", None, "kept"]


def test_a_changed_pin_or_outcome_is_refused(tmp_path):
    budget = begin(tmp_path, "a")
    with pytest.raises(ConfigError, match=r"round 1: expected the outcome kept, as when it ended \(in .*jsonl\), got accepted; .*restore"):
        record_rounds("a", SFT, [(1, budget, "accepted")], tmp_path)
    with pytest.raises(ConfigError, match=r"round 1: expected the budget .* level 0\.04 .* got comparison 1 at level 0\.045"):
        record_rounds("a", SFT, [(1, budget.model_copy(update={"level": 0.045}), "kept")], tmp_path)


def test_a_line_of_another_form_is_refused(tmp_path):
    (tmp_path / LEDGER.name).write_text('{"improves": "a", "series": "b", "round": 1, "at": "c"}\n')
    with pytest.raises(ConfigError, match=r"comparisons\.jsonl, line 1: expected one that the flow iterative-dpo wrote"):
        begin(tmp_path, "a")
