"""Makes the token ids that a reward model scores: conversation and response as its own template renders them, as in its training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from rlhf_core.data.pictures import pictures_of
from rlhf_core.data.schema import Message
from rlhf_core.data.tokens import beside_pictures
from rlhf_core.models.steps import step_ends, turn_step_ends
from rlhf_core.models.tokenizer import (
    Unrenderable,
    copies_response,
    encode_scored,
    encode_scored_turns,
    keeps_borders,
    response_text,
    turn_end,
)
from rlhf_core.models.vision import vision_of
from rlhf_core.progress import Reasons

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlhf_core.types import Prompt

T = TypeVar("T")


def scored_ids(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], response: str, *, finished: bool = True) -> list[int]:
    """Return the token ids of a conversation and a response, for a reward model with this tokenizer; beside pictures `SeenIds`.

    A truncated response has neither the end of its turn nor the text that the template writes after it, since it must not look finished.

    Raises:
        Unrenderable: the template refuses the conversation.
    """
    return encode_scored(tokenizer, messages, response, finished=finished)


def fitting_ids(
    tokenizer: PreTrainedTokenizerBase, texts: Iterable[tuple[Sequence[Message], str]], *, max_length: int, report: Reasons
) -> list[list[int] | None]:
    """Return the token ids of finished responses; None for a response that is too long or can't be rendered, which is reported.

    Args:
        texts: pairs of a conversation and a response.
    """
    reasons: Counter[str] = Counter()
    found = [_or_reason(lambda m=m, t=t: scored_ids(tokenizer, m, t), max_length, reasons) for m, t in texts]
    _tell(reasons, report)
    return found


def without_stop(response_ids: list[int], stops: Collection[int], *, finished: bool) -> list[int]:
    """Return the response without its last token, if that is one of `stops` and ended the response."""
    return response_ids[:-1] if finished and response_ids and response_ids[-1] in stops else response_ids


class StepSequence(NamedTuple):
    """Token ids for a process reward model.

    ends: positions in `ids` of the tokens that end a step.    own: the same tokens' positions in the sampled response.
    """

    ids: list[int]
    ends: list[int]
    own: list[int]


class RewardModelInput:
    """Turns conversations and sampled responses into token ids for a reward model.

    The sampled ids are used if policy and reward model share a tokenizer and a template, the template copies responses, and no tokens join
    across its borders. Otherwise the response is decoded, and encoded again by the reward model's template. A finished response gets the
    end that this template gives a turn: a stop string stays in the response, an end token doesn't.

    Args:
        stops: the policy's `stop_ids`, whether they are special tokens or not.
        report: function that gets the reasons why responses have no ids.
        separator: of a process reward model.
    Raises:
        ValueError: the reward model's template doesn't render a question and its answer.
    """

    def __init__(
        self,
        policy_tokenizer: PreTrainedTokenizerBase,
        reward_tokenizer: PreTrainedTokenizerBase,
        *,
        max_length: int,
        stops: Collection[int] = (),
        report: Reasons | None = None,
        separator: str | None = None,
    ):
        self.separator = separator
        self._policy_tokenizer = policy_tokenizer
        self._reward_tokenizer = reward_tokenizer
        self._max_length = max_length
        self._report = Reasons("reward model") if report is None else report
        self._end = turn_end(reward_tokenizer)
        shared = _fingerprint(policy_tokenizer) == _fingerprint(reward_tokenizer)
        self._copies = shared and copies_response(reward_tokenizer) and keeps_borders(reward_tokenizer)
        self._named_stops = frozenset(stops)
        self._stops = _stopping(policy_tokenizer) | self._named_stops

    def sequences(self, responses: Iterable[tuple[Prompt, list[int], bool]]) -> list[list[int] | None]:
        """Return the token ids of each (prompt, response ids, finished); None for a response that can't be scored."""
        return self._each(self._sequence, responses, list)

    def step_sequences(self, responses: Iterable[tuple[Prompt, list[int], bool]]) -> list[StepSequence | None]:
        """Return the same for a process reward model, with the ends of the steps."""
        return self._each(self._steps, responses, lambda found: found.ids)

    def _each(
        self, encode: Callable[..., T], responses: Iterable[tuple[Prompt, list[int], bool]], ids: Callable[[T], list]
    ) -> list[T | None]:
        reasons: Counter[str] = Counter()
        found = [
            _or_reason(lambda r=r: encode(r[0].messages, r[0].prompt_ids, r[1], finished=r[2]), self._max_length, reasons, ids)
            for r in responses
        ]
        _tell(reasons, self._report)
        return found

    def _steps(self, messages: Sequence[Message], prompt_ids: list[int], response_ids: list[int], *, finished: bool) -> StepSequence:
        assert self.separator is not None
        own = step_ends(self._policy_tokenizer, prompt_ids, response_ids, self.separator)
        if self._copies:
            ids = self._sequence(messages, prompt_ids, response_ids, finished=finished)
            return StepSequence(ids, [*(len(prompt_ids) + end for end in own[:-1]), len(ids) - 1], own)
        kept = without_stop(response_ids, self._named_stops, finished=finished)
        text = response_text(self._policy_tokenizer, prompt_ids, kept)
        turns = encode_scored_turns(self._reward_tokenizer, [(messages, text)], finished=finished)
        ends = turn_step_ends(turns, 0, self._reward_tokenizer, self.separator)
        if len(ends) != len(own):
            raise Unrenderable("its steps are others in the process reward model's own template")
        return StepSequence(turns.ids(0), ends, own)

    def _sequence(self, messages: Sequence[Message], prompt_ids: list[int], response_ids: list[int], *, finished: bool) -> list[int]:
        if not self._copies:
            kept = without_stop(response_ids, self._named_stops, finished=finished)
            text = response_text(self._policy_tokenizer, prompt_ids, kept)
            return scored_ids(self._reward_tokenizer, messages, text, finished=finished)
        if not finished:
            return beside_pictures([*prompt_ids, *response_ids], pictures_of(messages))
        ids = [*prompt_ids, *self._without_end(response_ids), *self._end.trained, *self._end.after]
        return beside_pictures(ids, pictures_of(messages))

    def _without_end(self, response_ids: list[int]) -> list[int]:
        trained = len(self._end.trained)
        if trained and tuple(response_ids[-trained:]) == self._end.trained:
            return response_ids[:-trained]
        return response_ids[:-1] if self._stops.intersection(response_ids[-1:]) else response_ids


def _or_reason(encode: Callable[[], T], max_length: int, reasons: Counter[str], ids: Callable[[T], list] = list) -> T | None:
    try:
        found = encode()
    except Unrenderable as error:
        reasons[str(error)] += 1
        return None
    if len(ids(found)) > max_length:
        reasons[f"more than {max_length} tokens: model.max_length allows no more"] += 1
        return None
    return found


def _tell(reasons: Counter[str], report: Reasons) -> None:
    for reason, count in reasons.items():
        report(reason, count=count)


def _stopping(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Return the special tokens, which may end a response without being part of it.

    Other added tokens, such as one that closes a tool call, are part of the response, even if a stop string ends with them.
    """
    added = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    return {*tokenizer.all_special_ids, *added}


def _fingerprint(tokenizer: PreTrainedTokenizerBase) -> tuple[Any, ...]:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    vocabulary = backend.to_str() if backend is not None else str(sorted(tokenizer.get_vocab().items()))
    vision = vision_of(tokenizer)  # whose settings decide how many tokens a picture takes
    return vocabulary, tokenizer.eos_token_id, tokenizer.chat_template, None if vision is None else vision.files
