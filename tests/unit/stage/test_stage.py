"""The frame around a stage: fingerprint, scratch, lock, exit codes and the ways in which it is stopped. Stages are real processes here."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from clerk_params import CLERK_PARAMS
from ruamel.yaml import YAML
from safetensors.torch import save_file

from rlhf_core.config import ConfigError, ScorerConfig, load_params
from rlhf_core.engines.ports import free_ports
from rlhf_core.process import STOPPED_BY_SIGNAL
from rlhf_core.provenance.file_hashes import dvc_md5
from rlhf_core.stage.files import publish, read_json, write_json
from rlhf_core.stage.run import CRASHED, REFUSED, Stage
from rlhf_core.stage.scratch import read_stage_inputs

ROOT = Path(__file__).parents[3]
DVC = """
stages:
  train_sft:
    cmd: python work.py
    params: [seed, model, sft]
    deps: [work.py, inputs]
    metrics: [metrics/train_sft.json]
"""
WORK = """
import asyncio, sys, time
from pathlib import Path
from rlhf_core.checkpoint.store import CheckpointStore
from rlhf_core.checkpoint.settings import StoreSettings
from rlhf_core.paths import METRICS
from rlhf_core.stage.files import write_json
from rlhf_core.process import Interrupted
from rlhf_core.stage.job import Job
from rlhf_core.stage.ray_job import submit_job
from rlhf_core.stage.run import Stage, StageRefused

def work(stage):
    how = sys.argv[1]
    if how == "crash":
        raise RuntimeError("no memory left")
    if how == "refuse":
        raise StageRefused("the data is empty")
    if how == "submit":
        job = Job(stage.name, "launch", "run", (), stage.params, 1, Path(), stage.scratch, StoreSettings(), 1)
        submit_job(stage, job, subject="RL job", description=stage.scratch / "job.pkl", cpus=1)
    if how in ("save", "finish"):
        store = CheckpointStore(stage.scratch / "sft", stage.store_settings(zero_stage=0))
        found = store.latest()
        print("step", found and found.step, flush=True)
        if how == "save":
            store.save(5, lambda folder: (folder / "digest.json").write_text("{}"))
            raise RuntimeError("no memory left")
        write_json(METRICS / "train_sft.json", {"loss": 1.0})
        return
    if how in ("edited", "rewritten"):
        store = CheckpointStore(stage.scratch / "sft", stage.store_settings(zero_stage=0))
        store.save(5, lambda folder: (folder / "digest.json").write_text("{}"))
        Path("inputs/rows").write_text("2" if how == "edited" else "1")
        return
    checkpoint = stage.scratch / "checkpoint"
    print("resumed" if checkpoint.exists() else "fresh", stage.fingerprint[:16], flush=True)
    if how == "tasks":
        async def busy():
            while True:
                time.sleep(0.02)  # what a library computes

        async def both():
            async with asyncio.TaskGroup() as group:
                group.create_task(busy())

        asyncio.run(both())
    while how in ("wait", "deaf"):
        try:
            time.sleep(0.02)
        except Exception:  # as around a library, which may raise anything
            pass
        if how == "deaf":
            continue
        if stage.stop_requested:
            checkpoint.write_text("half")
            raise Interrupted

with Stage("train_sft", resumable=sys.argv[1] not in ("deaf", "tasks")) as stage:
    work(stage)
