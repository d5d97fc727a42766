"""The content of a checkpoint's files, as items of a state digest: each weight, optimizer moment, counter, generator and statistic."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from rlhf_core.checkpoint.torch_file import SavedTensor, hashed, read_torch_file
from rlhf_core.storage.hashing import FileHash, HashedFile, Hashing, Span, rank_of

OPTIMIZER_NAMES = "optimizer_names"  # in an engine's file: of the optimizer's parameters, in its order
SHORT = 60  # characters of JSON; longer values are hashed
_ZERO_STATE = ("base_optimizer_state", "optimizer_state_dict")
_ZERO_MASTER = ("single_partition_of_fp32_groups", "fp32_flat_groups")

Item = tuple[str, str, Any]  # part of the state digest, item, hash or short value
Found = Iterator[Item]  # with tensors in place of their hashes


class _WholeFile:
    """Placeholder for the hash of the file that an item is from."""


@dataclass(frozen=True)
class SavedFile:
    """A file's hash, for the manifest, and its items, for the state digest."""

    hash: FileHash
    items: list[Item]

    def as_json(self) -> dict[str, Any]:
        return {"hash": self.hash.as_json(), "items": self.items}

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> SavedFile:
        return cls(FileHash.from_json(entry["hash"]), [(part, item, value) for part, item, value in entry["items"]])


class SavedFiles:
    """Hashes files of a checkpoint and the items in them, in threads that start when the object is made.

    Args:
        names: names of files in the folder, with slashes.
    """

    def __init__(self, folder: Path, names: list[str]):
        self._found = {name: list(_found(folder / name, folder)) for name in names}
        tensors = {name: [tensor for _, _, value in found for tensor in _tensors(value)] for name, found in self._found.items()}
        self._hashing = Hashing(HashedFile(folder / name, [t.piece for t in of if not t.is_number]) for name, of in tensors.items())

    def result(self) -> dict[str, SavedFile]:
        """Return each file's hash and items by the file's name.

        Raises:
            OSError: a file can't be read.
        """
        saved = {}
        for (name, found), result in zip(self._found.items(), self._hashing.results(), strict=True):
            if isinstance(result, OSError):
                raise result
            of_file, of_pieces = result
            saved[name] = SavedFile(of_file, [(part, item, _described(value, of_file, of_pieces)) for part, item, value in found])
        return saved


def _found(path: Path, folder: Path) -> Found:
    """Yield the items of a file, with tensors in place of their hashes."""
    if path.parent != folder and path.name.endswith("model_states.pt"):
        yield from _module(path)
    elif path.parent != folder and path.name.endswith("optim_states.pt"):
        yield from _shard(path)
    elif path.parent != folder:
        yield "weights", path.relative_to(folder).as_posix(), _WholeFile()
    elif path.name.startswith("rng"):
        yield from (("generators", f"{name}{_of_rank(path.name)}", value) for name, value in read_torch_file(path).items())
    elif path.name == "driver.json":
        yield from _driver(json.loads(path.read_text(encoding="utf-8")))
    elif path.name == "ahead.json":
        yield "position", "rollouts drawn ahead", _WholeFile()
    elif path.suffix == ".pt":
        content = read_torch_file(path)
        named = content.items() if isinstance(content, Mapping) else [("content", content)]
        yield from (("weights", f"{name} of the {path.stem}", value) for name, value in named)


def _driver(state: dict[str, Any]) -> Found:
    """Yield the items of an RL driver's state; its step is also the policy's version."""
    parts = {"step": "position", "prompts_drawn": "position", "kl_coef": "kl_coef", "best": "best", "curriculum": "statistics"}
    for name, value in state.items():
        if isinstance(value, Mapping) and name not in parts:
            yield from (("statistics", f"{name} {key}", v) for key, v in value.items())
        else:
            item = "policy version" if name == "step" else name
            yield parts.get(name, "statistics"), item, value


def _module(path: Path) -> Found:
    """Yield the items of DeepSpeed's file of a trained module, which one rank or all of them share."""
    state, of = read_torch_file(path), f" of {path.parent.name}{_of_rank(path.name)}"
    for name, tensor in state["module"].items():
        if tensor.count:  # with ZeRO 3 it is empty: the weights are the master weights
            yield "weights", f"{name}{of}", tensor
    for name, value in (state["lr_scheduler"] or {}).items():
        yield "scheduler", f"{name}{of}", value
    for name in ("global_steps", "skipped_steps"):
        yield "counters", f"{name}{of}", state[name]
    yield "world", f"ranks{of}", state["dp_world_size"]
    if state["optimizer"] is not None:
        yield from _plain_optimizer(state["optimizer"], state[OPTIMIZER_NAMES], of)


