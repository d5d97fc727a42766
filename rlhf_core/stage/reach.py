"""Checks that a cluster can be used: its head answers and accepts the token, and its storage takes and gives back a file.

python -m rlhf_core.stage.reach <cluster.address> [<cluster.storage>] runs in the environment of a stage. Exit code 0: it can; 2: it can't,
and the last line of the standard error says why; 3: one of them doesn't answer in time.
"""

from __future__ import annotations

import sys

from rlhf_core.process import configure_process, exit_with

UNUSABLE, LATE = 2, 3


def check_reach(address: str, storage: str | None) -> None:
    """Check that the cluster's head accepts this process, and that its storage can be written and read.

    Raises:
        StorageFailed, StorageRefused: the storage can't be used.
        ClusterError, HeadRefused: the address or the token can't be used.
        StorageLate, HeadLate: no answer in time.
    """
    from rlhf_core.engines.ray.cluster import check_head
    from rlhf_core.storage.address import CHECK_SECONDS, Storage, StorageLate

    if storage is not None:
        try:
            Storage(storage, timeout=CHECK_SECONDS).check()
        except StorageLate as error:  # whose advice is about the timeout of transfers
            raise StorageLate(
                f"cluster.storage: expected {storage} to answer within {CHECK_SECONDS:.0f} s, got nothing; check it"
            ) from error
    check_head(address)


def main() -> int:
    from rlhf_core.engines.ray.cluster import ClusterError, HeadLate
    from rlhf_core.storage.address import StorageFailed, StorageLate

    configure_process()
    try:
        check_reach(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None)
    except (ClusterError, StorageFailed) as error:
        print(" ".join(str(error).split()), file=sys.stderr, flush=True)
        return LATE if isinstance(error, HeadLate | StorageLate) else UNUSABLE
    return 0


if __name__ == "__main__":
    exit_with(main)
