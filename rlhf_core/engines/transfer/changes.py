"""What has changed in a layer's bytes since they were last sent: found, packed, applied and verified.

At a small learning rate most bfloat16 weights round to the number that they were. Changes are packed by numbers of two bytes: for each row
of 256 numbers the count of changes, and for each change its new value and its place in the row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import xxhash

ROW = 256  # numbers of which a byte names the place
PAYS = 0.25  # changes with at most this part of a layer's bytes are sent; above, the layer (docs/performance.md)


@dataclass(frozen=True)
class PackedLayer:
    """A layer's bytes on their way to engines.

    whole: [N] uint8. version: another one than before if the bytes have changed.
    changes: [M] uint8, by which the bytes of the version `before` become these; None: they aren't known, or too many.
    """

    number: int
    whole: torch.Tensor
    version: int = 0
    before: int | None = None
    changes: torch.Tensor | None = None


class SentLayers:
    """Layers as they were last sent.

    numbers, changed: how many numbers of two bytes were compared so far, and how many of them had changed.
    """

    def __init__(self) -> None:
        self.numbers = self.changed = 0
        self._latest: dict[int, PackedLayer] = {}
        self._versions = 0

    def renew(self, number: int, whole: torch.Tensor) -> PackedLayer:
        """Return a layer with what has changed since it was last sent, and keep its bytes until the next time."""
        last, self._versions = self._latest.get(number), self._versions + 1
        self._latest[number] = layer = PackedLayer(number, whole, self._versions)
        if last is None or len(last.whole) != len(whole):
            return layer
        differs = changed_numbers(last.whole, whole)
        count = int(np.count_nonzero(differs))
        self.numbers, self.changed = self.numbers + len(differs), self.changed + count
        if not count:
            self._latest[number] = last
            return replace(last, before=last.version, changes=whole[:0])
        if 2 * _rows(differs) + 3 * count > PAYS * len(whole):
            return layer
        return replace(layer, before=last.version, changes=pack_changes(whole, differs))


def changed_numbers(old: torch.Tensor, new: torch.Tensor) -> np.ndarray:
    """Return whether each number differs [N / 2] bool, of bytes [N] uint8."""
    return _numbers(old) != _numbers(new)


def pack_changes(new: torch.Tensor, differs: np.ndarray) -> torch.Tensor:
    """Return the bytes [M] of changes: for each row the count of numbers that differ, then their new values, then their places."""
    numbers, positions = _numbers(new), np.flatnonzero(differs)
    counts = np.diff(np.searchsorted(positions, np.arange(_rows(numbers) + 1) * ROW)).astype(np.int16)
    parts = counts.view(np.uint8), numbers[positions].view(np.uint8), positions.astype(np.uint8)  # the last byte is the place in the row
    return torch.from_numpy(np.concatenate(parts))


def apply_changes(flat: torch.Tensor, changes: torch.Tensor) -> bool:
    """Write changes into the bytes [N]. Return False, without a change, if these aren't changes of so many bytes."""
    if not len(changes):
        return True
    numbers, given = _numbers(flat), changes.numpy()
    rows = _rows(numbers)
    if len(given) < 2 * rows:
        return False
    counts = given[: 2 * rows].view(np.int16)
    total = int(counts.sum(dtype=np.int64))
    if counts.min() < 0 or len(given) != 2 * rows + 3 * total:
        return False
    positions = np.repeat(np.arange(rows) * ROW, counts) + given[2 * rows + 2 * total :]
    if total and positions.max() >= len(numbers):  # damaged places of the last row
        return False
    numbers[positions] = given[2 * rows : 2 * rows + 2 * total].view(np.int16)
    return True


def digest(flat: torch.Tensor) -> int:
    """Return 63 bits that identify bytes [N]."""
    return xxhash.xxh3_64_intdigest(flat.numpy()) >> 1


def padded(sizes: Sequence[int]) -> int:
    """Return the bytes of a layer, which are whole numbers of two bytes, given those of its tensors."""
    return -(-sum(sizes) // 2) * 2


def _numbers(flat: torch.Tensor) -> np.ndarray:
    return flat.numpy().view(np.int16)


def _rows(numbers: np.ndarray) -> int:
    return -(-len(numbers) // ROW)
