"""When a signal ends a step, and when it waits for the end of it."""

from __future__ import annotations

import os
import signal

import pytest

from rlhf_core.trainers.rl_stop import StepAbandoned, Stop


@pytest.fixture
def stop():
    stop, before = Stop(), signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, stop.ask)
    yield stop
    signal.signal(signal.SIGTERM, before)


def test_a_signal_waits_for_the_end_of_what_changes_something(stop):
    with stop.interrupts():
        pass
    assert not stop.is_set()
    os.kill(os.getpid(), signal.SIGTERM)
    assert stop.is_set()
    with pytest.raises(StepAbandoned), stop.interrupts():
        pytest.fail("a step was begun although a stop had been asked for")


def test_a_signal_ends_what_changes_nothing_at_once_and_a_second_one_does_not_disturb_the_checkpoint(stop):
    with pytest.raises(StepAbandoned), stop.interrupts():
        os.kill(os.getpid(), signal.SIGTERM)
        pytest.fail("the step went on")
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize(("asked", "becomes"), [(True, StepAbandoned), (False, KeyboardInterrupt)])
def test_what_ray_makes_of_a_handlers_exception_is_told_from_ctrl_c(stop, asked, becomes):
    with pytest.raises(becomes), stop.interrupts():
        stop._asked = asked
        raise KeyboardInterrupt
