"""What vLLM, or its CPU build, can't do: models, refused by name, and sleep."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from pydantic import ValidationError

from rlhf_core.config import shown

LONGEST_REASON = 300  # characters
FP8_WEIGHTS, FP8_PRODUCTS = 80, 89  # compute capabilities of Marlin's kernels, whose weights have 8 bits, and of products in 8 bits

log = logging.getLogger("rlhf")

# Architectures whose expert loading bypasses `reload_weights`: the old experts stay, and on the CPU the kernel is lost.
NOT_RELOADED = ("GptOssForCausalLM",)

# Errors of the CPU build for unsupported shapes and architectures; a RuntimeError counts if it contains one of these words.
LACKS = (ValueError, NotImplementedError, AssertionError, KeyError, AttributeError, TypeError, IndexError, ImportError)
LACKS_WORDS = (
    "unsupported", "head_dim", "not supported", "not implemented", "dispatch", "shape", "dimension", "view size", "size of t", "sizes of",
)  # fmt: skip


@contextmanager
def refusing_unsupported(model_path: str, trust_remote_code: bool) -> Iterator[None]:
    """Convert errors of vLLM's CPU build about unsupported models. Out-of-memory, file and transient errors are re-raised unchanged.

    Raises:
        ValueError: the build doesn't support the model; the reason is the last line of the original error.
    """
    try:
        yield
    except Exception as error:  # the build refuses models by errors of many types
        reason = _reason(error)
        lacks = isinstance(error, LACKS) or (isinstance(error, RuntimeError) and any(w in str(error).lower() for w in LACKS_WORDS))
        if not lacks or "memory" in reason.lower():
            raise
        raised = type(error).__name__
        why = f"{raised}: {reason}" if reason else f"{raised}, for which vLLM gave no reason"
        package = f"install {error.name}, or " if isinstance(error, ImportError) and error.name else ""
        raise ValueError(
            f"rollout.backend: expected a model that vLLM's CPU build can run, got {_architecture(model_path, trust_remote_code)} with "
            f"{why}; {package}set rollout.backend to pytorch"
        ) from error


def _reason(error: Exception) -> str:
    """Return the last line of an error; of pydantic's, whose last line is an address, the first sentence of what it found."""
    if isinstance(error, ValidationError):
        return shown(error.errors()[0]["msg"].partition(". ")[0], LONGEST_REASON)
    return shown((str(error).strip().splitlines() or [""])[-1].strip(), LONGEST_REASON)


def refuse_without_reload(model_path: str, trust_remote_code: bool) -> None:
    """Refuse a model of NOT_RELOADED. Raises ValueError."""
    name = _architecture(model_path, trust_remote_code)
    if name in NOT_RELOADED:
        raise ValueError(
            f"rollout.backend: expected a model whose weights vLLM can update, got {name}, whose experts its reload leaves unchanged; "
            "set rollout.backend to pytorch"
        )


def refuse_without_sleep() -> None:
    """Refuse a build of vLLM that can't free its memory, as engines that take turns do. Raises ValueError."""
    from vllm.platforms import current_platform

    if not current_platform.is_sleep_mode_available():
        raise ValueError(
            "rl.rollout.take_turns: expected auto or false with this build of vLLM, which has no sleep mode, got true; change it, or "
            "set rl.rollout.backend to pytorch"
        )


def fp8_method() -> str:
    """Return vLLM's name of weights that it rounds to 8 bits when it loads them, with a scale for each matrix.

    Raises:
        ValueError: this build, or this GPU, has no kernels for them.
    """
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS
    from vllm.platforms import current_platform

    capability = current_platform.get_device_capability() if current_platform.is_cuda() else None
    if capability is None or capability.to_int() < FP8_WEIGHTS:
        got = "vLLM's build for another device" if capability is None else f"compute capability {capability.as_version_str()}"
        raise ValueError(
            f"rl.rollout.quantization: expected null, or a GPU of compute capability 8.9 (8.0 for the weights alone), got fp8 with {got}; "
            "set it to null"
        )
    if capability.to_int() < FP8_PRODUCTS:
        log.warning(
            "rl.rollout.quantization: with compute capability %s only weights have 8 bits, and products 16: engines take less memory, but "
            "aren't faster",
            capability.as_version_str(),
        )
    return "fp8_per_tensor" if "fp8_per_tensor" in QUANTIZATION_METHODS else "fp8"


def _architecture(model_path: str, trust_remote_code: bool) -> str:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model_path, trust_remote_code=trust_remote_code)
    return ", ".join(config.architectures or [type(config).__name__])
