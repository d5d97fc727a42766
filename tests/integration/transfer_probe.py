"""An RL job of which first an engine and then the trainer rank is killed while weights travel, and one with adapters:
python transfer_probe.py <folder>

Prints what the first job has printed, and the bytes of the second one's syncs, for test_rl_transfer.py.
"""

from __future__ import annotations

import csv
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import psutil

from rlhf_core.process import configure_process

DEADLINE = 120.0
LORA = {"rank": 2, "alpha": 4.0, "dropout": 0.0, "target_modules": "all-linear"}


def main() -> None:
    configure_process()
    from tools.placement_matrix import Cell, lab

    with lab(Path(sys.argv[1]), backend="pytorch", steps=60, cpus=4) as here, ThreadPoolExecutor(1) as pool:
        job = pool.submit(here.run, Cell("grpo", "together", engines=2))
        while_busy(job, "rollout.receive_weights").kill()
        time.sleep(2.0)  # the new engine starts
        while_busy(job, "trainer.send_weights").kill()
        print(job.exception(timeout=DEADLINE))
        here.run(Cell("grpo", "together", engines=2), name="adapters", **{"rl.steps": 3, "rl.lora": LORA})
        with (Path(sys.argv[1]) / "adapters" / "timings.csv").open(newline="", encoding="utf-8") as file:
            print("sync_bytes", [row["sync_bytes"] for row in csv.DictReader(file)])


def while_busy(job: Future, call: str) -> psutil.Process:
    """A process of the job, as soon as it works on a call of an actor."""
    until = time.monotonic() + DEADLINE
    while time.monotonic() < until and not job.done():
        for process in psutil.Process().children(recursive=True):
            try:
                title = process.cmdline()[:1]
            except psutil.Error:
                continue
            if title and call in title[0]:
                return process
    raise RuntimeError(f"expected a process at {call}, got {job.exception() if job.done() else 'none in time'}")


if __name__ == "__main__":
    main()
