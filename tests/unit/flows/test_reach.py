"""A cluster or a storage that a run's stages couldn't use is refused before anything runs."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from clerk_params import CLERK_PARAMS
from own_project import make_project

from flows.chain.command_line import REFUSED
from flows.chain.prepare import prepare_workspace
from flows.chain.reach import check_cluster
from flows.full_pipeline import main
from flows.rounds.series import STAGES
from rlhf_core.config import ConfigError, Params, overridden, read_text

ROOT = Path(__file__).parents[3]
# A module of fsspec's whose storage can be written only by who sees a variable.
LOCKED = """
import os

from fsspec.implementations.memory import MemoryFileSystem


class Locked(MemoryFileSystem):
    protocol = "locked"

    def _open(self, *arguments, **how):
        if "LOCKED_STORAGE_KEY" not in os.environ:
            raise PermissionError("no key")
        return super()._open(*arguments, **how)


def register():
    import fsspec

    fsspec.register_implementation("locked", Locked)
"""


@pytest.fixture
def nowhere() -> Iterator[str]:
    """An address at which nobody listens."""
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{nobody.getsockname()[1]}"


def with_params(**overrides) -> Params:
    given = {key.replace("__", "."): value for key, value in overrides.items()}
    return overridden(read_text(CLERK_PARAMS), given, subject="params.yaml")[1]


def test_the_command_line_refuses_a_cluster_that_is_not_there_and_makes_no_run(tmp_path, monkeypatch, capsys, nowhere):
    project = make_project(tmp_path / "project")
    monkeypatch.chdir(project)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # the small project has no code
    assert main(["--run", "one", "--set", f"cluster.address={nowhere}"]) == REFUSED
    told = capsys.readouterr().err.strip()
    assert told.startswith(f"cluster.address: expected Ray's dashboard at {nowhere}, got no connection") and len(told.splitlines()) == 1
    missing = f"cluster.storage=file://{tmp_path}/missing"
    assert main(["--run", "one", "--set", f"cluster.address={nowhere}", "--set", missing]) == REFUSED
    assert f"cluster.storage: expected the folder {tmp_path}/missing on every node" in capsys.readouterr().err
    assert not (project / "runs/one").exists() and not (tmp_path / "missing").exists()


def test_only_a_stage_with_a_job_on_the_cluster_needs_it(nowhere):
    params = with_params(cluster__address=nowhere, alignment__method="dpo")
    check_cluster(ROOT, params, ["prepare_data", "train_sft", "train_policy", "evaluate"])
    check_cluster(ROOT, with_params(), ["train_policy"])
    on_ranks = with_params(cluster__address=nowhere, sft__ranks=2)
    check_cluster(ROOT, on_ranks, ["prepare_data"])
    with pytest.raises(ConfigError, match="got no connection"):
        check_cluster(ROOT, on_ranks, ["prepare_data", "train_sft"])


@pytest.mark.parametrize("named", [False, True])
def test_the_storage_is_written_with_what_a_stage_sees(tmp_path, monkeypatch, nowhere, named):
    (tmp_path / "locked_storage.py").write_text(LOCKED)
    (tmp_path / "sitecustomize.py").write_text("import locked_storage\n\nlocked_storage.register()\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    monkeypatch.setenv("LOCKED_STORAGE_KEY", "x")
    environment = ["LOCKED_STORAGE_KEY"] if named else []
    params = with_params(cluster__address=nowhere, cluster__storage="locked://bucket", flow__environment=environment)
    message = "got no connection" if named else "cluster.storage: expected to write, .* got PermissionError: no key; .*flow.environment"
    with pytest.raises(ConfigError, match=message):
        check_cluster(ROOT, params, ["train_policy"])


@pytest.mark.long
def test_a_head_that_only_answers_late_is_a_warning(caplog):
    """It may be busy with a job of the run that goes on."""
    with socket.create_server(("127.0.0.1", 0)) as late:
        check_cluster(ROOT, with_params(cluster__address=f"http://127.0.0.1:{late.getsockname()[1]}"), ["train_policy"])
    assert "got no answer within 10 s" in caplog.text and "the run goes on" in caplog.text


def test_a_series_of_dpo_rounds_needs_no_cluster_of_a_stage_that_it_does_not_run(tmp_path, monkeypatch, nowhere):
    project = make_project(tmp_path / "project")
    monkeypatch.chdir(project)
    assert prepare_workspace(project, "series", {"cluster.address": nowhere}).exists()  # `prepare_series` checks its own stages
    check_cluster(ROOT, with_params(cluster__address=nowhere), ["train_sft", "train_reward", "gate_reward", *STAGES])
