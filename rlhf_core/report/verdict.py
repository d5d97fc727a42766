"""States the run's verdict in sentences: whether the policy is better than the SFT model, by the judge and by the reward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rlhf_core.report.inputs import Stopped, need
from rlhf_core.report.texts import number
from rlhf_core.statistics.intervals import detectable_difference, holm

MODES = ("greedy", "sampled")
Direction = Literal["better", "worse", "unclear"]
Tone = Literal["good", "bad", "open"]


@dataclass(frozen=True)
class Verdict:
    """A verdict in sentences.

    tone: the colour. headline: one sentence. details: the evidence, one sentence each.
    """

    tone: Tone
    headline: str
    details: tuple[str, ...]


def outcome(
    evaluation: Mapping[str, Any],
    scorers: Sequence[Mapping[str, Any]],
    *,
    confidence: float,
    trained_on: Sequence[Mapping[str, Any]] | None = None,
    selected: Sequence[str] = (),
) -> Verdict:
    """Return the verdict on the policy compared with the SFT model.

    If there is a judge, it decides. The reward is weaker evidence, because the policy was trained on it. A policy that the reward prefers
    and the judge rejects has hacked its reward. The details note a judge that was part of the reward or selected the policy.

    Args:
        scorers: those that scored the answers (Params.evaluation_scorers).
        trained_on: those of the training (Params.method_scorers); None: the same.
        selected: sentences of `judge_selects`.
    """
    rewarder = rewarded_by(scorers)
    judge, reward = judge_direction(evaluation, confidence), reward_direction(evaluation, confidence)
    if judge is None and reward is None:
        return NOT_COMPARED
    details = [NO_SCORE if reward is None else _win_rates(evaluation, rewarder, confidence)]
    if (shared := evaluation.get("prompts_of_gate")) and any(s["weight"] and _is_of_the_chain(s) for s in scorers):
        details.append(f"{shared} of the prompts were also used by the gate: a reward model selected on them looks better here than it is.")
    tone: Tone
    if judge is None:
        tone, headline = _BY_REWARD_ALONE[reward]
        if (apart := by_mode(evaluation, "reward", confidence)) is not None:
            tone, headline = "bad" if apart.worse_alone else "open", f"By the {{}}, {apart.sentence}"
            details += apart.details
        trained = ", and the policy was trained to maximise it" * (trained_on is None or _rewarded(scorers) == _rewarded(trained_on))
        details.append(f"There is no judge for this data: only the {rewarder} compared the answers{trained}.")
        return Verdict(tone, headline.format(rewarder), tuple(details))
    details.insert(0, _judge_shares(evaluation, confidence))
    if judge == "unclear":
        details.insert(1, _detectable(evaluation, confidence))
    if any(s["kind"] == "judge" and s["weight"] > 0 for s in (scorers if trained_on is None else trained_on)):
        details.append("The judge was part of the reward, so the policy was trained to satisfy it.")
    details += selected
    tone, headline = _BY_JUDGE[judge, reward or _AS_IF[judge]]
    if (apart := by_mode(evaluation, "judge", confidence)) is not None:
        tone = "bad" if apart.worse_alone or (judge, reward) == ("worse", "better") else "open"
        headline = f"{_HACKED if reward == 'better' and judge == 'worse' else ''} By the judge, {apart.sentence}".lstrip()
        details += apart.details
    return Verdict(tone, headline.format(rewarder), tuple(details))


def _rewarded(scorers: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Name and kind of the scorers with a weight."""
    return sorted((s["name"], s["kind"]) for s in scorers if s["weight"])


def _is_of_the_chain(scorer: Mapping[str, Any]) -> bool:
    """Return whether a scorer is the reward model that the chain trained and its gate judged."""
    return scorer["kind"] == "reward_model" and scorer.get("path") is None


NO_SCORE = "Nothing scored the answers: there is no reward model, and the evaluation has no other scorer with a weight."
# The verdict without a judge and without a score.
NOT_COMPARED = Verdict(
    "open",
    "There is no verdict: nothing compared the policy’s answers with those of the SFT model.",
    (
        f"{NO_SCORE} There is no judge for this data either.",
        "The evaluation only has the answers’ lengths, the share of truncated answers, and the KL divergence from the SFT model. Read the "
        "samples. For a verdict, give a data source a rule as `judge`, set reward.enabled to true, or name a scorer in evaluation.scorers. "
        "Write that in the params.yaml beside this run’s reports/ and run `dvc repro report` in that folder, or repeat the run’s command "
        "with --update and, for example, --set 'evaluation.scorers=[{name: short, kind: length, target_length: 40}]'. Only what has "
        "changed runs again.",
    ),
)


def is_scored(evaluation: Mapping[str, Any]) -> bool:
    """Return whether any prompt has scores for both models' answers."""
    return any(need(evaluation, "win_rate", mode, "n") for mode in MODES)


