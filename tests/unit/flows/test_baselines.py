"""Which run a report is held against, and what of it is written down."""

from __future__ import annotations

import hashlib
import json
import subprocess
from pathlib import Path

import pytest
from registry_tags import write_tag
from report_workspace import edit_metrics, make_workspace

from flows.chain.baselines import BASELINES, pin_baselines
from flows.registry.decisions import add_version, promote
from rlhf_core.config import ConfigError, apply_overrides, load_params, read_yaml
from rlhf_core.provenance.lineage import lineage

FILES = ("metrics/evaluate.json", "metrics/gate.json", "metrics/train_sft.json", "plots/train_policy.csv")


def finish(workspace: Path) -> Path:
    """dvc.lock as after a whole run with the present params."""
    deps = [{"path": path, "md5": hashlib.md5((workspace / path).read_bytes()).hexdigest()} for path in FILES]
    params = load_params(workspace / "params.yaml").model_dump()
    report = {"deps": deps, "params": {"params.yaml": params}, "outs": [{"path": "reports/report.html", "md5": "r"}]}
    sft = {"outs": [{"path": "models/sft", "md5": "m1.dir"}]}
    (workspace / "dvc.lock").write_text(json.dumps({"stages": {"train_sft": sft, "report": report}}))
    return workspace


def git(folder: Path, *command: str) -> None:
    subprocess.run(["git", "-c", "user.name=n", "-c", "user.email=e@e", *command], cwd=folder, check=True)


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    git(tmp_path, "init", "-q")
    return make_workspace(tmp_path)


def pinned(workspace: Path) -> dict | None:
    return json.loads((workspace / BASELINES).read_text())["previous"]


def test_the_run_before_in_the_same_folder_with_the_params_it_had(workspace):
    finish(workspace)
    apply_overrides(workspace / "params.yaml", {"seed": 5})  # for the run that begins now
    pin_baselines(workspace, workspace, up_to_date=False)
    found = pinned(workspace)
    assert found["params"]["seed"] == 0 and found["outs"] == {"models/sft": "m1.dir"}
    assert set(found["metrics"]) == {"train_sft", "gate_reward", "evaluate"}
    assert set(found["metrics"]["gate_reward"]) == {"accuracy", "low", "high", "n_effective"}


def test_a_run_that_is_taken_up_again_keeps_what_it_began_with(workspace):
    finish(workspace)
    pin_baselines(workspace, workspace, up_to_date=False)
    before = (workspace / BASELINES).read_bytes()
    edit_metrics(workspace, "train_sft", {"heldout_loss": 0.1})  # the new run has come as far as SFT, then failed
    pin_baselines(workspace, workspace, up_to_date=False)
    assert (workspace / BASELINES).read_bytes() == before


def test_nothing_before_is_nothing(workspace):
    pin_baselines(workspace, workspace, up_to_date=False)
    assert pinned(workspace) is None


@pytest.mark.parametrize(("name", "found"), [("new", "run/old"), ("old", None)])
def test_the_first_run_of_a_worktree_is_held_against_the_one_finished_last(tmp_path, name, found):
    root = finish(make_workspace(tmp_path / "root"))
    git(root, "init", "-q", "-b", "run/old")
    git(root, "add", "params.yaml", "dvc.lock", "metrics", "plots")
    git(root, "commit", "-qm", "Results")
    workspace = make_workspace(root / "runs" / name)
    pin_baselines(root, workspace, up_to_date=False)
    previous = pinned(workspace)
    assert (previous and previous["name"].split(" ")[0]) == found


def test_the_run_of_the_promoted_policy(tmp_path):
    root = finish(make_workspace(tmp_path / "root"))
    git(root, "init", "-q")
    made = committed_policy(root)
    version = add_version(root, "policy", made)
    promote(root, "policy", version.version, by="me", reason="it is better")
    edit_metrics(root, "train_sft", {"heldout_loss": 0.1})  # what is here now is no whole run, and nothing was pinned
    pin_baselines(root, root, up_to_date=False)
    found = json.loads((root / BASELINES).read_text())
    assert found["previous"] is None and found["promoted"]["name"] == f"policy {version.version}"
    assert found["promoted"]["metrics"]["train_sft"]["heldout_loss"] == 0.460661


def test_a_promoted_policy_whose_tag_is_not_what_its_commit_says_is_no_baseline(tmp_path):
    root = finish(make_workspace(tmp_path / "root"))
    git(root, "init", "-q")
    made = committed_policy(root)
    write_tag(root, "policy@v1.0.0", {**made, "md5": "f" * 32 + ".dir"}, made["commit"])
    event = {"action": "promote", "version": "v1.0.0", "previous": None, "by": "Ann", "reason": "good", "override": None}
    write_tag(root, "policy#prod#1", event, made["commit"])
    with pytest.raises(ConfigError, match=r"tag policy@v1\.0\.0: expected what dvc\.lock of its commit \w+ says, md5: "):
        pin_baselines(root, root, up_to_date=False)


@pytest.mark.parametrize(
    ("path", "content", "message"),
    [
        (
            "metrics/train_sft.json",
            "[" * 100_000,
            r"metrics/train_sft\.json of commit \w+: expected JSON, got more than 200 nested brackets",
        ),
        (
            "metrics/train_sft.json",
            "\udcff",
            r"policy v1\.0\.0: expected the files of a finished run in commit \w+, got UnicodeDecodeError",
        ),
        ("metrics/evaluate.json", "[]", r"metrics/evaluate\.json of commit \w+: expected a mapping of names to figures, got list"),
    ],
)
def test_a_promoted_commit_is_read_within_limits(tmp_path, path, content, message):
    root = finish(make_workspace(tmp_path / "root"))
    git(root, "init", "-q")
    (root / path).write_bytes(content.encode(errors="surrogateescape"))
    finish(root)  # as if a run had made it
    made = committed_policy(root)
    version = add_version(root, "policy", made)
    promote(root, "policy", version.version, by="me", reason="it is better")
    (root / path).write_bytes((make_workspace(tmp_path / "sound") / path).read_bytes())
    with pytest.raises(ConfigError, match=message):
        pin_baselines(root, root, up_to_date=False)


def committed_policy(root: Path) -> dict:
    """The lineage of a commit with all that the workspace has."""
    lock = json.loads((root / "dvc.lock").read_text())
    lock["stages"]["train_policy"] = {"outs": [{"path": "models/policy", "md5": "2" * 32 + ".dir"}]}
    gate = json.loads((root / "metrics/gate.json").read_text())
    judged = [{"path": "metrics/gate.json", "md5": hashlib.md5((root / "metrics/gate.json").read_bytes()).hexdigest()}]
    lock["stages"]["gate_reward"] = {"outs": judged}
    (root / "dvc.lock").write_text(json.dumps(lock))
    (root / "dvc.yaml").write_text(json.dumps({"artifacts": {"policy": {"path": "models/policy"}}}))
    git(root, "add", "params.yaml", "dvc.lock", "dvc.yaml", "metrics", "plots")
    git(root, "commit", "-qm", "Results")
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, check=True, capture_output=True, text=True).stdout.strip()
    params = read_yaml(root / "params.yaml")
    made = lineage("models/policy", commit=head, run="main", params=params, lock=lock, gate=gate, decided=None)
    return {**made, "reward_model_version": None, "previous_version": None}
