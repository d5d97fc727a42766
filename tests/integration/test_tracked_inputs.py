"""What isn't the project's own counts by its content: for a new run, for one that is there, and for DVC alone. And --force and --until."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import warm_python

from flows.chain.stages import inputs_as_recorded, unchanged, with_something_to_do
from rlhf_core.config import apply_overrides, read_yaml

sys.path.insert(0, str(Path(__file__).parent))
from small_workspace import DVC, ORDER, WORK, environment, git, make_workspace, outcomes, refuse_flow, run_flow

pytestmark = pytest.mark.timeout(300)
HASHES = """stages:
  hash_inputs:
    cmd: exec python -m tasks.hash_inputs
    always_changed: true
    params: [model, data]
    deps: [work.py]
    outs: [{data/inputs.json: {cache: false, persist: true}}]
"""
SOURCE = {"name": "mine", "kind": "file", "path": "../data", "format": "prompt", "uses": ["prompt"], "weight": 1.0}
STAGES = ["hash_inputs", *ORDER]


@pytest.fixture
def project(tmp_path) -> Path:
    """The small project, with a stage prepare_data that copies the data beside it, and a model there that train_sft depends on."""
    workspace = make_workspace(tmp_path / "project", steps=1)
    copied = '"".join(p.read_text() for p in sorted(locate(stage.params.data.sources[0].path).rglob("*.jsonl")))'
    work = WORK.replace("str(stage.params.seed)", copied, 1).replace(
        "import os\n", "import os\nfrom rlhf_core.data.places import locate\n", 1
    )
    (workspace / "work.py").write_text(work)
    chain = DVC.replace("stages:\n", HASHES, 1)
    chain = chain.replace("params: [seed, data, model]", "params: [seed, data, model, {data/inputs.json: [sources]}]")
    chain = chain.replace("params: [seed, model, sft]", "params: [seed, model, sft, {data/inputs.json: [model]}]")
    (workspace / "dvc.yaml").write_text(chain)
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "llama"}')
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (model / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    write(tmp_path / "data/a.jsonl", "first\n")
    apply_overrides(workspace / "params.yaml", {"data.sources": [SOURCE], "model.path": "../model"})
    git(workspace, "add", "--all")
    git(workspace, "-c", "user.name=test", "-c", "user.email=test@localhost", "commit", "--quiet", "-m", "Data of its own")
    return workspace


def write(path: Path, text: str) -> None:
    """Long ago, so that what is remembered of a file is used."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    os.utime(path, (1.7e9, 1.7e9))


def with_venv() -> dict[str, str]:
    """As in a shell where .venv is active."""
    return environment(PATH=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))


def repro(workspace: Path, *arguments: str) -> dict[str, str]:
    """`dvc repro` as a user types it; stage -> ran, restored or cached, and all that it printed under "printed"."""
    done = subprocess.run(
        [sys.executable, "-m", "dvc", "repro", *arguments],
        **{"cwd": workspace, "env": with_venv(), "capture_output": True, "text": True, "timeout": 120, "check": False},
    )
    printed = done.stdout + done.stderr
    assert done.returncode == 0, printed
    words = {"Running stage '": "ran", "' is cached - ": "restored", "' didn't change": "cached"}
    found = {line.split("'")[1]: how for line in printed.splitlines() for word, how in words.items() if word in line}
    return {**found, "printed": printed}


def ran(found: dict[str, str]) -> list[str]:
    return [stage for stage in STAGES if found.get(stage) == "ran"]


