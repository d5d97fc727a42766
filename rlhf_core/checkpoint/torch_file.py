"""What a checkpoint's files hold, item by item, with the names that a reader knows: for certificates.

DeepSpeed's files are pickles in torch's zip format. They are read here without torch and without any class that they name: a tensor is a
piece of the file, whatever else stands in them becomes an inert object, and nothing of theirs is run.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import mmap
import pickle
import re
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_core.checkpoint.digest import OPTIMIZER_NAMES

Items = Iterator[tuple[str, str, Any]]  # part, item, hash or short value
SHORT = 60  # characters of JSON; what is longer is hashed
_RANK = re.compile(r"zero_pp_rank_(\d+)_")
_ZERO_STATE = ("base_optimizer_state", "optimizer_state_dict")
_ZERO_MASTER = ("single_partition_of_fp32_groups", "fp32_flat_groups")
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


def saved_items(folder: Path) -> Items:
    """All that lies in the folder of a checkpoint, by part of the certificate."""
    for path in sorted(folder.iterdir()):
        if path.is_dir() and any(path.glob("*model_states.pt")):
            yield from _engine(path)
        elif path.is_dir():
            yield from (("best", str(p.relative_to(path)), _file(p)) for p in sorted(path.rglob("*")) if p.is_file())
        elif path.name.startswith("rng"):
            yield from (("generators", f"{name}{_of_rank(path.stem)}", _described(value)) for name, value in read(path).items())
        elif path.name == "driver.json":
            yield from _driver(json.loads(path.read_text(encoding="utf-8")))
        elif path.name == "ahead.json":
            yield "position", "rollouts drawn ahead", _file(path)
        elif path.suffix == ".pt":
            yield from (("weights", f"{name} of the {path.stem}", _described(value)) for name, value in read(path).items())


def _driver(state: dict[str, Any]) -> Items:
    """Of an RL run; its step is also the policy's version."""
    parts = {"step": "position", "prompts_drawn": "position", "kl_coef": "kl_coef", "best": "best"}
    for name, value in state.items():
        if isinstance(value, Mapping) and name not in parts:
            yield from (("statistics", f"{name} {key}", _described(v)) for key, v in value.items())
        else:
            item = "policy version" if name == "step" else name
            yield parts.get(name, "statistics"), item, _described(value)


def _engine(folder: Path) -> Items:
    """Of one trained module: DeepSpeed's files, one or one for each rank."""
    shards, shapes = sorted(folder.glob("*optim_states.pt")), None
    for path in sorted(folder.glob("*model_states.pt")):
        state, of = read(path), f" of {folder.name}{_of_rank(path.name)}"
        for name, tensor in state["module"].items():
            if tensor.count:  # with ZeRO 3 an empty one stands here, and the master weights are all there is
                yield "weights", f"{name}{of}", tensor.description
        for name, value in (state["lr_scheduler"] or {}).items():
            yield "scheduler", f"{name}{of}", _described(value)
        for name in ("global_steps", "skipped_steps"):
            yield "counters", f"{name}{of}", state[name]
        yield "world", f"ranks{of}", state["dp_world_size"]
        shapes = state["param_shapes"]
        if state["optimizer"] is not None:
            yield from _plain_optimizer(state["optimizer"], state[OPTIMIZER_NAMES], of)
    for path in shards:
        yield from _shard(read(path)["optimizer_state_dict"], shapes, len(shards), f" of {folder.name}{_of_rank(path.name)}")


def _plain_optimizer(state: dict[str, Any], names: list[str], of: str) -> Items:
    """Torch's own; one that DeepSpeed wraps for bfloat16 is hashed leaf by leaf, without the parameters' names."""
    if "state" not in state:
        yield from (("optimizer", f"{name}{of}", _described(value)) for name, value in _leaves(state))
        return
    for index, values in state["state"].items():
        for kind, value in values.items():
            yield "optimizer", f"{kind} of {names[index]}{of}", _described(value)
    yield from _groups(state["param_groups"], of)


def _shard(state: dict[str, Any], shapes: list[Mapping[str, tuple[int, ...]]], ranks: int, of: str) -> Items:
    """One rank's part of the optimizer state and of the master weights, cut into parameters."""
    base = next(state[key] for key in _ZERO_STATE if key in state)
    masters = next(state[key] for key in _ZERO_MASTER if key in state)
    for index, flat in enumerate(masters):
        values = {**base["state"].get(index, {}), "master weights": flat}
        for kind, value in values.items():
            part = "weights" if kind == "master weights" else "optimizer"
            if not isinstance(value, SavedTensor) or value.count != flat.count:
                yield part, f"{kind} of group {index}{of}", _described(value)
                continue
            for name, start, count in _places(state, shapes, index, ranks):
                yield part, f"{kind} of {name}{of}", value.piece(start, count).description
    yield from _groups(base["param_groups"], of)


def _places(state: dict[str, Any], shapes: list[Mapping[str, tuple[int, ...]]], index: int, ranks: int) -> Iterator[tuple[str, int, int]]:
    """Name, start and length of each parameter's piece in a rank's flat group."""
    if "param_slice_mappings" in state:
        yield from ((name, piece.start, piece.numel) for name, piece in state["param_slice_mappings"][index].items())
        return
    start = 0
    for name, shape in shapes[index].items():
        count = math.ceil(math.prod(shape) / ranks)
        yield name, start, count
        start += count


def _groups(groups: list[dict[str, Any]], of: str) -> Items:
    for index, group in enumerate(groups):
        settings = {name: value for name, value in group.items() if name != "params"}
        yield "optimizer", f"settings of group {index}{of}", _described(settings)


def _leaves(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    entries = node.items() if isinstance(node, Mapping) else enumerate(node) if isinstance(node, list | tuple) else None
    if entries is None:
        yield path, node
        return
    for key, value in entries:
        yield from _leaves(value, f"{path}.{key}" if path else str(key))


def _of_rank(name: str) -> str:
    found = _RANK.search(name) or re.search(r"-(\d+)$", name)
    return f" on rank {found[1]}" if found else ""


def _described(value: Any) -> Any:
    """A short plain value itself, else its hash."""
    if isinstance(value, SavedTensor):
        return value.description
    text = json.dumps(_plain(value), sort_keys=True)
    return json.loads(text) if len(text) < SHORT else hashed(text.encode())


def _plain(value: Any) -> Any:
    if isinstance(value, SavedTensor):
        return value.description
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set):
        return [_plain(v) for v in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return {type(value).__name__: _plain(vars(value))}


def hashed(*content: bytes | memoryview) -> str:
    digest = hashlib.sha256()
    for piece in content:
        digest.update(piece)
    return f"sha256:{digest.hexdigest()[:32]}"


def _file(path: Path) -> str:
    with path.open("rb") as file:
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()[:32]}"


# Torch's zip format: data.pkl, which refers to storages, and each storage's bytes as a record of its own


def read(path: Path) -> Any:
    """What torch.save wrote, with a SavedTensor for each tensor."""
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
