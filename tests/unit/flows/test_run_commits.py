"""What a run commits: its params and results, past the user's own files, through the user's own hooks."""

from __future__ import annotations

import logging
import os
import subprocess
import time
from pathlib import Path

import pytest
from clerk_params import CLERK_PARAMS
from own_project import make_project

from flows.chain import worktree
from flows.chain.worktree import commit, commit_results, prepare_worktree
from flows.runs.results import input_paths, result_paths
from rlhf_core.config import ConfigError
from rlhf_core.gate.looks import run_name
from rlhf_core.provenance.dvc_cache import cache_folder

ROOT = Path(__file__).parents[3]
DVC = """\
stages:
  train_sft:
    cmd: "true"
    deps: [work.py, rewards]
    outs: [models/sft]
    metrics: [{metrics/sft.json: {cache: false}}]
    plots: [{plots/sft.csv: {cache: false, x: step}}]
"""
RESULTS = ["dvc.lock", "metrics/sft.json", "params.yaml", "plots/sft.csv"]


def git(folder: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def project(tmp_path) -> Path:
    """A repository with a chain of one stage."""
    folder = tmp_path / "project"
    (folder / "rewards").mkdir(parents=True)
    (folder / "dvc.yaml").write_text(DVC)
    (folder / "params.yaml").write_text(CLERK_PARAMS.read_text())
    (folder / "work.py").write_text("work = 1\n")
    (folder / "rewards/mine.py").write_text("mine = 1\n")
    (folder / ".gitignore").write_text("/models/\n/runs/\n")
    git(folder, "init", "--quiet", "--initial-branch", "main")
    for name, value in (("user.name", "test"), ("user.email", "test@localhost")):
        git(folder, "config", name, value)
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "-m", "A project")
    return folder