@pytest.mark.long
def test_dvc_alone_runs_what_changed_data_and_models_change(project):
    data, model = project.parent / "data", project.parent / "model"
    assert ran(repro(project)) == STAGES
    again = repro(project)
    assert ran(again) == ["hash_inputs"] and unchanged(project, STAGES) == STAGES
    assert with_something_to_do(project, {"hash_inputs": ["always changed"], "report": ["x"]}) == {"report": ["x"]}
    recorded = (project / "data/inputs.json").read_bytes()

    write(data / "a.jsonl", "mended\n")
    assert unchanged(project, STAGES) == [] and not inputs_as_recorded(project)
    always = {"hash_inputs": ["always changed"]}  # what `dvc status` says, and what registering a model makes of it
    assert with_something_to_do(project, always) == {"hash_inputs": ["data, a model or a function has changed"]}
    mended = repro(project)
    assert ran(mended)[:3] == ["hash_inputs", "prepare_data", "train_sft"]
    assert "\ndata.sources.mine: ../data/a.jsonl changed: 6 bytes, sha256 " in mended["printed"]
    assert "; to run again: prepare_data and what depends on it" in mended["printed"]
    assert (project / "data/prepared/rows.txt").read_text() == "mended\n"

    os.utime(data / "a.jsonl")
    assert ran(repro(project)) == ["hash_inputs"]

    write(data / "b.jsonl", "second\n")
    assert ran(repro(project))[:2] == ["hash_inputs", "prepare_data"]
    assert (project / "data/prepared/rows.txt").read_text() == "mended\nsecond\n"

    with (model / "config.json").open("a") as file:
        file.write("\n")
    changed = repro(project)
    assert ran(changed)[:2] == ["hash_inputs", "train_sft"] and changed["prepare_data"] == "cached"
    assert "model.path: ../model/config.json changed: 23 bytes, sha256 " in changed["printed"]
    assert "to run again: train_sft and what depends on it" in changed["printed"]

    (data / "b.jsonl").unlink()
    write(data / "a.jsonl", "first\n")
    (model / "config.json").write_text('{"model_type": "llama"}')
    back = repro(project)
    assert ran(back) == ["hash_inputs"] and back["prepare_data"] == back["train_sft"] == "restored"
    assert (project / "data/inputs.json").read_bytes() == recorded


def test_the_first_stage_names_a_missing_file(project):
    shutil.rmtree(project.parent / "model")
    done = warm_python.run([sys.executable, "-m", "dvc", "repro"], cwd=project, env=with_venv())
    assert done.returncode != 0 and "prepare_data" not in done.stdout
    assert "hash_inputs: model.path: expected a folder with a pretrained model, got ../model with nothing there" in done.stderr


@pytest.mark.long
def test_a_mended_file_counts_in_a_new_run_and_in_one_that_is_there(project, server):
    assert run_flow(project, "--run", "old", PREFECT_API_URL=server).returncode == 0
    started = time.monotonic()
    unchanged = run_flow(project, "--run", "old", PREFECT_HOME="/proc/nowhere")  # a server could not even be started
    assert outcomes(unchanged.stdout) == dict.fromkeys(ORDER, "cached") and "hash_inputs" in unchanged.stdout, unchanged.stderr
    assert time.monotonic() - started < 20
    write(project.parent / "data/a.jsonl", "mended\n")
    new = run_flow(project, "--run", "new", PREFECT_API_URL=server)
    assert outcomes(new.stdout)["prepare_data"] == "ran", new.stdout
    assert (project / "runs/new/data/prepared/rows.txt").read_text() == "mended\n"
    old = run_flow(project, "--run", "old", PREFECT_API_URL=server)
    assert outcomes(old.stdout)["prepare_data"] == "restored", old.stdout  # the new run has computed it
    assert "data.sources.mine: ../data/a.jsonl changed: 6 bytes" in old.stdout
    assert (project / "runs/old/data/prepared/rows.txt").read_text() == "mended\n"
    assert git(project / "runs/old", "status", "--porcelain") == ""  # data/inputs.json is in the run's commit
    assert "mine" in git(project, "show", "run/old:data/inputs.json")


def test_missing_files_are_named_before_a_worktree_is_made(project):
    (project.parent / "data/a.jsonl").unlink()
    shutil.rmtree(project.parent / "model")
    done = refuse_flow(project, "--run", "new")
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "data.sources.mine: expected files in ../data that end in .jsonl, .jsonl.gz, .json, .json.gz, .csv, .csv.gz, .tsv, .tsv.gz, "
        ".parquet, got none; correct the path",
        "model.path: expected a folder with a pretrained model, got ../model with nothing there, relative to the project's folder; put "
        "one there, or name another folder, or any model on Hugging Face, which is downloaded with HF_HUB_OFFLINE=0",
    ]
    assert not (project / "runs/new").exists() and git(project, "branch", "--list", "run/*") == ""


