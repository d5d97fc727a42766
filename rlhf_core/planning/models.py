"""Sizes of the models that a stage loads: parameters from the headers of their files, the shape from config.json."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from rlhf_core.config import ModelConfig
from rlhf_core.data.places import locate, model_snapshot
from rlhf_core.models.folder import numbers_in, read_headers
from rlhf_core.planning.shape import ModelShape, from_architecture, from_folder

KNOWN_WITHIN = 0.02  # of the parameters: vectors that `ModelShape` leaves out
STORED = {"F32": "float32", "BF16": "bfloat16"}  # safetensors' names; other types are cast as they are loaded


@dataclass(frozen=True)
class Model:
    """The sizes of a causal language model, or of a model with scores.

    parameters: parameters in the folder's files. shape: None for an architecture that isn't a decoder with gated MLPs.
    stored: dtype of all tensors in the files, float32 or bfloat16; None: several, or another.
    plain_llama: whether the CPU backend may compute it.
    """

    parameters: int
    shape: ModelShape | None
    stored: str | None
    plain_llama: bool = False

    @property
    def scalar_parameters(self) -> int:
        """Parameters with a scalar head in place of the vocabulary's; without a shape the vocabulary's head is counted."""
        return self.parameters if self.shape is None else self.shape.scalar_parameters


def read_model(folder: str | Path) -> Model:
    """Return the sizes of the model in a folder; no weight is read.

    Raises:
        ValueError: a file is missing or truncated.
    """
    tensors = list(read_headers(folder))
    parameters = sum(map(numbers_in, tensors))
    dtypes = {tensor["dtype"] for tensor in tensors}
    try:
        shape = from_folder(folder)
    except ValueError:
        shape = None
    if shape is not None and shape.tied and abs(parameters - shape.parameters - shape.embedding) < abs(parameters - shape.parameters):
        parameters -= shape.embedding  # the files have the tied head too
    if shape is not None and not any(abs(n - parameters) <= KNOWN_WITHIN * parameters for n in (shape.parameters, shape.scalar_parameters)):
        shape = None
    config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    plain = shape is not None and config.get("model_type") == "llama" and not config.get("attention_bias") and not config.get("mlp_bias")
    return Model(parameters, shape, STORED.get(dtypes.pop()) if len(dtypes) == 1 else None, plain)


def base_model(config: ModelConfig) -> Model | None:
    """Return the model that the chain starts from, or None if it isn't on this machine yet.

    Raises:
        ValueError: a file of the model is missing or truncated.
    """
    if config.path is None:
        return of_shape(from_architecture(config.architecture), stored=None, plain_llama=True)
    folder = locate(config.path)
    if not folder.is_dir():
        folder = model_snapshot(config.path, config.revision)
    return None if folder is None or not Path(folder).is_dir() else read_model(folder)


def of_shape(shape: ModelShape, *, stored: str | None = "bfloat16", plain_llama: bool = False) -> Model:
    """Return a model of which only the shape is known."""
    return Model(shape.parameters, shape, stored, plain_llama)
