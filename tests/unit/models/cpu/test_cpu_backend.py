"""Work at the same time: what comes back, with whose cores, and for which models."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from rlhf_core.models.cpu import packed
from rlhf_core.models.cpu.decoder import LlamaDecoder
from rlhf_core.models.decoding import HuggingFaceDecoder
from rlhf_core.models.forward import CPU, GENERAL, PolicyModule, common_backend

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

    assert CPU.map(one, range(4)) == [(0, 2), (1, 2), (2, 2), (3, 2)]
    assert torch.get_num_threads() == 4
    # A thread that nobody has told anything gets what the process was given.
    found: list[int] = []
    stranger = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    stranger.start()
    stranger.join()
    assert found == [4]


def test_one_after_the_other_has_all_threads_here():
    def one(_: int) -> tuple[int, int]:
        return threading.get_ident(), torch.get_num_threads()

    assert GENERAL.map(one, [0, 1]) == [(threading.get_ident(), 4)] * 2
    assert CPU.map(one, [0]) == [(threading.get_ident(), 4)]
    assert CPU.map(one, []) == []


@pytest.mark.parametrize("learns", [False, True])
def test_gradients_are_kept_where_the_caller_keeps_them(learns: bool):
    weight = torch.ones(1, requires_grad=True)
    with torch.set_grad_enabled(learns):
        assert [x.requires_grad for x in CPU.map(lambda factor: weight * factor, [2, 3])] == [learns] * 2


def test_after_an_error_running_calls_end_and_no_others_start():
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
        CPU.map(lambda work: work(), [first, second, *[lambda: time.sleep(0.1) or ran.append("more")] * 40])
    assert ran.count("second") == 1 and ran.count("more") < 20 and torch.get_num_threads() == 4


def test_a_signal_ends_the_wait_and_pending_calls_never_start():
    ran = []

    def handler(*_: object) -> None:
        raise InterruptedError

    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        with pytest.raises(InterruptedError):
            CPU.map(lambda _: time.sleep(0.1) or ran.append(1), range(100))
    finally:
        signal.signal(signal.SIGALRM, before)
    time.sleep(0.5)
    assert len(ran) < 20 and torch.get_num_threads() == 4


def test_work_within_such_work_has_its_threads_alone():
    def outer(_: int) -> list[int]:
        return CPU.map(lambda _: torch.get_num_threads(), range(2))

    assert CPU.map(outer, range(2)) == [[2, 2], [2, 2]]


@pytest.mark.parametrize("amx", [True, False])
def test_only_a_plain_llama_takes_the_cpu_backend_and_all_modules_must(amx: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(packed, "multiplies_bfloat16", lambda: amx)
    llama, qwen = PolicyModule(LlamaForCausalLM(LlamaConfig(**SHAPE))), PolicyModule(Qwen2ForCausalLM(Qwen2Config(**SHAPE)))
    assert common_backend(llama, llama) is CPU and llama.backend.keeps_graphs
    assert common_backend(llama, qwen) is GENERAL and not qwen.backend.keeps_graphs
    llama.bfloat16()
    assert llama.backend is (CPU if amx else GENERAL)
    assert type(llama.backend.decoder(llama.model)) is (LlamaDecoder if amx else HuggingFaceDecoder)
    llama.half()
    assert llama.backend is GENERAL


def test_workers_follow_threads_and_the_cores_that_the_thread_may_use():
    cores = os.sched_getaffinity(0)
    assert (CPU.workers, GENERAL.workers) == (min(2, len(cores)), 1)
    os.sched_setaffinity(0, {min(cores)})
    try:
        assert CPU.workers == 1
    finally:
        os.sched_setaffinity(0, cores)
    torch.set_num_threads(1)
    assert CPU.workers == 1
