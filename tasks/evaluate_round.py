"""Stage evaluate_round of a round of iterative DPO: the new policy against the one before it, on held-out prompts, and the verdict.

    python -m tasks.evaluate_round <number of the round>

`accepted` in rounds/<n>/metrics/evaluate.json says whether the next round goes on from the new policy, and `reason` why.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

from rlhf_core.config import PromotionConfig
from rlhf_core.data.schema import read_rows
from rlhf_core.rounds import Round, read_round, round_folder
from tasks.stage import PREPARED, REWARD_MODEL, Stage, read_json, source_judges, write_json

MICROBATCH_TOKENS = 8192
MODES = ("greedy", "sampled")
DECIDES = "sampled"  # the policy as it is sampled from in the next round

log = logging.getLogger("rlhf")


def main() -> None:
    number = int(sys.argv[1])
    folder = round_folder(number)
    with Stage("evaluate_round", resumable=False, round_number=number) as stage:
        entry = read_round(number)
        entry.check(number)
        validation = read_json(folder / "metrics" / "validation.json")
        if validation["passed"]:
            metrics = compare(stage, entry, folder / "policy")
            metrics |= {"trained": True, **verdict(metrics, stage.params.iterative.promotion)}
        else:
            metrics = {
                "trained": False,
                "accepted": False,
                "reason": f"the round's pairs were refused: {'; '.join(validation['messages'])}",
            }
        write_json(folder / "metrics" / "evaluate.json", {"round": number, "before": entry.policy.path, **metrics})
        log.info("evaluate_round@%d: %s: %s", number, "accepted" if metrics["accepted"] else "not accepted", metrics["reason"])


def verdict(metrics: dict[str, Any], config: PromotionConfig) -> dict[str, Any]:
    """Whether the new policy is better by the configured statistic, and one sentence that says why.

    Args:
        metrics: of `compare`.
    """
    if config.metric == "win_rate":
        rate = metrics["win_rate"][DECIDES]
        value, low, high = (rate[key] - 0.5 for key in ("value", "low", "high"))
        what = f"win rate {rate['value']:.3f} on {rate['n']} prompts, less a half"
    else:
        difference = metrics["judge_difference"][DECIDES]
        value, low, high = (difference[key] for key in ("value", "low", "high"))
        what = "the judge's share less the one before"
    accepted = low > config.min_advantage
    interval = f"{config.confidence:.0%} interval {low:+.3f} to {high:+.3f}"
    relation = "is above" if accepted else "isn't above"
    reason = f"{what}: {value:+.3f}, {interval}; its lower end {relation} iterative.promotion.min_advantage={config.min_advantage:g}"
    return {"accepted": accepted, "reason": reason, "metric": config.metric, "advantage": {"value": value, "low": low, "high": high}}


def compare(stage: Stage, entry: Round, policy: Path) -> dict[str, Any]:
    """Both policies' figures, their win rate and difference, and how far the new one has gone."""
    from rlhf_core.evaluation import summarize, win_rate

    confidence = stage.params.iterative.promotion.confidence
    tokenizer, answers = answer(stage, {"before": Path(entry.policy.path), "after": policy})
    metrics: dict[str, Any] = {
        mode: {name: summarize(a, confidence=confidence) for name, a in by_model.items()} for mode, by_model in answers.items()
    }
    metrics["win_rate"] = {mode: win_rate(a["after"], a["before"], confidence=confidence) for mode, a in answers.items()}
    if "judge_ok" in metrics[DECIDES]["after"]:
        metrics["judge_difference"] = {mode: judge_difference(metrics[mode], confidence) for mode in MODES}
    models = {"before": Path(entry.policy.path), "origin": Path(entry.origin.path)}
    metrics["kl"] = divergence(stage, tokenizer.pad_token_id, policy, models, answers[DECIDES]["after"])
    return metrics


def judge_difference(summaries: dict[str, dict[str, Any]], confidence: float) -> dict[str, float]:
    """Of the shares of answers that the judge accepts, after less before, with its interval."""
    from rlhf_core.statistics import difference_interval

    after, before = ((round(s["judge_ok"] * s["judge_n"]), s["judge_n"]) for s in (summaries["after"], summaries["before"]))
    low, high = difference_interval(after, before, confidence)
    return {"value": after[0] / after[1] - before[0] / before[1], "low": low, "high": high}


def answer(stage: Stage, models: dict[str, Path]):
    """The tokenizer, and every model's answers to the held-out prompts in every mode: {mode: {model: [...]}}.

    All models draw with the same seeds.
    """
    from rlhf_core.engines.in_process import open_engine
    from rlhf_core.models.build import read_state_dict
    from rlhf_core.models.tokenizer import load_tokenizer, stop_ids
    from rlhf_core.sampling import SamplingSettings, request_seeds
    from rlhf_core.trainers.labelling import choose_prompts

    params, config = stage.params, stage.params.evaluation
    first = str(next(iter(models.values())))
    tokenizer = load_tokenizer(first, trust_remote_code=params.model.trust_remote_code)
    longest = params.model.max_length - config.max_new_tokens
    prompts = choose_prompts(
        read_rows(PREPARED, "prompt", "test"), tokenizer, longest=longest, count=params.iterative.promotion.prompts, seed=params.seed
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
    seeds = request_seeds(params.seed, 0, len(prompts))
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
    from rlhf_core.trainers.labelling import ResponseScorer

    params = stage.params
    judges = source_judges()
    score = ResponseScorer(params.iterative.scorers, reward_model=REWARD_MODEL, source_judges=judges, model=params.model)

    def answers(name: str, groups: list) -> list:
        return [with_judgement(r, judges) for (r,) in score(prompts, groups, tokenizer, stops=ends[name])]

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
