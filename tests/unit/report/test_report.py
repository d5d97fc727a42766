"""The report's verdicts, texts and bytes. What a browser makes of it is in tests/integration/test_report_browser.py."""

from __future__ import annotations

import html
import json
import re
import subprocess
import sys
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import get_args

import pandas as pd
import pytest
from bokeh.models import Legend
from clerk_params import CLERK_PARAMS
from report_workspace import (
    HOSTILE,
    REMOVED,
    edit_metrics,
    evaluation,
    make_workspace,
    run_report,
    slice_of,
    validation,
    with_results,
)

from rlhf_core.config import STAGE_SECTIONS, apply_overrides, load_params, read_yaml
from rlhf_core.config.alignment import Method
from rlhf_core.gate.verdict import unjudged
from rlhf_core.paths import processes_file
from rlhf_core.report.canvas import Line, curves
from rlhf_core.report.differences import Difference, Results, figures_that_count, read_as
from rlhf_core.report.files import check_recorded_params, read_inputs
from rlhf_core.report.inputs import ReportInputError, StageTime, read_processes
from rlhf_core.report.page import METHOD_TITLES, render, render_times
from rlhf_core.report.tables import METHOD_PARAMS, answer, evaluation_rows, expectations, samples, side_by_side
from rlhf_core.report.verdict import outcome
from rlhf_core.stage.setup import rl_setup, training_setup
from tasks.gate_reward import NOT_NEEDED
from tasks.report import write_stopped
from tasks.train_reward import NOT_TRAINED


def test_every_method_has_a_title_and_params_that_are_there():
    assert METHOD_TITLES.keys() == METHOD_PARAMS.keys() == set(get_args(Method))
    params = read_yaml(CLERK_PARAMS)
    for path in (path for paths in METHOD_PARAMS.values() for path in paths):
        reduce(getitem, path.split("."), params)


ABOVE, ACROSS, BELOW = 0.65, 0.5, 0.35
REWARD_MODEL = {"name": "reward_model", "kind": "reward_model", "weight": 1.0, "normalization": "initial"}
JUDGE = {"name": "judge", "kind": "judge", "weight": 1.0, "normalization": "none"}
WITHOUT_REWARD_MODEL = {"reward.enabled": False, "rl.algorithm": "grpo", "rl.reward.scorers": [JUDGE], "rl.ppo.critic_init": "sft"}


def test_the_report_has_all_params_and_the_hashes_of_sources_and_base_model(tmp_path, monkeypatch):
    workspace = make_workspace(tmp_path)
    inputs = {
        "sources": {"data.sources.pairs": {"path": "../pairs.jsonl", "size": 1, "sha256": "a" * 64}},
        "model": {"model.path": {"name": "some/model", "commit": "b" * 40}},
        "judges": {},
        "scorers": {"rl.reward.scorers.tone": {"address": "https://judge/score"}},
    }
    check = json.loads((workspace / "metrics/check_model.json").read_text())
    services = {"tone": {"url": "https://judge/score", "name": "<i>", "version": "7"}, "other": {"url": "http://b/"}}
    (workspace / "metrics/check_model.json").write_text(json.dumps(check | {"services": services}))
    stages = {name: {"outs": [], "params": {"data/inputs.json": inputs}} for name in ("prepare_data", "train_sft")}
    (workspace / "dvc.lock").write_text(json.dumps({"schema": "2.0", "stages": stages}))
    page = render_in(workspace, monkeypatch)
    rows = re.findall(r'<tr><th scope="row">([^<]*)</th><td>([^<]*)</td><td><code>([^<]*)</code></td></tr>', page)
    assert rows == [
        ("model.path", "some/model", "b" * 40),
        ("rl.reward.scorers.tone", "https://judge/score", "no hash"),
        ("data.sources.pairs", "../pairs.jsonl", "a" * 64),
    ]
    assert "Scores of tone come from https://judge/score, which has no hash and calls itself &lt;i&gt; 7.</p>" in page
    assert "Scores of other come from http://b/, which has no hash.</p>" in page
    shown = re.search(r"All parameters</summary><pre>(.*?)</pre>", page, re.DOTALL)[1]
    assert json.loads(html.unescape(shown)).keys() == set(STAGE_SECTIONS["report"]) and "more characters" not in shown


NO_SCORE = {"value": None, "low": None, "high": None, "wins": 0, "ties": 0, "losses": 0, "p_value": 1.0, "n": 0}


def unscored(*, sft: float = 0.0, policy: float = 0.0, judge: bool) -> dict:
    """No scorer had a say: counts of wins are 0, and every score is null."""
    result = with_results(sft=sft, policy=policy, win=ACROSS, judge=judge)
    for mode in ("greedy", "sampled"):
        result["win_rate"][mode] = dict(NO_SCORE)
        result["difference"][mode] |= {"score_mean": {"value": None, "low": None, "high": None, "p_value": 1.0, "n": 0}, "scores": {}}
        for model in ("sft", "policy"):
            result[mode][model] |= {"score_mean": None, "score_low": None, "score_high": None, "scores": {}}
    return result


@pytest.mark.parametrize(
    ("sft", "policy", "tone", "headline"),
    [
        (0.5, 0.9, "good", "The policy is better than the SFT model it started from."),
        (0.5, 0.52, "open", "There is no clear difference between the policy and the SFT model."),
        (0.9, 0.5, "bad", "The policy is worse than the SFT model by the judge."),
    ],
)
def test_the_judge_decides_without_a_score(sft, policy, tone, headline):
    verdict = outcome(unscored(sft=sft, policy=policy, judge=True), [], confidence=0.95)
    assert (verdict.tone, verdict.headline) == (tone, headline)
    printed = " ".join(verdict.details)
    assert "Nothing scored the answers" in printed and "prefers" not in printed and "The judge accepts" in printed


