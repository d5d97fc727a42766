"""Rounds of iterative DPO without running one: the rounds file, hashes, which round is next, verdicts, figures."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import warm_python
from clerk_params import CLERK_PARAMS
from prefect.logging import disable_run_logger
from ruamel.yaml import YAML

from flows.chain.flow import rlhf
from flows.rounds import series as series
from flows.rounds.flow import iterative_dpo
from flows.runs.record import REFUSED
from rlhf_core.config import ConfigError, PromotionConfig, apply_overrides, load_params
from rlhf_core.data.schema import read_rows, write_rows
from rlhf_core.paths import round_folder
from rlhf_core.provenance.file_hashes import dvc_md5
from rlhf_core.provenance.inputs import read_inputs
from rlhf_core.report.rounds import draw, table
from rlhf_core.rounds.pins import BudgetPin, Pin, read_round_stages, read_rounds, write_rounds
from rlhf_core.rounds.promotion import check_budget, next_budget, verdict
from rlhf_core.stage.files import write_json
from rlhf_core.stage.scratch import read_stage_inputs

ROOT = Path(__file__).parents[3]
SFT = Path("models/sft")
JUDGE = {"name": "judge", "kind": "judge", "weight": 1.0, "normalization": "none"}


def md5(text: str) -> str:
    return hashlib.md5(text.encode()).hexdigest()


def prompt(name: str, text: str, *, source: str = "clerk") -> dict:
    """A row of the promotion split."""
    return {"id": name, "source": source, "split": "promotion", "messages": [{"role": "user", "content": text}], "label": None}


def change_promotion(**changes) -> None:
    with Path("params.yaml").open() as file:
        params = YAML(typ="safe", pure=True).load(file)
    params["iterative"]["promotion"] |= changes
    with Path("params.yaml").open("w") as file:
        YAML(typ="safe", pure=True).dump(params, file)


@pytest.fixture
def workspace(tmp_path, monkeypatch) -> Path:
    """A git repository with what rounds begin with: prompts, models, a passed gate."""
    for name in ("rounds/dvc.yaml", "rounds/rounds.yaml", ".gitignore"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text())
    params = YAML(typ="safe", pure=True).load(CLERK_PARAMS.read_text())
    params["iterative"]["sampling"]["prompts"] = 4
    params["iterative"]["promotion"]["prompts"] = 3
    with (tmp_path / "params.yaml").open("w") as file:
        YAML(typ="safe", pure=True).dump(params, file)
    for model in ("sft", "reward", "policy"):
        (tmp_path / "models" / model).mkdir(parents=True)
        (tmp_path / "models" / model / "weights").write_text(model)
    write_json(tmp_path / "metrics/gate.json", {"passed": True, "message": "fine"})
    rows = [{"id": f"p{i}", "source": "clerk", "split": "train", "messages": [], "label": None} for i in range(10)]
    rows += [prompt(f"c{i}", f"Question {i}?") for i in range(3)]
    write_rows(tmp_path / "data/prepared", "prompt", rows)
    write_json(tmp_path / "data/prepared/sources.json", {"clerk": {"judge": "clerk"}, "mine": {"judge": None}})
    name = ("-c", "user.name=A", "-c", "user.email=a@example.org")
    for command in (["init", "--quiet"], [*name, "commit", "--quiet", "--allow-empty", "-m", "The project"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def finish(workspace: Path, number: int, *, accepted: bool, trained: bool = True) -> None:
    """As if the round's stages had run."""
    folder = workspace / round_folder(number)
    (folder / "policy").mkdir(parents=True)
    (folder / "policy" / "weights").write_text(f"round {number}")
    write_json(folder / "metrics" / "evaluate.json", {"round": number, "accepted": accepted, "trained": trained})
    lock = {"stages": {f"evaluate_round@{n}": {} for n in range(1, number + 1)}}
    with (workspace / "rounds/dvc.lock").open("w") as file:
        YAML(typ="safe", pure=True).dump(lock, file)


