"""Hashes of files as DVC has them."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path


def test_hashes_are_computed_while_the_interpreter_ends(tmp_path):
    """A stage compares its inputs once more in an exit function, when no thread can be started any more."""
    (tmp_path / "large").write_bytes(b"x" * 2000)
    program = (
        "import atexit; from pathlib import Path; from rlhf_core.provenance import file_hashes as of; of.SMALL = 1; "
        "atexit.register(lambda: print(of.FileHashes(Path()).md5s([Path('large')]), of.dvc_md5_of_files(Path())['large']))"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True)
    md5 = hashlib.md5(b"x" * 2000).hexdigest()
    assert (done.stdout, done.stderr) == (f"['{md5}'] {md5}\n", "")
