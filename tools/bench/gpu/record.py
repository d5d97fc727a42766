"""Writes a part's figures as rows of a JSON file, after each row, so that an interrupted part keeps them."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rlhf_core.files import replace_text


@dataclass(frozen=True)
class Figure:
    """A figure of a part.

    what: description with shape, dtype and settings ("SFT, Qwen2.5-1.5B shape, bfloat16, flash-attn"). values: one value per repetition, in
    `unit`. note: a remark for the reader, for example why there is no value.
    """

    what: str
    unit: str
    values: tuple[float, ...]
    note: str = ""

    @property
    def median(self) -> float | None:
        return statistics.median(self.values) if self.values else None


class Record:
    """The figures of a part, kept in a JSON file.

    Args:
        path: path of the JSON file.
    """

    def __init__(self, path: Path):
        self._path = path
        self._figures: list[Figure] = []

    def add(self, what: str, unit: str, values: Sequence[float], note: str = "") -> None:
        self._figures.append(Figure(what, unit, tuple(map(float, values)), note))
        replace_text(self._path, json.dumps([asdict(figure) for figure in self._figures], indent=1))
        print(f"{what}: {', '.join(f'{v:.4g}' for v in values) or 'none'} {unit} {note}".rstrip(), flush=True)


def read(path: Path) -> list[Figure]:
    return [Figure(**{**row, "values": tuple(row["values"])}) for row in json.loads(path.read_text())]