@pytest.mark.long
def test_a_run_ends_after_a_stage_and_a_stage_is_forced(project, server):
    part = run_flow(project, "--until", "train_sft", PREFECT_API_URL=server)
    assert part.returncode == 0, part.stderr
    reached = dict.fromkeys(("prepare_data", "train_sft"), "ran") | dict.fromkeys(("gate_reward", "report"), "not reached")
    assert outcomes(part.stdout) == reached
    assert f"Ended after train_sft, as `until` says, in {project}; the same run without `until` continues from there" in part.stdout
    nothing = run_flow(project, "--until", "prepare_data", PREFECT_HOME="/proc/nowhere")
    assert nothing.returncode == 0 and outcomes(nothing.stdout)["prepare_data"] == "cached" and "Ended after prepare_data" in nothing.stdout
    forced = run_flow(project, "--force", "prepare_data", PREFECT_API_URL=server)
    assert forced.returncode == 0, forced.stderr
    assert outcomes(forced.stdout) == {"prepare_data": "ran", "train_sft": "cached", "gate_reward": "ran", "report": "ran"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--force", "prepare"), f"force: expected a stage, one of {', '.join(STAGES)}, got prepare; write prepare_data"),
        (("--until", "sft_train"), f"until: expected a stage, one of {', '.join(STAGES)}, got sft_train; write train_sft"),
        (
            ("--until", "prepare_data", "--force", "train_sft"),
            "force: expected a stage up to prepare_data, the last one of this run, got train_sft",
        ),
    ],
)
def test_a_stage_that_is_none_is_refused_with_the_nearest(project, arguments, message):
    done = refuse_flow(project, "--run", "new", *arguments)
    assert done.returncode == 2 and done.stderr.startswith(message) and not (project / "runs/new").exists()


@pytest.mark.long
def test_a_deployments_run_takes_a_recipe_and_refuses_a_stage_that_is_none(project, server):
    (project / "mine.yaml").write_text("sft: {batch_size: 2, steps: 5}\n")
    code = (
        "from flows.chain.flow import rlhf; print(sorted(rlhf.parameters.properties)); "
        "states = [rlhf({}, 'new', force='prepare', return_state=True), rlhf(recipes=['absent.yaml'], return_state=True), "
        "rlhf({'sft.steps': 4}, 'new', recipes=['mine.yaml'], until='prepare_data', return_state=True)]; "
        "[print(state.name, state.message) for state in states]"
    )
    command = [sys.executable, "-c", code]
    env = environment(PREFECT_API_URL=server)
    done = subprocess.run(command, cwd=project, env=env, capture_output=True, text=True, timeout=120, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith(("[", "Refused", "Completed"))]
    assert lines[0] == "['force', 'overrides', 'recipes', 'run', 'until', 'update']", done.stderr
    assert lines[1].startswith("Refused force: expected a stage, one of hash_inputs, ")
    assert lines[2].startswith("Refused absent.yaml: expected a readable parameter file, got No such file")
    assert lines[3].startswith("Completed"), done.stdout
    sft = read_yaml(project / "runs/new/params.yaml")["sft"]
    assert (sft["batch_size"], sft["steps"]) == (2, 4)


def test_a_retry_of_a_run_does_not_force_a_stage_that_ended_well(tmp_path, monkeypatch):
    from flows.chain.execute import note_forced, once_in_run

    monkeypatch.setenv("PREFECT__RUNTIME__FLOW_RUN__ID", "one")
    assert once_in_run(tmp_path, "train_sft") == "train_sft" and once_in_run(tmp_path, None) is None
    note_forced(tmp_path, "train_sft")
    assert once_in_run(tmp_path, "train_sft") is None and once_in_run(tmp_path, "train_reward") == "train_reward"
    monkeypatch.setenv("PREFECT__RUNTIME__FLOW_RUN__ID", "other")
    assert once_in_run(tmp_path, "train_sft") == "train_sft"
