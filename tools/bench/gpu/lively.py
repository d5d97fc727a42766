"""Random weights with spread logits. A fresh model gives all tokens similar probabilities, so that any two computations agree."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

from tools.bench.gpu.shapes import model_folder

LOGITS_STD = 3.0  # standard deviation of logits over the vocabulary, as in trained models
INITIAL_STD = 0.02  # standard deviation of a fresh head's weights
MOST = 5.0  # the last state of a narrow model is mostly its token's embedding, and a tied head would repeat the token
NORM = "model.norm.weight"


def norm_weight(hidden: int) -> float:
    """Weight of the last norm for which a head with `hidden` inputs gives logits of LOGITS_STD."""
    return min(MOST, LOGITS_STD / (INITIAL_STD * math.sqrt(hidden)))


def lively_folder(name: str, models: Path) -> Path:
    """A language model's folder as by `model_folder`, with another weight of the last norm; written if missing."""
    from safetensors.torch import load_file, save_file

    fresh, folder = model_folder(name, models), models / f"{name}-lively"
    if folder.exists():
        return folder
    aside = models / f"{name}-lively.part"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    for path in fresh.iterdir():
        if path.suffix != ".safetensors":
            shutil.copy(path, aside)
            continue
        weights = load_file(path)
        if NORM in weights:
            weights[NORM] = weights[NORM].new_full(weights[NORM].shape, norm_weight(len(weights[NORM])))
            save_file(weights, aside / path.name, metadata={"format": "pt"})
        else:
            (aside / path.name).symlink_to(path.resolve())
    aside.rename(folder)
    return folder
