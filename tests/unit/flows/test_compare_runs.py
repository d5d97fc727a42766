"""Two runs side by side: what differs, how sure, and what a run that isn't there is answered."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from report_workspace import HOSTILE, answer_otherwise, edit_metrics, make_workspace, prompts
from scipy.stats import ttest_1samp

from flows.compare_runs import main, summary
from rlhf_core.config import apply_overrides, read_yaml
from rlhf_core.curves import MetricsLog
from rlhf_core.gate.looks import look_level
from rlhf_core.report.differences import (
    Difference,
    Results,
    figures_that_count,
    headline,
    judged_together,
    outs_that_differ,
    params_that_differ,
    read_as,
)
from rlhf_core.report.inputs import Side, read_times, summarize
from rlhf_core.statistics.intervals import mean_interval, paired_interval, sign_test, wilson_interval

PARAMS = {
    "alignment": {"method": "rl"},
    "evaluation": {"confidence": 0.95},
    "rl": {"steps": 60, "reward": {"scorers": [{"name": "reward_model"}]}},
    "dpo": {"beta": 0.3},
    "report": {"title": "one"},
}


def results(*, ok: float = 0.5, score: float = 1.0, reward_model: str = "a", judge: bool = True, name: str = "one") -> Results:
    model = {"score_mean": score, "score_low": score - 0.3, "score_high": score + 0.4, "length_mean": 9.0, "truncated_fraction": 0.0}
    model |= {"judge_ok": ok, "judge_n": 400} if judge else {}
    win = {"value": 0.7, "low": 0.6, "high": 0.8}
    evaluation = {mode: {"policy": model} for mode in ("greedy", "sampled")} | {"kl": {"greedy": 1.0, "sampled": 1.0}}
    metrics = {"train_sft": {"heldout_loss": 0.5}, "evaluate": evaluation | {"win_rate": {"greedy": win, "sampled": win}}}
    return Results(name, PARAMS, {"models/reward": reward_model}, metrics)


def row(rows, label):
    return next(r for r in rows if r.label == label)


def test_a_difference_has_the_interval_of_both_runs_intervals():
    rows = figures_that_count(results(score=1.0), results(score=2.0))
    score = row(rows, "Score, greedy")
    # 2 - 1 = 1; low: 1 - sqrt((2 - 1.7)^2 + (1.4 - 1)^2) = 1 - 0.5; high: 1 + sqrt((2.4 - 2)^2 + (1 - 0.7)^2) = 1 + 0.5.
    assert (score.change, score.low, score.high) == (1.0, pytest.approx(0.5), pytest.approx(1.5)) and score.tone == "good"
    assert score.shown == ("1.00", "2.00", "+1.00", "+0.50 to +1.50", "")
    assert row(figures_that_count(results(score=2.0), results(score=1.0)), "Score, greedy").tone == "bad"


def test_shares_are_held_against_each_other_by_newcombes_interval():
    judged = row(figures_that_count(results(ok=0.25), results(ok=0.25)), "Judge accepts, sampled")
    # Wilson of 100 of 400: 0.21008 to 0.29468; so -+ sqrt((0.25 - 0.21008)^2 + (0.29468 - 0.25)^2) = 0.05991.
    assert judged.low == pytest.approx(-0.05991, abs=1e-5) and judged.high == pytest.approx(0.05991, abs=1e-5) and judged.tone == ""


def test_a_reward_models_accuracy_has_the_pages_interval_whatever_its_look_was():
    """400 of 500 against 425 of 500; the second was look 10, whose own interval is of 99.94%."""

    def judged_at(accuracy: float, confidence: float) -> Results:
        low, high = wilson_interval(accuracy * 500, 500, confidence)
        gate = {"accuracy": accuracy, "low": low, "high": high, "confidence": confidence, "n_effective": 500.0}
        return replace(results(), metrics=results().metrics | {"gate_reward": gate})

    found, alike = (
        row(figures_that_count(judged_at(0.8, 0.95), judged_at(0.85, confidence)), "Reward model: accuracy on test pairs")
        for confidence in (1 - 2 * look_level(0.95, 10), 0.95)
    )
    # Wilson: 0.762711 to 0.832715 and 0.816039 to 0.878624; 0.05 - sqrt(0.033961^2 + 0.032715^2), 0.05 + sqrt(0.028624^2 + 0.037289^2)
    assert (found.low, found.high) == pytest.approx((0.002845, 0.097009), abs=1e-5) and found == alike
    ends_alone = replace(results(), metrics=results().metrics | {"gate_reward": {"accuracy": 0.8, "low": 0.762711, "high": 0.832715}})
    old = row(figures_that_count(ends_alone, judged_at(0.85, 0.95)), "Reward model: accuracy on test pairs")
    assert old.low == pytest.approx(found.low, abs=1e-5)


def by_prompt(**columns) -> str:
    """plots/evaluation.csv; what isn't given is the same for all prompts."""
    n = len(next(iter(columns.values())))
    table = {"id": [f"{i:016d}" for i in range(n)]}
    for mode in ("greedy", "sampled"):
        table |= {f"{mode}_judge_ok": [1] * n, f"{mode}_score": [1.0] * n, f"{mode}_points": [0.5] * n}
    return pd.DataFrame(table | columns).to_csv(index=False)


