"""Random weights that say something: a fresh model gives all tokens about the same probability, and whatever computes with it agrees."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

from tools.bench.gpu.shapes import model_folder

LOGITS_STD = 3.0  # of a token's logits over the vocabulary, about that of trained models
INITIAL_STD = 0.02  # of a fresh head's weights
MOST = 5.0  # a narrow shape's last state is mostly its token's own embedding, and a tied head would do nothing but repeat the token
NORM = "model.norm.weight"


def norm_weight(hidden: int) -> float:
    """Of the last norm, whose output a head of so many inputs turns into logits of LOGITS_STD."""
    return min(MOST, LOGITS_STD / (INITIAL_STD * math.sqrt(hidden)))


def lively_folder(name: str, models: Path) -> Path:
    """A language model's folder as `model_folder` has it, but for the weight of the last norm; written unless it is there."""
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
