"""What a run came to, in sentences: is the policy better than the model it started from, and who says so?"""

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
    """tone: what colour it gets. headline: one sentence. details: what it rests on, one sentence each."""

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
    """Policy against SFT.

    The judge, where there is one, decides. What was rewarded is what the policy was trained to please, so its preference alone is weaker
    evidence, and its preference against the judge is reward hacking. Where the judge was part of the reward or had a say in which policy
    was kept, a sentence says so.

    Args:
        scorers: `evaluation_scorers`, which say what the answers were scored by.
        trained_on: `training_scorers`; None: the same.
        selected: sentences of `judge_selects`.
    """
    rewarder = rewarded_by(scorers)
    judge, reward = judge_direction(evaluation, confidence), reward_direction(evaluation, confidence)
    if judge is None and reward is None:
        return NOT_COMPARED
    details = [NO_SCORE if reward is None else _win_rates(evaluation, rewarder, confidence)]
    if shared := evaluation.get("prompts_of_gate"):
        details.append(
            f"{shared} of the prompts were read by the gate too: a reward model that was chosen on them looks better here than it is."
        )
    tone: Tone
    if judge is None:
        tone, headline = _BY_REWARD_ALONE[reward]
        if (apart := by_mode(evaluation, "reward", confidence)) is not None:
            tone, headline = "bad" if apart.worse_alone else "open", f"By the {{}}, {apart.sentence}"
            details += apart.details
        details.append(
            f"There is no judge for this data: only the {rewarder} has compared the answers, and a policy trained on it pleases it."
        )
        return Verdict(tone, headline.format(rewarder), tuple(details))
    details.insert(0, _judge_shares(evaluation, confidence))
    if judge == "unclear":
        details.insert(1, _would_be_found(evaluation, confidence))
    if any(s["kind"] == "judge" and s["weight"] > 0 for s in (scorers if trained_on is None else trained_on)):
        details.append("The judge was part of the reward: the policy was trained to please it too.")
    details += selected
    tone, headline = _BY_JUDGE[judge, reward or _AS_IF[judge]]
    if (apart := by_mode(evaluation, "judge", confidence)) is not None:
        tone = "bad" if apart.worse_alone or (judge, reward) == ("worse", "better") else "open"
        headline = f"{_HACKED if reward == 'better' and judge == 'worse' else ''} By the judge, {apart.sentence}".lstrip()
        details += apart.details
    return Verdict(tone, headline.format(rewarder), tuple(details))


NO_SCORE = "Nothing scored the answers: there is no reward model, and rl.reward.scorers has nothing else that counts."
# Where neither a judge nor a score is there.
NOT_COMPARED = Verdict(
    "open",
    "Whether the policy is better can’t be said: nothing compared its answers with those of the SFT model.",
    (
        f"{NO_SCORE} And there is no judge for this data.",
        "What is known is how long the answers are, how many are cut off, and how far the policy has moved from the SFT model. Read the "
        "samples, or give a data source a rule as `judge`, set reward.enabled to true, or put a scorer into rl.reward.scorers, and run "
        "the evaluation again.",
    ),
)


