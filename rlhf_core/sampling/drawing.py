"""Sampling responses and scoring them, outside the RL loop: for rejection sampling, rounds of iterative DPO and evaluation.

prompts = choose_prompts(rows, tokenizer, longest=..., count=..., seed=...)
samples = sample_responses("models/sft", prompts, section.sampling, model=params.model, threads=2, seed=params.seed)
scored = ResponseScorer(section.scorers, reward_model=Path("models/reward"), source_judges=..., model=params.model)(
    prompts, samples, tokenizer
)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from rlhf_core.config import ModelConfig, SamplingConfig, ScorerConfig
from rlhf_core.data.batching import batch_indices
from rlhf_core.engines.deepspeed_engine import device
from rlhf_core.engines.in_process import open_engine
from rlhf_core.models.tokenizer import encode_prompt, load_tokenizer, stop_ids
from rlhf_core.progress import drawing
from rlhf_core.rounds.pool import distinct_prompts
from rlhf_core.sampling.requests import Sample, SamplingSettings, request_seeds
from rlhf_core.sampling.scoring import weighted_score
from rlhf_core.scorers.members import combine_members
from rlhf_core.scorers.needs import model_folders
from rlhf_core.scorers.reasons import Reasons
from rlhf_core.scorers.reward_input import RewardModelInput, without_stop
from rlhf_core.scorers.reward_model import load_members, score_by_members
from rlhf_core.scorers.text import TextScorers, score_item
from rlhf_core.types import Prompt

MICROBATCH_TOKENS = 8192  # of a reward model's forward pass
PROMOTION_TURN = 1  # of a round's drawing; its responses to train on are turn 0
REQUEST_RESPONSES = 4096  # asked of the engine at once; between requests it can be told to stop


class SamplingStopped(Exception):
    """A stop was asked for while responses were sampled; none of them is kept."""


@dataclass(frozen=True)
class ScoredResponse:
    """A sampled response and what the scorers say of it.

    response_ids: up to and including the end token, if it came.
    finished: the model ended the response itself; False: it was cut off by length.
    score: the raw scores' weighted sum; NaN: one that counts could not score it, or none counts.
    components: each scorer's raw score, by name; NaN: that one could not.
    """

    prompt: Prompt
    response_ids: list[int]
    text: str
    finished: bool
    score: float
    components: dict[str, float]


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


class ResponseScorer:
    """Scores of responses by every scorer, and their weighted sum, raw: neither normalised nor clipped.

    Args:
        reward_model: folder of the chain's own, for scorers of kind reward_model without a path. Scorers' models are loaded here.
        source_judges: name of each data source that has a judge -> the judge's.
        model: of the policy; its max_length bounds what a reward model is shown, and its dtype is what reward models compute in, as in RL.
    Raises:
        ValueError: a scorer's function or reward model can't be loaded.
    """

    def __init__(self, scorers: list[ScorerConfig], *, reward_model: Path, source_judges: dict[str, str], model: ModelConfig):
        self._scorers = scorers
        self._max_length = model.max_length
        self._by_text = TextScorers(0, scorers, source_judges)
        self._by_model = {}
        trust = model.trust_remote_code
        by_name = {s.name: s for s in scorers}
        for name, folder in model_folders(scorers, reward_model).items():
            config = by_name[name]
            how = {"training_dtype": model.dtype, "trust_remote_code": trust, "count": config.members, "label": config.label}
            members = load_members(folder, device=device(), dtype=getattr(torch, model.dtype), **how)
            tokenizer = load_tokenizer(str(folder), trust_remote_code=trust, template_date=model.template_date, scores=True)
            self._by_model[name] = config, members, tokenizer
        self._reports = {name: Reasons(name) for name in self._by_model}

    def __call__(
        self, prompts: list[Prompt], samples: list[list[Sample]], tokenizer: PreTrainedTokenizerBase, *, stops: Collection[int] = ()
    ) -> list[list[ScoredResponse]]:
        """Every prompt's responses, scored, in order.

        Args:
            tokenizer: of the model that answered, with the template that wrote the prompts' ids.
            stops: its `stop_ids`, which are no part of a response's text.
        """
        asked = [prompt for prompt, group in zip(prompts, samples, strict=True) for _ in group]
        answers = [sample for group in samples for sample in group]
        said = [without_stop(sample.response_ids, stops, finished=sample.finished) for sample in answers]
        texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in said]
        components = self._components(asked, answers, texts, tokenizer, stops)
        counts = any(scorer.weight for scorer in self._scorers)
        raw = {name: torch.tensor(values) for name, values in components.items()}
        scores = weighted_score(raw, self._scorers).tolist() if counts else [math.nan] * len(asked)
        scored = (
            ScoredResponse(prompt, sample.response_ids, text, sample.finished, score, {name: v[i] for name, v in components.items()})
            for i, (prompt, sample, text, score) in enumerate(zip(asked, answers, texts, scores, strict=True))
        )
        return [[next(scored) for _ in group] for group in samples]

    def _components(
        self, prompts: list[Prompt], samples: list[Sample], texts: list[str], tokenizer: PreTrainedTokenizerBase, stops: Collection[int]
    ) -> dict[str, list[float]]:
        items = [
            score_item(prompt, text, finished=sample.finished, response_length=len(sample.response_ids))
            for prompt, sample, text in zip(prompts, samples, texts, strict=True)
        ]
        names = [s.name for s in self._scorers]
        return {
            name: self._score_by_model(name, prompts, samples, tokenizer, stops)
            if name in self._by_model
            else self._by_text.score(name, items)[0]
            for name in names
        }

    def _score_by_model(
        self, name: str, prompts: list[Prompt], samples: list[Sample], tokenizer: PreTrainedTokenizerBase, stops: Collection[int]
    ) -> list[float]:
        config, members, own_tokenizer = self._by_model[name]
        shown = RewardModelInput(tokenizer, own_tokenizer, max_length=self._max_length, stops=stops, report=self._reports[name])
        sequences = shown.sequences((p, s.response_ids, s.finished) for p, s in zip(prompts, samples, strict=True))
        scores = score_by_members(
            members, sequences, pad_id=own_tokenizer.pad_token_id, microbatch_tokens=MICROBATCH_TOKENS, device=device()
        )
        return combine_members(scores, std_coef=config.std_coef)[0].tolist()


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
