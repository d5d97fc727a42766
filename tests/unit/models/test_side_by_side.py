"""Work at the same time: what comes back, with whose cores, and for which models."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from rlhf_core.models.side_by_side import can_run_side_by_side, side_by_side
from rlhf_core.models.wrappers import PolicyModule

SHAPE = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 20}


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


def test_the_first_error_comes_when_all_have_ended():
    second_may_end, ended = threading.Event(), []

    def first() -> None:
        second_may_end.set()
        raise ValueError("first")

    def second() -> None:
        second_may_end.wait(timeout=30)
        ended.append("second")
        raise ValueError("second")

    with pytest.raises(ValueError, match="first"):
        side_by_side(first, second)
    assert ended == ["second"] and torch.get_num_threads() == 4


def test_only_a_trunk_that_keeps_nothing_and_cores_to_share_out():
    llama, qwen = LlamaForCausalLM(LlamaConfig(**SHAPE)), Qwen2ForCausalLM(Qwen2Config(**SHAPE))
    assert can_run_side_by_side(PolicyModule(llama), PolicyModule(llama))
    assert not can_run_side_by_side(PolicyModule(llama), PolicyModule(qwen))
    torch.set_num_threads(1)
    assert not can_run_side_by_side(PolicyModule(llama))