"""


@pytest.fixture
def workspace(tmp_path, monkeypatch) -> Path:
    (tmp_path / "params.yaml").write_text(CLERK_PARAMS.read_text())
    (tmp_path / "dvc.yaml").write_text(DVC)
    (tmp_path / "work.py").write_text(WORK)
    (tmp_path / "inputs").mkdir()
    (tmp_path / "inputs/rows").write_text("1")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def begin(how: str, *wrapper: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [*wrapper, sys.executable, "work.py", how]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def fingerprint(stage: str) -> str:
    return read_stage_inputs(stage).fingerprint


def change(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_the_fingerprint_follows_command_params_and_dependencies_and_nothing_else(workspace):
    first = fingerprint("train_sft")
    (workspace / "unrelated").write_text("x")
    change(workspace / "params.yaml", "min_accuracy: 0.75", "min_accuracy: 0.8")  # the gate's section, not this stage's
    (workspace / "inputs/__pycache__").mkdir()
    (workspace / "inputs/__pycache__/x.pyc").write_text("x")
    assert fingerprint("train_sft") == first
    seen = {first}
    for edit in (
        lambda: change(workspace / "params.yaml", "seed: 0", "seed: 1"),
        lambda: (workspace / "inputs/rows").write_text("2"),
        lambda: (workspace / "inputs/rows").rename(workspace / "inputs/lines"),
        lambda: change(workspace / "dvc.yaml", "python work.py", "python  work.py"),
    ):
        edit()
        seen.add(fingerprint("train_sft"))
    assert len(seen) == 5
    change(workspace / "params.yaml", "seed: 1", "seed: 0")
    change(workspace / "dvc.yaml", "python  work.py", "python work.py")
    (workspace / "inputs/lines").rename(workspace / "inputs/rows")
    (workspace / "inputs/rows").write_text("1")
    assert fingerprint("train_sft") == first


def test_a_missing_dependency_is_named(workspace):
    (workspace / "inputs/rows").unlink()
    (workspace / "inputs").rmdir()
    with pytest.raises(ConfigError, match="inputs: expected the output of an earlier stage, got nothing; run `dvc repro train_sft`"):
        fingerprint("train_sft")


@pytest.mark.parametrize(
    ("how", "code", "message"),
    [("refuse", REFUSED, "train_sft: the data is empty\n"), ("crash", CRASHED, "RuntimeError: no memory left"), ("end", 0, "")],
)
def test_exit_codes_tell_a_refusal_from_a_crash(workspace, how, code, message):
    stage = begin(how)
    out, err = stage.communicate(timeout=60)
    assert stage.returncode == code, err
    assert message in err + out
    assert ("Traceback" in out + err) == (how == "crash")
    scratch = [p for p in (workspace / "scratch/train_sft").iterdir() if p.is_dir()]
    assert len(scratch) == (0 if how == "end" else 1)  # success leaves none


@pytest.mark.parametrize(
    ("how", "code", "message"),
    [
        (
            "edited",
            REFUSED,
            "train_sft: expected params, code and data as at the stage's start, got changes: data: inputs/rows changed; nothing",
        ),
        (
            "rewritten",
            CRASHED,
            "train_sft: expected nobody to write what the stage reads, got: inputs/rows was written, and is as before now",
        ),
    ],
)
def test_a_stage_whose_data_was_written_before_its_first_checkpoint_was_seen_fails_and_begins_anew(workspace, how, code, message):
    stage = begin(how)
    out, err = stage.communicate(timeout=60)
    assert stage.returncode == code and message in out + err, err
    assert [path.name for path in (workspace / "scratch/train_sft").glob("*/sft/*")] == []
    (workspace / "inputs/rows").write_text("1")
    assert "step None" in begin("finish").communicate(timeout=60)[0]


@pytest.mark.parametrize(
    ("ending", "code", "message"),
    [
        ("atexit.register(print, 'last')", 0, "last\n"),
        ("atexit.register(Path('inputs/rows').write_text, '2')", REFUSED, "got changes: data: inputs/rows changed; nothing is recorded"),
        ("raise RuntimeError('afterwards')", 1, "RuntimeError: afterwards"),
        ("Stage.refusal_of_changes = lambda _: os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM, ""),
    ],
)
def test_a_stage_looks_once_more_as_its_process_ends(workspace, ending, code, message):
    lines = (
        "import atexit, os, signal",
        "from pathlib import Path",
        "from rlhf_core.stage.run import Stage, no_arguments",
        "no_arguments(None)",
    )
    (workspace / "work.py").write_text("\n".join([*lines, "with Stage('train_sft'):", "    pass", ending]))
    command = [sys.executable, "work.py"]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False)
    assert done.returncode == code and message in done.stdout + done.stderr, done.stderr
    assert "train_sft: done in " in done.stdout


def test_code_of_another_folder_is_refused(workspace):
    (workspace / "rlhf_core").mkdir()
    (workspace / "rlhf_core/__init__.py").write_text("")
    done = subprocess.run(
        [sys.executable, "-P", "work.py", "end"], env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False
    )
    assert (
        done.returncode == REFUSED
        and f"code: expected rlhf_core of this folder, got {ROOT / 'rlhf_core'}; unset PYTHONSAFEPATH" in done.stderr
    )


def test_a_cluster_that_is_not_there_is_named_and_waited_for_without_a_traceback(workspace):
    (port,) = free_ports(1)
    yaml, params = YAML(), workspace / "params.yaml"
    document = yaml.load(params)
    document["cluster"] |= {"address": f"http://127.0.0.1:{port}", "silence_timeout": 1}
    yaml.dump(document, params)
    stage = begin("submit")
    out, err = stage.communicate(timeout=60)
    assert stage.returncode == CRASHED
    assert f"cluster.address: expected Ray's dashboard at http://127.0.0.1:{port}, got no connection" in out + err
    assert f"train_sft: Ray head at http://127.0.0.1:{port}: expected the head to answer within cluster.silence_timeout=1 s" in out + err
    assert "Traceback" not in out + err


def test_wrong_params_are_refused_without_a_traceback(workspace):
    change(workspace / "params.yaml", "seed: 0", "sead: 0")
    stage = begin("end")
    _, err = stage.communicate(timeout=60)
    assert stage.returncode == REFUSED
    assert "train_sft: params.yaml: sead: expected a known key" in err and "Traceback" not in err


def test_sigterm_checkpoints_and_the_same_work_resumes_while_changed_work_does_not(workspace):
    stage = begin("wait")
    first = stage.stdout.readline().split()
    stage.terminate()
    assert stage.wait(timeout=20) == STOPPED_BY_SIGNAL
    assert "stopped by a signal; run it again" in stage.stdout.read()

    (workspace / "inputs/rows").write_text("2")
    assert begin("end").communicate(timeout=60)[0].startswith("fresh ")
    (workspace / "inputs/rows").write_text("1")
    assert begin("end").communicate(timeout=60)[0].splitlines()[0] == f"resumed {first[1]}"
    assert begin("end").communicate(timeout=60)[0].startswith("fresh ")  # success removed the checkpoint


def test_a_stopped_stage_promises_a_checkpoint_only_where_there_is_one(workspace):
    for ending in ("run it again\n", "run it again to resume from its checkpoint\n"):
        stage = begin("wait")
        stage.stdout.readline()
        stage.terminate()
        assert stage.communicate(timeout=60)[0].endswith(f"train_sft: stopped by a signal; {ending}")
        assert begin("save").wait(timeout=60) == CRASHED


def test_changed_work_resumes_the_older_checkpoint_on_request_and_records_it(workspace):
    assert begin("save").wait(timeout=60) == CRASHED
    change(workspace / "params.yaml", "seed: 0", "seed: 1")
    out, _ = begin("finish").communicate(timeout=60)
    (older,) = re.findall(r"resume_from=(train_sft/\w{16})", out)
    assert "has the checkpoint of step 5 (sft) of other work; changes since then:\n  seed: 0 -> 1\n" in out and "step None" in out
    assert read_json(workspace / "metrics/train_sft.json") == {"loss": 1.0}
    change(workspace / "params.yaml", "resume_from: null", f"resume_from: {older}")
    out, err = begin("finish").communicate(timeout=60)
    assert "step 5" in out, err
    noted = {"of": "sft", "step": 5, "differences": ["seed: 0 -> 1"]}
    assert read_json(workspace / "metrics/train_sft.json") == {"loss": 1.0, "resumed_from": [noted]}
    assert (workspace / "reports/digests/train_sft/sft/step-5/digest.json").exists()
    # Its own work, with the params of then, is still where it was.
    change(workspace / "params.yaml", "seed: 1", "seed: 0")
    assert "step 5" in begin("finish").communicate(timeout=60)[0]
    assert not [p for p in (workspace / "scratch/train_sft").iterdir() if p.is_dir()]
    change(workspace / "params.yaml", "seed: 0", "seed: 1")
    _, err = begin("finish").communicate(timeout=60)
    assert f"checkpoints.resume_from={older}: expected a scratch folder with a checkpoint, got none" in err


def test_a_second_run_waits_until_the_first_has_ended(workspace):
    first = begin("wait")
    first.stdout.readline()
    second = begin("end")
    time.sleep(2.0)
    assert second.poll() is None
    lock = workspace / "scratch/train_sft/lock"
    assert lock.read_text() == str(first.pid)
    first.terminate()
    first.wait(timeout=20)
    out, _ = second.communicate(timeout=60)
    assert second.returncode == 0 and out.startswith("resumed ")


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel tells a child about its parent's death on Linux only")
def test_the_death_of_the_parent_stops_the_stage_with_a_checkpoint(workspace):
    # A parent that starts the stage as DVC does, through no shell, and is killed without a chance to tell it.
    parent = "import subprocess, sys; subprocess.run(sys.argv[1:])"
    wrapper = begin("wait", sys.executable, "-c", parent)
    wrapper.stdout.readline()
    pid = int((workspace / "scratch/train_sft/lock").read_text())
    assert pid != wrapper.pid and alive(pid)
    wrapper.send_signal(signal.SIGKILL)
    wrapper.wait(timeout=20)
    until = time.monotonic() + 20
    while alive(pid):
        assert time.monotonic() < until
        time.sleep(0.05)
    assert [p.read_text() for p in (workspace / "scratch/train_sft").glob("*/checkpoint")] == ["half"]


def test_json_is_deterministic_and_finite(tmp_path):
    path = tmp_path / "metrics/x.json"
    write_json(path, {"b": float("nan"), "a": [float("inf"), 0.12345678], "c": {"z": 1, "y": None}})
    assert read_json(path) == {"a": [None, 0.123457], "b": None, "c": {"y": None, "z": 1}}
    first = path.read_bytes()
    write_json(path, {"c": {"y": None, "z": 1}, "a": [float("-inf"), 0.12345679], "b": float("nan")})
    assert path.read_bytes() == first and list(path.parent.iterdir()) == [path]


def test_small_probabilities_are_not_0_in_json(tmp_path):
    path = tmp_path / "x.json"
    write_json(path, {"looks": [{"p_value": 1.23456789e-12, "level": 3e-9, "value": 1.23456789e-12}], "p_value": 0.0, "spent": 1 / 3})
    found = {"p_value": 1.23457e-12, "level": 3e-9, "value": 0.0}
    assert read_json(path) == {"looks": [found], "p_value": 0.0, "spent": 0.333333}


def test_publish_replaces_a_folder_and_a_file(tmp_path):
    for round_ in ("one", "two"):
        aside = tmp_path / "aside"
        aside.mkdir()
        (aside / round_).write_text(round_)
        publish(aside, tmp_path / "deep/final")
    assert [p.name for p in (tmp_path / "deep/final").iterdir()] == ["two"] and not (tmp_path / "aside").exists()


@pytest.mark.parametrize(("umask", "file", "folder"), [(0o022, 0o644, 0o755), (0o007, 0o660, 0o770)])
def test_what_is_published_has_the_modes_of_new_files(tmp_path, umask, file, folder):
    aside = tmp_path / "aside"
    (aside / "member_1").mkdir(parents=True, mode=0o700)
    for name in ("model.safetensors", "member_1/model.safetensors"):
        save_file({"w": torch.zeros(2)}, aside / name)
    before = os.umask(umask)
    try:
        publish(aside, tmp_path / "models/sft")
    finally:
        os.umask(before)
    modes = {p.relative_to(tmp_path / "models").as_posix(): p.stat().st_mode & 0o777 for p in (tmp_path / "models").rglob("*")}
    assert modes == {
        "sft": folder,
        "sft/member_1": folder,
        "sft/model.safetensors": file,
        "sft/member_1/model.safetensors": file,
    }


def test_a_card_names_the_inputs_that_count_and_their_md5s(workspace):
    (workspace / "data/prepared").mkdir(parents=True)
    (workspace / "data/prepared/sources.json").write_text('{"mine": {"kind": "file", "path": "x", "rows": {"sft": {"train": 7}}}}')
    dvc = YAML(typ="safe", pure=True).load(DVC)
    dvc["stages"]["train_policy"] = {
        "cmd": "exec python -m tasks.train_dpo",
        "params": ["seed", "model", "dpo"],
        "deps": ["work.py", "data/prepared", "inputs", "models/reward", "metrics/gate.json"],
    }
    with (workspace / "dvc.yaml").open("w") as file:
        YAML(typ="safe", pure=True).dump(dvc, file)
    for name in ("models/reward/model.safetensors", "metrics/gate.json"):
        (workspace / name).parent.mkdir(parents=True)
        (workspace / name).write_text("{}")
    stage = Stage("train_policy")  # not entered: signals and environment are this process's
    stage.params, stage.inputs, stage.resumed_from = load_params(), read_stage_inputs("train_policy"), []
    facts = stage.card("policy", "dpo", {"heldout_loss": 0.5, "heldout_pairs": 3, "loss": 0.4})
    requested = stage.card("policy", "rl (rloo)", {}, gate={"passed": True, "message": "good"})
    assert facts.inputs == {name: dvc_md5(workspace / name) for name in ("data/prepared", "inputs")}
    assert requested.inputs == facts.inputs | {"models/reward": dvc_md5(workspace / "models/reward")}
    judged = ScorerConfig(name="helpful", kind="llm_judge", url="http://a/v1", model="m")
    rl = stage.params.rl.model_copy(update={"reward": stage.params.rl.reward.model_copy(update={"scorers": [judged]})})
    method = stage.params.alignment.model_copy(update={"method": "rl"})
    stage.params = stage.params.model_copy(update={"rl": rl, "alignment": method})
    entry = {"key": "rl.reward.scorers.helpful", "name": "helpful", "model": "m", "passed": False, "message": "rejected: x"}
    gate = {"override": "a try", "llm_judges": [entry, entry | {"key": "iterative.scorers.helpful"}]}
    (workspace / "metrics/gate.json").write_text(json.dumps(gate))
    assert stage.card("policy", "rl (rloo)", {}).judges == [entry | {"override": "a try"}] and not facts.judges
    assert facts.figures == {"heldout_loss": 0.5} and facts.gate is None and facts.params.keys() == {"seed", "model", "dpo"}


def test_a_stage_that_cannot_fit_is_refused_before_it_works_unless_the_check_is_off(workspace):
    change(workspace / "params.yaml", "layers: 3\n", "layers: 3000000\n")
    child = begin("end")
    out, err = child.communicate(timeout=60)
    assert child.returncode == REFUSED and "fresh" not in out
    assert "train_sft: train_sft: training rank: expected to need at most the " in err and "that this machine has left" in err
    change(workspace / "params.yaml", "  stop_grace: 25", "  preflight: 'off'\n  stop_grace: 25")
    assert begin("end").communicate(timeout=60)[0].startswith("fresh ")


@pytest.mark.parametrize("how", ["deaf", "tasks"])
def test_sigterm_ends_a_stage_that_writes_no_checkpoints_where_it_is(workspace, how):
    child = begin(how)
    assert child.stdout.readline().startswith("fresh")
    child.send_signal(signal.SIGTERM)
    output, errors = child.communicate(timeout=60)
    assert child.returncode == 143, errors
    assert "stopped by a signal" in output