@pytest.mark.parametrize("judge", [False, True])
def test_a_run_that_nothing_scored_says_what_it_cant_say(tmp_path, monkeypatch, judge):
    workspace = make_workspace(tmp_path, judge=judge)
    apply_overrides(workspace / "params.yaml", {"alignment.method": "dpo", "reward.enabled": False})
    (workspace / "metrics/train_reward.json").write_text(json.dumps(NOT_TRAINED))
    (workspace / "metrics/gate.json").write_text(
        json.dumps(unjudged(load_params(CLERK_PARAMS).gate, NOT_NEEDED, needed=False) | {"override": None})
    )
    (workspace / "metrics/evaluate.json").write_text(json.dumps(unscored(sft=0.5, policy=0.9, judge=judge)))
    curves = workspace / "plots/train_policy.csv"
    pd.read_csv(curves).assign(loss=0.5).to_csv(curves, index=False)
    page = render_in(workspace, monkeypatch)
    assert ("There is no verdict: nothing compared the policy’s answers" in page) is not judge
    assert "Stage at fault" not in page and "Win rate" not in page and '<th scope="row">Score</th>' not in page
    assert "The policy was trained on the data alone." in page and "Distance" in page
    assert ("run `dvc repro report` in that folder" in page) is not judge
    assert "this estimate can be below 0; read it as 0" in page


def test_one_test_is_not_corrected_for_others():
    def row(p_value: float | None) -> Difference:
        return Difference("x", "share", 0.1, 0.2, 0.1, 0.0, 0.2, True, p_value)

    results = Results("a", {"evaluation": {"confidence": 0.95}}, {}, {}, None)
    assert "Green and red: significant in the table’s only test." in read_as(results, results, [row(0.5), row(None)])
    assert any("the table’s 2 tests" in line for line in read_as(results, results, [row(0.5), row(0.1)]))


def test_same_inputs_same_bytes_and_everything_inside(tmp_path):
    pages = []
    for name in ("one", "two"):
        workspace = make_workspace(tmp_path / name, hostile=True)
        (workspace / "reports").mkdir()
        (workspace / "reports/stopped.html").write_text("of a run before")
        done = run_report(workspace)
        assert done.returncode == 0, done.stdout + done.stderr
        assert sorted(p.name for p in (workspace / "reports").iterdir()) == ["report.html", "timings"]
        times = (workspace / "reports/timings/time.html").read_text(encoding="utf-8")
        assert "No timings: the models were not trained here." in times and "seconds of training" not in times
        pages.append((workspace / "reports/report.html").read_bytes())
    assert pages[0] == pages[1]
    assert len(pages[0]) < 3_000_000
    page = pages[0].decode()
    outside_scripts = re.sub(r"(?s)<script[^>]*>.*?</script>", "", page)
    outside_scripts = outside_scripts.replace('<a href="timings/time.html">', "")  # a file beside the report, and only a link
    assert not re.search(r"<(?:link|img|iframe|object)\b|\b(?:src|href)=[\"'](?!#)|@import|url\(", outside_scripts)
    assert "onerror=" in page and "&lt;img src=x onerror=" in page
    assert "<script" not in outside_scripts and outside_scripts.count("&lt;script&gt;") == 2 * 6 + 1  # two texts, six places each, a slice
    assert not any(hostile in page for hostile in HOSTILE[:3])
    assert "user: {{ 7 * 7 }} {% raw %}" in page


