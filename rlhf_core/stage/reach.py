"""Whether a cluster can be used: its head answers and accepts the token, and its storage takes and gives back a file.

python -m rlhf_core.stage.reach <cluster.address> [<cluster.storage>] runs in the environment of a stage. Exit code 0: it can; 2: it can't,
and the last line of the standard error says why.
"""

from __future__ import annotations

import sys

from rlhf_core.process import exit_with

UNUSABLE = 2


def check_reach(address: str, storage: str | None) -> None:
    """
    Raises:
        HeadRefused, StorageFailed: address, token or storage are wrong. StorageLate: the storage doesn't answer in time.
        ClusterError: the head doesn't answer in time.
    """
    from rlhf_core.engines.ray.cluster import check_head
    from rlhf_core.storage.address import CHECK_SECONDS, Storage

    if storage is not None:
        Storage(storage, timeout=CHECK_SECONDS).check()
    check_head(address)


def main() -> int:
    from rlhf_core.engines.ray.cluster import ClusterError
    from rlhf_core.storage.address import StorageFailed

    try:
        check_reach(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None)
    except (ClusterError, StorageFailed) as error:
        print(" ".join(str(error).split()), file=sys.stderr, flush=True)
        return UNUSABLE
    return 0


if __name__ == "__main__":
    exit_with(main)
