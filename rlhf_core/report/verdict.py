"""What a run came to, in sentences: is the policy better than the model it started from, and who says so?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rlhf_core.report.inputs import Stopped, need
from rlhf_core.statistics import difference_interval

MODES = ("greedy", "sampled")
Direction = Literal["better", "worse", "unclear"]
Tone = Literal["good", "bad", "open"]


@dataclass(frozen=True)
class Verdict:
    """tone: what colour it gets. headline: one sentence. details: what it rests on, one sentence each."""

    tone: Tone
    headline: str
    details: tuple[str, ...]


def outcome(evaluation: Mapping[str, Any], scorers: Sequence[Mapping[str, Any]], *, confidence: float) -> Verdict:
    """Policy against SFT.

    The judge, where there is one, decides: no model was trained on it. What was rewarded is what the policy was trained to
    please, so its preference alone is weaker evidence, and its preference against the judge is reward hacking.

    Args:
        scorers: rl.reward.scorers, which say what was rewarded.
    """
    rewarder = rewarded_by(scorers)
    reward = reward_direction(evaluation)
    details = [_win_rates(evaluation, rewarder, confidence)]
    if not need(evaluation, "judge"):
        tone, headline = _BY_REWARD_ALONE[reward]
        details.append(
            f"There is no judge for this data: only the {rewarder} has compared the answers, and a policy trained on it pleases it."
        )
        return Verdict(tone, headline.format(rewarder), tuple(details))
    judge = judge_direction(evaluation, confidence)
    details.insert(0, _judge_shares(evaluation, confidence))
    if any(s["kind"] == "judge" and s["weight"] > 0 for s in scorers):
        details.append("The judge was part of the reward: the policy was trained to please it too.")
    tone, headline = _BY_JUDGE[judge, reward]
    return Verdict(tone, headline.format(rewarder), tuple(details))


def rewarded_by(scorers: Sequence[Mapping[str, Any]]) -> str:
    """What the score is called: that of a single reward model, or of whatever else was rewarded."""
    rewarded = [s["kind"] for s in scorers if s["weight"] != 0]
    return "reward model" if rewarded == ["reward_model"] else "reward"


_BY_REWARD_ALONE: dict[Direction, tuple[Tone, str]] = {
    "better": ("good", "The {} prefers the policy’s answers to those of the SFT model."),
    "worse": ("bad", "The {} prefers the SFT model’s answers to those of the policy."),
    "unclear": ("open", "The {} sees no clear difference between the policy and the SFT model."),
}
_HACKED = "The policy pleases the {} more and the judge less: it has learned to hack its reward."
_BY_JUDGE: dict[tuple[Direction, Direction], tuple[Tone, str]] = {
    ("better", "better"): ("good", "The policy is better than the SFT model it started from."),
    ("better", "unclear"): ("good", "The policy is better than the SFT model by the judge; the {} sees no clear difference."),
    ("better", "worse"): ("good", "The policy is better than the SFT model by the judge, although the {} prefers the SFT model."),
    ("unclear", "better"): ("open", "The {} prefers the policy, but the judge sees no clear difference from the SFT model."),
    ("unclear", "unclear"): ("open", "There is no clear difference between the policy and the SFT model."),
    ("unclear", "worse"): ("bad", "The {} prefers the SFT model, and the judge sees no clear difference."),
    ("worse", "better"): ("bad", _HACKED),
    ("worse", "unclear"): ("bad", "The policy is worse than the SFT model by the judge."),
    ("worse", "worse"): ("bad", "The policy is worse than the SFT model it started from."),
}


def judge_direction(evaluation: Mapping[str, Any], confidence: float) -> Direction:
    """Better: in both modes the interval of the difference in shares is above 0. Worse: in any mode it is below."""
    intervals = [difference_interval(judged(evaluation, mode, "policy"), judged(evaluation, mode, "sft"), confidence) for mode in MODES]
    return _direction(intervals, 0.0)


def reward_direction(evaluation: Mapping[str, Any]) -> Direction:
    """The same for the win rate, against a half."""
    rates = [need(evaluation, "win_rate", mode) for mode in MODES]
    return _direction([(rate["low"], rate["high"]) for rate in rates], 0.5)


def _direction(intervals: list[tuple[float, float]], border: float) -> Direction:
    if any(high < border for _, high in intervals):
        return "worse"
    return "better" if all(low > border for low, _ in intervals) else "unclear"


def judged(evaluation: Mapping[str, Any], mode: str, model: str) -> tuple[int, int]:
    """(answers that the judge accepts, answers that it judged)."""
    n = need(evaluation, mode, model, "judge_n")
    return round(need(evaluation, mode, model, "judge_ok") * n), n


def _judge_shares(evaluation: Mapping[str, Any], confidence: float) -> str:
    def share(mode: str, model: str) -> str:
        return f"{need(evaluation, mode, model, 'judge_ok'):.1%}"

    low, high = difference_interval(judged(evaluation, "sampled", "policy"), judged(evaluation, "sampled", "sft"), confidence)
    return (
        f"The judge accepts {share('greedy', 'policy')} of the policy’s greedy answers (SFT: {share('greedy', 'sft')}) "
        f"and {share('sampled', 'policy')} of its sampled ones (SFT: {share('sampled', 'sft')}; "
        f"{confidence:.0%} interval of the difference {100 * low:+.1f} to {100 * high:+.1f} points)."
    )


def _win_rates(evaluation: Mapping[str, Any], rewarder: str, confidence: float) -> str:
    def rate(mode: str) -> str:
        r = need(evaluation, "win_rate", mode)
        return f"{r['value']:.1%} ({confidence:.0%} interval {r['low']:.1%} to {r['high']:.1%})"

    greedy, sampled = rate("greedy"), rate("sampled")
    return f"The {rewarder} prefers the policy on {greedy} of the prompts with greedy answers and on {sampled} with sampled ones."


def gate_verdict(gate: Mapping[str, Any]) -> Verdict:
    passed = need(gate, "passed")
    message = str(need(gate, "message")).partition(": ")[2]
    if not need(gate, "needed"):
        return Verdict("open", "There is no reward model to judge.", (message[:1].upper() + message[1:],))
    headline = "The reward model passed its gate." if passed else "The reward model did not pass its gate."
    return Verdict("good" if passed else "bad", headline, (message[:1].upper() + message[1:],))


def data_verdict(validation: Mapping[str, Any]) -> Verdict:
    expectations = need(validation, "expectations")
    failed = [e for e in expectations if not e["passed"]]
    if failed:
        named = ", ".join(f"{e['use']}: {e['name']}" for e in failed)
        return Verdict("bad", f"{len(failed)} of {len(expectations)} expectations about the data failed.", (named,))
    return Verdict("good", f"The data meets all {len(expectations)} expectations.", ())


# Stages whose error is a verdict of their own.
_STOPPED = {
    "validate_data": "the data does not meet its expectations.",
    "check_model": "the model can't be computed rightly here.",
    "gate_reward": "the reward model did not pass its gate.",
}


def stopped_verdict(stopped: Stopped) -> Verdict:
    """Of a chain that ended before it had a policy to judge."""
    headline = f"Stopped at {stopped.stage}: {_STOPPED.get(stopped.stage, 'the stage ended with an error.')}"
    said = (stopped.because,) if stopped.because else ()
    return Verdict("bad", headline, (*said, "There is no result to show: this page holds what was made before the chain stopped."))
