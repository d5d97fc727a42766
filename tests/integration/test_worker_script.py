"""The worker of deploy/docker/compose.yaml, with its environment and that of its server, on this machine instead of in containers."""

from __future__ import annotations

import json
import os
import sys
import urllib.request
from pathlib import Path

import pytest
from ruamel.yaml import YAML

sys.path.insert(0, str(Path(__file__).parent))
from small_chain import make_chain
from small_workspace import ROOT, SERVER_SECONDS, ask_server, git, processes_in, wait_until

from flows.server import answers, start, stop
from rlhf_core.engines.ports import free_ports

pytestmark = [pytest.mark.timeout(600), pytest.mark.long]
SERVICES = YAML(typ="safe", pure=True).load((ROOT / "deploy/docker/compose.yaml").read_text())["services"]
AUTH = "rlhf:secret"


@pytest.fixture
def places(tmp_path):
    """A checkout in the place of the image's code, and an empty disk."""
    for name in ("image", "disk"):
        (tmp_path / name).mkdir()
    return make_chain(tmp_path / "image"), tmp_path / "disk"


def compose_environment(service: str, **more: str) -> dict[str, str]:
    """A service's variables, with this test's secret and without the database, which is SQLite's here."""
    given = {name: value for name, value in SERVICES[service]["environment"].items() if "DATABASE" not in name}
    secret = {name: AUTH for name, value in given.items() if "PREFECT_AUTH" in value}
    return given | secret | more


def test_the_worker_clones_deploys_and_runs_a_flow(places, tmp_path):
    image, disk = places
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}/api"
    home = {"PREFECT_HOME": str(tmp_path / "server"), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    served = compose_environment("server", PREFECT_UI_API_URL=url, **home)
    command = [word if word != "4200" else str(port) for word in SERVICES["server"]["command"]]
    bash, _, *kind = SERVICES["worker"]["command"]
    with (tmp_path / "server.log").open("w") as log, (tmp_path / "worker.log").open("w") as out:
        server = start(command, log, **served)
        worker = None
        try:
            wait_until(lambda: answers(url), SERVER_SECONDS, "the server")
            given = compose_environment("worker", PREFECT_API_URL=url, IMAGE_CODE=str(image), WORKSPACE=str(disk), **home)
            worker = start([bash, str(ROOT / "deploy/docker/worker.sh"), *kind], out, **given)
            found = deployment(url)
            (step,) = found["pull_steps"]
            assert step["prefect.deployments.steps.set_working_directory"]["directory"] == str(disk / "rlhf-pipeline")
            parameters = {"run": "small", "recipes": ["recipes/clerk.yaml"], "until": "hash_inputs"}
            run = ask_server(url, f"deployments/{found['id']}/create_flow_run", password=AUTH, parameters=parameters)
            state = lambda: read(url, f"flow_runs/{run['id']}")["state_name"]  # noqa: E731
            wait_until(lambda: state() in ("Completed", "Failed", "Crashed"), 300, "the flow run")
            assert state() == "Completed", (tmp_path / "worker.log").read_text()
        finally:
            for child in filter(None, (worker, server)):
                stop(child, grace=60.0)
    assert (disk / "rlhf-pipeline/runs/small").is_dir() and git(disk / "rlhf-pipeline", "branch", "--list", "run/small")
    wait_until(lambda: not processes_in(disk), 60, "the end of everything")


def deployment(url: str) -> dict:
    wanted = {"deployments": {"name": {"any_": ["full-pipeline"]}}}
    found: list[dict] = []
    wait_until(lambda: bool(found.extend(ask_server(url, "deployments/filter", password=AUTH, **wanted)) or found), 180, "the deployment")
    return found[0]


def read(url: str, path: str) -> dict:
    import base64

    request = urllib.request.Request(f"{url}/{path}", headers={"Authorization": f"Basic {base64.b64encode(AUTH.encode()).decode()}"})
    with urllib.request.urlopen(request, timeout=30) as response:
        return json.load(response)
