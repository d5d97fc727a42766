"""The doctor finds what doesn't fit. The packages that it is shown are real ones, made here with their metadata."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlhf_core.doctor import Finding, find_conflicts, find_git, find_media, find_torn_lock, show

ROOT = Path(__file__).parents[2]


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
    done = subprocess.run([sys.executable, "-m", "rlhf_core.doctor"], cwd=ROOT, capture_output=True, text=True, check=False)
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


def test_a_folder_without_a_commit_is_broken(tmp_path):
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
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
