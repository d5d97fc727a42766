"""Limits by hand: what is past one, for how long, what follows, and that a state that was saved goes on as if it hadn't been."""

from __future__ import annotations

import json
import math
from dataclasses import asdict

import pytest
from test_rl_metrics import TWO_SCORERS, batch_of
from tiny_models import tiny_params

from rlhf_core.config import DEFAULT_LIMITS, LimitConfig, RlConfig, curve_columns
from rlhf_core.trainers.rl.monitor import (
    MonitorState,
    Track,
    begun_anew,
    below_frontier,
    finding,
    follow,
    gaps,
    holds,
    measured,
    observe,
    under_limits,
    with_point,
)

NAN = math.nan
# scores 2*model - short: 2 and 4, mean 3, deviation 1; seen: 0 and 1, mean 0.5, deviation 0.5
BATCH = batch_of({"model": [1.0, 2.0], "short": [0.0, 0.0], "seen": [0.0, 1.0]})


def config(monitor: dict, **overrides) -> RlConfig:
    return tiny_params(**{"rl.reward.scorers": TWO_SCORERS, "rl.monitor": dict.fromkeys(DEFAULT_LIMITS) | monitor, **overrides}).rl


def limit(**values) -> LimitConfig:
    return LimitConfig(**{"metric": "entropy", "action": "warn"} | values)


def watch(rl: RlConfig, rows: list[dict], state: MonitorState | None = None, first: int = 1) -> MonitorState:
    """What a run with these rows knows at its end."""
    state = state or MonitorState()
    for step, row in enumerate(rows, start=first):
        state, _, _ = observe(rl, state, {"step": step, "kl_mean": 0.0, "score_mean": 3.0, "score_seen": 0.5, **row}, BATCH)
    return state


def test_past_a_bound_for_as_long_as_it_is_patient():
    rl = config({"kl": {"metric": "kl_token_max", "above": 5.0, "patience": 2, "action": "warn"}})
    rows = [{"kl_token_max": v} for v in (6.0, 5.0, 6.0, 7.0, 8.0, 1.0, 6.0, 6.0)]
    state = watch(rl, rows)
    # once for each time it is passed: 6 alone is too short, 6 7 8 is one time, 6 6 another
    assert [(f.step, f.value) for f in state.warnings] == [(4, 7.0), (8, 6.0)] and state.stopped is None
    assert state.warnings[0].message == (
        "step 4: limit kl: expected kl_token_max at most 5, got 7, past it for 2 steps; last values 6, 5, 6, 7"
    )


def test_a_window_is_averaged_and_has_to_be_full():
    track = Track()
    for value, level, past in ((9.0, NAN, 0), (1.0, 5.0, 0), (2.0, 1.5, 1), (4.0, 3.0, 0)):
        track, threshold, found = follow(limit(below=2.0, window=2), track, value)
        assert (found, track.past) == (pytest.approx(level, nan_ok=True), past)
    assert track == Track((9.0, 1.0, 2.0, 4.0), 5.0, 0) and threshold == 2.0


def test_a_fall_is_a_share_of_the_highest_value_so_far_also_below_zero():
    track = Track()
    for value, threshold, past in ((0.4, 0.3, 0), (0.8, 0.6, 0), (0.61, 0.6, 0), (0.59, 0.6, 1)):
        track, found, _ = follow(limit(fall=0.25), track, value)
        assert (found, track.past) == (pytest.approx(threshold), past)
    message = finding("judge", limit(fall=0.25), track, step=9, value=0.59, threshold=0.6).message
    assert message == (
        "step 9: limit judge: expected entropy at least 0.6 (25% below its peak of 0.8), got 0.59, past it; "
        "last values 0.4, 0.8, 0.61, 0.59"
    )
    negative, threshold, _ = follow(limit(fall=0.25), Track((-2.0,), -2.0, 0), -2.6)
    assert threshold == -2.5 and negative.past == 1


def test_what_has_no_value_is_passed_over_and_early_steps_do_not_count():
    rl = config({"eval": {"metric": "entropy", "below": 1.0, "patience": 2, "from_step": 2, "action": "stop"}})
    state = watch(rl, [{"entropy": 0.5}, {"entropy": 0.5}, {}, {"entropy": NAN}])
    assert state.tracks["eval"] == Track((0.5,), 0.5, 1, limit=measured(rl.limits["eval"]))
    assert watch(rl, [{"entropy": 0.5}], state, first=5).stopped.step == 5


