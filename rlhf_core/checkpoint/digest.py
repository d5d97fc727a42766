"""State digests: hashes of all parts of a training state. Two digests show whether two runs are in the same state, or where they differ.

    python -m rlhf_core.checkpoint.digest compare A B     # 0: equal; 1: prints the first difference; 2: unreadable
    python -m rlhf_core.checkpoint.digest show A

A and B are checkpoints (step-<n>), files called digest.json, or folders with checkpoints in them, of which the newest counts. A
state digest is computed from the saved files (saved_state.py). Tensors are hashed by type, shape and content, so equal states have equal
digests. The content's hash is also part of the file's hash in the manifest (rlhf_core/storage/hashing.py).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_core.checkpoint.manifest import damage
from rlhf_core.checkpoint.saved_state import Item, SavedFiles
from rlhf_core.process import exit_with

DIGEST_FILE = "digest.json"
VERSION = 3
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


def write_digest(folder: Path, step: int, items: Mapping[str, list[Item]] | None = None) -> None:
    """Write the digest of the state saved in the folder of a checkpoint of `step`.

    Args:
        items: items of each file by the file's name; None: the files are read here.
    """
    if items is None:
        names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
        items = {name: saved.items for name, saved in SavedFiles(folder, names).result().items()}
    parts: dict[str, dict[str, Any]] = {name: {} for name in PARTS}
    parts["position"]["step"] = step
    for name in sorted(items):
        for part, item, value in items[name]:
            parts[part][item] = value
    (folder / DIGEST_FILE).write_text(json.dumps({"version": VERSION, "step": step, "parts": parts}), encoding="utf-8")


def read_digest(path: Path) -> StateDigest:
    """Return a state digest from its file or from a checkpoint.

    Args:
        path: a state digest, a checkpoint, or a folder with checkpoints of one phase below it, of which the newest is read.
    Raises:
        ValueError: there is no state digest of this version, its checkpoint is damaged, or the folder has several phases.
    """
    if path.is_dir():
        folder = path if (path / DIGEST_FILE).exists() else _newest(path)
        alone = [p.name for p in folder.iterdir()] == [DIGEST_FILE]  # kept by a finished stage (reports/digests)
        if not alone and (problem := damage(folder)) is not None:
            raise ValueError(f"{folder}: {problem}; a damaged checkpoint has no state digest")
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
        raise ValueError(f"{folder}: expected a checkpoint with a {DIGEST_FILE}, got none; state digests are in the folders of checkpoints")
    if len({p.parent for p in found}) > 1:
        places = ", ".join(sorted(str(p) for p in {p.parent for p in found}))
        raise ValueError(f"{folder}: expected checkpoints of one phase, got those of several; name one of {places}")
    return max(found, key=lambda p: int(p.name.removeprefix("step-")))


def differences(a: StateDigest, b: StateDigest) -> list[str]:
    """Return the differences between two states in the order of PARTS; an empty list if the states are equal."""
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
    """Return an item's value as JSON, in which NaN equals NaN; None if the item is missing."""
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


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m rlhf_core.checkpoint.digest", description="Compare the states that two checkpoints hold."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    compare = commands.add_parser("compare", help="exit code 0 if both have the same state, else 1 and the first difference")
    compare.add_argument("a", type=Path)
    compare.add_argument("b", type=Path)
    compare.add_argument("--all", action="store_true", help="name everything that differs")
    show = commands.add_parser("show", help="summary of a state digest")
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
    exit_with(main)
