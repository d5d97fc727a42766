"""Functions, rules and templates that params name are missed before a run's worktree is made, with what to do."""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import subprocess
from pathlib import Path

import pytest
from clerk_params import CLERK_PARAMS

from flows.chain.user_files import check_user_files
from rlhf_core.config import ConfigError, Params, parse_params, read_yaml

ROOT = Path(__file__).parents[3]


def git(folder: Path, *arguments: str) -> None:
    subprocess.run(["git", "-c", "user.name=t", "-c", "user.email=t@t", *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def root(tmp_path) -> Path:
    """A repository with one commit, and rewards/there.py in it."""
    (tmp_path / "rewards").mkdir()
    (tmp_path / "rewards/there.py").write_text("raise RuntimeError('nothing is run')")
    shutil.copy(CLERK_PARAMS, tmp_path)
    (tmp_path / "rows.jsonl").write_text("{}\n")
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "-m", "begin")
    return tmp_path


def scored_by(path: str, *, key: str = "rl.reward") -> Params:
    tree = read_yaml(CLERK_PARAMS)
    section = tree["rl"]["reward"] if key == "rl.reward" else tree[key]
    section["scorers"] = [*section["scorers"], {"name": "mine", "kind": "function", "path": path, "weight": 1.0, "normalization": "none"}]
    return parse_params(tree)


def judged_by(path: str) -> Params:
    tree = read_yaml(CLERK_PARAMS)
    source = {"name": "own", "kind": "file", "path": "rows.jsonl", "format": "prompt", "uses": ["prompt"], "weight": 1.0, "judge": path}
    tree["data"]["sources"] = [*tree["data"]["sources"], source]
    return parse_params(tree)


def refused(message: str):
    return pytest.raises(ConfigError, match=re.escape(message))


def played_by(path: str) -> Params:
    tree = read_yaml(CLERK_PARAMS)
    tree["rl"]["environment"] = {"path": path}
    return parse_params(tree)


def commanded(path: str) -> Params:
    tree = read_yaml(CLERK_PARAMS)
    tree["rl"]["environment"] = {"command": ["python", path, "--fast"]}
    return parse_params(tree)


def test_what_is_committed_is_found_in_every_folder_that_a_run_may_work_in(root):
    git(root, "worktree", "add", "--quiet", "runs/made")
    for name in (None, "made", "new"):
        check_user_files(root, name, scored_by("rewards/there.py:score"))
        check_user_files(root, name, scored_by("rewards.there:score"))
        check_user_files(root, name, scored_by("json:loads"))
        check_user_files(root, name, scored_by("not.installed.anywhere:score"))  # stage check_model says so


@pytest.mark.parametrize("path", ["own_rules/mine.py:score", "own_rules.mine:score"])
@pytest.mark.parametrize(
    ("given", "key"), [(scored_by, "rl.reward.scorers.mine"), (judged_by, "data.sources.own.judge"), (played_by, "rl.environment.path")]
)
def test_a_file_that_is_not_committed_is_to_be_committed(root, path, given, key):
    (root / "own_rules").mkdir()
    (root / "own_rules/mine.py").write_text("")
    check_user_files(root, None, given(path))
    new = f"{key}: expected {path} in the worktree runs/new, got the file only in the project's folder; commit it: a named run's worktree"
    with refused(new) as caught:
        check_user_files(root, "new", given(path))
    assert str(caught.value).endswith("starts from the last commit") and not (root / "runs").exists()
    git(root, "worktree", "add", "--quiet", "runs/made")
    git(root, "add", ".")
    git(root, "commit", "--quiet", "-m", "mine")
    check_user_files(root, "new", given(path))
    with refused("; then choose another name, or remove this worktree with `git worktree remove --force runs/made`"):
        check_user_files(root, "made", given(path))


def test_a_commands_file_is_to_be_committed_too(root):
    key = "rl.environment.command.1: expected"
    with refused(f"{key} mine.py in the project's folder, got no such file; correct the path"):
        check_user_files(root, None, commanded("mine.py"))
    for name in ("mine.py", "mine.sh"):
        (root / name).write_text("")
        check_user_files(root, None, commanded(name))
        with refused(f"{key} {name} in the worktree runs/new, got the file only in the project's folder; commit it"):
            check_user_files(root, "new", commanded(name))
    (root.parent / "near.py").write_text("")
    with refused(f"write it absolute, {root.parent / 'near.py'}"):
        check_user_files(root, "new", commanded("../near.py"))
    check_user_files(root, "new", commanded(str(root.parent / "near.py")))
    check_user_files(root, "new", commanded("-m"))


def test_a_worktree_that_was_removed_would_be_made_from_its_branch(root):
    git(root, "branch", "run/old")
    (root / "rewards/mine.py").write_text("")
    git(root, "add", ".")
    git(root, "commit", "--quiet", "-m", "mine")
    with refused("in the worktree runs/old, got the file only in the project's folder"):
        check_user_files(root, "old", scored_by("rewards/mine.py:score"))


def test_a_file_that_is_nowhere_is_a_wrong_path(root):
    for name in (None, "new"):
        with refused("rl.reward.scorers.mine: expected rewards/nowhere.py:score in the"):
            check_user_files(root, name, scored_by("rewards/nowhere.py:score"))


def test_scorers_that_are_not_used_are_not_looked_for(root):
    check_user_files(root, None, scored_by("nowhere.py:score", key="iterative"))
    check_user_files(root, None, scored_by("nowhere.py:score", key="rejection_sampling"))
    with refused("iterative.scorers.mine"):
        check_user_files(root, None, scored_by("nowhere.py:score", key="iterative"), rounds=True)


def test_files_outside_of_git_are_found_as_the_stage_finds_them(root, tmp_path_factory):
    outside = tmp_path_factory.mktemp("outside")
    (outside / "mine.py").write_text("")
    (root / "linked").symlink_to(outside)
    git(root, "add", ".")
    git(root, "commit", "--quiet", "-m", "link")
    check_user_files(root, "new", scored_by(f"{outside}/mine.py:score"))
    for name in (None, "new"):
        check_user_files(root, name, scored_by("linked/mine.py:score"))
    git(root, "worktree", "add", "--quiet", "runs/made")
    check_user_files(root, "made", scored_by("linked/mine.py:score"))


def test_a_file_beside_the_project_is_to_be_named_by_its_absolute_path(root, tmp_path_factory):
    outside = tmp_path_factory.mktemp("beside")
    (outside / "mine.py").write_text("")
    path = os.path.relpath(outside / "mine.py", root)
    check_user_files(root, None, scored_by(f"{path}:score"))
    with refused(f"in the worktree runs/new, got a path out of the project's folder; write it absolute, {outside}/mine.py:score"):
        check_user_files(root, "new", scored_by(f"{path}:score"))
    check_user_files(root, "new", scored_by(f"{outside}/mine.py:score"))


def lay_out_model(folder: Path, name: str = "any") -> Path:
    """What tells a model's folder: settings and whole weights, of one number."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "note": name}))
    header = json.dumps({"weight": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    return folder


def test_a_template_may_lie_in_the_projects_folder_alone(root):
    lay_out_model(root / "models/any")
    tree = read_yaml(CLERK_PARAMS)
    tree["model"] |= {"path": "models/any", "chat_template": "rewards/mine.jinja"}
    given = parse_params(tree)
    for name in (None, "new"):
        with refused("model.chat_template: expected rewards/mine.jinja in the"):
            check_user_files(root, name, given)
    (root / "rewards/mine.jinja").write_text("{{ messages }}")
    for name in (None, "new"):
        check_user_files(root, name, given)


def with_source(**source) -> dict:
    tree = read_yaml(CLERK_PARAMS)
    given = {"name": "own", "kind": "file", "path": "rows.jsonl", "format": "prompt", "uses": ["prompt"], "weight": 1.0, **source}
    return {**tree, "data": {**tree["data"], "sources": [*tree["data"]["sources"], given]}}


def data_folder(root: Path, name: str, **files: str) -> str:
    (root / name).mkdir()
    for file, text in files.items():
        (root / name / file.replace("_", ".")).write_text(text)
    return name


@pytest.mark.parametrize(
    ("source", "printed"),
    [
        ({"path": "no.jsonl"}, "data.sources.own: expected a data file or folder at no.jsonl, got nothing there; correct the path"),
        ({"path": "rows.txt"}, "data.sources.own: expected a name that ends in .jsonl, "),
        ({"path": "empty.csv"}, "data.sources.own: expected records in empty.csv, got an empty file"),
        ({"path": "notes"}, "data.sources.own: expected files in notes that end in .jsonl, "),
        ({"path": "part"}, "data.sources.own: expected records in part/b.jsonl, got an empty file"),
        ({"path": "loose.jsonl"}, "data.sources.own: expected a data file or folder at loose.jsonl, got a link to nothing"),
        (
            {"kind": "huggingface", "path": "some/data"},
            "or data set some/data in the hub's cache, got neither; correct the path, or set HF_HUB",
        ),
        ({"kind": "huggingface", "path": "../some/data"}, "expected a data set's folder or name, got ../some/data with nothing there"),
        ({"kind": "huggingface", "path": "notes", "revision": "v1"}, "expected no revision of the local folder notes, got v1"),
    ],
)
def test_unreadable_data_is_named_before_a_worktree_is_made(root, monkeypatch, source, printed):
    monkeypatch.setenv("HF_HOME", str(root / "nowhere"))
    data_folder(root, "notes", readme_md="no data")
    data_folder(root, "part", a_jsonl="{}", b_jsonl="")
    (root / "rows.txt").write_text("rows")
    (root / "empty.csv").touch()
    (root / "loose.jsonl").symlink_to(root / "nothing")
    for name in (None, "new"):
        with refused(printed):
            check_user_files(root, name, parse_params(with_source(**source)))
    assert not (root / "runs").exists()


@pytest.mark.parametrize(
    ("path", "printed"),
    [
        ("models/torn", "model.path: "),
        ("models/bare", "expected weights in model.safetensors, got none"),
        ("./nowhere", "model.path: expected a folder with a pretrained model, got ./nowhere with nothing there"),
        ("rows.jsonl", "model.path: expected a folder with a pretrained model, got rows.jsonl with a file there"),
        ("some/name", "model.path: expected a folder, or model some/name in the hub's cache, got neither"),
    ],
)
def test_an_unreadable_model_is_named(root, monkeypatch, path, printed):
    monkeypatch.setenv("HF_HOME", str(root / "nowhere"))
    (lay_out_model(root / "models/bare") / "model.safetensors").unlink()
    with (lay_out_model(root / "models/torn") / "model.safetensors").open("ab") as file:
        file.write(b"more")
    tree = read_yaml(CLERK_PARAMS)
    tree["model"]["path"] = path
    with refused(printed):
        check_user_files(root, "new", parse_params(tree))


def test_all_problems_are_listed_together(root):
    tree = with_source(path="no.jsonl", judge="nowhere.py:rule")
    tree["model"]["path"] = "./nowhere"
    scorer = {"name": "old", "kind": "reward_model", "path": "models/gone", "weight": 1.0, "normalization": "none"}
    tree["rl"]["reward"]["scorers"] = [*tree["rl"]["reward"]["scorers"], scorer]
    with pytest.raises(ConfigError) as caught:
        check_user_files(root, "new", parse_params(tree))
    reported = [line.partition(":")[0] for line in str(caught.value).splitlines()]
    assert reported == ["data.sources.own.judge", "data.sources.own", "rl.reward.scorers.old.path", "model.path"]


def test_the_chains_own_models_need_not_be_there_yet(root):
    tree = read_yaml(CLERK_PARAMS)
    scorer = {"name": "own", "kind": "reward_model", "path": "models/reward", "weight": 1.0, "normalization": "none"}
    tree["rl"]["reward"]["scorers"] = [*tree["rl"]["reward"]["scorers"], scorer]
    check_user_files(root, "new", parse_params(tree))
