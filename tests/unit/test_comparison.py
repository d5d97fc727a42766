"""The comparison of algorithms: what the table says of made-up curves, and that the figure shows each of them."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pandas as pd
import pytest

from flows.compare import method_overrides
from rlhf_core.config import ConfigError
from rlhf_core.report.comparison import Run, draw, methods_table, table


def run(algorithm: str, seed: int, end: float) -> Run:
    """Twenty steps from 0.4 straight to `end`; held-out prompts are judged at steps 0, 10 and 20, 0.1 higher."""
    judged = [0.4 + (end - 0.4) * step / 20 for step in range(1, 21)]
    curves = pd.DataFrame({"step": range(1, 21), "score_judge": judged, "kl_mean": 1.0 + seed, "eval_judge": float("nan")})
    curves.loc[[9, 19], "eval_judge"] = [judged[9] + 0.1, judged[19] + 0.1]
    return Run(algorithm, seed, 256, curves)


RUNS = [run("ppo", 0, 0.9), run("ppo", 1, 0.8), run("grpo", 0, 0.7)]


def test_the_table_has_means_over_seeds_and_the_extremes():
    lines = table(RUNS).splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:]] == ["ppo", "grpo"]
    # ppo: the last five steps end two steps' rise below the end on average: 0.9 - 0.5 / 20 * 2 = 0.85 and 0.8 - 0.4 / 20 * 2 = 0.76.
    # Sampled at first 0.4 + 0.025 and 0.4 + 0.02; greedy at the end 1.0 and 0.9; KL 1 and 2.
    assert [float(x) for x in lines[2].split("|")[2:-1]] == pytest.approx([2, 0.4225, 0.805, 0.76, 0.85, 0.95, 0.9, 1.0, 1.5], abs=6e-4)


def test_the_figure_has_a_panel_for_each_algorithm_and_a_line_for_each_seed(tmp_path: Path):
    draw(RUNS, tmp_path / "curves.svg")
    text = (tmp_path / "curves.svg").read_text()
    ElementTree.fromstring(text)
    assert text.count("<!-- ppo -->") == text.count("<!-- grpo -->") == 1
    # two lines a run and two of the means: 2 * 3 + 2 * 2, of two colours
    assert text.count("stroke: #1f77b4") >= 5 and text.count("stroke: #ff7f0e") >= 5


def test_methods_are_compared_by_their_evaluations():
    def evaluation(before: float, after: float) -> dict:
        models = {"sft": {"judge_ok": before, "score_mean": 0.0}, "policy": {"judge_ok": after, "score_mean": 1.0}}
        return {"judge": True, "sampled": models, "greedy": models, "win_rate": {"sampled": {"value": 0.7}}, "kl": {"sampled": 2.0}}

    lines = methods_table([("dpo", evaluation(0.4, 0.6)), ("dpo", evaluation(0.5, 0.8)), ("kto", evaluation(0.4, 0.5))]).splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:]] == ["dpo", "kto"]
    assert [float(x) for x in lines[2].split("|")[2:-1]] == pytest.approx([2, *[0.45, 0.7, 0.6, 0.8] * 2, 0.7, 2.0])


def test_a_method_may_name_its_loss():
    assert method_overrides("dpo:ipo") == {"alignment.method": "dpo", "dpo.loss": "ipo"}
    assert method_overrides("rl") == {"alignment.method": "rl"}
    for wrong in ("ppo", "rl:ipo"):
        with pytest.raises(ConfigError, match=f"--methods {wrong}: expected one of rl, dpo"):
            method_overrides(wrong)
