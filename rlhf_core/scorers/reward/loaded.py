"""A reward model loaded from its folder, with its own tokenizer and template: scores of conversations and responses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from rlhf_core.config import ModelConfig, VisionTraining
from rlhf_core.data.schema import Message
from rlhf_core.data.tokens import beside_pictures, content_of
from rlhf_core.engines.deepspeed.ranks import in_shares
from rlhf_core.models.batch import padded_ends
from rlhf_core.models.folder import step_separator
from rlhf_core.models.forward import ScalarModule
from rlhf_core.models.steps import turn_step_ends
from rlhf_core.models.template import DEFAULT_DATE
from rlhf_core.models.tokenizer import encode_scored_turns, load_tokenizer
from rlhf_core.models.vision import Sight, sight
from rlhf_core.paths import PREPARED
from rlhf_core.progress import Reasons
from rlhf_core.scorers.reward.input import fitting_ids
from rlhf_core.scorers.reward.model import MICROBATCH_TOKENS, load_members, score_by_members

Text = tuple[Sequence[Message], str]  # a conversation and a response to it


def reward_options(model: ModelConfig) -> dict[str, Any]:
    """Return the arguments of `LoadedModel.load` for a chain's reward model."""
    return {name: getattr(model, name) for name in ("max_length", "trust_remote_code", "template_date", "vision")}


def _unreported(reason: str, *, count: int) -> None:
    """Ignore a refusal that a probe provokes; takes the place of a report."""


@dataclass(frozen=True)
class LoadedModel:
    """Every member of a reward model, with its tokenizer. Scores are the members' mean."""

    members: list[ScalarModule]
    tokenizer: PreTrainedTokenizerBase
    max_length: int
    device: torch.device
    report: Reasons = field(default_factory=lambda: Reasons("reward model"))
    separator: str | None = None  # between the steps that a process reward model scores; None: it scores whole responses
    sight: Sight | None = None  # of a model that sees
    _known: dict[Any, float] = field(default_factory=dict, init=False, repr=False)  # scores by token ids

    @classmethod
    def load(
        cls,
        folder: Path,
        *,
        max_length: int,
        trust_remote_code: bool,
        template_date: str = DEFAULT_DATE,
        vision: VisionTraining | None = None,
        prepared: Path = PREPARED,
    ) -> LoadedModel:
        """Load a reward model.

        Args:
            vision: of a model that sees; `prepared` is the folder with its pictures.
        """
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        members = load_members(folder, device=device, trust_remote_code=trust_remote_code)
        options = {"trust_remote_code": trust_remote_code, "template_date": template_date, "vision": vision}
        tokenizer = load_tokenizer(str(folder), scores=True, **options)
        return cls(members, tokenizer, max_length, device, separator=step_separator(folder), sight=sight(tokenizer, prepared))

    def encode(self, messages: Sequence[Message], response: str, *, max_length: int | None = None) -> list[int] | None:
        """Return token ids; None if there are more than the limit, or the template refuses the conversation."""
        own = max_length is None  # another limit is a probe's, which provokes refusals
        limit = self.max_length if own else max_length
        return fitting_ids(self.tokenizer, [(messages, response)], max_length=limit, report=self.report if own else _unreported)[0]

    def score_steps(self, texts: Sequence[Text]) -> list[tuple[list[float], list[float]] | None]:
        """Return the mean and the standard deviation over the members of each step's score; None for a text without ids.

        Ranks share the texts as in `score_texts`.
        """
        return in_shares(texts, self._score_own_steps)

    def _score_own_steps(self, texts: Sequence[Text]) -> list[tuple[list[float], list[float]] | None]:
        assert self.separator is not None
        sequences = [self.encode(messages, response) for messages, response in texts]
        ends = [
            None if ids is None else turn_step_ends(encode_scored_turns(self.tokenizer, [text]), 0, self.tokenizer, self.separator)
            for text, ids in zip(texts, sequences, strict=True)
        ]
        scores = score_by_members(
            self.members,
            sequences,
            ends=padded_ends(ends),
            pad_id=self.tokenizer.pad_token_id,
            microbatch_tokens=MICROBATCH_TOKENS,
            device=self.device,
        ).double()
        of_texts = zip(scores.mean(1).tolist(), scores.std(1, correction=0).tolist(), ends, strict=True)
        return [None if own is None or np.isnan(means[0]) else (means[: len(own)], stds[: len(own)]) for means, stds, own in of_texts]

    def score(self, sequences: Sequence[list[int] | None], *, microbatch_tokens: int = MICROBATCH_TOKENS) -> np.ndarray:
        """Return scores [len(sequences)]; NaN for a sequence that is None."""
        return score_by_members(
            self.members,
            list(sequences),
            pad_id=self.tokenizer.pad_token_id,
            microbatch_tokens=microbatch_tokens,
            device=self.device,
            sight=self.sight,
        ).double().mean(1).numpy()  # fmt: skip

    def score_texts(self, texts: Sequence[Text], *, reported: bool = True) -> np.ndarray:
        """Return scores [len(texts)]. Each distinct text is scored once over all calls. Ranks share the texts; each rank passes all of
        them.

        Args:
            reported: whether texts without ids are logged.
        """
        limit = None if reported else self.max_length
        return self.score_once([self.encode(messages, response, max_length=limit) for messages, response in texts])

    def score_pairs(self, rows: Sequence[dict]) -> tuple[np.ndarray, np.ndarray]:
        """Return scores [len(rows)] of `chosen` and of `rejected`, computed together, since both have the same prompt."""
        texts = [(row["messages"], row[side]) for side in ("chosen", "rejected") for row in rows]
        chosen, rejected = self.score_texts(texts).reshape(2, -1)
        return chosen, rejected

    def score_once(self, sequences: Sequence[list[int] | None]) -> np.ndarray:
        """Return scores [len(sequences)], computed in large batches and remembered for later calls; NaN for a sequence that is None.

        Ranks share the sequences as in `score_texts`.
        """
        keys = [None if ids is None else content_of(ids) for ids in sequences]
        new = [key for key in dict.fromkeys(keys) if key is not None and key not in self._known]
        scores = in_shares([beside_pictures(list(ids), pictures) for ids, pictures in new], lambda own: self.score(own).tolist())
        self._known.update(zip(new, scores, strict=True))
        return np.array([np.nan if key is None else self._known[key] for key in keys])
