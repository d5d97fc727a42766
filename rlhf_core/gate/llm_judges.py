"""Judges the language models that judge (scorers of kind llm_judge), on held-out preference pairs, for stage gate_reward (docs/gate.md).

A judge is asked about each pair as in training, and once more in another order and with another seed.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlhf_core.config import GateConfig, Params, ScorerConfig
from rlhf_core.data.hashing import conversation_text
from rlhf_core.data.schema import read_rows, read_slices
from rlhf_core.gate.checks import SLICE, Check, at_least, at_most, percent, reason_of, within
from rlhf_core.gate.looks import at_look, look_level, take_look, write_result
from rlhf_core.gate.overlap import SplitKeys
from rlhf_core.gate.pairs import Pairs, slice_accuracies, summarize, worst_slice
from rlhf_core.models.tokenizer import encode_prompts, load_tokenizer
from rlhf_core.progress import Reasons
from rlhf_core.scorers.llm_judge.scorer import NO_ANSWER, REFUSED, UNPARSABLE, LlmJudge, Verdict, combined, read_template
from rlhf_core.statistics.clusters import bootstrap, mean_interval, percentile_interval, share_interval

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class JudgeUnavailable(RuntimeError):
    """A judge doesn't answer; those of its answers that came are kept."""


@dataclass(frozen=True)
class Answers:
    """What a judge said of N pairs.

    once, again: two verdicts on each pair, as of `LlmJudge.judge_pairs`. chosen, rejected: [N] scores, NaN where there is none.
    margins_again: [N] differences of scores, of the second time.
    """

    once: list[tuple[Verdict, Verdict]]
    again: list[tuple[Verdict, Verdict]]
    chosen: np.ndarray
    rejected: np.ndarray
    margins_again: np.ndarray

    @property
    def verdicts(self) -> list[Verdict]:
        return [verdict for both in (*self.once, *self.again) for verdict in both]


def judge_judges(params: Params, *, prepared: Path, tokenizer: Path) -> list[dict[str, Any]]:
    """Return an entry of `llm_judges` in gate.json for each rewarded judge.

    Args:
        prepared: folder of the prepared data. tokenizer: whose tokens are lengths.
    Raises:
        JudgeUnavailable: a judge doesn't answer.
        ValueError: a judge's budget is spent, or its template or key can't be read.
    """
    if not params.rewarded_judges:
        return []
    rows = [row for row in read_rows(prepared, "preference", "test") if row["chosen"] is not None and row["rejected"] is not None]
    sizes = load_tokenizer(str(tokenizer), trust_remote_code=params.model.trust_remote_code)
    labels = read_slices(prepared)
    return [judge_judge(key, scorer, rows, labels, sizes, params.gate) for key, scorer in params.rewarded_judges.items()]


def judge_judge(
    key: str,
    scorer: ScorerConfig,
    rows: Sequence[dict],
    labels: dict[str, dict[str, str]],
    tokenizer: PreTrainedTokenizerBase,
    config: GateConfig,
) -> dict[str, Any]:
    """Return the entry of one judge, with its verdict. Its look at the pairs is counted like a reward model's."""
    of = {"key": key, "name": scorer.name, "model": scorer.model, "url": scorer.url, "mode": scorer.mode}
    if scorer.mode == "rubric" and scorer.criteria is None:
        return of | _unmeasured(
            "rejected: expected criteria in the params, got those of each prompt's label, which the gate's pairs don't have."
        )
    asked = chosen_pairs(rows, config.llm_judge.pairs)
    if not asked:
        return of | _unmeasured("rejected: expected preference pairs of the split test to judge it by, got none; add preference data.")
    identity = json.dumps([scorer.asked_with, read_template(scorer)], sort_keys=True)
    look = take_look(SplitKeys.of_rows(rows), f"{hashlib.md5(identity.encode(), usedforsecurity=False).hexdigest()}.dir")
    level, config = look_level(config.confidence, look.number), at_look(config, look.number)
    judge = LlmJudge(scorer, Reasons(scorer.name))
    answers = ask(judge, scorer, asked)
    found = measure(answers, pairs_of(asked, answers, labels, tokenizer), config, mode=scorer.mode)
    checks = judge_checks(found, config)
    passed = all(check.passed is not False for check in checks)
    write_result(look.split, look.model, passed=passed, accuracy=found["accuracy"], confidence=config.confidence)
    verdict = {"passed": passed, "message": _message(found, checks, config), "checks": [check.as_json() for check in checks]}
    return {**of, **verdict, **found, **_costs(judge, answers), "look": {**asdict(look), "level": level}}


def chosen_pairs(rows: Sequence[dict], count: int) -> list[dict]:
    """At most `count` of the rows, by a hash of their ids, so that other data changes few of them."""
    return sorted(rows, key=lambda row: hashlib.sha256(row["id"].encode()).digest())[:count]


