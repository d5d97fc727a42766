"""Stage evaluate_round of a round of iterative DPO: the new policy against the one before it, on the promotion split, and the verdict.

    python -m tasks.rounds.evaluate_round <number of the round>

`accepted` in rounds/<n>/metrics/evaluate.json says whether the next round goes on from the new policy, and `reason` why.
"""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

from rlhf_core.config import PromotionConfig
from rlhf_core.data.schema import read_rows
from rlhf_core.paths import PREPARED, REWARD_MODEL
from rlhf_core.rounds.pins import ROUNDS_FILE, BudgetPin, Round, read_round, round_folder
from rlhf_core.stage.files import read_json, source_judges, write_json
from rlhf_core.stage.run import Stage, round_argument
from rlhf_core.statistics.error_budget import spent_after
from rlhf_core.statistics.exact_test import p_value, prompts_needed, smallest_gain
from rlhf_core.statistics.intervals import POWER

MICROBATCH_TOKENS = 8192
MODES = ("greedy", "sampled")
DECIDES = "sampled"  # the policy as it is sampled from in the next round
SPLIT = "promotion"  # which nothing but the promotion of rounds reads
MIN_DECIDED = 20  # prompts on which one policy is ahead; with fewer nothing is accepted
ROUNDING = 1e-9  # of a sum of levels

log = logging.getLogger("rlhf")


def main() -> None:
    number = round_argument(__doc__)
    folder = round_folder(number)
    with Stage("evaluate_round", resumable=False, round_number=number) as stage:
        entry = read_round(number)
        entry.check(number)
        validation = read_json(folder / "metrics" / "validation.json")
        if validation["passed"]:
            promotion = stage.params.iterative.promotion
            check_budget(entry.budget, promotion.error_budget)
            metrics = compare(stage, entry, number, folder / "policy")
            metrics |= {"trained": True, **verdict(metrics, promotion, entry.budget)}
        else:
            metrics = {
                "trained": False,
                "accepted": False,
                "reason": f"the round's pairs were refused: {'; '.join(validation['messages'])}",
            }
        write_json(folder / "metrics" / "evaluate.json", {"round": number, "before": entry.policy.path, **metrics})
        log.info("evaluate_round@%d: %s: %s", number, "accepted" if metrics["accepted"] else "not accepted", metrics["reason"])


def check_budget(budget: BudgetPin, error_budget: float) -> None:
    """The round's entry spends no more than there is.

    Raises:
        ValueError: it does: the entry or the params aren't those that the round began with.
    """
    if budget.spent + budget.level > error_budget * (1 + ROUNDING):
        raise ValueError(
            f"{ROUNDS_FILE}: expected at most what {budget.spent:.4g} spent leave of iterative.promotion.error_budget={error_budget:g}, "
            f"got a level of {budget.level:.4g}; bring both files back with git"
        )


def verdict(metrics: dict[str, Any], config: PromotionConfig, budget: BudgetPin) -> dict[str, Any]:
    """Whether the new policy is better by the configured statistic, at the level that the series' error budget leaves, and why.

    Args:
        metrics: of `compare`.
    """
    counts = comparisons(metrics, config.metric)
    decided, margin = counts["ahead"] + counts["behind"], config.min_advantage / counts["points"]
    p = p_value(counts["ahead"], counts["behind"], counts["n"], margin=margin)
    accepted = decided >= MIN_DECIDED and p <= budget.level
    gain = smallest_gain(decided, counts["n"], budget.level, margin=margin, power=POWER) if decided >= MIN_DECIDED else None
    shown = {
        "split": SPLIT,
        **{key: counts[key] for key in ("ahead", "behind", "n")},
        "decided": decided,
        "p_value": p,
        "comparison": budget.comparison,
        "level": budget.level,
        "error_budget": config.error_budget,
        "spent": spent_after(budget, accepted=accepted),
        "smallest_gain": None if gain is None else gain * counts["points"],
        "power": POWER,
        "prompts_needed": None if accepted else _needed(counts, budget.level, margin),
    }
    reason = _reason(shown, config, counts["advantage"]["value"], accepted=accepted)
    return {"accepted": accepted, "reason": reason, "metric": config.metric, "advantage": counts["advantage"], "promotion": shown}


