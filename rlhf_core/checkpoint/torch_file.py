"""Reads the files of torch.save (pickles in torch's zip format) without torch, and runs no code that a file names.

A tensor becomes a SavedTensor, a slice of the mapped file; an object of any other class becomes an inert stand-in.
"""

from __future__ import annotations

import hashlib
import io
import math
import mmap
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_core.storage.hashing import Span

_WIDTHS = {"float64": 8, "int64": 8, "uint64": 8, "float32": 4, "int32": 4, "uint32": 4, "bfloat16": 2, "float16": 2, "int16": 2}  # else 1
_STORAGES = {"Double": "float64", "Float": "float32", "BFloat16": "bfloat16", "Half": "float16", "Long": "int64", "Int": "int32"}
ZIP = b"PK\x03\x04"  # how torch tells its zip format
_VALUES = {"float64": "<d", "float32": "<f", "int64": "<q", "int32": "<i", "bool": "<?", "uint8": "<B"}


@dataclass(frozen=True)
class SavedTensor:
    """A tensor as a piece of a file; stride and offset in elements.

    storage: bytes of its storage, which begin at byte `start` of the file.
    """

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    storage: memoryview
    start: int

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    def part(self, start: int, count: int) -> SavedTensor:
        """Elements `start` to `start + count` of a flat tensor."""
        count = max(0, min(count, self.count - start))
        return SavedTensor(self.dtype, (count,), (1,), self.offset + start, self.storage, self.start)

    @property
    def piece(self) -> Span:
        """Bytes of the file with the tensor's elements; the whole storage if they aren't in order."""
        first, end = self._bytes if self._in_order else (0, len(self.storage))
        return self.start + first, self.start + end

    def description(self, hashes: Mapping[Span, bytes]) -> Any:
        """The value of a single number; otherwise a hash of type, shape and the elements in order.

        If the elements are stored in another order, the whole storage is hashed, with stride and offset.

        Args:
            hashes: of the file's pieces.
        """
        if self.is_number:
            first, end = self._bytes
            return struct.unpack(_VALUES[self.dtype], self.storage[first:end])[0]
        order = "" if self._in_order else f" {self.stride} {self.offset}"
        first, end = self.piece
        return hashed(f"{self.dtype} {self.shape}{order}".encode(), hashes[first, end] if first < end else b"")

    @property
    def is_number(self) -> bool:
        return self.count == 1 and self.dtype in _VALUES

    @property
    def _bytes(self) -> Span:
        width = _WIDTHS.get(self.dtype, 1)
        return self.offset * width, (self.offset + self.count) * width

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


def read_torch_file(path: Path) -> Any:
    """Read a file of torch.save, with a SavedTensor for each tensor.

    The archive holds data.pkl, which refers to storages, and each storage's bytes as one record.
    """
    return _read(path, _Unpickler)


def check_torch_file(path: Path) -> None:
    """Check that torch.load runs no code with a file that others could have written: it names no class but those of a checkpoint.

    Raises:
        ValueError: it names another, or Python and torch could read different things in it.
    """
    with path.open("rb") as file:
        if file.read(len(ZIP)) != ZIP:  # torch would read a plain pickle
            raise ValueError(f"{path.name}: expected a file of torch.save, got another")
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
        if len(set(names)) < len(names) or len({name.partition("/")[0] for name in names}) > 1:
            raise ValueError(f"{path.name}: expected each record once, got some twice")
        _read(path, _Strict)
    except (zipfile.BadZipFile, pickle.UnpicklingError, struct.error, KeyError, AttributeError, TypeError, EOFError) as error:
        raise ValueError(f"{path.name}: expected a file of torch.save, got {type(error).__name__}: {error}") from error


def _read(path: Path, unpickler: type[_Unpickler]) -> Any:
    with path.open("rb") as file:
        mapped = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        with zipfile.ZipFile(file) as archive:
            records = {info.filename.partition("/")[2]: info for info in archive.infolist()}
            return unpickler(io.BytesIO(_content(mapped, records["data.pkl"])[1]), mapped, records).load()


def _content(mapped: memoryview, info: zipfile.ZipInfo) -> tuple[int, memoryview]:
    """Where a record's bytes begin, and the bytes. They aren't compressed, and their CRC-32 may be missing."""
    name_length, extra_length = struct.unpack("<HH", mapped[info.header_offset + 26 : info.header_offset + 30])
    start = info.header_offset + 30 + name_length + extra_length
    return start, mapped[start : start + info.file_size]


class _Inert:
    """Stand-in for an object of an unknown class."""

    def __init__(self, *arguments: Any, **settings: Any):
        if arguments or settings:
            self.arguments = [*arguments, settings]

    def __call__(self, *arguments: Any, **settings: Any) -> _Inert:
        return _Inert(*arguments, **settings)

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state if isinstance(state, dict) else {"state": state})


@dataclass(frozen=True)
class _Kind:
    """A class of storages, or an element type, by its name in torch."""

    name: str


def _tensor(storage: tuple[str, memoryview, int], offset: int, shape: tuple, stride: tuple, *further: Any) -> SavedTensor:
    kind, content, start = storage
    # An untyped storage is saved with its element type.
    dtype = next((given.name for given in further if isinstance(given, _Kind)), kind)
    return SavedTensor(dtype, tuple(shape), tuple(stride), offset, content, start)


def _shape(sizes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sizes)


_KNOWN = {
    ("collections", "OrderedDict"): OrderedDict,
    ("builtins", "set"): set,
    ("torch", "Size"): _shape,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _tensor,
    ("torch._utils", "_rebuild_parameter"): lambda tensor, *_: tensor,
    ("torch._tensor", "_rebuild_from_type_v2"): lambda rebuild, kind, arguments, attributes: rebuild(*arguments),
}


# Classes of plain values in DeepSpeed's files.
_OF_ENGINES = {
    ("torch", "Tensor"),
    ("torch.nn.parameter", "Parameter"),
    ("deepspeed.runtime.zero.config", "ZeroStageEnum"),
    ("deepspeed.runtime.fp16.loss_scaler", "LossScaler"),
    ("deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler"),
    ("deepspeed.utils.tensor_fragment", "fragment_address"),
}


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, mapped: memoryview, records: Mapping[str, zipfile.ZipInfo]):
        super().__init__(file)
        self._mapped, self._records = mapped, records

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _KNOWN:
            return _KNOWN[module, name]
        if module in ("torch", "torch.storage") and (name in _WIDTHS or name.endswith("Storage") or name in ("uint8", "int8", "bool")):
            return _Kind(_STORAGES.get(name.removesuffix("Storage"), name.removesuffix("Storage").lower()))
        return type(name, (_Inert,), {})

    def persistent_load(self, reference: Any) -> tuple[str, memoryview, int]:
        """Element type and bytes of a storage, and where in the file these begin."""
        _, kind, key, *_ = reference
        start, content = _content(self._mapped, self._records[f"data/{key}"])
        return kind.name, content, start


class _Strict(_Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        if (module, name) in _KNOWN or (module, name) in _OF_ENGINES or isinstance(found, _Kind):
            return found
        raise ValueError(f"expected only the classes of a checkpoint, got {module}.{name}; remove the checkpoint")
