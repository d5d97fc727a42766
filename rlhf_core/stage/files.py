"""Files of stages: JSON, prepared data, and outputs that are published atomically."""

from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_core.files import replace_text
from rlhf_core.paths import PREPARED, SOURCES

if TYPE_CHECKING:
    from rlhf_core.models.card import CardFacts

PROBABILITIES = ("p_value", "level", "spent")  # keys of metrics


def source_judges() -> dict[str, str]:
    """Return the judge (`SourceConfig.judge_name`) of each data source that has one, by the source's name."""
    return {name: source["judge"] for name, source in read_json(SOURCES).items() if source["judge"]}


def has_labels(split: str = "train") -> bool:
    """Return whether any prompt of a split has a reference answer."""
    from rlhf_core.data.schema import read_rows

    return any(row["label"] is not None for row in read_rows(PREPARED, "prompt", split))


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write deterministic JSON atomically. NaN and infinities become null. Numbers are rounded to six decimals, PROBABILITIES to six
    significant digits, so that a small probability isn't rounded to 0.
    """
    replace_text(path, json.dumps(finite(content), indent=2, sort_keys=True, allow_nan=False, ensure_ascii=False) + "\n")


def finite(node: Any, key: str = "") -> Any:
    """Return the content that `write_json` writes: rounded, and null in place of NaN and infinity."""
    if isinstance(node, dict):
        return {k: finite(v, k) for k, v in node.items()}
    if isinstance(node, list | tuple):
        return [finite(v, key) for v in node]
    if isinstance(node, float) and not math.isfinite(node):
        return None
    if isinstance(node, float):
        return float(f"{node:.6g}") if key in PROBABILITIES else round(node, 6)
    return node


def read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def publish_model(aside: Path, final: Path, facts: CardFacts) -> None:
    """Write the card of a finished model and publish its folder."""
    from rlhf_core.models.card import write_card

    write_card(aside, facts)
    publish(aside, final)


def publish(aside: Path, final: Path) -> None:
    """Move a finished file or folder to its final path, with the umask's permissions. A folder that is there is removed before."""
    like_new(aside)
    final.parent.mkdir(parents=True, exist_ok=True)
    if final.is_dir():
        shutil.rmtree(final)
    shutil.move(aside, final)


def like_new(path: Path) -> None:
    """Set the permissions that the umask gives new files and folders; safetensors makes files that only their owner can read."""
    umask = os.umask(0o077)  # the umask can only be read by setting it
    os.umask(umask)
    for found in [path, *(path.rglob("*") if path.is_dir() else ())]:
        found.chmod((0o777 if found.is_dir() else 0o666) & ~umask)
