"""A stage's side of a job whose files travel through a storage: what it sends, and what it takes back."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from clerk_params import CLERK_PARAMS

from rlhf_core.checkpoint.store import CheckpointStore
from rlhf_core.config import Params, load_params
from rlhf_core.stage.job_inputs import JobInputs
from rlhf_core.stage.scratch import StageInputs, stored_work, write_record
from rlhf_core.stage.stored_job import StoredJob
from rlhf_core.storage import node
from rlhf_core.storage.address import StorageFailed
from rlhf_core.storage.node import enter, job_storage
from rlhf_core.storage.work import OUTPUTS

ROOT = Path(__file__).parents[3]
DESCRIPTION = "job.json"


@dataclass
class Begun:
    """What of a stage in its `with` block the job's files need."""

    params: Params
    inputs: StageInputs
    resumed_from: list[dict[str, Any]] = field(default_factory=list)
    name: str = "train_sft"

    @property
    def scratch(self) -> Path:
        return Path("scratch") / self.name / self.inputs.folder_name


class Project:
    """A project's folder with one input, a storage, and nodes."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch):
        self._folder, self._monkeypatch = folder, monkeypatch
        self.root = folder / "project"
        (folder / "storage").mkdir()
        (self.root / "data").mkdir(parents=True)
        (self.root / "data/rows").write_text("rows")
        params = load_params(CLERK_PARAMS)
        where = {"address": "http://head:8265", "storage": f"file://{folder}/storage"}
        self.params = params.model_copy(update={"cluster": params.cluster.model_copy(update=where)})
        self.home()

    def home(self) -> None:
        """This process is the stage's again."""
        node._entered = None
        self._monkeypatch.chdir(self.root)

    def stage(self, command: str = "train") -> Begun:
        begun = Begun(self.params, StageInputs(command, {}, {"data/rows": "md5", "rlhf_core/code.py": "md5"}))
        begun.scratch.mkdir(parents=True, exist_ok=True)
        (begun.scratch / DESCRIPTION).write_text(command)
        return begun

    def send(self, stage: Begun, name: str) -> StoredJob:
        """Send a job's files, and become a process of it on a node."""
        job = StoredJob(stage)
        with job.sent(JobInputs(), stage.scratch / DESCRIPTION, stage.params, []) as (_, environment):
            files = json.loads(environment[node.ENVIRONMENT]) | {"node_folder": str(self._folder / name)}
        self._monkeypatch.setenv(node.ENVIRONMENT, json.dumps(files))
        node._entered = None
        enter()
        return job


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.chdir(os.getcwd())
    yield Project(tmp_path, monkeypatch)
    node._entered = None


def save(folder: Path, step: int) -> None:
    CheckpointStore(folder).save(step, lambda aside: (aside / "digest.json").write_text(f"{step}"))


def test_a_node_has_the_inputs_and_the_stage_the_outputs(project):
    stage = project.stage()
    job = project.send(stage, "node")
    assert Path("data/rows").read_text() == "rows" and (stage.scratch / DESCRIPTION).read_text() == "train"
    assert not Path("rlhf_core/code.py").exists()  # code comes by Ray
    (stage.scratch / "curves.csv").write_text("step\n1\n")
    work = job_storage()
    work.outputs.append(stage.scratch)
    save(stage.scratch / "sft", 5)
    project.home()
    job.take_back([OUTPUTS], complete=True)
    assert (stage.scratch / "curves.csv").read_text() == "step\n1\n"  # pushed with the checkpoint
    assert sorted(path.name for path in (stage.scratch / "sft/step-5").iterdir()) == ["digest.json", "manifest.json"]
    with pytest.raises(StorageFailed, match="expected the job's policy, got none"):
        job.take_back([OUTPUTS, "policy"], complete=True)
    job.take_back([OUTPUTS, "policy"], complete=False)
    job.remove()
    assert list((project._folder / "storage/train_sft").iterdir()) == []


def test_the_same_work_keeps_its_place_in_the_storage(project):
    first, again = StoredJob(project.stage()), StoredJob(project.stage())
    assert first.work.prefix == again.work.prefix != StoredJob(project.stage("other")).work.prefix
    assert stored_work(project.stage().scratch)["work"] == first.work.prefix


def test_checkpoints_made_without_a_storage_are_resumed_from(project):
    stage = project.stage()
    save(stage.scratch / "sft", 5)
    (stage.scratch / "curves.csv").write_text("step\n5\n")
    project.send(stage, "node")
    assert CheckpointStore(stage.scratch / "sft").latest().step == 5
    assert job_storage().pull(OUTPUTS) and (stage.scratch / "curves.csv").read_text() == "step\n5\n"


def test_other_work_resumes_from_a_checkpoint_that_only_the_storage_has(project):
    older = project.stage("older")
    job = project.send(older, "node")
    save(older.scratch / "sft", 5)
    project.home()
    job.take_back([OUTPUTS], complete=False)
    assert (older.scratch / "sft/step-5/manifest.json").exists()
    stage = project.stage("newer")
    shutil.copytree(older.scratch / "sft", stage.scratch / "sft")  # as checkpoints.resume_from does
    (stage.scratch / "sft/step-5/digest.json").unlink()
    stage.resumed_from.append({"scratch": older.scratch.name})
    write_record(stage.scratch / "resumed_from.json", stage.resumed_from)
    project.send(stage, "another-node")
    assert CheckpointStore(stage.scratch / "sft").latest().step == 5
