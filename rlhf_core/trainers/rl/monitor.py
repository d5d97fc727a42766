"""Limits on the columns of RL's curves, and what happens when one is passed (docs/monitors.md).

The state is in every checkpoint, so that a resumed run warns and stops where an uninterrupted one does. It names the limits that it was
measured by: a run that resumes with other limits keeps what still means the same (`under_limits`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from rlhf_core.config import KL_COLUMNS, LimitAction, LimitConfig, RlConfig
from rlhf_core.sampling.rewards import Moments, weighted_score
from rlhf_core.trainers.rl.metrics import Metrics
from rlhf_core.types import RolloutBatch

SHOWN = 5  # values that a finding quotes
HISTORY = ("metric", "window", "from_step")  # keys of a limit that decide a track's values and peak
MEASURED = (*HISTORY, "above", "below", "fall")  # and those that decide how long the limit has been passed
# Beginnings of the metrics that depend on what a score is.
SCORES = ("score_", "drawn_score", "reward_", "eval_", "gap_", "agreement_", "disagreement_", "failed_", "unscored", "frontier_gap")


@dataclass(frozen=True)
class Finding:
    """A limit that has been passed for `patience` steps in a row.

    limit: its name in rl.monitor.    value: of the metric, mean over the limit's window.    threshold: what the value was compared with.
    """

    limit: str
    metric: str
    step: int
    value: float
    threshold: float
    action: LimitAction
    message: str


@dataclass(frozen=True)
class Track:
    """History of a limit's metric.

    values: the last ones.    peak: the highest mean over a window.    past: steps in a row past the limit.
    told: the action of the finding about these steps; None: there was none yet.
    limit: what was measured, the keys MEASURED of the limit; None: the limit of the configuration.
    """

    values: tuple[float, ...] = ()
    peak: float | None = None
    past: int = 0
    told: LimitAction | None = None
    limit: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class MonitorState:
    """tracks: by the limit's name.
    start: mean and standard deviation in the first step, of `score` and of each scorer without a weight.
    frontier: (KL, score) of the steps whose score no step with a smaller KL exceeds, KL ascending.
    """

    tracks: Mapping[str, Track] = field(default_factory=dict)
    start: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    frontier: tuple[tuple[float, float], ...] = ()
    warnings: tuple[Finding, ...] = ()
    stopped: Finding | None = None

    @property
    def findings(self) -> dict[str, Any]:
        """What the limits found, for the stage's metrics."""
        return {"stopped": self.stopped and asdict(self.stopped), "warnings": [asdict(f) for f in self.warnings]}

    @classmethod
    def read(cls, state: dict[str, Any]) -> MonitorState:
        """Return the state from the JSON of `asdict`."""
        return cls(
            tracks={name: Track(**{**track, "values": tuple(track["values"])}) for name, track in state["tracks"].items()},
            start={name: tuple(moments) for name, moments in state["start"].items()},
            frontier=tuple(tuple(point) for point in state["frontier"]),
            warnings=tuple(Finding(**finding) for finding in state["warnings"]),
            stopped=state["stopped"] and Finding(**state["stopped"]),
        )


def observe(rl: RlConfig, state: MonitorState, row: Metrics, batch: RolloutBatch) -> tuple[MonitorState, Metrics, list[Finding]]:
    """Return the state after a step, the columns that depend on earlier steps, and the step's findings.

    The first finding whose action ends the run is in `state.stopped`, every other one in `state.warnings`.

    Args:
        row: of the curves, with `step`; a metric that is missing or NaN is ignored.
    """
    if not state.start:
        state = replace(state, start=first_moments(batch, rl))
    further = gaps(row, state.start)
    if rl.kl.keeps_reference:
        point, spread = (row["kl_mean"], row["score_mean"]), state.start["score"][1]
        further["frontier_gap"] = below_frontier(state.frontier, point) / spread if spread > 0 else math.nan
        state = replace(state, frontier=with_point(state.frontier, point))
    tracks, found = dict(state.tracks), []
    for name, limit in rl.limits.items():
        value = (row | further).get(limit.metric, math.nan)
        if row["step"] < limit.from_step or math.isnan(value):
            continue
        track, threshold, level = follow(limit, tracks.get(name, Track(limit=measured(limit))), value)
        if track.past >= limit.patience and track.told != limit.action:  # a resumed run may be past another patience
            found.append(finding(name, limit, track, step=int(row["step"]), value=level, threshold=threshold))
            track = replace(track, told=limit.action)
        tracks[name] = track
    stopped = state.stopped or next((f for f in found if f.action != "warn"), None)
    warnings = (*state.warnings, *(f for f in found if f is not stopped))
    return replace(state, tracks=tracks, warnings=warnings, stopped=stopped), further, found


def follow(limit: LimitConfig, track: Track, value: float) -> tuple[Track, float, float]:
    """Add a value. Returns the track, the threshold, and the mean over the window (both NaN until the window is full)."""
    values = (*track.values, value)[-max(limit.window, SHOWN) :]
    if len(values) < limit.window:
        return replace(track, values=values), math.nan, math.nan
    level = sum(values[-limit.window :]) / limit.window
    peak = level if track.peak is None else max(track.peak, level)
    if limit.above is not None:
        threshold, past = limit.above, level > limit.above
    else:
        threshold = peak - limit.fall * abs(peak) if limit.below is None else limit.below
        past = level < threshold
    how_long = {"past": track.past + 1} if past else {"past": 0, "told": None}
    return replace(track, values=values, peak=peak, **how_long), threshold, level


