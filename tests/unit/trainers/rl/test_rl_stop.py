"""When a signal ends a step, and when it waits for the end of it."""

from __future__ import annotations

import os
import signal

import pytest

from rlhf_core.engines.ray.actors import ActorGroup
from rlhf_core.process import StepAbandoned, Stop


@pytest.fixture
def stop():
    stop, before = Stop(), signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, stop.request)
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


def test_sigterm_is_deferred_during_rank_submit(stop):
    requested = []

    class Rank:
        """An actor as Ray gives it, whose driver is told to stop during a call."""

        def __init__(self):
            self.call = self

        def options(self, **_):
            return self

        def remote(self, *_, **__):
            os.kill(os.getpid(), signal.SIGTERM)
            requested.append(self)

    group = ActorGroup.__new__(ActorGroup)
    group.role, group.actors = "trainer", [Rank(), Rank()]
    with pytest.raises(StepAbandoned), stop.interrupts():
        group.submit("forward", [(), ()])
        pytest.fail("the step went on")
    assert requested == group.actors
    assert signal.getsignal(signal.SIGTERM) == stop.request


@pytest.mark.parametrize(("requested", "becomes"), [(True, StepAbandoned), (False, KeyboardInterrupt)])
def test_rays_form_of_a_handlers_exception_is_not_ctrl_c(stop, requested, becomes):
    with pytest.raises(becomes), stop.interrupts():
        stop._requested = requested
        raise KeyboardInterrupt