def render_in(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(workspace)
    return render(read_inputs(load_params(), fingerprint="0" * 64))


def test_a_report_of_params_that_a_stage_did_not_run_with_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(make_workspace(tmp_path))
    lock = {
        "stages": {"train_sft": {"cmd": "x", "params": {"params.yaml": {s: read_yaml(Path("params.yaml"))[s] for s in ("seed", "sft")}}}}
    }
    Path("dvc.lock").write_text(json.dumps(lock))
    check_recorded_params()
    apply_overrides(Path("params.yaml"), {"sft.learning_rate": 0.007, "reward.epochs": 3.0})
    with pytest.raises(
        ValueError, match=r"expected the values that train_sft ran with, got others: sft.learning_rate: 0.002 -> 0.007; undo"
    ):
        check_recorded_params()


def test_a_run_without_judge_or_critic(tmp_path, monkeypatch):
    workspace = make_workspace(tmp_path, judge=False)
    curves = workspace / "plots/train_policy.csv"
    pd.read_csv(curves).drop(columns=["explained_variance", "value_loss"]).to_csv(curves, index=False)
    page = render_in(workspace, monkeypatch)
    assert "Judge" not in re.sub(r"(?s)<script.*?</script>|<style.*?</style>", "", page) and 'data-figure="rl_critic"' not in page


@pytest.mark.long
def test_repetition_and_variety_are_drawn_where_they_were_measured(tmp_path, monkeypatch):
    workspace = make_workspace(tmp_path)
    curves = workspace / "plots/train_policy.csv"
    rows = pd.read_csv(curves)
    page = render_in(workspace, monkeypatch)
    assert 'data-figure="rl_text"' in page and "different pairs of tokens" in page
    rows.drop(columns=["repetition", "distinct_1", "distinct_2"]).to_csv(curves, index=False)
    assert 'data-figure="rl_text"' not in render_in(workspace, monkeypatch)


def test_several_scorers_each_have_curves_and_a_row(tmp_path, monkeypatch):
    workspace = make_workspace(tmp_path)
    apply_overrides(
        workspace / "params.yaml", {"rl.kl.coef": 0.0, "rl.reward.scorers": [REWARD_MODEL, JUDGE | {"name": "ok", "weight": 0.0}]}
    )
    curves = workspace / "plots/train_policy.csv"
    rows = pd.read_csv(curves)
    rows.assign(score_ok=0.5, eval_score=rows["score_mean"].where(rows["step"] % 20 == 0)).to_csv(curves, index=False)
    figures = {"mean": 0.25, "low": 0.2, "high": 0.3, "n": 400}
    scores = {f"{mode}.{model}.scores.ok": figures for mode in ("greedy", "sampled") for model in ("sft", "policy")}
    edit_metrics(workspace, "evaluate", scores | {"greedy.policy.scores.ok": figures | {"mean": 0.75}})
    for mode, change in (("greedy", 0.5), ("sampled", 0.0)):
        difference = {"value": change, "low": change - 0.1, "high": change + 0.1, "p_value": 0.5, "n": 400}
        edit_metrics(workspace, "evaluate", {f"difference.{mode}.scores.ok": difference})
    page = render_in(workspace, monkeypatch)
    assert 'data-figure="rl_score_reward_model"' in page and 'data-figure="rl_score_ok"' in page and "validation, greedy" in page
    assert 'data-figure="rl_kl"' not in page  # no reference, no KL
    row = re.search(r"<tr[^>]*><th scope=\"row\">ok \(judge, only measured\)</th>(.*?)</tr>", page, re.DOTALL)[1]
    assert re.findall(r"[+−\d.]+(?=\s*</td>)", row) == ["0.25", "0.75", "+0.50", "0.25", "0.25", "0.00"]


def test_a_table_and_curves_say_which_scorer_drove_the_update(tmp_path, monkeypatch):
    workspace = make_workspace(tmp_path)
    scorers = [REWARD_MODEL, JUDGE | {"name": "ok", "weight": 0.5}, JUDGE | {"name": "seen", "weight": 0.0}]
    apply_overrides(workspace / "params.yaml", {"rl.reward.scorers": scorers, "evaluation.scorers": [REWARD_MODEL]})
    curves = workspace / "plots/train_policy.csv"
    rows = pd.read_csv(curves)
    late = rows["step"] > rows["step"].max() - 10
    shares = {"share_reward_model": late.map({True: -0.25, False: 0.5}), "share_ok": late.map({True: 1.0, False: 0.3})}
    measured = rows.assign(score_ok=0.5, score_seen=0.5, **shares, **{"correlation_reward_model.ok": -0.5})
    measured.loc[0, ["share_reward_model", "share_ok", "correlation_reward_model.ok"]] = float("nan")
    measured.to_csv(curves, index=False)
    page = render_in(workspace, monkeypatch)
    assert 'data-figure="rl_shares"' in page and 'data-figure="rl_correlations"' in page
    table = page.partition("Which scorer drove the update</h4>")[2].partition("</table>")[0]
    cells = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in table.split("<tr>")[-3:]]
    late_share = 10 / (len(rows) - 1)
    of_all = [0.5 - 0.75 * late_share, 0.3 + 0.7 * late_share]
    assert cells == [
        ["50.0%", "−25.0%", f"{of_all[0]:.1%}", "–", "−0.5"],
        ["30.0%", "100.0%", f"{of_all[1]:.1%}", "−0.5", "–"],
        ["20.0%", "25.0%", f"{1 - sum(of_all):.1%}", "–", "–"],
    ]
    assert "seen" not in table
    rows.assign(score_ok=0.5, score_seen=0.5).to_csv(curves, index=False)
    older = render_in(workspace, monkeypatch)
    assert "Which scorer drove" not in older and 'data-figure="rl_shares"' not in older


def test_pass_rates_and_scores_by_source_are_drawn_where_they_were_measured(tmp_path, monkeypatch):
    workspace = make_workspace(tmp_path)
    curves = workspace / "plots/train_policy.csv"
    rows = pd.read_csv(curves)
    ends = {"eval_pass_1_low": 0.4, "eval_pass_1_high": 0.6, "eval_pass_1_low.math": 0.1}
    rows.assign(eval_pass_1=0.5, eval_pass_4=0.75, **{"eval_pass_4.math": 0.25, "eval_score.math": 1.5}, **ends).to_csv(curves, index=False)
    page = render_in(workspace, monkeypatch)
    assert 'data-figure="rl_pass"' in page and 'data-figure="rl_sources"' in page
    assert "pass@1" in page and "pass@4, math" in page and "score, math" in page and "low" not in re.findall(r'"(pass@[^"]*)"', page)
    rows.to_csv(curves, index=False)
    assert 'data-figure="rl_pass"' not in render_in(workspace, monkeypatch)


def test_one_scorer_is_the_score_and_gets_no_row_of_its_own(tmp_path, monkeypatch):
    page = render_in(make_workspace(tmp_path), monkeypatch)
    assert 'data-figure="rl_kl"' in page and 'data-figure="rl_score"' in page and 'data-figure="rl_score_reward_model"' not in page
    assert "only measured" not in page and page.count('<th scope="row">Score</th>') == 1


