"""Log-probabilities of given tokens from a language model at an OpenAI-compatible address, as vLLM returns them (`prompt_logprobs`)."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from rlhf_core.config import TeacherService, shown
from rlhf_core.scorers.service import MAX_ANSWER, Exchange, Refused, Service

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlhf_core.progress import Reasons

ENTRY_BYTES = 256  # of a token among the likeliest of a place, with its text, at most on average
CHECK_SECONDS = 60.0  # for all texts of a check
OTHER = "the service has another tokenizer"
PROBED = 2048  # tokens of the vocabulary, evenly spaced, whose texts are split by both tokenizers
PROBE_TOKENS = 32  # in a text, about


@dataclass(frozen=True)
class Said:
    """What a model says of the last tokens of a sequence.

    logprobs: of each token; or of its place's likeliest tokens, the likeliest first, whose ids are in `ids`.
    """

    logprobs: list
    ids: list


class TeacherClient:
    """A teacher at an address.

    Args:
        top: number of likeliest tokens to ask for; 0: the given token alone.
        vocabulary: ids that the policy has.
        in_time: as for `Service`.
    Raises:
        ValueError: the service's key can't be read.
    """

    def __init__(self, config: TeacherService, *, top: int, vocabulary: int, in_time: bool = False):
        self._config, self._top, self._vocabulary = config, top, vocabulary
        self._service = Service(config, f"{config.url.rstrip('/')}/completions", in_time=in_time)

    def ask(self, sequences: Sequence[tuple[list[int], int]], report: Reasons) -> list[Said | None]:
        """Return what the model says of each sequence's last tokens; None where no answer came, with a reason for the log.

        Args:
            sequences: token ids, and how many of them at the end are asked about.
        """
        found: list[Said | None] = [None] * len(sequences)

        async def one(exchange: Exchange, number: int) -> None:
            async def attempt() -> str:
                found[number] = await self._post(exchange, *sequences[number])
                return ""

            if reason := await exchange.repeated(attempt):
                report(reason, count=1)

        asyncio.run(self._service.run(lambda exchange: [one(exchange, number) for number in range(len(sequences))]))
        return found

    def check(self, texts: Sequence[str], own: PreTrainedTokenizerBase, *, key: str) -> None:
        """Check that the service returns log-probabilities of prompts, and splits these texts, and others of all its tokens, as the policy.

        Args:
            own: tokenizer of the policy.
            key: key of params.yaml that names the service.
        Raises:
            ValueError: it doesn't.
        """
        reasons: list[str] = []

        async def one(exchange: Exchange, text: str) -> None:
            ids = own(text, add_special_tokens=False)["input_ids"]

            async def attempt() -> str:
                await self._post(exchange, ids, len(ids) - 1, text=text)
                return ""

            if reason := await exchange.repeated(attempt):
                reasons.append(reason)

        asked = [*texts, *probe_texts(own)]
        asyncio.run(self._service.run(lambda exchange: [one(exchange, text) for text in asked], seconds=CHECK_SECONDS))
        if reasons:
            reasons.sort(key=lambda reason: not reason.startswith(OTHER))  # a text of more tokens there may be too long
            raise ValueError(
                f"{key}: expected a model at {self._config.url} that returns log-probabilities of a prompt's tokens (prompt_logprobs, as "
                f"vLLM does) and has the tokens of models/sft, got: {shown(reasons[0], 1000)}; start such a server, or correct the keys"
            )

    async def _post(self, exchange: Exchange, ids: list[int], count: int, *, text: str | None = None) -> Said:
        """Ask about a sequence by its ids, or by the text that has them.

        Raises:
            MayPass, Refused: there is no answer that can be used.
        """
        body = {"model": self._config.model, "prompt": ids if text is None else text, "max_tokens": 1, "temperature": 1.0}
        body |= {"prompt_logprobs": self._top, "return_token_ids": True, "add_special_tokens": False}
        read = partial(read_prompt, ids=ids, count=count, top=self._top, vocabulary=self._vocabulary)
        limit = MAX_ANSWER + ENTRY_BYTES * (self._top + 1) * len(ids)
        return await exchange.post(body, read, where=f"{self._service.url}, a text of {len(ids)} tokens", limit=limit)


def probe_texts(own: PreTrainedTokenizerBase) -> list[str]:
    """Return the texts of tokens from the whole vocabulary, some at a time."""
    spaced = range(0, len(own), max(1, len(own) // PROBED))
    ids = [token for token in spaced if token not in own.all_special_ids and "\ufffd" not in own.decode([token])]  # not parts of characters
    texts = [own.decode(ids[start : start + PROBE_TOKENS]) for start in range(0, len(ids), PROBE_TOKENS)]
    return [text for text in texts if len(own(text, add_special_tokens=False)["input_ids"]) > 1]


def read_prompt(tree: Any, *, ids: list[int], count: int, top: int, vocabulary: int) -> Said:
    """Return what an answer says of the last `count` of these tokens.

    Raises:
        ValueError: the answer lacks it.
        Refused: the service has split the text into other tokens.
    """
    choices = tree.get("choices") if isinstance(tree, dict) else None
    first = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
    theirs, places = first.get("prompt_token_ids"), first.get("prompt_logprobs")
    if not isinstance(theirs, list) or not isinstance(places, list):
        raise Refused("the service's answer has no prompt_token_ids and prompt_logprobs, which vLLM's have")
    if theirs != ids:
        place = next((n for n, pair in enumerate(zip(theirs, ids, strict=False)) if pair[0] != pair[1]), min(len(theirs), len(ids)))
        raise Refused(f"{OTHER}: expected token {ids[place : place + 1]} at place {place}, got {theirs[place : place + 1]}")
    if len(places) != len(ids):
        raise ValueError(f"expected {len(ids)} places in prompt_logprobs, got {len(places)}")
    asked = list(zip(ids, places, strict=True))[len(ids) - count :]
    if not top:
        return Said([_logprob(place, str(token)) for token, place in asked], [])
    ranked = [_likeliest(place, top, vocabulary) for _, place in asked]
    return Said(
        [[_logprob(place, token) for token in tokens] for tokens, (_, place) in zip(ranked, asked, strict=True)],
        [[int(token) for token in tokens] for tokens in ranked],
    )


def _likeliest(place: Any, top: int, vocabulary: int) -> list[str]:
    """Return the ids of a place's likeliest tokens, in order, as the answer writes them."""
    ranks = {entry["rank"]: token for token, entry in place.items() if isinstance(entry, dict) and isinstance(entry.get("rank"), int)}
    tokens = [ranks.get(rank) for rank in range(1, top + 1)]
    if None in tokens or not all(0 <= int(token) < vocabulary for token in tokens):
        raise ValueError(f"expected the ranks 1 to {top} at every place, of the policy's {vocabulary} ids")
    return tokens


def _logprob(place: Any, token: str) -> float:
    entry = place.get(token) if isinstance(place, dict) else None
    value = entry.get("logprob") if isinstance(entry, dict) else None
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value) or value > 1e-3:
        raise ValueError(f"expected a log-probability of token {token} at its place, got {shown(repr(value), 60)}")
    return float(value)
