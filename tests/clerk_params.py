"""The small, complete job that most tests start from, as a file: params.yaml with recipes/clerk.yaml laid over it."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from pathlib import Path

from tools.clerk import ROOT, clerk_text

__all__ = ["CLERK_PARAMS", "ROOT"]


def _written() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="clerk-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = folder / "params.yaml"
    path.write_text(clerk_text(), encoding="utf-8")
    return path


CLERK_PARAMS = _written()