def test_runs_that_answered_the_same_prompts_are_compared_prompt_by_prompt():
    """A gain of 3 points: 14 of 400 prompts gained, 2 lost. As independent shares of 0.85 and 0.88 nobody could tell."""
    before = [1] * 340 + [0] * 60
    after = [1] * 338 + [0] * 2 + [1] * 14 + [0] * 46
    pair = [replace(results(ok=sum(ok) / 400), prompts=by_prompt(greedy_judge_ok=ok)) for ok in (before, after)]
    judged = row(figures_that_count(*pair), "Judge accepts, greedy")
    assert judged.change == pytest.approx(0.03) and judged.tone == "good" and judged.prompts == 400
    assert (judged.low, judged.high) == paired_interval(14, 2, 400, 0.95) and judged.p_value == sign_test(14, 2)
    alone = row(figures_that_count(*(replace(r, prompts=None) for r in pair)), "Judge accepts, greedy")
    assert alone.tone == "" and alone.prompts is None and alone.high - alone.low > 2 * (judged.high - judged.low)
    others = replace(pair[1], prompts=by_prompt(greedy_judge_ok=after).replace("0000000000000007", "another"))
    assert row(figures_that_count(pair[0], others), "Judge accepts, greedy").prompts is None
    text = " ".join(read_as(*pair, figures_that_count(*pair)))
    assert "on the 400 prompts that both runs answered" in text and "another seed" in text


def test_win_rates_and_scores_are_paired_means():
    rng = np.random.default_rng(0)
    points, scores = rng.choice([0.0, 0.5, 1.0], 400), rng.standard_normal(400)
    other_points, other_scores = np.where(rng.random(400) < 0.1, 1.0, points), scores + 0.05 + 0.1 * rng.standard_normal(400)
    one = replace(results(), prompts=by_prompt(greedy_points=points, greedy_score=scores))
    other = replace(results(), prompts=by_prompt(greedy_points=other_points, greedy_score=other_scores))
    rows = figures_that_count(one, other)
    for label, difference in (("Score, greedy", other_scores - scores), ("Win rate over its SFT model, greedy", other_points - points)):
        found = row(rows, label)
        assert (found.low, found.high) == pytest.approx(mean_interval(difference, 0.95)) and found.tone == "good"
        assert found.p_value == pytest.approx(ttest_1samp(difference, 0).pvalue, rel=1e-6)


def test_a_figure_that_never_varied_has_no_detectable_difference():
    same = replace(results(), prompts=by_prompt(greedy_score=[1.0] * 400))
    found = row(figures_that_count(same, same), "Score, greedy")
    assert (found.change, found.low, found.high, found.tone, found.detectable) == (0.0, 0.0, 0.0, "", None)


def test_the_rows_of_one_table_are_corrected_together():
    def differences(*p_values: float) -> list[Difference]:
        return [Difference("", "share", 0.5, 0.6, 0.1, 0.02, 0.18, True, p) for p in p_values]

    # Holm: 4 * 0.013 is above 0.05, 4 * 0.012 below; then 3 * 0.02 is above.
    assert [r.tone for r in judged_together(differences(0.013, 0.02, 0.03, 0.5), 0.95)] == [""] * 4
    rows = judged_together(differences(0.012, 0.02, 0.03, 0.5), 0.95)
    assert [r.tone for r in rows] == ["good", "", "", ""] and rows[0].detectable is None
    # Three are open: (z(1 - 0.05 / 6) + z(0.8)) * 0.16 / 2 / z(0.975) = (2.39398 + 0.84162) * 0.040817
    assert rows[1].detectable == pytest.approx(0.132068, abs=1e-5) and rows[1].shown[4] == "13.2"


def test_two_seeds_of_one_configuration_are_two_checkpoints():
    worse, better = results(ok=0.5), results(ok=0.9, name="two")
    seeds = [replace(r, params=PARAMS | {"seed": seed}) for seed, r in enumerate((worse, better))]
    text = headline(*seeds, figures_that_count(*seeds))
    assert text == ("open", "two has the better checkpoint by the judge; both are of one configuration, with seeds 0 and 1.")
    changed = replace(seeds[1], params=seeds[1].params | {"rl": PARAMS["rl"] | {"steps": 90}})
    assert headline(seeds[0], changed, figures_that_count(seeds[0], changed))[0] == "good"


