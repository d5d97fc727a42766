"""Compares a round's policy with the one before it, on prompts of the promotion split."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_core.evaluation.answers import EvaluatedModel, load_policy, response_logprobs, sample_answers, score_answers
from rlhf_core.evaluation.figures import judge_difference, summarize, win_rate
from rlhf_core.models.tokenizer import load_tokenizer
from rlhf_core.rounds.pins import Round
from rlhf_core.rounds.promotion import DECIDES
from rlhf_core.rounds.sample import promotion_prompts, promotion_seeds
from rlhf_core.sampling.scoring import LocalScorers

if TYPE_CHECKING:
    from rlhf_core.stage.training import TrainRun


def compare(
    run: TrainRun, entry: Round, number: int, policy: Path, rows: list[dict], reward_model: Path, source_judges: dict[str, str]
) -> dict[str, Any]:
    """Runs on each rank. Returns figures of both policies, their win rate and judge difference, and the new policy's KL in nats per
    response.

    The KL from the policy before and from the series' origin is estimated on the new policy's sampled answers.

    Args:
        policy: folder of the round's policy. rows: as for `promotion_prompts`.
    """
    params, config = run.params, run.params.evaluation
    before = Path(entry.policy.path)
    tokenizer = load_tokenizer(str(before), trust_remote_code=params.model.trust_remote_code)
    prompts = promotion_prompts(rows, tokenizer, params, number=number)
    models = {name: EvaluatedModel(folder, tokenizer, prompts) for name, folder in (("before", before), ("after", policy))}
    divided = {"ranks_per_model": params.cluster.inference_ranks_per_model}
    samples = sample_answers(
        models,
        config,
        backend=params.iterative.sampling.backend,
        model=params.model,
        max_concurrent_sequences=params.iterative.sampling.max_concurrent_sequences,
        threads=params.cluster.threads,
        seed=params.seed,
        seeds=promotion_seeds(params.seed, number, len(prompts)),
        **divided,
    )
    scorers = LocalScorers(params.iterative.scorers, reward_model=reward_model, source_judges=source_judges, model=params.model)
    answers = score_answers(models, samples, scorers, source_judges)
    del scorers  # before the policies are loaded
    metrics: dict[str, Any] = {
        mode: {name: summarize(a, confidence=config.confidence) for name, a in by_model.items()} for mode, by_model in answers.items()
    }
    metrics["win_rate"] = {mode: win_rate(a["after"], a["before"], confidence=config.confidence) for mode, a in answers.items()}
    if "judge_ok" in metrics[DECIDES]["after"]:
        metrics["judge_difference"] = {
            mode: judge_difference(a["after"], a["before"], confidence=config.confidence) for mode, a in answers.items()
        }

    def logprobs(folder: Path):
        module = load_policy(folder, params.model, **divided)
        logprob_options = {"pad_id": tokenizer.pad_token_id, "temperature": config.temperature, **divided}
        return response_logprobs(module, answers[DECIDES]["after"], **logprob_options)

    own = logprobs(policy)
    others = {"before": before, "origin": Path(entry.origin.path)}
    metrics["kl"] = {name: float((own - logprobs(folder)).mean()) for name, folder in others.items()}
    return metrics
