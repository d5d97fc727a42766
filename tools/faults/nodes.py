"""Runs a Ray cluster of several nodes on this machine: python -m tools.faults.nodes <folder> <nodes> <CPUs of each>; ends by SIGTERM.

The head has no CPU for actors. <folder>/cluster.json has the cluster's address once the cluster is up.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import sys
import threading
from pathlib import Path

from rlhf_core.engines.ports import free_ports
from rlhf_core.process import configure_process


def main() -> None:
    folder, count, cpus = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    configure_process()
    token = folder / "token"
    token.write_text(secrets.token_hex(32))
    (folder / "ray").mkdir()  # for Ray's note of the newest cluster, which other programs must not read
    os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(token), RAY_TMPDIR=str(folder))
    os.environ.update(RAY_enable_worker_prestart="0", RAY_prestart_worker_first_driver="0")
    from ray.cluster_utils import Cluster  # reads the environment when it is imported

    (dashboard,) = free_ports(1)
    store = {"object_store_memory": 100_000_000}
    head = {"num_cpus": 0, "include_dashboard": True, "dashboard_port": dashboard, "temp_dir": str(folder)}
    cluster = Cluster(initialize_head=True, head_node_args=head | store)
    for _ in range(count):
        cluster.add_node(num_cpus=cpus, **store)
    cluster.wait_for_nodes()
    aside = folder / "cluster.json.tmp"
    aside.write_text(json.dumps({"address": f"http://127.0.0.1:{dashboard}", "token": str(token)}))
    aside.rename(folder / "cluster.json")
    stop.wait()
    cluster.shutdown()


if __name__ == "__main__":
    main()
