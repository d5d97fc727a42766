"""What deploy/ has for containers and CI is checked against Prefect's types, and against what it names of this repository."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from jsonschema import Draft202012Validator
from ruamel.yaml import YAML

from rlhf_core.commands import tree

ROOT = Path(__file__).parents[2]
COMPOSE = YAML(typ="safe", pure=True).load((ROOT / "deploy/docker/compose.yaml").read_text())
WORKFLOW = YAML(typ="safe", pure=True).load((ROOT / "deploy/ci/github.yml").read_text())
DOCKERFILE = (ROOT / "deploy/docker/Dockerfile").read_text()
POOLS = {path.stem: json.loads(path.read_text()) for path in sorted((ROOT / "deploy/pools").glob("*.json"))}
CLAIM = YAML(typ="safe", pure=True).load((ROOT / "recipes/cluster/kubernetes/workspace.yaml").read_text())["metadata"]["name"]


def placeholders(node: Any) -> set[str]:
    return set(re.findall(r"{{ (\w+) }}", json.dumps(node)))


def configured(kind: str, values: dict[str, Any]) -> Any:
    """What Prefect's worker makes of the pool's template for a flow run, without a container or pod."""
    if kind == "docker":
        from prefect_docker.worker import DockerWorkerJobConfiguration as Configuration
    else:
        from prefect_kubernetes.worker import KubernetesWorkerJobConfiguration as Configuration
    from prefect.client.schemas.objects import FlowRun

    # A client is asked for blocks and variables of the server alone, of which the templates have none.
    found = asyncio.run(Configuration.from_template_and_values(POOLS[kind], values, client=object()))
    found.prepare_for_flow_run(FlowRun(id=uuid4(), flow_id=uuid4(), name="quiet-crane"))
    return found


@pytest.mark.parametrize("kind", POOLS)
def test_a_pools_template_uses_each_variable_and_its_defaults_meet_its_schema(kind):
    from prefect.utilities.schema_tools.validation import is_valid_schema

    template = POOLS[kind]
    variables = template["variables"]
    Draft202012Validator.check_schema(variables)
    is_valid_schema(variables, preprocess=False)
    assert placeholders(template["job_configuration"]) == variables["properties"].keys()
    defaults = {name: schema["default"] for name, schema in variables["properties"].items() if "default" in schema}
    Draft202012Validator(variables).validate(defaults)


def test_the_docker_pool_runs_flows_on_the_disk_and_network_of_compose():
    found = configured("docker", {})
    assert found.image == COMPOSE["services"]["worker"]["image"] and found.command
    (volume,) = found.volumes
    mounted = COMPOSE["services"]["worker"]["volumes"][0]
    assert volume == f"{COMPOSE['name']}_{mounted}" and found.networks == [f"{COMPOSE['name']}_default"]
    assert found.container_create_kwargs["init"] and found.env["PYTHONPATH"] == "/workspace/rlhf-pipeline"
    assert found.env["PREFECT_API_URL"] == COMPOSE["services"]["worker"]["environment"]["PREFECT_API_URL"]
    with pytest.raises(ValueError, match="volume"):
        configured("docker", {"volumes": ["workspace"]})


def test_the_kubernetes_pool_makes_a_job_without_root_with_the_disk_and_shared_memory():
    found = configured("kubernetes", {"resources": {"cpu": "4", "memory": "16Gi"}})
    job = found.job_manifest
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    claims = {v["name"]: v.get("persistentVolumeClaim", {}).get("claimName") for v in pod["volumes"]}
    mounts = {m["mountPath"]: m["name"] for m in container["volumeMounts"]}
    assert (job["kind"], claims[mounts["/workspace"]], claims[mounts["/dev/shm"]]) == ("Job", CLAIM, None)
    assert container["resources"]["limits"] == {"cpu": "4", "memory": "16Gi"} == container["resources"]["requests"]
    assert pod["securityContext"]["runAsUser"] == 1000 and not container["securityContext"]["allowPrivilegeEscalation"]
    assert {"name": "PYTHONPATH", "value": "/workspace/rlhf-pipeline"} in container["env"] and container["args"]


def test_compose_publishes_to_this_machine_alone_and_has_no_password():
    services = COMPOSE["services"]
    assert [port for service in services.values() for port in service.get("ports", [])] == ["127.0.0.1:4200:4200"]
    given = [value for service in services.values() for name, value in service["environment"].items() if re.search("PASS|AUTH", name)]
    assert len(given) == 3 and all(re.match(r"\$\{[A-Z_]+(:\?.+)?\}$", value) for value in given)
    database = services["server"]["environment"]["PREFECT_API_DATABASE_CONNECTION_URL"]
    assert "${POSTGRES_PASSWORD}@postgres:5432/" in database and "postgresql+asyncpg://" in database
    assert services["server"]["depends_on"] == {"postgres": {"condition": "service_healthy"}}
    mounted = {volume.partition(":")[0] for service in services.values() for volume in service.get("volumes", [])}
    assert mounted == set(COMPOSE["volumes"])


def test_compose_builds_and_starts_what_is_there():
    services = COMPOSE["services"]
    build = services["server"]["build"]
    assert (ROOT / "deploy/docker" / build["context"] / build["dockerfile"]).resolve() == ROOT / "deploy/docker/Dockerfile"
    program, script, kind = services["worker"]["command"]
    assert (program, script) == ("bash", "/opt/rlhf-pipeline/deploy/docker/worker.sh") and (ROOT / "deploy/docker/worker.sh").exists()
    assert f"WORKDIR {Path(script).parents[2]}" in DOCKERFILE and kind in ("process", "none")


def git(folder: Path, *words: str) -> str:
    return subprocess.run(["git", *words], cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


def test_a_file_of_secrets_beside_compose_stays_out_of_commits_and_images():
    assert git(ROOT, "check-ignore", "deploy/docker/.env", ".env") == "deploy/docker/.env\n.env"
    assert {".env", "**/.env"} <= {*(ROOT / ".dockerignore").read_text().split()}


def test_the_worker_script_asks_for_its_kind_and_names_it(tmp_path):
    done = subprocess.run(["bash", ROOT / "deploy/docker/worker.sh"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode and "expected process or none" in done.stderr


def test_the_workflow_runs_commands_that_there_are():
    (job,) = WORKFLOW["jobs"].values()
    lines = [step["run"] for step in job["steps"] if "run" in step]
    (run,) = [line for line in lines if line.startswith("rlhf run ")]
    words = shlex.split(run.replace("$SMALL", job["env"]["SMALL"]).replace("$RECIPE", job["env"]["RECIPE"]))
    options = tree().parse_args(words[1:])[1].arguments
    stages = YAML(typ="safe", pure=True).load((ROOT / "dvc.yaml").read_text())["stages"]
    assert options["until"] in stages and (ROOT / options["given"].recipes[0]).exists()
    targets = [word for line in lines for word in re.findall(r"dvc repro (\w+)", line)]
    assert targets == ["gate_reward"] and "gate_reward" in stages
    assert {f"runs/{options['name']}"} == {word for line in lines for word in re.findall(r"cd (runs/\w+)", line)}
    (artifact,) = [step["with"] for step in job["steps"] if step.get("uses", "").startswith("actions/upload-artifact")]
    assert artifact["path"] == f"runs/{options['name']}/reports/*.html" and WORKFLOW["permissions"] == {"contents": "read"}
    assert subprocess.run(["make", "-n", "setup", "EXTRAS=cpu"], cwd=ROOT, capture_output=True, check=True).stdout