def test_hashes_are_those_of_dvc(tmp_path):
    (tmp_path / "folder/b").mkdir(parents=True)
    (tmp_path / "folder/b/x").write_text("one")
    (tmp_path / "folder/a").write_text("two")
    assert dvc_md5(tmp_path / "folder/a") == md5("two")
    listing = f'[{{"md5": "{md5("two")}", "relpath": "a"}}, {{"md5": "{md5("one")}", "relpath": "b/x"}}]'
    assert dvc_md5(tmp_path / "folder") == md5(listing) + ".dir"
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    for command in (["init", "--quiet"], ["add", "--quiet", "folder"]):
        warm_python.run([sys.executable, "-m", "dvc", *command], cwd=tmp_path, check=True)
    assert dvc_md5(tmp_path / "folder") in (tmp_path / "folder.dvc").read_text()


def test_rounds_follow_each_other_from_the_last_accepted_policy(workspace):
    params = load_params("params.yaml")
    assert read_rounds() == {} and series.current_round(workspace, params, start=SFT, last=1) == 1
    assert series.current_round(workspace, params, start=SFT, last=1) == 1  # it isn't finished
    finish(workspace, 1, accepted=True)
    assert series.current_round(workspace, params, start=SFT, last=1) is None
    assert series.current_round(workspace, params, start=SFT, last=3) == 2
    finish(workspace, 2, accepted=False)
    assert series.current_round(workspace, params, start=SFT, last=3) == 3
    rounds = read_rounds()
    assert [entry.policy.path for entry in rounds.values()] == ["models/sft", "rounds/1/policy", "rounds/1/policy"]
    assert [entry.origin.path for entry in rounds.values()] == ["models/sft"] * 3
    assert [(entry.prompts.first, entry.prompts.count) for entry in rounds.values()] == [(0, 4), (4, 4), (8, 4)]
    assert len({entry.prompts.sha256 for entry in rounds.values()}) == 3
    log = subprocess.run(["git", "log", "--format=%s"], cwd=workspace, check=True, capture_output=True, text=True).stdout
    assert log.splitlines()[0] == "Begin round 3 from rounds/1/policy"


def test_a_retried_run_ends_where_it_would_have_ended(workspace):
    params = load_params("params.yaml")
    assert series.last_round_of_run(workspace, "one", 2) == 2
    series.current_round(workspace, params, start=SFT, last=2)
    assert series.last_round_of_run(workspace, "other", 2) == 2  # the unfinished round counts
    finish(workspace, 1, accepted=True)
    assert series.last_round_of_run(workspace, "one", 2) == 2
    assert series.last_round_of_run(workspace, "later", 2) == 3


def test_a_round_that_dvc_has_not_recorded_is_not_finished(workspace):
    series.current_round(workspace, load_params("params.yaml"), start=SFT, last=1)
    write_json(workspace / "rounds/1/metrics/evaluate.json", {"accepted": True})
    assert not series.is_finished(workspace, 1)


def test_a_round_refuses_inputs_that_it_did_not_begin_with(workspace):
    series.current_round(workspace, load_params("params.yaml"), start=SFT, last=1)
    entry = read_rounds()[1]
    entry.check(1)
    (workspace / "models/reward/weights").write_text("another")
    with pytest.raises(ValueError, match=r"models/reward: expected what round 1 began with, md5 \w+\.dir, got \w+\.dir; restore it"):
        entry.check(1)
    (workspace / "metrics/gate.json").unlink()
    with pytest.raises(ValueError, match=r"metrics/gate.json: .* got nothing"):
        entry.check(1)


def test_the_reward_model_must_have_passed_its_gate(workspace):
    params = load_params("params.yaml")
    series.check_reward_model(workspace, params)
    write_json(workspace / "metrics/gate.json", {"passed": False, "message": "accuracy 0.6", "override": None})
    with pytest.raises(ConfigError, match=r"passed its gate, got one that didn't \(accuracy 0.6\); make it pass, or use scorers"):
        series.check_reward_model(workspace, params)