def test_a_run_without_a_reward_model(tmp_path, monkeypatch):
    workspace = make_workspace(tmp_path)
    apply_overrides(workspace / "params.yaml", WITHOUT_REWARD_MODEL)
    curves = workspace / "plots/train_reward.csv"
    pd.read_csv(curves).head(0).to_csv(curves, index=False)
    heldout = workspace / "data/reward_heldout.parquet"
    pd.read_parquet(heldout).head(0).to_parquet(heldout)
    (workspace / "metrics/train_reward.json").write_text(json.dumps(NOT_TRAINED))
    (workspace / "metrics/gate.json").write_text(
        json.dumps(unjudged(load_params(CLERK_PARAMS).gate, NOT_NEEDED, needed=False) | {"override": None})
    )
    page = render_in(workspace, monkeypatch)
    assert "None was trained: reward.enabled is false." in page and "There is no reward model to judge." in page
    assert "Win rate by the reward<" in page and "The judge was part of the reward" in page
    assert not any(f'data-figure="{name}"' in page for name in ("reward_loss", "reward_accuracy", "gate_accuracy", "gate_scores"))
    assert "reward.epochs</dt>" not in page


@pytest.mark.long
def test_a_stage_that_max_minutes_ended_is_named_at_the_top(tmp_path, monkeypatch):
    workspace = make_workspace(tmp_path)
    assert "max_minutes ended" not in render_in(workspace, monkeypatch)
    edit_metrics(workspace, "train_policy", {"steps": 1210, "planned_steps": 4000, "ended_by": "max_minutes"})
    page = render_in(workspace, monkeypatch)
    assert "max_minutes ended train_policy after 1,210 of 4,000 steps." in page.split("</header>")[0]


@pytest.mark.long
def test_the_training_part_says_how_each_model_was_trained(tmp_path, monkeypatch):
    workspace = make_workspace(tmp_path)
    assert "Ranks, engines and adapters" not in render_in(workspace, monkeypatch)  # metrics of an older version
    changes = {"sft.ranks": 2, "sft.zero_stage": 2, "rl.placement": "two_groups", "rl.trainer.ranks": 2, "rl.trainer.zero_stage": 3}
    changes |= {"rl.trainer.offload_optimizer": True, "rl.lora": {"rank": 4, "alpha": 8.0, "dropout": 0.0, "target_modules": ["q_proj"]}}
    params = apply_overrides(workspace / "params.yaml", changes)
    placed = {"gpus": 8, "per_rank": 1.0, "per_engine": 0.5, "weight_transfer": ["ipc", "nccl"], "take_turns": True, "dispatch": "dynamic"}
    edit_metrics(workspace, "train_sft", {"setup": training_setup(params.sft)})
    edit_metrics(workspace, "train_policy", {"setup": rl_setup(params.rl, placed)})
    section = render_in(workspace, monkeypatch).split("<h3>Ranks, engines and adapters</h3>")[1].split("</table>")[0]
    rows = [re.findall(r"<t[hd][^>]*>([^<]*)</t", row) for row in re.findall(r"<tr><th scope.*?</tr>", section)]
    assert rows == [
        ["SFT", "2", "2", "none", "", ""],
        [
            "Policy",
            "2 for policy, reference; 2 for critic, reward models; 1 GPU each",
            "3, optimizer on the host",
            "rank 4, alpha 8, q_proj",
            "2 vLLM, tensor parallel 1; 0.5 GPU each; by turns with the ranks; prompts as engines become free",
            "ipc, nccl",
        ],
    ]


def test_the_page_of_times_says_where_the_job_ran_that_they_are_of(tmp_path):
    processes_file(tmp_path / "reports/timings/train_policy.csv").parent.mkdir(parents=True)
    places = {
        "rollout rank 0": {"node": "a" * 56, "host": "10.0.0.1", "pid": 41, "gpus": ["0", "1"]},
        "trainer rank 0": {"node": "b" * 56, "host": HOSTILE[0], "pid": 42, "gpus": []},
    }
    processes_file(tmp_path / "reports/timings/train_policy.csv").write_text(json.dumps(places))
    times = {"train_policy": StageTime(2, 4.0, {"update": 3.0, "other": 1.0})}
    page = render_times("A run", times, read_processes(tmp_path, times, "rl"))
    assert "4.0 seconds of training steps" in page and "No timings" not in page and HOSTILE[0] not in page
    rows = [re.findall(r"<td>([^<]*)</td>", row) for row in page.split("Processes of the RL job")[1].split("<tr>")[2:]]
    assert rows[0] == ["10.0.0.1 (node aaaaaaaa)", "rollout rank 0", "41", "0, 1"] and rows[1][1:] == ["trainer rank 0", "42", ""]
    assert read_processes(tmp_path, {}, "rl") == {}  # of another run
    after_dpo = render_times("A run", times, read_processes(tmp_path, times, "dpo"))  # whose timings replaced those of the RL job
    assert "4.0 seconds of training steps" in after_dpo and "Processes of the RL job" not in after_dpo and "10.0.0.1" not in after_dpo


def test_the_data_part_says_what_each_source_lost_and_why(tmp_path, monkeypatch):
    workspace = make_workspace(tmp_path)
    reasons = {"prompt is null": 400, "sft rows with a text of white space only (empty)": 12, HOSTILE[0]: 3}
    changes = {"records": {"clerk": 4000}, "dropped": {"clerk": reasons}, "dropped_fraction": {"clerk": {"sft": 0.103, "prompt": 0.1}}}
    edit_metrics(workspace, "prepare_data", changes)
    section = render_in(workspace, monkeypatch).split('<section id="data">')[1].split("</section>")[0]
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", section))
    assert "Dropped, by reason" in text and "clerk 4,000 " in text and "10.3%" in text
    assert "400 prompt is null; 12 sft rows with a text of white space only (empty); 3 " in text
    assert HOSTILE[0] not in section


