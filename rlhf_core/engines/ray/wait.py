"""Wait until a Ray cluster is complete: python -m rlhf_core.engines.ray.wait <dashboard's address> <nodes> <seconds>.

Exit code 0: the cluster has at least this many nodes; 1: it doesn't have them by the deadline. The command needs the cluster's token
(docs/security.md).
"""

from __future__ import annotations

import os
import sys
import time

from ray.exceptions import AuthenticationError
from ray.util.state import list_nodes
from ray.util.state.common import NodeState
from ray.util.state.exception import RayStateApiException

from rlhf_core.config import number_of
from rlhf_core.engines.ray.cluster import ClusterError, forget_other_clusters, token_refusal
from rlhf_core.process import bypass_proxies, exit_with

POLL_SECONDS = 2.0
ANSWER_SECONDS = 10


def wait_for_nodes(address: str, count: int, timeout: float) -> list[NodeState]:
    """Wait until the cluster has `count` living nodes, and return them.

    Args:
        address: the dashboard's address, as in `cluster.address`. timeout: seconds to wait.
    Raises:
        ClusterError: there are fewer by the deadline, the dashboard doesn't answer, or it refuses the token.
    """
    forget_other_clusters()
    bypass_proxies(os.environ)
    until = time.monotonic() + timeout
    answer = "no answer"
    while time.monotonic() < until:
        try:
            # Ray's own filter fails once a node has died, and so does its check for nodes that are left out.
            nodes = list_nodes(address, limit=10_000, timeout=ANSWER_SECONDS, detail=True, raise_on_missing_output=False)
        except AuthenticationError as error:
            raise ClusterError(token_refusal(address, error)) from error
        except (OSError, RuntimeError, RayStateApiException) as error:  # the head isn't up yet
            answer = str(error) or type(error).__name__
        else:
            found = [node for node in nodes if node.state == "ALIVE"]
            answer = f"{len(found)}: {', '.join(node.node_name for node in found)}"
            if len(found) >= count:
                return found
        time.sleep(POLL_SECONDS)
    nodes = number_of(count, "node")
    raise ClusterError(f"cluster at {address}: expected {nodes} within {timeout:.0f} s, got {answer}; see the output of `ray start`")


def main() -> int:
    address, count, timeout = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    try:
        nodes = wait_for_nodes(address, count, timeout)
    except ClusterError as error:
        print(error, file=sys.stderr)
        return 1
    total = [number_of(sum((node.resources_total or {}).get(name, 0) for node in nodes), name) for name in ("GPU", "CPU")]
    print(f"cluster at {address}: {', '.join([number_of(len(nodes), 'node'), *total])}", flush=True)
    return 0


if __name__ == "__main__":
    exit_with(main)
