"""Rotary embeddings whose frequencies depend on how long a sequence is: made to depend on nothing but the configuration.

transformers rescales the frequencies of `longrope` and `dynamic` by the longest sequence of a batch. A token's log-probability then
depends on what comes after it and on what is computed beside it; and a sequence that grows past the border is sampled with other
frequencies than it is trained with. So the frequencies of the longest sequence that is allowed, `model.max_length`, are those of all: no
sequence passes the border (`max_length` is at most the original length), or the configuration is changed to one without it. vLLM chooses
likewise, by its `max_model_len`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from transformers import PretrainedConfig

log = logging.getLogger(__name__)

LONGROPE, DYNAMIC, FIXED = "longrope", "dynamic", "default"


def fix_frequencies(config: PretrainedConfig, max_length: int) -> None:
    """Change a model's configuration, in place, so that sequences of up to `max_length` tokens all have the same frequencies.

    longrope: the long factors for all. dynamic, with a factor f, of the model's length L at `max_length` M, D numbers rotated in each head:

        theta' = theta * (f * M / L - (f - 1)) ^ (D / (D - 2)),        and a default embedding from then on

    Raises:
        ValueError: it's another variant of these.
    """
    text = config.get_text_config()
    for rope in [*_switching(text)]:
        border = _border(text, rope)
        if max_length <= border:
            continue
        log.info(
            "model: sequences of more than %d tokens have other frequencies in its %s embedding; with model.max_length %d all have those "
            "of the longest, in the saved model too",
            *(border, rope["rope_type"], max_length),
        )
        if rope["rope_type"] == LONGROPE:
            rope["short_factor"] = rope["long_factor"]
        elif "factor" in rope and "alpha" not in rope:
            _fix_dynamic(text, rope, max_length)
        else:
            raise ValueError(
                f"model.max_length: expected at most {border} with a {rope['rope_type']} rotary embedding without a factor, "
                f"got {max_length}; lower it"
            )


def changes_with_length(config: PretrainedConfig) -> bool:
    """Whether some sequences, by their length, have other frequencies than others."""
    return any(_switching(config.get_text_config()))


def longest_alike(config: PretrainedConfig) -> int | None:
    """Tokens of the longest sequence that has the frequencies of shorter ones; None: all have."""
    text = config.get_text_config()
    return min((_border(text, rope) for rope in _switching(text)), default=None)


def check_length(config: PretrainedConfig, length: int) -> None:
    """Do sequences of so many tokens have the frequencies of shorter ones?

    Raises:
        ValueError: they don't.
    """
    for rope in _switching(config.get_text_config()):
        if length > (border := _border(config.get_text_config(), rope)):
            raise ValueError(
                f"model: expected sequences of at most {border} tokens, since longer ones have other frequencies in its "
                f"{rope['rope_type']} rotary embedding, got {length}; set model.max_length to {border}, or start the chain from this model "
                "with a larger one"
            )


def _fix_dynamic(config: PretrainedConfig, rope: dict[str, Any], max_length: int) -> None:
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rotated, factor = int(width * rope.get("partial_rotary_factor", 1.0)), rope.pop("factor")
    stretch = factor * max_length / config.max_position_embeddings - (factor - 1)
    rope["rope_theta"] *= stretch ** (rotated / (rotated - 2))
    rope["rope_type"] = FIXED
    config.max_position_embeddings = max_length


def _switching(config: PretrainedConfig) -> Iterator[dict[str, Any]]:
    """Parameters of the embeddings, one or one for each type of layer, whose frequencies depend on the length."""
    parameters = getattr(config, "rope_parameters", None) or {}
    for rope in (r for r in (parameters, *parameters.values()) if isinstance(r, dict)):
        kind = rope.get("rope_type") or FIXED
        if DYNAMIC in kind or (kind == LONGROPE and rope["short_factor"] != rope["long_factor"]):
            yield rope


def _border(config: PretrainedConfig, rope: dict[str, Any]) -> int:
    """The longest sequence with the frequencies of short ones."""
    return rope["original_max_position_embeddings"] if rope["rope_type"] == LONGROPE else config.max_position_embeddings
