"""params.yaml with recipes/clerk.yaml laid over it, as a file: the small, complete job that most tests start from."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from pathlib import Path

from rlhf_core.config import overridden, read_text, with_recipes

ROOT = Path(__file__).parents[1]


def _written() -> Path:
    text = overridden(read_text(ROOT / "params.yaml"), with_recipes([ROOT / "recipes/clerk.yaml"], {}), subject="the clerk's params")[0]
    folder = Path(tempfile.mkdtemp(prefix="clerk-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = folder / "params.yaml"
    path.write_text(text, encoding="utf-8")
    return path


CLERK_PARAMS = _written()