def test_expectations_that_found_something_stand_first():
    checked = validation()
    checked["expectations"][-1] |= {"passed": False, "unexpected": 3}
    sorted_out = expectations(checked)
    assert [e["name"] for e in sorted_out["notable"]] == ["leakage", "duplicate", "contradictory", "length_bias"]
    assert [e["name"] for e in sorted_out["plain"]] == ["schema", "null", "empty", "identical"]


def test_a_rejected_gate_and_failed_data_come_first(tmp_path, monkeypatch):
    workspace = make_workspace(tmp_path)
    nothing = {"accuracy": None, "by_source": {}, "slices": [], "worst_slice": None, "calibration": None, "checks": []}
    edit_metrics(workspace, "gate", {"passed": False, "message": "rejected: expected finite scores."} | nothing)
    page = render_in(workspace, monkeypatch)
    verdicts = page[page.index('<ul class="verdicts">') : page.index("</header>")]
    assert "The reward model did not pass its gate." in verdicts and "Expected finite scores." in verdicts
    assert 'data-figure="gate_accuracy"' not in page and 'data-figure="gate_scores"' in page


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("evaluate", {"win_rate": REMOVED}, "win_rate.greedy.n: expected the key win_rate, got greedy, sampled, kl, judge"),
        ("evaluate", {"sampled.policy.judge_n": REMOVED}, "sampled.policy.judge_n: expected the key judge_n, got n, score_mean"),
        ("evaluate", {"greedy.policy.length_mean": REMOVED}, "expected the key length_mean for each model"),
        ("gate", {"passed": REMOVED}, "passed: expected the key passed"),
        ("prepare_data", {"rows": REMOVED}, "rows: expected the key rows"),
    ],
)
def test_a_missing_figure_is_named(tmp_path, monkeypatch, name, change, message):
    workspace = make_workspace(tmp_path)
    edit_metrics(workspace, name, change)
    with pytest.raises(ReportInputError, match=re.escape(message)):
        render_in(workspace, monkeypatch)


def test_a_missing_column_is_named(tmp_path):
    workspace = make_workspace(tmp_path)
    path = workspace / "data/evaluation_samples.parquet"
    pd.read_parquet(path).drop(columns=["policy_response"]).to_parquet(path)
    done = run_report(workspace)
    assert done.returncode == 1 and "samples: expected the columns" in done.stderr and "named policy_response" in done.stderr
    assert "Traceback" not in done.stderr and not (workspace / "reports/report.html").exists()


def test_the_report_does_not_import_torch():
    code = "import sys, tasks.report; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_another_method_than_rl_shows_its_own_curves_and_params(tmp_path, monkeypatch):
    page = render_in(make_workspace(tmp_path / "dpo", method="dpo"), monkeypatch)
    assert "Direct alignment on pairs" in page and "DPO, sigmoid" in page and "Reinforcement learning" not in page
    assert 'data-figure="policy_margin"' in page and 'data-figure="policy_kl"' not in page  # which was not measured
    assert 'data-figure="rl_score"' not in page
    assert "<dt>dpo.beta</dt>" in page and "<dt>rl.algorithm</dt>" not in page


def test_samples_stand_by_the_size_of_their_change():
    def row(sft: float | None, policy: float | None) -> dict:
        texts = {"id": "i", "source": "s", "prompt": "p", "mode": "greedy", "sft_response": "a", "policy_response": "b"}
        return texts | {"sft_score": sft, "policy_score": policy, "sft_judge_ok": None, "policy_judge_ok": True}

    # Gains 1, none, -3, 2: by size -3, 2, 1, and last the one that could not be scored.
    cards = samples(pd.DataFrame([row(0.0, 1.0), row(None, 1.0), row(1.0, -2.0), row(1.0, 3.0)]))
    assert [card["gain"] for card in cards] == [-3.0, 2.0, 1.0, None] and {card["changed"] for card in cards} == {""}
    before, after = answer("SFT", "a", 1.0, False), answer("Policy", "b", 1.5, True)
    assert side_by_side(before, after)["changed"] == "fixed" and side_by_side(after, before)["changed"] == "broken"


def test_a_stopped_chain_leaves_a_page_that_says_so_and_shows_nothing_of_an_earlier_run(tmp_path):
    workspace = make_workspace(tmp_path)  # whole: as after an earlier run
    done = run_report(workspace, "--stopped-at", "gate_reward", "--because", "gate_reward: rejected: <b>too few</b>")
    assert done.returncode == 0, done.stderr
    page = (workspace / "reports/stopped.html").read_text(encoding="utf-8")
    assert not (workspace / "reports/report.html").exists()
    assert "<title>Stopped: RLHF run</title>" in page and "Unfinished run." in page
    assert (
        "Stopped at gate_reward: what rewards the policy did not pass the gate." in page and "rejected: &lt;b&gt;too few&lt;/b&gt;" in page
    )
    assert 'data-figure="reward_accuracy"' in page and 'data-figure="gate_scores"' in page
    assert "sft right; dpo right; shared prefix on; vllm right." in " ".join(page.split())
    assert not any(f'id="{section}"' in page for section in ("evaluation", "samples")) and 'data-figure="rl_score"' not in page
    assert (
        page.count('<li class="done">') == 6
        and page.count('<li class="stopped-here">') == 1
        and page.count('<li class="not-reached">') == 2
    )


