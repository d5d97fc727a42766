"""Convert checkpoints to another number of ranks with DeepSpeed's universal checkpoint."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from types import SimpleNamespace


def is_sharded(folder: Path) -> bool:
    """Whether the optimizer state is sharded over ranks (ZeRO); otherwise one file serves any number of ranks."""
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
