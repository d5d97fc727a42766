"""Converts checkpoints to another number of ranks with DeepSpeed's universal checkpoint."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlhf_core.engines.deepspeed.engine import TrainEngine


def is_sharded(folder: Path) -> bool:
    """Return whether the optimizer state is sharded over ranks (ZeRO); otherwise one file serves any number of ranks."""
    return any(folder.glob("*optim_states.pt"))


def convert_to_universal(folder: Path, out: Path) -> None:
    """Write a universal checkpoint of an engine's folder to the new folder `out`.

    Source: Lian et al. 2024, https://arxiv.org/abs/2406.18820
    """
    from deepspeed.checkpoint import ds_to_universal

    out.mkdir(parents=True)
    wanted = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": True, "inject_missing_state": True}
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        ds_to_universal.main(SimpleNamespace(input_folder=str(folder), output_folder=str(out), **wanted))


def of_other_ranks(subject: str, step: int, *, key: str, saved_by: int, ranks: int) -> str:
    """Return a warning about a checkpoint that another number of ranks saved.

    Args:
        key: key of params.yaml with the number of ranks.
    """
    return (
        f"{subject}: the checkpoint of step {step} has {key}={saved_by} and is resumed with {ranks}, by DeepSpeed's universal checkpoint: "
        "equal to an uninterrupted run within rounding, not bit for bit"
    )


def convert_engines(folder: Path, names: Iterable[str], out: Path) -> None:
    """Convert the engines of a checkpoint for `load_converted`. One process calls it."""
    shutil.rmtree(out, ignore_errors=True)
    for name in names:
        if is_sharded(folder / name):
            convert_to_universal(folder / name, out / name)


def load_converted(engine: TrainEngine, folder: Path, name: str, out: Path) -> None:
    """Load an engine that another number of ranks saved, after `convert_engines`. Every rank calls it."""
    if (out / name).exists():
        engine.load_universal(out, name)
    else:
        engine.load(folder, name)
