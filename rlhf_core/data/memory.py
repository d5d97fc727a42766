"""A limit on the memory that reading somebody else's file may take, whatever the file says of itself."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa


@contextmanager
def limited_memory(more: int) -> Iterator[None]:
    """What runs inside may take so many bytes more than the process has now; then it gets a MemoryError in the place of the machine's.

    Exact to about 1 GiB, which Arrow's allocator takes in advance. Only on Linux, whose kernel counts.
    """
    if sys.platform != "linux":
        yield
        return
    pa.allocate_buffer(1)  # what the allocator takes in advance is then counted before the limit
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = _data_bytes() + more
    if soft != resource.RLIM_INFINITY and soft < limit:
        yield
        return
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def limited(items: Iterable[Any], more: int) -> Iterator[Any]:
    """The items, each made within so many bytes. Raises MemoryError where one takes more."""
    iterator = iter(items)
    end = object()
    while True:
        with limited_memory(more):
            item = next(iterator, end)
        if item is end:
            return
        yield item


def _data_bytes() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData:"))
    return int(line.split()[1]) * 1024
