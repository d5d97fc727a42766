"""Figures of two models' answers to the same prompts: means, win rate and differences, with intervals."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_core.data.judge import Judgement, judgement
from rlhf_core.sampling.responses import ScoredResponse, last_reply
from rlhf_core.statistics.intervals import mean_interval, paired_difference, paired_means, points_interval, sign_test


@dataclass(frozen=True)
class Answer(ScoredResponse):
    """One model's answer to one prompt. The prompt's ids come from the model's own template.

    judgement: by the judge; None without a judge.
    """

    judgement: Judgement | None


def judged(response: ScoredResponse, source_judges: dict[str, str]) -> Answer:
    """Return the response with its judgement by the judge of the prompt's source.

    Args:
        source_judges: data source -> its judge.
    """
    prompt = last_reply(response).prompt
    return Answer(**vars(response), judgement=judgement(source_judges, prompt.source, prompt.messages, response.text))


def summarize(answers: list[Answer], *, confidence: float) -> dict[str, Any]:
    """Means over answers. Scores that aren't finite are left out (NaN if all are); the judge's shares are over the answers it judged."""
    score = _mean([a.score for a in answers], confidence)
    summary = {
        "n": len(answers),
        **{f"score_{name}": score[name] for name in ("mean", "low", "high")},
        "scores": {name: _mean([a.components[name] for a in answers], confidence) for name in answers[0].components},
        "length_mean": sum(a.num_sampled for a in answers) / len(answers),
        "truncated_fraction": sum(not a.finished for a in answers) / len(answers),
    }
    judged = [a.judgement for a in answers if a.judgement is not None]
    if judged:
        summary["judge_n"] = len(judged)
        summary["judge_ok"] = sum(j.ok for j in judged) / len(judged)
        for aspect in dict.fromkeys(aspect for j in judged for aspect in j.aspects):
            verdicts = [j.aspects[aspect] for j in judged if aspect in j.aspects]
            summary[f"judge_{aspect}"] = sum(verdicts) / len(verdicts)
    return summary


def _mean(scores: list[float], confidence: float) -> dict[str, float | int]:
    known = [s for s in scores if math.isfinite(s)]
    low, high = mean_interval(known, confidence)
    return {"mean": sum(known) / len(known) if known else math.nan, "low": low, "high": high, "n": len(known)}


def win_rate(policy: list[Answer], baseline: list[Answer], *, confidence: float) -> dict[str, float | int]:
    """Share of prompts on which the policy's answer has the higher score; ties are half, prompts without both scores left out.

    Equal answers are a tie even if their scores differ: a reward model's scores vary between batches by rounding, a random scorer's by
    more. NaN if no prompt has both scores. The p-value is that of `sign_test` for wins against losses.
    """
    points = [p for p in win_points(policy, baseline) if p is not None]
    low, high = points_interval(points, confidence)
    return {
        "value": sum(points) / len(points) if points else math.nan,
        "low": low,
        "high": high,
        "wins": points.count(1.0),
        "ties": points.count(0.5),
        "losses": points.count(0.0),
        "p_value": sign_test(points.count(1.0), points.count(0.0)),
        "n": len(points),
    }


def win_points(policy: list[Answer], baseline: list[Answer]) -> list[float | None]:
    """Points of the policy for each prompt: 1 for a win, 0.5 for a tie, 0 for a loss, None without both scores."""

    def points(p: Answer, b: Answer) -> float | None:
        if not (math.isfinite(p.score) and math.isfinite(b.score)):
            return None
        return 0.5 if _same(p, b) or p.score == b.score else float(p.score > b.score)

    return [points(p, b) for p, b in zip(policy, baseline, strict=True)]


def judge_difference(policy: list[Answer], baseline: list[Answer], *, confidence: float) -> dict[str, float | int]:
    """Return the share of the policy's answers that the judge accepts, less the baseline's, over prompts whose two answers it judged.

    The keys are the fields of `PairedDifference`: `first` is the policy.
    """
    return _shares([a.judgement and a.judgement.ok for a in policy], [a.judgement and a.judgement.ok for a in baseline], confidence)


def differences(policy: list[Answer], baseline: list[Answer], *, confidence: float) -> dict[str, Any]:
    """Return the policy's value of every figure of `summarize`, less the baseline's, over prompts for which both are known.

    Shares have the fields of `PairedDifference`, means those of `MeanDifference`.
    """

    def means(value: Callable[[Answer], float]) -> dict[str, float | int]:
        return vars(paired_means([value(a) for a in policy], [value(a) for a in baseline], confidence))

    def aspect(answers: list[Answer], name: str) -> list[bool | None]:
        return [a.judgement.aspects.get(name) if a.judgement else None for a in answers]

    found: dict[str, Any] = {
        "score_mean": means(lambda a: a.score),
        "scores": {name: means(lambda a, name=name: a.components[name]) for name in policy[0].components},
        "length_mean": means(lambda a: a.num_sampled),
        "truncated_fraction": _shares([not a.finished for a in policy], [not a.finished for a in baseline], confidence),
    }
    judgements = [a.judgement for a in policy if a.judgement is not None]
    if judgements:
        found["judge_ok"] = judge_difference(policy, baseline, confidence=confidence)
        for name in dict.fromkeys(name for j in judgements for name in j.aspects):
            found[f"judge_{name}"] = _shares(aspect(policy, name), aspect(baseline, name), confidence)
    return found


def _shares(policy: Sequence[bool | None], baseline: Sequence[bool | None], confidence: float) -> dict[str, float | int]:
    pairs = [(p, b) for p, b in zip(policy, baseline, strict=True) if p is not None and b is not None]
    return vars(paired_difference([p for p, _ in pairs], [b for _, b in pairs], confidence))


def _same(one: Answer, other: Answer) -> bool:
    """Return whether two answers are equal. A truncated answer differs from a finished one with the same text."""
    return (one.text, one.finished, turns_before(one)) == (other.text, other.finished, turns_before(other))


def turns_before(answer: Answer) -> list[dict[str, str]]:
    """Return the messages from the first reply to before the last."""
    return answer.dialogue.messages[answer.dialogue.opening :] if answer.dialogue else []


def by_prompt(answers: dict[str, dict[str, list[Answer]]]) -> list[dict[str, Any]]:
    """Rows for a comparison of two runs by prompt, one per prompt, in order.

    id; and for each mode `<mode>_judge_ok` (1, 0 or None) and `<mode>_score` of the policy's answer, `<mode>_points` of it against the SFT
    model's (`win_points`).

    Args:
        answers: {mode: {"sft": [...], "policy": [...]}}.
    """
    rows: list[dict[str, Any]] = [{"id": a.prompt.id} for a in next(iter(answers.values()))["policy"]]
    for mode, by_model in answers.items():
        points = win_points(by_model["policy"], by_model["sft"])
        for row, answer, point in zip(rows, by_model["policy"], points, strict=True):
            row[f"{mode}_judge_ok"] = None if answer.judgement is None else int(answer.judgement.ok)
            row[f"{mode}_score"] = answer.score if math.isfinite(answer.score) else None
            row[f"{mode}_points"] = point
    return rows
