"""What a checkpoint's files hold, item by item, with the names that a reader knows: for certificates.

DeepSpeed's files are pickles. They are read without the classes that they name, but for those that make up a tensor: whatever else stands
in them becomes an inert object, so that reading runs no code of theirs and needs no DeepSpeed.
"""

from __future__ import annotations

import hashlib
import json
import math
import pickle
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from rlhf_core.certificate import OPTIMIZER_NAMES

Items = Iterator[tuple[str, str, Any]]  # part, item, hash or short value
_TRUSTED = {
    "builtins": ("object", "set"),
    "collections": ("OrderedDict",),
    "copyreg": ("_reconstructor",),
    "torch": ("Size", "UntypedStorage", "device"),
    "torch._utils": ("_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_parameter"),
    "torch.storage": ("UntypedStorage",),
}
_RANK = re.compile(r"zero_pp_rank_(\d+)_")
_ZERO_STATE = ("base_optimizer_state", "optimizer_state_dict")
_ZERO_MASTER = ("single_partition_of_fp32_groups", "fp32_flat_groups")


def saved_items(folder: Path) -> Items:
    """All that lies in the folder of a checkpoint, by part of the certificate."""
    for path in sorted(folder.iterdir()):
        if path.is_dir() and any(path.glob("*model_states.pt")):
            yield from _engine(path)
        elif path.is_dir():
            yield from (("best", str(p.relative_to(path)), _file(p)) for p in sorted(path.rglob("*")) if p.is_file())
        elif path.name.startswith("rng"):
            yield from (("generators", f"{name}{_of_rank(path.stem)}", _described(value)) for name, value in _read(path).items())
        elif path.name == "driver.json":
            yield from _driver(json.loads(path.read_text(encoding="utf-8")))
        elif path.suffix == ".pt":
            yield from (("weights", f"{name} of the {path.stem}", _described(value)) for name, value in _read(path).items())


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
        state, of = _read(path), f" of {folder.name}{_of_rank(path.name)}"
        for name, tensor in state["module"].items():
            if tensor.numel():  # with ZeRO 3 an empty one stands here, and the master weights are all there is
                yield "weights", f"{name}{of}", _described(tensor)
        for name, value in (state["lr_scheduler"] or {}).items():
            yield "scheduler", f"{name}{of}", _described(value)
        for name in ("global_steps", "skipped_steps"):
            yield "counters", f"{name}{of}", state[name]
        yield "world", f"ranks{of}", state["dp_world_size"]
        shapes = state["param_shapes"]
        if state["optimizer"] is not None:
            yield from _plain_optimizer(state["optimizer"], state[OPTIMIZER_NAMES], of)
    for path in shards:
        yield from _shard(_read(path)["optimizer_state_dict"], shapes, len(shards), f" of {folder.name}{_of_rank(path.name)}")


def _plain_optimizer(state: dict[str, Any], names: list[str], of: str) -> Items:
    """Torch's own; one that DeepSpeed wraps for bfloat16 is hashed leaf by leaf, without the parameters' names."""
    if "state" not in state:
        yield from (("optimizer", f"{name}{of}", _described(value)) for name, value in _leaves(state))
        return
    for index, values in state["state"].items():
        for kind, value in values.items():
            yield "optimizer", f"{kind} of {names[index]}{of}", _described(value)
    yield from _groups(state["param_groups"], of)


def _shard(state: dict[str, Any], shapes: list[Mapping[str, torch.Size]], ranks: int, of: str) -> Items:
    """One rank's part of the optimizer state and of the master weights, cut into parameters."""
    base = next(state[key] for key in _ZERO_STATE if key in state)
    masters = next(state[key] for key in _ZERO_MASTER if key in state)
    for index, flat in enumerate(masters):
        values = {**base["state"].get(index, {}), "master weights": flat}
        for kind, value in values.items():
            part = "weights" if kind == "master weights" else "optimizer"
            if not isinstance(value, torch.Tensor) or value.numel() != flat.numel():
                yield part, f"{kind} of group {index}{of}", _described(value)
                continue
            for name, start, count in _places(state, shapes, index, ranks):
                yield part, f"{kind} of {name}{of}", _described(value.reshape(-1)[start : start + count])
    yield from _groups(base["param_groups"], of)


def _places(state: dict[str, Any], shapes: list[Mapping[str, torch.Size]], index: int, ranks: int) -> Iterator[tuple[str, int, int]]:
    """Name, start and length of each parameter's piece in a rank's flat group."""
    if "param_slice_mappings" in state:
        yield from ((name, piece.start, piece.numel) for name, piece in state["param_slice_mappings"][index].items())
        return
    start = 0
    for name, shape in shapes[index].items():
        count = math.ceil(shape.numel() / ranks)
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
    if value is None or isinstance(value, bool | int | float | str):
        return value if not isinstance(value, str) or len(value) < 60 else _hashed(value.encode())
    if isinstance(value, torch.Tensor) and value.numel() != 1:
        return _hashed(f"{value.dtype} {tuple(value.shape)}".encode(), value.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
    text = json.dumps(_plain(value), sort_keys=True)
    return json.loads(text) if len(text) < 60 else _hashed(text.encode())


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else _described(value)
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set):
        return [_plain(v) for v in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return {type(value).__name__: _plain(vars(value))}


def _hashed(*content: Any) -> str:
    digest = hashlib.sha256()
    for piece in content:
        digest.update(piece)
    return f"sha256:{digest.hexdigest()[:32]}"


def _file(path: Path) -> str:
    with path.open("rb") as file:
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()[:32]}"


class _Inert:
    """In the place of an object of a class that isn't torch's."""

    def __init__(self, *arguments: Any, **settings: Any):
        if arguments or settings:
            self.arguments = [*arguments, settings]

    def __call__(self, *arguments: Any, **settings: Any) -> _Inert:
        return _Inert(*arguments, **settings)

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state if isinstance(state, dict) else {"state": state})


def _tensor_of_any_class(rebuild: Any, kind: type, arguments: tuple[Any, ...], attributes: Any) -> torch.Tensor:
    """A tensor of a class of DeepSpeed's as one of torch's own."""
    return rebuild(*arguments)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name == "_rebuild_from_type_v2":
            return _tensor_of_any_class
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if dtype or name in _TRUSTED.get(module, ()):
            return super().find_class(module, name)
        return type(name, (_Inert,), {})


def _read(path: Path) -> dict[str, Any]:
    reader = SimpleNamespace(Unpickler=_Unpickler, load=pickle.load, __name__="inert")
    return torch.load(path, map_location="cpu", mmap=True, pickle_module=reader, weights_only=False)