def test_a_chain_that_stopped_before_anything_was_made_still_gives_a_page(tmp_path, monkeypatch):
    workspace = make_workspace(tmp_path)
    (workspace / "metrics/prepare_data.json").unlink()
    (workspace / "plots/token_lengths.csv").unlink()
    monkeypatch.chdir(workspace)
    write_stopped("hash_inputs", "")
    assert "Stopped at hash_inputs: the stage ended with an error." in (workspace / "reports/stopped.html").read_text(encoding="utf-8")
    write_stopped("prepare_data", "")
    page = (workspace / "reports/stopped.html").read_text(encoding="utf-8")
    assert "Stopped at prepare_data: the stage ended with an error." in page and 'id="data"' not in page and 'id="lineage"' in page


def test_who_is_to_blame_and_what_was_overridden_or_stopped_stands_at_the_top(tmp_path, monkeypatch):
    workspace = make_workspace(tmp_path)
    edit_metrics(workspace, "evaluate", {f"{mode}.policy.judge_ok": 0.2 for mode in ("greedy", "sampled")})
    event = {"limit": "kl", "step": 30, "value": 9.0, "threshold": 5.0, "action": "stop", "message": "kl: <9>"}
    warning = event | {"step": 20, "action": "warn"}
    monitor = {"stopped": event, "warnings": [warning], "chosen_step": 25}
    edit_metrics(workspace, "train_policy", {"monitor": monitor})
    edit_metrics(workspace, "gate", {"override": "we <know>", "passed": False, "message": "rejected: too few."})
    began = {"of": "rl", "step": 7, "differences": ["params: rl.learning_rate: 1 -> <2>"]}
    edit_metrics(workspace, "train_policy", {"resumed_from": [began], "warning": "dpo: <nothing> was learned"})
    edit_metrics(workspace, "train_reward", {"warning": "reward: nothing was learned"})
    page = render_in(workspace, monkeypatch)
    assert "<b>dpo: &lt;nothing&gt; was learned</b>" in page and "<b>reward: nothing was learned</b>" in page
    assert page.count("reward: nothing was learned") == 1, "not among the figures too"
    top = page[: page.index("</header>")]
    assert "train_policy resumed from a checkpoint of another configuration, step 7." in top
    assert "rl.learning_rate: 1 -&gt; &lt;2&gt;" in top
    assert '<aside class="blame">' in top and "What to check:" in top and "we &lt;know&gt;" in top
    assert "A limit ended the training at step 30." in top
    assert page.count("kl: &lt;9&gt;") >= 2 and "The policy is that of step 25." in page


def test_a_legend_stands_above_its_curves():
    rows = pd.DataFrame({"step": [1, 2], "loss": [0.5, 0.4], "heldout_loss": [0.6, 0.5]})
    plot = curves(rows, [Line("loss", "training", "#000000"), Line("heldout_loss", "held out", "#ffffff")], y_title="loss")
    assert [part for part in plot.above if isinstance(part, Legend)] == [*plot.legend] and len(plot.legend) == 1


@pytest.mark.long
def test_a_setting_that_wrecks_a_pretrained_model_stands_at_the_top_unless_the_model_is_small(tmp_path, monkeypatch):
    workspace = make_workspace(tmp_path)
    apply_overrides(workspace / "params.yaml", {"model.path": "some/model"})
    told = "sft.learning_rate: full training at 0.002; usual 5e-6 to 2e-5 (docs/training.md)"
    edit_metrics(workspace, "train_sft", {"parameters": 135_000_000})
    page = render_in(workspace, monkeypatch)
    assert told in page[: page.index("</header>")]
    edit_metrics(workspace, "train_sft", {"parameters": 260_000})
    assert "docs/training.md" not in render_in(workspace, monkeypatch)


def test_the_gate_shows_slices_calibration_and_the_incumbent(tmp_path, monkeypatch):
    workspace = make_workspace(tmp_path)
    incumbent = {"version": "v3", "md5": "m", "n": 2_800, "not_scored": 12, "accuracy": 0.871, "candidate_accuracy": 0.873}
    incumbent |= {"difference": 0.002, "low": -0.006, "high": 0.01, "candidate_only": 60, "incumbent_only": 54, "p_value": 0.64}
    subsets = [{"subset": "chat", "accuracy": 0.8, "low": 0.7, "high": 0.9, "ties": 0, "n": 50}]
    file = {"name": "bench", "path": "p", "sha256": "s", "accuracy": 0.8, "low": 0.7, "high": 0.9, "ties": 0, "n": 50, "prompts": 50}
    external = [file | {"not_scored": 0, "threshold": None, "subsets": subsets}]
    anchor = incumbent | {"version": "v<1>", "md5": "n", "difference": -0.004, "low": -0.012, "high": 0.004}
    earlier = [
        {"number": k, "model": f"{k:032x}.dir", "run": f"run/<{k}>", "passed": None if k == 30 else k == 31, "accuracy": 0.7}
        | {"confidence": None if k == 30 else 0.95}
        for k in range(1, 32)
    ]
    look = {"number": 32, "level": 2.5e-5, "split": "s", "model": "f" * 32 + ".dir", "earlier": earlier}
    changes = {"incumbent": incumbent, "anchor": anchor, "external": external, "look": look, "confidence": 0.99995}
    edit_metrics(workspace, "gate", changes)
    page = render_in(workspace, monkeypatch)
    gate_part = page[page.index('<section id="gate">') : page.index('<section id="evaluation">')]
    assert "Against the incumbent, v3" in gate_part and "+0.2 points (−0.6 to +1.0)" in gate_part
    assert "Against the anchor, v&lt;1&gt;, the promoted model that no later one" in gate_part and "−0.4 points (−1.2 to +0.4)" in gate_part
    assert "Look 32 at these test pairs" in gate_part and "31 other models were judged on them before" in gate_part
    assert "run/&lt;31&gt;" in gate_part and "run/&lt;11&gt;" not in gate_part and "The last 20 of 31 earlier looks" in gate_part
    assert gate_part.count("no verdict yet") == 1 and "Intervals of 99.995%" in gate_part
    assert 'data-figure="gate_reliability"' in gate_part and 'data-figure="gate_external"' in gate_part
    assert "The weakest slice is category “&lt;script&gt;" in gate_part and "reported, not judged" in gate_part
    figures = json.loads(re.search(r'<script type="application/json" id="figures">(.*?)</script>', page)[1])["figures"]
    drawn = json.dumps(figures["gate_accuracy"])
    # The source has all pairs and is left out; the slice with 40 pairs is grey.
    assert "source: clerk" not in drawn and "category: sort" in drawn and '"#6b7280"' in drawn


