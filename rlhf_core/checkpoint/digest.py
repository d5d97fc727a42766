"""Certificates: hashes of all that a training state consists of, which tell whether two runs are in the same state, or where they differ.

    python -m rlhf_core.checkpoint.digest compare A B     # 0 and a sentence when equal; else 1 and what differs first
    python -m rlhf_core.checkpoint.digest show A

A and B are checkpoints (step-<n>), files called certificate.json, or folders with checkpoints in them, of which the newest counts. A
certificate is made from what was saved (torch_file.py); tensors are hashed by type, shape and content, so that equal states have equal
ones.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_core.checkpoint.manifest import damage

CERTIFICATE = "certificate.json"
VERSION = 1
OPTIMIZER_NAMES = "optimizer_names"  # in an engine's file: of the optimizer's parameters, in its order
UNREADABLE = 2  # exit code
# What a state consists of, in the order in which a difference is looked for: what comes first brings the rest about, as a rule.
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

Certificate = dict[str, Any]  # step, and for each part: item -> hash, or the value itself where it is short


def write_certificate(folder: Path, step: int) -> None:
    """Certify what lies in the folder of a checkpoint of `step`."""
    from rlhf_core.checkpoint.torch_file import saved_items

    parts: dict[str, dict[str, Any]] = {name: {} for name in PARTS}
    parts["position"]["step"] = step
    for part, item, value in saved_items(folder):
        parts[part][item] = value
    (folder / CERTIFICATE).write_text(json.dumps({"version": VERSION, "step": step, "parts": parts}), encoding="utf-8")


def read_certificate(path: Path) -> Certificate:
    """
    Args:
        path: of a certificate, of a checkpoint, or of a folder with checkpoints in it or below.
    Raises:
        ValueError: there is none, or the checkpoint that it vouches for is damaged.
    """
    if path.is_dir():
        folder = path if (path / CERTIFICATE).exists() else _newest(path)
        alone = [p.name for p in folder.iterdir()] == [CERTIFICATE]  # kept by a stage that is done (reports/certificates)
        if not alone and (problem := damage(folder)) is not None:
            raise ValueError(f"{folder}: {problem}; a damaged checkpoint's certificate says nothing")
        path = folder / CERTIFICATE
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["version"] == VERSION and set(found["parts"]) <= set(PARTS):
            return found
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path}: expected a certificate, got {type(error).__name__}; name a checkpoint's folder or its {CERTIFICATE}"
        ) from error
    raise ValueError(f"{path}: expected a certificate of version {VERSION}, got another one; make both with the same code")


def _newest(folder: Path) -> Path:
    found = [p.parent for p in folder.rglob(CERTIFICATE) if p.parent.name.removeprefix("step-").isdigit()]
    if not found:
        raise ValueError(f"{folder}: expected a checkpoint with a {CERTIFICATE}, got none; certificates lie beside checkpoints")
    if len({p.parent for p in found}) > 1:
        places = ", ".join(sorted(str(p) for p in {p.parent for p in found}))
        raise ValueError(f"{folder}: expected checkpoints of one phase, got those of several; name one of {places}")
    return max(found, key=lambda p: int(p.name.removeprefix("step-")))


def differences(a: Certificate, b: Certificate) -> list[str]:
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


def summary(certificate: Certificate) -> str:
    lines = [f"step {certificate['step']}"]
    for part, title in PARTS.items():
        items = certificate["parts"].get(part, {})
        few = ", ".join(f"{item} {json.dumps(value)}" for item, value in items.items() if not str(value).startswith("sha256:"))
        lines.append(f"{title}: {len(items)} hashed or noted{f' ({few})' if few and len(few) < 200 else ''}")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m rlhf_core.checkpoint.digest", description="Compare the states that two checkpoints hold."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    compare = commands.add_parser("compare", help="0 when both hold the same state, 1 and what differs first when not")
    compare.add_argument("a", type=Path)
    compare.add_argument("b", type=Path)
    compare.add_argument("--all", action="store_true", help="name everything that differs")
    show = commands.add_parser("show", help="what a certificate is about")
    show.add_argument("a", type=Path)
    chosen = parser.parse_args(arguments)
    try:
        a = read_certificate(chosen.a)
        if chosen.command == "show":
            sys.stdout.write(summary(a) + "\n")
            return 0
        b = read_certificate(chosen.b)
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
