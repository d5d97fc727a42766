"""Held-out prompts that training nearly has: every rewriting is found, and prompts of one template or with another number aren't."""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random

import pytest

from rlhf_core.config import ClerkConfig
from rlhf_core.data.clerk.generator import clerk_rows
from rlhf_core.data.hashing import split_of, split_text
from rlhf_core.data.schema import Message
from rlhf_core.preparation import near_duplicates
from rlhf_core.preparation.near_duplicates import COMMON, CONTAINED, LONG, Compared, Named, compare
from rlhf_core.preparation.normalised import normalised_text

FRACTIONS = {"validation_fraction": 0.06, "test_fraction": 0.12, "promotion_fraction": 0.06}
VOCABULARY = [f"w{a}{b}{c}" for a in "abcdef" for b in "aeiou" for c in "klmnrst"]


def asked(text: str) -> list[Message]:
    return [{"role": "user", "content": text}]


def named(conversations: list[list[Message]], prefix: str = "t") -> list[Named]:
    return [(f"{prefix}:{i:04d}", messages) for i, messages in enumerate(conversations)]


def of_one(heldout: list[list[Message]], training: list[list[Message]]) -> list[Compared]:
    return compare({"test": named(heldout, "h")}, lambda: named(training))["test"]


def long_texts(count: int, seed: str, words: int = 20) -> list[str]:
    random = Random(seed)
    return [f"{' '.join(random.choices(VOCABULARY, k=words))}, {random.randrange(10_000)} times." for _ in range(count)]


@pytest.fixture(scope="module")
def others() -> list[list[Message]]:
    return [asked(text) for text in long_texts(300, "others")]


SAME_WORDS: dict[str, Callable[[str], list[Message]]] = {
    "full stop": lambda text: asked(f"{text}."),
    "zero-width character": lambda text: asked(f"{text[:3]}\u200b{text[3:]}"),
    "capitals and white space": lambda text: asked(f"  {text.upper()}\n".replace(" ", "  ")),
    "system message": lambda text: [{"role": "system", "content": "Be helpful."}, *asked(text)],
    "continuation": lambda text: [*asked(f"{text}!"), {"role": "assistant", "content": "No."}, *asked("Why?")],
}
LONGER: dict[str, Callable[[str], list[Message]]] = {
    "prefix": lambda text: asked(f"Answer the following question: {text}"),
    "suffix": lambda text: asked(f"{text} Think step by step."),
    "example before it": lambda text: [*asked("What is it?"), {"role": "assistant", "content": "It."}, *asked(text)],
}
CHANGED: dict[str, Callable[[str], list[Message]]] = {
    "one word": lambda text: asked(" ".join(["other", *text.split()[1:]])),
    "one word and a prefix": lambda text: asked(f"Say: {text.replace(' times', ' fold')}"),
}


@pytest.mark.parametrize("rewriting", [*SAME_WORDS, *LONGER, *CHANGED])
@pytest.mark.parametrize("copies", [1, 3])
def test_every_rewritten_long_prompt_is_found(rewriting: str, copies: int, others):
    texts = long_texts(100, "test")
    rewritten = (SAME_WORDS | LONGER | CHANGED)[rewriting]
    repeated = [
        [*rewritten(text)[:-1], {"role": "user", "content": f"{rewritten(text)[-1]['content']}{' Please.' * copy}"}]
        for text in texts
        for copy in range(copies)
    ]
    found = of_one([asked(text) for text in texts], [*others, *repeated])
    assert len(found) == 100 and all(prompt.near for prompt in found)


@pytest.mark.parametrize("rewriting", SAME_WORDS)
def test_every_short_prompt_with_the_same_words_is_found(rewriting: str, others):
    texts = [f"Sort {i}." for i in range(50)]
    found = of_one([asked(text) for text in texts], [*others, *map(SAME_WORDS[rewriting], texts)])
    assert len(found) == 50 and all(prompt.near for prompt in found)


def test_a_system_message_of_the_held_out_prompt_is_left_out_too(others):
    (found,) = of_one([[{"role": "system", "content": "Be brief."}, *asked("Sort 12.")]], [*others, asked("sort 12")])
    assert found == Compared("h:0000", near="t:0300")


def test_short_prompts_inside_longer_ones_are_told_apart(others):
    heldout = [asked("Sort 12."), asked("Sort 13."), asked("Why?")]
    found = {c.name: c for c in of_one(heldout, [*others, asked("Quick, sort 12."), asked("Sort 113. Sort 14.")])}
    assert found["h:0000"] == Compared("h:0000", contained="t:0300")
    assert found["h:0001"] == Compared("h:0001") and found["h:0002"] == Compared("h:0002")


def test_requests_of_the_clerk_are_different_prompts():
    """Its splits hold out requests: "Sort 12." and "Quick, sort 12." are two. Contained ones stay below the default limit, 0.25."""
    splits: dict[str, list[list[Message]]] = {}
    for use in ("sft", "preference", "prompt"):
        for row in clerk_rows(ClerkConfig(prompts=1000, demonstrations=500), use, 0):
            splits.setdefault(split_of(split_text(row), **FRACTIONS), []).append(row["messages"])
    training = named(splits.pop("train"))
    for prompts in compare({split: named(rows, split) for split, rows in splits.items()}, lambda: training).values():
        assert len(prompts) > 100 and not any(prompt.near for prompt in prompts)
        assert 0.01 < sum(prompt.contained is not None for prompt in prompts) / len(prompts) < 0.2


