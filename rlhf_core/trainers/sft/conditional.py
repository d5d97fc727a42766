"""Conditional SFT: trains on responses of every quality with the quality in the prompt; the policy is then prompted with the wanted
quality.

Source: SteerLM, Dong et al. 2023, https://arxiv.org/abs/2310.05344, here with one attribute. Decision Transformer conditions on the return
likewise, Chen et al. 2021, https://arxiv.org/abs/2106.01345.
"""

from __future__ import annotations

import bisect
import copy
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from rlhf_core.config import ConditionalSftConfig
from rlhf_core.data.schema import Message, with_text_behind
from rlhf_core.engines.deepspeed.engine import device
from rlhf_core.engines.deepspeed.ranks import in_shares, on_any
from rlhf_core.models.template import DEFAULT_DATE
from rlhf_core.models.tokenizer import load_tokenizer
from rlhf_core.process import Interrupted
from rlhf_core.progress import Reasons
from rlhf_core.scorers.reward.input import fitting_ids
from rlhf_core.scorers.reward.members import combine_members
from rlhf_core.scorers.reward.model import MICROBATCH_TOKENS, load_members, score_by_members
from rlhf_core.trainers.supervised.demonstrations import Demonstration, encode_demonstrations

if TYPE_CHECKING:
    from rlhf_core.stage.training import TrainRun

SCORED_AT_ONCE = 4096  # responses; a stop is checked between such parts

# Goes before an unchanged template and rewrites its `messages`. The line break at its end isn't printed (trim_blocks).
_ASKING = """\
{%- set asked = namespace(last=-1, messages=[]) -%}
{%- for message in messages -%}{%- if message['role'] == 'user' -%}{%- set asked.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for message in messages -%}
{%- set content = message['content'] -%}
{%- if loop.index0 != asked.last or (content is string and content.endswith(ENDINGS)) -%}
{%- set asked.messages = asked.messages + [message] -%}
{%- elif content is string -%}
{%- set asked.messages = asked.messages + [dict(message, content=content + WANTED)] -%}
{%- else -%}
{%- set asked.messages = asked.messages + [dict(message, content=content + [{'type': 'text', 'text': WANTED}])] -%}
{%- endif -%}
{%- endfor -%}
{%- set messages = asked.messages %}
"""


@dataclass(frozen=True)
class RatedResponse:
    """A response to a conversation, with the number of pairs in which it is chosen (wins) and rejected (losses)."""

    messages: list[Message]
    text: str
    wins: int
    losses: int


def rated_responses(rows: list[dict]) -> list[RatedResponse]:
    """Return every distinct response of each conversation, in order of first appearance, from rows with messages, chosen and rejected.

    Unpaired rows count: one side of them is null.
    """
    conversations: dict[tuple[str, str], list[Message]] = {}
    counts: dict[tuple[str, str], list[int]] = {}
    for row in rows:
        conversation = json.dumps(row["messages"])
        for side, text in enumerate((row["chosen"], row["rejected"])):
            if text is not None:
                conversations.setdefault((conversation, text), row["messages"])
                counts.setdefault((conversation, text), [0, 0])[side] += 1
    return [RatedResponse(messages, text, *counts[key, text]) for (key, text), messages in conversations.items()]


def preference_level(response: RatedResponse) -> int | None:
    """Return 1 if the response is preferred more often than not, 0 if less often, and None if neither."""
    return None if response.wins == response.losses else int(response.wins > response.losses)


def quantile_borders(scores: list[float], levels: int) -> list[float]:
    """Return the `levels` - 1 scores that cut the finite ones into levels of equal size.

    Raises:
        ValueError: no score is finite.
    """
    known = [s for s in scores if math.isfinite(s)]
    if not known:
        raise ValueError(f"quality levels: expected scores of {len(scores)} responses, got none; raise model.max_length")
    return [float(b) for b in np.quantile(known, [k / levels for k in range(1, levels)])]


def score_level(score: float, borders: list[float]) -> int | None:
    """Return how many borders the score reaches; None without a score."""
    return bisect.bisect_right(borders, score) if math.isfinite(score) else None