def test_scores_of_two_reward_models_are_not_called_better_or_worse():
    one, other = results(score=1.0), results(score=9.0, reward_model="b")
    own = replace(one, params=PARAMS | {"evaluation": PARAMS["evaluation"] | {"scorers": [{"name": "length"}]}})
    for label, (first, second) in product(
        ("Score, greedy (other reward)", "Win rate over its SFT model, greedy (other reward)"), ((one, other), (one, own), (own, one))
    ):
        found = row(figures_that_count(first, second), label)
        assert found.first is not None and found.second is not None
        assert (found.change, found.low, found.high, found.p_value, found.tone) == (None, None, None, None, "")
    one, other = results(judge=False), results(score=9.0, reward_model="b", judge=False)
    text = headline(one, other, figures_that_count(one, other))
    assert text == ("open", "There is no judge, and the rewards differ: nothing says which policy is better.")


def test_the_terminal_marks_significant_changes_without_colour():
    text = summary(Side(results(ok=0.5), {}, None, {}), Side(results(ok=0.9, name="two"), {}, None, {}))
    marked = [line for line in text.splitlines() if line.startswith("Judge accepts") and " *" in line]
    assert len(marked) == 2 and "*: significant after Holm" in text and "Green" not in text
    assert not any(line.endswith("*") or " * " in line for line in text.splitlines() if line.startswith("Tokens per answer"))


def test_the_judge_says_which_policy_is_better():
    worse, better = results(ok=0.5), results(ok=0.9, name="two")
    assert headline(worse, better, figures_that_count(worse, better)) == ("good", "two has the better policy by the judge.")
    assert headline(better, worse, figures_that_count(better, worse)) == ("bad", "two has the better policy by the judge.")
    assert headline(worse, worse, figures_that_count(worse, worse))[0] == "open"
    greedy, sampled = [r for r in figures_that_count(worse, better) if r.label.startswith("Judge")]
    text = headline(worse, better, [greedy, replace(sampled, tone="")])
    assert text == ("open", "The judge sees a clear difference in one of the two modes only.")
    text = headline(worse, better, [greedy, replace(sampled, tone="bad")])
    assert text == ("open", "The judge sees a clear difference in both modes, in opposite directions.")


def test_only_params_that_a_run_has_used_count():
    other = {**PARAMS, "rl": {**PARAMS["rl"], "steps": 90}, "dpo": {"beta": 0.1}, "report": {"title": "two"}, "gate": {"min_pairs": 5}}
    assert params_that_differ(PARAMS, other) == [("rl.steps", "60", "90"), ("gate.min_pairs", "–", "5")]
    method = {**other, "alignment": {"method": "dpo"}}
    assert ("dpo.beta", "0.3", "0.1") in params_that_differ(PARAMS, method)
    assert outs_that_differ(results(), results(reward_model="b")) == [("models/reward", "a", "b")]


def test_the_evaluations_scorers_count_with_a_method_without_rl():
    one = {**PARAMS, "alignment": {"method": "dpo"}}
    other = {**one, "rl": {"steps": 90, "reward": {"scorers": [{"name": "length"}]}}}
    assert params_that_differ(one, other) == [("rl.reward.scorers", '[{"name": "reward_model"}]', '[{"name": "length"}]')]


def test_nothing_that_differs_is_told_in_whole_sentences():
    side = Side(results=results(), curves={}, samples=None, times={})
    text = summary(side, side)
    assert "No parameter differs." in text and "No data and no model differs." in text
    unknown = replace(side, results=replace(side.results, outs={}, metrics={"train_sft": {"heldout_loss": 0.5}}))
    text = summary(unknown, unknown)
    assert "Neither run's dvc.lock names data or models." in text and "No figure of the table has a test." in text and "0 tests" not in text


def test_figures_of_other_params_are_pointed_out(project, capsys):
    params = read_yaml(project / "runs/one/params.yaml")
    locked = {"evaluate": {"seed": 17, "rl.reward.scorers": [{"name": "length"}]}, "train_policy": {"rl": params["rl"]}}
    lock = {"stages": {stage: {"params": {"params.yaml": values}} for stage, values in locked.items()}}
    (project / "runs/one/dvc.lock").write_text(json.dumps(lock))
    assert main(["one", "two"]) == 0
    warning = "one: the figures of evaluate are of other params: its params.yaml differs from its dvc.lock in seed, rl.reward.scorers."
    assert warning in capsys.readouterr().out
    assert "the figures of evaluate are of other params" in (project / "reports/compare-one-two.html").read_text(encoding="utf-8")
    shutil.copytree(project / "runs/one", project / "runs/one-seed-1", symlinks=True)
    apply_overrides(project / "runs/one-seed-1/params.yaml", {"seed": 1})
    assert main(["one", "two", "one-seed-1"]) == 0
    assert warning in capsys.readouterr().err