def ask(judge: LlmJudge, scorer: ScorerConfig, rows: Sequence[dict]) -> Answers:
    """Ask about the pairs, and once more.

    Raises:
        JudgeUnavailable: it doesn't answer a question.
    """
    pairs = [(row["messages"], row["chosen"], row["rejected"]) for row in rows]
    once, again = (judge.judge_pairs(pairs, again=again) for again in (False, True))
    missing = [verdict.reason for both in (*once, *again) for verdict in both if verdict.fault == NO_ANSWER]
    if missing:
        raise JudgeUnavailable(
            f"scorer {scorer.name}: expected answers of the judge at {scorer.url} to {4 * len(rows)} questions about held-out pairs, got "
            f"none to {len(missing)}: {missing[0]}; run again, which asks only these"
        )
    scores, margins_again = _scores(once, scorer.mode), np.subtract(*_scores(again, scorer.mode))
    return Answers(once, again, *scores, margins_again)


def _scores(verdicts: list[tuple[Verdict, Verdict]], mode: str) -> tuple[np.ndarray, np.ndarray]:
    """Scores [N] of the chosen and of the rejected responses. In mode pairwise a win is 1 to 0, and a verdict that flips a tie."""
    values = np.array([(first.value, second.value) for first, second in verdicts]).reshape(-1, 2)
    if mode != "pairwise":
        return values[:, 0], values[:, 1]
    wins = np.array([combined(both) for both in values.tolist()])
    return wins, 1 - wins


def pairs_of(
    rows: Sequence[dict], answers: Answers, labels: dict[str, dict[str, str]], tokenizer: PreTrainedTokenizerBase
) -> tuple[Pairs, np.ndarray]:
    """Return the pairs on which there is a verdict, and which of the rows [N] they are."""
    known = np.isfinite(answers.chosen) & np.isfinite(answers.rejected)
    lengths = {side: np.array([len(ids) for ids in tokenizer([row[side] for row in rows]).input_ids]) for side in ("chosen", "rejected")}
    columns = sorted({column for row in rows for column in labels.get(row["id"], {})})
    pairs = Pairs(
        chosen=answers.chosen,
        rejected=answers.rejected,
        chosen_tokens=lengths["chosen"],
        rejected_tokens=lengths["rejected"],
        prompt_tokens=np.array([len(ids) for ids in encode_prompts(tokenizer, [row["messages"] for row in rows])]),
        prompts=np.array([conversation_text(row["messages"]) for row in rows]),
        sources=np.array([row["source"] for row in rows]),
        labels={c: np.array([labels.get(row["id"], {}).get(c) for row in rows], dtype=object) for c in columns},
    )
    return pairs.select(known), known


