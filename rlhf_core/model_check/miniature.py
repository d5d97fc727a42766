"""Makes a small copy of a model with random weights: its architecture with the fewest layers that include every kind of layer.

Heads, hidden size, ties, windows, experts and rotary embeddings are the model's own, since they decide which kernels and code run.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from rlhf_core.config import ModelConfig
from rlhf_core.models.build import classifier, language_class, new_language_model
from rlhf_core.models.folder import check_model_folder, locate_model, refusals

VOCABULARY = 1024  # ids, at most; the full one of a large model would be most of the copy
WIDTH = 128  # of a feed-forward layer or an expert, at most
LAYERS = 2  # at least, where the model has so many
VISION_LAYERS = 3  # at most; features may come from the last but one
# Attributes that distinguish kinds of layers with the same modules.
KIND_ATTRIBUTES = ("attention_type", "layer_type", "block_type", "is_sliding", "sliding_window", "use_rope")


def cut_config(config: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> PretrainedConfig:
    """Return the configuration of a small copy of a language model.

    Raises:
        ValueError: the model's folder lacks a file, its library can't build the model, or it has fewer positions than model.max_length.
    """
    if config.path is None:
        shape = config.architecture.model_copy(update={"layers": min(LAYERS, config.architecture.layers)})
        return new_language_model(config.model_copy(update={"architecture": shape}), tokenizer, seed=0).config
    path = locate_model(config.path, config.revision)
    check_model_folder(path)
    with refusals(path):
        full = AutoConfig.from_pretrained(path, trust_remote_code=config.trust_remote_code)
    check_positions(full, path, config.max_length, key="model.max_length")
    return smaller(full, kind=language_class(config.vision), trust_remote_code=config.trust_remote_code)


def check_positions(config: PretrainedConfig, path: str, length: int, *, key: str) -> None:
    """Check that a model has as many positions as sequences may have tokens.

    Args:
        key: in params, of the length.
    Raises:
        ValueError: it has fewer.
    """
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if isinstance(positions, int) and positions > 0 and length > positions:
        raise ValueError(
            f"{key}: expected at most the {positions} positions of {path} (max_position_embeddings), got {length}; "
            "lower it, or choose a model with more"
        )


def smaller(config: PretrainedConfig, *, kind: type = AutoModelForCausalLM, trust_remote_code: bool = False) -> PretrainedConfig:
    """Return a model's configuration with fewer layers, fewer token ids and narrower feed-forward layers.

    Args:
        kind: class that builds the model.
    Raises:
        ValueError: its library can't build the model.
    """
    with refusals(config.name_or_path or config.model_type), torch.device("meta"):
        kinds = layer_signatures(kind.from_config(config, trust_remote_code=trust_remote_code))
    wanted = max(LAYERS, max(kinds.index(kind) for kind in set(kinds)) + 1)
    tree = config.to_dict()
    tree.pop("quantization_config", None)  # of the files, which are loaded without it
    text = config.get_text_config()
    part = tree if text is config else next(tree[name] for name in config.sub_configs if getattr(config, name, None) is text)
    _cut(part, text, min(wanted, len(kinds)), len(kinds))
    if kind is AutoModelForImageTextToText:
        _cut_vision(tree)
    with refusals(config.name_or_path or config.model_type):
        return type(config).from_dict(tree)


def layer_signatures(model: PreTrainedModel) -> list[tuple]:
    """Return a signature of each layer, equal for layers of one kind: its modules and how it attends."""
    count = model.config.get_text_config().num_hidden_layers
    inside = model if not hasattr(model.config, "vision_config") else model.get_decoder()
    stack = next(m for m in inside.modules() if isinstance(m, nn.ModuleList) and len(m) == count)
    return [_kind(layer) for layer in stack]


def _kind(layer: nn.Module) -> tuple:
    modules = tuple((name, type(part).__name__) for name, part in layer.named_modules())
    attributes = {(name, str(getattr(part, name))) for part in layer.modules() for name in KIND_ATTRIBUTES if hasattr(part, name)}
    return modules, tuple(sorted(attributes))


def _cut(part: dict[str, Any], text: PretrainedConfig, layers: int, before: int) -> None:
    """Change a text model's part of a configuration, in place."""
    own = {name: text.attribute_map.get(name, name) for name in ("num_hidden_layers", "vocab_size")}
    for name, value in part.items():
        if isinstance(value, list) and len(value) == before and name != "architectures":
            part[name] = value[:layers]
        elif isinstance(value, list) and "layer" in name and all(type(n) is int for n in value):  # numbers of layers
            part[name] = [n for n in value if n < layers]
        elif name.endswith(("intermediate_size", "ffn_dim")) and isinstance(value, int):
            part[name] = min(value, WIDTH)
        elif name.endswith("_token_id") and value is not None:
            part[name] = _id_within(value)
    part[own["num_hidden_layers"]] = layers
    part[own["vocab_size"]] = min(text.vocab_size, VOCABULARY)


def _cut_vision(tree: dict[str, Any]) -> None:
    """Give the vision tower of a configuration a few layers, and its tokens ids of the small vocabulary, in place."""
    tower = tree["vision_config"]
    for name in ("depth", "num_hidden_layers"):
        if name in tower:
            tower[name] = min(tower[name], VISION_LAYERS)
    for name, value in tower.items():
        if name.endswith("_indexes"):  # numbers of layers
            tower[name] = [number for number in value if number < VISION_LAYERS]
    for name, value in tree.items():
        if name.endswith(("_token_id", "_token_index")) and value is not None:
            tree[name] = _id_within(value)


def _id_within(value: int | list[int]) -> int | list[int]:
    return [n % VOCABULARY for n in value] if isinstance(value, list) else value % VOCABULARY


def random_model(
    config: PretrainedConfig, *, seed: int, labels: int | None = None, kind: type = AutoModelForCausalLM, trust_remote_code: bool = False
) -> PreTrainedModel:
    """Return a causal language model of a configuration, or with `labels` a sequence classifier with this many; float32, on the CPU.

    The weights are larger than fresh ones, which give nearly the same probability to every token, have no biases, and so hide mistakes.
    """
    kind = kind if labels is None else classifier(type(config))
    if labels not in (None, config.num_labels):
        config.num_labels = labels
    torch.manual_seed(seed)
    with refusals(config.name_or_path or config.model_type):
        model = kind.from_config(config, trust_remote_code=trust_remote_code, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            _enliven(name, parameter, tied=getattr(config.get_text_config(), "tie_word_embeddings", config.tie_word_embeddings))
    return model


def _enliven(name: str, parameter: torch.Tensor, *, tied: bool) -> None:
    """Scale a parameter so that outputs are as large as inputs, logits have a standard deviation of about 3, and biases and norms aren't
    neutral.
    """
    if parameter.ndim < 2:
        parameter.add_(0.1 * torch.randn_like(parameter))
    elif "embed" in name or "wte" in name:
        parameter.normal_(std=3 / parameter.shape[-1] ** 0.5 if tied else 1.0)
    else:
        scale = 3.0 if name.endswith(("lm_head.weight", "embed_out.weight")) else 1.0
        parameter.normal_(std=scale / parameter.shape[-1] ** 0.5)
