"""Reads the files of torch.save by torch's restricted loading, which runs no code that a file names.

A tensor becomes a SavedTensor, a slice of the file whose bytes aren't read. torch is imported when a file is read.
"""

from __future__ import annotations

import hashlib
import math
import pickle
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlhf_core.storage.hashing import Span

_VALUES = {"float64": "<d", "float32": "<f", "int64": "<q", "int32": "<i", "bool": "<?", "uint8": "<B"}


@dataclass(frozen=True)
class SavedTensor:
    """A tensor as a piece of a file; stride and offset count elements of `width` bytes.

    start: the byte of the file at which its storage begins. size: bytes of the storage.
    """

    path: Path
    dtype: str
    width: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    start: int
    size: int

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    def part(self, start: int, count: int) -> SavedTensor:
        """Return elements `start` to `start + count` of a flat tensor."""
        count = max(0, min(count, self.count - start))
        return replace(self, shape=(count,), stride=(1,), offset=self.offset + start)

    @property
    def piece(self) -> Span:
        """Span of bytes with the tensor's elements; the whole storage if they aren't in order."""
        if not self._in_order:
            return self.start, self.start + self.size
        first = self.start + self.offset * self.width
        return first, first + self.count * self.width

    def description(self, hashes: Mapping[Span, bytes]) -> Any:
        """Return the value of a single number, otherwise a hash of type, shape and the elements in order.

        If the elements are stored in another order, the whole storage is hashed, with stride and offset.

        Args:
            hashes: hash of each piece of the file by its span.
        """
        if self.is_number:
            with self.path.open("rb") as file:
                file.seek(self.start + self.offset * self.width)
                return struct.unpack(_VALUES[self.dtype], file.read(self.width))[0]
        order = "" if self._in_order else f" {self.stride} {self.offset}"
        first, end = self.piece
        return hashed(f"{self.dtype} {self.shape}{order}".encode(), hashes[first, end] if first < end else b"")

    @property
    def is_number(self) -> bool:
        return self.count == 1 and self.dtype in _VALUES

    @property
    def _in_order(self) -> bool:
        step = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and stride != step:
                return False
            step *= size
        return True


def hashed(*content: bytes) -> str:
    digest = hashlib.sha256()
    for piece in content:
        digest.update(piece)
    return f"sha256:{digest.hexdigest()[:32]}"


class _StandIn:
    """Stands for an object of a DeepSpeed class, with its arguments and attributes."""

    def __init__(self, *arguments: Any):
        if arguments:
            self.arguments = [*arguments, {}]


# Classes of plain values in DeepSpeed's files. torch knows the others.
_OF_DEEPSPEED = (
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.utils.tensor_fragment.fragment_address",
)
_STAND_INS = [(type(name.rpartition(".")[2], (_StandIn,), {}), name) for name in _OF_DEEPSPEED]


def read_torch_file(path: Path) -> Any:
    """Read a file of torch.save, with a SavedTensor for each tensor and a stand-in for each DeepSpeed object.

    Raises:
        ValueError: it names a class that no checkpoint has, or isn't a file of torch.save.
    """
    return _with_pieces(_load(path), path)


def check_torch_file(path: Path) -> None:
    """Check that a file, which others could have written, runs no code when DeepSpeed reads it by torch.load.

    Raises:
        ValueError: as `read_torch_file`.
    """
    _load(path)


def _load(path: Path) -> Any:
    """Return the content with tensors on the meta device, which know their place in the file."""
    import torch

    try:
        with torch.serialization.safe_globals(_STAND_INS):
            return torch.load(path, map_location="meta", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, LookupError, AttributeError, TypeError, ValueError, AssertionError, EOFError) as error:
        if named := re.search(r"GLOBAL (\S+)", str(error)):
            raise ValueError(f"{path.name}: expected only the classes of a checkpoint, got {named[1]}; remove the checkpoint") from None
        raise ValueError(f"{path.name}: expected a file of torch.save, got {type(error).__name__}; remove the checkpoint") from error


def _with_pieces(value: Any, path: Path) -> Any:
    """Return the content with a SavedTensor in place of each tensor."""
    if hasattr(value, "untyped_storage"):
        storage, dtype = value.untyped_storage(), str(value.dtype).removeprefix("torch.")
        place = (value.storage_offset(), storage._checkpoint_offset, storage.nbytes())
        return SavedTensor(path, dtype, value.element_size(), tuple(value.shape), tuple(value.stride()), *place)
    if isinstance(value, Mapping):
        return {key: _with_pieces(item, path) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [_with_pieces(item, path) for item in value]
    if isinstance(value, _StandIn):
        value.__dict__.update({name: _with_pieces(item, path) for name, item in vars(value).items()})
    return value
