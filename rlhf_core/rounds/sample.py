"""Samples scored responses to a round's prompts, makes pairs of them, and chooses the prompts for its comparison."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from transformers import PreTrainedTokenizerBase

from rlhf_core.config import Params
from rlhf_core.data.hashing import distinct_prompts
from rlhf_core.data.schema import write_rows
from rlhf_core.engines.rollout.requests import request_seeds
from rlhf_core.models.tokenizer import encode_prompt, load_tokenizer, stop_ids
from rlhf_core.rounds.data import Group, build_pairs
from rlhf_core.rounds.pins import Round
from rlhf_core.sampling.drawing import sample_responses
from rlhf_core.sampling.prompts import choose_prompts
from rlhf_core.sampling.responses import ScoredResponse, with_prompts, without_prompts
from rlhf_core.sampling.scoring import LocalScorers, ResponseScorer
from rlhf_core.types import Prompt

if TYPE_CHECKING:
    from rlhf_core.stage.training import TrainRun

PROMOTION_TURN = 1  # of a round's request seeds; its training responses are turn 0


def sample_groups(
    params: Params, entry: Round, rows: list[dict], *, reward_model: Path, source_judges: dict[str, str], infer: Callable[..., Any]
) -> tuple[list[list[ScoredResponse]], int]:
    """Scored responses of the round's policy to each prompt that leaves room for one, and the number of prompts that don't.

    Args:
        rows: of the use prompt, the round's.
        infer: calls a function with a TrainRun and the arguments that follow, on every rank that samples and scores.
    """
    policy = entry.policy.path
    tokenizer = load_tokenizer(policy, trust_remote_code=params.model.trust_remote_code)
    longest = params.model.max_length - params.iterative.sampling.max_new_tokens
    prompts = choose_prompts(rows, tokenizer, longest=longest, count=None, seed=params.seed)
    found = infer(sample_and_score, entry, prompts, reward_model, source_judges)
    return with_prompts(found["groups"], prompts), len(rows) - len(prompts)


def sample_and_score(
    run: TrainRun, entry: Round, prompts: list[Prompt], reward_model: Path, source_judges: dict[str, str]
) -> dict[str, Any]:
    """Runs on each rank. Returns `groups`, the scored responses to all prompts without the prompts; ranks share the prompts."""
    params, config, policy = run.params, run.params.iterative, entry.policy.path
    samples = sample_responses(
        policy,
        prompts,
        config.sampling,
        model=params.model,
        threads=params.cluster.threads,
        seed=params.seed,
        draw=entry.prompts.first,  # differs from round to round, as the prompts do
        check_stop=run.check_stop,
        ranks_per_model=params.cluster.inference_ranks_per_model,
    )
    scorers = LocalScorers(config.scorers, reward_model=reward_model, source_judges=source_judges, model=params.model)
    tokenizer = load_tokenizer(policy, trust_remote_code=params.model.trust_remote_code)
    scorer = ResponseScorer(scorers, tokenizer, stops=stop_ids(tokenizer, policy))
    return {"groups": without_prompts(scorer.score_groups(prompts, samples))}


def write_data(folder: Path, groups: list[list[ScoredResponse]], *, min_margin: float) -> dict[str, Any]:
    """Write the pairs to preference.parquet and every response with its scores to samples.parquet. Returns the figures of both."""
    pairs = build_pairs([Group(g[0].prompt.source, g[0].prompt.messages, g) for g in groups], min_margin=min_margin)
    write_rows(folder, "preference", pairs.rows)
    frame = pd.DataFrame(
        {
            "id": response.prompt.id,
            "source": response.prompt.source,
            "prompt": response.prompt.messages[-1]["content"],
            "response": response.text,
            "finished": response.finished,
            "score": response.score,
            **{f"score_{name}": value for name, value in response.components.items()},
            "used_as": {chosen: "chosen", rejected: "rejected"}.get(position, ""),
        }
        for group, chosen, rejected in zip(groups, pairs.chosen, pairs.rejected, strict=True)
        for position, response in enumerate(group)
    )
    frame.to_parquet(folder / "samples.parquet", index=False)
    return {
        **pairs.counts,
        "responses": len(frame),
        "unscored_fraction": float(frame["score"].isna().mean()),
        "truncated_fraction": float((~frame["finished"]).mean()),
        "score_mean": float(frame["score"].mean()),
        **{f"score_{use}_mean": float(frame["score"][frame["used_as"] == use].mean()) for use in ("chosen", "rejected")},
    }


def promotion_prompts(rows: list[dict], tokenizer: PreTrainedTokenizerBase, params: Params, *, number: int) -> list[Prompt]:
    """The iterative.promotion.prompts distinct prompts on which round `number` compares; other ones in each round if the split has more.

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
    """Sampling seeds of both policies' answers: new ones in each round, and none of those of the round's training responses."""
    return request_seeds(seed, number, count, turn=PROMOTION_TURN)
