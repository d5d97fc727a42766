"""A Ray head of our own, started for real."""

from __future__ import annotations

import os
import socket

import psutil
import pytest

from rlhf_core.engines import ray_cluster
from rlhf_core.engines.ray_cluster import MARK, ClusterError, local_head

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(autouse=True)
def _environment():
    """What a head leaves in the environment is gone afterwards."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def marked() -> list[int]:
    found = []
    for process in psutil.process_iter():
        try:
            found += [process.pid] if MARK in process.environ() else []
        except psutil.Error:
            continue
    return found


def hand_out(monkeypatch, dashboards: list[int]) -> list[list[int]]:
    """Free ports, but the dashboard's is one of these as long as there are any; and what was handed out."""
    free, handed = ray_cluster._free_ports, []

    def ports(count: int) -> list[int]:
        handed.append(free(count))
        if dashboards:
            handed[-1][1] = dashboards.pop(0)
        return handed[-1]

    monkeypatch.setattr(ray_cluster, "_free_ports", ports)
    return handed


def test_a_port_that_was_taken_meanwhile_is_replaced(monkeypatch, caplog):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        handed = hand_out(monkeypatch, [taken.getsockname()[1]])
        before = marked()
        with local_head(cpus=1, start_timeout=120) as address:
            assert address == f"http://127.0.0.1:{handed[1][1]}" and len(handed) == 2
        assert "a port that was free has been taken meanwhile" in caplog.text
    assert set(marked()) <= set(before)


def test_one_that_is_taken_again_and_again_is_an_error(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        handed = hand_out(monkeypatch, [taken.getsockname()[1]] * 9)
        with (
            pytest.raises(ClusterError, match=r"(?s)Ray head: expected it up .*already (in use|occupied)"),
            local_head(cpus=1, start_timeout=120),
        ):
            pass
        assert len(handed) == ray_cluster.HEAD_STARTS
