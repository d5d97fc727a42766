"""Which of what vLLM's CPU build raises at its start is a refusal of the model, and which another start may not meet."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import pytest
from pydantic import AfterValidator, TypeAdapter

from rlhf_core.engines.vllm.refusals import refusing_unsupported

CAN_RUN = r"rollout\.backend: expected a model that vLLM's CPU build can run, got LlamaForCausalLM with "


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (RuntimeError("Unsupported CPU attention configuration: head_dim=8"), "RuntimeError: Unsupported CPU attention"),
        (NotImplementedError("MLA on the CPU"), "NotImplementedError: MLA on the CPU"),
        (ValueError("first line\nlast line"), "ValueError: last line"),
        (RuntimeError("shape '[2, 3]' is invalid for input of size 7"), "RuntimeError: shape "),
        (RuntimeError("view size is not compatible with input tensor's size"), "RuntimeError: view size is not compatible"),
        (RuntimeError("The expanded size of the tensor (4) must match the existing size (5)"), "RuntimeError: The expanded size"),
        (RuntimeError("The size of tensor a (4) must match the size of tensor b (5)"), "RuntimeError: The size of tensor a"),
        (AssertionError(), "AssertionError, for which vLLM gave no reason"),
    ],
)
def test_what_the_build_lacks_is_a_refusal_with_its_reason(sft_folder: Path, error: Exception, message: str):
    with (
        pytest.raises(ValueError, match=f"{CAN_RUN}{message}.*; set rollout.backend to pytorch"),
        refusing_unsupported(str(sft_folder), False),
    ):
        raise error


def test_pydantics_reason_is_what_it_found_and_not_its_address(sft_folder: Path):
    def refuse(value: int) -> int:
        raise ValueError("Model architectures ['A'] are not supported for now. Supported architectures: many")

    checked = TypeAdapter(Annotated[int, AfterValidator(refuse)])
    with pytest.raises(ValueError) as raised, refusing_unsupported(str(sft_folder), False):
        checked.validate_python(1)
    assert str(raised.value).endswith(
        "got LlamaForCausalLM with ValidationError: Value error, Model architectures ['A'] are not supported for now; "
        "set rollout.backend to pytorch"
    )


def test_a_missing_package_is_named_as_a_remedy(sft_folder: Path):
    with pytest.raises(ValueError) as raised, refusing_unsupported(str(sft_folder), False):
        import no_such_package_of_pictures  # noqa: F401
    assert str(raised.value).endswith("; install no_such_package_of_pictures, or set rollout.backend to pytorch")


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
