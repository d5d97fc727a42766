"""Sizes of a model that determine its memory and time: those of a decoder with gated MLPs, under the keys of Llama's config.json."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_core.config import ArchitectureConfig, number_of


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder with gated MLPs, in elements.

    vectors: biases of a layer's projections, and norms of its heads. further: parameters of the whole model besides all these; negative if
    the model lacks norms.
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_width: int
    vocab: int
    tied: bool = False
    experts: int = 1
    active_experts: int = 1
    vectors: int = 0
    further: int = 0

    @property
    def attention_width(self) -> int:
        return self.heads * self.head_width

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_width

    @property
    def _attention(self) -> int:
        """Parameters of a layer's four projections."""
        return 2 * self.hidden * (self.attention_width + self.kv_width)

    @property
    def _mlp(self) -> int:
        return 3 * self.hidden * self.intermediate

    @property
    def _router(self) -> int:
        return self.hidden * self.experts if self.experts > 1 else 0

    @property
    def embedding(self) -> int:
        return self.vocab * self.hidden

    @property
    def trunk(self) -> int:
        """Parameters without embedding and head: layers with two norms each, and the final norm."""
        layer = self._attention + self.experts * self._mlp + self._router + self.vectors + 2 * self.hidden
        return self.layers * layer + self.hidden + self.further

    @property
    def matrices(self) -> int:
        """Parameters of the language model that are in matrices."""
        layer = self._attention + self.experts * self._mlp + self._router
        return self.layers * layer + self.embedding * (1 if self.tied else 2)

    @property
    def parameters(self) -> int:
        """Parameters of the language model."""
        return self.trunk + self.embedding * (1 if self.tied else 2)

    @property
    def scalar_parameters(self) -> int:
        """Parameters with a scalar head, as in a critic or reward model."""
        return self.trunk + self.embedding + self.hidden

    @property
    def linear(self) -> int:
        """Parameters of linear layers without the head; the experts of a mixture are no linear layers in transformers."""
        return self.layers * (self._attention + (self._mlp if self.experts == 1 else self._router))

    @property
    def active_trunk(self) -> int:
        """Matrix elements that one token is multiplied with, without the head."""
        return self.layers * (self._attention + self.active_experts * self._mlp + self._router)


def from_architecture(config: ArchitectureConfig) -> ModelShape:
    """Return the shape of `model.architecture` in params.yaml, as rlhf_core/models/build.py builds it."""
    return ModelShape(
        layers=config.layers,
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        heads=config.heads,
        kv_heads=config.heads,
        head_width=config.hidden_size // config.heads,
        vocab=config.vocab_size,
    )


def from_folder(folder: str | Path) -> ModelShape:
    """Return the shape by a Hugging Face model's config.json. The file says too little of the structure, so compare the parameters.

    Raises:
        ValueError: the file is missing, or the model isn't a decoder with gated MLPs.
    """
    path = Path(folder) / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: expected a model's config.json, got {error}; give a folder that has one") from error
    return from_settings(config, subject=str(path))


