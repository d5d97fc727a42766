"""Functions without Python's lock: the bits of the function as it is written, from the first call on, while others have the lock."""

from __future__ import annotations

import sys
import threading
import time

import pytest
import torch

from rlhf_core.models.cpu.layers import rotated_qkv, rotated_qkv_backward, swiglu, swiglu_backward
from rlhf_core.models.cpu.outside_python import outside_python

COUNT, SIZE, HEADS, HALF, ROWS = 50, 24, 6, 2, 16  # four pieces, the last one of two rows
OF_HEADS = 2 * HALF * HEADS + 8  # queries and keys of six heads, values of two
OF_QKV = ("places", "copies", "copies that don't learn", "places, backward", "copies, backward")
NAMES = (*OF_QKV, "mlp", "mlp that doesn't learn", "mlp, backward")


def calls() -> dict[str, tuple]:
    """Each function with arguments of every kind."""
    torch.manual_seed(0)
    rotation = torch.polar(torch.ones(COUNT, HEADS, HALF), torch.randn(COUNT, HEADS, HALF))
    places, sources = torch.randperm(70)[:COUNT], torch.randint(0, COUNT, (70,))
    x, weight, gate_up, down = torch.randn(COUNT, SIZE), torch.randn(OF_HEADS, SIZE), torch.randn(60, SIZE), torch.randn(SIZE, 30)
    _, *kept = swiglu.__wrapped__(x, gate_up, down, 1e-6, True, COUNT)
    _, *normalized = rotated_qkv.__wrapped__(x, weight, 1e-6, rotation, places, 70, None, True, COUNT)
    return {
        "places": (rotated_qkv, x, weight, 1e-6, rotation, places, 70, None, True, ROWS),
        "copies": (rotated_qkv, x, weight, 1e-6, rotation, places, 70, sources, True, ROWS),
        "copies that don't learn": (rotated_qkv, x, weight, 1e-6, rotation, places, 70, sources, False, ROWS),
        "places, backward": (rotated_qkv_backward, torch.randn(70, OF_HEADS), *normalized, weight, rotation, places, ROWS),
        "copies, backward": (rotated_qkv_backward, torch.randn(COUNT, OF_HEADS), *normalized, weight, rotation, None, ROWS),
        "mlp": (swiglu, x, gate_up, down, 1e-6, True, ROWS),
        "mlp that doesn't learn": (swiglu, x, gate_up, down, 1e-6, False, ROWS),
        "mlp, backward": (swiglu_backward, torch.randn(COUNT, SIZE), gate_up, down, *kept, ROWS),
    }


@pytest.mark.parametrize("name", NAMES)
def test_each_call_has_the_bits_of_the_function_as_it_is_written(name: str):
    """Also the first ones, in which TorchScript would look for what it can rewrite: a resumed run begins with these."""
    known, *arguments = calls()[name]
    function = outside_python(known.__wrapped__)  # compiled anew

    def copied() -> list:
        return [x.clone() if isinstance(x, torch.Tensor) else x for x in arguments]  # some are changed in place

    expected = known.__wrapped__(*copied())
    for _ in range(4):
        for found, wanted in zip(function(*copied()), expected, strict=True):
            assert torch.equal(found, wanted)


def test_its_operations_dont_wait_for_the_lock():
    """Which another thread gives back only when it has had it for a while. Each lasts long enough for that one to wake up and take it."""
    times, held = 200, 0.05  # seconds
    before, threads = sys.getswitchinterval(), torch.get_num_threads()
    torch.set_num_threads(1)
    ended = threading.Event()
    other = threading.Thread(target=keep_the_lock, args=(ended,))
    function = outside_python(summed)
    sys.setswitchinterval(held)
    other.start()
    try:
        started = time.monotonic()
        total = function(torch.ones(500_000), times)
        took = time.monotonic() - started
    finally:
        ended.set()
        sys.setswitchinterval(before)
        other.join()
        torch.set_num_threads(threads)
    assert (total == 1.0 + times).all()
    assert took < 0.5 * times * held


def keep_the_lock(ended: threading.Event) -> None:
    while not ended.is_set():
        pass


def summed(x: torch.Tensor, times: int) -> torch.Tensor:
    total = x.clone()
    for _ in range(times):
        total.add_(x)
    return total
