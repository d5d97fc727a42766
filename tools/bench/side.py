"""Runs one side in its own process: python -m tools.bench.side {ours,theirs} WORKS.json RUNS.json

Reads a list of works and writes a list of runs. TRL and DeepSpeed both set up distributed state, so they can't share a process.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import tempfile
from dataclasses import asdict
from pathlib import Path

from rlhf_core.process import configure_process


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("side", choices=("ours", "theirs"))
    parser.add_argument("works", type=Path)
    parser.add_argument("runs", type=Path)
    arguments = parser.parse_args()
    configure_process()
    import torch

    from tools.bench.workload import workloads_from_json

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    train = importlib.import_module(f"tools.bench.{arguments.side}").train
    runs = []
    for work in workloads_from_json(arguments.works.read_text()):
        with tempfile.TemporaryDirectory() as folder:
            runs.append(asdict(train(work, Path(folder))))
    arguments.runs.write_text(json.dumps(runs))


if __name__ == "__main__":
    main()