def _needed(counts: dict[str, Any], level: float, margin: float) -> int | None:
    """About how many prompts would find a gain of the size that was seen; None: none was seen, or no more than the margin."""
    n, decided = counts["n"], counts["ahead"] + counts["behind"]
    found = prompts_needed((counts["ahead"] - counts["behind"]) / n, decided / n, level, margin=margin, power=POWER) if n else None
    return None if found is None else max(found, n + 1, math.ceil(MIN_DECIDED * n / decided))


def comparisons(metrics: dict[str, Any], metric: str) -> dict[str, Any]:
    """On how many prompts the new policy is ahead and behind, the advantage with its interval, and its points per prompt ahead."""
    if metric == "win_rate":
        rate = metrics["win_rate"][DECIDES]
        advantage = {key: rate[key] - 0.5 for key in ("value", "low", "high")}
        return {"ahead": rate["wins"], "behind": rate["losses"], "n": rate["n"], "advantage": advantage, "points": 0.5}
    found = metrics["judge_difference"][DECIDES]
    n = sum(found[key] for key in ("both", "first_only", "second_only", "neither"))
    advantage = {key: found[key] for key in ("value", "low", "high")}
    return {"ahead": found["first_only"], "behind": found["second_only"], "n": n, "advantage": advantage, "points": 1.0}


def _reason(shown: dict[str, Any], config: PromotionConfig, advantage: float, *, accepted: bool) -> str:
    what = "win rate less a half" if config.metric == "win_rate" else "the judge's share less the one before"
    found = f"{what}: {advantage:+.3f} on {shown['n']} prompts of the split {SPLIT}, ahead on {shown['ahead']}, behind on {shown['behind']}"
    more = f"; about {shown['prompts_needed']} prompts would find a gain of this size with {POWER:.0%}" if shown["prompts_needed"] else ""
    if shown["decided"] < MIN_DECIDED:
        return f"{found}; too few decided comparisons, {shown['decided']} of at least {MIN_DECIDED}{more}"
    relation = "is at most" if accepted else "is above"
    above = f' for "no more than iterative.promotion.min_advantage={config.min_advantage:g}"' if config.min_advantage else ""
    gain = shown["smallest_gain"]
    power = "no outcome of so few would be accepted" if gain is None else f"a gain of {gain:.3f} would be found with {POWER:.0%} power"
    return (
        f"{found}; its p-value{above}, {shown['p_value']:.2g}, {relation} the level {shown['level']:.2g} of comparison "
        f"{shown['comparison']}; spent of iterative.promotion.error_budget={config.error_budget:g}: {shown['spent']:.2g}; {power}{more}"
    )


def compare(stage: Stage, entry: Round, number: int, policy: Path) -> dict[str, Any]:
    """Both policies' figures, their win rate and difference, and how far the new one has gone."""
    from rlhf_core.evaluation import judge_difference, summarize, win_rate

    confidence = stage.params.evaluation.confidence
    tokenizer, answers = answer(stage, number, {"before": Path(entry.policy.path), "after": policy})
    metrics: dict[str, Any] = {
        mode: {name: summarize(a, confidence=confidence) for name, a in by_model.items()} for mode, by_model in answers.items()
    }
    metrics["win_rate"] = {mode: win_rate(a["after"], a["before"], confidence=confidence) for mode, a in answers.items()}
    if "judge_ok" in metrics[DECIDES]["after"]:
        metrics["judge_difference"] = {
            mode: judge_difference(a["after"], a["before"], confidence=confidence) for mode, a in answers.items()
        }
    models = {"before": Path(entry.policy.path), "origin": Path(entry.origin.path)}
    metrics["kl"] = divergence(stage, tokenizer.pad_token_id, policy, models, answers[DECIDES]["after"])
    return metrics


