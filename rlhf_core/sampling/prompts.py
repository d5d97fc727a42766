"""Which prompts are sampled for, and in which order."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from rlhf_core.data.batching import batch_indices
from rlhf_core.models.tokenizer import encode_prompts
from rlhf_core.types import Prompt


def fitting_prompts(rows: list[dict], tokenizer: PreTrainedTokenizerBase, *, longest: int, what: str = "prompts") -> list[Prompt]:
    """The prompts of at most `longest` tokens, in the order of the rows.

    Args:
        rows: of the use prompt (rlhf_core.data.schema).
        tokenizer: of the model that will respond; its template renders the prompt.
        what: names the prompts in the message.
    Raises:
        ValueError: every prompt is longer.
    """
    ids = encode_prompts(tokenizer, [r["messages"] for r in rows])
    prompts = [Prompt(r["id"], r["source"], r["messages"], i, r["label"]) for r, i in zip(rows, ids, strict=True)]
    fitting = [p for p in prompts if len(p.prompt_ids) <= longest]
    if not fitting:
        raise ValueError(f"{what}: expected some of at most {longest} tokens, got none of {len(rows)}; raise model.max_length")
    return fitting


def choose_prompts(rows: list[dict], tokenizer: PreTrainedTokenizerBase, *, longest: int, count: int | None, seed: int) -> list[Prompt]:
    """The first `count` (None: all) of the prompts of at most `longest` tokens, in a seeded order. Raises as `fitting_prompts`."""
    prompts = fitting_prompts(rows, tokenizer, longest=longest)
    order = batch_indices(0, batch_size=len(prompts), num_examples=len(prompts), seed=seed)
    return [prompts[i] for i in order[:count]]