def test_phases_add_up_to_the_steps_time():
    rows = pd.DataFrame({"step": [1, 2], "seconds": [2.0, 2.0], "seconds_update": [1.5, 1.0], "seconds_generate": [0.25, 0.25]})
    time = summarize(rows)
    assert (time.steps, time.seconds) == (2, 4.0) and time.phases == {"update": 2.5, "generate": 0.5, "other": 1.0}
    assert time.shares == {"update": 0.625, "generate": 0.125, "other": 0.25}


def test_timings_belong_to_the_curves_they_were_taken_with(tmp_path):
    curves = tmp_path / "plots/train_sft.csv"
    log = MetricsLog(
        curves,
        ("step", "loss"),
        timings=tmp_path / "reports/timings/train_sft.csv",
        first_step=0,
    )
    log.log({"step": 0, "loss": 1.0}, {"seconds": 3.0})
    log.close()
    assert read_times(tmp_path)["train_sft"].seconds == 3.0
    curves.write_text("step,loss\n0,2\n")  # as DVC restores another run's
    assert read_times(tmp_path) == {}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with the run `one` in a worktree's folder, and `two` on a branch."""
    answer_otherwise(make_workspace(tmp_path / "runs/one", hostile=True))
    two = make_workspace(tmp_path / "two", hostile=True)
    apply_overrides(two / "params.yaml", {"rl.algorithm": "grpo"})
    edit_metrics(two, "evaluate", {"greedy.policy.judge_ok": 0.6, "sampled.policy.judge_ok": 0.5})
    evaluated = json.loads((two / "metrics/evaluate.json").read_text())
    prompts(np.random.default_rng(2), evaluated).to_csv(two / "plots/evaluation.csv", index=False)
    samples = (two / "data/evaluation_samples.parquet").read_bytes()
    md5 = hashlib.md5(samples).hexdigest()
    lock = {"stages": {"evaluate": {"outs": [{"path": "data/evaluation_samples.parquet", "md5": md5}]}}}
    (two / "dvc.lock").write_text(json.dumps(lock))
    git = ["git", "-c", "user.name=n", "-c", "user.email=e@e"]
    for command in (["init", "-q", "-b", "run/two"], ["add", "params.yaml", "dvc.lock", "metrics", "plots"], ["commit", "-qm", "two"]):
        subprocess.run([*git, *command], cwd=two, check=True)
    (two / ".git").rename(tmp_path / ".git")
    (tmp_path / ".dvc").mkdir()
    (tmp_path / ".dvc/config").touch()
    cached = tmp_path / ".dvc/cache/files/md5" / md5[:2] / md5[2:]
    cached.parent.mkdir(parents=True)
    cached.write_bytes(samples)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_run_in_a_folder_against_one_of_a_branch(project, capsys):
    assert main(["one", "two"]) == 0
    printed = capsys.readouterr().out
    assert "one has the better policy by the judge." in printed and "rl.algorithm" in printed
    assert "compared by prompt, on the 400 prompts that both runs answered" in printed
    page = (project / "reports/compare-one-two.html").read_text(encoding="utf-8")
    assert 'data-figure="train_policy_score_mean"' in page and "&#34;grpo&#34;" in page
    assert not any(hostile in page for hostile in HOSTILE[:3]) and "&lt;img src=x onerror=" in page
    assert len(page) < 3_000_000


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "three",
            "three: expected a run in runs/, a folder with params.yaml, or a branch, tag or commit, got none of these",
        ),
        ("--output=x", 'rlhf compare: Command "compare" parameter SECOND requires an argument.'),
        ("empty", "empty: expected the results of a run, got no file of metrics/; name a run, branch or commit that has them"),
    ],
)
def test_a_run_that_is_not_there_is_named(project, capsys, name, message):
    (project / "empty").mkdir()
    (project / "empty/params.yaml").write_text("seed: 0\n")
    try:
        code = main(["one", name])
    except SystemExit as ended:
        code = ended.code
    assert code == 2 and message in capsys.readouterr().err


def test_more_than_two_runs_are_compared_over_seeds(project, capsys):
    shutil.copytree(project / "runs/one", project / "runs/one-seed-1", symlinks=True)
    apply_overrides(project / "runs/one-seed-1/params.yaml", {"seed": 1})
    assert main(["one", "two", "one-seed-1"]) == 0
    lines = [line.split("|")[1:3] for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert [[cell.strip() for cell in cells] for cells in lines][1:] == [["one", "2"], ["two", "1"]]
    assert main(["one", "two", "one"]) == 2
    assert "one: expected one run of each seed of a configuration, got one, one" in capsys.readouterr().err
