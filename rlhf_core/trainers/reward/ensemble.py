"""Trains reward models: the members of an ensemble in turn, and their scores of the held-out pairs, by which the gate judges.

Members differ in the order of their pairs, in the initial weights of their adapters and, except for the first, of their head.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_core.config import ModelConfig, RewardConfig
from rlhf_core.data.hashing import conversation_text
from rlhf_core.data.heldout import as_heldout_table
from rlhf_core.engines.deepspeed.engine import TrainEngine, device, release_memory
from rlhf_core.engines.deepspeed.ranks import is_first
from rlhf_core.models.build import new_scalar_model, scalar_head
from rlhf_core.models.forward import ScalarModule
from rlhf_core.models.lora import add_adapters
from rlhf_core.models.probe import shares_prefixes
from rlhf_core.models.score_head import filler_id, probe_score_head
from rlhf_core.models.tokenizer import encode_prompts
from rlhf_core.scorers.reward.members import combine_members
from rlhf_core.trainers.reward.train import Comparison, begin_comparisons, reward_phase, score_heldout
from rlhf_core.trainers.supervised.encoding import in_background
from rlhf_core.trainers.supervised.loop import TrainLoop, engine_settings, train_phase

MEMBER_SEEDS = 1_000_003  # between the seeds of two members, so that none has the seed of another run's first member
HELDOUT_SPLITS = ("validation", "test")
MEASURED = ("heldout_loss", "heldout_accuracy", "best_step")  # of each member

Rows = list[dict[str, Any]]
Scores = dict[str, tuple[torch.Tensor, torch.Tensor]]  # split -> scores of its pairs, chosen and rejected, [N] each

log = logging.getLogger("rlhf")


def train_ensemble(
    start: Path,
    read_pairs: Callable[[str], Rows],
    tokenizer: PreTrainedTokenizerBase,
    config: RewardConfig,
    *,
    model: ModelConfig,
    seed: int,
    loop: Callable[..., TrainLoop],
    save: Callable[..., None],
) -> tuple[dict[str, Any], pd.DataFrame | None]:
    """Train `config.ensemble` reward models. The first is saved as the stage's model, the others in its subfolders `member_<n>`.

    Args:
        start: Hugging Face folder of the SFT model.
        read_pairs: function that returns the pairs of a split.
        loop: function that returns the stage's training loop, given `first_step` (the number of a member's first step in the curves) and
            `seed`.
        save: function that saves a model with its weights and tokenizer in the subfolder `part` (`TrainRun.save_model`).
    Returns:
        The stage's metrics, and on rank 0 a row for each held-out pair (`heldout_table`).
    Raises:
        Interrupted: a stop was requested; the state is saved.
    """
    metrics: dict[str, Any] = {}
    scores: list[Scores] = []
    engine: TrainEngine | None = None
    how = {"max_length": model.max_length, "begin": in_background}
    begun = {split: begin_comparisons(read_pairs(split), tokenizer, **how) for split in ("train", *HELDOUT_SPLITS)}
    encoded: dict[str, tuple[Sequence[Comparison], int]] = {}
    for member in range(config.ensemble):
        if engine is not None:
            engine.close()  # the member before
            engine = scalar_model = None
            release_memory()
        member_seed = seed + MEMBER_SEEDS * member
        scalar_model = new_scalar_model(start, tokenizer, trust_remote_code=model.trust_remote_code, training_dtype=model.dtype)
        if member:  # instead of zeros
            head = scalar_head(scalar_model).weight
            torch.nn.init.normal_(head, std=head.shape[1] ** -0.5, generator=torch.Generator().manual_seed(member_seed))
        if not encoded:
            shared = shared_tokens(scalar_model, config, max_length=model.max_length)
            encoded = {split: encode(shared) for split, encode in begun.items()}
            heldout = {split: list(encoded[split][0]) for split in HELDOUT_SPLITS}  # as objects, since they are read at every evaluation
        engine, of_member = train_member(
            scalar_model, encoded["train"], heldout["validation"], config, member=member, dtype=model.dtype, seed=member_seed, loop=loop
        )
        metrics |= of_member if member == 0 else {f"{name}_member_{member}": of_member[name] for name in MEASURED if name in of_member}
        if of_member["steps"] < metrics["steps"]:  # of fewer steps than the members before, by max_minutes
            metrics |= {name: of_member[name] for name in ("steps", "epochs", "planned_steps", "ended_by")}
        engine.eval()
        parts = {"pad_id": filler_id(engine.module.model), "microbatch_tokens": config.microbatch_tokens}
        scores.append({split: score_heldout(engine, heldout[split], **parts) for split in HELDOUT_SPLITS if heldout[split]})
        save(scalar_model, engine.state_dict(), tokenizer, part=f"member_{member}" if member else "")
    if not is_first():
        return metrics, None
    table = heldout_table(scores, heldout, read_pairs, tokenizer)
    return metrics | {"heldout_pairs": len(table)}, table


def shared_tokens(model: PreTrainedModel, config: RewardConfig, *, max_length: int) -> int:
    """Return the length of the longest row in which responses share their prompt; 0 if the model can't compute such rows."""
    if probe_score_head(model).per_token and shares_prefixes(model, device=device(), max_length=max_length):
        return config.microbatch_tokens
    log.info("train_reward: prompts are computed for each response: prefix sharing takes a CPU and a model with scores of tokens")
    return 0