def _plain_optimizer(state: dict[str, Any], names: list[str], of: str) -> Found:
    """Yield the items of a torch optimizer's state. A state that DeepSpeed wraps for bfloat16 is hashed leaf by leaf without parameter
    names.
    """
    if "state" not in state:
        yield from (("optimizer", f"{name}{of}", value) for name, value in _leaves(state))
        return
    for index, values in state["state"].items():
        for kind, value in values.items():
            yield "optimizer", f"{kind} of {names[index]}{of}", value
    yield from _groups(state["param_groups"], of)


def _shard(path: Path) -> Found:
    """Yield the items of DeepSpeed's file of one rank's optimizer state and master weights, cut into parameters."""
    state, of = read_torch_file(path)["optimizer_state_dict"], f" of {path.parent.name}{_of_rank(path.name)}"
    base = next(state[key] for key in _ZERO_STATE if key in state)
    masters = next(state[key] for key in _ZERO_MASTER if key in state)
    places = list(_places(path, state))
    for index, flat in enumerate(masters):
        values = {**base["state"].get(index, {}), "master weights": flat}
        for kind, value in values.items():
            part = "weights" if kind == "master weights" else "optimizer"
            if not isinstance(value, SavedTensor) or value.count != flat.count:
                yield part, f"{kind} of group {index}{of}", value
                continue
            for name, start, count in places[index]:
                yield part, f"{kind} of {name}{of}", value.part(start, count)
    yield from _groups(base["param_groups"], of)


def _places(path: Path, state: dict[str, Any]) -> Iterator[list[tuple[str, int, int]]]:
    """Yield for each parameter group the name, start and length of each parameter's piece in the rank's flat group."""
    if "param_slice_mappings" in state:
        for group in state["param_slice_mappings"]:
            yield [(name, piece.start, piece.numel) for name, piece in group.items()]
        return
    modules = sorted(path.parent.glob("*model_states.pt"), key=lambda p: rank_of(p.name) != rank_of(path.name))  # of the same rank first
    module = read_torch_file(modules[0])
    for shapes in module["param_shapes"]:
        counts = {name: math.ceil(math.prod(shape) / module["dp_world_size"]) for name, shape in shapes.items()}
        starts = accumulate(counts.values(), initial=0)
        yield [(name, start, count) for (name, count), start in zip(counts.items(), starts, strict=False)]


def _groups(groups: list[dict[str, Any]], of: str) -> Found:
    for index, group in enumerate(groups):
        settings = {name: value for name, value in group.items() if name != "params"}
        yield "optimizer", f"settings of group {index}{of}", settings


def _leaves(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    entries = node.items() if isinstance(node, Mapping) else enumerate(node) if isinstance(node, list | tuple) else None
    if entries is None:
        yield path, node
        return
    for key, value in entries:
        yield from _leaves(value, f"{path}.{key}" if path else str(key))


def _of_rank(name: str) -> str:
    rank = rank_of(name)
    return "" if rank is None else f" on rank {rank}"


def _tensors(value: Any) -> Iterator[SavedTensor]:
    """Yield the tensors in a value that was read from a file."""
    if isinstance(value, SavedTensor):
        yield value
    elif isinstance(value, Mapping):
        yield from (tensor for v in value.values() for tensor in _tensors(v))
    elif isinstance(value, list | tuple | set):
        yield from (tensor for v in value for tensor in _tensors(v))
    elif hasattr(value, "__dict__"):
        yield from _tensors(vars(value))


def _described(value: Any, of_file: FileHash, of_pieces: Mapping[Span, bytes]) -> Any:
    """Return a short plain value itself, otherwise its hash."""
    if isinstance(value, _WholeFile):
        return f"sha256:{of_file.sha256[:32]}"
    if isinstance(value, SavedTensor):
        return value.description(of_pieces)
    text = json.dumps(_plain(value, of_pieces), sort_keys=True)
    return json.loads(text) if len(text) < SHORT else hashed(text.encode())


def _plain(value: Any, of_pieces: Mapping[Span, bytes]) -> Any:
    if isinstance(value, SavedTensor):
        return value.description(of_pieces)
    if isinstance(value, Mapping):
        return {str(k): _plain(v, of_pieces) for k, v in value.items()}
    if isinstance(value, list | tuple | set):
        return [_plain(v, of_pieces) for v in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return {type(value).__name__: _plain(vars(value), of_pieces)}
