"""Part tensor_parallel: an RL job whose engine is divided over two GPUs; with one GPU there is nothing to measure.

python -m tools.bench.gpu.tensor_parallel --out FILE.json [--rehearse]
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from tools.bench.gpu.processes import Budget, begin
from tools.bench.gpu.record import Record
from tools.bench.gpu.rl import GRPO, REHEARSED, run_all
from tools.bench.gpu.shapes import models_folder

BUDGET_SECONDS = 400.0
SIZE = 2


def main() -> None:
    arguments = begin(__doc__)
    record, there = Record(arguments.out), gpus()
    whole = REHEARSED if arguments.rehearse else replace(GRPO, shape="1.5B", microbatch_tokens=8 * 520, steps=5)
    case = replace(whole, tensor_parallel=SIZE)
    if not arguments.rehearse and there < SIZE:
        record.add(f"{case.name}: a step", "s", [], f"left out: {SIZE} GPUs are wanted, {there} is there")
        return
    with models_folder(arguments.models) as models, tempfile.TemporaryDirectory(prefix="tensor-parallel-", dir=models) as folder:
        failures = run_all([(case, 0.0)], models, Path(folder), record, Budget(BUDGET_SECONDS))
    sys.exit("\n".join(failures) or 0)


def gpus() -> int:
    import torch

    return torch.cuda.device_count()


if __name__ == "__main__":
    main()
