"""Compares ranks, ZeRO stages and related settings with one rank: python -m tools.ranks_matrix [--ranks N ...] [--only METHOD ...] [--table
FILE].

Trains tiny models by SFT, reward, DPO, KTO and each algorithm of RL on each number of ranks with each ZeRO stage, with offloading, gradient
checkpointing, padding-free batches and sequence parallelism, and compares with one rank without ZeRO: losses, gradient norms and other
metrics of updates, forward passes of RL, and final weights. Ranks are processes of this machine with gloo between them. RL takes given
rollouts, which a reward model scores. FlashAttention's place is taken by a function that computes the same. Writes docs/tables/ranks.csv;
docs/gpu.md describes it. Exits with 1 if a difference exceeds its limit.
"""

from __future__ import annotations

import argparse
import csv
import sys
import tempfile
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlhf_core.engines.deepspeed.ranks import is_first
from rlhf_core.process import configure_process

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import attention_by_lengths
import rl_ranks
from supervised_ranks import Case, loss_difference, run_case, run_ranks
from tiny_models import largest_difference, save_tiny_models, tiny_tokenizer

TABLE = Path(__file__).parents[1] / "docs/tables/ranks.csv"
METHODS = ("sft", "reward", "dpo", "kto", *rl_ranks.ALGORITHMS)
DEADLINE = 3600.0  # seconds for all cells on one number of ranks
MAX_LOSS_DIFFERENCE = 1e-4  # relative
MAX_OUTPUT_DIFFERENCE = 1e-4  # absolute: log-probabilities, values and scores
MAX_WEIGHT_DIFFERENCE = 3e-4  # a tenth of a step, since Adam divides tiny gradients by their own size
PACKED_TOKENS = 400  # of a micro-batch: enough for several sequences


@dataclass(frozen=True)
class Setting:
    """How a model is trained; the names are the table's columns.

    offload: none, optimizer, or all (the optimizer's state and the parameters).
    """

    zero_stage: int = 0
    sequence_parallel: int = 1
    offload: str = "none"
    gradient_checkpointing: bool = False
    padding_free: bool = False

    @property
    def keys(self) -> dict[str, Any]:
        """Keys of `training` and `rl.trainer` that give this setting."""
        return {
            "zero_stage": self.zero_stage,
            "sequence_parallel": self.sequence_parallel,
            "offload_optimizer": self.offload != "none",
            "offload_parameters": self.offload == "all",
            "gradient_checkpointing": self.gradient_checkpointing,
            **({"microbatch_tokens": PACKED_TOKENS} if self.padding_free else {}),
        }


# Plain Llamas in float32 have a computation of their own on a CPU, but for ZeRO 3 and checkpointing; padding-free batches are for others.
TOGETHER = Setting(3, sequence_parallel=2, offload="all", gradient_checkpointing=True, padding_free=True)
FURTHER = {
    2: (
        Setting(1, offload="optimizer"),
        Setting(3, offload="all"),
        Setting(2, gradient_checkpointing=True),
        Setting(3, padding_free=True),
        Setting(0, sequence_parallel=2),
        TOGETHER,
    ),
    4: (Setting(3, sequence_parallel=2),),
}


@dataclass(frozen=True)
class Cell(Case):
    """A training with a setting, whose keys are `changes`."""

    padding_free: bool = False


def run_cell(cell: Cell, start: Path) -> dict[str, Any]:
    """Train with a setting on every rank, and return the results."""
    began, calls = time.monotonic(), attention_by_lengths.CALLS
    calls.clear()
    with attention_by_lengths.padding_free() if cell.padding_free else nullcontext():
        if cell.kind in rl_ranks.ALGORITHMS:
            result = rl_ranks.train_by_rl(cell.kind, cell.changes, start, start.parent / "reward")
        else:
            result = run_case(cell, start)
    assert (calls["packed"] > 0) == cell.padding_free
    if is_first():
        print(f"{cell.kind} {[*cell.changes.values()]}: {time.monotonic() - began:.1f} s", flush=True)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], help="numbers of ranks to compare with one rank without ZeRO")
    parser.add_argument("--only", nargs="+", choices=METHODS, default=list(METHODS), help="methods")
    parser.add_argument("--table", type=Path, default=TABLE, help="CSV file of the differences")
    given = parser.parse_args()
    configure_process()  # of the ranks too, which inherit it
    with tempfile.TemporaryDirectory() as folder:
        rows = compare(Path(folder), given.ranks, given.only)
    given.table.parent.mkdir(parents=True, exist_ok=True)
    with given.table.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    beyond = [row for row in rows if not within(row)]
    for row in beyond:
        print("differs from one rank:", " ".join(f"{name}={value}" for name, value in row.items()))
    return 1 if beyond else 0


def compare(folder: Path, numbers: list[int], methods: list[str]) -> list[dict[str, Any]]:
    """A row of the table for each number of ranks, setting and method."""
    start, _ = save_tiny_models(folder, tiny_tokenizer())
    expected = dict(zip(methods, results(folder / "baseline", start, 1, [(method, Setting()) for method in methods]), strict=True))
    rows = []
    for ranks in numbers:
        settings = [*map(Setting, range(4)), *FURTHER.get(ranks, ())]
        cells = [(method, setting) for setting in settings for method in methods]
        began = time.monotonic()
        for (method, setting), result in zip(cells, results(folder / str(ranks), start, ranks, cells), strict=True):
            rows.append({"method": method, "ranks": ranks, **asdict(setting), **differences(expected[method], result)})
        print(f"{ranks} ranks: {len(cells)} trainings in {time.monotonic() - began:.0f} s", flush=True)
    return rows


def results(folder: Path, start: Path, ranks: int, cells: list[tuple[str, Setting]]) -> list[dict[str, Any]]:
    """Rank 0's results of each training."""
    cases = [Cell(m, str(folder / str(i)), s.keys, padding_free=s.padding_free) for i, (m, s) in enumerate(cells)]
    return run_ranks(ranks, start, cases, folder, deadline=DEADLINE, run=run_cell)[0]


def differences(expected: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """The last columns of the table."""
    if "refused" in found:
        raise ValueError(found["refused"])
    by_rl = "outputs" in found
    losses = (rl_ranks.metric_difference if by_rl else loss_difference)(expected["curves"], found["curves"])
    outputs = f"{rl_ranks.output_difference(expected['outputs'], found['outputs']):.1e}" if by_rl else ""
    weights = largest_difference(found["weights"], expected["weights"])
    return {"loss_difference": f"{losses:.1e}", "output_difference": outputs, "weight_difference": f"{weights:.1e}"}


def within(row: dict[str, Any]) -> bool:
    """Whether no difference exceeds its limit; NaN exceeds every limit."""
    limits = {"loss": MAX_LOSS_DIFFERENCE, "output": MAX_OUTPUT_DIFFERENCE, "weight": MAX_WEIGHT_DIFFERENCE}
    return all(float(row[f"{name}_difference"] or 0) <= limit for name, limit in limits.items())


if __name__ == "__main__":
    sys.exit(main())
