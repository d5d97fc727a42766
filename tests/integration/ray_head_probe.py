"""A Ray head whose dashboard is given a taken port the first <times> times: python ray_head_probe.py <times>

Its own process, because Ray reads the environment once and a head changes it. Prints its results as one line of JSON.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import shlex
import socket
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import psutil

from rlhf_core.engines.ray import cluster
from rlhf_core.process import configure_process

JOB = "import ray; ray.init(address='auto', logging_level='ERROR'); print('head', ray.get_runtime_context().gcs_address)"


def metrics_shown(last: int) -> list[str]:
    """Ports at which the head's processes serve metrics to anybody, after the last one has opened."""
    ports: dict[int, str] = {}
    until = time.monotonic() + 60
    while last not in ports:
        assert time.monotonic() < until, f"expected Ray's agent at port {last}, got {ports}"
        time.sleep(0.5)
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                line = " ".join(process.cmdline())
                ports |= {c.laddr.port: line for c in process.net_connections(kind="tcp") if c.status == psutil.CONN_LISTEN}
    found = []
    for port, line in ports.items():
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=3) as answer:
                shown = answer.status == 200 and b"# HELP" in answer.read(5000)
        except (OSError, http.client.HTTPException):
            continue
        if shown:
            found.append(f"{port}: {line[:150]}")
    return found


def run(address: str) -> str:
    """The output of a job that names its head."""
    printed: list[str] = []
    how = {"start_timeout": 120, "silence_timeout": 120, "pulse": Path("nothing"), "stop_requested": lambda: False}
    command = f"exec {shlex.join([sys.executable, '-c', JOB])}"
    cluster.run_job(address, command, name="probe", environment={}, on_output=printed.append, **how)
    return "".join(printed)


def main() -> None:
    configure_process()
    free, handed, left = cluster.free_ports, [], int(sys.argv[1])
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()

        def ports(count: int) -> list[int]:
            handed.append(free(count))
            if len(handed) <= left:
                handed[-1][1] = taken.getsockname()[1]
            return handed[-1]

        cluster.free_ports = ports
        seen = {"address": None, "error": "", "running": []}
        try:
            with cluster.local_head(cpus=1, start_timeout=120) as seen["address"]:
                for process in psutil.Process().children(recursive=True):
                    with contextlib.suppress(psutil.Error):
                        seen["running"].append(" ".join(process.cmdline()))
                seen["metrics"] = metrics_shown(handed[-1][2])
                seen["job"] = run(seen["address"])
        except cluster.ClusterError as error:
            seen["error"] = str(error)
    seen["left"] = [str(path) for path in Path(tempfile.gettempdir()).iterdir()]
    seen |= {
        "dashboards": [p[1] for p in handed],
        "ports": [p[0] for p in handed],
        "children": len(psutil.Process().children(recursive=True)),
    }
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