def evaluation_scorers(params: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Those of rl.reward.scorers by which the evaluation scored: without a reward model the chain's own is left out."""
    enabled = need(params, "reward", "enabled")
    return [s for s in need(params, "rl", "reward", "scorers") if enabled or s["kind"] != "reward_model" or s["path"] is not None]


def training_scorers(params: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Those that the policy was trained to please; the methods that learn from pairs and labels have none."""
    method = need(params, "alignment", "method")
    if method == "rl":
        return need(params, "rl", "reward", "scorers")
    return need(params, "rejection_sampling", "scorers") if method == "rejection_sampling" else []


def is_scored(evaluation: Mapping[str, Any]) -> bool:
    """Whether any prompt has a score of both models' answers."""
    return any(need(evaluation, "win_rate", mode, "n") for mode in MODES)


@dataclass(frozen=True)
class ByMode:
    """A policy that is clearly better or worse in one mode, and not so in the other.

    worse_alone: worse in one mode, and better in none. sentence: of both modes, without its subject's judge.
    """

    worse_alone: bool
    sentence: str
    details: tuple[str, ...]


def by_mode(evaluation: Mapping[str, Any], who: str, confidence: float) -> ByMode | None:
    """None: the same can be said of both modes.

    Args:
        who: judge, or reward.
    """
    signs = {mode: sign for (of, mode), sign in _signs(evaluation, confidence).items() if of == who}
    if len(set(signs.values())) == 1:
        return None
    words = {1: "better", 0: "not clearly different", -1: "worse"}
    told = [f"{words[signs[mode]]} {mode} ({_figure(evaluation, who, mode)})" for mode in reversed(MODES)]
    details = [_scores(evaluation)] if is_scored(evaluation) else []
    if 0 not in signs.values():
        details.append("The two modes disagree: sampled answers are what RL trains, greedy ones take the likeliest token at each place.")
        if signs["greedy"] < 0:
            details.append("A greedy answer loses by however little its score is lower: look at the size of the change too.")
    return ByMode(1 not in signs.values(), f"the policy is {' and '.join(told)}.", tuple(details))


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
    """How the judge had a say in which policy the training kept, one sentence each: it is then no stranger to that policy.

    A function of a scorer that is also a source's judge counts as the judge.
    """
    if need(params, "alignment", "method") != "rl":
        return []
    rl, rules = need(params, "rl"), {source["judge"] for source in need(params, "data", "sources")} - {None}
    names = {s["name"] for s in rl["reward"]["scorers"] if s["kind"] == "judge" or (s["kind"] == "function" and s["path"] in rules)}
    limits = {name: limit for name, limit in need(rl, "monitor").items() if limit is not None and limit["action"] != "warn"}
    columns = {f"{kind}_{name}" for kind in ("score", "eval", "gap", "agreement") for name in names}
    said = []
    if rl["evaluation"]["metric"] in names:
        if rl["evaluation"]["keep_best"]:
            said.append(
                "The judge chose this policy among those of the training (rl.evaluation.metric, keep_best): its shares are too favourable."
            )
        elif back := [name for name, limit in limits.items() if limit["action"] == "rollback"]:
            said.append(
                f"Where the limit {' or '.join(back)} ends the training, the judge chooses the policy that is kept (rl.evaluation.metric): "
                "its shares are then too favourable."
            )
    if watching := [name for name, limit in limits.items() if limit["metric"] in columns]:
        said.append(f"The judge had a say in when the training ends (rl.monitor: {', '.join(watching)}).")
    return said


def rewarded_by(scorers: Sequence[Mapping[str, Any]]) -> str:
    """What the score is called: that of a single reward model, or of whatever else was rewarded."""
    rewarded = [s["kind"] for s in scorers if s["weight"] != 0]
    return "reward model" if rewarded == ["reward_model"] else "reward"


_BY_REWARD_ALONE: dict[Direction, tuple[Tone, str]] = {
    "better": ("good", "The {} prefers the policy’s answers to those of the SFT model."),
    "worse": ("bad", "The {} prefers the SFT model’s answers to those of the policy."),
    "unclear": ("open", "The {} sees no clear difference between the policy and the SFT model."),
}
_AS_IF: dict[Direction, Direction] = {"better": "better", "unclear": "unclear", "worse": "unclear"}  # without a score, in _BY_JUDGE
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


def judge_direction(evaluation: Mapping[str, Any], confidence: float) -> Direction | None:
    """Better: in both modes the judge accepts clearly more of the policy's answers. Worse: in any mode clearly fewer. None: no judge."""
    return _directions(evaluation, confidence).get("judge")


def reward_direction(evaluation: Mapping[str, Any], confidence: float) -> Direction | None:
    """The same for wins against losses by the score. None: no score."""
    return _directions(evaluation, confidence).get("reward")


def _directions(evaluation: Mapping[str, Any], confidence: float) -> dict[str, Direction]:
    """Of the reward and the judge, where they are there."""
    signs = _signs(evaluation, confidence)
    return {who: _direction([sign for (of, _), sign in signs.items() if of == who]) for who in dict.fromkeys(of for of, _ in signs)}


def _signs(evaluation: Mapping[str, Any], confidence: float) -> dict[tuple[str, str], int]:
    """1, -1 or 0 (not clear) of reward and judge in each mode, by the sign tests of both and of both modes, corrected together (Holm)."""
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


def _direction(signs: list[int]) -> Direction:
    return "worse" if -1 in signs else "better" if set(signs) == {1} else "unclear"


def judged(evaluation: Mapping[str, Any], mode: str, model: str) -> tuple[int, int]:
    """(answers that the judge accepts, answers that it judged)."""
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


def _would_be_found(evaluation: Mapping[str, Any], confidence: float) -> str:
    """The power of a comparison that is not clear: at the level of one of the headline's four tests."""
    found = [need(evaluation, "difference", mode, "judge_ok") for mode in MODES]
    points = [100 * detectable_difference(f["low"], f["high"], confidence, tests=2 * len(MODES)) for f in found]
    return (
        f"On these prompts a true difference of {points[0]:.1f} points greedy and of {points[1]:.1f} sampled would be found with a "
        "probability of 80%."
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
