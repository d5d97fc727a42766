"""Simulates how often some model at the threshold passes if each is judged on an edited split, by the ledger's count."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from rlhf_core.config import GateConfig
from rlhf_core.gate.looks import at_look, take_look
from rlhf_core.gate.overlap import SplitKeys
from tools.simulate.gate import PAIRS, PROMPTS, THRESHOLD, Split, passes, settings
from tools.simulate.rows import Row

TRIES = (10, 30)
LAST = max(TRIES)
EXCHANGED = PROMPTS // 3


def row(prompt: int, text: str) -> dict[str, Any]:
    """Return a pair of a prompt. Its responses don't depend on the prompt's text."""
    responses = {"chosen": f"The answer to this question is {prompt}.", "rejected": "I don't know."}
    return {"messages": [{"role": "user", "content": text.format(prompt)}], **responses}


# Of each edit: the split at try k, from 0, as numbers of prompts and their text.
ALL, PLAIN = range(PROMPTS), "What is the answer to question {}?"
EDITS = {
    "one prompt left out, another each time": lambda k: ([i for i in ALL if i != k], PLAIN),
    "a tenth of the prompts left out, others each time": lambda k: ([i for i in ALL if i % 10 != k % 10], PLAIN),
    "one prompt more each time": lambda k: (range(PROMPTS + k), PLAIN),
    "a space more in every prompt each time": lambda k: (ALL, "What is" + " " * k + " the answer to question {}?"),
    "every prompt in other words each time": lambda k: (ALL, f"Version {k}: solve question {{}}!"),
}
WINDOW = "a third of the prompts exchanged each time"
MOVING = {WINDOW: lambda k: (range(EXCHANGED * k, EXCHANGED * k + PROMPTS), PLAIN)}


def edited(edit: str) -> tuple[list[np.ndarray], list[int]]:
    """Return the prompts of each try's split, and the number of its look in a new ledger."""
    splits, numbers = [], []
    with tempfile.TemporaryDirectory() as folder:
        for k in range(LAST):
            prompts, text = (EDITS | MOVING)[edit](k)
            keys = SplitKeys.of_rows([row(i, text) for i in prompts])
            numbers.append(take_look(keys, f"{k:032x}.dir", Path(folder)).number)
            splits.append(np.array(prompts))
    return splits, numbers


def first_pass(rng: np.random.Generator, config: GateConfig, splits: list[np.ndarray], numbers: list[int]) -> int:
    """The first try, from 0, at which one of several models at the threshold passes; their number if none does."""
    whole = Split.draw(rng, np.full(max(prompts.max() for prompts in splits) + 1, PAIRS))
    for k, (prompts, number) in enumerate(zip(splits, numbers, strict=True)):
        chosen = np.isin(whole.prompts, prompts)
        split = Split(whole.shared[chosen], whole.prompts[chosen])
        if passes(split, split.points(THRESHOLD, rng), at_look(config, number)):
            return k
    return len(splits)


def simulate(replications: int, rng: np.random.Generator) -> Iterator[Row]:
    config = settings()
    for edit in EDITS | MOVING:
        splits, numbers = edited(edit)
        for counted in (False, True) if edit == next(iter(EDITS)) else (True,):
            passed = np.array([first_pass(rng, config, splits, numbers if counted else [1] * LAST) for _ in range(replications)])
            for tries in TRIES:
                how = f"look {numbers[tries - 1]} the last" if counted else "each judged as the first look"
                case = f"any of {tries} models at the threshold passes, {edit}, {how}"
                wanted = "at most 0.05" if edit != WINDOW else "no bound: splits further apart share nothing"
                yield Row(case, wanted, int((passed < tries).sum()), replications)
