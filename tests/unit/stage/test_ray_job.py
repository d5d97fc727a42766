"""A stage whose storage isn't there is refused at its first job; a cluster that isn't there may come back."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from clerk_params import CLERK_PARAMS

from rlhf_core.checkpoint.settings import StoreSettings
from rlhf_core.config import Params, load_params
from rlhf_core.stage.job import Job
from rlhf_core.stage.ray_job import REACHED, submit_job
from rlhf_core.stage.run import JobCrashed, StageRefused

ROOT = Path(__file__).parents[3]


@dataclass
class Begun:
    """What of a stage in its `with` block a job's submission needs."""

    params: Params
    scratch: Path
    name: str = "train_policy"
    stop_requested: bool = False
    fingerprint: str = "0123456789abcdef"


@pytest.fixture
def nowhere() -> Iterator[str]:
    """An address at which nobody listens."""
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{nobody.getsockname()[1]}"


def begun(folder: Path, **cluster) -> Begun:
    params = load_params(CLERK_PARAMS)
    given = params.cluster.model_copy(update={"silence_timeout": 0.5, "start_timeout": 0.5, **cluster})
    return Begun(params.model_copy(update={"cluster": given}), folder)


def submit(stage: Begun) -> None:
    job = Job("train_policy", "launch", "run", (), stage.params, 1, Path(), stage.scratch, StoreSettings(), 1)
    submit_job(stage, job, subject="RL job", description=stage.scratch / "job.pkl", cpus=2)


def test_a_first_job_says_that_nobody_listens_and_waits(tmp_path, nowhere, caplog):
    with pytest.raises(JobCrashed, match=f"Ray head at {nowhere}: expected the head to answer within cluster.silence_timeout"):
        submit(begun(tmp_path, address=nowhere))
    assert f"cluster.address: expected Ray's dashboard at {nowhere}, got no connection (" in caplog.text
    assert "Connection refused" in caplog.text and "waiting for it up to 0 s" in caplog.text and not (tmp_path / REACHED).exists()


def test_a_cluster_that_was_there_before_is_waited_for(tmp_path, nowhere):
    (tmp_path / REACHED).touch()
    with pytest.raises(JobCrashed, match=f"Ray head at {nowhere}: expected the head to answer within cluster.silence_timeout"):
        submit(begun(tmp_path, address=nowhere))


def test_a_head_that_answers_late_is_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr("rlhf_core.engines.ray.cluster.check_head.__defaults__", (0.2,))
    with socket.create_server(("127.0.0.1", 0)) as late:
        address = f"http://127.0.0.1:{late.getsockname()[1]}"
        with pytest.raises(JobCrashed, match=f"Ray head at {address}: expected the head to answer within cluster.silence_timeout"):
            submit(begun(tmp_path, address=address))


@pytest.mark.parametrize(
    ("storage", "message"),
    [
        ("file://{}/missing", "expected the folder .*/missing on every node, got none on .*create it, or mount its disk"),
        ("nowhere://bucket/x", "expected an address that pyarrow or fsspec reads, got nowhere://bucket/x, which fails"),
    ],
)
def test_a_first_job_is_refused_where_the_storage_cannot_be_opened(tmp_path, nowhere, storage, message):
    with pytest.raises(StageRefused, match=message):
        submit(begun(tmp_path, address=nowhere, storage=storage.format(tmp_path)))
