"""flows/chain/stages.py without Prefect: order, outcomes, deadline; DVC is the real one, on the small project of the integration tests."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flows.chain.cache import run_checked
from flows.chain.stages import StageFailed, clear_locks, metrics_file, read_stages, run_stage, unchanged
from rlhf_core.config import ConfigError

sys.path.insert(0, str(Path(__file__).parent))
from small_workspace import ORDER, ROOT, make_workspace, processes_in

ONE_AFTER_ANOTHER = """
stages:
  last: {cmd: "true", deps: [made/by/middle/file]}
  middle: {cmd: "true", deps: [first.txt], outs: [made/by/middle]}
  lonely: {cmd: "true"}
  first: {cmd: "true", outs: ["${which.one}.txt": {cache: false}]}
"""


@pytest.fixture(autouse=True)
def _this_checkout(monkeypatch):
    """Stages import rlhf_core.stage from here, wherever the installed one is."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def test_order_follows_dependencies_and_then_the_file(tmp_path):
    (tmp_path / "dvc.yaml").write_text(ONE_AFTER_ANOTHER)
    (tmp_path / "params.yaml").write_text("which: {one: first}\n")
    assert [*read_stages(tmp_path)] == ["lonely", "first", "middle", "last"]
    (tmp_path / "params.yaml").write_text("which: {two: first}\n")
    with pytest.raises(ConfigError, match=r"dvc.yaml: expected a key of params.yaml in \$\{which.one\}"):
        read_stages(tmp_path)


def test_a_cycle_is_named(tmp_path):
    (tmp_path / "dvc.yaml").write_text("stages:\n  a: {cmd: x, deps: [b], outs: [a]}\n  b: {cmd: x, deps: [a], outs: [b]}\n  c: {cmd: x}\n")
    (tmp_path / "params.yaml").write_text("{}\n")
    with pytest.raises(ConfigError, match="a cycle, got one among a, b;"):
        read_stages(tmp_path)


def test_without_dvc_yaml_the_message_says_where_to_run(tmp_path):
    with pytest.raises(ConfigError, match=r"dvc.yaml: expected in the current folder"):
        read_stages(tmp_path)


def test_a_stage_runs_is_cached_and_is_restored_behind_a_torn_lock(tmp_path):
    workspace = make_workspace(tmp_path / "project")
    assert [*read_stages(workspace)] == ORDER and unchanged(workspace, ORDER) == []
    torn = workspace / ".dvc/tmp/rwlock"  # as a killed DVC leaves it
    torn.parent.mkdir(exist_ok=True)
    torn.write_text('{"write": {"da')
    printed: list[str] = []

    def run() -> str:
        return run_stage("prepare_data", workspace, timeout=60, grace=25, on_line=printed.append).outcome

    assert run() == "ran"
    assert any(line.startswith("prepare_data: done in ") for line in printed)
    assert not any("git add" in line or not line.strip() for line in printed)
    assert run() == "cached"
    params = workspace / "params.yaml"
    original = params.read_text()
    params.write_text(original.replace("seed: 0", "seed: 1"))
    assert run() == "ran"
    params.write_text(original)
    assert run() == "restored"
    assert (workspace / "data/prepared/rows.txt").read_text() == "0"
    assert metrics_file(read_stages(workspace)["prepare_data"]) == "metrics/prepare_data.json"


@pytest.mark.long
def test_behind_a_stage_with_something_to_do_none_is_left_out(tmp_path):
    """Those look unchanged only until it has run."""
    workspace = make_workspace(tmp_path / "project")
    for stage in ORDER:
        run_stage(stage, workspace, timeout=60, grace=25, on_line=lambda _: None)
    assert unchanged(workspace, ORDER) == ORDER
    params = workspace / "params.yaml"
    params.write_text(params.read_text().replace("min_accuracy: 0.75", "min_accuracy: 0.8"))
    assert unchanged(workspace, ORDER) == ["prepare_data", "train_sft"]
    (workspace / "data/prepared/rows.txt").unlink()
    assert unchanged(workspace, ORDER) == []


