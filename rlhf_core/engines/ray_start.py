"""Ray's command line without what the head of one job has no use for.

    python -m rlhf_core.engines.ray_start start --head ...

`ray` itself imports all of its commands before it starts anything, Ray Serve's among them, and a head has a server for Ray's client, which
nobody here connects by. Without both, two heads took 0.8 and 1.7 s of computing less.
"""

from __future__ import annotations

import os
import sys
from typing import Any

# Ray goes without one that can't be imported.
OTHER_COMMANDS = ("ray.serve.scripts", "ray.util.state.state_cli", "ray.dashboard.modules.job.cli")


def main() -> None:
    for name in OTHER_COMMANDS:
        sys.modules[name] = None  # type: ignore[assignment]
    os.environ.setdefault("RAY_START_HOOK", f"{__spec__.name}.{without_client.__name__}")  # a user's own counts
    from ray.scripts.scripts import main as ray

    ray()


def without_client(parameters: Any, _head: bool) -> None:
    """What Ray calls with a node's parameters before it starts it. Of this one: not of those that its jobs may start."""
    del os.environ["RAY_START_HOOK"]
    parameters.ray_client_server_port = None


if __name__ == "__main__":
    main()
