"""What a reward model is shown of a response."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf_core.models.tokenizer import encode_conversation

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