def test_the_rounds_file_is_read_as_it_was_written_and_a_broken_one_refused(workspace):
    series.current_round(workspace, load_params("params.yaml"), start=SFT, last=1)
    rounds = read_rounds()
    write_rounds(rounds)
    assert read_rounds() == rounds
    write_rounds({2: rounds[1]})
    with pytest.raises(ConfigError, match=r"expected rounds 1, 2, 3 and so on, got \[2\]"):
        read_rounds()
    Path("rounds/rounds.yaml").write_text("rounds: {'1': {policy: models/sft}}")
    with pytest.raises(ConfigError, match="expected an entry for each round"):
        read_rounds()


def test_a_series_continues_after_its_ninth_round(workspace):
    """YAML sorts names as text: 10 stands before 2."""
    params = load_params("params.yaml")
    for number in range(1, 13):
        assert series.current_round(workspace, params, start=SFT, last=12) == number
        finish(workspace, number, accepted=number % 4 == 0)
    rounds = read_rounds()
    assert list(rounds) == list(range(1, 13)) and rounds[12].policy.path == "rounds/8/policy"
    assert [b.comparison for b in budgets()] == list(range(1, 13))


def test_a_stage_of_a_round_knows_its_work_by_what_the_round_began_with(workspace):
    params = load_params("params.yaml")
    series.current_round(workspace, params, start=SFT, last=1)
    stages = read_round_stages(1)
    assert list(stages) == [f"{stage}@1" for stage in series.STAGES]
    assert stages["train_round@1"]["outs"] == ["rounds/1/policy"] and "models/sft" in stages["train_round@1"]["deps"]
    for path in stages["train_round@1"]["deps"]:
        (workspace / path).parent.mkdir(parents=True, exist_ok=True)
        if not (workspace / path).exists():
            (workspace / path).write_text("there")
    first = read_stage_inputs("train_round@1", 1).fingerprint
    assert read_stage_inputs("train_round@1", 1).fingerprint == first
    rounds = read_rounds()
    other = rounds[1].model_copy(update={"gate": Pin(path="metrics/gate.json", md5="0")})
    write_rounds({1: other})
    assert read_stage_inputs("train_round@1", 1).fingerprint != first


def budgets() -> list[BudgetPin]:
    return [entry.budget for entry in read_rounds().values()]


def test_a_comparison_spends_its_level_unless_it_accepts_and_a_refused_round_spends_nothing(workspace):
    params = load_params("params.yaml")
    even = 0.8 * 0.05 / 30
    for number, (accepted, trained) in enumerate([(False, True), (False, False), (True, True), (True, True), (False, True)], start=1):
        series.current_round(workspace, params, start=SFT, last=9)
        series.current_round(workspace, params, start=SFT, last=9)  # one that crashed is found again, and spends nothing more
        finish(workspace, number, accepted=accepted, trained=trained)
    series.current_round(workspace, params, start=SFT, last=9)
    assert [b.comparison for b in budgets()] == [1, 2, 2, 3, 4, 5]
    assert [b.level for b in budgets()] == pytest.approx([even, even, even, 2 * even, 3 * even, even])
    assert [b.spent for b in budgets()] == pytest.approx([0, even, even, even, even, 4 * even])


def test_a_verdict_changed_after_later_rounds_started_is_refused(workspace):
    params = load_params("params.yaml")
    for number in (1, 2):
        series.current_round(workspace, params, start=SFT, last=9)
        finish(workspace, number, accepted=False)
    write_json(workspace / "rounds/1/metrics/evaluate.json", {"round": 1, "accepted": True, "trained": True})
    with pytest.raises(ConfigError, match=r"round 1: expected the outcome kept, as when it ended \(in .*jsonl\), got accepted; .* restore"):
        series.current_round(workspace, params, start=SFT, last=9)


def test_a_changed_budget_of_a_round_is_refused(workspace):
    params = load_params("params.yaml")
    series.current_round(workspace, params, start=SFT, last=9)
    finish(workspace, 1, accepted=False)
    entry = read_rounds()[1]
    write_rounds({1: entry.model_copy(update={"budget": entry.budget.model_copy(update={"level": 0.04})})})
    with pytest.raises(ConfigError, match=r"round 1: expected the budget that its comparison began with, comparison 1 at level 0\.001333"):
        series.current_round(workspace, params, start=SFT, last=9)


