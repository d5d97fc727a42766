"""Remove the inputs of jobs from a storage: python -m rlhf_core.storage.clean <address, as in cluster.storage>

All runs that use the storage share the inputs, and a stage writes those that its job lacks, so only running jobs need them. The command
refuses while a job's heartbeat changes; it doesn't see one whose stage is just starting it. Checkpoints and outputs stay.
"""

from __future__ import annotations

import argparse
import sys
import time

from rlhf_core.config import bytes_shown, number_of
from rlhf_core.process import exit_with
from rlhf_core.storage.address import NOTE_SECONDS, Storage, StorageFailed
from rlhf_core.storage.node import INPUTS
from rlhf_core.storage.work import BEAT_SECONDS, PULSE

WATCHED_SECONDS = NOTE_SECONDS + 5 * BEAT_SECONDS  # a write of a heartbeat may take that long
TIMEOUT = 1800.0  # seconds for the removal, as by default in cluster.storage_timeout


def clean(storage: Storage, *, watched: float = WATCHED_SECONDS) -> str:
    """Remove the folder of inputs, and return a sentence that says what was removed.

    Args:
        watched: seconds during which no job's heartbeat may change.
    Raises:
        ValueError: a job is running.
        StorageFailed: the storage fails.
    """
    before = _pulses(storage)
    if before:
        time.sleep(watched)
    after = _pulses(storage)
    if alive := sorted(work for work, pulse in after.items() if before.get(work) != pulse):
        raise ValueError(f"storage {storage.url}: expected no job at work, got {', '.join(alive)}; wait for it or stop it")
    files = storage.sizes(INPUTS)
    storage.remove_folder(INPUTS)
    return f"storage {storage.url}: removed {number_of(len(files), 'file')} of {INPUTS}/, {bytes_shown(sum(files.values()))}"


def _pulses(storage: Storage) -> dict[str, bytes | None]:
    """Return the content of each job's heartbeat by the job's folder in the storage."""
    names = [name for name in storage.sizes("") if name.endswith(f"/{PULSE}")]
    return {name.removesuffix(f"/{PULSE}"): storage.note(name) for name in names}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("address")
    try:
        print(clean(Storage(parser.parse_args().address, timeout=TIMEOUT)))
    except (ValueError, StorageFailed) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    exit_with(main)