def test_the_gate_shows_the_judges_and_names_one_that_was_used_though_rejected(tmp_path, monkeypatch):
    workspace = make_workspace(tmp_path)
    check = {"name": "position_bias", "value": 0.5, "low": 0.5, "high": 0.5, "threshold": 0.2, "n": 160, "passed": False}
    judge = {"key": "rl.reward.scorers.it", "name": "it", "model": "<b>judge</b>", "url": "http://judge/v1", "mode": "pairwise"}
    judge |= {"passed": False, "message": "rejected: position_bias: as it stands.", "checks": [check], "confidence": 0.95, "n": 160}
    judge |= {
        "asked": 160,
        "look": {"number": 2},
        "tokens": 70400,
        "cost": 0.25,
        "position": {"n": 160, "flipped": 1.0},
        "worst_slice": None,
    }
    rejected = {"passed": False, "message": "rejected: expected criteria.", "checks": [], "position": None, "worst_slice": None}
    edit_metrics(workspace, "gate", {"llm_judges": [judge, judge | {"name": "other"} | rejected], "override": "a try"})
    page = render_in(workspace, monkeypatch)
    part = page[page.index('<section id="gate">') : page.index('<section id="evaluation">')]
    assert "The judge it" in part and "&lt;b&gt;judge&lt;/b&gt; at http://judge/v1, pairwise: rejected: position_bias" in part
    assert "on 160 of 160 pairs, as look 2" in part and "70,400 tokens, which cost 0.25" in part and "In 100.0% of the pairs" in part
    assert "position bias" in part and "The judge other" in part and part.count("rejected: expected criteria.") == 1
    assert "The judge it did not pass its gate, but a policy was trained on it." in page


def test_the_figures_beside_each_other_in_the_gate_have_one_height(tmp_path, monkeypatch):
    workspace = make_workspace(tmp_path)
    edit_metrics(workspace, "gate", {"slices": [slice_of("category", f"kind {number}", 300, 400) for number in range(12)]})
    page = render_in(workspace, monkeypatch)
    figures = json.loads(re.search(r'<script type="application/json" id="figures">(.*?)</script>', page)[1])["figures"]
    heights = [figures[f"gate_{name}"]["doc"]["roots"][0]["attributes"]["height"] for name in ("accuracy", "reliability")]
    assert heights == [76 + 24 * 13] * 2  # a row for all pairs, and for each slice


def test_what_changed_against_the_run_before(tmp_path, monkeypatch):
    workspace = make_workspace(tmp_path)
    params = {s: v for s, v in read_yaml(workspace / "params.yaml").items() if s in STAGE_SECTIONS["report"]}
    figures = {"train_sft": {"heldout_loss": 0.5}, "gate_reward": {"accuracy": 0.8, "low": 0.78, "high": 0.82}}
    before = {"name": "run/<b>", "params": params | {"seed": 7}, "outs": {"models/sft": "m1"}, "metrics": figures}
    (workspace / "baselines.json").write_text(json.dumps({"previous": before, "promoted": None}))
    page = render_in(workspace, monkeypatch)
    part = page[page.index('<section id="changes">') : page.index('<section id="samples">')]
    assert "Against the previous run: run/&lt;b&gt;" in part and part.count("<h3>") == 1
    assert '<th scope="row">seed</th><td><code>7</code></td><td><code>0</code></td>' in part and "data.sources" not in part
    # 2,453 of 2,812 is 87.2%, so 7.2 points more, clearly.
    assert '<td class="n change good">+7.2</td>' in part
    assert "One of the runs has no evaluation" in part


def harness(*, n: int = 40, policy: float = 0.6, stderr: float = 0.08, hostile: str = "") -> dict:
    """Results of one task, as evaluate writes them."""
    difference = {"value": policy - 0.2, "low": 0.1, "high": 0.5, "p_value": 0.001, "n": n}
    figure = {"higher_is_better": True, "sft": {"value": 0.2, "stderr": 0.06}, "policy": {"value": policy, "stderr": stderr}}
    task = {"version": 1, "num_fewshot": 3, "n": n, "documents": 1319, "group": False, "truncated": {"sft": 2, "policy": 3}}
    settings = {"lm_eval": "0.4.13", "chat_template": False, "limit": n, "max_length": 512, "confidence": 0.95}
    return settings | {"tasks": {f"sums{hostile}": task | {"figures": {"acc,none": figure | {"difference": difference}}}}}