def from_settings(config: Any, *, subject: str) -> ModelShape:
    """Return the shape by the keys of a config.json.

    Args:
        subject: what the error's message calls the model.
    Raises:
        ValueError: keys of a decoder with gated MLPs are missing.
    """
    wanted = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
    if not isinstance(config, dict) or not all(type(config.get(key)) is int and config[key] > 0 for key in wanted):
        raise ValueError(f"{subject}: expected {', '.join(wanted)} as whole numbers above 0; only decoders with gated MLPs are known")
    heads = config["num_attention_heads"]
    experts = config.get("num_local_experts") or config.get("num_experts") or 1
    return ModelShape(
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        # Qwen's mixtures of experts have a separate key for the width of an expert.
        intermediate=(config.get("moe_intermediate_size") if experts > 1 else None) or config["intermediate_size"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_width=config.get("head_dim") or config["hidden_size"] // heads,
        vocab=config["vocab_size"],
        tied=bool(config.get("tie_word_embeddings", False)),
        experts=experts,
        active_experts=config.get("num_experts_per_tok") or 1,
        vectors=_vectors(config),
    )


def _vectors(config: dict[str, Any]) -> int:
    """Return the elements of a layer's biases, as transformers has them, and of Qwen3's norms of queries and keys.

    Qwen2's biases of queries, keys and values have no key in its config.json; `attention_bias` stands for one of the output too.
    """
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    width = config.get("head_dim") or hidden // heads
    of_queries = (heads + 2 * (config.get("num_key_value_heads") or heads)) * width
    kind = str(config.get("model_type"))
    attention = of_queries if kind.startswith("qwen2") else of_queries + hidden if config.get("attention_bias") else 0
    mlp = 2 * config["intermediate_size"] + hidden if config.get("mlp_bias") else 0
    return attention + mlp + (2 * width if kind.startswith("qwen3") else 0)


def _qwen2(layers: int, hidden: int, intermediate: int, heads: int, kv_heads: int, vocab: int, *, tied: bool = False) -> ModelShape:
    """Return a shape of Qwen2 and Qwen2.5, which have biases of queries, keys and values."""
    width = hidden // heads
    biases = (heads + 2 * kv_heads) * width
    return ModelShape(layers, hidden, intermediate, heads, kv_heads, width, vocab, tied, vectors=biases)


def _qwen3(layers: int, hidden: int, intermediate: int, heads: int, *, tied: bool = False) -> ModelShape:
    """Return a shape of Qwen3 without experts, which has norms of queries and keys."""
    return ModelShape(layers, hidden, intermediate, heads, 8, 128, 151936, tied, vectors=2 * 128)


# Shapes of well-known models, as their config.json has them; for planning without the files.
SIZES: dict[str, ModelShape] = {
    "llama2-7b": ModelShape(32, 4096, 11008, 32, 32, 128, 32000),
    "llama2-13b": ModelShape(40, 5120, 13824, 40, 40, 128, 32000),
    "codellama-34b": ModelShape(48, 8192, 22016, 64, 8, 128, 32000),
    "llama2-70b": ModelShape(80, 8192, 28672, 64, 8, 128, 32000),
    "llama3-8b": ModelShape(32, 4096, 14336, 32, 8, 128, 128256),
    "llama3-70b": ModelShape(80, 8192, 28672, 64, 8, 128, 128256),
    "qwen2.5-0.5b": _qwen2(24, 896, 4864, 14, 2, 151936, tied=True),
    "qwen2.5-1.5b": _qwen2(28, 1536, 8960, 12, 2, 151936, tied=True),
    "qwen2.5-7b": _qwen2(28, 3584, 18944, 28, 4, 152064),
    "qwen2.5-14b": _qwen2(48, 5120, 13824, 40, 8, 152064),
    "qwen2.5-32b": _qwen2(64, 5120, 27648, 40, 8, 152064),
    "qwen2.5-72b": _qwen2(80, 8192, 29568, 64, 8, 152064),
    "qwen3-0.6b": _qwen3(28, 1024, 3072, 16, tied=True),
    "qwen3-1.7b": _qwen3(28, 2048, 6144, 16, tied=True),
    "qwen3-4b": _qwen3(36, 2560, 9728, 32, tied=True),
    "qwen3-8b": _qwen3(36, 4096, 12288, 32),
    "qwen3-32b": _qwen3(64, 5120, 25600, 64),
}
# Hugging Face's names of these, the first one for model.path; variants behind such a name, as -Instruct, have the same shape.
REPOSITORIES: dict[str, tuple[str, ...]] = {
    "llama2-7b": ("meta-llama/Llama-2-7b-hf",),
    "llama2-13b": ("meta-llama/Llama-2-13b-hf",),
    "codellama-34b": ("codellama/CodeLlama-34b-hf",),
    "llama2-70b": ("meta-llama/Llama-2-70b-hf",),
    "llama3-8b": ("meta-llama/Meta-Llama-3-8B", "meta-llama/Llama-3.1-8B"),
    "llama3-70b": ("meta-llama/Meta-Llama-3-70B", "meta-llama/Llama-3.1-70B", "meta-llama/Llama-3.3-70B"),
    **{name: (f"Qwen/{name.replace('qwen', 'Qwen').replace('b', 'B')}",) for name in SIZES if name.startswith("qwen")},
}
VARIANT = re.compile(r"(-(base|instruct|chat|hf))+$")


def named_shape(name: str) -> ModelShape | None:
    """Return the shape for a key of SIZES or for a repository on the hub that has such a shape; None if it is unknown."""
    plain = VARIANT.sub("", name.lower())
    found = (size for size, repositories in REPOSITORIES.items() if plain in [VARIANT.sub("", known.lower()) for known in repositories])
    return SIZES.get(name) or SIZES.get(next(found, ""))


def check_engine(shape: ModelShape, gpus: int, *, key: str) -> None:
    """Check that vLLM can divide the model's heads and MLP width over this number of GPUs.

    Args:
        key: key of params.yaml with the number of GPUs.
    Raises:
        ValueError: heads or MLP width can't be divided over so many GPUs.
    """

    def divides(size: int) -> bool:
        heads = shape.heads % size == 0 and (shape.kv_heads % size == 0 or size % shape.kv_heads == 0)
        return heads and shape.intermediate % size == 0

    if not divides(gpus):
        nearest = min(filter(divides, range(1, shape.heads + 1)), key=lambda size: abs(size - gpus))
        raise ValueError(
            f"{key}: expected a divisor of the model's {number_of(shape.heads, 'head')} and of its MLP's width {shape.intermediate}, and a "
            f"divisor or a multiple of its {number_of(shape.kv_heads, 'head')} of keys and values, got {gpus}; set it to {nearest}"
        )
