"""Sampling responses and scoring them, outside the RL loop: for rejection sampling, rounds of iterative DPO and evaluation.

prompts = choose_prompts(rows, tokenizer, longest=..., count=..., seed=...)
samples = sample_responses("models/sft", prompts, section.sampling, model=params.model, threads=2, seed=params.seed)
scored = ResponseScorer(section.scorers, reward_model=Path("models/reward"), source_judges=..., model=params.model)(
    prompts, samples, tokenizer
)
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from transformers import PreTrainedTokenizerBase

from rlhf_core.config import ModelConfig, SamplingConfig
from rlhf_core.data.batching import batch_indices
from rlhf_core.engines.in_process import open_engine
from rlhf_core.models.tokenizer import encode_prompt, load_tokenizer, stop_ids
from rlhf_core.progress import drawing
from rlhf_core.rounds.pool import distinct_prompts
from rlhf_core.sampling.requests import Sample, SamplingSettings, request_seeds
from rlhf_core.sampling.scoring import ScoredResponse
from rlhf_core.types import Prompt

PROMOTION_TURN = 1  # of a round's drawing; its responses to train on are turn 0
REQUEST_RESPONSES = 4096  # asked of the engine at once; between requests it can be told to stop


class SamplingStopped(Exception):
    """A stop was asked for while responses were sampled; none of them is kept."""


def choose_prompts(rows: list[dict], tokenizer: PreTrainedTokenizerBase, *, longest: int, count: int | None, seed: int) -> list[Prompt]:
    """The first `count` (None: all) of the prompts of at most `longest` tokens, in a seeded order.

    Args:
        rows: of the use prompt (rlhf_core.data.schema).
        tokenizer: of the model that will answer; its template writes the prompt.
    Raises:
        ValueError: no prompt is that short.
    """
    prompts = [Prompt(r["id"], r["source"], r["messages"], encode_prompt(tokenizer, r["messages"]), r["label"]) for r in rows]
    prompts = [p for p in prompts if len(p.prompt_ids) <= longest]
    if not prompts:
        raise ValueError(f"prompts: expected some of at most {longest} tokens, got none of {len(rows)}; raise model.max_length")
    order = batch_indices(0, batch_size=len(prompts), num_examples=len(prompts), seed=seed)
    return [prompts[i] for i in order[:count]]


def promotion_prompts(
    rows: list[dict], tokenizer: PreTrainedTokenizerBase, *, longest: int, count: int, seed: int, number: int
) -> list[Prompt]:
    """The prompts on which a round's policy is compared with the one before it: `count` different ones of the promotion split, others for
    each round where the split has more.

    Args:
        rows: of the use prompt, of the promotion split.
        longest: tokens of a prompt.
        number: of the round.
    Raises:
        ValueError: there are fewer.
    """
    fitting = [row for row in distinct_prompts(rows) if len(encode_prompt(tokenizer, row["messages"])) <= longest]
    if len(fitting) < count:
        raise ValueError(
            f"iterative.promotion.prompts: expected at most the {len(fitting)} different prompts of the promotion split with at most "
            f"{longest} tokens, got {count}; lower it, or raise data.promotion_fraction, in another series"
        )
    order = int(np.random.SeedSequence([seed, number]).generate_state(1)[0])
    return choose_prompts(fitting, tokenizer, longest=longest, count=count, seed=order)


def promotion_seeds(seed: int, number: int, count: int) -> list[int]:
    """Of the answers to `promotion_prompts`, for both policies of a round: others for each round, and none of the round's own sampling."""
    return request_seeds(seed, number, count, turn=PROMOTION_TURN)


def sample_responses(
    model_path: str,
    prompts: list[Prompt],
    config: SamplingConfig,
    *,
    model: ModelConfig,
    threads: int,
    seed: int,
    draw: int = 0,
    stop_requested: Callable[[], bool] = lambda: False,
) -> list[list[Sample]]:
    """`config.samples_per_prompt` responses to each prompt, in order, by an engine in this process that is gone afterwards.

    Which prompts there are is the caller's business (`choose_prompts`); `config.prompts` isn't read.

    Args:
        model_path: Hugging Face folder with its tokenizer; `stop_ids` end a response.
        threads: cores for the engine on the CPU.
        seed, draw: decide, with a prompt's position, what is drawn for it. Rounds of one run differ in `draw`.
    Raises:
        SamplingStopped: `stop_requested` said so.
    """
    ends = stop_ids(load_tokenizer(model_path, trust_remote_code=model.trust_remote_code), model_path)
    settings = SamplingSettings(config.max_new_tokens, config.temperature, top_p=config.top_p)
    seeds = request_seeds(seed, draw, len(prompts))
    per_request = max(1, REQUEST_RESPONSES // config.samples_per_prompt)
    engine = open_engine(
        config.backend,
        model_path,
        max_length=model.max_length,
        dtype=model.dtype,
        max_concurrent_sequences=config.max_concurrent_sequences,
        threads=threads,
        seed=seed,
        trust_remote_code=model.trust_remote_code,
        gpu_memory_fraction=config.gpu_memory_fraction,
    )
    samples: list[list[Sample]] = []
    try:
        with drawing("response", len(prompts) * config.samples_per_prompt) as bar:
            for start in range(0, len(prompts), per_request):
                if stop_requested():
                    raise SamplingStopped
                part = slice(start, start + per_request)
                ids = [p.prompt_ids for p in prompts[part]]
                samples += engine.generate(ids, seeds[part], settings, stop_ids=ends, group_size=config.samples_per_prompt)
                bar.reach(len(samples) * config.samples_per_prompt)
    finally:
        engine.close()
    return samples


def best_responses(groups: list[list[ScoredResponse]], *, min_score: float | None) -> tuple[list[ScoredResponse], dict[str, int]]:
    """The finished response with the highest score of each prompt (the first of equals), and how many prompts have none, by reason.

    truncated: no response is finished. unscored: no finished one has a score. below_min_score: the best one's is lower than that.
    """
    kept: list[ScoredResponse] = []
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
            kept.append(best)
    return kept, dropped
