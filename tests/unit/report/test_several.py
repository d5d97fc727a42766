"""Three or more runs on one page: means and bands over seeds, and all answers to a prompt beside each other."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from report_workspace import answer_otherwise, make_workspace

from flows.compare_runs import main
from flows.runs.results import read_side
from rlhf_core.config import apply_overrides
from rlhf_core.report.inputs import Side
from rlhf_core.report.several_page import answers, over_seeds, render_several


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> list[Side]:
    """Two seeds of one configuration, the second with other answers, and a run of another."""
    root = tmp_path_factory.mktemp("several")
    for name, changes in (("ppo-0", {}), ("ppo-1", {"seed": 1}), ("grpo-0", {"rl.algorithm": "grpo"})):
        workspace = make_workspace(root / name, hostile=True)
        apply_overrides(workspace / "params.yaml", changes)
    answer_otherwise(root / "ppo-1")
    return [read_side(root, name) for name in ("ppo-0", "ppo-1", "grpo-0")]


def table(*values: float, first: int = 1) -> pd.DataFrame:
    return pd.DataFrame({"step": range(first, first + len(values)), "loss": values})


def test_the_band_is_the_t_interval_of_the_mean():
    found = over_seeds([table(1.0, 4.0), table(2.0, 4.0), table(3.0, 4.0)], "loss", 0.95)
    # Mean 2, deviation 1, t with two degrees of freedom 4.3027: half a width of 4.3027 / sqrt(3) = 2.4841.
    assert found.loc[0, ["mean", "low", "high"]].tolist() == pytest.approx([2.0, 2 - 2.4841, 2 + 2.4841], abs=1e-4)
    assert found.loc[1, ["mean", "low", "high"]].tolist() == [4.0, 4.0, 4.0] and list(found["step"]) == [1, 2]


def test_two_seeds_have_their_range_and_one_has_none():
    found = over_seeds([table(1.0), table(2.0)], "loss", 0.95)
    assert found.loc[0, ["mean", "low", "high", "seeds"]].tolist() == [1.5, 1.0, 2.0, 2]
    assert np.isnan(over_seeds([table(1.0)], "loss", 0.95).loc[0, ["low", "high"]].to_numpy(dtype=float)).all()


def test_only_steps_of_all_seeds_count():
    """A seed that ended early would shift the mean."""
    found = over_seeds([table(1.0, 2.0, 3.0), table(5.0, 6.0, first=2)], "loss", 0.95)
    assert found[["step", "mean"]].to_numpy().tolist() == [[2, 3.5], [3, 4.5]]


def test_a_card_has_the_answers_of_all_runs_and_hostile_ones_are_text(sides):
    cards = answers(sides)
    assert cards and all([a["model"] for a in card["answers"]] == ["ppo-0", "ppo-1", "grpo-0"] for card in cards)
    assert all(len({a["text"] for a in card["answers"]}) > 1 for card in cards)
    spreads = [card["spread"] or 0.0 for card in cards]
    assert spreads == sorted(spreads, reverse=True)
    text = render_several(sides)
    assert "<script>window.hacked" not in text and "ppo-0: ppo-0, ppo-1" in text and "&#34;grpo&#34;" in text
    figures = json.loads(text.split('id="figures">')[1].split("</script>")[0])["figures"]
    assert "varea" in json.dumps(figures["train_policy_kl_mean"]).lower() and "ppo-0, 2 seeds" in json.dumps(figures)


def test_scores_of_other_rewards_arent_beside_each_other(sides):
    other = sides[2].results
    changed = type(other)(other.name, other.params, {**other.outs, "models/reward": "another"}, other.metrics, other.prompts)
    cards = answers([*sides[:2], type(sides[2])(changed, sides[2].curves, sides[2].samples, {})])
    assert cards and all(answer["score"] is None for card in cards for answer in card["answers"])


def test_compare_writes_the_page(sides, tmp_path: Path, monkeypatch, capsys):
    for name in ("a", "b", "c"):
        apply_overrides(make_workspace(tmp_path / name) / "params.yaml", {"seed": ord(name)})
    monkeypatch.chdir(tmp_path)
    assert main(["a", "b", "c"]) == 0
    assert capsys.readouterr().out.endswith("Page: reports/compare-a-b-c.html\n")
    assert "3 runs" in (tmp_path / "reports/compare-a-b-c.html").read_text()
