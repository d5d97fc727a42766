"""Lines of the doctor's report (tools/doctor/__main__.py)."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "missing", "broken", "note"]


@dataclass(frozen=True)
class Finding:
    """One line of the report. `broken` keeps the chain from running; `missing` costs only what the remark says."""

    name: str
    found: str
    level: Level = "ok"
    remark: str = ""


def version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def import_error(package: str) -> str | None:
    """The reason why importing a package fails, tried in a subprocess; None if it works."""
    done = subprocess.run([sys.executable, "-c", f"import {package}"], capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1][:100]
