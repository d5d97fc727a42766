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

_WIDTHS = {"float64": 8, "int64": 8, "uint64": 8, "float32": 4, "int32": 4, "uint32": 4, "bfloat16": 2, "float16": 2, "int16": 2}  # else 1
_STORAGES = {"Double": "float64", "Float": "float32", "BFloat16": "bfloat16", "Half": "float16", "Long": "int64", "Int": "int32"}
_VALUES = {"float64": "<d", "float32": "<f", "int64": "<q", "int32": "<i", "bool": "<?", "uint8": "<B"}


@dataclass(frozen=True)
class SavedTensor:
    """A tensor as a piece of a file; stride and offset in elements."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    storage: memoryview

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    def piece(self, start: int, count: int) -> SavedTensor:
        """Of a flat tensor."""
        count = max(0, min(count, self.count - start))
        return SavedTensor(self.dtype, (count,), (1,), self.offset + start, self.storage)

    @property
    def description(self) -> Any:
        """Its value, where it is a single number, else its hash: of type, shape and the elements in order.

        Where they lie in another order, that of the storage counts, and the stride is hashed too.
        """
        width, step, told = _WIDTHS.get(self.dtype, 1), 1, f"{self.dtype} {self.shape}"
        content = self.storage[self.offset * width : (self.offset + self.count) * width]
        if self.count == 1 and self.dtype in _VALUES:
            return struct.unpack(_VALUES[self.dtype], content)[0]
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and stride != step:
                return hashed(f"{told} {self.stride} {self.offset}".encode(), self.storage)
            step *= size
        return hashed(told.encode(), content)


def hashed(*content: bytes | memoryview) -> str:
    digest = hashlib.sha256()
    for piece in content:
        digest.update(piece)
    return f"sha256:{digest.hexdigest()[:32]}"


def read_torch_file(path: Path) -> Any:
    """The object that torch.save wrote, with a SavedTensor for each tensor.

    The archive holds data.pkl, which refers to storages, and each storage's bytes as one record.
    """
    with path.open("rb") as file:
        mapped = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        with zipfile.ZipFile(file) as archive:
            records = {info.filename.partition("/")[2]: info for info in archive.infolist()}
            return _Unpickler(io.BytesIO(archive.read(records["data.pkl"])), mapped, records).load()


class _Inert:
    """In the place of an object of a class that isn't known here."""

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


def _tensor(storage: tuple[str, memoryview], offset: int, shape: tuple, stride: tuple, *further: Any) -> SavedTensor:
    # An untyped storage has the element type beside it.
    dtype = next((kind.name for kind in further if isinstance(kind, _Kind)), storage[0])
    return SavedTensor(dtype, tuple(shape), tuple(stride), offset, storage[1])


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

    def persistent_load(self, reference: Any) -> tuple[str, memoryview]:
        """Element type and bytes of a storage."""
        _, kind, key, *_ = reference
        info = self._records[f"data/{key}"]
        name_length, extra_length = struct.unpack("<HH", self._mapped[info.header_offset + 26 : info.header_offset + 30])
        start = info.header_offset + 30 + name_length + extra_length
        return kind.name, self._mapped[start : start + info.file_size]
