"""The clerk's notebook: requests that take tools. Each page has a number; a request names two pages and asks for their sum.

A right answer takes four turns: read one page, read the other, add, answer. The demonstrator is careless: he often guesses before he has
read both pages, and mostly where he should add.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from random import Random
from typing import Any

from rlhf_core.config import ClerkConfig
from rlhf_core.data.clerk.language import OPENINGS

PAGES = range(10, 100)
MOST = 8_000  # requests, of 8,100
GUESSES = (0.1, 0.2, 0.6)  # chances of an answer in place of the first, second and third call


def number_on(page: int) -> int:
    """Return the number on a page, of two digits.

    Raises:
        ValueError: the notebook has no such page.
    """
    if page not in PAGES:
        raise ValueError(f"the notebook has pages {PAGES[0]} to {PAGES[-1]}")
    return 10 + _hash(f"page {page}") % 90


def notebook_rows(config: ClerkConfig, use: str, rng: Random) -> Iterator[dict]:
    """Yield the rows of use sft or prompt, as many as for the clerk's other requests."""
    openings = list(OPENINGS.values())
    for first, second in _requests(rng, config.demonstrations if use == "sft" else 2 * config.prompts):
        opening = openings[_hash(f"{first} {second}") % len(openings)]  # always the same, so that no prompt is nearly another's
        text = f"{opening}add pages {first} and {second}."
        asked = {"role": "user", "content": text[0].upper() + text[1:]}
        if use == "sft":
            yield _demonstration(rng, asked, first, second)
        else:
            yield {"messages": [asked], "label": str(number_on(first) + number_on(second))}


def call(name: str, **arguments: Any) -> str:
    """Return a call of a tool as the model writes it."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def _requests(rng: Random, count: int) -> list[tuple[int, int]]:
    """Return different requests.

    Raises:
        ValueError: there are fewer.
    """
    if count > MOST:
        raise ValueError(f"clerk.notebook: expected at most {MOST} different prompts, got {count}; lower demonstrations or prompts")
    seen: dict[tuple[int, int], None] = {}
    while len(seen) < count:
        seen[rng.choice(PAGES), rng.choice(PAGES)] = None
    return list(seen)


def _hash(text: str) -> int:
    return int(hashlib.sha256(text.encode()).hexdigest(), 16)


def _demonstration(rng: Random, asked: dict, first: int, second: int) -> dict:
    a, b = number_on(first), number_on(second)
    turns = [(call("read", page=first), a), (call("read", page=second), b), (call("add", a=a, b=b), a + b)]
    done = next((i for i, chance in enumerate(GUESSES) if rng.random() < chance), len(turns))
    messages = [asked]
    for written, result in turns[:done]:
        messages += [{"role": "assistant", "content": written}, {"role": "tool", "content": str(result)}]
    answer = a + b if done == len(turns) else rng.randrange(20, 199)
    return {"messages": messages, "response": f"It is {answer}."}
