"""A conversation with a policy, line by line, and with another model beside it: on a terminal, or through pipes."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TextIO

from rlhf_core.sampling.requests import SamplingSettings, request_seeds
from rlhf_core.use.choice import Chosen, context_length, saved_dtype

QUIT, RESET = "/quit", "/reset"
KV_CACHE_GIB = 1


@dataclass(frozen=True)
class Reply:
    """text: the answer. note: what a reader has to know about it, where there is something."""

    text: str
    note: str | None = None


class NoRoom(ValueError):
    """The conversation fills the model's context."""


class Partner:
    """A model and its own side of a conversation.

    Args:
        sampling: how answers are drawn; `max_new_tokens` is the limit of one.
        system: the first message of each conversation; None: there is none.
    Raises:
        ValueError: the model can't be loaded, or its template refuses a system message.
    """

    def __init__(
        self,
        chosen: Chosen,
        sampling: SamplingSettings,
        *,
        max_length: int | None,
        system: str | None,
        seed: int,
        threads: int,
        trust: bool,
    ):
        from rlhf_core.engines.pytorch_engine import PytorchEngine
        from rlhf_core.models.tokenizer import encode_prompt, load_tokenizer, stop_ids
        from rlhf_core.scorers.reward_input import without_stop

        self.name, self.context = chosen.name, context_length(chosen, max_length, trust_remote_code=trust)
        self._tokenizer = load_tokenizer(str(chosen.folder), trust_remote_code=trust)
        self._encode, self._without_stop = encode_prompt, without_stop
        self._stops = stop_ids(self._tokenizer, chosen.folder)
        self._start = [] if system is None else [{"role": "system", "content": system}]
        self._encode(self._tokenizer, [*self._start, {"role": "user", "content": "Hello"}])  # a refusal comes before the weights are read
        self._sampling, self._seed, self._turns = sampling, seed, 0
        self._engine = PytorchEngine(
            str(chosen.folder),
            max_length=self.context,
            dtype=saved_dtype(chosen, trust_remote_code=trust),
            kv_cache_gib=KV_CACHE_GIB,
            max_concurrent_sequences=1,
            threads=threads,
            trust_remote_code=trust,
            gpu_memory_fraction=0.5,
        )
        self.reset()

    def reset(self) -> None:
        self._messages = list(self._start)

    def answer(self, text: str) -> Reply:
        """The model's answer to the conversation with this message of the user, both of which are part of it from now on.

        Raises:
            NoRoom: nothing was added.
            Unrenderable: the model's template refuses the conversation; nothing was added.
        """
        asked = [*self._messages, {"role": "user", "content": text}]
        prompt = self._encode(self._tokenizer, asked)
        if len(prompt) >= self.context:
            raise NoRoom(
                f"{self.name}: the conversation would have {len(prompt)} tokens and the context is {self.context}: there is no room for an "
                f"answer, and the message was left out; {RESET} begins a new conversation"
            )
        (seed,) = request_seeds(self._seed, self._turns, 1)
        self._turns += 1
        ((sample,),) = self._engine.generate([prompt], [seed], self._sampling, stop_ids=self._stops, group_size=1)
        said = self._without_stop(sample.response_ids, self._stops, finished=sample.finished)
        reply = self._tokenizer.decode(said, skip_special_tokens=True)
        self._messages = [*asked, {"role": "assistant", "content": reply}]
        return Reply(reply, None if sample.finished else self._cut_off(len(prompt) + len(sample.response_ids)))

    def _cut_off(self, tokens: int) -> str:
        if tokens >= self.context:
            return f"{self.name}: cut off, the conversation fills the context of {self.context} tokens; {RESET} begins a new one"
        return f"{self.name}: cut off after {self._sampling.max_new_tokens} tokens (--max-new-tokens)"


def chat(partners: list[Partner], lines: Iterable[str], out: TextIO, notes: TextIO) -> None:
    """Every line is a message; each partner's answer goes to `out`, with the partner's name before it where there are several."""
    from rlhf_core.models.tokenizer import Unrenderable

    for line in lines:
        text = line.strip()
        if text == QUIT:
            return
        if text == RESET:
            for partner in partners:
                partner.reset()
            print("a new conversation", file=notes, flush=True)
            continue
        for partner in partners if text else []:
            try:
                reply = partner.answer(text)
            except (NoRoom, Unrenderable) as refusal:
                print(plain(str(refusal)), file=notes, flush=True)
                continue
            print(f"{partner.name}: {plain(reply.text)}" if len(partners) > 1 else plain(reply.text), file=out, flush=True)
            if reply.note is not None:
                print(f"({reply.note})", file=notes, flush=True)


def introduction(partners: list[Partner], sampling: SamplingSettings) -> str:
    contexts = ", ".join(f"{partner.name} {partner.context}" for partner in partners)
    return (
        f"Context in tokens, all messages and answers together: {contexts}; an answer has at most {sampling.max_new_tokens}. "
        f"{RESET} begins a new conversation, {QUIT} or the end of the input ends."
    )


def typed_lines() -> Iterator[str]:
    """Standard input; at a terminal with a prompt and the line editing of readline, where Python has it."""
    if not sys.stdin.isatty():
        yield from sys.stdin
        return
    import contextlib

    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - input() uses it
    while True:
        try:
            yield input("> ")
        except EOFError:
            return


def plain(text: str) -> str:
    """For a terminal, which takes no orders from what a model writes."""
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)
