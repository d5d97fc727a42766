"""The store at which ranks meet."""

from __future__ import annotations

import socket

import psutil
import pytest
import torch.distributed as dist
from ray.util import get_node_ip_address

from rlhf_core.engines.ray.rendezvous import join_store, open_store


def test_a_rank_joins_the_store_at_rays_address_of_the_node():
    first = open_store(2, timeout=30)
    assert first.host == get_node_ip_address()
    second = join_store(first.host, first.port, 2, timeout=30)
    second.set("from", "second")
    assert first.get("from") == b"second"


def test_no_other_address_of_the_node_is_listened_to():
    store = open_store(2, timeout=30)
    listening = {c.laddr.ip for c in psutil.Process().net_connections() if c.status == psutil.CONN_LISTEN and c.laddr.port == store.port}
    assert listening == {get_node_ip_address()}


def test_the_port_stays_bound():
    store = open_store(2, timeout=30)
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind((store.host, store.port))


def test_a_missing_rank_0_is_an_error_after_the_timeout():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound, and nobody listens
        with pytest.raises(dist.DistNetworkError, match=r"1000ms|timed out|timeout"):
            join_store("127.0.0.1", unused.getsockname()[1], 2, timeout=1)