def reward_scores(
    reward_model: Path,
    responses: list[RatedResponse],
    *,
    max_length: int,
    trust_remote_code: bool,
    dtype: str = "float32",
    template_date: str = DEFAULT_DATE,
    stop_requested: Callable[[], bool],
) -> list[float]:
    """Return a reward model's raw scores, the mean of an ensemble's; NaN if a conversation is too long or the template refuses it.

    Ranks share the responses; each rank passes all of them.

    Raises:
        Interrupted: a stop was requested.
    """
    tokenizer = load_tokenizer(str(reward_model), trust_remote_code=trust_remote_code, template_date=template_date, scores=True)
    members = load_members(
        reward_model, device=device(), trust_remote_code=trust_remote_code, training_dtype=dtype, dtype=getattr(torch, dtype)
    )
    report = Reasons("reward model")

    def score_own(own: list[RatedResponse]) -> list[float]:
        fitting = fitting_ids(tokenizer, ((r.messages, r.text) for r in own), max_length=max_length, report=report)
        pad_id = tokenizer.pad_token_id
        by_members = score_by_members(members, fitting, pad_id=pad_id, microbatch_tokens=MICROBATCH_TOKENS, device=device())
        return combine_members(by_members, std_coef=0.0)[0].tolist()

    scores: list[float] = []
    for start in range(0, len(responses), SCORED_AT_ONCE):
        if on_any(stop_requested()):
            raise Interrupted
        scores += in_shares(responses[start : start + SCORED_AT_ONCE], score_own)
    return scores


def quality_text(level: int) -> str:
    """Return the end of the last user message, which states a quality."""
    return f"\n[quality: {level}]"


def with_quality(messages: list[Message], level: int) -> list[Message]:
    """Return the conversation with a quality stated at the end of its last user message."""
    last = max(i for i, message in enumerate(messages) if message["role"] == "user")
    rated = with_text_behind(messages[last], quality_text(level))
    return [*messages[:last], rated, *messages[last + 1 :]]


def asking_template(template: str, *, levels: int, wanted: int) -> str:
    """Return a chat template that adds the wanted quality to the last user message, unless the message states one."""
    endings = ", ".join(_jinja_string(quality_text(level)) for level in range(levels))
    return _ASKING.replace("ENDINGS", f"({endings})").replace("WANTED", _jinja_string(quality_text(wanted))) + template


def asking_tokenizer(tokenizer: PreTrainedTokenizerBase, *, levels: int, wanted: int) -> PreTrainedTokenizerBase:
    """Return a copy of the tokenizer whose template adds the wanted quality, so that users of the policy don't have to."""
    asking = copy.deepcopy(tokenizer)
    asking.chat_template = asking_template(tokenizer.chat_template, levels=levels, wanted=wanted)
    return asking


def _jinja_string(text: str) -> str:
    return "'" + text.replace("\n", "\\n") + "'"


def quality_levels(
    responses: dict[str, list[RatedResponse]],
    config: ConditionalSftConfig,
    reward_model: Path,
    *,
    infer: Callable[..., Any],
) -> tuple[dict[str, list[int | None]], list[float]]:
    """Return the level of each response of each split (None: it has none), and the scores of the training split at which a level ends.

    Args:
        infer: function that calls its first argument with a TrainRun and the further arguments, on every rank that scores.
    """
    if config.label_by == "preference":
        return {split: [preference_level(r) for r in rated] for split, rated in responses.items()}, []
    scores = infer(score_splits, responses, reward_model)
    borders = quantile_borders(scores["train"], config.levels)
    return {split: [score_level(s, borders) for s in found] for split, found in scores.items()}, borders


def score_splits(run: TrainRun, responses: dict[str, list[RatedResponse]], reward_model: Path) -> dict[str, list[float]]:
    """Return on each rank the scores of each split's responses, which the ranks share."""
    model = run.params.model
    options = {"max_length": model.max_length, "trust_remote_code": model.trust_remote_code, "dtype": model.dtype}
    options |= {"template_date": model.template_date, "stop_requested": run.stop_requested}
    return {split: reward_scores(reward_model, rated, **options) for split, rated in responses.items()}


def encode_with_levels(
    tokenizer: PreTrainedTokenizerBase,
    responses: list[RatedResponse],
    levels: list[int | None],
    *,
    max_length: int,
    train_on_thoughts: bool,
) -> tuple[list[Demonstration], int]:
    """Return demonstrations of the responses that have a level, and the number of them that were too long.

    Earlier turns, which have no level, aren't trained on.
    """
    rows = [
        {"messages": with_quality(r.messages, level), "response": r.text}
        for r, level in zip(responses, levels, strict=True)
        if level is not None
    ]
    return encode_demonstrations(rows, tokenizer, max_length=max_length, train_on_thoughts=train_on_thoughts)
