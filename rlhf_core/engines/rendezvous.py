"""Where the ranks of a job meet: a store on rank 0, at the address that Ray knows its node by."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from ray.util import get_node_ip_address


def open_store(world_size: int | None, *, timeout: float) -> dist.TCPStore:
    """The store of rank 0, at `store.host` and `store.port`. The system chooses the port, which stays bound.

    Args:
        timeout: seconds that a rank waits for the others.
    """
    return dist.TCPStore(get_node_ip_address(), 0, world_size, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout))


def join_store(host: str, port: int, world_size: int | None, *, timeout: float) -> dist.TCPStore:
    """The same store on another rank.

    Raises:
        dist.DistNetworkError: rank 0 can't be reached within the timeout.
    """
    return dist.TCPStore(host, port, world_size, is_master=False, timeout=timedelta(seconds=timeout))
