"""The list of runs, what is shown of one, and what deleting one spares. Git and its worktrees are the real ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from own_project import commit, make_project
from registry_tags import sound_lineage, write_tag

from flows import compare
from flows.chain.command_line import REFUSED
from flows.chain.execute import outcome_of
from flows.chain.locks import only_flow
from flows.chain.prepare import prepare_workspace
from flows.chain.worktree import git
from flows.full_pipeline import main
from flows.runs import __main__ as runs
from flows.runs.record import GATE_REJECTED, note, recording

ROOT = Path(__file__).parents[3]
OURS = {**os.environ, "PYTHONPATH": str(ROOT)}  # this checkout's code in another folder
GATE = {"needed": True, "passed": True, "accuracy": 0.87, "low": 0.85, "threshold": 0.8, "override": None, "message": "passed"}
EVALUATION = {"sampled": {"sft": {"judge_ok": 0.4}, "policy": {"judge_ok": 0.7}}}
STAGES = ("prepare_data", "validate_data", "check_model", "train_sft", "train_reward", "gate_reward", "train_policy", "evaluate", "report")


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    folder = make_project(tmp_path / "project")
    monkeypatch.chdir(folder)
    return folder


def finish(run: Path, stages: tuple[str, ...] = STAGES, **gate: object) -> None:
    """What a run leaves that has come so far."""
    entries = "".join(f"  {stage}:\n    cmd: python -m tasks.{stage}\n" for stage in stages)
    (run / "dvc.lock").write_text(f"schema: '2.0'\nstages:\n{entries}")
    (run / "metrics").mkdir(exist_ok=True)
    (run / "metrics/gate.json").write_text(json.dumps(GATE | gate))
    (run / "metrics/evaluate.json").write_text(json.dumps(EVALUATION))
    commit(run, f"Results of run {run.name}")


def listed(capsys) -> dict[str, dict]:
    assert runs.main(["list", "--json"]) == 0
    return {run["name"]: run for run in json.loads(capsys.readouterr().out)}


def test_a_list_says_what_became_of_each_run(project, capsys):
    assert runs.main(["list"]) == 0 and "No runs" in capsys.readouterr().out
    for name in ("done", "rejected", "killed", "working", "branch"):
        finish(prepare_workspace(project, name, {"alignment.method": "dpo"} if name == "done" else {"seed": 7}))
    note(project / "runs/done", outcome="done")
    note(project / "runs/rejected", outcome=GATE_REJECTED, stage="gate_reward", message="too bad")
    for name in ("killed", "working"):
        note(project / "runs" / name, outcome="running", stage="train_policy")
    git(project, "worktree", "remove", "--force", "runs/branch")
    with only_flow(project, "working"):
        found = listed(capsys)
        runs.main(["list"])
        table = capsys.readouterr().out
    reported = {"done": "done", "rejected": GATE_REJECTED, "killed": "killed", "working": "running", "branch": "done"}
    assert {name: run["outcome"] for name, run in found.items()} == reported
    assert found["working"]["process"] == str(os.getpid()) and found["killed"]["stage"] == "train_policy"
    assert [found[name]["method"] for name in ("done", "branch")] == ["dpo", "rl ppo"]
    assert {name: (run["gate_accuracy"], run["before"], run["after"]) for name, run in found.items()} == {
        "done": (0.87, 0.4, 0.7),
        "branch": (0.87, 0.4, 0.7),
        "rejected": (0.87, None, None),  # the evaluation is of an earlier time
        "killed": (0.87, None, None),
        "working": (0.87, None, None),
    }
    assert found["branch"]["folder"] is None and found["branch"]["size"] == 0 < found["done"]["size"]
    for words in ("running at train_policy", "gate rejected", "killed at train_policy", "0.40 -> 0.70", "branch only", "5 runs"):
        assert words in table


@pytest.mark.parametrize(
    ("stages", "gate", "outcome", "stage"),
    [
        ((), {}, "not begun", None),
        (STAGES[:4], {}, "interrupted", "train_reward"),
        (STAGES[:5], {"passed": False}, GATE_REJECTED, "gate_reward"),
        (STAGES, {"passed": False, "override": "a demonstration"}, "done", "report"),
    ],
)
def test_a_run_without_a_record_gets_its_state_from_dvc(project, capsys, stages, gate, outcome, stage):
    run = prepare_workspace(project, "one", {"seed": 7})
    if stages:
        finish(run, stages, **gate)
    found = listed(capsys)["one"]
    assert (found["outcome"], found["stage"]) == (outcome, stage)


def test_fifty_runs_are_listed_in_two_seconds_without_prefect_and_torch(project):
    finish(prepare_workspace(project, "run-0", {"seed": 7}))
    for number in range(1, 50):
        git(project, "worktree", "add", "--quiet", "-b", f"run/run-{number}", f"runs/run-{number}", "run/run-0")
    program = (
        "import resource, sys; from flows.runs.__main__ import main; main(['list']); used = resource.getrusage(resource.RUSAGE_SELF); "
        "kids = resource.getrusage(resource.RUSAGE_CHILDREN); print(used.ru_utime + used.ru_stime + kids.ru_utime + kids.ru_stime); "
        "print(sorted({'prefect', 'torch', 'pandas', 'dvc'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=OURS)
    *table, seconds, loaded = done.stdout.splitlines()
    assert len([line for line in table if line.startswith("run-")]) == 50 and loaded == "[]"
    assert float(seconds) < 2.0  # of computing time, on a busy machine


def test_show_has_params_stages_and_registered_versions(project, capsys):
    run = prepare_workspace(project, "one", {"seed": 7, "rl.algorithm": "grpo"})
    finish(run)
    note(run, outcome="failed", stage="train_policy", message="train_policy: no room")
    assert runs.main(["show", "one", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {(c["key"], c["default"], c["run"]) for c in found["params"]} == {("seed", 0, 7), ("rl.algorithm", "ppo", "grpo")}
    assert [s["state"] for s in found["stages"] if s["stage"] == "train_policy"] == ["failed"]
    assert runs.main(["show", "one"]) == 0
    by_position = capsys.readouterr().out
    assert runs.main(["show", "--run", "one"]) == 0 and capsys.readouterr().out == by_position
    assert runs.main(["show", "one"]) == 0
    reported = capsys.readouterr().out
    for words in ("failed at train_policy: train_policy: no room", "rl.algorithm", '"ppo"', '"grpo"', "run/one at ", "runs/one, "):
        assert words in reported
    assert runs.main(["show", "two"]) == REFUSED and "there are one" in capsys.readouterr().err


def test_delete_takes_worktree_branch_and_lock_and_says_what_stays(project, capsys):
    for name in ("one", "two"):
        finish(prepare_workspace(project, name, {"seed": 7}))
    (project / "runs/one/scratch/big").mkdir(parents=True)
    with only_flow(project, "one"):
        pass
    assert runs.main(["delete", "one"]) == 0
    printed = capsys.readouterr().out
    assert "Deleted run one: runs/one and run/one" in printed and "dvc gc --workspace --all-branches --all-tags" in printed
    assert sorted(path.name for path in (project / "runs").iterdir()) == ["two"]
    assert git(project, "branch", "--list", "run/*").split()[-1] == "run/two"
    with only_flow(project, "one"):  # a run of that name may begin anew
        assert prepare_workspace(project, "one", {"seed": 9}).exists()


def test_delete_is_refused_where_a_flow_works_or_something_would_be_lost(project, capsys):
    run, other = (prepare_workspace(project, name, {"seed": 7}) for name in ("one", "two"))
    with (run / "params.yaml").open("a") as file:
        file.write("# mine\n")
    (run / "mine.py").write_text("mine = 1\n")
    with subprocess.Popen([sys.executable, "-c", "input()"], cwd=run, stdin=subprocess.PIPE) as user:
        assert runs.main(["delete", "two", "one"]) == REFUSED and run.exists() and other.exists()
        printed = capsys.readouterr().err
        assert (
            "run one: expected all committed, got params.yaml, mine.py" in printed
            and f"process {user.pid}" in printed
            and "--force" in printed
        )
        user.communicate(b"\n")
    commit(run, "Work of mine")
    assert runs.main(["delete", "one"]) == REFUSED and "Work of mine" in capsys.readouterr().err
    program = (
        "import pathlib; from flows.chain.locks import only_flow; held = only_flow(pathlib.Path(), 'one'); held.__enter__(); "
        "print(flush=True); input()"
    )
    how = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "cwd": project, "env": OURS}
    with subprocess.Popen([sys.executable, "-c", program], **how) as flow:
        flow.stdout.readline()
        started = time.monotonic()
        assert runs.main(["delete", "--force", "one"]) == REFUSED and f"process {flow.pid}" in capsys.readouterr().err
        assert time.monotonic() - started < 10 and run.exists()
        flow.communicate(b"\n")
    git(project, "branch", "kept", "run/one")  # then nothing is lost
    assert runs.main(["delete", "one"]) == 0 and not run.exists()
    assert runs.main(["delete", "nowhere"]) == REFUSED and "there are two" in capsys.readouterr().err
    (other / "mine.py").write_text("mine = 1\n")
    assert runs.main(["delete", "--force", "two"]) == 0 and not other.exists()


def test_uncommitted_results_of_a_stopped_run_do_not_count_but_changed_params_and_files_beside_them_do(project, capsys):
    run = prepare_workspace(project, "one", {"seed": 7})
    results = ("dvc.lock", "data/inputs.json", "metrics/prepare_data.json", "plots/token_lengths.csv", "baselines.json")
    own = ("metrics/mine.json", "plots/mine ü.csv", "data/mine.jsonl")
    for name in (*results, *own):
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).write_text("{}\n")
    assert runs.main(["delete", "one"]) == REFUSED and run.exists()
    assert "expected all committed, got data/mine.jsonl, metrics/mine.json, plots/mine ü.csv; save" in capsys.readouterr().err
    for name in own:
        (run / name).unlink()
    params = (run / "params.yaml").read_text()
    (run / "params.yaml").write_text(f"{params}# mine\n")
    assert runs.main(["delete", "one"]) == REFUSED and "expected all committed, got params.yaml; save" in capsys.readouterr().err
    (run / "params.yaml").write_text(params)
    assert runs.main(["delete", "one"]) == 0 and not run.exists()


def test_a_version_of_a_deleted_run_stays_with_its_commit(project, capsys):
    run = prepare_workspace(project, "one", {"seed": 7})
    finish(run)
    head = git(run, "rev-parse", "HEAD")
    write_tag(project, "reward-model@v1.0.0", sound_lineage(head, run="run/one"), head)
    assert runs.main(["delete", "one"]) == 0
    assert "reward-model v1.0.0: tags keep their commits" in capsys.readouterr().out
    assert git(project, "cat-file", "-t", head) == "commit" and git(project, "tag", "--list") == "reward-model@v1.0.0"


def test_a_run_that_ended_early_has_no_figures_and_no_report_of_an_earlier_time(project, capsys):
    run = prepare_workspace(project, "one", {"seed": 7})
    finish(run)
    (run / "reports").mkdir()
    (run / "reports/report.html").write_text("<p>of an earlier time</p>")
    expected = {None: (0.87, 0.7, "done"), "gate_reward": (0.87, None, "done up to gate_reward")}
    expected |= {name: (None, None, f"done up to {name}") for name in ("train_sft", "hash_inputs")}
    for until, (gate, after, reported) in expected.items():
        with recording(run):
            note(run, **outcome_of(None, until))
        found = listed(capsys)["one"]
        assert (found["gate_accuracy"], found["after"], found["until"], found["outcome"]) == (gate, after, until, "done")
        assert runs.main(["list"]) == 0 and reported in capsys.readouterr().out
        assert runs.main(["show", "one", "--json"]) == 0
        assert (json.loads(capsys.readouterr().out)["report"] is None) == (until is not None)
    with recording(run):
        note(run, stage="train_policy")
    note(run, outcome="failed")
    assert listed(capsys)["one"]["until"] is None


@pytest.mark.parametrize("stage", [None, "hash_inputs"])
def test_a_run_that_was_killed_before_its_first_stage_ended_has_no_figures(project, capsys, stage):
    run = prepare_workspace(project, "one", {"seed": 7})
    finish(run)
    note(run, outcome="running", stage=stage)
    found = listed(capsys)["one"]
    assert (found["outcome"], found["gate_accuracy"], found["after"]) == ("killed", None, None)


def test_a_run_of_a_comparison_has_the_figures_of_the_stages_that_it_was_brought_to(project, capsys):
    run = prepare_workspace(project, "one", {"seed": 7})
    finish(run)
    (run / "dvc.yaml").write_text('stages:\n  gate_reward:\n    cmd: "true"\n')
    assert compare._repro(run, "gate_reward") is None
    capsys.readouterr()
    found = listed(capsys)["one"]
    assert (found["outcome"], found["until"], found["gate_accuracy"], found["after"]) == ("done", "gate_reward", 0.87, None)


def test_an_early_end_without_work_hides_what_follows_only_where_that_has_something_to_do(project, capsys):
    (project / "dvc.yaml").write_text(
        "stages:\n  gate_reward:\n    cmd: touch judged\n    params: [model]\n    outs: [judged]\n"
        "  report:\n    cmd: touch told\n    params: [seed]\n    deps: [judged]\n    outs: [told]\n"
    )
    commit(project, "A short chain")
    run = prepare_workspace(project, "one", {"seed": 7})
    assert compare._repro(run, "report") is None
    for overrides, until in (("seed=7", None), ("seed=8", "gate_reward")):
        assert main(["--run", "one", "--update", "--set", overrides, "--until", "gate_reward"]) == 0
        capsys.readouterr()
        assert listed(capsys)["one"]["until"] == until


def test_delete_spares_the_users_commits_on_a_detached_head(project, capsys):
    run = prepare_workspace(project, "one", {"seed": 7})
    git(run, "switch", "--quiet", "--detach")
    (run / "mine.py").write_text("mine = 1\n")
    commit(run, "Detached work")
    assert runs.main(["delete", "one"]) == REFUSED and "Detached work" in capsys.readouterr().err and run.exists()
    git(project, "branch", "kept", git(run, "rev-parse", "HEAD"))
    assert runs.main(["delete", "one"]) == 0


def test_delete_spares_a_commit_that_only_runs_deleted_with_it_have(project, capsys):
    one, two = (prepare_workspace(project, name, {"seed": 7}) for name in ("one", "two"))
    finish(one)
    (one / "mine.py").write_text("mine = 1\n")
    commit(one, "Shared work")
    git(two, "reset", "--quiet", "--hard", "run/one")  # with commits that the pipeline has made for the other run
    assert runs.main(["delete", "one", "two"]) == REFUSED and one.exists() and two.exists()
    printed = capsys.readouterr().err
    assert printed.count("Shared work") == 2 and "got 1 that" in printed and "Results of run" not in printed
    git(project, "branch", "kept", "run/two")
    assert runs.main(["delete", "one", "two"]) == 0


def test_delete_spares_ignored_files_that_no_stage_has_made(project, capsys):
    run = prepare_workspace(project, "one", {"seed": 7})
    finish(run)
    made = ("models/sft/weights", "models/promoted/policy-v1.0.0/weights", "data/prepared/prompt.parquet", "data/reward_heldout.parquet")
    made += (
        "scratch/one/big",
        "tasks/__pycache__/x.pyc",
        "rounds/1/policy/weights",
        "reports/report.html",
        "reports/timings/train_sft.csv",
    )
    users = ("data/mine.parquet", "models/mine/weights", "reports/notes.md", "scratch.txt")
    with (project / ".git/info/exclude").open("a") as file:
        file.write("/scratch.txt\n")
    (run / "rounds/dvc.lock").write_text("stages:\n  train_round@1:\n    outs: [{path: rounds/1/policy}]\n")
    commit(run, "Results of round 1")
    for path in made + users:
        (run / path).parent.mkdir(parents=True, exist_ok=True)
        (run / path).write_text("content")
    assert runs.main(["delete", "one"]) == REFUSED and run.exists()
    assert "expected no ignored files but those of stages, got data/mine.parquet, models/mine/weights, reports/notes.md, scratch.txt;" in (
        capsys.readouterr().err
    )
    for path in users:
        (run / path).unlink()
    assert runs.main(["delete", "one"]) == 0


def test_delete_with_force_still_spares_processes_at_work(project, capsys):
    run = prepare_workspace(project, "one", {"seed": 7})
    with subprocess.Popen([sys.executable, "-c", "input()"], cwd=run, stdin=subprocess.PIPE) as user:
        assert runs.main(["delete", "--force", "one"]) == REFUSED and run.exists()
        printed = capsys.readouterr().err
        assert f"process {user.pid}" in printed and "end it" in printed and "--force" not in printed
        user.communicate(b"\n")
    assert runs.main(["delete", "--force", "one"]) == 0
