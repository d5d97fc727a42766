"""The comparison of algorithms: what the table says of made-up curves, and that the figure shows each of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pandas as pd
import pytest

from flows.compare import method_overrides
from rlhf_core.config import ConfigError
from rlhf_core.report.comparison import Run, draw, methods_table, table, trained
from rlhf_core.report.differences import Results, differ_in_seed_only


def run(algorithm: str, seed: int, end: float) -> Run:
    """Twenty steps from 0.4 straight to `end`; held-out prompts are judged at steps 0, 10 and 20, 0.1 higher."""
    judged = [0.4 + (end - 0.4) * step / 20 for step in range(1, 21)]
    curves = pd.DataFrame({"step": range(1, 21), "score_judge": judged, "kl_mean": 1.0 + seed, "eval_judge": float("nan")})
    curves.loc[[9, 19], "eval_judge"] = [judged[9] + 0.1, judged[19] + 0.1]
    return Run(algorithm, seed, 256, curves)


RUNS = [run("ppo", 0, 0.9), run("ppo", 1, 0.8), run("grpo", 0, 0.7)]


def test_the_table_has_means_over_seeds_with_their_interval():
    text = table(RUNS, 0.95)
    rows = {line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:-1]] for line in text.splitlines() if "|" in line}
    # ppo: the last five steps end two steps' rise below the end on average: 0.9 - 0.5 / 20 * 2 = 0.85 and 0.8 - 0.4 / 20 * 2 = 0.76.
    # Their mean 0.805 +- t(1) * 0.0636 / sqrt(2) = 0.805 +- 12.706 * 0.045. Greedy at the end 1.0 and 0.9; KL 1 and 2.
    assert rows["ppo"][0] == "2" and rows["ppo"][2] == "0.805 (0.233 to 1.377)"
    assert rows["ppo"][3].startswith("0.950 (") and rows["ppo"][4].startswith("1.500 (")
    assert rows["grpo"][:3] == ["1", "0.415", "0.670"]  # one seed: no interval
    assert "95% t interval over seeds" in text and "A row of one seed describes that checkpoint" in text and "clear" not in text


def test_the_figure_has_a_panel_for_each_algorithm_and_a_line_for_each_seed(tmp_path: Path):
    draw(RUNS, tmp_path / "curves.svg")
    text = (tmp_path / "curves.svg").read_text()
    ElementTree.fromstring(text)
    assert text.count("<!-- ppo -->") == text.count("<!-- grpo -->") == 1
    # two lines a run and two of the means: 2 * 3 + 2 * 2, of two colours
    assert text.count("stroke: #1f77b4") >= 5 and text.count("stroke: #ff7f0e") >= 5


def evaluation(before: float, after: float) -> dict:
    models = {"sft": {"judge_ok": before, "score_mean": 0.0}, "policy": {"judge_ok": after, "score_mean": 1.0}}
    return {"judge": True, "sampled": models, "greedy": models, "win_rate": {"sampled": {"value": 0.7}}, "kl": {"sampled": 2.0}}


def test_methods_are_compared_seed_by_seed():
    """Seeds differ by far more than methods; within a seed kto is 0.05 better, give or take 0.005."""
    runs = [("dpo", seed, evaluation(0.4 + 0.1 * seed, end)) for seed, end in ((0, 0.6), (1, 0.7), (2, 0.9))]
    runs += [("kto", seed, evaluation(0.4 + 0.1 * seed, end)) for seed, end in ((0, 0.65), (1, 0.755), (2, 0.945))]
    text = methods_table(runs, 0.95)
    difference = next(line for line in text.splitlines() if line.startswith("| kto") and "judge, sampled, policy" in line)
    cells = [cell.strip() for cell in difference.split("|")[1:-1]]
    # 0.05, 0.055, 0.045: mean 0.05 +- t(2) * 0.005 / sqrt(3) = 4.30265 * 0.0028868; t = 17.32, p = 0.00332 of 4 tests
    # (sampled, greedy, and win rate and KL, which are the same)
    assert cells[2:] == ["3", "+0.050", "+0.038 to +0.062", "0.013", "clear"]
    assert not any("SFT" in line for line in text.splitlines() if line.startswith("| kto") and "clear" in line)


def test_two_seeds_that_gain_the_same_show_nothing_of_how_seeds_scatter():
    runs = [("dpo", 0, evaluation(0.4, 0.6)), ("dpo", 1, evaluation(0.4, 0.7))]
    runs += [("kto", 0, evaluation(0.4, 0.65)), ("kto", 1, evaluation(0.4, 0.75))]
    row = next(line for line in methods_table(runs, 0.95).splitlines() if line.startswith("| kto") and "judge, sampled, policy" in line)
    cells = [cell.strip() for cell in row.split("|")[1:-1]]
    assert cells[2:5] == ["2", "+0.050", ""] and cells[6].startswith("not clear; all seeds differ equally")


def runs_of(**seeds_of) -> list[Results]:
    """Name -> (learning rate, seed, share that the judge accepts)."""
    found = []
    for name, (rate, seed, ok) in seeds_of.items():
        params = {"alignment": {"method": "dpo"}, "dpo": {"learning_rate": rate}, "seed": seed, "evaluation": {"confidence": 0.95}}
        found.append(Results(name, params, {}, {"evaluate": evaluation(0.4, ok)}))
    return found


def test_runs_that_differ_in_their_seed_only_are_one_configuration():
    runs = trained(runs_of(a=(1.0, 0, 0.6), b=(2.0, 0, 0.7), c=(1.0, 1, 0.62), d=(2.0, 1, 0.73)))
    assert [(r.configuration, r.seed) for r in runs] == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
    with pytest.raises(ValueError, match="a: expected one run of each seed of a configuration, got a, b"):
        trained(runs_of(a=(1.0, 0, 0.6), b=(1.0, 0, 0.7)))
    with pytest.raises(ValueError, match="c: expected a run with an evaluation"):
        trained([replace(runs_of(c=(1.0, 0, 0.6))[0], metrics={})])


def test_what_was_promoted_when_a_run_began_makes_no_other_configuration():
    one, other = runs_of(a=(1.0, 0, 0.6), b=(1.0, 1, 0.7))
    gates = {"min_accuracy": 0.75, "incumbent": None, "anchor": None, "rolled_back": []}
    promoted = gates | {"incumbent": {"version": "v1.0.0", "md5": "0.dir"}, "anchor": {"version": "v1.0.0", "md5": "0.dir"}}
    pair = [replace(one, params=one.params | {"gate": gates}), replace(other, params=other.params | {"gate": promoted})]
    assert [r.configuration for r in trained(pair)] == ["a", "a"] and differ_in_seed_only(*pair) == (0, 1)
    pair[1] = replace(pair[1], params=pair[1].params | {"gate": promoted | {"min_accuracy": 0.8}})
    assert [r.configuration for r in trained(pair)] == ["a", "b"] and differ_in_seed_only(*pair) is None


def test_a_figure_that_a_run_lacks_is_left_out():
    without = evaluation(0.4, 0.6) | {"win_rate": {"sampled": {"value": None}}}
    text = methods_table([("dpo", 0, evaluation(0.4, 0.6)), ("kto", 0, without)], 0.95)
    assert "win rate" not in text and "judge, sampled, policy" in text


def test_a_method_may_name_its_loss():
    assert method_overrides("dpo:ipo") == {"alignment.method": "dpo", "dpo.loss": "ipo"}
    assert method_overrides("rl") == {"alignment.method": "rl"}
    for wrong in ("ppo", "rl:ipo"):
        with pytest.raises(ConfigError, match=f"--methods {wrong}: expected one of rl, dpo"):
            method_overrides(wrong)