def second_worktree(workspace: Path, name: str) -> Path:
    """Another worktree of the repository, with the same inputs."""
    other = workspace / "runs" / name
    subprocess.run(["git", "worktree", "add", "--quiet", "-b", f"run/{name}", str(other)], cwd=workspace, check=True, capture_output=True)
    for part in ("params.yaml", "data", "models", "metrics"):
        (shutil.copytree if (workspace / part).is_dir() else shutil.copy)(workspace / part, other / part)
    (other / "rounds").mkdir(exist_ok=True)
    for part in ("rounds/dvc.yaml", "rounds/rounds.yaml"):
        (other / part).write_text((ROOT / part).read_text())
    return other


def test_a_series_in_another_worktree_continues_the_error_budget_and_says_so(workspace, caplog):
    change_promotion(rounds=1)
    params = load_params("params.yaml")
    second = second_worktree(workspace, "second")
    series.current_round(workspace, params, start=SFT, last=9)
    finish(workspace, 1, accepted=False)
    with caplog.at_level("INFO", logger="rlhf.flows"):
        series.current_round(second, params, start=SFT, last=9)
    (budget,) = (entry.budget for entry in read_rounds(second).values())
    assert (budget.comparison, budget.level, budget.spent) == (2, pytest.approx(0.005), pytest.approx(0.04))
    assert "comparison 2 of all that improve sft of the built-in model, at level 0.005" in caplog.text
    assert f"other series ({workspace.name}) have spent 0.04 of the error budget 0.05" in caplog.text
    series.forget_unmade(second)  # its comparison wasn't made
    series.current_round(workspace, params, start=SFT, last=9)
    assert budgets()[1] == budget


def test_a_series_from_before_the_error_budget_is_refused_with_what_to_do(workspace):
    series.current_round(workspace, load_params("params.yaml"), start=SFT, last=1)
    tree = YAML(typ="safe", pure=True).load(Path("rounds/rounds.yaml").read_text())
    del tree["rounds"]["1"]["budget"]
    with Path("rounds/rounds.yaml").open("w") as file:
        YAML(typ="safe", pure=True).dump(tree, file)
    with pytest.raises(ConfigError, match="got rounds that were judged without one; begin another series"):
        read_rounds()


def test_too_few_promotion_prompts_are_refused_before_the_round_begins(workspace):
    change_promotion(prompts=4)
    rows = [prompt(f"c{i}", f"Question {i}?") for i in range(3)] + [prompt("c3", " question  2?")]  # which is none more
    write_rows(workspace / "data/prepared", "prompt", [*read_rows(workspace / "data/prepared", "prompt", "train"), *rows])
    expected = (
        r"iterative\.promotion\.prompts: expected at most the 3 different prompts of the promotion split, got 4; lower it, or raise data"
    )
    with pytest.raises(ConfigError, match=expected):
        series.current_round(workspace, load_params("params.yaml"), start=SFT, last=1)
    assert read_rounds() == {}


def test_a_judge_that_decides_must_know_every_promotion_prompt_before_the_round_begins(workspace):
    """Prompts without a judge would only leave the comparison with fewer, and nobody would be told."""
    change_promotion(metric="judge")
    series.check_promotion_split(workspace, load_params("params.yaml"))
    rows = [*read_rows(workspace / "data/prepared", "prompt"), prompt("m0", "Another?", source="mine")]
    write_rows(workspace / "data/prepared", "prompt", rows)
    expected = (
        r"iterative\.promotion\.metric: expected a judge for every source of the promotion split, got none for \['mine'\]; set win_rate"
    )
    with pytest.raises(ConfigError, match=expected):
        series.current_round(workspace, load_params("params.yaml"), start=SFT, last=1)
    assert read_rounds() == {}
    change_promotion(metric="win_rate")
    series.check_promotion_split(workspace, load_params("params.yaml"))


