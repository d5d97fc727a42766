"""Where the ranks of a job meet: a store on rank 0, at the address that Ray knows its node by."""

from __future__ import annotations

import socket
from datetime import timedelta

import torch.distributed as dist
from ray.util import get_node_ip_address


def open_store(world_size: int | None, *, timeout: float) -> dist.TCPStore:
    """Open the store of rank 0, at `store.host` and `store.port`. The system chooses the port.

    The store listens only at the address by which Ray knows this node; Torch's own socket would listen at all of the node's addresses.

    Args:
        timeout: seconds that a rank waits for the others.
    """
    address = get_node_ip_address()
    listening = socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
    host, port = listening.getsockname()[:2]
    own = {"is_master": True, "master_listen_fd": listening.detach(), "wait_for_workers": False}
    return dist.TCPStore(host, port, world_size, timeout=timedelta(seconds=timeout), **own)


def join_store(host: str, port: int, world_size: int | None, *, timeout: float) -> dist.TCPStore:
    """Open the same store on another rank.

    Raises:
        dist.DistNetworkError: rank 0 can't be reached within the timeout.
    """
    return dist.TCPStore(host, port, world_size, is_master=False, timeout=timedelta(seconds=timeout))
