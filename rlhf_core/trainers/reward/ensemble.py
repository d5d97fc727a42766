"""Trains reward models: the members of an ensemble in turn, and their scores of the held-out rows, by which the gate judges.

Members differ in the order of their pairs, in the initial weights of their adapters and, except for the first, of their head.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_core.config import ModelConfig, RewardConfig
from rlhf_core.data.hashing import prompt_name
from rlhf_core.data.heldout import as_heldout_table
from rlhf_core.engines.deepspeed.engine import TrainEngine, device, release_memory
from rlhf_core.engines.deepspeed.ranks import is_first
from rlhf_core.models.build import new_scalar_model, scalar_head
from rlhf_core.models.folder import SEPARATOR_KEY
from rlhf_core.models.forward import ScalarModule
from rlhf_core.models.lora import add_adapters
from rlhf_core.models.probe import shares_prefixes
from rlhf_core.models.score_head import filler_id, probe_score_head
from rlhf_core.models.tokenizer import encode_prompts
from rlhf_core.models.vision import Sight
from rlhf_core.scorers.reward.members import combine_members
from rlhf_core.trainers.reward.steps import StepTask
from rlhf_core.trainers.reward.train import Comparison, begin_comparisons, reward_phase, score_heldout
from rlhf_core.trainers.supervised.encoding import Begin, in_background
from rlhf_core.trainers.supervised.loop import Phase, TrainLoop, engine_settings, train_phase

MEMBER_SEEDS = 1_000_003  # between the seeds of two members, so that none has the seed of another run's first member
HELDOUT_SPLITS = ("validation", "test")
MEASURED = ("heldout_loss", "heldout_accuracy", "best_step")  # of each member

Rows = list[dict[str, Any]]
Scores = dict[str, tuple[torch.Tensor, ...]]  # split -> scores of its rows, [N] each: of pairs chosen and rejected, else of steps

log = logging.getLogger("rlhf")


def train_ensemble(
    start: Path,
    read_split: Callable[[str], Rows],
    tokenizer: PreTrainedTokenizerBase,
    config: RewardConfig,
    *,
    model: ModelConfig,
    seed: int,
    loop: Callable[..., TrainLoop],
    save: Callable[..., None],
    sight: Sight | None = None,
) -> tuple[dict[str, Any], pd.DataFrame | None]:
    """Train `config.ensemble` reward models. The first is saved as the stage's model, the others in its subfolders `member_<n>`.

    Args:
        start: Hugging Face folder of the SFT model.
        read_split: function that returns the rows of a split, of the use `config.rows_use`.
        loop: function that returns the stage's training loop, given `first_step` (the number of a member's first step in the curves) and
            `seed`.
        save: function that saves a model with its weights and tokenizer in the subfolder `part` (`TrainRun.save_model`).
        sight: of a model that sees.
    Returns:
        The stage's metrics, and on rank 0 a row for each held-out pair or response (`heldout_table`).
    Raises:
        Interrupted: a stop was requested; the state is saved.
    """
    metrics: dict[str, Any] = {}
    scores: list[Scores] = []
    engine: TrainEngine | None = None
    of_steps = config.step_separator is not None
    task = (StepTask if of_steps else partial(PairTask, sight=sight))(config, tokenizer, max_length=model.max_length)
    begun = {split: task.begin(read_split(split), in_background) for split in ("train", *HELDOUT_SPLITS)}
    encoded: dict[str, tuple[Sequence[Any], int]] = {}
    for member in range(config.ensemble):
        if engine is not None:
            engine.close()  # the member before
            engine = scalar_model = None
            release_memory()
        member_seed = seed + MEMBER_SEEDS * member
        load_options = {"trust_remote_code": model.trust_remote_code, "training_dtype": model.dtype, "vision": model.vision}
        scalar_model = new_scalar_model(start, tokenizer, **load_options)
        if config.step_separator is not None:
            scalar_model.config.update({SEPARATOR_KEY: config.step_separator})
        if member:  # instead of zeros
            head = scalar_head(scalar_model).weight
            torch.nn.init.normal_(head, std=head.shape[1] ** -0.5, generator=torch.Generator().manual_seed(member_seed))
        if not encoded:
            shared = 0 if sight is not None else shared_tokens(scalar_model, config, max_length=model.max_length)
            encoded = {split: encode(shared) for split, encode in begun.items()}
            heldout = {split: list(encoded[split][0]) for split in HELDOUT_SPLITS}  # as objects, since they are read at every evaluation
        engine, of_member = train_member(
            scalar_model, task, encoded["train"], heldout["validation"], member=member, dtype=model.dtype, seed=member_seed, loop=loop
        )
        metrics |= of_member if member == 0 else {f"{name}_member_{member}": of_member[name] for name in MEASURED if name in of_member}
        if of_member["steps"] < metrics["steps"]:  # of fewer steps than the members before, by max_minutes
            metrics |= {name: of_member[name] for name in ("steps", "epochs", "planned_steps", "ended_by")}
        engine.eval()
        pad_id = filler_id(engine.module.model)
        scores.append({split: task.score(engine, heldout[split], pad_id=pad_id) for split in HELDOUT_SPLITS if heldout[split]})
        save(scalar_model, engine.state_dict(), tokenizer, part=f"member_{member}" if member else "")
    if not is_first():
        return metrics, None
    table = heldout_table(task, scores, heldout, read_split)
    return metrics | {task.counted: len(table)}, table


def shared_tokens(model: PreTrainedModel, config: RewardConfig, *, max_length: int) -> int:
    """Return the length of the longest row in which responses share their prompt; 0 if the model can't compute such rows."""
    if probe_score_head(model).per_token and shares_prefixes(model, device=device(), max_length=max_length):
        return config.microbatch_tokens
    log.info("train_reward: prompts are computed for each response: prefix sharing takes a CPU and a model with scores of tokens")
    return 0