def test_an_empty_first_round_restarts_with_other_params(workspace):
    """A stage may refuse what the round began with: prompts too long for the policy's template, say."""
    series.current_round(workspace, load_params("params.yaml"), start=SFT, last=1)
    series.forget_unmade(workspace)
    assert read_rounds() == {}
    assert subprocess.run(["git", "status", "--porcelain", "rounds/rounds.yaml"], check=True, capture_output=True, text=True).stdout == ""
    assert series.current_round(workspace, load_params("params.yaml"), start=SFT, last=1) == 1
    (workspace / "rounds/1/data").mkdir(parents=True)
    (workspace / "rounds/1/data/preference.parquet").write_text("pairs")
    series.forget_unmade(workspace)
    assert list(read_rounds()) == [1]


PROMOTION = {"prompts": 1000, "error_budget": 0.05, "rounds": 30, "min_advantage": 0.0}
BY_WINS, BY_JUDGE = (PromotionConfig(metric=metric, **PROMOTION) for metric in ("win_rate", "judge"))
FIRST = next_budget(None, accepted=False, error_budget=0.05, rounds=30)


def wins(ahead: int, behind: int, n: int = 1000) -> dict:
    """Figures of a round whose policy is ahead on so many of n prompts and behind on so many."""
    share = (ahead - behind) / n
    rate = {"value": 0.5 + share / 2, "low": 0.4, "high": 0.7, "wins": ahead, "losses": behind, "ties": n - ahead - behind, "n": n}
    judged = {
        "value": share,
        "low": -0.1,
        "high": 0.2,
        "first_only": ahead,
        "second_only": behind,
        "both": n - ahead - behind,
        "neither": 0,
    }
    return {"win_rate": {"sampled": rate}, "judge_difference": {"sampled": judged}}


@pytest.mark.parametrize("config", [BY_WINS, BY_JUDGE], ids=["win_rate", "judge"])
def test_a_policy_is_accepted_by_an_exact_test_at_the_level_of_its_round(config):
    # 12 of 12 is 2^-12 = 0.00024, below 0.00133; too few all the same. P(X >= 35 of 50) = 0.0033 and P(X >= 36 of 50) = 0.0013
    assert not verdict(wins(12, 0), config, FIRST)["accepted"]
    assert "too few decided comparisons, 12 of at least 20" in verdict(wins(12, 0), config, FIRST)["reason"]
    kept, not_kept = verdict(wins(36, 14), config, FIRST), verdict(wins(35, 15), config, FIRST)
    assert kept["accepted"] and not not_kept["accepted"]
    assert kept["promotion"]["split"] == "promotion" and kept["promotion"]["p_value"] == pytest.approx(0.0013011, abs=1e-6)
    assert kept["promotion"]["spent"] == 0 and not_kept["promotion"]["spent"] == pytest.approx(0.04 / 30)
    assert "ahead on 35, behind on 15; its p-value, 0.0033, is above the level 0.0013 of comparison 1; spent of" in not_kept["reason"]
    later = next_budget(FIRST, accepted=True, error_budget=0.05, rounds=30)
    assert (
        verdict(wins(35, 15), config, later)["accepted"] is False and verdict(wins(36, 14), config, later)["promotion"]["comparison"] == 2
    )


@pytest.mark.parametrize("config", [BY_WINS, BY_JUDGE], ids=["win_rate", "judge"])
def test_a_policy_that_is_not_accepted_says_how_many_prompts_would_show_its_gain(config):
    not_shown = verdict(wins(60, 40), config, FIRST)
    needed = not_shown["promotion"]["prompts_needed"]
    assert f"about {needed} prompts would find a gain of this size with 80%" in not_shown["reason"]
    assert 2500 < needed < 4000  # (3.00 sqrt(0.1) + 0.84 sqrt(0.0996))^2 / 0.02^2 = 3690
    assert verdict(wins(35, 15), config, FIRST)["promotion"]["prompts_needed"] > 1000  # nearly shown: more than there were
    assert "about" in verdict(wins(9, 4), config, FIRST)["reason"]  # too few decided
    for shown in (verdict(wins(40, 60), config, FIRST), verdict(wins(50, 50), config, FIRST), verdict(wins(600, 100), config, FIRST)):
        assert shown["promotion"]["prompts_needed"] is None and "about" not in shown["reason"]


