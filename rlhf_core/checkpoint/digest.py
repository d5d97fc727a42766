"""State digests: hashes of all parts of a training state. Two digests show whether two runs are in the same state, or where they differ.

    python -m rlhf_core.checkpoint.digest compare A B     # 0 and a sentence when equal; else 1 and what differs first
    python -m rlhf_core.checkpoint.digest show A

A and B are checkpoints (step-<n>), files called digest.json, or folders with checkpoints in them, of which the newest counts. A
state digest is made from what was saved (torch_file.py); tensors are hashed by type, shape and content, so that equal states have equal
ones.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlhf_core.checkpoint.manifest import damage
from rlhf_core.checkpoint.torch_file import SavedTensor, hashed, read_torch_file

DIGEST_FILE = "digest.json"
VERSION = 1
OPTIMIZER_NAMES = "optimizer_names"  # in an engine's file: of the optimizer's parameters, in its order
UNREADABLE = 2  # exit code
# Parts of a state, in the order in which differences are reported: an early difference usually causes the later ones.
PARTS = {
    "position": "data position",
    "world": "world",
    "generators": "random number generators",
    "scheduler": "scheduler",
    "counters": "counters",
    "kl_coef": "KL coefficient",
    "statistics": "running statistics",
    "best": "best policy",
    "optimizer": "optimizer",
    "weights": "weights",
}

StateDigest = dict[str, Any]  # step, and for each part: item -> hash, or the value if it is short
Items = Iterator[tuple[str, str, Any]]  # part, item, hash or short value
SHORT = 60  # characters of JSON; longer values are hashed
_RANK = re.compile(r"zero_pp_rank_(\d+)_")
_ZERO_STATE = ("base_optimizer_state", "optimizer_state_dict")
_ZERO_MASTER = ("single_partition_of_fp32_groups", "fp32_flat_groups")


def write_digest(folder: Path, step: int) -> None:
    """Write the state digest of what lies in the folder of a checkpoint of `step`."""
    parts: dict[str, dict[str, Any]] = {name: {} for name in PARTS}
    parts["position"]["step"] = step
    for part, item, value in saved_items(folder):
        parts[part][item] = value
    (folder / DIGEST_FILE).write_text(json.dumps({"version": VERSION, "step": step, "parts": parts}), encoding="utf-8")


def read_digest(path: Path) -> StateDigest:
    """
    Args:
        path: of a state digest, of a checkpoint, or of a folder with checkpoints in it or below.
    Raises:
        ValueError: there is none, or the checkpoint that it vouches for is damaged.
    """
    if path.is_dir():
        folder = path if (path / DIGEST_FILE).exists() else _newest(path)
        alone = [p.name for p in folder.iterdir()] == [DIGEST_FILE]  # kept by a stage that is done (reports/digests)
        if not alone and (problem := damage(folder)) is not None:
            raise ValueError(f"{folder}: {problem}; a damaged checkpoint's state digest says nothing")
        path = folder / DIGEST_FILE
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["version"] == VERSION and set(found["parts"]) <= set(PARTS):
            return found
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path}: expected a state digest, got {type(error).__name__}; name a checkpoint's folder or its {DIGEST_FILE}"
        ) from error
    raise ValueError(f"{path}: expected a state digest of version {VERSION}, got another one; make both with the same code")


def _newest(folder: Path) -> Path:
    found = [p.parent for p in folder.rglob(DIGEST_FILE) if p.parent.name.removeprefix("step-").isdigit()]
    if not found:
        raise ValueError(f"{folder}: expected a checkpoint with a {DIGEST_FILE}, got none; state digests lie beside checkpoints")
    if len({p.parent for p in found}) > 1:
        places = ", ".join(sorted(str(p) for p in {p.parent for p in found}))
        raise ValueError(f"{folder}: expected checkpoints of one phase, got those of several; name one of {places}")
    return max(found, key=lambda p: int(p.name.removeprefix("step-")))


def differences(a: StateDigest, b: StateDigest) -> list[str]:
    """What differs, in the order of PARTS; empty: the same state."""
    found = []
    for part, title in PARTS.items():
        mine, other = a["parts"].get(part, {}), b["parts"].get(part, {})
        found += [
            f"{title}: {item}: {_both(mine, other, item)}"
            for item in [*mine, *(set(other) - set(mine))]
            if _text(mine, item) != _text(other, item)
        ]
    return found


def _both(a: Mapping[str, Any], b: Mapping[str, Any], item: str) -> str:
    shown = [_shown(values[item]) if item in values else "nothing" for values in (a, b)]
    return "other content" if shown == ["content", "content"] else f"{shown[0]} and {shown[1]}"


def _text(values: Mapping[str, Any], item: str) -> str | None:
    """As JSON, in which NaN equals NaN."""
    return json.dumps(values[item]) if item in values else None


def _shown(value: Any) -> str:
    return "content" if isinstance(value, str) and value.startswith("sha256:") else json.dumps(value)


def summary(digest: StateDigest) -> str:
    lines = [f"step {digest['step']}"]
    for part, title in PARTS.items():
        items = digest["parts"].get(part, {})
        few = ", ".join(f"{item} {json.dumps(value)}" for item, value in items.items() if not str(value).startswith("sha256:"))
        lines.append(f"{title}: {len(items)} hashed or noted{f' ({few})' if few and len(few) < 200 else ''}")
    return "\n".join(lines)


def saved_items(folder: Path) -> Items:
    """All that lies in the folder of a checkpoint, by part of the state digest."""
    for path in sorted(folder.iterdir()):
        if path.is_dir() and any(path.glob("*model_states.pt")):
            yield from _engine(path)
        elif path.is_dir():
            yield from (("best", str(p.relative_to(path)), _file(p)) for p in sorted(path.rglob("*")) if p.is_file())
        elif path.name.startswith("rng"):
            yield from (("generators", f"{name}{_of_rank(path.stem)}", _described(value)) for name, value in read_torch_file(path).items())
        elif path.name == "driver.json":
            yield from _driver(json.loads(path.read_text(encoding="utf-8")))
        elif path.name == "ahead.json":
            yield "position", "rollouts drawn ahead", _file(path)
        elif path.suffix == ".pt":
            yield from (("weights", f"{name} of the {path.stem}", _described(value)) for name, value in read_torch_file(path).items())


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
        state, of = read_torch_file(path), f" of {folder.name}{_of_rank(path.name)}"
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
        yield from _shard(read_torch_file(path)["optimizer_state_dict"], shapes, len(shards), f" of {folder.name}{_of_rank(path.name)}")


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


def _file(path: Path) -> str:
    with path.open("rb") as file:
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()[:32]}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m rlhf_core.checkpoint.digest", description="Compare the states that two checkpoints hold."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    compare = commands.add_parser("compare", help="0 when both hold the same state, 1 and what differs first when not")
    compare.add_argument("a", type=Path)
    compare.add_argument("b", type=Path)
    compare.add_argument("--all", action="store_true", help="name everything that differs")
    show = commands.add_parser("show", help="what a state digest is about")
    show.add_argument("a", type=Path)
    chosen = parser.parse_args(arguments)
    try:
        a = read_digest(chosen.a)
        if chosen.command == "show":
            sys.stdout.write(summary(a) + "\n")
            return 0
        b = read_digest(chosen.b)
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return UNREADABLE
    found = differences(a, b)
    if not found:
        sys.stdout.write(f"equal: both are the same state, after step {a['step']}, in {sum(map(len, a['parts'].values()))} parts\n")
        return 0
    shown = found if chosen.all else found[:1]
    rest = f" (and {len(found) - 1} more; --all names them)\n" if len(found) > 1 and not chosen.all else "\n"
    sys.stdout.write("different: " + "\n".join(shown) + rest)
    return 1


if __name__ == "__main__":
    sys.exit(main())
