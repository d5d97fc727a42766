"""A Ray head that is there before any job, as `cluster.address` has one: python standing_head.py <file>, until its standard input ends.

A process of its own: Ray looks at the environment once, and a head leaves its settings there. The file says in JSON where the head is to be
reached and where its token is.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from rlhf_core.engines.ray_cluster import local_head


def main() -> None:
    known = Path(sys.argv[1])
    with local_head(cpus=4, start_timeout=120) as address:
        aside = known.with_suffix(".tmp")
        aside.write_text(json.dumps({"address": address, "token": os.environ["RAY_AUTH_TOKEN_PATH"]}))
        aside.rename(known)
        sys.stdin.read()


if __name__ == "__main__":
    main()
