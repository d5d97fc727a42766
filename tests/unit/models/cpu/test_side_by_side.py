"""Work at the same time: what comes back, with whose cores, and for which models."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from rlhf_core.models.cpu.parallel import can_run_side_by_side, side_by_side
from rlhf_core.models.wrappers import PolicyModule

SHAPE = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
    "vocab_size": 20,
}  # fmt: skip


@pytest.fixture(autouse=True)
def four_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


def test_two_run_at_a_time_each_with_half_of_the_threads():
    together = threading.Barrier(2)

    def one(number: int) -> tuple[int, int]:
        together.wait(timeout=30)  # no one gets past it alone
        return number, torch.get_num_threads()

    assert side_by_side(*(partial(one, number) for number in range(4))) == [(0, 2), (1, 2), (2, 2), (3, 2)]
    assert torch.get_num_threads() == 4
    # A thread that nobody has told anything gets what the process was given.
    found: list[int] = []
    stranger = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    stranger.start()
    stranger.join()
    assert found == [4]


def test_one_after_the_other_has_all_threads_here():
    def one() -> tuple[int, int]:
        return threading.get_ident(), torch.get_num_threads()

    assert side_by_side(one, one, at_once=False) == [(threading.get_ident(), 4)] * 2
    assert side_by_side(one) == [(threading.get_ident(), 4)]
    assert side_by_side() == []


@pytest.mark.parametrize("learns", [False, True])
def test_gradients_are_kept_where_the_caller_keeps_them(learns: bool):
    weight = torch.ones(1, requires_grad=True)
    with torch.set_grad_enabled(learns):
        assert [x.requires_grad for x in side_by_side(lambda: weight * 2, lambda: weight * 3)] == [learns] * 2


def test_after_an_error_what_has_begun_ends_and_nothing_more_begins():
    second_began, second_may_end, ran = threading.Event(), threading.Event(), []

    def first() -> None:
        assert second_began.wait(timeout=30)
        threading.Timer(0.5, second_may_end.set).start()
        raise ValueError("first")

    def second() -> None:
        second_began.set()
        assert second_may_end.wait(timeout=30)
        ran.append("second")

    with pytest.raises(ValueError, match="first"):
        side_by_side(first, second, *[lambda: time.sleep(0.1) or ran.append("more")] * 40)
    assert ran.count("second") == 1 and ran.count("more") < 20 and torch.get_num_threads() == 4


def test_a_signal_ends_the_wait_and_what_has_not_begun_never_does():
    ran = []

    def handler(*_: object) -> None:
        raise InterruptedError

    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        with pytest.raises(InterruptedError):
            side_by_side(*[lambda: time.sleep(0.1) or ran.append(1)] * 100)
    finally:
        signal.signal(signal.SIGALRM, before)
    time.sleep(0.5)
    assert len(ran) < 20 and torch.get_num_threads() == 4


def test_work_within_such_work_has_its_threads_alone():
    def outer() -> list[int]:
        return side_by_side(torch.get_num_threads, torch.get_num_threads)

    assert side_by_side(outer, outer) == [[2, 2], [2, 2]]


def test_only_a_trunk_that_keeps_nothing_and_cores_to_share_out():
    llama, qwen = LlamaForCausalLM(LlamaConfig(**SHAPE)), Qwen2ForCausalLM(Qwen2Config(**SHAPE))
    assert can_run_side_by_side(PolicyModule(llama), PolicyModule(llama))
    assert not can_run_side_by_side(PolicyModule(llama), PolicyModule(qwen))
    torch.set_num_threads(1)
    assert not can_run_side_by_side(PolicyModule(llama))


def test_a_thread_that_is_bound_to_a_core_has_none_to_share_out():
    llama, cores = PolicyModule(LlamaForCausalLM(LlamaConfig(**SHAPE))), os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        assert not can_run_side_by_side(llama)
    finally:
        os.sched_setaffinity(0, cores)