@pytest.mark.long
def test_what_dvcs_cache_has_damaged_is_made_again(tmp_path):
    workspace = make_workspace(tmp_path / "project")
    printed: list[str] = []

    def run() -> str:
        return run_checked("prepare_data", workspace, timeout=60, grace=25, on_line=printed.append).outcome

    assert run() == "ran"
    rows = workspace / "data/prepared/rows.txt"
    md5 = hashlib.md5(rows.read_bytes(), usedforsecurity=False).hexdigest()
    cached = workspace / ".dvc/cache/files/md5" / md5[:2] / md5[2:]
    shutil.rmtree(rows.parent)
    assert run() == "restored" and rows.read_text() == "0"
    cached.chmod(0o644)
    cached.write_text("1")
    cached.chmod(0o444)
    shutil.rmtree(rows.parent)
    assert run() == "ran" and rows.read_text() == "0" == cached.read_text()
    assert any("got a damaged data/prepared; removed there, and the stage runs again" in line for line in printed)


def test_what_a_killed_dvc_holds_is_taken_away_even_if_its_number_is_anothers_now(tmp_path):
    sleeping = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]
    with contextlib.ExitStack() as stack:
        other, dvc = (stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE)) for command in (sleeping, [*sleeping, "dvc"]))
        for process in (other, dvc):
            stack.callback(process.kill)
            assert process.stdout.readline() == b"up\n"  # a process has no command line yet when Popen returns
        entry = {p.pid: {"pid": p.pid, "cmd": "dvc repro"} for p in (other, dvc)}
        gone = {"pid": 2**22 + 1, "cmd": "dvc repro"}  # above the largest number of a process
        locks = {
            "read": {"a": [entry[other.pid], entry[dvc.pid], gone], "b": [gone]},
            "write": {"c": entry[other.pid], "d": entry[dvc.pid]},
        }
        path = tmp_path / ".dvc/tmp/rwlock"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(locks))
        clear_locks(tmp_path)
        assert json.loads(path.read_text()) == {"read": {"a": [entry[dvc.pid]]}, "write": {"d": entry[dvc.pid]}}


def test_refusals_differ_from_crashes_and_a_deadline_ends_all_processes(tmp_path, monkeypatch):
    workspace = make_workspace(tmp_path / "project", steps=2000)
    run_stage("prepare_data", workspace, timeout=60, grace=25, on_line=lambda _: None)
    marker = tmp_path / "crash"
    marker.touch()
    monkeypatch.setenv("CRASH_ONCE", str(marker))
    with pytest.raises(StageFailed, match="train_sft: exited with 70: RuntimeError: the disk said no") as crash:
        run_stage("train_sft", workspace, timeout=60, grace=25, on_line=lambda _: None)
    assert not crash.value.refused

    started, lines = time.monotonic(), []
    with pytest.raises(StageFailed, match=r"expected to end within flow.stage_timeout=10 s") as late:
        run_stage("train_sft", workspace, timeout=10, grace=25, on_line=lines.append)
    assert str(late.value) in lines
    assert "train_sft: stopped by a signal; run it again" in lines, lines[-3:]  # its checkpoint is no CheckpointStore's
    assert not late.value.refused and time.monotonic() - started < 35
    assert processes_in(workspace) == []
    assert list((workspace / "scratch/train_sft").glob("*/step"))  # its checkpoint

    with pytest.raises(StageFailed) as refusal:
        run_stage("gate_reward", workspace, timeout=60, grace=25, on_line=lambda _: None)
    assert refusal.value.refused is False  # DVC itself said no: models/sft is missing

    broken = (workspace / "params.yaml").read_text().replace("steps: 2000", "steps: many")
    (workspace / "params.yaml").write_text(broken)
    with pytest.raises(StageFailed, match=r"train_sft: params.yaml: sft.steps: expected a valid integer") as refusal:
        run_stage("train_sft", workspace, timeout=60, grace=25, on_line=lambda _: None)
    assert refusal.value.refused
