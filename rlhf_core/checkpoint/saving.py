"""Writes the files of a checkpoint with torch.save."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.serialization import get_crc32_options, set_crc32_options


@contextmanager
def without_crc32() -> Iterator[None]:
    """Keep torch.save from computing the CRC-32 of its records, which would take most of its time. The checkpoint's manifest has hashes."""
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)
