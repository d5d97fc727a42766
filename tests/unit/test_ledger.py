"""Where a ledger is, whatever the locale of the process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
ASKS = """
import os, sys
from pathlib import Path
from rlhf_core.gate.looks import LEDGER, run_name
root = Path(os.fsdecode(bytes.fromhex(sys.argv[1])))
print(os.fsencode(LEDGER.path(root)).hex(), run_name(root).encode().hex())
"""


@pytest.mark.parametrize("name", ["gr\u00fc\u00dfe".encode(), b"gr\xfc"], ids=["UTF-8", "other bytes"])
@pytest.mark.parametrize("utf8", ["0", "1"])
def test_git_names_a_folder_in_any_bytes_and_locale(tmp_path, name, utf8):
    root = os.path.join(os.fsencode(tmp_path.resolve()), name)
    subprocess.run([b"git", b"init", b"--quiet", b"--initial-branch", name, root], check=True)
    environment = os.environ | {"LC_ALL": "C", "PYTHONUTF8": utf8, "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-c", ASKS, root.hex()]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    path, branch = map(bytes.fromhex, done.stdout.split())
    assert path == root + b"/.git/rlhf-gate-looks.jsonl"
    assert branch.decode() == name.decode(errors="replace")
