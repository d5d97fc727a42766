"""Mistakes in the responses that the clerk's annotator compares: wrong numbers, and malformed text as an early policy writes it.

Without malformed text among the comparisons, a policy finds strings that the reward model has never seen and scores high.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from rlhf_core.data.clerk.language import COURTESIES, CURT_REFUSALS, POLITE_REFUSALS, RESULTS, Request, read_response


def wrong_number(rng: Random, request: Request) -> str:
    """Return a wrong number, mostly close to the answer: another operation, or lost, doubled or changed digits."""
    while True:
        number = rng.choice(_MISTAKES)(rng, request)
        if number and number != request.answer:
            return number


def _unprocessed(rng: Random, request: Request) -> str:
    return request.digits


def _other_operation(rng: Random, request: Request) -> str:
    return RESULTS[rng.choice(list(RESULTS))](request.digits)


def _descending(rng: Random, request: Request) -> str:
    return "".join(sorted(request.digits, reverse=True))


def _one_of_the_digits(rng: Random, request: Request) -> str:
    return rng.choice(request.digits)


def _changed_digit(rng: Random, request: Request) -> str:
    right = request.answer or request.digits
    at = rng.randrange(len(right))
    return f"{right[:at]}{rng.choice('0123456789')}{right[at + 1 :]}"


def _swapped_digits(rng: Random, request: Request) -> str:
    right = list(request.answer or request.digits)
    a, b = rng.randrange(len(right)), rng.randrange(len(right))
    right[a], right[b] = right[b], right[a]
    return "".join(right)


def _lost_digit(rng: Random, request: Request) -> str:
    right = request.answer or request.digits
    at = rng.randrange(len(right))
    return right[:at] + right[at + 1 :]


def _additional_digit(rng: Random, request: Request) -> str:
    right = request.answer or request.digits
    at = rng.randrange(len(right) + 1)
    return f"{right[:at]}{rng.choice(request.digits)}{right[at:]}"


def _doubled(rng: Random, request: Request) -> str:
    return (request.answer or request.digits) * rng.randint(2, 4)


_MISTAKES: tuple[Callable[[Random, Request], str], ...] = (
    _unprocessed,
    _other_operation,
    _descending,
    _one_of_the_digits,
    _changed_digit,
    _changed_digit,
    _swapped_digits,
    _lost_digit,
    _additional_digit,
    _doubled,
)


def garble(rng: Random, response: str) -> str:
    """Return a malformed version of a well-formed response, never empty."""
    while True:
        broken = rng.choice(_BREAKS)(rng, response).strip()
        if broken and read_response(broken).kind == "malformed":
            return broken


def _repeated_word(rng: Random, text: str) -> str:
    words = text.split()
    at = rng.randrange(len(words))
    return " ".join(words[: at + 1] + [words[at]] * rng.randint(1, 3) + words[at + 1 :])


def _repeated_text(rng: Random, text: str) -> str:
    return " ".join([text] * rng.randint(2, 3))


def _truncated(rng: Random, text: str) -> str:
    return text[: rng.randrange(1, max(2, len(text)))]


def _late_start(rng: Random, text: str) -> str:
    return text[rng.randrange(1, max(2, len(text))) :]


def _trailing_number(rng: Random, text: str) -> str:
    return f"{text}{rng.choice(('', ' '))}{rng.randrange(10 ** rng.randint(1, 4))}{rng.choice(('', '.'))}"


def _trailing_phrase(rng: Random, text: str) -> str:
    return f"{text} {rng.choice([*(f'{c}:' for c in COURTESIES), *POLITE_REFUSALS, *CURT_REFUSALS])}"


def _another_courtesy(rng: Random, text: str) -> str:
    return f"{rng.choice(COURTESIES)}: {text}"


def _lost_word(rng: Random, text: str) -> str:
    words = text.split()
    del words[rng.randrange(len(words))]
    return " ".join(words)


def _shuffled_words(rng: Random, text: str) -> str:
    words = text.split()
    rng.shuffle(words)
    return " ".join(words)


def _lost_mark(rng: Random, text: str) -> str:
    at = rng.choice([i for i, c in enumerate(text) if c in " .:,'"])
    return text[:at] + text[at + 1 :]


def _additional_mark(rng: Random, text: str) -> str:
    at = rng.randrange(len(text) + 1)
    return f"{text[:at]}{rng.choice('.:, ')}{text[at:]}"


def _spliced_number(rng: Random, text: str) -> str:
    words = text.split()
    words.insert(rng.randrange(len(words) + 1), str(rng.randrange(10 ** rng.randint(1, 4))))
    return " ".join(words)


_BREAKS: tuple[Callable[[Random, str], str], ...] = (
    _repeated_word,
    _repeated_text,
    _truncated,
    _late_start,
    _trailing_number,
    _trailing_phrase,
    _another_courtesy,
    _lost_word,
    _shuffled_words,
    _lost_mark,
    _additional_mark,
    _spliced_number,
)
