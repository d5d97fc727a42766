"""Params, code and data edited while a stage runs: DVC alone and the flow record nothing, and no work is lost."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from small_chain import DEADLINE, await_checkpoint, change_params, copy_chain, output_of, results, run
from small_chain import begin as begin_chain
from small_workspace import ROOT, WORK, assert_resumed, environment, make_workspace, training_has_begun, wait_until

from flows.chain.cache import run_checked
from flows.chain.stages import StageFailed
from rlhf_core.config import apply_overrides, read_yaml

pytestmark = pytest.mark.timeout(300)
EDITS = {
    "params": ("params.yaml", "0.002", "0.007", "sft.learning_rate: 0.002 -> 0.007"),
    "code": ("work.py", "50 ms", "51 ms", "code: work.py changed"),
    "data": ("data/prepared/rows.txt", "0", "1", "data: data/prepared/rows.txt changed"),
}
DVC = [sys.executable, "-m", "dvc", "repro", "train_sft"]
FLOW = [sys.executable, "-m", "flows.full_pipeline", "--until", "train_sft"]


def begin(workspace: Path, command: list[str], url: str) -> subprocess.Popen[str]:
    path = {"PATH": f"{Path(sys.executable).parent}:{environment()['PATH']}", "PREFECT_API_URL": url}
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
    return subprocess.Popen(command, cwd=workspace, env=environment(**path), **how)


def end(child: subprocess.Popen[str]) -> tuple[int, str]:
    printed, _ = child.communicate(timeout=120)
    return child.returncode, printed


def change(path: Path, old: str, new: str) -> None:
    if path.name == "params.yaml":
        return apply_overrides(path, {"sft.learning_rate": float(new)})
    text = path.read_text()
    assert old in text
    aside = path.with_name("aside")
    aside.write_text(text.replace(old, new, 1))
    aside.replace(path)


def recorded(workspace: Path) -> dict:
    return (read_yaml(workspace / "dvc.lock")["stages"].get("train_sft") or {}) if (workspace / "dvc.lock").exists() else {}


def run_cache(workspace: Path) -> list[dict]:
    """What DVC's run cache has of train_sft."""
    found = [read_yaml(path) for path in (workspace / ".dvc/cache/runs").glob("*/*/*")]
    return [entry for entry in found if entry["cmd"].endswith("train_sft")]


@pytest.mark.long
@pytest.mark.parametrize(("kind", "command"), [("params", DVC), ("code", DVC), ("data", DVC), ("params", FLOW)])
def test_an_edit_while_a_stage_runs_is_not_recorded_and_undone_it_resumes(tmp_path, kind, command, server):
    workspace = make_workspace(tmp_path / "project", steps=40, retries=0)
    file, old, new, line = EDITS[kind]
    child = begin(workspace, command, server)
    wait_until(training_has_begun(workspace), 100, "training")
    change(workspace / file, old, new)
    code, printed = end(child)
    assert code == (1 if command == FLOW else 255), printed
    assert f"train_sft: expected params, code and data as at the stage's start, got changes: {line}; nothing is recorded" in printed
    assert recorded(workspace) == {} and run_cache(workspace) == []
    change(workspace / file, new, old)
    code, printed = end(begin(workspace, command, server))
    assert code == 0, printed
    assert recorded(workspace)["params"]["params.yaml"]["sft"]["learning_rate"] == 0.002 and len(run_cache(workspace)) == 1
    assert_resumed(workspace, 40, processes=1)  # its last step had a checkpoint
    if kind == "params":  # now with the other value, which no cache knows
        change(workspace / file, old, new)
        code, printed = end(begin(workspace, command, server))
        assert code == 0, printed
        assert recorded(workspace)["params"]["params.yaml"]["sft"]["learning_rate"] == 0.007
        assert sorted(entry["params"]["params.yaml"]["sft"]["learning_rate"] for entry in run_cache(workspace)) == [0.002, 0.007]


def test_an_edit_between_a_stages_end_and_dvcs_record_is_found_by_the_flow(tmp_path, monkeypatch):
    """The stage edits params.yaml itself once its own comparison is over. The folder's name is one that tools may trip over."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    workspace = make_workspace(tmp_path / "Prüf 100% it's #1", retries=0, laid_out=False)
    late = """
    if sys.argv[1] == "train_sft" and not Path("edited").exists():
        Path("edited").touch()
        from rlhf_core.config import apply_overrides
        apply_overrides(Path("params.yaml"), {"sft.learning_rate": 0.007})
"""
    (workspace / "work.py").write_text(WORK + late)

    def run(stage: str) -> str:
        return run_checked(stage, workspace, timeout=100, grace=5, on_line=print).outcome

    assert run("prepare_data") == "ran"
    message = r"got changes as it ended: sft.learning_rate: 0.002 -> 0.007; what DVC recorded is removed"
    with pytest.raises(StageFailed, match=message) as failed:
        run("train_sft")
    assert failed.value.refused and recorded(workspace) == {} and run_cache(workspace) == []
    assert run("prepare_data") == "cached" and run("train_sft") == "ran" and run("train_sft") == "cached"
    assert recorded(workspace)["params"]["params.yaml"]["sft"]["learning_rate"] == 0.007 and len(run_cache(workspace)) == 1


@pytest.mark.long
def test_sft_with_an_edited_learning_rate_is_not_recorded_and_undone_ends_with_the_same_bits(chain, tmp_path):
    workspace = copy_chain(chain.workspace, tmp_path / "edited")
    before, lock = results(workspace), (workspace / "dvc.lock").read_text()
    rate = read_yaml(workspace / "params.yaml")["sft"]["learning_rate"]
    again = ("dvc", "repro", "--single-item", "--force", "train_sft")
    child = begin_chain(workspace, *again)
    await_checkpoint(workspace, "train_sft", child)
    change_params(workspace, {"sft": {"learning_rate": 0.007}})
    assert child.wait(timeout=DEADLINE) != 0
    assert f"got changes: sft.learning_rate: {rate} -> 0.007; nothing is recorded" in output_of(workspace)
    assert (workspace / "dvc.lock").read_text() == lock
    change_params(workspace, {"sft": {"learning_rate": rate}})
    code, printed = run(workspace, *again)
    assert code == 0 and results(workspace) == before and (workspace / "dvc.lock").read_text() == lock, printed