def test_a_comparison_of_no_scores_accepts_nothing():
    rate = dict.fromkeys(("value", "low", "high"), float("nan")) | dict.fromkeys(("wins", "losses", "ties", "n"), 0)
    found = verdict({"win_rate": {"sampled": rate}}, BY_WINS, FIRST)
    assert not found["accepted"] and found["promotion"]["prompts_needed"] is None and "too few decided" in found["reason"]


def test_a_minimum_advantage_is_in_points_of_the_metric():
    # 600 against 400: win rate 0.6. A gain of more than 0.03 can be shown, of more than 0.06 it can't.
    low, high = (BY_WINS.model_copy(update={"min_advantage": bar}) for bar in (0.03, 0.06))
    assert verdict(wins(600, 400), low, FIRST)["accepted"] and not verdict(wins(600, 400), high, FIRST)["accepted"]
    by_judge = BY_JUDGE.model_copy(update={"min_advantage": 0.06})
    assert verdict(wins(600, 400), by_judge, FIRST)["accepted"]  # 20 points more are accepted by the judge
    assert 'its p-value for "no more than iterative.promotion.min_advantage=0.06", ' in verdict(wins(600, 400), high, FIRST)["reason"]


def test_an_entry_that_spends_more_than_the_budget_is_refused():
    check_budget(FIRST, 0.05)
    check_budget(BudgetPin(comparison=3, level=0.05 - 0.02, spent=0.02), 0.05)
    with pytest.raises(ValueError, match=r"expected at most what 0\.02 spent leave of .*error_budget=0\.05, got a level of 0\.04; restore"):
        check_budget(BudgetPin(comparison=3, level=0.04, spent=0.02), 0.05)


def test_a_series_without_gain_rarely_accepts_anything():
    """Each by the rule that is in use: 200 series of 30 rounds, half of the prompts decided by a fair coin. By a 95% interval of its own
    each round accepts one in forty, and half of such series something.
    """
    rng = np.random.default_rng(0)
    ever = 0
    for _ in range(200):
        budget, found = FIRST, []
        for ahead in rng.binomial(200, 0.5, size=30):
            found.append(verdict(wins(int(ahead), 200 - int(ahead), n=400), BY_WINS, budget)["accepted"])
            budget = next_budget(budget, accepted=found[-1], error_budget=0.05, rounds=30)
        ever += any(found)
    assert ever <= 20  # binomial(200, 0.05) is above with a chance of 0.0006


def finished_round(number: int, *, accepted: bool, trained: bool = True) -> dict:
    row = {"round": number, "before": "models/sft", "accepted": accepted, "trained": trained, "reason": f"reason {number}"}
    row["samples"] = {"pairs": 9}
    if trained:
        for mode in ("sampled", "greedy"):
            row[mode] = {name: {"judge_ok": 0.4 + 0.1 * number, "score_mean": 1.0} for name in ("before", "after")}
        row["win_rate"] = {"sampled": {"value": 0.6, "low": 0.55, "high": 0.65}}
        row["kl"] = {"before": 0.5, "origin": 1.5}
        row["promotion"] = {"p_value": 0.00042, "level": 0.0013, "spent": 0.0027, "smallest_gain": 0.043}
    return row


def test_table_and_figure_show_every_round(tmp_path):
    rows = [finished_round(1, accepted=True), finished_round(2, accepted=False), finished_round(3, accepted=False, trained=False)]
    text = table(rows)
    for words in (
        "accepted",
        "not better",
        "refused",
        "0.600 (0.550 to 0.650)",
        "0.00042",
        "0.0013",
        "0.0027",
        "0.043",
        "- Round 2: reason 2",
    ):
        assert words in text
    rows[0]["promotion"] = rows[0]["promotion"] | {"p_value": 0.0}
    assert "below 1e-6" in table(rows)
    draw(rows, tmp_path / "rounds.svg")
    first = (tmp_path / "rounds.svg").read_bytes()
    draw(rows, tmp_path / "rounds.svg")
    assert (tmp_path / "rounds.svg").read_bytes() == first
    draw(rows[2:], tmp_path / "refused.svg")


