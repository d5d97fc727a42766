"""CORRECTNESS, seeds: what is sampled follows from the run's seed and the step alone."""

from __future__ import annotations

from rlhf_core.engines.rollout.requests import request_seeds


def test_seeds_are_the_same_again_and_differ_by_run_step_and_request():
    assert request_seeds(0, 7, 100) == request_seeds(0, 7, 100)
    everything = [s for run in (0, 1) for step in (0, 1, 2) for s in request_seeds(run, step, 100)]
    assert len(set(everything)) == 600


def test_a_requests_seed_does_not_depend_on_how_many_there_are():
    assert request_seeds(3, 5, 10) == request_seeds(3, 5, 100)[:10]


def test_seeds_fit_what_samplers_take():
    assert all(0 <= s < 2**32 for s in request_seeds(2**40, 2**31 - 1, 1000))


def test_each_round_of_a_step_has_seeds_of_its_own_and_the_first_is_the_step():
    assert request_seeds(0, 7, 100, turn=0) == request_seeds(0, 7, 100)
    rounds = [s for step in (0, 1) for turn in range(4) for s in request_seeds(0, step, 100, turn=turn)]
    assert len(set(rounds)) == 800