@pytest.mark.parametrize("length", [15, 150])
def test_a_common_template_makes_no_prompts_near(length: int, others):
    """A fifth of the data has the template, and a word or three of it differ."""
    template = " ".join(long_texts(1, "template", length)[0].split()[:-2])
    prompts = [asked(f"{template} {VOCABULARY[i]}{' or not' * (i % 2)}") for i in range(120)]
    found = of_one(prompts[:40], [*others, *prompts[40:]])
    assert len(found) == 40 and not any(prompt.near for prompt in found)


def test_the_same_task_with_another_number_is_another_prompt(others):
    texts = long_texts(50, "numbers", 40)
    changed = [asked(text.replace(" times", "0 times")) for text in texts]
    assert not any(prompt.near for prompt in of_one([asked(text) for text in texts], [*others, *changed]))


def test_texts_without_spaces_are_compared_by_characters():
    question = "\u8bf7\u95ee\u4ece\u5317\u4eac\u5230\u4e0a\u6d77\u7684\u706b\u8f66\u8981\u591a\u957f\u65f6\u95f4\uff1f"
    (found,) = of_one([asked(question)], [asked(f"\u8bf7\u7528\u4e00\u53e5\u8bdd\u56de\u7b54\u3002{question}\u8c22\u8c22\u3002")])
    assert found.near == "t:0000"


def by_definition(heldout: list[list[Message]], training: list[list[Message]]) -> list[tuple[str | None, str | None]]:
    """For each held-out prompt, all names of rows that have it nearly, and that contain it, as the module's first lines say."""

    def words(messages: list[Message]) -> list[str]:
        return " ".join(normalised_text(m["content"]) for m in messages).split()

    def runs(of: list[str], n: int) -> set[tuple[str, ...]]:
        return {tuple(of[i : i + n]) for i in range(len(of) - n + 1)}

    frequency: dict[tuple[str, ...], int] = {}
    for text in {tuple(words(messages)) for messages in training}:
        for run in set().union(*(runs(list(text), n) for n in (1, 2, 3))):
            frequency[run] = frequency.get(run, 0) + 1
    found = []
    for prompt in heldout:
        ours = words(prompt)
        shingles = runs(ours, min(3, len(ours)))
        rare = {run for run in shingles if frequency.get(run, 0) <= COMMON}
        near, contained = [], []
        for name, messages in named(training):
            theirs = words(messages)
            had = set().union(*(runs(theirs, n) for n in (1, 2, 3)))
            numbers = {word for word in ours if word.isdigit()} <= set(theirs)
            share = CONTAINED if len(ours) >= LONG and rare else 1.0
            enough = len(shingles & had) >= math.ceil(share * len(shingles)) and len(rare & had) >= math.ceil(share * len(rare))
            if ours == theirs or (len(ours) >= LONG and numbers and enough):
                near.append(name)
            elif numbers and enough:
                contained.append(name)
        found.append((min(near, default=None), None if near else min(contained, default=None)))
    return found


@pytest.mark.parametrize("seed", range(3))
def test_the_comparison_is_that_of_the_definition_whatever_the_order(seed: int, monkeypatch):
    """Few words, so that many prompts share shingles; names of equal texts are ordered as the rows."""
    random = Random(seed)
    small = [*VOCABULARY[: 3 + 2 * seed], "1", "2"]
    texts = list({" ".join(random.choices(small, k=random.choice([1, 2, 3, 5, 13, 16]))): None for _ in range(250)})
    heldout, training = [asked(text) for text in texts[:80]], [asked(text) for text in texts[80:]]
    for messages in heldout[:40]:
        training.append(asked(f"{messages[0]['content']} {random.choice(small)}"))
    expected = by_definition(heldout, training)
    monkeypatch.setattr(near_duplicates, "PAIRS_AT_ONCE", 50)
    found = {c.name: c for c in of_one(heldout, training)}
    assert len({prompt.near is not None for prompt in found.values()}) == 2
    for i, (near, contained) in enumerate(expected):
        prompt = found[f"h:{i:04d}"]
        assert (prompt.near is None, prompt.contained is None) == (near is None, contained is None)
    rows = named(training)
    random.shuffle(rows)
    again = compare({"test": list(reversed(named(heldout, "h")))}, lambda: rows)["test"]
    assert {c.name: c for c in again} == found


def test_of_very_many_prompts_those_with_the_lowest_hashes_are_compared(others, monkeypatch):
    texts = long_texts(100, "many")
    every = of_one([asked(text) for text in texts], others)
    monkeypatch.setattr(near_duplicates, "MAX_PROMPTS", 10)
    assert of_one([asked(text) for text in texts], others) == every[:10]
    assert of_one([asked(text) for text in reversed(texts)], others)[0].name == f"h:{99 - int(every[0].name[2:]):04d}"


def test_nothing_to_compare_gives_nothing():
    assert compare({"test": []}, lambda: named([asked("a")])) == {"test": []}
    assert of_one([asked("\u200b")], [asked("\u200b")]) == []
    assert of_one([asked("a b")], []) == [Compared("h:0000")]
