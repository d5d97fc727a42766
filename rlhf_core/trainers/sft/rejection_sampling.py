"""Rejection sampling: samples several responses to each training prompt, and trains on the best of each by the scorers.

Source: RAFT, Dong et al. 2023, https://arxiv.org/abs/2304.06767; rejection sampling fine-tuning in Touvron et al. 2023,
https://arxiv.org/abs/2307.09288, section 3.2.3.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from rlhf_core.config import ModelConfig, RejectionSamplingConfig, SftConfig
from rlhf_core.engines.deepspeed.ranks import is_first, wait_for_all
from rlhf_core.engines.rollout.requests import Sample
from rlhf_core.files import replace_text
from rlhf_core.models.tokenizer import stop_ids, turn_end
from rlhf_core.sampling.drawing import sample_responses
from rlhf_core.sampling.prompts import choose_prompts
from rlhf_core.sampling.responses import ScoredResponse, with_prompts, without_prompts
from rlhf_core.sampling.scoring import LocalScorers, ResponseScorer
from rlhf_core.trainers.supervised.demonstrations import Demonstration, encode_demonstrations
from rlhf_core.types import Prompt

if TYPE_CHECKING:
    from rlhf_core.stage.training import TrainRun

SCORED_AT_ONCE = 1024  # prompts; the stage can be stopped between them
SCORED = "scored.json"

log = logging.getLogger("rlhf")


def scored_responses(
    rows: list[dict],
    tokenizer: PreTrainedTokenizerBase,
    config: RejectionSamplingConfig,
    *,
    policy: Path,
    reward_model: Path,
    source_judges: dict[str, str],
    model: ModelConfig,
    seed: int,
    scratch: Path,
    infer: Callable[..., Any],
) -> tuple[list[list[ScoredResponse]], int]:
    """Return the scored responses of `config.sampling.prompts` prompts, and how many of all prompts leave no room for a response.

    Samples and scores are saved in `scratch`, and read there when an interrupted run is repeated.

    Args:
        rows: rows of the use prompt.
        policy: folder of the model that responds, which has this tokenizer.
        infer: function that calls its first argument with a TrainRun and the further arguments, on every rank that samples and scores.
    """
    sampling, done = config.sampling, scratch / SCORED
    fitting = choose_prompts(rows, tokenizer, longest=model.max_length - sampling.max_new_tokens, count=None, seed=seed)
    prompts = fitting[: sampling.prompts]
    if not done.exists():
        infer(sample_and_score, prompts, tokenizer, config, policy, reward_model, source_judges)
    return with_prompts(json.loads(done.read_text(encoding="utf-8")), prompts), len(rows) - len(fitting)


def sample_and_score(
    run: TrainRun,
    prompts: list[Prompt],
    tokenizer: PreTrainedTokenizerBase,
    config: RejectionSamplingConfig,
    policy: Path,
    reward_model: Path,
    source_judges: dict[str, str],
) -> dict[str, Any]:
    """Sample and score responses to all prompts, which the ranks share, and save them in `run.scratch`. Every rank calls this."""
    params, sampling = run.params, config.sampling
    model = params.model

    def sample() -> list[list[Sample]]:
        log.info("train_policy: sampling %d responses to each of %d prompts", sampling.samples_per_prompt, len(prompts))
        options = {"model": model, "threads": params.cluster.threads, "seed": params.seed, "check_stop": run.check_stop}
        options["ranks_per_model"] = params.cluster.inference_ranks_per_model
        return sample_responses(str(policy), prompts, sampling, **options)

    samples = [[Sample(**fields) for fields in group] for group in saved(run.scratch / "samples.json", sample)]

    def score() -> list[list[dict[str, Any]]]:
        scorers = LocalScorers(config.scorers, reward_model=reward_model, source_judges=source_judges, model=model)
        scorer = ResponseScorer(scorers, tokenizer, stops=stop_ids(tokenizer, policy))
        groups: list[list[ScoredResponse]] = []
        for start in range(0, len(prompts), SCORED_AT_ONCE):
            run.check_stop()
            part = slice(start, start + SCORED_AT_ONCE)
            groups += scorer.score_groups(prompts[part], samples[part])
        return without_prompts(groups)

    saved(run.scratch / SCORED, score)
    return {}


def saved(path: Path, make: Callable[[], list]) -> list:
    """Return the JSON in `path`, or what `make` returns, which is then saved there atomically. Dataclasses become objects.

    Every rank calls this, and rank 0 writes the file.

    Args:
        make: function that is a collective.
    """
    if not path.exists():
        made = make()
        if is_first():
            replace_text(path, json.dumps(made, default=vars))
        wait_for_all()
    return json.loads(path.read_text(encoding="utf-8"))


def best_responses(groups: list[list[ScoredResponse]], *, min_score: float | None) -> tuple[list[ScoredResponse], dict[str, int]]:
    """Return each prompt's finished response with the highest score (the first of equal ones), and the number of prompts without one.

    truncated: no response is finished. unscored: no finished response has a score. below_min_score: the best score is lower.
    """
    best_of_prompts: list[ScoredResponse] = []
    dropped = dict.fromkeys(("truncated", "unscored", "below_min_score"), 0)
    for group in groups:
        finished = [r for r in group if r.finished]
        scored = [r for r in finished if math.isfinite(r.score)]
        best = max(scored, key=lambda r: r.score, default=None)
        if best is None:
            dropped["unscored" if finished else "truncated"] += 1
        elif min_score is not None and best.score < min_score:
            dropped["below_min_score"] += 1
        else:
            best_of_prompts.append(best)
    return best_of_prompts, dropped


def as_demonstration(response: ScoredResponse, tokenizer: PreTrainedTokenizerBase) -> Demonstration:
    """Return a finished response as its sampled tokens. Its last token becomes the one with which the template ends a turn."""
    prompt_ids = response.prompt.prompt_ids
    return Demonstration([*prompt_ids, *response.response_ids[:-1], turn_end(tokenizer).trained[-1]], len(prompt_ids))


def best_demonstrations(
    groups: list[list[ScoredResponse]], tokenizer: PreTrainedTokenizerBase, config: RejectionSamplingConfig
) -> tuple[list[Demonstration], dict[str, Any]]:
    """Return each prompt's best response as a demonstration, and the stage's metrics of all responses.

    Raises:
        ValueError: no prompt has a response to train on.
    """
    best, dropped = best_responses(groups, min_score=config.min_score)
    log.info("train_policy: the best responses of %d prompts are kept, none of %s", len(best), dropped)
    if not best:
        raise ValueError(f"rejection sampling: expected responses to train on, got none for {len(groups)} prompts: {dropped}")
    counts = {"method": "rejection_sampling", "prompts": len(groups), "kept": len(best), "dropped": dropped}
    return [as_demonstration(response, tokenizer) for response in best], {**counts, **score_means(groups, best)}


def heldout_demonstrations(rows: list[dict], tokenizer: PreTrainedTokenizerBase, sft: SftConfig, *, max_length: int) -> list[Demonstration]:
    """Return held-out demonstrations as SFT trains on them. Their loss shows how far the policy moves from them."""
    return encode_demonstrations(rows, tokenizer, max_length=max_length, train_on=sft.train_on, train_on_thoughts=sft.train_on_thoughts)[0]


def score_means(groups: list[list[ScoredResponse]], best: list[ScoredResponse]) -> dict[str, float]:
    """Return the means of the weighted score and of each scorer's, over all responses and over the best; unscored ones are left out."""

    def mean(scores: list[float]) -> float:
        known = np.array(scores)[np.isfinite(scores)]
        return float(known.mean()) if len(known) else float("nan")

    means = {}
    for prefix, responses in (("sampled_score", [r for group in groups for r in group]), ("best_score", best)):
        means[f"{prefix}_mean"] = mean([r.score for r in responses])
        means |= {f"{prefix}_{name}": mean([r.components[name] for r in responses]) for name in best[0].components}
    return means
