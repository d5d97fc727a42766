"""Which prompts are sampled for, and in which order."""

from __future__ import annotations

import logging
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_core.config import Params, RlConfig, number_of
from rlhf_core.data.batching import batch_indices
from rlhf_core.data.schema import read_rows, read_slices, with_text
from rlhf_core.paths import PREPARED
from rlhf_core.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger("rlhf")


def fitting_prompts(
    rows: list[dict], tokenizer: PreTrainedTokenizerBase, *, longest: int, what: str = "prompts", teacher_template: str | None = None
) -> list[Prompt]:
    """Return the prompts of at most `longest` tokens, in the order of the rows. The log says how many are left out.

    Args:
        rows: of the use prompt (rlhf_core.data.schema).
        tokenizer: of the model that will respond; its template renders the prompt.
        what: names the prompts in the message.
        teacher_template: of rl.distillation; what teachers read then is at most as long too.
    Raises:
        ValueError: every prompt is longer, or the template needs a label or a user's message that one lacks.
    """
    from rlhf_core.models.tokenizer import encode_prompts

    ids = encode_prompts(tokenizer, [r["messages"] for r in rows])
    prompts = [Prompt(r["id"], r["source"], r["messages"], i, r["label"]) for r, i in zip(rows, ids, strict=True)]
    if teacher_template is not None:
        taught = encode_prompts(tokenizer, [teacher_messages(row, teacher_template) for row in rows])
        prompts = [replace(prompt, teacher_ids=of_teacher) for prompt, of_teacher in zip(prompts, taught, strict=True)]
    fitting = [p for p in prompts if max(len(p.prompt_ids), len(p.teacher_ids or ())) <= longest]
    if not fitting:
        raise ValueError(f"{what}: expected some of at most {longest} tokens, got none of {len(rows)}; raise model.max_length")
    if left := len(prompts) - len(fitting):
        log.warning("%s: %d of %d have more than %d tokens, which leaves no room for a response: left out", what, left, len(rows), longest)
    return fitting


def teacher_messages(row: dict, template: str) -> list[dict[str, str]]:
    """Return the conversation that teachers read: the template, filled, in place of the last user message.

    Raises:
        ValueError: there is no such message, or no label for the template.
    """
    key, messages = "rl.distillation.teacher_template", row["messages"]
    place = max((n for n, message in enumerate(messages) if message["role"] == "user"), default=None)
    if place is None:
        raise ValueError(f"{key}: expected a user's message in every prompt, got none in {row['id']} of source {row['source']}; remove it")
    if "{label}" in template and row["label"] is None:
        raise ValueError(
            f"{key}: expected a label of every training prompt, got none of {row['id']} of source {row['source']}; map the source's "
            "column with the solution to `label`"
        )
    values = {"{prompt}": messages[place]["content"], "{label}": row["label"]}
    filled = re.sub(r"\{prompt\}|\{label\}", lambda found: values[found[0]], template)
    return [*messages[:place], with_text(messages[place], filled), *messages[place + 1 :]]


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
        ValueError: another setting doesn't fit that number, no prompt leaves room for a response, or one lacks what teachers are to read.
    """
    rl, model = params.rl, params.model
    for row in read_rows(PREPARED, "prompt", "train") if rl.teacher_template is not None else ():
        teacher_messages(row, rl.teacher_template)
    given = rl.steps is not None
    if given:
        log.info("rl: rl.steps %d replaces rl.epochs; passes over each rollout batch are rl.ppo_epochs %d", rl.steps, rl.ppo_epochs)
    if given and rl.curriculum is None:
        return rl
    from rlhf_core.models.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(str(tokenizer_folder), trust_remote_code=model.trust_remote_code, vision=model.vision)
    rows, longest = read_rows(PREPARED, "prompt", "train"), model.max_length - rl.rollout.max_new_tokens
    how = {"what": "prompts of the train split", "teacher_template": rl.teacher_template}
    fitting = fitting_prompts(rows, tokenizer, longest=longest, **how)
    difficulties(PREPARED, fitting, rl)
    prompts = len(fitting)
    rl = rl.over_prompts(prompts)
    if given:
        return rl
    steps, epochs = number_of(rl.steps, "step"), number_of(rl.epochs, "epoch")
    log.info("rl: %s of %s, %s of %d prompts", steps, number_of(rl.rollout_batch_size, "prompt"), epochs, prompts)
    return rl