def test_the_page_has_tasks_of_the_harness_with_errors_limit_and_cut_contexts(tmp_path, monkeypatch):
    workspace = make_workspace(tmp_path)
    assert "lm-evaluation-harness" not in render_in(workspace, monkeypatch)
    edit_metrics(workspace, "evaluate", {"harness": harness(hostile=HOSTILE[0])})
    page = render_in(workspace, monkeypatch)
    part = page[page.index('<h3 id="harness">') : page.index("</section>", page.index('<h3 id="harness">'))]
    assert HOSTILE[0] not in part and "<td>acc ↑</td>" in part and "40 of 1,319" in part
    assert "0.2000 ± 0.0600" in part and '<td class="n change good">+0.4000 (+0.1000 to +0.5000)</td>' in part
    assert "At most 40 documents of each task" in part and "lost their beginning at 512 tokens" in part and "3 of 40 documents" in part


def test_two_runs_are_compared_on_the_tasks_that_both_were_asked_in_the_same_way():
    def run(name: str, found: dict) -> Results:
        return Results(name, read_yaml(CLERK_PARAMS), {}, {"evaluate": evaluation(judge=False) | {"harness": found}}, None)

    def row(first: dict, second: dict) -> Difference:
        rows = figures_that_count(run("one", first), run("two", second))
        return next(row for row in rows if row.label.startswith("sums: acc"))

    found = row(harness(policy=0.3), harness(policy=0.6))
    # Two standard errors of 0.08: the interval is 0.3 +- 1.96 * 0.08 * sqrt(2).
    assert (found.first, found.second) == (0.3, 0.6) and found.tone == "good" and found.form == "share"
    assert (found.low, found.high) == (pytest.approx(0.3 - 0.22174, abs=1e-4), pytest.approx(0.3 + 0.22174, abs=1e-4))
    other = row(harness(policy=0.3), harness(policy=0.6, n=50))
    assert other.label == "sums: acc (other settings)" and other.change is None
    files = row(harness(policy=0.3) | {"task_files": "1"}, harness(policy=0.6) | {"task_files": "2"})
    assert files.label == "sums: acc (other settings)" and files.change is None
    none_right = row(harness(policy=0.0, stderr=0.0), harness(policy=0.6))
    assert (none_right.change, none_right.p_value, none_right.tone) == (0.6, None, ""), "an error of 0 is no certainty"


def test_the_aspects_of_any_judge_have_rows_below_it():
    """The clerk's in its order, a rule's by name; no row of the judge where there is none."""

    def labels(result: dict) -> list[str]:
        return [row["label"] for row in evaluation_rows(result, [REWARD_MODEL], 0.95)][:5]

    result = evaluation(judge=True)
    assert labels(result) == ["Judge: accepts", "correct", "polite", "brief", "safe"]
    for mode in ("greedy", "sampled"):
        for figures in (*result[mode].values(), result["difference"][mode]):
            for aspect, other in (("correct", "told_well"), ("polite", "kind")):
                figures[f"judge_{other}"] = figures.pop(f"judge_{aspect}")
    assert labels(result) == ["Judge: accepts", "brief", "safe", "kind", "told well"]
    assert labels(evaluation(judge=False)) == ["Tokens per answer", "Truncated", "Score"]


def test_a_change_is_coloured_only_where_it_is_clear_among_all_changes_of_the_table():
    """14 changes are better or worse here. One p-value of 0.01 is none of them by accident, 0.05 / 14 would be."""
    result = evaluation(judge=True)
    for mode in ("greedy", "sampled"):
        for difference in result["difference"][mode].values():
            if "p_value" in difference:
                difference |= {"value": 0.02, "p_value": 0.5}
    result["difference"]["greedy"]["judge_ok"] |= {"value": 0.1, "p_value": 0.01}
    rows = evaluation_rows(result, [REWARD_MODEL], 0.95)
    assert {cell["tone"] for row in rows for cell in row["cells"]} == {""}
    result["difference"]["greedy"]["judge_ok"]["p_value"] = 0.003
    result["difference"]["sampled"]["truncated_fraction"]["p_value"] = 0.0001
    tones = {row["label"]: [cell["tone"] for cell in row["cells"]] for row in evaluation_rows(result, [REWARD_MODEL], 0.95)}
    assert tones["Judge: accepts"] == ["good", ""] and tones["Truncated"] == ["", "bad"] and tones["polite"] == ["", ""]


def test_the_page_says_that_the_judge_chose_the_policy(tmp_path, monkeypatch):
    workspace = make_workspace(tmp_path)
    changed = {"rl.reward.scorers": [REWARD_MODEL, JUDGE | {"weight": 0.0}]}
    apply_overrides(
        workspace / "params.yaml", changed | {"rl.evaluation.every": 10, "rl.evaluation.metric": "judge", "rl.evaluation.keep_best": True}
    )
    both = {"scores": {name: {"mean": 1.0, "low": 0.9, "high": 1.1, "n": 400} for name in ("reward_model", "judge")}}
    same = {"scores": {name: {"value": 0.0, "low": -0.1, "high": 0.1, "p_value": 1.0, "n": 400} for name in ("reward_model", "judge")}}
    for mode in ("greedy", "sampled"):
        edit_metrics(workspace, "evaluate", {f"{mode}.{model}.scores": both["scores"] for model in ("sft", "policy")})
        edit_metrics(workspace, "evaluate", {f"difference.{mode}.scores": same["scores"]})
    curves = pd.read_csv(workspace / "plots/train_policy.csv").assign(score_judge=0.5)
    curves.to_csv(workspace / "plots/train_policy.csv", index=False)
    page = render_in(workspace, monkeypatch)
    assert "The judge selected this policy during training" in page[: page.index("</header>")]
