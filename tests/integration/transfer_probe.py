"""An RL job of which first an engine and then the trainer rank is killed in a weight transfer, and one with adapters:
python transfer_probe.py <folder>

Prints what the first job has printed, and the bytes of the second one's syncs, for test_rl_transfer.py.
"""

from __future__ import annotations

import csv
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
from small_chain import ACTOR_TITLES
from small_workspace import command_line

from rlhf_core.process import configure_process
from tools.faults.transfer import held_transfer

DEADLINE = 120.0
LORA = {"rank": 2, "alpha": 4.0, "dropout": 0.0, "target_modules": "all-linear"}


def main() -> None:
    configure_process()
    from tools.placement_matrix import Cell, lab

    with lab(Path(sys.argv[1]), steps=60, cpus=4) as here, ThreadPoolExecutor(1) as pool:
        job = pool.submit(here.run, Cell("grpo", "together", engines=2))
        with held_transfer(actors, ended=job.done, deadline=DEADLINE) as held:
            held.engines[0].kill()
        time.sleep(2.0)  # the new engine starts
        with held_transfer(actors, ended=job.done, deadline=DEADLINE) as held:
            held.ranks[0].kill()
        print(job.exception(timeout=DEADLINE))
        here.run(Cell("grpo", "together", engines=2), name="adapters", **{"rl.steps": 3, "rl.lora": LORA})
        with (Path(sys.argv[1]) / "adapters" / "timings.csv").open(newline="", encoding="utf-8") as file:
            print("sync_bytes", [row["sync_bytes"] for row in csv.DictReader(file)])


def actors(role: str) -> list[psutil.Process]:
    """The job's actors of a role."""
    return [p for p in psutil.Process().children(recursive=True) if re.search(ACTOR_TITLES[role], " ".join(command_line(p)))]


if __name__ == "__main__":
    main()
