"""A Ray head whose dashboard is given a port that is taken, so many times: python ray_head_probe.py <times>

A process of its own: Ray looks at the environment once, and a head leaves its settings there. Prints what it saw as one line of JSON.
"""

from __future__ import annotations

import contextlib
import json
import socket
import sys

import psutil

from rlhf_core.engines import ray_cluster


def main() -> None:
    free, handed, left = ray_cluster.free_ports, [], int(sys.argv[1])
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()

        def ports(count: int) -> list[int]:
            handed.append(free(count))
            if len(handed) <= left:
                handed[-1][1] = taken.getsockname()[1]
            return handed[-1]

        ray_cluster.free_ports = ports
        seen = {"address": None, "error": "", "running": []}
        try:
            with ray_cluster.local_head(cpus=1, start_timeout=120) as seen["address"]:
                for process in psutil.Process().children(recursive=True):
                    with contextlib.suppress(psutil.Error):
                        seen["running"].append(" ".join(process.cmdline()))
        except ray_cluster.ClusterError as error:
            seen["error"] = str(error)
    seen |= {"dashboards": [p[1] for p in handed], "children": len(psutil.Process().children(recursive=True))}
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