def measure(answers: Answers, judged: tuple[Pairs, np.ndarray], config: GateConfig, *, mode: str) -> dict[str, Any]:
    """Return the figures of an entry: accuracy, slices, position and length bias, consistency, and shares of answers without a verdict."""
    (pairs, known), confidence = judged, config.confidence
    faults = np.array([verdict.fault in (UNPARSABLE, REFUSED) for verdict in answers.verdicts], dtype=float)
    slices = slice_accuracies(pairs, config.slices, confidence=confidence, min_pairs=config.min_slice_pairs)
    return {
        **summarize(pairs, confidence),
        "confidence": confidence,
        "asked": len(known),
        "slices": slices,
        "worst_slice": worst_slice(slices),
        "position": _position(answers, known, pairs, confidence) if mode == "pairwise" else None,
        "length": _length(pairs, confidence),
        "consistency": _consistency(answers.margins_again[known], pairs, confidence),
        "without_verdict": _share(faults, np.arange(len(faults)) // 2 % len(known), confidence),
        "refused": sum(verdict.fault == REFUSED for verdict in answers.verdicts),
    }


def _position(answers: Answers, known: np.ndarray, pairs: Pairs, confidence: float) -> dict[str, Any]:
    """Return by how much more than half of the verdicts the first response wins; 0 for a judge that ignores positions."""
    values = np.array([(first.value + second.value) / 2 - 0.5 for first, second in answers.once])[known]
    flipped = np.array([first.value != 1 - second.value for first, second in answers.once])[known]
    low, high = mean_interval(values, pairs.clusters, confidence) if len(values) else (-math.inf, math.inf)
    return {
        "value": float(values.mean()) if len(values) else None,
        **_finite(low, high),
        "n": len(values),
        "flipped": float(flipped.mean()) if len(values) else None,
    }


def _length(pairs: Pairs, confidence: float) -> dict[str, Any]:
    """Accuracy where the chosen response is the shorter one and where it is the longer one, and their difference, the bias to length."""
    order = np.sign(pairs.chosen_tokens - pairs.rejected_tokens)
    parts = {name: summarize(pairs.select(order == sign), confidence) for name, sign in (("shorter", -1), ("longer", 1))}
    points, both = pairs.points, all(part["n"] for part in parts.values())

    def gap(which: np.ndarray) -> float:
        longer, shorter = (points[which][order[which] == sign] for sign in (1, -1))
        return float(longer.mean() - shorter.mean()) if len(longer) and len(shorter) else math.nan

    low, high = percentile_interval(bootstrap(gap, pairs.clusters), confidence) if both else (-math.inf, math.inf)
    kept = {name: {key: part[key] for key in ("accuracy", "low", "high", "n")} for name, part in parts.items()}
    return {**kept, "bias": {"value": gap(np.arange(len(pairs))) if both else None, **_finite(low, high), "n": int((order != 0).sum())}}


def _consistency(margins_again: np.ndarray, pairs: Pairs, confidence: float) -> dict[str, Any]:
    """Share of pairs with the same verdict the second time."""
    known = np.isfinite(margins_again)
    same = (np.sign(margins_again) == np.sign(pairs.margins))[known].astype(float)
    return _share(same, pairs.clusters[known], confidence)


def _share(points: np.ndarray, clusters: np.ndarray, confidence: float) -> dict[str, Any]:
    if not len(points):
        return {"value": None, "low": 0.0, "high": 1.0, "n": 0}
    interval = share_interval(points, np.unique(clusters, return_inverse=True)[1], confidence)
    return {"value": float(points.mean()), "low": interval.low, "high": interval.high, "n": len(points)}


def _finite(low: float, high: float) -> dict[str, float | None]:
    return {"low": low if math.isfinite(low) else None, "high": high if math.isfinite(high) else None}


def judge_checks(found: dict[str, Any], config: GateConfig) -> list[Check]:
    """Return the checks of a judge; with fewer than gate.min_pairs pairs only that one is judged."""
    limits, n, better = config.llm_judge, found["n"], "take a better judge or template"
    checks = [
        Check("pairs", n, None, None, config.min_pairs, n, n >= config.min_pairs, "add preference data, or raise gate.llm_judge.pairs"),
        at_least("accuracy", found, config.min_accuracy, f"{better}, or lower gate.min_accuracy knowingly"),
    ]
    for s in found["slices"] if config.min_slice_accuracy is not None else ():
        checks.append(at_least(f"{SLICE}{s['column']}={s['value']}", s, config.min_slice_accuracy if s["judged"] else None, better))
    way_out = f"{better}, or lower gate.min_shorter_accuracy"
    checks.append(at_least("shorter_accuracy", found["length"]["shorter"], config.min_shorter_accuracy, way_out))
    way_out = f"{better}, or raise gate.llm_judge.max_length_bias"
    checks.append(at_most("length_bias", found["length"]["bias"], limits.max_length_bias, way_out))
    way_out = f"{better}, or lower gate.llm_judge.min_consistency"
    checks.append(at_least("consistency", found["consistency"], limits.min_consistency, way_out, value="value"))
    way_out = f"{better}, or raise max_answer_tokens"
    share = found["without_verdict"] | {"low": None, "high": None}  # by its value: of few pairs the upper bound exceeds the limit at 0 too
    checks.append(at_most("without_verdict", share, limits.max_without_verdict, way_out))
    if found["position"] is not None:
        way_out = f"{better}, or raise gate.llm_judge.max_position_bias"
        checks.append(within("position_bias", found["position"], limits.max_position_bias, way_out))
    if n < config.min_pairs:
        return [check if check.name in ("pairs", "without_verdict") else replace(check, passed=None) for check in checks]
    return checks


def _message(found: dict[str, Any], checks: list[Check], config: GateConfig) -> str:
    if bad := [check for check in checks if check.passed is False]:
        return " ".join(reason_of(found, check, config) for check in bad)
    measured = f"accuracy {found['accuracy']:.4f} on {found['n']} pairs of {found['prompts']} prompts"
    interval = f"{percent(config.confidence)} interval {found['low']:.4f} to {found['high']:.4f}"
    return f"passed: {measured}, {interval}; the lower end reaches gate.min_accuracy={config.min_accuracy}."


def _unmeasured(message: str) -> dict[str, Any]:
    return {"passed": False, "message": message, "checks": [], "accuracy": None, "n": 0, "look": None}


def _costs(judge: LlmJudge, answers: Answers) -> dict[str, float | int]:
    """Tokens of these answers, kept ones included, and their cost."""
    of = [verdict.answer for verdict in answers.verdicts]
    tokens = sum(answer.input_tokens for answer in of), sum(answer.output_tokens for answer in of)
    return {"tokens": sum(tokens), "cost": judge.answers.cost_of(*tokens)}
