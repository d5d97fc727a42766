"""Starts the driver of a job whose code came by Ray: python -m rlhf_core.stage.start_driver <work> <module> <arguments>.

It checks the packages before anything is imported that may be missing. The argument <work> isn't read; it tells the jobs of a cluster apart
in lists of processes.
"""

from __future__ import annotations

import contextlib
import platform
import runpy
import sys

from rlhf_core.storage.address import StorageRefused
from rlhf_core.storage.node import JobFiles
from rlhf_core.storage.packages import differences, found_here, refusal
from rlhf_core.storage.work import REFUSAL, REFUSED


def main() -> None:
    files = JobFiles.read()
    if files is None:
        sys.exit("rlhf_core.stage.start_driver: expected a job with a storage, got none; it is started by a stage")
    if lines := differences(files.packages, found_here(files.packages)):
        told = refusal(platform.node(), lines)
        print(told, flush=True)
        with contextlib.suppress(OSError, ImportError):  # the output has the reason
            files.storage().put_note(f"{files.work}/{REFUSAL}", told.encode())
        sys.exit(REFUSED)
    try:
        files.storage()
    except StorageRefused as refused:
        print(refused, flush=True)
        sys.exit(REFUSED)
    del sys.argv[:2]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
