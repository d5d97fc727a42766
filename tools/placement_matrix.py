"""Compares placements of an RL job's roles: python -m tools.placement_matrix [--only WORD ...] [--steps N] [--table FILE].

Trains tiny models through Ray with every named placement and with groups of two ranks and of one, by PPO and GRPO, with ZeRO 0 and 3 and
one and two rollout engines: PyTorch's, and vLLM's in two processes each (tensor parallelism); and further options of RL in two
placements. Curves and final weights must be
those of all roles together, without ZeRO, on one engine of the same kind in one process; and an engine's log-probabilities after a sync the
trainer's. Writes docs/tables/placements.csv, in which rows of other cells stay; docs/rl.md describes it. Exits with 1 if a difference
exceeds its limit.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from rlhf_core.config import load_params
from rlhf_core.config.placement import PLACEMENTS
from rlhf_core.data.schema import write_rows
from rlhf_core.engines.ray.cluster import local_head, python_path, run_job
from rlhf_core.models.folder import SEPARATOR_KEY
from rlhf_core.models.weights import read_state_dict
from rlhf_core.process import configure_process
from rlhf_core.stage.job import pulse_file
from rlhf_core.stage.ray_job import DRIVER
from rlhf_core.trainers.rl.submit import rl_job as as_job

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from clerk_params import CLERK_PARAMS
from tiny_models import largest_difference, rl_job, save_tiny_models, tiny_tokenizer

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "docs/tables/placements.csv"
WORDS = ("sort", "add", "turn", "keep", "drop", "find")
CURVES = (
    *("score_mean", "kl_mean", "entropy", "response_length", "policy_loss", "value_loss", "distillation_loss"),
    *("grad_norm", "critic_grad_norm"),
)
MAX_CURVE_DIFFERENCE = 1e-4  # of a value, or of 1 where the values are smaller
MAX_WEIGHT_DIFFERENCE = 3e-5
MAX_LOGPROB_DIFFERENCE = 1e-4  # nats, of engine and trainer
HIDDEN_SIZES = {"pytorch": 16, "vllm": 64}
TWO_AND_ONE = [{"roles": ["policy", "reference"], "ranks": 2}, {"roles": ["critic", "reward_models", "teachers"]}]
SCORERS = [
    {"name": "reward_model", "kind": "reward_model", "normalization": "initial"},
    {"name": "vowel", "kind": "regex", "pattern": "[aeiou]", "weight": 0.5},
]
OPTIONS: dict[str, dict[str, Any]] = {  # algorithm's name -> what it stands for
    "gdpo": {"rl.algorithm": "gdpo", "rl.reward.scorers": SCORERS},
    "grpo_tv": {"rl.algorithm": "grpo", "rl.policy_loss": "dppo_tv"},
    "grpo_kl": {"rl.algorithm": "grpo", "rl.policy_loss": "dppo_kl"},
    "grpo_sapo": {"rl.algorithm": "grpo", "rl.policy_loss": "sapo"},
    "grpo_curriculum": {
        **{"rl.algorithm": "grpo", "rl.reward.scorers": SCORERS, "rl.grpo.group_size": 2, "rl.samples_per_step": 32},
        **{"rl.curriculum": {"by": "success", "scorer": "vowel", "half_life": 2.0}},
    },
    "step_rewards": {"rl.algorithm": "ppo"},  # `Lab` has the process reward model
    **{
        loss: {
            **{"rl.algorithm": "grpo", "rl.reward.scorers": [], "rl.distillation": distillation},  # `Lab` has the teacher
            **{"rl.kl.placement": "loss", "rl.kl.estimator": "k3"},
        }
        for loss, distillation in {
            "sampled": {"loss": "sampled"},
            "jsd": {"loss": "jsd"},
            "likeliest": {"loss": "reverse_kl", "top_k": 4, "teacher_template": "add {prompt}"},
        }.items()
    },
}
PLACES = {  # of OPTIONS; others have FEW_PLACES
    "sampled": (*PLACEMENTS, "two_and_one"),
    "jsd": ("together", "two_and_one"),
    "likeliest": ("together", "two_groups", "two_and_one"),
}
FEW_PLACES = ("together", "two_groups")
OF_CELL = ("algorithm", "placement", "zero_stage", "backend", "engines", "tensor_parallel_size")
COLUMNS = (*OF_CELL, "curve_difference", "weight_difference", "logprob_difference", "seconds_step")
SETTINGS = {
    **{"rl.samples_per_step": 16, "rl.minibatch_size": 8, "rl.max_approx_kl": 5.0, "rl.checkpoint_every": 100, "rl.evaluation.every": None},
    **{"rl.reward.normalization_samples": 16, "rl.rollout.max_concurrent_sequences": 16},
}


@dataclass(frozen=True)
class Cell:
    """A placement to compare.

    algorithm: or a name of OPTIONS.
    placement: a name of PLACEMENTS, or "two_and_one": a group of two ranks and one of a single rank.
    """

    algorithm: str
    placement: str
    zero_stage: int = 0
    engines: int = 1
    backend: str = "pytorch"
    tensor_parallel_size: int = 1

    @property
    def groups(self) -> str | list[dict[str, Any]]:
        """The value of rl.placement."""
        if self.placement != "two_and_one":
            return self.placement
        return [{"roles": ["policy", "reference", "teachers"], "ranks": 2}] if self.algorithm == "jsd" else TWO_AND_ONE

    @property
    def name(self) -> str:
        return f"{self.algorithm}-{self.placement}-zero{self.zero_stage}-{self.engines}-{self.backend}-{self.tensor_parallel_size}"


@dataclass(frozen=True)
class Trained:
    """The results of a job.

    curves: values of each column, step by step. logprob_difference: the largest difference. seconds: median seconds of a step.
    """

    curves: dict[str, list[float]]
    weights: dict[str, Any]
    logprob_difference: float
    seconds: float


class Lab:
    """A Ray head and tiny models, for any number of jobs."""

    def __init__(self, folder: Path, address: str, *, steps: int):
        self._folder, self._address, self._steps = folder, address, steps
        self._teacher = save_tiny_models(folder / "teacher", tiny_tokenizer(), seed=5, hidden_size=32)[0]
        self._models = {backend: save_tiny_models(folder / backend, tiny_tokenizer(), hidden_size=h) for backend, h in HIDDEN_SIZES.items()}
        self._process = folder / "process"
        shutil.copytree(self._models["pytorch"][1], self._process)
        settings = json.loads((self._process / "config.json").read_text(encoding="utf-8")) | {SEPARATOR_KEY: "e"}
        (self._process / "config.json").write_text(json.dumps(settings), encoding="utf-8")
        rows = [
            {"id": str(i), "source": "made", "split": "train" if i % 4 else "validation", "label": None,
             "messages": [{"role": "user", "content": f"{WORDS[i % 6]} {WORDS[i // 6 % 6]} {i}."}]}
            for i in range(64)
        ]  # fmt: skip
        write_rows(folder / "prepared", "prompt", rows)

    def run(self, cell: Cell, *, name: str | None = None, **changes: Any) -> Trained:
        """Run a cell's job, and return its results.

        Args:
            name: name of the job and its folder; None: the cell's name.
        Raises:
            RuntimeError: the job's exit code isn't 0.
        """
        name = name or cell.name
        work = self._folder / name
        work.mkdir()
        wanted = OPTIONS.get(cell.algorithm, {"rl.algorithm": cell.algorithm}) | {"rl.trainer.zero_stage": cell.zero_stage}
        wanted["rl.placement"] = cell.groups
        if "rl.distillation" in wanted:
            wanted["rl.distillation"] = wanted["rl.distillation"] | {"teachers": [{"path": str(self._teacher)}]}
        if cell.algorithm == "step_rewards":
            wanted["rl.reward.scorers"] = [SCORERS[0] | {"path": str(self._process), "steps": "sum"}]
        wanted |= {f"rl.rollout.{name}": getattr(cell, name) for name in ("engines", "backend", "tensor_parallel_size")}
        paths = {"prepared": self._folder / "prepared", "work": work, "output": work / "policy", "timings": work / "timings.csv"}
        job = rl_job(*self._models[cell.backend], **SETTINGS | wanted | {"rl.steps": self._steps} | changes)
        job = job.model_copy(update={name: str(path) for name, path in paths.items()})
        as_job(job, load_params(CLERK_PARAMS), root=ROOT, work=work).write(work / "job.pkl")
        printed: list[str] = []
        code = run_job(
            self._address,
            f"cd {shlex.quote(str(ROOT))} && exec {sys.executable} -m {DRIVER} {work / 'job.pkl'}",
            name=name,
            environment={"PYTHONPATH": python_path(ROOT)},
            start_timeout=300.0,
            silence_timeout=300.0,
            pulse=pulse_file(work),
            on_output=printed.append,
            stop_requested=lambda: False,
        )
        if code:
            raise RuntimeError(f"{name}: expected exit code 0, got {code}:\n{''.join(printed)[-3000:]}")
        curves, seconds = columns(work / "curves.csv"), sorted(columns(work / "timings.csv")["seconds"])
        difference = max(x for x in curves["logprob_difference"] if not math.isnan(x))
        return Trained(curves, read_state_dict(work / "policy"), difference, seconds[len(seconds) // 2])


@contextmanager
def lab(folder: Path, *, steps: int, cpus: int) -> Iterator[Lab]:
    with local_head(cpus=cpus, start_timeout=300.0) as address:
        yield Lab(folder, address, steps=steps)


def columns(path: Path) -> dict[str, list[float]]:
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    wanted = (*CURVES, "seconds", "skipped_steps", "logprob_difference")
    return {name: [float(row[name] or "nan") for row in rows] for name in rows[0] if name in wanted}


def curve_difference(a: Trained, b: Trained) -> float:
    """The largest difference over CURVES; infinite where only one side has a value."""
    worst = 0.0
    for name in (name for name in CURVES if name in a.curves):
        for x, y in zip(a.curves[name], b.curves[name], strict=True):
            if math.isnan(x) != math.isnan(y):
                return math.inf
            worst = worst if math.isnan(x) else max(worst, abs(x - y) / max(1.0, abs(x)))
    return worst


def cells(only: Sequence[str]) -> list[Cell]:
    """The wanted cells, after the baselines that they need."""
    places = list(product(("ppo", "grpo"), (*PLACEMENTS, "two_and_one"), (0, 3)))
    wanted = [Cell(*place, engines) for engines in (1, 2) for place in places]
    wanted += [Cell(*place, engines, backend="vllm", tensor_parallel_size=2) for engines in (1, 2) for place in places]
    wanted += [Cell(name, place) for name in OPTIONS for place in PLACES.get(name, FEW_PLACES)]
    wanted += [Cell(name, place, zero_stage=3) for name, places in PLACES.items() for place in places]
    wanted = [cell for cell in wanted if all(word in cell.name for word in only)]
    return list(dict.fromkeys([*map(baseline, wanted), *wanted]))


def baseline(cell: Cell) -> Cell:
    """The cell with which a cell is compared."""
    return Cell(cell.algorithm, "together", backend=cell.backend)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--only", nargs="+", default=[], help="parts of a cell's name, such as ppo-apart, zero3 or vllm-2")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--table", type=Path, default=TABLE, help="CSV file of the differences")
    given = parser.parse_args()
    configure_process()
    found: dict[Cell, Trained] = {}
    with tempfile.TemporaryDirectory() as folder, lab(Path(folder), steps=given.steps, cpus=16) as here:
        for cell in cells(given.only):
            began = time.monotonic()
            found[cell] = here.run(cell)
            print(row_of(cell, found[cell], found[baseline(cell)]), f"{time.monotonic() - began:.0f} s", flush=True)
    rows = [row_of(cell, trained, found[baseline(cell)]) for cell, trained in found.items()]
    write_table(given.table, rows)
    return 0 if all(map(within, rows)) else 1


def row_of(cell: Cell, found: Trained, expected: Trained) -> dict[str, str]:
    return {
        **{name: str(getattr(cell, name)) for name in OF_CELL},
        "curve_difference": f"{curve_difference(expected, found):.1e}",
        "weight_difference": f"{largest_difference(expected.weights, found.weights):.1e}",
        "logprob_difference": f"{found.logprob_difference:.1e}",
        "seconds_step": f"{found.seconds:.2f}",
    }


def write_table(table: Path, rows: list[dict[str, str]]) -> None:
    """Write the rows into the table in place of older rows for the same cells."""
    kept: list[dict[str, str]] = []
    if table.exists():
        with table.open(encoding="utf-8", newline="") as file:
            kept = list(csv.DictReader(file))
    by_cell = {tuple(row[name] for name in OF_CELL): row for row in (*kept, *rows)}
    table.parent.mkdir(parents=True, exist_ok=True)
    with table.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(by_cell.values())


def within(row: dict[str, str]) -> bool:
    limits = (MAX_CURVE_DIFFERENCE, MAX_WEIGHT_DIFFERENCE, MAX_LOGPROB_DIFFERENCE)
    return all(float(row[name]) <= limit for name, limit in zip(COLUMNS[len(OF_CELL) : -1], limits, strict=True))


if __name__ == "__main__":
    sys.exit(main())
