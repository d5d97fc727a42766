"""Which prompts are sampled for, and in which order."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_core.config import Params, RlConfig, number_of
from rlhf_core.data.batching import batch_indices
from rlhf_core.data.schema import read_rows, read_slices
from rlhf_core.paths import PREPARED
from rlhf_core.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger("rlhf")


def fitting_prompts(rows: list[dict], tokenizer: PreTrainedTokenizerBase, *, longest: int, what: str = "prompts") -> list[Prompt]:
    """Return the prompts of at most `longest` tokens, in the order of the rows. The log says how many are left out.

    Args:
        rows: of the use prompt (rlhf_core.data.schema).
        tokenizer: of the model that will respond; its template renders the prompt.
        what: names the prompts in the message.
    Raises:
        ValueError: every prompt is longer.
    """
    from rlhf_core.models.tokenizer import encode_prompts

    ids = encode_prompts(tokenizer, [r["messages"] for r in rows])
    prompts = [Prompt(r["id"], r["source"], r["messages"], i, r["label"]) for r, i in zip(rows, ids, strict=True)]
    fitting = [p for p in prompts if len(p.prompt_ids) <= longest]
    if not fitting:
        raise ValueError(f"{what}: expected some of at most {longest} tokens, got none of {len(rows)}; raise model.max_length")
    if left := len(prompts) - len(fitting):
        log.warning("%s: %d of %d have more than %d tokens, which leaves no room for a response: left out", what, left, len(rows), longest)
    return fitting


def choose_prompts(rows: list[dict], tokenizer: PreTrainedTokenizerBase, *, longest: int, count: int | None, seed: int) -> list[Prompt]:
    """Return the first `count` (None: all) of the prompts of at most `longest` tokens, in a seeded order. Raises as `fitting_prompts`."""
    prompts = fitting_prompts(rows, tokenizer, longest=longest)
    order = batch_indices(0, batch_size=len(prompts), num_examples=len(prompts), seed=seed)
    return [prompts[i] for i in order[:count]]


def difficulties(prepared: Path, prompts: list[Prompt], rl: RlConfig) -> dict[str, float] | None:
    """Return each prompt's value of the curriculum's column, by id; None without one.

    Raises:
        ValueError: a prompt has none, or one that isn't a finite number.
    """
    if rl.curriculum is None or rl.curriculum.column is None:
        return None
    column, slices = rl.curriculum.column, read_slices(prepared)
    values = {prompt.id: _number(slices.get(prompt.id, {}).get(column)) for prompt in prompts}
    if wrong := [prompt for prompt in prompts if values[prompt.id] is None]:
        got, source = slices.get(wrong[0].id, {}).get(column, "none"), wrong[0].source
        raise ValueError(
            f"rl.curriculum.column: expected a number in {column!r} for every training prompt, got {got!r} for {len(wrong)} of "
            f"{len(prompts)}, the first from source {source}; name the column in the slices of each source of prompts"
        )
    return values


def _number(text: str | None) -> float | None:
    try:
        value = float(text)
    except (TypeError, ValueError):
        return None
    return value if math.isfinite(value) else None


def with_steps(params: Params, tokenizer_folder: Path) -> RlConfig:
    """Return the section rl with a number of steps, which its epochs over the training prompts may give; checked against their number.

    Raises:
        ValueError: another setting doesn't fit that number, or no prompt leaves room for a response.
    """
    rl, model = params.rl, params.model
    given = rl.steps is not None
    if given:
        log.info("rl: rl.steps %d replaces rl.epochs; passes over each rollout batch are rl.ppo_epochs %d", rl.steps, rl.ppo_epochs)
    if given and rl.curriculum is None:
        return rl
    from rlhf_core.models.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(str(tokenizer_folder), trust_remote_code=model.trust_remote_code)
    rows, longest = read_rows(PREPARED, "prompt", "train"), model.max_length - rl.rollout.max_new_tokens
    fitting = fitting_prompts(rows, tokenizer, longest=longest, what="prompts of the train split")
    difficulties(PREPARED, fitting, rl)
    prompts = len(fitting)
    rl = rl.over_prompts(prompts)
    if given:
        return rl
    steps, epochs = number_of(rl.steps, "step"), number_of(rl.epochs, "epoch")
    log.info("rl: %s of %s, %s of %d prompts", steps, number_of(rl.rollout_batch_size, "prompt"), epochs, prompts)
    return rl