def train_member(
    model: PreTrainedModel,
    task: PairTask | StepTask,
    encoded: tuple[Sequence[Any], int],
    heldout: Sequence[Any],
    *,
    member: int,
    dtype: str,
    seed: int,
    loop: Callable[..., TrainLoop],
) -> tuple[TrainEngine, dict[str, Any]]:
    """Train one member. Its steps in the curves follow those of the members before it; its time is an equal share of max_minutes.

    Args:
        encoded: training examples, and the number of rows that were dropped as too long.
    """
    (examples, dropped), config = encoded, task.config
    phase = task.phase(
        examples,
        heldout,
        name=f"reward_member_{member}" if member else "reward",
        steps=config.steps_over(len(examples), per_step=config.batch_size),
        batch_size=config.batch_size,
        pad_id=filler_id(model),
    )
    settings = engine_settings(config, steps=phase.steps, learning_rate=config.learning_rate, dtype=dtype, seed=seed)
    add_adapters(model, config.lora, seed=seed)
    module = ScalarModule(model)
    if config.step_separator is not None:
        module.check_scores_tokens("train_reward", "set reward.step_separator to null, or take another model")
    engine = TrainEngine(module, settings)
    own_loop = loop(first_step=member * phase.steps, seed=seed)
    minutes = own_loop.max_minutes and own_loop.max_minutes / config.ensemble
    found = train_phase(engine, phase, replace(own_loop, max_minutes=minutes))
    return engine, {"trained": True, **task.counts(examples), "dropped_too_long": dropped} | found


def heldout_table(
    task: PairTask | StepTask, members: list[Scores], heldout: dict[str, list[Any]], read_split: Callable[[str], Rows]
) -> pd.DataFrame:
    """Return a row for each validation and test row with mean and standard deviation of the members' scores; no rows without members."""
    found = []
    for split, examples in heldout.items():
        if examples:
            of_split = [torch.stack(values, 1) for values in zip(*(scores[split] for scores in members), strict=True)]
            found += task.rows(split, of_split, examples, {row["id"]: row for row in read_split(split)})
    return task.table(found)


class PairTask:
    """How a reward model learns from pairs: rows to examples, the phase of training, held-out scores and their table.

    counted: name of the metric with the number of held-out rows.
    """

    counted = "heldout_pairs"

    def __init__(self, config: RewardConfig, tokenizer: PreTrainedTokenizerBase, *, max_length: int, sight: Sight | None = None):
        self.config, self._tokenizer, self._max_length, self._sight = config, tokenizer, max_length, sight

    def begin(self, rows: Rows, begin: Begin) -> Callable[[int], tuple[Sequence[Comparison], int]]:
        return begin_comparisons(rows, self._tokenizer, max_length=self._max_length, begin=begin)

    def phase(self, train: Sequence[Comparison], heldout: Sequence[Comparison], **settings: Any) -> Phase:
        config = self.config
        of_pairs = {"margin": config.margin, "centering_coef": config.centering_coef}
        return reward_phase(train, heldout, microbatch_tokens=config.microbatch_tokens, sight=self._sight, **of_pairs, **settings)

    def score(self, engine: TrainEngine, heldout: Sequence[Comparison], *, pad_id: int) -> tuple[torch.Tensor, ...]:
        return score_heldout(engine, heldout, pad_id=pad_id, microbatch_tokens=self.config.microbatch_tokens, sight=self._sight)

    def counts(self, train: Sequence[Comparison]) -> dict[str, int]:
        return {"pairs": sum(len(c.pairs) for c in train)}

    def rows(self, split: str, scores: Sequence[torch.Tensor], comparisons: Sequence[Comparison], by_id: dict[str, dict]) -> list[tuple]:
        """Rows of `table`.

        Args:
            scores: of chosen and rejected, [N, members] each.
        """
        pairs = [(c, pair, by_id[row_id]) for c in comparisons for pair, row_id in zip(c.pairs, c.row_ids, strict=True)]
        prompt_tokens = map(len, encode_prompts(self._tokenizer, [row["messages"] for _, _, row in pairs]))
        (chosen, chosen_std), (rejected, rejected_std) = (combine_members(side, std_coef=0.0) for side in scores)
        values = zip(*(of.tolist() for of in (chosen, rejected, chosen_std, rejected_std)), strict=True)
        found = []
        for (c, (a, b), row), (of_chosen, of_rejected, *stds), tokens in zip(pairs, values, prompt_tokens, strict=True):
            lengths = len(c.sequences[a]), len(c.sequences[b]), prompt_name(row["messages"]), tokens
            found.append((row["id"], row["source"], split, of_chosen, of_rejected, *lengths, *stds))
        return found

    def table(self, rows: list[tuple]) -> pd.DataFrame:
        return as_heldout_table(rows)
