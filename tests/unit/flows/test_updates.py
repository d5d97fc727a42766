"""A run that exists is changed only when the user says so. Git is the real one."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest
from own_project import make_project

from flows import compare
from flows.chain.command_line import REFUSED
from flows.chain.prepare import prepare_workspace, prepared
from flows.chain.stages import StageFailed, check_params
from flows.chain.updates import differences
from flows.chain.worktree import git, prepare_worktree
from flows.full_pipeline import main
from flows.rounds import series
from flows.runs.record import note
from rlhf_core.config import ConfigError, apply_overrides, load_params, read_yaml
from rlhf_core.engines.ports import free_ports

ROOT = Path(__file__).parents[3]


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    folder = make_project(tmp_path / "project")
    monkeypatch.chdir(folder)
    return folder


def seed_of(folder: Path) -> int:
    return load_params(folder / "params.yaml").seed


def test_other_params_are_refused_with_both_values_and_taken_with_update(project, caplog):
    run = prepare_workspace(project, "one", {"seed": 7, "sft.steps": 50})
    assert prepare_workspace(project, "one", {"seed": 7}) == run  # some of its own, again
    assert prepare_workspace(project, "one", {}) == run
    message = r"run one: expected its own params, got: seed 7 -> 8, sft.steps 50 -> 60; add --update .*another name"
    with pytest.raises(ConfigError, match=message):
        prepare_workspace(project, "one", {"seed": 8, "sft.steps": 60})
    assert seed_of(run) == 7 and git(run, "status", "--porcelain") == ""
    with caplog.at_level(logging.WARNING, "rlhf"):
        prepare_workspace(project, "one", {"seed": 8}, update=True)
    assert seed_of(run) == 8 and "run one: changed: seed 7 -> 8" in caplog.text
    assert git(run, "log", "-1", "--format=%s") == 'Run one: {"seed": 8}'
    assert load_params(run / "params.yaml").sft.steps == 50


def test_params_edited_between_two_stages_stop_the_flow_unless_no_stage_reads_them(project):
    begun = read_yaml(project / "params.yaml")
    apply_overrides(project / "params.yaml", {"flow.retries": 5, "cluster.threads": 3})
    check_params(project, "train_reward", begun)
    apply_overrides(project / "params.yaml", {"sft.learning_rate": 0.007})
    message = r"train_reward: expected params.yaml as at the flow's start, got changes: sft.learning_rate: 0.002 -> 0.007; undo that"
    with pytest.raises(StageFailed, match=message) as failed:
        check_params(project, "train_reward", begun)
    assert failed.value.refused
    (project / "params.yaml").write_text("sft: {")
    with pytest.raises(StageFailed, match=r"got changes: .*params.yaml: expected YAML"):
        check_params(project, "train_reward", begun)


def test_a_prefect_server_that_is_not_there_is_named_and_no_run_is_made(project, capsys, monkeypatch):
    (port,) = free_ports(1)
    monkeypatch.setenv("PREFECT_API_URL", f"http://127.0.0.1:{port}/api")
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{port}")
    assert main(["--run", "one"]) == REFUSED
    assert f"PREFECT_API_URL: expected a Prefect server at http://127.0.0.1:{port}/api, got" in capsys.readouterr().err
    assert not (project / "runs").exists()


def test_the_command_line_refuses_and_changes_nothing(project, capsys):
    run = prepare_worktree(project, "one", {"seed": 7})
    assert main(["--run", "one", "--set", "seed=8"]) == REFUSED
    assert "seed 7 -> 8" in capsys.readouterr().err and seed_of(run) == 7


@pytest.mark.parametrize("merged", [False, True])
def test_a_run_whose_worktree_was_removed_is_one_that_exists(project, merged):
    run = prepare_workspace(project, "one", {"seed": 7})
    if merged:
        git(project, "merge", "--quiet", "run/one")
    git(project, "worktree", "remove", "--force", str(run))
    with pytest.raises(ConfigError, match="seed 7 -> 8"):
        prepare_workspace(project, "one", {"seed": 8})
    assert not run.exists()
    assert seed_of(prepare_workspace(project, "one", {"seed": 7})) == 7


def test_a_run_that_was_killed_before_its_params_were_written_begins_with_those_given(project):
    git(project, "worktree", "add", "--quiet", "-b", "run/one", "runs/one", "HEAD")
    assert seed_of(prepare_workspace(project, "one", {"seed": 7})) == 7


@pytest.mark.parametrize("trace", ["record", "result"])
def test_a_started_run_without_own_params_exists(project, trace):
    run = prepare_workspace(project, "one", {})
    if trace == "record":
        note(run, outcome="done")
    else:
        (run / "dvc.lock").write_text("schema: '2.0'\n")
    with pytest.raises(ConfigError, match="seed 0 -> 8"):
        prepare_workspace(project, "one", {"seed": 8})


@pytest.mark.parametrize("merged", [False, True])
def test_params_that_a_run_keeps_are_logged(project, caplog, merged):
    prepare_workspace(project, "one", {"seed": 7, "sft.steps": 50, "data.sources.0.weight": 2.0})
    if merged:
        git(project, "merge", "--quiet", "run/one")
    with caplog.at_level(logging.INFO, "rlhf"):
        prepare_workspace(project, "one", {"seed": 7})
    kept = "run one: resumes and keeps params that were not given: data.sources.0.weight 1.0 -> 2.0, sft.steps"
    assert [message.startswith(kept) for message in caplog.messages].count(True) == 1


def test_a_run_that_keeps_only_what_was_given_says_nothing_of_it(project, caplog):
    """`training` reaches the sections that take it over."""
    given = {"training.ranks": 2, "training.lora": {"rank": 4}, "rl.lora": {"rank": 4}, "sft.steps": 50}
    with caplog.at_level(logging.INFO, "rlhf"):
        prepare_workspace(project, "one", given)
        prepare_workspace(project, "one", given)
        assert "resumes and keeps" not in caplog.text
        prepare_workspace(project, "one", {"training.ranks": 2, "sft.steps": 50})
    kept = caplog.messages[-1].partition("keeps params that were not given: ")[2]
    keys = [part.split()[0] for part in kept.split(", ")]
    assert keys == [f"{section}.lora.{key}" for section in ("training", "rl") for key in ("rank", "alpha", "dropout", "target_modules")], (
        kept
    )


def test_keys_that_no_result_depends_on_can_be_free(project):
    run = prepare_workspace(project, "one", {"seed": 7, "cluster.threads": 1})
    prepare_workspace(project, "one", {"seed": 7, "cluster.threads": 2}, free=["cluster.threads"])
    assert load_params(run / "params.yaml").cluster.threads == 2


def test_a_series_without_a_round_is_changed_only_with_update(project):
    run = series.prepare_series(project, "series", {"seed": 7}).workspace
    with pytest.raises(ConfigError, match="seed 7 -> 8"):
        series.prepare_series(project, "series", {"seed": 8})
    series.prepare_series(project, "series", {"seed": 8}, update=True)
    assert seed_of(run) == 8


def test_a_comparison_does_not_change_runs_of_an_earlier_one(project, capsys):
    (project / "recipes").mkdir()
    shutil.copy(ROOT / "recipes/compare.yaml", project / "recipes")
    run = prepare_workspace(project, "compare-dpo-0", {"alignment.method": "dpo", "sft.steps": 50})
    assert compare.main(["--methods", "dpo", "--seeds", "0", "--set", "sft.steps=60"]) == REFUSED
    assert "sft.steps 50 -> 60" in capsys.readouterr().err
    assert load_params(run / "params.yaml").sft.steps == 50


def test_overrides_are_held_against_the_runs_own_params_wherever_they_are_checked(project):
    """A run may have a source more than the folder that it was made from has by now."""
    sources = load_params(project / "params.yaml").model_dump(mode="json")["data"]["sources"]
    two = [sources[0], sources[0] | {"name": "second"}]
    prepare_workspace(project, "one", {"data.sources": two})
    overrides = {"data.sources.1.weight": 2.0}
    with prepared(project, "one", overrides, update=True) as run:
        assert run.params.data.sources[1].weight == 2.0
    with pytest.raises(ConfigError, match=r"data\.sources\.1"), prepared(project, "another", overrides):
        pass


def test_a_run_that_is_resumed_with_its_params_has_one_first_commit(project):
    sources = [{"name": "own", "kind": "file", "path": "own.jsonl", "format": "text", "uses": ["pretrain"], "weight": 1.0}]
    for _ in range(2):
        prepare_worktree(project, "one", {"data.sources": sources, "seed": 3})
    assert git(project, "log", "--format=%s", "main..run/one").count("Run one: ") == 1


def test_a_list_that_is_filled_or_emptied_is_one_change(project):
    full = load_params(project / "params.yaml")
    bare = full.model_copy(update={"data": full.data.model_copy(update={"sources": []})})
    sources = full.model_dump(mode="json")["data"]["sources"]
    assert sources and differences(bare, full) == [("data.sources", [], sources)]
    assert differences(full, bare) == [("data.sources", sources, [])]
