"""Stage gate_reward: the reward model must earn its place before a policy is trained on it.

It passes when the lower end of the interval of its accuracy on the test pairs reaches gate.min_accuracy. The verdict is
always in metrics/gate.json, whatever it is; a rejection ends the stage with an error after the file is written. Where no
reward model is trained (`reward.enabled: false`) the file says that none had to pass.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from rlhf_core.config import GateConfig
from rlhf_core.rounds import dvc_md5
from rlhf_core.statistics import accuracy_with_ties, wilson_interval
from tasks.stage import METRICS, REWARD_HELDOUT, REWARD_MODEL, Stage, StageFailed, write_json

SPLIT = "test"  # never looked at during training, unlike validation
COLUMNS = ("id", "source", "split", "chosen_score", "rejected_score")
MAX_IDS = 10  # named in a message
NOT_NEEDED = "not needed: no reward model was trained, for reward.enabled is false; the rewards come from other scorers."

log = logging.getLogger("rlhf")

Scores = dict[str, np.ndarray]


class UnusableScores(ValueError):
    """The held-out scores can't be judged at all."""


def main() -> None:
    with Stage("gate_reward", resumable=False) as stage:
        config, needed = stage.params.gate, stage.params.reward.enabled
        try:
            gate = judge_scores(read_scores(REWARD_HELDOUT), config) if needed else unjudged(config, NOT_NEEDED, needed=False)
        except UnusableScores as error:
            gate = unjudged(config, str(error), needed=True)
        gate = with_registry(gate, config)
        write_json(METRICS / "gate.json", gate)
        for line in explain(gate):
            log.info("gate_reward: %s", line)
        if needed and not gate["passed"] and gate["override"] is None:
            raise StageFailed(gate["message"])


def read_scores(path: Path) -> Scores:
    """The columns of the test pairs.

    Raises:
        UnusableScores: a column is missing, or a score is missing, NaN or infinite.
    """
    present = pq.read_schema(path).names
    missing = [c for c in COLUMNS if c not in present]
    if missing:
        raise UnusableScores(
            f"{path}: expected the columns {', '.join(COLUMNS)}, got none named {', '.join(missing)}; run train_reward again"
        )
    table = pq.read_table(path, columns=list(COLUMNS), filters=[("split", "=", SPLIT)])
    scores = {c: table[c].to_numpy(zero_copy_only=False) for c in COLUMNS}
    finite = np.isfinite(scores["chosen_score"].astype(float)) & np.isfinite(scores["rejected_score"].astype(float))
    if not finite.all():
        ids = scores["id"][~finite]
        named = ", ".join(map(str, ids[:MAX_IDS])) + (" and more" if len(ids) > MAX_IDS else "")
        raise UnusableScores(
            f"{path}: expected finite scores, got NaN or infinity in {len(ids)} of {len(finite)} test pairs: {named}; "
            "the reward model has diverged or these pairs break it"
        )
    return scores


def judge_scores(scores: Scores, config: GateConfig) -> dict[str, Any]:
    """The content of gate.json."""
    overall = summarize(scores, config.confidence)
    n, low = overall["n"], overall["low"]
    checks = [
        {"name": "pairs", "value": n, "low": None, "high": None, "threshold": config.min_pairs, "n": n, "passed": n >= config.min_pairs},
        {
            "name": "accuracy",
            "value": overall["accuracy"],
            "low": low,
            "high": overall["high"],
            "threshold": config.min_accuracy,
            "n": n,
            "passed": n > 0 and low >= config.min_accuracy,
        },
    ]
    sources = sorted(set(scores["source"].tolist()))
    by_source = {s: summarize({c: v[scores["source"] == s] for c, v in scores.items()}, config.confidence) for s in sources}
    gate = {
        "needed": True,
        "passed": all(c["passed"] for c in checks),
        "checks": checks,
        **overall,
        **settings(config),
        "by_source": by_source,
    }
    return {**gate, "message": " ".join(verdict(gate, config))}


def summarize(scores: Scores, confidence: float) -> dict[str, float | int]:
    """Accuracy with its interval, over pairs that all weigh the same."""
    accuracy = accuracy_with_ties(scores["chosen_score"], scores["rejected_score"])
    low, high = wilson_interval(accuracy.correct, accuracy.n, confidence)
    return {"accuracy": accuracy.value, "low": low, "high": high, "ties": accuracy.ties, "n": accuracy.n}


def with_registry(gate: dict[str, Any], config: GateConfig) -> dict[str, Any]:
    """The verdict with what the registry knew when the run began: a model that was taken back doesn't pass; and with the override."""
    if gate["needed"] and config.rolled_back:
        found = dvc_md5(REWARD_MODEL)
        taken_back = [entry for entry in config.rolled_back if entry.md5 == found]
        numbers = {"value": len(taken_back), "low": None, "high": None, "threshold": 0, "n": len(config.rolled_back)}
        gate = {**gate, "checks": [*gate["checks"], {"name": "rolled_back", **numbers, "passed": not taken_back}]}
        for entry in taken_back:
            message = f"rejected: version {entry.version} was rolled back ({entry.reason}), and this is the same model."
            gate |= {"passed": False, "message": f"{message} {gate['message']}"}
    return {**gate, "override": None if gate["passed"] or not gate["needed"] else config.override}


def settings(config: GateConfig) -> dict[str, float]:
    return {"threshold": config.min_accuracy, "confidence": config.confidence}


def unjudged(config: GateConfig, message: str, *, needed: bool) -> dict[str, Any]:
    """gate.json of a gate that stays shut because there is nothing it could judge; needed: there should have been."""
    nothing = {"accuracy": None, "low": None, "high": None, "ties": None, "n": None}
    return {"needed": needed, "passed": False, "checks": [], **nothing, **settings(config), "by_source": {}, "message": message}


def verdict(gate: dict[str, Any], config: GateConfig) -> Iterator[str]:
    """Why the gate opens or stays shut, in sentences."""
    n, low = gate["n"], gate["low"]
    if n < config.min_pairs:
        yield (
            f"rejected: expected at least gate.min_pairs={config.min_pairs} test pairs to judge by, got {n}; "
            "add preference data or raise data.test_fraction."
        )
    if not n:
        return
    measured = f"held-out accuracy {gate['accuracy']:.4f} on {n} pairs, {config.confidence:.0%} interval {low:.4f} to {gate['high']:.4f}"
    if low < config.min_accuracy:
        yield (
            f"rejected: expected the lower end of the interval to reach gate.min_accuracy={config.min_accuracy}, got {low:.4f} "
            f"({measured}); train a better reward model or lower the bar knowingly."
        )
    elif gate["passed"]:
        yield f"passed: {measured}; the lower end reaches gate.min_accuracy={config.min_accuracy}."


def explain(gate: dict[str, Any]) -> Iterator[str]:
    """What the terminal shows besides a rejection's message."""
    for source, s in gate["by_source"].items():
        yield f"{source}: accuracy {s['accuracy']:.4f} ({s['low']:.4f} to {s['high']:.4f}) on {s['n']} pairs, {s['ties']} ties"
    if gate["passed"] or not gate["needed"]:
        yield gate["message"]
    elif gate["override"] is not None:
        yield f"{gate['message']} Used all the same, for gate.override says: {gate['override']}"


if __name__ == "__main__":
    main()