def train_member(
    model: PreTrainedModel,
    encoded: tuple[Sequence[Comparison], int],
    heldout: Sequence[Comparison],
    config: RewardConfig,
    *,
    member: int,
    dtype: str,
    seed: int,
    loop: Callable[..., TrainLoop],
) -> tuple[TrainEngine, dict[str, Any]]:
    """Train one member. Its steps in the curves follow those of the members before it; its time is an equal share of max_minutes.

    Args:
        encoded: training comparisons, and the number of pairs that were dropped as too long.
    """
    comparisons, dropped = encoded
    phase = reward_phase(
        comparisons,
        heldout,
        name=f"reward_member_{member}" if member else "reward",
        steps=config.steps_over(len(comparisons), per_step=config.batch_size),
        batch_size=config.batch_size,
        pad_id=filler_id(model),
        microbatch_tokens=config.microbatch_tokens,
        margin=config.margin,
        centering_coef=config.centering_coef,
    )
    settings = engine_settings(config, steps=phase.steps, learning_rate=config.learning_rate, dtype=dtype, seed=seed)
    add_adapters(model, config.lora, seed=seed)
    engine = TrainEngine(ScalarModule(model), settings)
    how = loop(first_step=member * phase.steps, seed=seed)
    minutes = how.max_minutes and how.max_minutes / config.ensemble
    found = train_phase(engine, phase, replace(how, max_minutes=minutes))
    metrics = {"trained": True, "pairs": sum(len(c.pairs) for c in comparisons), "dropped_too_long": dropped}
    return engine, metrics | found


def heldout_table(
    members: list[Scores], heldout: dict[str, list[Comparison]], read_pairs: Callable[[str], Rows], tokenizer: PreTrainedTokenizerBase
) -> pd.DataFrame:
    """Return a row for each validation and test pair with mean and standard deviation of the members' scores; no rows without members."""
    found = []
    for split, comparisons in heldout.items():
        if not comparisons:
            continue
        by_id = {row["id"]: row for row in read_pairs(split)}
        rows = [by_id[row_id] for c in comparisons for row_id in c.row_ids]
        prompt_tokens = map(len, encode_prompts(tokenizer, [row["messages"] for row in rows]))
        sides = (torch.stack([scores[split][side] for scores in members], 1) for side in (0, 1))
        (chosen, chosen_std), (rejected, rejected_std) = (combine_members(side, std_coef=0.0) for side in sides)
        scores = zip(*(values.tolist() for values in (chosen, rejected, chosen_std, rejected_std)), strict=True)
        for c in comparisons:
            for (a, b), row_id in zip(c.pairs, c.row_ids, strict=True):
                row = by_id[row_id]
                prompt = hashlib.sha256(conversation_text(row["messages"]).encode("utf-8", "surrogatepass")).hexdigest()[:16]
                of_chosen, of_rejected, *stds = next(scores)
                tokens = len(c.sequences[a]), len(c.sequences[b]), prompt, next(prompt_tokens)
                found.append((row_id, row["source"], split, of_chosen, of_rejected, *tokens, *stds))
    return as_heldout_table(found)