def test_a_round_without_scores_is_shown_all_the_same(tmp_path):
    rows = [finished_round(1, accepted=False), finished_round(2, accepted=False)]
    rows[0]["win_rate"] = {"sampled": {"value": None, "low": None, "high": None}}
    rows[0]["sampled"]["after"] = {"judge_ok": 0.5, "score_mean": None}
    assert [cell.strip() for cell in table(rows).splitlines()[2].split("|")][6:8] == ["1.00 -> none", "none"]
    draw(rows, tmp_path / "rounds.svg")
    draw(rows[:1], tmp_path / "rounds.svg")


def test_scorers_of_rounds_that_lack_what_they_need_are_refused_before_anything_is_made(workspace):
    overrides = {"reward.enabled": False, "rl.algorithm": "grpo", "rl.reward.scorers": [JUDGE]}
    with pytest.raises(ConfigError, match="expected none of kind reward_model without a path"):
        series.prepare_series(workspace, "rounds", overrides)
    assert not (workspace / "runs").exists()


def test_a_series_with_changed_data_is_not_continued(workspace):
    for name in ("dvc.yaml", ".dvc/config"):
        (workspace / name).parent.mkdir(exist_ok=True)
        (workspace / name).write_text((ROOT / name).read_text())
    external = {"name": "hard", "path": "pairs.jsonl", "format": "preference", "columns": {}, "subset": None, "min_accuracy": None}
    apply_overrides(Path("params.yaml"), {"gate.external": [external]})
    pairs = workspace / "pairs.jsonl"
    pairs.write_text("one\n")
    name = ("-c", "user.name=A", "-c", "user.email=a@example.org")
    for command in (["add", "params.yaml", "dvc.yaml", "rounds", ".gitignore", ".dvc"], [*name, "commit", "-qm", "All"]):
        subprocess.run(["git", *command], cwd=workspace, check=True)
    subprocess.run(["git", "worktree", "add", "-q", "-b", "run/s", "runs/s"], cwd=workspace, check=True)
    worktree = workspace / "runs/s"
    params = load_params(worktree / "params.yaml")
    write_rounds({1: series.new_round(workspace, {}, params, SFT)}, worktree)
    (worktree / "rounds/1/policy").mkdir(parents=True)
    (worktree / "rounds/1/policy/weights").write_text("made")
    read = read_inputs(params, worktree)
    stages = {"gate_reward": {"params": {"data/inputs.json": {"external": read["external"]}}}}
    write_json(worktree / "dvc.lock", {"stages": stages})
    assert series.prepare_series(workspace, "s", {}).workspace == worktree
    pairs.write_text("mended\n")
    with pytest.raises(
        ConfigError, match=r"got others; restore them(.|\n)*gate.external.hard: pairs.jsonl changed: 4 bytes, sha256 .* -> 7"
    ):
        series.prepare_series(workspace, "s", {})
    (worktree / "rounds/1/policy/weights").unlink()
    assert series.prepare_series(workspace, "s", {}).workspace == worktree and read_rounds(worktree) == {}


@pytest.mark.parametrize("started", [rlhf, iterative_dpo], ids=lambda flow: flow.name)
def test_a_run_of_a_deployment_takes_recipes_over_each_other_and_its_overrides_over_all(workspace, started):
    (workspace / "base.yaml").write_text("{iterative: {steps: 0, learning_rate: 1.0, min_margin: -7.0}}")
    (workspace / "recipe.yaml").write_text("{iterative: {learning_rate: -1.0}}")
    with disable_run_logger():
        refused = started.fn({"iterative.steps": 5}, recipes=["base.yaml", "recipe.yaml"])
        missing = started.fn(recipes=["no-recipe.yaml"])
    assert refused.name == missing.name == REFUSED
    assert "iterative.learning_rate" in refused.message and "iterative.min_margin" in refused.message
    assert "iterative.steps" not in refused.message
    assert "no-recipe.yaml" in missing.message and not (workspace / "runs/iterative-dpo").exists()
    assert "recipes" in started.parameters.properties  # of the deployment's form
