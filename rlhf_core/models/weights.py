"""The weights of a model in memory, and those of its Hugging Face folder."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from rlhf_core.models.folder import check_model_folder, refusals, weight_files

Module = TypeVar("Module", bound=torch.nn.Module)


def read_state_dict(folder: Path) -> dict[str, torch.Tensor]:
    """Return all weights in a Hugging Face folder's safetensors files, on the CPU.

    Raises:
        ValueError: a file is missing or truncated.
    """
    check_model_folder(folder)
    with refusals(folder):
        return {name: tensor for path in weight_files(folder) for name, tensor in load_file(path).items()}


class FolderWeights:
    """The weights of a Hugging Face folder, read by their names there, without keeping any.

    Raises:
        ValueError: a file is missing or truncated.
    """

    def __init__(self, folder: str | Path):
        check_model_folder(folder)
        self._folder, self._files = Path(folder), {}
        for path in weight_files(self._folder):
            with safe_open(path, framework="pt") as file:
                self._files |= dict.fromkeys(file.keys(), path)

    def read(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Return the weights with these names that the folder has, on the CPU; they must not be written to."""
        found: dict[str, torch.Tensor] = {}
        inside = [name for name in names if name in self._files]
        with refusals(self._folder):
            for path in {self._files[name] for name in inside}:
                with safe_open(path, framework="pt") as file:
                    found |= {name: file.get_tensor(name) for name in inside if self._files[name] == path}
        return found


def checkpoint_names(model: PreTrainedModel, state_dict: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return weights as the Hugging Face folder names them: a tensor for each expert, which memory holds as one for all, and no tied
    head.
    """
    return revert_weight_conversion(model, {n: t for n, t in state_dict.items() if n not in model.all_tied_weights_keys})


def with_weights(model: PreTrainedModel, state_dict: dict[str, torch.Tensor]) -> PreTrainedModel:
    """Return the model with other weights, named as in its Hugging Face folder.

    It is a new model if the folder's weights have another form than those in memory.

    Raises:
        ValueError: weights are missing, or belong to another model.
    """
    own = {name: parameter.data for name, parameter in model.named_parameters()}
    given = {n: t for n, t in state_dict.items() if n in own or n != "lm_head.weight" or not model.config.tie_word_embeddings}
    if {n: t.shape for n, t in own.items()} == {n: t.shape for n, t in given.items()}:
        for name, tensor in given.items():
            own[name].copy_(tensor)
        return model
    copied = {name: tensor.clone() for name, tensor in given.items()}  # the new model may keep them
    load_options = {"config": model.config, "dtype": model.dtype, "output_loading_info": True, "ignore_mismatched_sizes": True}
    renewed, info = type(model).from_pretrained(None, state_dict=copied, **load_options)
    if wrong := sorted(map(str, {*info["missing_keys"], *info["unexpected_keys"], *info["mismatched_keys"]})):
        raise ValueError(
            f"weights: expected those of {type(model).__name__}, got others, or none, for {', '.join(wrong[:3])}; restore them"
        )
    return frozen(renewed, device=model.device, dtype=model.dtype)


def frozen(module: Module, *, device: torch.device, dtype: torch.dtype) -> Module:
    """Return the module in evaluation mode and without gradients, cast as an engine casts a trained module of this dtype.

    Only parameters are cast, as in DeepSpeed. Buffers stay: rotary frequencies rounded to bfloat16 change log-probabilities, the more the
    longer the sequence.
    """
    module.eval().requires_grad_(False)
    for parameter in module.parameters():
        if parameter.is_floating_point():  # quantized parameters are not
            parameter.data = parameter.data.to(dtype)
    return module.to(device)  # after the cast: the GPU may have no room for float32