def answer(stage: Stage, number: int, models: dict[str, Path]):
    """The tokenizer, and every model's answers to the round's promotion prompts in every mode: {mode: {model: [...]}}.

    Both models draw with the same seeds, and other ones in each round: what a policy was lucky with in one round is drawn anew in the next.
    """
    from rlhf_core.engines.in_process import open_engine
    from rlhf_core.models.build import read_state_dict
    from rlhf_core.models.tokenizer import load_tokenizer, stop_ids
    from rlhf_core.sampling.drawing import promotion_prompts, promotion_seeds
    from rlhf_core.sampling.requests import SamplingSettings

    params, config = stage.params, stage.params.evaluation
    first = str(next(iter(models.values())))
    tokenizer = load_tokenizer(first, trust_remote_code=params.model.trust_remote_code)
    longest = params.model.max_length - config.max_new_tokens
    wanted = params.iterative.promotion.prompts
    prompts = promotion_prompts(
        read_rows(PREPARED, "prompt", SPLIT), tokenizer, longest=longest, count=wanted, seed=params.seed, number=number
    )
    engine = open_engine(
        params.iterative.sampling.backend,
        first,
        max_length=params.model.max_length,
        dtype=params.model.dtype,
        max_concurrent_sequences=params.iterative.sampling.max_concurrent_sequences,
        threads=params.cluster.threads,
        seed=params.seed,
        trust_remote_code=params.model.trust_remote_code,
        gpu_memory_fraction=config.gpu_memory_fraction,
    )
    seeds = promotion_seeds(params.seed, number, len(prompts))
    samples: dict[str, dict[str, list]] = {mode: {} for mode in MODES}
    try:
        for version, (name, folder) in enumerate(models.items()):
            if version:
                engine.load_weights(read_state_dict(folder), version=version)
            for mode in MODES:
                settings = SamplingSettings(config.max_new_tokens, 0.0 if mode == "greedy" else config.temperature)
                ids = [p.prompt_ids for p in prompts]
                samples[mode][name] = engine.generate(ids, seeds, settings, stop_ids=stop_ids(tokenizer, folder), group_size=1)
    finally:
        engine.close()  # before another model is loaded
    del engine
    ends = {name: stop_ids(tokenizer, folder) for name, folder in models.items()}
    return tokenizer, judged(stage, tokenizer, ends, prompts, samples)


def judged(stage: Stage, tokenizer, ends: dict[str, tuple[int, ...]], prompts: list, samples: dict[str, dict[str, list]]):
    """The samples with scores and, where the data has a judge, its word."""
    from rlhf_core.evaluation import judged as with_judgement
    from rlhf_core.sampling.scoring import LocalScorers, ResponseScorer

    params = stage.params
    judges = source_judges()
    scorers = LocalScorers(params.iterative.scorers, reward_model=REWARD_MODEL, source_judges=judges, model=params.model)

    def answers(name: str, groups: list) -> list:
        scorer = ResponseScorer(scorers, tokenizer, stops=ends[name])
        return [with_judgement(r, judges) for (r,) in scorer.score_groups(prompts, groups)]

    return {mode: {name: answers(name, groups) for name, groups in by_model.items()} for mode, by_model in samples.items()}


def divergence(stage: Stage, pad_id: int, policy: Path, others: dict[str, Path], answers: list) -> dict[str, float]:
    """The policy's KL from each other model, in nats per response, estimated on the policy's own samples."""
    from rlhf_core.evaluation import load_policy, response_logprobs

    def logprobs(folder: Path):
        how = {"pad_id": pad_id, "microbatch_tokens": MICROBATCH_TOKENS, "temperature": stage.params.evaluation.temperature}
        return response_logprobs(load_policy(folder, stage.params.model), answers, **how)

    own = logprobs(policy)
    return {name: float((own - logprobs(folder)).mean()) for name, folder in others.items()}


if __name__ == "__main__":
    main()
