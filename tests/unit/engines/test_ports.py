"""Ports for servers that listen later: free, different, and none that the system gives to others meanwhile."""

from __future__ import annotations

import socket

import pytest

from rlhf_core.engines import ports
from rlhf_core.engines.ports import free_ports


def test_ports_are_free_distinct_and_outside_the_ephemeral_range():
    found = free_ports(20)
    assert len(set(found)) == 20 and all(ports.FIRST <= port < ports.LAST for port in found)
    sockets = [socket.socket() for _ in found]
    for one, port in zip(sockets, found, strict=True):
        one.bind(("127.0.0.1", port))
        one.close()


def test_one_that_is_taken_is_left_out_and_too_few_are_an_error(monkeypatch):
    (first,) = free_ports(1)
    monkeypatch.setattr(ports, "FIRST", first)
    monkeypatch.setattr(ports, "LAST", first + 1)
    assert free_ports(1) == [first]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", first))
        with pytest.raises(OSError, match="expected 1 free ones, got 0"):
            free_ports(1)
