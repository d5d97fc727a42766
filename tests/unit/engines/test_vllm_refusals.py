"""Which of what vLLM's CPU build raises at its start is a refusal of the model, and which another start may not meet."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_core.engines.vllm.refusals import refusing_unsupported

CAN_RUN = r"rollout\.backend: expected a model that vLLM's CPU build can run, got LlamaForCausalLM with "


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (RuntimeError("Unsupported CPU attention configuration: head_dim=8"), "RuntimeError: Unsupported CPU attention"),
        (NotImplementedError("MLA on the CPU"), "NotImplementedError: MLA on the CPU"),
        (ValueError("first line\nlast line"), "ValueError: last line"),
        (AssertionError(), "AssertionError, for which vLLM gave no reason"),
    ],
)
def test_what_the_build_lacks_is_a_refusal_with_its_reason(sft_folder: Path, error: Exception, message: str):
    with (
        pytest.raises(ValueError, match=f"{CAN_RUN}{message}.*; set rollout.backend to pytorch"),
        refusing_unsupported(str(sft_folder), False),
    ):
        raise error


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Engine core initialization failed. See root cause above."),
        RuntimeError("The server socket has failed to listen on any local network address"),
        ValueError("No available memory for the cache blocks"),
        OSError("No such file"),
        MemoryError(),
    ],
    ids=repr,
)
def test_what_another_start_may_not_meet_goes_through(sft_folder: Path, error: Exception):
    with pytest.raises(type(error)) as raised, refusing_unsupported(str(sft_folder), False):
        raise error
    assert raised.value is error