def leave_results(folder: Path) -> None:
    """As a run does, with what a user has put beside them."""
    for name in ("dvc.lock", "metrics/sft.json", "plots/sft.csv", "models/sft/weights", ".env", "look.ipynb", "metrics/mine.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"content of {name}")
    with (folder / "params.yaml").open("a") as file:
        file.write("# changed\n")


def add_hook(folder: Path, script: str, name: str = "pre-commit") -> None:
    path = folder / ".git/hooks" / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def committed(folder: Path) -> list[str]:
    return sorted(git(folder, "show", "--name-only", "--format=", "HEAD").splitlines())


def test_a_run_commits_its_params_and_results_and_nothing_of_the_users(project):
    leave_results(project)
    (project / "notes.txt").write_text("staged by hand")
    git(project, "add", "notes.txt")
    commit_results(project, "Results", result_paths(project), input_paths(project))
    assert committed(project) == RESULTS
    left = git(project, "status", "--porcelain").splitlines()
    assert sorted(left) == ["?? .env", "?? look.ipynb", "?? metrics/mine.txt", "A  notes.txt"]


def test_a_result_that_went_is_committed_too_and_nothing_changed_is_no_commit(project):
    leave_results(project)
    assert commit(project, "Results", result_paths(project)) is None
    head = git(project, "rev-parse", "HEAD")
    assert commit(project, "Again", result_paths(project)) is None and git(project, "rev-parse", "HEAD") == head
    (project / "plots/sft.csv").unlink()
    assert commit(project, "Gone", result_paths(project)) is None and committed(project) == ["plots/sft.csv"]


def test_code_that_a_stage_has_read_and_no_commit_has_is_named(project, caplog):
    leave_results(project)
    (project / "rewards/new.py").write_text("new = 1\n")
    (project / "work.py").write_text("work = 2\n")
    with caplog.at_level(logging.WARNING, logger="rlhf.flows"):
        commit_results(project, "Results", result_paths(project), input_paths(project))
    assert committed(project) == RESULTS
    assert "stages have read rewards/new.py, work.py, whose current content is in no commit" in caplog.text


def test_a_hook_runs_and_may_refuse_and_nothing_is_lost(project, caplog):
    add_hook(project, "echo found a secret in metrics/sft.json; exit 3")
    leave_results(project)
    head = git(project, "rev-parse", "HEAD")
    with caplog.at_level(logging.WARNING, logger="rlhf.flows"):
        commit_results(project, "Results", result_paths(project), [])
    assert git(project, "rev-parse", "HEAD") == head
    assert "not committed; its files are there" in caplog.text and "found a secret in metrics/sft.json" in caplog.text
    assert (project / "metrics/sft.json").read_text() == "content of metrics/sft.json"
    add_hook(project, "exit 0")
    commit_results(project, "Results", result_paths(project), [])
    assert committed(project) == RESULTS


def test_what_a_hook_makes_of_a_result_is_taken_back(project, caplog):
    """A formatter would leave other bytes than dvc.lock has the hash of, and the stage would run again."""
    add_hook(project, "echo '{}' > metrics/sft.json; exit 1")
    leave_results(project)
    with caplog.at_level(logging.WARNING, logger="rlhf.flows"):
        commit_results(project, "Results", result_paths(project), [])
    assert (project / "metrics/sft.json").read_text() == "content of metrics/sft.json"
    assert "a hook changed metrics/sft.json" in caplog.text


def test_a_commit_with_what_a_hook_made_of_a_result_is_none(project):
    """Formatters that stage what they have changed let the commit go on."""
    head = git(project, "rev-parse", "HEAD")
    add_hook(project, "echo '{}' > metrics/sft.json; git add metrics/sft.json")
    leave_results(project)
    refusal = commit(project, "Results", result_paths(project))
    assert "expected the repository's hooks to leave the files as they are, got another content of metrics/sft.json" in refusal
    assert git(project, "rev-parse", "HEAD") == head and git(project, "symbolic-ref", "HEAD") == "refs/heads/main"
    assert (project / "metrics/sft.json").read_text() == "content of metrics/sft.json"
    add_hook(project, "exit 0")
    assert commit(project, "Results", result_paths(project)) is None and committed(project) == RESULTS
    assert git(project, "show", "HEAD:metrics/sft.json") == "content of metrics/sft.json"


def test_results_that_git_can_not_take_now_are_no_failure_of_the_run(project, caplog):
    leave_results(project)
    (project / ".git/index.lock").touch()
    with caplog.at_level(logging.WARNING, logger="rlhf.flows"):
        commit_results(project, "Results", result_paths(project), input_paths(project))
    assert "not committed; its files are there" in caplog.text and "index.lock" in caplog.text


@pytest.mark.parametrize("script", ["exec sleep 600", "trap '' TERM; while true; do sleep 1; done"])
def test_a_hook_that_does_not_end_is_ended_and_git_works_on(project, monkeypatch, script):
    monkeypatch.setattr(worktree, "HOOK_SECONDS", 1.0)
    monkeypatch.setattr(worktree, "HOOK_GRACE", 2.0)
    add_hook(project, script)
    leave_results(project)
    started = time.monotonic()
    refusal = commit(project, "Results", result_paths(project))
    assert "expected the repository's hooks to accept it, got none within 1 s" in refusal and time.monotonic() - started < 30
    assert not list((project / ".git").glob("*.lock"))
    add_hook(project, "exit 0")
    assert commit(project, "Results", result_paths(project)) is None and committed(project) == RESULTS


def test_a_run_whose_params_a_hook_refuses_does_not_begin(project):
    (project / ".dvc").mkdir()
    (project / ".dvc/config").write_text("")
    git(project, "add", "--all")
    git(project, "commit", "--quiet", "-m", "DVC")
    add_hook(project, "echo no such params; exit 1")
    with pytest.raises(
        ConfigError, match=r"run one: git commit: expected the repository's hooks to accept it.*no such params.*core.hooksPath"
    ):
        prepare_worktree(project, "one", {"seed": 7})
    assert not (project / "runs").exists() and git(project, "branch", "--list", "run/one") == ""
    os.remove(project / ".git/hooks/pre-commit")
    assert "seed: 7" in (prepare_worktree(project, "one", {"seed": 7}) / "params.yaml").read_text()
    assert git(project / "runs/one", "log", "-1", "--format=%s") == 'Run one: {"seed": 7}'


@pytest.mark.parametrize(("script", "message"), [("sleep 600 & wait", "got none within 1 s"), ("echo no room; exit 1", "no room")])
def test_a_hook_of_a_new_worktree_has_a_deadline_and_leaves_nothing_half_made(project, monkeypatch, script, message):
    monkeypatch.setattr(worktree, "HOOK_SECONDS", 1.0)
    monkeypatch.setattr(worktree, "HOOK_GRACE", 2.0)
    add_hook(project, script, "post-checkout")
    started = time.monotonic()
    with pytest.raises(ConfigError, match=f"run one: git worktree add: expected the repository's hooks to accept it.*{message}"):
        prepare_worktree(project, "one", {"seed": 7})
    assert time.monotonic() - started < 30
    assert not (project / "runs/one").exists() and git(project, "branch", "--list", "run/one") == ""


def test_a_run_that_fails_as_it_starts_leaves_a_run_that_was_there_and_a_branch_that_was_there(tmp_path):
    project = make_project(tmp_path / "project")

    def fail(name: str) -> None:
        with pytest.raises(KeyboardInterrupt), worktree.undone_on_failure(project, name):
            prepare_worktree(project, name, {"seed": 8})
            raise KeyboardInterrupt

    run = prepare_worktree(project, "one", {"seed": 7})
    fail("one")
    assert run.exists()
    git(project, "worktree", "remove", "--force", str(run))
    fail("one")
    assert not run.exists() and git(project, "branch", "--list", "run/one").strip() == "run/one"
    git(project, "branch", "-D", "run/one")
    fail("one")
    assert not run.parent.exists() and git(project, "branch", "--list", "run/one") == ""


@pytest.mark.parametrize("name", ["Prüf ordner", '100% it\'s #1, "so"', "a=b;[c]", "日本 {x} $y"])
def test_a_run_uses_the_projects_cache_in_a_folder_of_any_name(tmp_path, name):
    project = make_project(tmp_path / name)
    (project / ".dvc/config.local").write_text(f'[remote "mine"]\n    url = {tmp_path}/ä\n', encoding="utf-8")
    run = prepare_worktree(project, "one", {})
    assert cache_folder(run) == cache_folder(project) == project / ".dvc/cache/files/md5"
    assert f"url = {tmp_path}/ä" in (run / ".dvc/config.local").read_text(encoding="utf-8")


def test_a_run_uses_remotes_that_the_project_got_after_its_commit(project, tmp_path, monkeypatch):
    (tmp_path / "home").mkdir()
    (project / ".dvc").mkdir(exist_ok=True)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    remotes = '[remote "home"]\n    url = ~/store\n[remote "near"]\n    url = ../../near\n[remote "far"]\n    url = s3://bucket/folder\n'
    (project / ".dvc/config").write_text("[core]\n    remote = home\n" + remotes)
    text = (prepare_worktree(project, "one", {}) / ".dvc/config.local").read_text(encoding="utf-8")
    for line in (f"url = {tmp_path}/home/store", f"url = {project.parent}/near", "url = s3://bucket/folder", "remote = home"):
        assert line in text, line


def test_the_repository_that_a_git_hook_names_is_not_that_of_the_project(tmp_path, monkeypatch):
    project, other = make_project(tmp_path / "project"), make_project(tmp_path / "other")
    for name, value in {"GIT_DIR": ".git", "GIT_WORK_TREE": ".", "GIT_INDEX_FILE": ".git/index", "GIT_COMMON_DIR": ".git"}.items():
        monkeypatch.setenv(name, str(other / value))
    run = prepare_worktree(project, "one", {"seed": 7})
    assert worktree.git(run, "log", "-1", "--format=%s") == 'Run one: {"seed": 7}'
    assert worktree.git(project, "branch", "--list", "run/one").endswith("run/one")
    assert worktree.git(other, "branch", "--list") == "* main"
    assert run_name(run) == "run/one"


def test_a_command_of_git_has_a_deadline_though_a_child_holds_its_output(project, monkeypatch):
    monkeypatch.setattr(worktree, "COMMAND_SECONDS", 1.0)
    started = time.monotonic()
    with pytest.raises(ConfigError, match="expected an end within 1 s, got none"):
        worktree.git(project, "-c", "alias.slow=!sleep 600 & sleep 600", "slow")
    assert time.monotonic() - started < 30
