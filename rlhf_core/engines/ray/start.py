"""Ray's command line without parts that the head of one job doesn't need.

    python -m rlhf_core.engines.ray.start start --head ...

`ray` imports all of its commands, including Ray Serve's, and a head starts a server for Ray's client. Both are skipped to start faster.
"""

from __future__ import annotations

import os
import sys
from typing import Any

# Ray skips commands that can't be imported.
OTHER_COMMANDS = ("ray.serve.scripts", "ray.util.state.state_cli", "ray.dashboard.modules.job.cli")


def main() -> None:
    for name in OTHER_COMMANDS:
        sys.modules[name] = None  # type: ignore[assignment]
    os.environ.setdefault("RAY_START_HOOK", f"{__spec__.name}.{without_client.__name__}")  # a user's own hook is kept
    from ray.scripts.scripts import main as ray

    ray()


def without_client(parameters: Any, _head: bool) -> None:
    """Keep a head from starting a server for Ray's client. Ray calls this hook with a node's parameters; nodes that jobs start don't
    inherit it.
    """
    del os.environ["RAY_START_HOOK"]
    parameters.ray_client_server_port = None


if __name__ == "__main__":
    main()
