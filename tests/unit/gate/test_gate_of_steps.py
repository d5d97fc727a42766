"""The gate of a process reward model: figures by hand, verdicts, and the same verdict from stored scores."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gate_verdicts import gate_config
from tiny_models import tiny_params

from rlhf_core.data.heldout import as_step_table
from rlhf_core.data.schema import write_rows
from rlhf_core.gate.again import accuracy_again, differences, judged_again
from rlhf_core.gate.steps import (
    HeldoutSteps,
    first_error,
    first_error_points,
    measure_disagreement,
    measure_steps,
    read_steps,
    step_accuracies,
)
from rlhf_core.gate.verdict import with_verdict
from rlhf_core.statistics.intervals import wilson_interval

RIGHT, LATE, MISSED, EXACT = ([1, 1], [1.0, 2.0]), ([1, -1, 1], [2.0, 1.0, -1.0]), ([1, 1], [1.0, -1.0]), ([1, -1, -1], [0.5, -2.0, 3.0])


def heldout(*responses: tuple[list[int], list[float]], prompts: list[str] | None = None) -> HeldoutSteps:
    labels, scores = ([np.array(of, dtype=float) for of in column] for column in zip(*responses, strict=True))
    n = len(responses)
    names = np.array(prompts or [str(i) for i in range(n)])
    rows = [{"messages": [], "response": ""}] * n
    return HeldoutSteps(labels, scores, [np.abs(s) / 10 for s in scores], names, np.array(["made"] * n), rows)


def judged(test: HeldoutSteps, **limits) -> dict:
    config = gate_config(**{"min_pairs": 4, **limits})
    gate = measure_steps(test, np.array([1.0, -0.5, 2.0]), config) | {"probes": None, "look": None, "llm_judges": []}
    return with_verdict(gate, config, exact_scores=True)


def check(gate: dict, name: str) -> dict:
    return next(c for c in gate["checks"] if c["name"] == name)


class TestFigures:
    def test_the_first_wrong_step_must_be_found_exactly(self):
        test = heldout(RIGHT, LATE, MISSED, EXACT)
        assert test.first_wrong.tolist() == [-1, 1, -1, 1]
        assert test.points.tolist() == [1, 0, 0, 1]

    def test_a_neutral_step_is_right_and_a_score_of_zero_is_no_error(self):
        assert first_error_points([np.array([0, 1])], [np.array([0.0, 1.0])]).tolist() == [1]

    def test_f1_is_the_harmonic_mean_of_both_accuracies(self):
        # 3 of 4 correct responses and 1 of 2 erroneous ones: 2 * 0.75 * 0.5 / 1.25 = 0.6
        found = first_error(np.array([1, 1, 1, 0, 1, 0.0]), np.array([-1, -1, -1, -1, 0, 2]), np.arange(6), 0.9)
        assert found["f1"] == pytest.approx(0.6) and found["n"] == 6
        assert (found["correct"]["n"], found["erroneous"]["n"]) == (4, 2)
        low = [wilson_interval(3, 4, 0.95)[0], wilson_interval(1, 2, 0.95)[0]]  # each end at half the level
        assert found["low"] == pytest.approx(2 * low[0] * low[1] / sum(low))
        assert found["correct"]["low"] == pytest.approx(wilson_interval(3, 4, 0.9)[0])

    def test_a_model_that_calls_every_step_right_has_an_f1_of_zero(self):
        gate = judged(heldout(*[([1, 1], [3.0, 3.0])] * 6, *[([1, -1], [3.0, 3.0])] * 6))
        assert gate["first_error"]["f1"] == 0.0 and gate["accuracy"] == 0.5 and not gate["passed"]
        assert gate["steps"]["all"]["accuracy"] == 0.75

    def test_steps_by_hand(self):
        found = step_accuracies(heldout(RIGHT, LATE, MISSED, EXACT), 0.95)
        # right: 2 of 2, 1 of 2 (2.0 yes, -1.0 no), 1 of 2, 1 of 1; wrong: 0 of 1, then -2.0 yes and 3.0 no
        assert [(found[kind]["accuracy"], found[kind]["n"]) for kind in ("all", "right", "wrong")] == [
            (pytest.approx(6 / 10), 10), (pytest.approx(5 / 7), 7), (pytest.approx(1 / 3), 3)
        ]  # fmt: skip

    def test_disagreement_is_shown_for_right_and_wrong_steps(self):
        found = measure_disagreement(heldout(RIGHT, MISSED))  # 0.1, 0.2, 0.1 on the right side and 0.1 on the other
        assert found == pytest.approx({"disagreement": 0.125, "disagreement_right": 0.4 / 3, "disagreement_wrong": 0.1})

    def test_responses_to_one_prompt_count_as_one_cluster(self):
        alone, together = (judged(heldout(RIGHT, RIGHT, EXACT, EXACT, prompts=p)) for p in (None, ["a", "a", "b", "b"]))
        assert together["first_error"]["low"] < alone["first_error"]["low"]


class TestVerdicts:
    def test_a_model_that_finds_first_errors_passes(self):
        gate = judged(heldout(*[RIGHT] * 30, *[EXACT] * 30), min_first_error_f1=0.8)
        assert gate["passed"] and check(gate, "first_error_f1")["passed"] is True
        assert "held-out F1 of the first wrong step 1.0000 on 60 responses" in gate["message"]

    def test_a_model_that_does_not_is_rejected_with_its_figures(self):
        gate = judged(heldout(*[RIGHT] * 30, *[LATE] * 30))
        assert not gate["passed"]
        assert "expected the lower end of the interval to reach gate.min_first_error_f1=0.4, got 0.0000" in gate["message"]
        assert "0.0000 of 30 erroneous ones" in gate["message"]

    def test_without_wrong_steps_nothing_passes(self):
        gate = judged(heldout(*[RIGHT] * 30))
        assert not gate["passed"] and "add held-out responses without and with wrong steps" in gate["message"]

    def test_too_few_responses_are_rejected(self):
        gate = judged(heldout(RIGHT, EXACT), min_pairs=4)
        assert not gate["passed"] and "at least gate.min_pairs=4 test responses" in gate["message"]
        assert check(gate, "first_error_f1")["passed"] is None


SOURCE = {"name": "steps", "kind": "file", "path": "x.jsonl", "format": "stepwise", "uses": ["stepwise", "prompt"]}


class TestStoredScores:
    def rows(self) -> tuple[list[dict], list[tuple]]:
        rows, table = [], []
        for i in range(120):
            labels, scores = (EXACT, RIGHT, LATE)[i % 3]
            split = "test" if i % 4 else "validation"
            rows.append({"id": f"r{i}", "source": "made", "split": split, "messages": [{"role": "user", "content": f"{i}?"}],
                         "response": "x", "labels": labels})  # fmt: skip
            table.append((f"r{i}", "made", split, str(i), labels, scores, [0.0] * len(scores)))
        return rows, table

    def test_the_verdict_can_be_computed_again_from_the_table(self, tmp_path: Path):
        rows, table = self.rows()
        write_rows(tmp_path / "prepared", "stepwise", rows)
        as_step_table(table).to_parquet(tmp_path / "heldout.parquet", index=False)
        test, validation = (read_steps(tmp_path / "heldout.parquet", tmp_path / "prepared", s) for s in ("test", "validation"))
        params = tiny_params(**{"data.sources": [SOURCE], "reward.step_separator": "\n", "gate.min_pairs": 20})
        gate = measure_steps(test, validation.step_margins, params.gate)
        look = {"number": 1, "split": "0" * 64, "model": "m", "earlier": [], "level": 0.025}
        gate |= {"look": look, "ensemble": {"members": 1, **measure_disagreement(test)}}
        recorded = with_verdict(gate, params.gate, exact_scores=True) | {"override": None}
        where = {"heldout": tmp_path / "heldout.parquet", "prepared": tmp_path / "prepared", "model": "m"}
        again = judged_again(recorded, params, **where)
        assert {key: again[key] for key in ("passed", "message", "first_error", "steps", "checks")} == {
            key: recorded[key] for key in ("passed", "message", "first_error", "steps", "checks")
        }
        assert accuracy_again(tmp_path / "heldout.parquet") == recorded["accuracy"] == test.points.mean()
        forged = recorded | {"first_error": recorded["first_error"] | {"f1": 0.99}}
        assert [key for key, *_ in differences(forged["first_error"], again["first_error"])] == ["f1"]

    def test_scores_that_are_not_finite_or_of_other_labels_are_refused(self, tmp_path: Path):
        rows, table = self.rows()
        write_rows(tmp_path / "prepared", "stepwise", rows)
        for changed, message in (
            ((*table[1][:5], [float("nan")] * 2, [0.0] * 2), "expected finite scores"),
            ((*table[1][:4], [1, -1], *table[1][5:]), "expected responses of"),
        ):
            as_step_table([table[0], changed, *table[2:]]).to_parquet(tmp_path / "heldout.parquet", index=False)
            with pytest.raises(ValueError, match=message):
                read_steps(tmp_path / "heldout.parquet", tmp_path / "prepared", "test")
