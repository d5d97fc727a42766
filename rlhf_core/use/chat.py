"""Chat with a policy, one message per line, optionally beside a second model; on a terminal or through pipes."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from rlhf_core.data.pictures import Picture, pictures_of, with_pictures
from rlhf_core.engines.rollout.requests import SamplingSettings, request_seeds
from rlhf_core.use.choice import Chosen, context_length, saved_dtype

if TYPE_CHECKING:
    from rlhf_core.preparation.pictures import PictureStore

QUIT, RESET, IMAGE = "/quit", "/reset", "/image"
KV_CACHE_GIB = 1


@dataclass(frozen=True)
class Reply:
    """An answer.

    text: the answer. note: a remark for the reader, such as that the answer was truncated; None without a remark.
    """

    text: str
    note: str | None = None


class NoRoom(ValueError):
    """The conversation fills the model's context."""


class Partner:
    """A model and its own side of a conversation.

    Args:
        sampling: of answers; `max_new_tokens` limits each answer.
        system: system message at the start of each conversation; None: no system message.
        images: folder with a file for each picture of the conversation.
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
        images: Path,
    ):
        from rlhf_core.engines.rollout.pytorch_engine import PytorchEngine
        from rlhf_core.models.tokenizer import encode_prompt, load_tokenizer, response_text, stop_ids
        from rlhf_core.models.vision import sees
        from rlhf_core.scorers.reward.input import without_stop

        self.name, self.context = chosen.name, context_length(chosen, max_length, trust_remote_code=trust)
        self.sees = sees(chosen.folder)
        self._tokenizer = load_tokenizer(str(chosen.folder), trust_remote_code=trust, vision="frozen" if self.sees else None)
        self._encode, self._decode, self._without_stop = encode_prompt, response_text, without_stop
        self._stops = stop_ids(self._tokenizer, chosen.folder)
        self._start = [] if system is None else [{"role": "system", "content": system}]
        self._encode(self._tokenizer, [*self._start, {"role": "user", "content": "Hello"}])  # raises before the weights are loaded
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
            prepared=str(images) if self.sees else None,
        )
        self.reset()

    def reset(self) -> None:
        """Start a new conversation."""
        self._messages = list(self._start)

    def answer(self, text: str, pictures: Sequence[Picture] = ()) -> Reply:
        """Answer a user message with pictures. The message and the answer become part of the conversation.

        Raises:
            NoRoom: the prompt fills the context; the conversation is unchanged.
            Unrenderable: the model's template refuses the conversation, which is unchanged.
        """
        asked = {"role": "user", "content": text}
        messages = [*self._messages, with_pictures(asked, [*pictures, text]) if pictures else asked]
        prompt = self._encode(self._tokenizer, messages)
        if len(prompt) >= self.context:
            raise NoRoom(
                f"{self.name}: expected a conversation shorter than the context of {self.context} tokens, got {len(prompt)}; the message "
                f"was ignored; {RESET} starts a new conversation"
            )
        (seed,) = request_seeds(self._seed, self._turns, 1)
        self._turns += 1
        options = {"stop_ids": self._stops, "group_size": 1, "pictures": [pictures_of(messages)]}
        ((sample,),) = self._engine.generate([prompt], [seed], self._sampling, **options)
        answer_ids = self._without_stop(sample.response_ids, self._stops, finished=sample.finished)
        reply = self._decode(self._tokenizer, prompt, answer_ids)
        self._messages = [*messages, {"role": "assistant", "content": reply}]
        return Reply(reply, None if sample.finished else self._truncation_note(len(prompt) + len(sample.response_ids)))

    def _truncation_note(self, tokens: int) -> str:
        if tokens >= self.context:
            return f"{self.name}: truncated, the conversation fills the context of {self.context} tokens; {RESET} starts a new one"
        return f"{self.name}: truncated after {self._sampling.max_new_tokens} tokens (--max-new-tokens)"


def chat(partners: list[Partner], lines: Iterable[str], out: TextIO, notes: TextIO, pictures: PictureStore) -> None:
    """Send each line to every partner and print the answers to `out`; with several partners each answer follows its partner's name.

    A picture of `/image FILE` goes with the next message.
    """
    from rlhf_core.models.tokenizer import Unrenderable

    waiting: list[Picture] = []
    for line in lines:
        text = line.strip()
        if text == QUIT:
            return
        if text == RESET:
            for partner in partners:
                partner.reset()
            waiting = []
            print("a new conversation", file=notes, flush=True)
            continue
        if text.partition(" ")[0] == IMAGE:
            print(plain(_take_picture(text.removeprefix(IMAGE).strip(), pictures, waiting)), file=notes, flush=True)
            continue
        shown, waiting = (waiting, []) if text else ([], waiting)
        for partner in partners if text else []:
            try:
                reply = partner.answer(text, shown)
            except (NoRoom, Unrenderable) as refusal:
                print(plain(str(refusal)), file=notes, flush=True)
                continue
            print(f"{partner.name}: {plain(reply.text)}" if len(partners) > 1 else plain(reply.text), file=out, flush=True)
            if reply.note is not None:
                print(f"({reply.note})", file=notes, flush=True)


def _take_picture(name: str, pictures: PictureStore, waiting: list[Picture]) -> str:
    """Add the picture in a file to those that wait for the next message. Returns what to tell the user."""
    from rlhf_core.preparation.drops import Dropped

    try:
        waiting.append(picture := pictures.add_file(Path(name).expanduser()))
    except (Dropped, OSError, RuntimeError) as error:  # of a home that isn't there
        return f"{IMAGE} {name}: expected the file of a picture, got: {error}"
    return f"{name}: a picture of {picture.width} x {picture.height} pixels, which goes with the next message"


def introduction(partners: list[Partner], sampling: SamplingSettings) -> str:
    """Return what chat prints before the first message."""
    contexts = ", ".join(f"{partner.name} {partner.context}" for partner in partners)
    return (
        f"Context in tokens, all messages and answers together: {contexts}; an answer has at most {sampling.max_new_tokens}. "
        f"{RESET} starts a new conversation; {QUIT} or end of input exits."
        + (f" {IMAGE} FILE shows a picture with the next message." if any(partner.sees for partner in partners) else "")
    )


def typed_lines() -> Iterator[str]:
    """Lines of standard input; on a terminal with a prompt and, if available, readline's line editing."""
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
    """Escape control characters in a model's output, so that a terminal doesn't execute them."""
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)
