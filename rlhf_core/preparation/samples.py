"""Data that a pretrained model writes itself: responses, maybe prompts, and a rule that labels them. For a model without preference data.

A prompt comes from a file, or is an opening with the model's continuation. That and a truncated response are cut after a whole sentence.
Of two responses to a prompt, the one that meets more of the rule's aspects is chosen. The first response to each is a demonstration.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations, islice
from random import Random
from typing import Protocol

from rlhf_core.config import SamplesConfig, SourceConfig
from rlhf_core.data.hashing import conversation_text
from rlhf_core.data.judge import Judgement, find_judge
from rlhf_core.data.schema import Message

MAX_PAIRS_PER_PROMPT = 6
DRAWS = 3  # attempts at most for all prompts: some texts repeat or have no sentence end
_SENTENCE_END = re.compile(r"[.!?…][\"'”’)]*(?=\s|$)|[。！？][”」』）]*")


@dataclass(frozen=True)
class Written:
    """A text that a model wrote. ended: the model ended it; False: it was truncated."""

    text: str
    ended: bool


class Writer(Protocol):
    """A model that writes texts. The source's name, `draw` and a text's position seed the sampling."""

    def extend(self, openings: list[str], config: SamplesConfig, *, source: str, draw: int) -> list[Written]:
        """Continue every opening, as plain text, by `config.opening_tokens` tokens."""

    def respond(self, conversations: list[list[Message]], config: SamplesConfig, *, source: str, draw: int) -> list[list[Written]]:
        """Sample `config.responses_per_prompt` responses to every conversation, which the model's template renders."""


def sample_rows(
    source: SourceConfig, *, seed: int, writer: Writer, dropped: Counter[str], prompts: Iterable[dict] | None = None
) -> Iterator[tuple[str, dict]]:
    """Yield (use, row) for each row of the uses that the source declares; the same for the same arguments.

    Args:
        dropped: counts what is left out, by reason.
        prompts: rows of prompts, of which the first `samples.prompts` are taken; None: prompts from `samples.openings`.
    Raises:
        ValueError: the rule can't be used, or no text of the model has a sentence end.
    """
    config, judge = source.samples, find_judge(source.judge)
    for opening in config.openings:  # a rule that fails is refused before anything is sampled
        judge(_messages(opening), opening)
    found = [{"messages": _messages(text), "label": None} for text in _prompts(source, writer, dropped)] if prompts is None else prompts
    prompts = list(islice(found, config.prompts))
    if not prompts:
        raise ValueError(
            f"source {source.name}: expected prompts that end with a sentence, got none after {config.opening_tokens} tokens; "
            "raise samples.opening_tokens, or set it to 0 and give whole openings"
        )
    for row in prompts[:1]:  # so is one that a file's prompts don't suit
        judge(row["messages"], row["messages"][-1]["content"])
    groups = writer.respond([row["messages"] for row in prompts], config, source=source.name, draw=DRAWS)
    rng = Random(f"{seed}:samples:{source.name}")
    for prompt, group in zip(prompts, groups, strict=True):
        responses = list(_whole(group, dropped))
        for use, row in _rows(config, rng, prompt, [(r, judge(prompt["messages"], r)) for r in responses], dropped):
            if use in source.uses:
                yield use, row


def whole_sentences(text: str) -> str:
    """Return the text up to the end of its last whole sentence outside of quotes; empty if there is none."""
    ends = (m.end() for m in _SENTENCE_END.finditer(text))
    return text[: max((end for end in ends if text[:end].count('"') % 2 == 0), default=0)]


def _prompts(source: SourceConfig, writer: Writer, dropped: Counter[str]) -> list[str]:
    """Return different prompts, `config.prompts` of them if the model writes so many."""
    config = source.samples
    if config.opening_tokens == 0:
        return list(dict.fromkeys(config.openings))[: config.prompts]
    openings = [config.openings[i % len(config.openings)] for i in range(config.prompts)]
    found: dict[str, str] = {}
    for draw in range(DRAWS):
        for written in writer.extend(openings, config, source=source.name, draw=draw):
            prompt = "" if written.ended else whole_sentences(written.text)
            if prompt:
                found.setdefault(conversation_text(_messages(prompt)), prompt)
            else:
                dropped["prompts that are no beginning of a text"] += 1
            if len(found) == config.prompts:
                return list(found.values())
    return list(found.values())


def _whole(group: list[Written], dropped: Counter[str]) -> Iterator[str]:
    """Yield the different responses to a prompt; a truncated one is cut after its last whole sentence."""
    seen = set()
    for written in group:
        text = written.text.rstrip() if written.ended else whole_sentences(written.text)
        if not text.strip():
            dropped["responses without a whole sentence"] += 1
        elif text not in seen:
            seen.add(text)
            yield text


def _rows(
    config: SamplesConfig, rng: Random, prompt: dict, judged: list[tuple[str, Judgement]], dropped: Counter[str]
) -> Iterator[tuple[str, dict]]:
    messages = prompt["messages"]
    yield "prompt", prompt
    if judged:
        yield "sft", {"messages": messages, "response": judged[0][0]}
    informative = [pair for pair in combinations(judged, 2) if pair[0][1].met != pair[1][1].met]
    if not informative:
        dropped["prompts whose responses the rule doesn't tell apart"] += 1
    for pair in rng.sample(informative, min(MAX_PAIRS_PER_PROMPT, len(informative))):
        (better, good), (worse, bad) = sorted(pair, key=lambda response: -response[1].met)
        flipped = rng.random() < config.label_noise
        chosen, rejected = (worse, better) if flipped else (better, worse)
        apart = [a for a in good.aspects if good.aspects[a] != bad.aspects.get(a)]
        yield "preference", {"messages": messages, "chosen": chosen, "rejected": rejected, "slices": {"aspects": "+".join(apart)}}


def _messages(prompt: str) -> list[Message]:
    return [{"role": "user", "content": prompt}]
