"""Finds free ports of this machine for servers that start to listen later."""

from __future__ import annotations

import contextlib
import secrets
import socket

# Above the ports of Ray's workers (10002 to 19999) and below those that Linux assigns to connections (net.ipv4.ip_local_port_range),
# which could take a port before the server listens.
FIRST, LAST = 20000, 32000
TRIES = 1000


def free_ports(count: int) -> list[int]:
    """Return different ports on which no process listens.

    Raises:
        OSError: too few are free.
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
