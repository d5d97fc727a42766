"""The small chain, run once for all tests that read it, and a shared Ray head."""

from __future__ import annotations

import fcntl
import json
import secrets
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import standing_head
from small_chain import log_of, make_chain, output_of, run
from small_workspace import environment, lay_out_database, wait_until
from watch import Watch

from flows.server import HOST, start, stop, wait_for
from rlhf_core.engines.ports import free_ports


@dataclass(frozen=True)
class FinishedChain:
    """A workspace in which the flow has finished, and its output. Tests read it, and copy it before they change anything.

    watched: what other users could see during the run: the fields secrets, shown, carried and open of `Watch`.
    """

    workspace: Path
    printed: str
    watched: dict[str, list[str]]


@pytest.fixture(scope="session", autouse=True)
def database(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Iterator[None]:
    """Set the folder of `lay_out_database`, shared by all workers."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RLHF_TESTS_DATABASE", str(of_all_workers(tmp_path_factory, worker_id) / "database" / "prefect.db"))
        yield


def of_all_workers(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    base = tmp_path_factory.getbasetemp()
    return base if worker_id == "master" else base.parent


@pytest.fixture(scope="session")
def chain(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> FinishedChain:
    """Run by the first worker; others wait for it. A failed run isn't retried."""
    shared = of_all_workers(tmp_path_factory, worker_id)
    workspace, outcome = shared / "chain" / "flow", shared / "chain" / "exit-code"
    workspace.parent.mkdir(exist_ok=True)
    with (shared / "chain" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not log_of(workspace).exists():
            watch = Watch(make_chain(workspace))
            watch.start()
            code, printed = run(workspace, "flows.full_pipeline")
            watch.stop()
            watched = {name: sorted(getattr(watch, name)) for name in ("secrets", "shown", "carried", "open")}
            outcome.with_name("watched").write_text(json.dumps(watched))
            outcome.with_name("printed").write_text(printed)
            outcome.write_text(str(code))
    assert outcome.exists() and outcome.read_text() == "0", output_of(workspace)
    watched = json.loads(outcome.with_name("watched").read_text())
    return FinishedChain(workspace, outcome.with_name("printed").read_text(), watched)


@pytest.fixture(scope="module")
def cluster(chain: FinishedChain, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict]:
    """A running Ray head for all jobs of a module: params with its address. As on Kubernetes its token is a variable, not a file."""
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    known = tmp_path_factory.mktemp("head") / "head.json"
    command = [sys.executable, standing_head.__file__, str(known)]
    with (
        known.with_name("log").open("w") as log,
        subprocess.Popen(command, env=environment(**token), stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT) as head,
        pytest.MonkeyPatch.context() as ours,
    ):
        wait_until(lambda: known.exists() or head.poll() is not None, 120, "a Ray head")
        assert head.poll() is None, known.with_name("log").read_text()
        for name, value in token.items():
            ours.setenv(name, value)
        yield {"cluster": {"address": json.loads(known.read_text())["address"]}}


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a Prefect server, one for all tests of a worker; it has the runs of earlier tests."""
    (port,) = free_ports(1)
    home = tmp_path_factory.mktemp("prefect")
    lay_out_database(home)
    command = [sys.executable, "-m", "prefect", "server", "start", "--host", HOST, "--port", str(port), "--no-ui"]
    child = start(command, PREFECT_HOME=str(home), PREFECT_SERVER_LOGGING_LEVEL="ERROR", PREFECT_SERVER_ANALYTICS_ENABLED="false")
    url = f"http://{HOST}:{port}/api"
    try:
        wait_for(url, child)
        yield url
    finally:
        stop(child)
