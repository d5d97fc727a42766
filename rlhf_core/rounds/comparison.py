"""A round's policy against the one before it, on prompts of the promotion split."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from rlhf_core.config import Params
from rlhf_core.data.hashing import distinct_prompts
from rlhf_core.evaluation.answers import EvaluatedModel, load_policy, response_logprobs, sample_answers, score_answers
from rlhf_core.evaluation.figures import judge_difference, summarize, win_rate
from rlhf_core.models.tokenizer import encode_prompt, load_tokenizer
from rlhf_core.rounds.pins import Round
from rlhf_core.rounds.promotion import DECIDES
from rlhf_core.sampling.prompts import choose_prompts
from rlhf_core.sampling.requests import request_seeds
from rlhf_core.sampling.scoring import LocalScorers
from rlhf_core.types import Prompt

PROMOTION_TURN = 1  # of a round's request seeds; its training responses are turn 0


def promotion_prompts(rows: list[dict], tokenizer: PreTrainedTokenizerBase, params: Params, *, number: int) -> list[Prompt]:
    """iterative.promotion.prompts distinct prompts of the promotion split for round `number`; other ones in each round where the split
    has more.

    Args:
        rows: of the use prompt, of the promotion split.
    Raises:
        ValueError: fewer prompts leave room for an answer.
    """
    count, longest = params.iterative.promotion.prompts, params.model.max_length - params.evaluation.max_new_tokens
    fitting = [row for row in distinct_prompts(rows) if len(encode_prompt(tokenizer, row["messages"])) <= longest]
    if len(fitting) < count:
        raise ValueError(
            f"iterative.promotion.prompts: expected at most the {len(fitting)} different prompts of the promotion split with at most "
            f"{longest} tokens, got {count}; lower it, or raise data.promotion_fraction, in another series"
        )
    order = int(np.random.SeedSequence([params.seed, number]).generate_state(1)[0])
    return choose_prompts(fitting, tokenizer, longest=longest, count=count, seed=order)


def promotion_seeds(seed: int, number: int, count: int) -> list[int]:
    """Sampling seeds of both policies' answers: others in each round, and none of the seeds of the round's training responses."""
    return request_seeds(seed, number, count, turn=PROMOTION_TURN)


def compare(
    params: Params, entry: Round, number: int, policy: Path, *, rows: list[dict], reward_model: Path, source_judges: dict[str, str]
) -> dict[str, Any]:
    """Figures of both policies, their win rate and judge difference, and the new policy's KL in nats per response.

    The KL from the policy before and from the series' origin is estimated on the new policy's sampled answers.

    Args:
        policy: folder of the round's policy. rows: as for `promotion_prompts`.
    """
    config = params.evaluation
    before = Path(entry.policy.path)
    tokenizer = load_tokenizer(str(before), trust_remote_code=params.model.trust_remote_code)
    prompts = promotion_prompts(rows, tokenizer, params, number=number)
    models = {name: EvaluatedModel(folder, tokenizer, prompts) for name, folder in (("before", before), ("after", policy))}
    samples = sample_answers(
        models,
        config,
        backend=params.iterative.sampling.backend,
        model=params.model,
        max_concurrent_sequences=params.iterative.sampling.max_concurrent_sequences,
        threads=params.cluster.threads,
        seed=params.seed,
        seeds=promotion_seeds(params.seed, number, len(prompts)),
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
        module = load_policy(folder, params.model)
        return response_logprobs(module, answers[DECIDES]["after"], pad_id=tokenizer.pad_token_id, temperature=config.temperature)

    own = logprobs(policy)
    others = {"before": before, "origin": Path(entry.origin.path)}
    metrics["kl"] = {name: float((own - logprobs(folder)).mean()) for name, folder in others.items()}
    return metrics
