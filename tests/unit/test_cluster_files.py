"""What recipes/cluster has for Kubernetes, Docker and Slurm: against KubeRay's fields, and against what it names of this repository."""

from __future__ import annotations

import copy
import re
import shlex
import subprocess
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator, ValidationError
from kuberay import SCHEMAS
from packaging.specifiers import SpecifierSet
from ruamel.yaml import YAML

from rlhf_core.commands import tree
from rlhf_core.config import Params, overridden, parse_assignment, read_recipe, read_text

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "recipes/cluster"
MANIFESTS = {path.stem: YAML(typ="safe", pure=True).load(path.read_text()) for path in sorted((FOLDER / "kubernetes").glob("*.yaml"))}
DOCKERFILES = {"cuda": (FOLDER / "Dockerfile").read_text(), "cpu": (ROOT / "deploy/docker/Dockerfile").read_text()}
DOCKERFILE = DOCKERFILES["cuda"]
SCRIPT = (FOLDER / "slurm.sh").read_text()
GI = {"Gi": 1.0, "Ti": 1024.0}


def validate(manifest: dict[str, Any]) -> None:
    Draft202012Validator(SCHEMAS[manifest["kind"]]).validate(manifest)


def cluster_of(manifest: dict[str, Any]) -> dict[str, Any]:
    return manifest["spec"].get("rayClusterSpec", manifest["spec"])


def pods() -> dict[str, dict[str, Any]]:
    """The pods of nodes, by manifest and group."""
    found = {}
    for name, manifest in MANIFESTS.items():
        if manifest["kind"].startswith("Ray"):
            cluster = cluster_of(manifest)
            groups = {"head": cluster["headGroupSpec"]} | {group["groupName"]: group for group in cluster.get("workerGroupSpecs", [])}
            found |= {f"{name} {group}": spec["template"]["spec"] for group, spec in groups.items()}
    return found


def gib(quantity: str) -> float:
    return float(quantity[:-2]) * GI[quantity[-2:]]


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_manifest_has_only_kuberays_fields(name):
    validate(MANIFESTS[name])


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("spec", "rayClusterSpec", "workerGroupSpec"), []),  # as KubeRay spells no field
        (("spec", "rayClusterSpec", "authOptions", "mode"), "Token"),
        (("spec", "backoffLimit"), "2"),
        (("spec", "shutdownAfterJobFinishes"), False),
        (("spec", "rayClusterSpec", "headGroupSpec", "template", "spec", "volumes", 1, "emptyDir", "sizeLimit"), "64 GB"),
    ],
)
def test_a_field_that_kuberay_would_drop_or_refuse_is_seen(path, value):
    changed = copy.deepcopy(MANIFESTS["rayjob"])
    node = changed
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    with pytest.raises(ValidationError):
        validate(changed)


def test_clusters_have_the_pinned_ray_and_a_token():
    pinned = re.search(r"^ray==(.+)$", (ROOT / "constraints-gpu.txt").read_text(), re.MULTILINE)[1]
    for name in ("raycluster", "rayjob"):
        cluster = cluster_of(MANIFESTS[name])
        assert (cluster["rayVersion"], cluster["authOptions"]["mode"]) == (pinned, "token")


@pytest.mark.parametrize("pod", pods().values(), ids=pods())
def test_a_node_has_shared_memory_whole_gpus_and_no_root(pod):
    (node,) = pod["containers"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in node["volumeMounts"]}
    shared = mounts["/dev/shm"]["emptyDir"]
    assert shared["medium"] == "Memory" and gib(shared["sizeLimit"]) < gib(node["resources"]["limits"]["memory"]) / 2
    assert node["resources"]["requests"] == node["resources"]["limits"] and node["resources"]["limits"]["nvidia.com/gpu"] == "8"
    assert pod["securityContext"]["runAsUser"] == int(re.search(r"useradd .*--uid (\d+)", DOCKERFILE)[1])
    assert not node["securityContext"]["allowPrivilegeEscalation"]
    assert {container["image"] for container in (node, *pod.get("initContainers", ()))} == {node["image"]}
    claim = volumes["workspace"]["persistentVolumeClaim"]["claimName"] if "workspace" in volumes else None
    assert claim in (None, MANIFESTS["workspace"]["metadata"]["name"])
    assert [v["name"] for v in node["env"] if re.search("TOKEN|KEY|SECRET|PASSWORD", v["name"]) and "value" in v] == []


