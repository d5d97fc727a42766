"""Scores by a reward model: what it is shown, and how it is asked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from rlhf_core.data.batching import microbatches
from rlhf_core.models.build import load_scalar_model
from rlhf_core.models.tokenizer import encode_conversation
from rlhf_core.models.wrappers import ScalarModule, collate_tokens
from rlhf_core.scorers.members import member_folders


class RewardModelInput:
    """Turns a conversation and a sampled response into what the reward model was trained on.

    The ids are used as they are where both models share a tokenizer and template; otherwise the response is decoded and
    encoded again with the reward model's own. A response that was cut off gets no end token: it must not look finished.
    """

    def __init__(self, policy_tokenizer: PreTrainedTokenizerBase, reward_tokenizer: PreTrainedTokenizerBase, *, max_length: int):
        self._policy_tokenizer = policy_tokenizer
        self._reward_tokenizer = reward_tokenizer
        self._max_length = max_length
        self._same = _fingerprint(policy_tokenizer) == _fingerprint(reward_tokenizer)

    def sequence(
        self, messages: list[dict[str, str]], prompt_ids: list[int], response_ids: list[int], *, finished: bool
    ) -> list[int] | None:
        """Token ids for the reward model; None: too long for it, so it can't say."""
        if self._same:
            ids = [*prompt_ids, *response_ids]
        else:
            text = self._policy_tokenizer.decode(response_ids, skip_special_tokens=True)
            ids, _ = encode_conversation(self._reward_tokenizer, messages, text)
            if not finished and ids[-1] == self._reward_tokenizer.eos_token_id:
                ids = ids[:-1]
        return ids if len(ids) <= self._max_length else None


def _fingerprint(tokenizer: PreTrainedTokenizerBase) -> tuple[str, int, str | None]:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    vocabulary = backend.to_str() if backend is not None else str(sorted(tokenizer.get_vocab().items()))
    return vocabulary, tokenizer.eos_token_id, tokenizer.chat_template


@torch.no_grad()
def score_sequences(
    module: ScalarModule, sequences: list[list[int] | None], *, pad_id: int, microbatch_tokens: int, device: torch.device
) -> torch.Tensor:
    """Raw scores [len(sequences)] on the CPU, read at the last token of each; NaN where the sequence is None.

    The same sequence gets the same score in any batch, up to rounding: attention is causal and padding comes after.
    """
    known = [i for i, ids in enumerate(sequences) if ids is not None]
    scores = torch.full((len(sequences),), float("nan"))
    for part in microbatches([len(sequences[i]) for i in known], max_tokens=microbatch_tokens):
        rows = [known[i] for i in part]
        batch = collate_tokens([sequences[i] for i in rows], [len(sequences[i]) - 1 for i in rows], pad_id=pad_id)
        scores[rows] = module(batch.to(device)).cpu()
    return scores


def load_members(
    folder: Path,
    *,
    device: torch.device,
    trust_remote_code: bool,
    count: int | None = None,
    training_dtype: str = "float32",
    dtype: torch.dtype = torch.float32,
) -> list[ScalarModule]:
    """The first `count` members of a reward model (None: all), for scoring alone; one where it is no ensemble."""
    how = {"trust_remote_code": trust_remote_code, "training_dtype": training_dtype}
    modules = (ScalarModule(load_scalar_model(member, **how)) for member in member_folders(folder)[:count])
    return [module.to(device=device, dtype=dtype).eval().requires_grad_(False) for module in modules]


def score_by_members(members: Sequence[ScalarModule], sequences: list[list[int] | None], **how: Any) -> torch.Tensor:
    """[len(sequences), members] raw scores on the CPU; NaN where the sequence is None. Args as of `score_sequences`."""
    return torch.stack([score_sequences(member, sequences, **how) for member in members], 1)


def combine_members(scores: torch.Tensor, *, std_coef: float) -> tuple[torch.Tensor, torch.Tensor]:
    """An ensemble's score, mean - std_coef * std over its members, and that std: how far they disagree. [N] each.

    std has the number of members in its denominator; with one member it is 0. Lower scores where the members disagree keep a policy from
    what only some of them like.
    Source: Coste et al. 2024, https://arxiv.org/abs/2310.02743, there with the variance; with the standard deviation
    Eisenstein et al. 2024, https://arxiv.org/abs/2312.09244

    Args:
        scores: [N, members].
    """
    std = scores.std(1, correction=0)
    return scores.mean(1) - std_coef * std, std
