"""Reads the shape of a model's folder from its modelling class, which is built without weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rlhf_core.models.folder import read_settings, refusals
from rlhf_core.planning.shape import ModelShape, from_settings


def from_class(folder: str | Path, *, trust_remote_code: bool) -> ModelShape:
    """Return the shape with exactly the parameters of the modelling class, which is built on the meta device. Only config.json is read.

    Keys that config.json leaves out have the class's defaults.

    Args:
        trust_remote_code: whether the folder's own code runs if it defines the class.
    Raises:
        ValueError: there is no config.json, transformers can't build the model, or the class's matrices aren't those of a decoder with
            gated MLPs, so that the formulas of rlhf_core/planning/memory.py don't hold.
    """
    read_settings(Path(folder), "config.json")
    with refusals(folder), torch.device("meta"):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    subject = f"{type(model).__name__} of {folder}"
    parameters = sum(parameter.numel() for parameter in model.parameters())
    matrices = sum(p.numel() for name, p in model.named_parameters() if p.ndim > 1 and not name.endswith("bias"))
    shape = from_settings(config.to_dict(), subject=subject)
    if matrices != shape.matrices:
        raise ValueError(
            f"{subject}: expected a decoder with gated MLPs, whose matrices would have {shape.matrices:,} elements by its config.json, got "
            f"{matrices:,}, of {parameters:,} parameters in all; memory and time of this architecture can't be predicted"
        )
    return replace(shape, further=parameters - shape.parameters)
