"""A Ray head for `cluster.address`: python standing_head.py <file>; it runs until its standard input ends.

Its own process, because Ray reads the environment once and a head changes it. The file gets the head's address as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from rlhf_core.engines.ray.cluster import local_head


def main() -> None:
    known = Path(sys.argv[1])
    with local_head(cpus=4, start_timeout=120) as address:
        aside = known.with_suffix(".tmp")
        aside.write_text(json.dumps({"address": address}))
        aside.rename(known)
        sys.stdin.read()


if __name__ == "__main__":
    main()