def test_the_first_limit_ends_the_run_and_others_are_logged():
    ends = {"metric": "entropy", "below": 1.0, "action": "rollback"}
    rl = config(
        {"soft": ends | {"action": "warn"}, "back": ends, "stop": ends | {"action": "stop"}, "entropy": None}, **{"rl.evaluation.every": 5}
    )
    state = watch(rl, [{"entropy": 0.5}])
    assert (state.stopped.limit, [f.limit for f in state.warnings]) == ("back", ["soft", "stop"])
    assert json.loads(json.dumps(state.findings))["stopped"] == {
        "limit": "back", "metric": "entropy", "step": 1, "value": 0.5, "threshold": 1.0, "action": "rollback",
        "message": "step 1: limit back: expected entropy at least 1, got 0.5, past it; last values 0.5",
    }  # fmt: skip


def test_no_policy_past_a_limit_that_ends_the_run_may_be_the_best():
    ends = {"metric": "entropy", "below": 1.0, "patience": 3}
    warns, stops = (config({"x": ends | {"action": action}}) for action in ("warn", "stop"))
    assert holds(stops, MonitorState())
    assert holds(warns, watch(warns, [{"entropy": 0.5}])) and not holds(stops, watch(stops, [{"entropy": 0.5}]))
    assert holds(stops, watch(stops, [{"entropy": 0.5}, {"entropy": 1.5}]))


def test_a_gap_is_what_the_rewarded_score_gained_beyond_the_measured_one():
    # the score from 3 to 5 is 2 deviations of 1; seen from 0.5 to 0.25 is -0.5 of 0.5
    state, further, _ = observe(config({}), MonitorState(), {"step": 1, "kl_mean": 0.0, "score_mean": 3.0, "score_seen": 0.5}, BATCH)
    assert state.start == {"score": (3.0, 1.0), "seen": (0.5, 0.5)} and further["gap_seen"] == 0.0
    assert gaps({"score_mean": 5.0, "score_seen": 0.25}, state.start) == {"gap_seen": 2.5}
    assert math.isnan(gaps({"score_mean": 5.0, "score_seen": 0.25}, {"score": (3.0, 1.0), "seen": (1.0, 0.0)})["gap_seen"])


def test_the_frontier_by_hand():
    frontier = ()
    for point in ((0.0, 1.0), (2.0, 3.0), (1.0, 0.5), (1.0, 2.0), (NAN, 9.0)):
        frontier = with_point(frontier, point)
    assert frontier == ((0.0, 1.0), (1.0, 2.0), (2.0, 3.0)), "more KL for less score is not on it"
    assert below_frontier(frontier, (1.5, 1.2)) == pytest.approx(0.8)
    assert below_frontier(frontier, (1.5, 2.5)) == below_frontier(frontier, (-0.1, -5.0)) == below_frontier((), (1.0, 1.0)) == 0.0
    assert with_point(frontier, (0.0, 3.0)) == ((0.0, 3.0),)
    _, further, _ = observe(
        config({}), MonitorState(start={"score": (3.0, 2.0)}, frontier=frontier), {"step": 9, "kl_mean": 1.5, "score_mean": 1.2}, BATCH
    )
    assert further["frontier_gap"] == pytest.approx(0.4), "in deviations of the first step's scores"


def test_without_a_reference_there_is_no_frontier():
    rl = config({}, **{"rl.kl.coef": 0.0, "rl.kl.measure": False})
    state, further, _ = observe(rl, MonitorState(), {"step": 1, "kl_mean": 0.0, "score_mean": 3.0, "score_seen": 0.5}, BATCH)
    assert state.frontier == () and "frontier_gap" not in further
    assert {"frontier_gap", "gap_seen", "agreement_seen"} <= set(curve_columns(rl))


def test_a_saved_state_resumes_unchanged():
    rl = config(
        {
            "fall": {"metric": "score_seen", "fall": 0.2, "window": 3, "patience": 2, "action": "stop"},
            "gap": {"metric": "gap_seen", "above": 0.3, "action": "warn"},
            "frontier": {"metric": "frontier_gap", "above": 0.5, "patience": 3, "action": "warn"},
        }
    )
    rows = [{"score_seen": s, "score_mean": 3.0 + k % 3, "kl_mean": k / 7} for k, s in enumerate((0.5, 0.8, 0.9, 0.7, 0.6, 0.5, 0.4, 0.4))]
    whole = watch(rl, rows)
    assert whole.stopped is not None and whole.warnings
    for cut in range(1, len(rows)):
        saved = json.loads(json.dumps(asdict(watch(rl, rows[:cut]))))
        assert watch(rl, rows[cut:], MonitorState.read(saved), first=cut + 1) == whole


