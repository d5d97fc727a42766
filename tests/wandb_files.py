"""Reads what wandb writes offline: records of its own protocol in the log format of LevelDB."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wandb.proto import wandb_internal_pb2 as protocol

HEADER, BLOCK, RECORD_HEADER = 7, 32 * 1024, 7  # bytes: of the file, of a block, of a part of a record
FULL, FIRST, LAST = 1, 2, 4  # kinds of parts


def records(file: Path) -> Iterator[Any]:
    """The records of a .wandb file, up to the end or to one that a kill has cut off."""
    content = file.read_bytes()
    place, parts = HEADER, b""
    while place + RECORD_HEADER <= len(content):
        left = BLOCK - place % BLOCK
        if left < RECORD_HEADER:
            place += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, place)
        part = content[place + RECORD_HEADER : place + RECORD_HEADER + length]
        if kind not in (FULL, FIRST, 3, LAST) or len(part) < length:
            return
        parts = part if kind in (FULL, FIRST) else parts + part
        place += RECORD_HEADER + length
        if kind in (FULL, LAST):
            record = protocol.Record()
            record.ParseFromString(parts)
            yield record


class Offline:
    """All offline files of a folder, oldest first, as `wandb sync` would upload them."""

    def __init__(self, folder: Path):
        self.folders = sorted((folder / "wandb").glob("offline-run-*"), key=lambda path: path.stat().st_ctime_ns)
        self.records = [record for path in self.folders for file in path.glob("*.wandb") for record in records(file)]

    def of(self, kind: str) -> list[Any]:
        return [getattr(record, kind) for record in self.records if record.WhichOneof("record_type") == kind]

    @property
    def ids(self) -> set[str]:
        return {run.run_id for run in self.of("run")}

    def history(self) -> list[dict[str, Any]]:
        return [_items(record.item) for record in self.of("history")]

    def curve(self, stage: str, name: str) -> list[tuple[int, float]]:
        """Steps and values of a curve, as they were logged."""
        rows = [row for row in self.history() if f"{stage}/step" in row and f"{stage}/{name}" in row]
        return [(row[f"{stage}/step"], row[f"{stage}/{name}"]) for row in rows]

    def summary(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for record in self.of("summary"):
            found |= _items(record.update)
        return found

    def config(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for record in [*(run.config for run in self.of("run")), *self.of("config")]:
            found |= _items(record.update)
        return found


def _items(items: Any) -> dict[str, Any]:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