@dataclass(frozen=True)
class ByMode:
    """A policy that has different results in the two modes.

    worse_alone: significantly worse in one mode, and better in neither. sentence: the result in each mode.
    """

    worse_alone: bool
    sentence: str
    details: tuple[str, ...]


def by_mode(evaluation: Mapping[str, Any], who: str, confidence: float) -> ByMode | None:
    """Return the policy's results by mode; None if both modes have the same result.

    who: judge or reward.
    """
    signs = {mode: sign for (of, mode), sign in _signs(evaluation, confidence).items() if of == who}
    if len(set(signs.values())) == 1:
        return None
    words = {1: "better", 0: "not clearly different", -1: "worse"}
    results = [f"{words[signs[mode]]} {mode} ({_figure(evaluation, who, mode)})" for mode in reversed(MODES)]
    details = [_scores(evaluation)] if is_scored(evaluation) else []
    if 0 not in signs.values():
        details.append("The two modes disagree: RL trains on sampled answers; greedy ones take the most likely token at each step.")
        if signs["greedy"] < 0:
            details.append("A greedy answer counts as a loss however small the difference in score: check the mean scores too.")
    return ByMode(1 not in signs.values(), f"the policy is {' and '.join(results)}.", tuple(details))


def _figure(evaluation: Mapping[str, Any], who: str, mode: str) -> str:
    if who == "reward":
        return f"win rate {need(evaluation, 'win_rate', mode, 'value'):.1%}"
    sft, policy = (need(evaluation, mode, model, "judge_ok") for model in ("sft", "policy"))
    return f"{sft:.1%} → {policy:.1%} accepted"


def _scores(evaluation: Mapping[str, Any]) -> str:
    def change(mode: str) -> str:
        sft, policy = (need(evaluation, mode, model, "score_mean") for model in ("sft", "policy"))
        return f"{mode} {number(sft)} → {number(policy)}"

    return f"Mean score: {', '.join(change(mode) for mode in reversed(MODES))}."


def judge_selects(params: Mapping[str, Any]) -> list[str]:
    """Sentences on how the judge influenced which policy the training kept; such a judge is no longer independent.

    A scorer of kind function whose function is also a source's judge counts as the judge.
    """
    if need(params, "alignment", "method") != "rl":
        return []
    rl, rules = need(params, "rl"), {source["judge"] for source in need(params, "data", "sources")} - {None}
    names = {s["name"] for s in rl["reward"]["scorers"] if s["kind"] == "judge" or (s["kind"] == "function" and s["path"] in rules)}
    limits = {name: limit for name, limit in need(rl, "monitor").items() if limit is not None and limit["action"] != "warn"}
    columns = {f"{kind}_{name}" for kind in ("score", "eval", "gap", "agreement") for name in names}
    sentences = []
    if rl["evaluation"]["metric"] in names:
        if rl["evaluation"]["keep_best"]:
            sentences.append(
                "The judge selected this policy during training (rl.evaluation.metric, keep_best), so its acceptance rates are biased."
            )
        elif back := [name for name, limit in limits.items() if limit["action"] == "rollback"]:
            sentences.append(
                f"If the limit {' or '.join(back)} ends the training, the judge selects the policy (rl.evaluation.metric), and its "
                "acceptance rates are then biased."
            )
    if watching := [name for name, limit in limits.items() if limit["metric"] in columns]:
        sentences.append(f"The judge influences when the training ends (rl.monitor: {', '.join(watching)}).")
    return sentences


def rewarded_by(scorers: Sequence[Mapping[str, Any]]) -> str:
    """Return the page's name for the score: `reward model` if that is the only scorer with a weight, else `reward`."""
    rewarded = [s["kind"] for s in scorers if s["weight"] != 0]
    return "reward model" if rewarded == ["reward_model"] else "reward"


_BY_REWARD_ALONE: dict[Direction, tuple[Tone, str]] = {
    "better": ("good", "The {} prefers the policy’s answers to those of the SFT model."),
    "worse": ("bad", "The {} prefers the SFT model’s answers to those of the policy."),
    "unclear": ("open", "The {} sees no clear difference between the policy and the SFT model."),
}
_AS_IF: dict[Direction, Direction] = {"better": "better", "unclear": "unclear", "worse": "unclear"}  # key of _BY_JUDGE without a score
_HACKED = "The {} prefers the policy and the judge prefers the SFT model: the policy has learned to hack its reward."
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


def judge_direction(evaluation: Mapping[str, Any], confidence: float) -> Direction | None:
    """Direction by the judge: better if it accepts significantly more of the policy's answers in both modes, worse if fewer in any; None
    without a judge.
    """
    return _directions(evaluation, confidence).get("judge")


def reward_direction(evaluation: Mapping[str, Any], confidence: float) -> Direction | None:
    """Direction by wins and losses in score, as for the judge; None without scores."""
    return _directions(evaluation, confidence).get("reward")


