"""The memory of this machine, from the kernel's files and nvidia-smi's table."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
import torch

from rlhf_core.planning.machine import Gpu, Machine, has_amx, here, host_bytes, parse_gpus

GIB = 2**30
TABLE = "0, GPU-aa11, 81559, 80000\n1, GPU-bb22, 81559, 1000\n2, GPU-bb33, [N/A], [N/A]\n"


def write(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("_", ".", 1)).write_text(text)
    return folder


@pytest.fixture
def meminfo(tmp_path: Path) -> Path:
    (tmp_path / "meminfo").write_text(f"MemTotal: {64 * 2**20} kB\nMemFree: 1 kB\nMemAvailable: {32 * 2**20} kB\n")
    return tmp_path / "meminfo"


def test_without_a_cgroup_the_kernels_figure_counts(tmp_path, meminfo):
    assert host_bytes(meminfo, tmp_path / "none", tmp_path / "none") == 32 * GIB


def test_the_limit_of_the_own_cgroup_or_of_one_around_it_counts(tmp_path, meminfo):
    top = write(tmp_path / "cgroup", memory_max="max", memory_current="5")
    write(top / "slice", memory_max=str(20 * GIB), memory_current=str(8 * GIB), memory_stat=f"anon 1\ninactive_file {3 * GIB}\n")
    write(top / "slice/unit", memory_max=str(30 * GIB), memory_current=str(7 * GIB), memory_stat="inactive_file 0\n")
    (tmp_path / "groups").write_text("0::/slice/unit\n")
    assert host_bytes(meminfo, top, tmp_path / "groups") == 15 * GIB  # 20 - 8 + 3, less than 30 - 7 and 32


def test_a_cgroup_of_the_first_version_counts(tmp_path, meminfo):
    folder = tmp_path / "cgroup/memory"
    folder.mkdir(parents=True)
    for name, text in {"limit_in_bytes": 10 * GIB, "usage_in_bytes": 4 * GIB, "stat": f"total_inactive_file {GIB}\n"}.items():
        (folder / f"memory.{name}").write_text(str(text))
    assert host_bytes(meminfo, tmp_path / "cgroup", tmp_path / "none") == 7 * GIB


def test_this_machine_has_what_psutil_sees_at_most():
    machine = here()
    seen = psutil.virtual_memory()
    assert 0 < machine.host <= 1.05 * seen.available and machine.host_total == pytest.approx(seen.total, rel=0.01)
    assert machine.empty.host == max(machine.host, machine.host_total)


@pytest.mark.parametrize(
    ("visible", "free"),
    [(None, [80000, 1000]), ("1", [1000]), ("1,0", [1000, 80000]), ("GPU-aa", [80000]), ("", []), ("0,7,1", [80000]), ("GPU-", [])],
)
def test_gpus_are_those_that_the_process_sees(visible, free):
    assert parse_gpus(TABLE, visible) == tuple(Gpu(81559 * 2**20, f * 2**20) for f in free)


def test_an_empty_machine_has_all_of_its_gpus_memory():
    assert Machine(1.0, (Gpu(10, 3),), 5.0).empty == Machine(5.0, (Gpu(10, 10),), 5.0)


def test_amx_is_what_torch_finds_too(tmp_path: Path):
    assert has_amx() == torch.cpu._is_amx_tile_supported()
    without, cpuinfo = tmp_path / "without", tmp_path / "cpuinfo"
    without.write_text("processor\t: 0\nflags\t\t: fpu avx512_bf16\n")
    cpuinfo.write_text("processor\t: 0\nflags\t\t: fpu avx512_bf16 amx_bf16 amx_tile\n")
    assert has_amx(cpuinfo) and not has_amx(without) and not has_amx(tmp_path / "none")
