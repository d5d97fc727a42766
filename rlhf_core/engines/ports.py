"""Ports of this machine for servers that are given a number and listen later."""

from __future__ import annotations

import contextlib
import secrets
import socket

# Between those that a Ray head keeps for its workers (10002 to 19999) and those that Linux gives by itself, to every connection too, while
# the server still starts (net.ipv4.ip_local_port_range).
FIRST, LAST = 20000, 32000
TRIES = 1000


def free_ports(count: int) -> list[int]:
    """So many different ports at which nobody listens.

    Raises:
        OSError: there are too few.
    """
    found: list[int] = []
    with contextlib.ExitStack() as sockets:
        for _ in range(TRIES):
            if len(found) == count:
                return found
            probe = sockets.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", FIRST + secrets.randbelow(LAST - FIRST)))
                found.append(probe.getsockname()[1])
    raise OSError(f"ports {FIRST} to {LAST}: expected {count} free ones, got {len(found)}")
