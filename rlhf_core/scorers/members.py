"""Where the members of a reward model are."""

from __future__ import annotations

from pathlib import Path


def member_folders(folder: Path) -> list[Path]:
    """Of a reward model: its own folder, and those of an ensemble's further members beside its files, in their order."""
    further = [p for p in folder.glob("member_*") if (p / "config.json").is_file()]
    return [folder, *sorted(further, key=lambda p: int(p.name.removeprefix("member_")))]