def resumed(rl: RlConfig, state: MonitorState) -> tuple[MonitorState, list[str]]:
    """The state as another run reads it from a checkpoint."""
    return under_limits(MonitorState.read(json.loads(json.dumps(asdict(state)))), rl.limits)


KL = {"metric": "kl_token_mean", "above": 0.02, "action": "warn"}
PASSED = [{"kl_token_mean": value} for value in (0.0, 0.2, 0.3, 0.25)]  # past the limit since step 2


@pytest.mark.parametrize("patience", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("action", ["stop", "rollback"])
def test_a_limit_that_warned_and_now_ends_the_run_ends_it_in_the_first_step_past_its_patience(action: str, patience: int):
    state = watch(config({"mine": KL}), PASSED)
    assert [f.step for f in state.warnings] == [2] and state.tracks["mine"].past == 3
    rl = config({"mine": KL | {"action": action, "patience": patience}}, **{"rl.evaluation.every": 5})
    state, words = resumed(rl, state)
    assert words == [] and state.tracks["mine"].past == 3
    ends = max(5, 1 + patience)
    state = watch(rl, [{"kl_token_mean": 0.2}] * (ends - 4), state, first=5)
    assert (state.stopped.step, state.stopped.action) == (ends, action)


def test_a_limit_that_warned_does_not_warn_again_of_the_same_steps_when_it_is_less_patient():
    patient = config({"mine": KL | {"patience": 4}})
    state = watch(patient, PASSED)
    assert state.warnings == () and state.tracks["mine"].past == 3
    rl = config({"mine": KL | {"patience": 2}})
    state = watch(rl, [{"kl_token_mean": 0.2}] * 3, resumed(rl, state)[0], first=5)
    assert [f.step for f in state.warnings] == [5]


def test_a_moved_threshold_counts_anew_and_another_metric_or_window_forgets_the_values():
    state = watch(config({"mine": KL}), PASSED)
    higher = config({"mine": KL | {"above": 0.1, "action": "stop", "patience": 2}})
    there, words = resumed(higher, state)
    assert words == ["limit mine: its threshold has changed, so that the steps past it are counted anew"]
    assert there.tracks["mine"].values == state.tracks["mine"].values
    assert watch(higher, [{"kl_token_mean": 0.2}] * 2, there, first=5).stopped.step == 6
    for change in ({"metric": "entropy"}, {"window": 2}, {"from_step": 2}):
        other, words = resumed(config({"mine": KL | change}), state)
        assert other.tracks == {} and words == ["limit mine: what it measures has changed, so that its values begin anew"]
    assert resumed(config({}), state) == (MonitorState.read(asdict(state) | {"tracks": {}}), [])


def test_a_run_that_a_limit_ended_goes_on_only_when_that_limit_has_changed():
    rl = config({"mine": KL | {"action": "stop"}})
    state = watch(rl, PASSED[:2])
    same, words = resumed(rl, state)
    assert same == state and words == ["limit mine ended the run in step 2; change rl.monitor.mine to train further"]
    for change in ({"action": "warn"}, {"above": 1.0}, {"patience": 2}, {"metric": "entropy"}):
        on, words = resumed(config({"mine": KL | {"action": "stop"} | change}), state)
        assert on.stopped is None and on.warnings == (state.stopped,)
        assert words[-1] == "limit mine, which ended the run in step 2, has changed, so that the run goes on"


def test_what_means_something_else_begins_anew_and_the_rest_is_kept():
    limits = {"kl": KL, "score": KL | {"metric": "eval_score"}, "other": KL | {"metric": "entropy"}}
    rl = config(limits, **{"rl.evaluation.every": 5})
    state = watch(rl, [{"kl_token_mean": 0.3, "eval_score": 1.0, "entropy": 1.0}])
    assert begun_anew(state, ()) == state and state.tracks.keys() == limits.keys() and state.frontier
    kinds = {"kl_tracks": "kl", "score_tracks": "score", "tracks": "other"}
    for kind, name in kinds.items():
        assert limits.keys() - begun_anew(state, [kind]).tracks.keys() == {name}
    new = begun_anew(state, ["start", "frontier"])
    assert (new.start, new.frontier, new.tracks) == ({}, (), state.tracks)
