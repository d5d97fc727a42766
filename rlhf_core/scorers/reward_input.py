"""What a reward model is shown of a response: its own template's rendering of the conversation, which is what it was trained on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from rlhf_core.data.schema import Message
from rlhf_core.models.tokenizer import Unrenderable, copies_response, encode_scored, turn_end
from rlhf_core.scorers.reasons import Reasons

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlhf_core.types import Prompt


def scored_ids(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], response: str, *, finished: bool = True) -> list[int]:
    """Token ids of a conversation and a response to it, for a reward model with this tokenizer.

    One that was cut off gets no end of its turn, and nothing of what comes behind that: it must not look finished.

    Raises:
        Unrenderable: the template doesn't take the conversation.
    """
    ids, end = encode_scored(tokenizer, messages, response), turn_end(tokenizer)
    return ids if finished else ids[: len(ids) - len(end.trained) - len(end.after)]


def fitting_ids(
    tokenizer: PreTrainedTokenizerBase, texts: Iterable[tuple[Sequence[Message], str]], *, max_length: int, report: Reasons
) -> list[list[int] | None]:
    """Token ids of finished responses, None for one without a score, for a reason that is reported: too long or not rendered.

    Args:
        texts: conversations and responses to them.
    """
    reasons: Counter[str] = Counter()
    found = [_or_reason(lambda m=m, t=t: scored_ids(tokenizer, m, t), max_length, reasons) for m, t in texts]
    _tell(reasons, report)
    return found


def without_stop(response_ids: list[int], stops: Collection[int], *, finished: bool) -> list[int]:
    """A sampled response but for the token that ended it, if one of these did: it is no part of what is said, special or not."""
    return response_ids[:-1] if finished and response_ids and response_ids[-1] in stops else response_ids


class RewardModelInput:
    """Turns a conversation and a sampled response into what the reward model was trained on.

    Where both models share a tokenizer and a template that copies responses, the ids are used as they are; otherwise the response is
    decoded and encoded again as the reward model's template writes it. A finished response ends as that template ends a turn, whatever
    ended it when it was sampled: a stop string stays a part of the response, another end token doesn't.

    Args:
        stops: tokens that end the policy's responses (`stop_ids`), special or not.
        report: is told why responses have no score.
    Raises:
        ValueError: the reward model's template doesn't write a question and its answer.
    """

    def __init__(
        self,
        policy_tokenizer: PreTrainedTokenizerBase,
        reward_tokenizer: PreTrainedTokenizerBase,
        *,
        max_length: int,
        stops: Collection[int] = (),
        report: Reasons | None = None,
    ):
        self._policy_tokenizer = policy_tokenizer
        self._reward_tokenizer = reward_tokenizer
        self._max_length = max_length
        self._report = Reasons("reward model") if report is None else report
        self._end = turn_end(reward_tokenizer)
        self._copies = _fingerprint(policy_tokenizer) == _fingerprint(reward_tokenizer) and copies_response(reward_tokenizer)
        self._named_stops = frozenset(stops)
        self._stops = _stopping(policy_tokenizer) | self._named_stops

    def sequences(self, responses: Iterable[tuple[Prompt, list[int], bool]]) -> list[list[int] | None]:
        """Token ids for the reward model, of each prompt, sampled response and whether that is finished; None: it can't be scored."""
        reasons: Counter[str] = Counter()
        found = [
            _or_reason(lambda r=r: self._sequence(r[0].messages, r[0].prompt_ids, r[1], finished=r[2]), self._max_length, reasons)
            for r in responses
        ]
        _tell(reasons, self._report)
        return found

    def _sequence(self, messages: Sequence[Message], prompt_ids: list[int], response_ids: list[int], *, finished: bool) -> list[int]:
        if not self._copies:
            said = without_stop(response_ids, self._named_stops, finished=finished)
            text = self._policy_tokenizer.decode(said, skip_special_tokens=True)
            return scored_ids(self._reward_tokenizer, messages, text, finished=finished)
        if not finished:
            return [*prompt_ids, *response_ids]
        return [*prompt_ids, *self._without_end(response_ids), *self._end.trained, *self._end.after]

    def _without_end(self, response_ids: list[int]) -> list[int]:
        trained = len(self._end.trained)
        if trained and tuple(response_ids[-trained:]) == self._end.trained:
            return response_ids[:-trained]
        return response_ids[:-1] if self._stops.intersection(response_ids[-1:]) else response_ids


def _or_reason(encode, max_length: int, reasons: Counter[str]) -> list[int] | None:
    try:
        ids = encode()
    except Unrenderable as error:
        reasons[str(error)] += 1
        return None
    if len(ids) > max_length:
        reasons[f"more than {max_length} tokens: model.max_length allows no more"] += 1
        return None
    return ids


def _tell(reasons: Counter[str], report: Reasons) -> None:
    for reason, count in reasons.items():
        report(reason, count=count)


def _stopping(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Tokens that may end a response without being a part of it: special ones. Others that were added, such as one that closes a call of
    a tool, are what is said, also where a stop string ends with them.
    """
    added = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    return {*tokenizer.all_special_ids, *added}


def _fingerprint(tokenizer: PreTrainedTokenizerBase) -> tuple[str, int | None, str | None]:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    vocabulary = backend.to_str() if backend is not None else str(sorted(tokenizer.get_vocab().items()))
    return vocabulary, tokenizer.eos_token_id, tokenizer.chat_template
