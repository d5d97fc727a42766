"""Which of what vLLM's CPU build raises at its start is a refusal of the model, and which another start may not meet."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import pytest
from pydantic import AfterValidator, TypeAdapter

from rlhf_core.engines.vllm.refusals import fp8_method, refusing_unsupported

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


@pytest.mark.parametrize(("capability", "only_weights"), [((8, 0), True), ((8, 6), True), ((8, 9), False), ((10, 0), False)])
def test_fp8_has_a_method_of_vllm_on_gpus_that_compute_with_it(monkeypatch, caplog, capability: tuple[int, int], only_weights: bool):
    on_a_gpu(monkeypatch, capability)
    assert fp8_method() == "fp8_per_tensor"
    assert ("only weights have 8 bits" in caplog.text) is only_weights


def test_fp8_on_other_devices_is_refused(monkeypatch):
    with pytest.raises(ValueError, match=r"of compute capability 8\.9 .*, got fp8 with vLLM's build for another device; set it to null"):
        fp8_method()
    on_a_gpu(monkeypatch, (7, 5))
    with pytest.raises(ValueError, match=r"got fp8 with compute capability 7\.5; set it to null"):
        fp8_method()


def on_a_gpu(monkeypatch, capability: tuple[int, int]) -> None:
    from vllm.platforms import current_platform
    from vllm.platforms.interface import DeviceCapability

    monkeypatch.setattr(type(current_platform), "is_cuda", lambda self: True)
    monkeypatch.setattr(type(current_platform), "get_device_capability", lambda self, device_id=0: DeviceCapability(*capability))