def _directions(evaluation: Mapping[str, Any], confidence: float) -> dict[str, Direction]:
    """Direction by the judge and by the reward, if the evaluation has them."""
    signs = _signs(evaluation, confidence)
    found: dict[str, Direction] = {}
    for who in dict.fromkeys(of for of, _ in signs):
        of_modes = {sign for (of, _), sign in signs.items() if of == who}
        found[who] = "worse" if -1 in of_modes else "better" if of_modes == {1} else "unclear"
    return found


def _signs(evaluation: Mapping[str, Any], confidence: float) -> dict[tuple[str, str], int]:
    """Results by reward and judge in each mode as 1, -1 or 0 (not significant), from sign tests that Holm's method corrects together."""
    changes, p_values = {}, {}
    for mode in MODES:
        if is_scored(evaluation):
            rate = need(evaluation, "win_rate", mode)
            changes["reward", mode], p_values["reward", mode] = rate["wins"] - rate["losses"], rate["p_value"]
        if need(evaluation, "judge"):
            difference = need(evaluation, "difference", mode, "judge_ok")
            changes["judge", mode], p_values["judge", mode] = difference["value"], difference["p_value"]
    corrected = dict(zip(p_values, holm(list(p_values.values())), strict=True))
    return {key: 0 if corrected[key] >= 1 - confidence else 1 if changes[key] > 0 else -1 for key in changes}


def judged(evaluation: Mapping[str, Any], mode: str, model: str) -> tuple[int, int]:
    """Number of answers that the judge accepts, and number that it judged."""
    n = need(evaluation, mode, model, "judge_n")
    return round(need(evaluation, mode, model, "judge_ok") * n), n


def _judge_shares(evaluation: Mapping[str, Any], confidence: float) -> str:
    def share(mode: str, model: str) -> str:
        return f"{need(evaluation, mode, model, 'judge_ok'):.1%}"

    def difference(mode: str) -> str:
        found = need(evaluation, "difference", mode, "judge_ok")
        return f"{confidence:.0%} interval of the difference {100 * found['low']:+.1f} to {100 * found['high']:+.1f} points"

    return (
        f"The judge accepts {share('greedy', 'policy')} of the policy’s greedy answers (SFT: {share('greedy', 'sft')}; "
        f"{difference('greedy')}) and {share('sampled', 'policy')} of its sampled ones (SFT: {share('sampled', 'sft')}; "
        f"{difference('sampled')})."
    )


def _detectable(evaluation: Mapping[str, Any], confidence: float) -> str:
    """Return the detectable difference of an unclear comparison, at the level of one of the headline's four tests."""
    found = [need(evaluation, "difference", mode, "judge_ok") for mode in MODES]
    points = [100 * detectable_difference(f["low"], f["high"], confidence, tests=2 * len(MODES)) for f in found]
    return (
        f"On these prompts the tests detect a true difference of {points[0]:.1f} points (greedy) or {points[1]:.1f} points (sampled) with "
        "a probability of 80%."
    )


def _win_rates(evaluation: Mapping[str, Any], rewarder: str, confidence: float) -> str:
    def rate(mode: str) -> str:
        r = need(evaluation, "win_rate", mode)
        return f"{r['value']:.1%} ({confidence:.0%} interval {r['low']:.1%} to {r['high']:.1%})"

    greedy, sampled = rate("greedy"), rate("sampled")
    return f"The {rewarder} prefers the policy on {greedy} of the prompts with greedy answers and on {sampled} with sampled ones."


def gate_verdict(gate: Mapping[str, Any]) -> Verdict:
    """Return the gate's verdict: a headline and its message."""
    passed = need(gate, "passed")
    message = str(need(gate, "message")).partition(": ")[2]
    if not need(gate, "needed"):
        return Verdict("open", "There is no reward model to judge.", (message[:1].upper() + message[1:],))
    headline = "The reward model passed its gate." if passed else "The reward model did not pass its gate."
    return Verdict("good" if passed else "bad", headline, (message[:1].upper() + message[1:],))


def data_verdict(validation: Mapping[str, Any]) -> Verdict:
    """Return the verdict on the data: whether all expectations were met, and which were not."""
    expectations = need(validation, "expectations")
    failed = [e for e in expectations if not e["passed"]]
    if failed:
        named = ", ".join(f"{e['use']}: {e['name']}" for e in failed)
        return Verdict("bad", f"{len(failed)} of {len(expectations)} expectations about the data failed.", (named,))
    return Verdict("good", f"The data meets all {len(expectations)} expectations.", ())


# Stages whose error is a verdict, not a fault.
_STOPPED = {
    "validate_data": "the data does not meet its expectations.",
    "check_model": "the model isn't computed correctly here.",
    "gate_reward": "what rewards the policy did not pass the gate.",
}


def stopped_verdict(stopped: Stopped) -> Verdict:
    """Return the verdict on a chain that stopped before the evaluation."""
    headline = f"Stopped at {stopped.stage}: {_STOPPED.get(stopped.stage, 'the stage ended with an error.')}"
    reasons = (stopped.because,) if stopped.because else ()
    return Verdict("bad", headline, (*reasons, "There is no final result; this page shows what was completed before the chain stopped."))
