"""Reads how much memory this machine's host, within its cgroup, and its GPUs have left, and whether its CPU has AMX. Nothing is allocated
for it.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

QUERY_SECONDS = 10.0  # for nvidia-smi
MEMINFO, CGROUP, CPUINFO = Path("/proc/meminfo"), Path("/sys/fs/cgroup"), Path("/proc/cpuinfo")
MIB = 1 << 20


@dataclass(frozen=True)
class Gpu:
    """Bytes of a GPU's memory, in total and free."""

    total: float
    free: float


@dataclass(frozen=True)
class Machine:
    """A machine, or a cluster of equal ones.

    host: bytes of each host that processes may still take. host_total: all bytes of each host.
    gpus: GPUs of all hosts. gpus_per_host: None: one host has all.
    """

    host: float
    gpus: tuple[Gpu, ...] = ()
    host_total: float = 0.0
    gpus_per_host: int | None = None

    @property
    def nodes(self) -> list[int]:
        """Number of GPUs of each host."""
        per_host = self.gpus_per_host or len(self.gpus)
        return [min(per_host, len(self.gpus) - first) for first in range(0, len(self.gpus), per_host)] if self.gpus else []

    @property
    def empty(self) -> Machine:
        """The machine as it would be if no process took memory."""
        host = max(self.host, self.host_total)
        return replace(self, host=host, gpus=tuple(Gpu(gpu.total, gpu.total) for gpu in self.gpus))


def here() -> Machine:
    """Return this machine with the GPUs that this process sees."""
    return Machine(host_bytes(), visible_gpus(os.environ.get("CUDA_VISIBLE_DEVICES")), _meminfo(MEMINFO, "MemTotal"))


def whole() -> Machine:
    """Return this machine with all of its GPUs, for a process that sees none of them."""
    return Machine(host_bytes(), visible_gpus(None), _meminfo(MEMINFO, "MemTotal"))


def host_bytes(meminfo: Path = MEMINFO, cgroup: Path = CGROUP, groups: Path = Path("/proc/self/cgroup")) -> float:
    """Return the bytes that processes can take without swapping, at most what the limits of this process's cgroups leave.

    Sources: proc(5), MemAvailable; Documentation/admin-guide/cgroup-v2.rst, memory.max, and cgroup-v1/memory.rst
    """
    left = [_left(folder) for folder in _folders(cgroup, groups)] + [_left_of_first_version(cgroup / "memory")]
    return float(min([_meminfo(meminfo, "MemAvailable"), *(bytes_left for bytes_left in left if bytes_left is not None)]))


def _meminfo(path: Path, name: str) -> int:
    return next(int(line.split()[1]) * 1024 for line in path.read_text().splitlines() if line.startswith(f"{name}:"))


def _folders(cgroup: Path, groups: Path) -> list[Path]:
    """Return the folder of this process's cgroup (version 2) and those of the cgroups around it."""
    try:
        own = next((line[3:] for line in groups.read_text().splitlines() if line.startswith("0::")), "/")
    except OSError:
        own = "/"
    folder = cgroup / own.strip("/")
    return [path for path in (folder, *folder.parents) if path == cgroup or cgroup in path.parents]


def _left(cgroup: Path) -> int | None:
    """Return the bytes left in a cgroup of version 2, or None without a limit. Inactive page cache counts as left."""
    limit, used = _number(cgroup / "memory.max"), _number(cgroup / "memory.current")
    return None if limit is None or used is None else max(0, limit - used + _statistic(cgroup / "memory.stat", "inactive_file"))


def _left_of_first_version(cgroup: Path) -> int | None:
    limit, used = _number(cgroup / "memory.limit_in_bytes"), _number(cgroup / "memory.usage_in_bytes")
    return None if limit is None or used is None else max(0, limit - used + _statistic(cgroup / "memory.stat", "total_inactive_file"))


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def _statistic(path: Path, name: str) -> int:
    try:
        return next((int(line.split()[1]) for line in path.read_text().splitlines() if line.startswith(f"{name} ")), 0)
    except OSError:
        return 0


def visible_gpus(visible: str | None) -> tuple[Gpu, ...]:
    """Return NVIDIA's GPUs if PyTorch is built for them. nvidia-smi is asked, because CUDA itself would take memory of each GPU.

    Args:
        visible: as for `parse_gpus`.
    """
    if shutil.which("nvidia-smi") is None or not _torch_uses_gpus():
        return ()
    query = ["nvidia-smi", "--query-gpu=index,uuid,memory.total,memory.free", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=QUERY_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    return parse_gpus(done.stdout, visible)


def parse_gpus(table: str, visible: str | None) -> tuple[Gpu, ...]:
    """Return the GPUs in a table of nvidia-smi that a process may see.

    Args:
        table: lines of index, UUID, total and free memory in MiB.
        visible: CUDA_VISIBLE_DEVICES: numbers or UUIDs (or beginnings of them), up to the first that names no GPU; None: all.
    """
    rows = [[cell.strip() for cell in line.split(",")] for line in table.splitlines() if line.count(",") == 3]
    gpus = {}
    for index, uuid, total, free in rows:
        if total.isdecimal() and free.isdecimal():
            gpus[index, uuid] = Gpu(int(total) * MIB, int(free) * MIB)
    if visible is None:
        return tuple(gpus.values())
    found = []
    for name in (name.strip() for name in visible.split(",")):
        named = [gpu for (index, uuid), gpu in gpus.items() if name and (index == name or uuid.startswith(name))]
        if len(named) != 1:
            break
        found += named
    return tuple(found)


@cache
def has_amx(cpuinfo: Path = CPUINFO) -> bool:
    """Return whether this CPU has AMX for bfloat16; the CPU backend then computes in bfloat16 too (rlhf_core/models/cpu/packed.py)."""
    return cpuinfo.exists() and any(line.startswith("flags") and "amx_bf16" in line.split() for line in cpuinfo.read_text().splitlines())


def _torch_uses_gpus() -> bool:
    try:
        return "+cpu" not in importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return False