def test_the_pod_without_gpus_has_the_nodes_disk_image_user_and_hub():
    pod, node = MANIFESTS["shell"]["spec"], pods()["rayjob head"]
    (shell,), (head,) = pod["containers"], node["containers"]
    assert [pod[key] for key in ("securityContext", "initContainers")] == [node[key] for key in ("securityContext", "initContainers")]
    assert [shell[key] for key in ("image", "workingDir", "securityContext")] == [
        head[key] for key in ("image", "workingDir", "securityContext")
    ]
    assert shell["volumeMounts"] == head["volumeMounts"][:1] and pod["volumes"] == node["volumes"][:1]
    assert shell["env"] == [variable for variable in head["env"] if variable["name"].startswith("HF_")]
    assert shell["resources"]["limits"].keys() == {"cpu", "memory"}


def clone_as(manifest: dict[str, Any], image: Path, workspace: Path) -> Path:
    """What the init container makes of a disk. Returns the clone."""
    (container,) = manifest["initContainers"]
    shell, option, command = container["command"]
    assert "/opt/rlhf-pipeline" in command
    subprocess.run([shell, option, command.replace("/opt/rlhf-pipeline", str(image))], cwd=workspace, check=True)
    return workspace / "rlhf-pipeline"


def git(folder: Path, *words: str) -> str:
    who = ("-c", "user.name=A", "-c", "user.email=a@example.org")
    return subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


def committed(folder: Path, text: str) -> str:
    (folder / "code").write_text(text)
    git(folder, "add", "code")
    git(folder, "commit", "-m", text)
    return git(folder, "rev-parse", "HEAD")


@pytest.mark.parametrize("name", ["raycluster", "rayjob", "shell"])
def test_the_clone_follows_a_new_image_unless_the_user_has_commits(name, tmp_path):
    manifest = pods()[f"{name} head"] if name != "shell" else MANIFESTS["shell"]["spec"]
    image, workspace = tmp_path / "rlhf-pipeline", tmp_path / "workspace"
    image.mkdir()
    workspace.mkdir()
    git(image, "init", "--initial-branch=main")
    first = committed(image, "one")
    clone = clone_as(manifest, image, workspace)
    assert git(clone, "rev-parse", "HEAD") == first
    (clone / "my_data.yaml").write_text("mine")
    second = committed(image, "two")
    assert git(clone_as(manifest, image, workspace), "rev-parse", "HEAD") == second and (clone / "my_data.yaml").read_text() == "mine"
    mine = committed(clone, "mine")
    committed(image, "three")
    assert git(clone_as(manifest, image, workspace), "rev-parse", "HEAD") == mine


def test_a_stage_has_the_time_for_its_checkpoint_before_its_job_is_killed():
    (grace,) = {v["value"] for p in pods().values() for v in p["containers"][0]["env"] if v["name"] == "RAY_JOB_STOP_WAIT_TIME_S"}
    given = dict(word.split("=", 1) for word in shlex.split(MANIFESTS["rayjob"]["spec"]["entrypoint"]) if "=" in word)
    assert int(grace) == int(given["flow.stop_grace"]) - 5
    assert all(int(grace) <= pod["terminationGracePeriodSeconds"] for pod in pods().values())
    in_script = int(re.search(r"STOP_GRACE:-(\d+)", SCRIPT)[1])
    assert int(re.search(r"--signal=B:USR1@(\d+)", SCRIPT)[1]) == in_script + 30


def test_the_job_runs_a_recipe_for_its_gpus():
    job = MANIFESTS["rayjob"]["spec"]
    command = shlex.split(job["entrypoint"])
    at = command.index("-m")
    options = tree().parse_args(["run", *command[at + 2 :]])[1].arguments
    assert command[at + 1] == "flows.full_pipeline" and options["name"]
    params = params_of(options["given"].recipes[0], options["given"].assignments)
    gpus = 8 * (1 + sum(group["replicas"] for group in job["rayClusterSpec"]["workerGroupSpecs"]))
    assert params.training.ranks == params.rl.trainer.ranks + params.rl.rollout.engines == gpus
    assert params.cluster.address == "http://127.0.0.1:8265"


