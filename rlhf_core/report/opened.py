"""Finds a run's folder, and opens its pages in a browser."""

from __future__ import annotations

import os
import sys
import webbrowser
from pathlib import Path

from rlhf_core.config import ConfigError, shown
from rlhf_core.paths import RUNS


def open_page(page: Path) -> None:
    """Open a page in a browser that has a window."""
    if _has_display():
        webbrowser.open(page.resolve().as_uri())


def _has_display() -> bool:
    """Return whether a browser has a window to open; without one a text browser would take over the terminal."""
    return sys.platform == "darwin" or any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))


def run_folder(run: str) -> Path:
    """Return the folder of a run.

    Raises:
        ConfigError: there is none.
    """
    for folder in (Path(run),) if run == "." else (RUNS / run, Path(run)):
        if folder.is_dir():
            return folder
    raise ConfigError(f"expected a run of {RUNS}/ or a folder, got {shown(run)}; `rlhf runs list` names the runs")