def measured(limit: LimitConfig) -> dict[str, Any]:
    """Return what a limit's track is about."""
    return limit.model_dump(include=set(MEASURED))


def under_limits(state: MonitorState, limits: Mapping[str, LimitConfig]) -> tuple[MonitorState, list[str]]:
    """Return the state for a run that resumes with these limits, and a sentence for each thing that begins anew.

    A track is kept as long as its limit measures the same, whatever its patience and action: a limit that has been passed for longer than
    its patience acts in the next step that passes it. With another threshold the values stay, and the steps past it are counted anew. With
    another metric, window or first step the track begins anew. A limit that ended the run still does unless it has changed.
    """
    tracks: dict[str, Track] = {}
    words = []
    for name, limit in limits.items():
        track, now = state.tracks.get(name), measured(limit)
        if track is None:
            continue
        if track.limit is None or any(track.limit[key] != now[key] for key in HISTORY):
            words.append(f"limit {name}: what it measures has changed, so that its values begin anew")
        elif track.limit != now:
            words.append(f"limit {name}: its threshold has changed, so that the steps past it are counted anew")
            tracks[name] = replace(track, past=0, told=None, limit=now)
        else:
            tracks[name] = track
    stopped, warnings = state.stopped, state.warnings
    if stopped is not None:
        name, limit, track = stopped.limit, limits.get(stopped.limit), tracks.get(stopped.limit)
        if limit is not None and limit.action != "warn" and track is not None and track.past >= limit.patience:
            words.append(f"limit {name} ended the run in step {stopped.step}; change rl.monitor.{name} to train further")
            stopped = replace(stopped, action=limit.action)
        else:
            words.append(f"limit {name}, which ended the run in step {stopped.step}, has changed, so that the run goes on")
            stopped, warnings = None, (*warnings, stopped)
    return replace(state, tracks=tracks, stopped=stopped, warnings=warnings), words


def begun_anew(state: MonitorState, names: Collection[str]) -> MonitorState:
    """Return the state without these parts of it: `start`, `frontier`, and by their metrics `tracks`, `score_tracks` and `kl_tracks`."""

    def kept(track: Track) -> bool:
        metric = "" if track.limit is None else track.limit["metric"]
        parts = {"score_tracks": metric.startswith(SCORES), "kl_tracks": metric in KL_COLUMNS}
        if not any(parts.values()):
            parts["tracks"] = True
        return not any(name in names for name, belongs in parts.items() if belongs)

    return replace(
        state,
        tracks={name: track for name, track in state.tracks.items() if kept(track)},
        start={} if "start" in names else state.start,
        frontier=() if "frontier" in names else state.frontier,
    )


def finding(name: str, limit: LimitConfig, track: Track, *, step: int, value: float, threshold: float) -> Finding:
    mean = f"mean of {limit.window} steps of " if limit.window > 1 else ""
    bound = "at most" if limit.above is not None else "at least"
    peak = f" ({limit.fall:.0%} below its peak of {track.peak:.4g})" if limit.fall is not None else ""
    patience = f" for {limit.patience} steps" if limit.patience > 1 else ""
    last = ", ".join(f"{v:.4g}" for v in track.values[-SHOWN:])
    message = (
        f"step {step}: limit {name}: expected {mean}{limit.metric} {bound} {threshold:.4g}{peak}, got {value:.4g}, past it{patience}; "
        f"last values {last}"
    )
    return Finding(name, limit.metric, step, value, threshold, limit.action, message)


def holds(rl: RlConfig, state: MonitorState) -> bool:
    """Return whether no limit that ends the run is passed, whatever its patience: only then may the current policy be the best."""
    return not any(state.tracks[name].past for name, limit in rl.limits.items() if limit.action != "warn" and name in state.tracks)


def first_moments(batch: RolloutBatch, rl: RlConfig) -> dict[str, tuple[float, float]]:
    """Return mean and standard deviation (biased) of the raw weighted sum, `score`, and of each scorer without a weight."""
    measured = {s.name: batch.components[s.name] for s in rl.reward.scorers if not s.weight}
    moments = {name: Moments().merge(v) for name, v in {"score": weighted_score(batch.components, rl.reward.scorers), **measured}.items()}
    return {name: (m.mean, m.std) for name, m in moments.items()}


def gaps(row: Metrics, start: Mapping[str, tuple[float, float]]) -> Metrics:
    """Return gap_<name> of each scorer without a weight: the rewarded score's gain since the first step, minus that scorer's gain.

    gain = (mean - mean of the first step) / std of the first step; NaN where the std is 0.
    """

    def gained(name: str, mean: float) -> float:
        first, spread = start[name]
        return (mean - first) / spread if spread > 0 else math.nan

    rewarded = gained("score", row["score_mean"])
    return {f"gap_{name}": rewarded - gained(name, row[f"score_{name}"]) for name in start if name != "score"}


def below_frontier(frontier: tuple[tuple[float, float], ...], point: tuple[float, float]) -> float:
    """Return by how much a (KL, score) is below the best score at no more KL; 0 on the frontier or beyond."""
    kl, score = point
    return max([0.0, *(s - score for k, s in frontier if k <= kl)])


def with_point(frontier: tuple[tuple[float, float], ...], point: tuple[float, float]) -> tuple[tuple[float, float], ...]:
    """Return the frontier with a (KL, score) added, unless a point has at least its score at no more KL; points that it dominates are
    removed.
    """
    if not all(map(math.isfinite, point)) or any(k <= point[0] and s >= point[1] for k, s in frontier):
        return frontier
    return tuple(sorted([*((k, s) for k, s in frontier if not (k >= point[0] and s <= point[1])), point]))