def params_of(recipe: Path, assignments: Sequence[str]) -> Params:
    given = read_recipe(ROOT / recipe) | dict(map(parse_assignment, assignments))
    return overridden(read_text(ROOT / "params.yaml"), given, subject=recipe.name, complete=False)[1]


# The images


def instructions(text: str) -> list[tuple[str, str]]:
    text = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ")
    return [(line.split()[0], line.partition(" ")[2].strip()) for line in text.splitlines() if line.strip()]


def copied(rest: str) -> list[str]:
    return [word for word in rest.split() if not word.startswith("--")][:-1]


@pytest.mark.parametrize("kind", DOCKERFILES)
def test_an_image_copies_and_makes_what_is_there(kind):
    steps = instructions(DOCKERFILES[kind])
    for instruction, rest in steps:
        if instruction == "COPY":
            assert all((ROOT / source).exists() for source in copied(rest))
    (made,) = re.findall(r"make (setup EXTRAS=(\S+)(?: DOCTOR_ARGS=(\S+))?)", next(rest for _, rest in steps if "make setup" in rest))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(made[1].split(",")) <= project["optional-dependencies"].keys()
    asked = subprocess.run(["make", "-n", "install", *made[0].split()[1:]], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    constraints = {"cpu": "constraints.txt", "cuda": "constraints-gpu.txt"}[kind]
    assert f"-c {constraints} -e '.[{made[1]}]'" in asked and f"tools.doctor --fix {made[2]}" in asked
    assert any(constraints in copied(rest) for instruction, rest in steps if instruction == "COPY")
    (base,) = [rest for instruction, rest in steps if instruction == "FROM"]
    assert SpecifierSet(project["requires-python"]).contains(re.fullmatch(r"python:(3\.\d+)-slim-bookworm", base)[1])


@pytest.mark.parametrize("kind", DOCKERFILES)
def test_an_image_has_its_packages_below_the_code(kind):
    """So that a commit makes a small layer. The doctor runs with what was copied before the installation."""
    steps = instructions(DOCKERFILES[kind])
    at = next(n for n, (_, rest) in enumerate(steps) if "make setup" in rest)
    before, after = ([copied(rest) for kind, rest in part if kind == "COPY"] for part in (steps[:at], steps[at:]))
    assert after == [["."]] and "." not in [source for sources in before for source in sources]
    modules = {str(path.relative_to(ROOT)) for sources in before for source in sources for path in walked(ROOT / source)}
    for module in [m for m in modules if m.endswith(".py")]:
        for name in re.findall(r"^(?:from|import) ((?:rlhf_core|tools)[\w.]*)", (ROOT / module).read_text(), re.MULTILINE):
            assert {f"{name.replace('.', '/')}.py", f"{name.replace('.', '/')}/__init__.py"} & modules, (module, name)


def walked(path: Path) -> list[Path]:
    return [path] if path.is_file() else [found for found in path.rglob("*.py") if found.is_file()]


@pytest.mark.parametrize("kind", DOCKERFILES)
def test_an_image_runs_as_a_user_and_has_no_secret(kind):
    steps = instructions(DOCKERFILES[kind])
    kinds = [kind for kind, _ in steps]
    assert [rest for kind, rest in steps if kind == "USER"] == ["rlhf"]
    assert kinds.index("USER") < kinds.index("COPY") and "ADD" not in kinds and "ARG" not in kinds
    assert not re.search(r"(TOKEN|KEY|SECRET|PASSWORD)\w*=", DOCKERFILES[kind])
    left_out = set((ROOT / ".dockerignore").read_text().splitlines())
    assert {".git/config", ".dvc/config.local", ".prefect", ".venv", "**/.env"} <= left_out
    ignored = {line.strip("/") for line in (ROOT / ".gitignore").read_text().splitlines() if re.fullmatch(r"/[a-z]+/", line)}
    assert ignored <= left_out


@pytest.mark.parametrize("kind", DOCKERFILES)
def test_an_image_has_python_and_ray_on_its_path(kind):
    folders = [rest for instruction, rest in instructions(DOCKERFILES[kind]) if instruction == "WORKDIR"]
    assert f"PATH={folders[0]}/.venv/bin:$PATH" in DOCKERFILES[kind]
