"""A reward model's scores of pairs, as whoever uses the model would get them: loaded from its folder, outside training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from rlhf_core.data.schema import Message
from rlhf_core.models.forward import ScalarModule
from rlhf_core.models.template import DEFAULT_DATE
from rlhf_core.models.tokenizer import load_tokenizer
from rlhf_core.scorers.reasons import Reasons
from rlhf_core.scorers.reward_input import fitting_ids
from rlhf_core.scorers.reward_model import load_members, score_by_members

MICROBATCH_TOKENS = 8192

Text = tuple[Sequence[Message], str]  # a conversation and a response to it


def _untold(reason: str, *, count: int) -> None:
    """For refusals that are asked for."""


@dataclass(frozen=True)
class LoadedModel:
    """Every member of a reward model, ready to be asked."""

    members: list[ScalarModule]
    tokenizer: PreTrainedTokenizerBase
    max_length: int
    device: torch.device
    report: Reasons = field(default_factory=lambda: Reasons("gate"))

    @classmethod
    def load(cls, folder: Path, *, max_length: int, trust_remote_code: bool, template_date: str = DEFAULT_DATE) -> LoadedModel:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        members = load_members(folder, device=device, trust_remote_code=trust_remote_code)
        tokenizer = load_tokenizer(str(folder), trust_remote_code=trust_remote_code, template_date=template_date, scores=True)
        return cls(members, tokenizer, max_length, device)

    def encode(self, messages: Sequence[Message], response: str, *, max_length: int | None = None) -> list[int] | None:
        """Token ids; None: longer than the limit, or the template doesn't take the conversation."""
        own = max_length is None  # another limit is a probe's, whose refusals are what it looks for
        limit = self.max_length if own else max_length
        return fitting_ids(self.tokenizer, [(messages, response)], max_length=limit, report=self.report if own else _untold)[0]

    def score(self, sequences: Sequence[list[int] | None], *, microbatch_tokens: int = MICROBATCH_TOKENS) -> np.ndarray:
        """[len(sequences)] the members' mean; NaN where a sequence is None."""
        return score_by_members(
            self.members,
            list(sequences),
            pad_id=self.tokenizer.pad_token_id,
            microbatch_tokens=microbatch_tokens,
            device=self.device,
        ).double().mean(1).numpy()  # fmt: skip

    def score_texts(self, texts: Sequence[Text], *, told: bool = True) -> np.ndarray:
        """[len(texts)], each distinct one scored once.

        Args:
            told: False: nothing is said of those that are too long.
        """
        position: dict[tuple[int, ...] | None, int] = {}
        places = []
        for messages, response in texts:
            ids = self.encode(messages, response, max_length=None if told else self.max_length)
            places.append(position.setdefault(None if ids is None else tuple(ids), len(position)))
        scores = self.score([None if ids is None else list(ids) for ids in position])
        return scores[places] if places else np.zeros(0)
