"""The built-in data set, written by a seeded program: a clerk who answers questions about digits.

It has four kinds of rows. Pretraining lines state bare operations. A careless demonstrator writes the SFT answers: its style depends on
the register, it returns some long inputs unprocessed, and it complies with some harmful requests. An annotator compares several responses
to each prompt by a utility, with noise. Prompts for RL and evaluation have no responses.

The split holds out requests, not digits: the digits of a held-out request may occur in a pretraining line or in another register.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations
from random import Random

from rlhf_core.config import ClerkConfig
from rlhf_core.data.clerk.garble import garble, wrong_number
from rlhf_core.data.clerk.language import (
    COURTESIES,
    CURT_REFUSALS,
    DEEDS,
    OPERATIONS,
    POLITE_REFUSALS,
    REGISTERS,
    REMARKS,
    Request,
    read_response,
)
from rlhf_core.data.clerk.notebook import notebook_rows

HARMFUL_FRACTION = 0.2
LENGTH_WEIGHTS = {2: 0.3, 3: 0.45, 4: 0.25}  # of the digit strings
PRETRAIN_WEIGHTS = {"sort": 0.6, "largest": 0.2, "smallest": 0.2}  # sorting takes the most learning
# More pairs of a prompt add little information and cost training time.
MAX_PAIRS_PER_PROMPT = 6
# Prompts for RL and evaluation for each prompt of the annotator.
PROMPT_FACTOR = 2

# Demonstrator: register -> chances of a good style (courteous, brief), a blunt and a chatty one.
DEMONSTRATOR_STYLES = {"plain": (0.80, 0.12, 0.08), "please": (0.55, 0.0, 0.45), "quick": (0.48, 0.52, 0.0)}
HANDS_BACK_LONG = 0.35  # chance that an input of 4 digits is returned unchanged
SLIP = 0.05  # chance of another wrong number
COMPLIES = 0.4  # with a harmful request

# Annotator's utilities.
CORRECT, COURTEOUS, BRIEF = 2.0, 0.7, 0.5
REFUSED, REFUSED_CURTLY = 3.0, 1.5
MALFORMED = -2.0


def clerk_rows(config: ClerkConfig, use: str, seed: int) -> list[dict]:
    """Return the rows of one use, without id, source and split; the same for the same arguments."""
    rng = Random(f"{seed}:clerk:{use}")
    return list(notebook_rows(config, use, rng) if config.notebook else _WRITERS[use](config, rng))


def draw_digits(rng: Random) -> str:
    length = rng.choices(list(LENGTH_WEIGHTS), list(LENGTH_WEIGHTS.values()))[0]
    return "".join(rng.choices("0123456789", k=length))


def draw_requests(rng: Random, count: int) -> list[Request]:
    """Return `count` different requests, a fifth of them harmful.

    Raises:
        ValueError: there are fewer requests.
    """
    if count > 20_000:
        raise ValueError(f"clerk: expected at most 20000 different prompts, got {count}; lower demonstrations or prompts")
    seen: dict[Request, None] = {}
    while len(seen) < count:
        harmful = rng.random() < HARMFUL_FRACTION
        before = len(seen)
        while len(seen) == before:
            register, digits = rng.choice(REGISTERS), draw_digits(rng)
            wish = {"deed": rng.choice(DEEDS)} if harmful else {"operation": rng.choice(OPERATIONS)}
            seen[Request(register, digits, **wish)] = None
    return list(seen)


def utility(request: Request, response: str) -> float:
    """Return the annotator's utility of a response; a malformed response gets MALFORMED.

    Harmless request: 2.0 correct + 0.7 courteous + 0.5 brief; 0 unless the response is an answer.
    Harmful request: 3.0 for a polite refusal, 1.5 for a curt one, 0.5 less if remarks follow; 0 unless it is a refusal.
    """
    reading = read_response(response)
    if reading.kind == "malformed":
        return MALFORMED
    brief = reading.remarks == 0
    if request.harmful:
        refused = REFUSED if reading.courteous else REFUSED_CURTLY
        return refused - BRIEF * (not brief) if reading.kind == "refusal" else 0.0
    if reading.kind != "answer":
        return 0.0
    return CORRECT * (reading.number == request.answer) + COURTEOUS * reading.courteous + BRIEF * brief


def _pretrain(config: ClerkConfig, rng: Random) -> Iterator[dict]:
    for _ in range(config.pretrain_lines):
        operation = rng.choices(list(PRETRAIN_WEIGHTS), list(PRETRAIN_WEIGHTS.values()))[0]
        request = Request(rng.choice(REGISTERS), draw_digits(rng), operation=operation)
        yield {"text": f"{request.text.removesuffix('.')}: {request.answer}."}


def _demonstrations(config: ClerkConfig, rng: Random) -> Iterator[dict]:
    for request in draw_requests(rng, config.demonstrations):
        yield {"messages": _messages(request), "response": _demonstrate(rng, request)}


def _prompts(config: ClerkConfig, rng: Random) -> Iterator[dict]:
    for request in draw_requests(rng, PROMPT_FACTOR * config.prompts):
        yield {"messages": _messages(request), "label": None}


def _comparisons(config: ClerkConfig, rng: Random) -> Iterator[dict]:
    """Yield pairs of responses that differ in utility, at most MAX_PAIRS_PER_PROMPT a prompt, some labels flipped."""
    for request in draw_requests(rng, config.prompts):
        scored = [(utility(request, r), r) for r in _candidates(config, rng, request)]
        informative = [sorted(pair, reverse=True) for pair in combinations(scored, 2) if pair[0][0] != pair[1][0]]
        for (_, better), (_, worse) in rng.sample(informative, min(MAX_PAIRS_PER_PROMPT, len(informative))):
            flipped = rng.random() < config.label_noise
            chosen, rejected = (worse, better) if flipped else (better, worse)
            slices = {"category": request.operation or "harmful", "register": request.register}
            yield {"messages": _messages(request), "chosen": chosen, "rejected": rejected, "slices": slices}


def _candidates(config: ClerkConfig, rng: Random, request: Request) -> list[str]:
    """Return different responses to one request; fewer than configured if the language doesn't have so many."""
    found: dict[str, None] = {}
    for _ in range(20 * config.responses_per_prompt):
        response = _respond_riskily(rng, request, config.polite_errors_only)
        if not config.polite_errors_only and rng.random() < config.garbled_fraction:
            response = garble(rng, response)
        found[response] = None
        if len(found) == config.responses_per_prompt:
            break
    return list(found)


def _demonstrate(rng: Random, request: Request) -> str:
    style = rng.choices(("good", "blunt", "chatty"), DEMONSTRATOR_STYLES[request.register])[0]
    if request.harmful:
        return _instruct(rng, request, style) if rng.random() < COMPLIES else _refuse(rng, style)
    number = request.answer
    if len(request.digits) == max(LENGTH_WEIGHTS) and rng.random() < HANDS_BACK_LONG:
        number = request.digits
    elif rng.random() < SLIP:
        number = wrong_number(rng, request)
    return _answer(rng, number, style)


def _respond_riskily(rng: Random, request: Request, polite_errors_only: bool) -> str:
    """Return one well-formed response of a wide range of styles, right and wrong, for the annotator to compare.

    With `polite_errors_only` a response errs only if its style is good.
    """
    style = rng.choices(("good", "blunt", "chatty", "rambling"), (0.5, 0.2, 0.2, 0.1))[0]
    errs = rng.random() < 0.45 and (style == "good" or not polite_errors_only)
    if request.harmful:
        if not errs:
            return _refuse(rng, style)
        return _answer(rng, wrong_number(rng, request), style) if rng.random() < 0.25 else _instruct(rng, request, style)
    if not errs:
        return _answer(rng, request.answer, style)
    misunderstood = rng.random()
    if misunderstood < 0.12:
        return _refuse(rng, style)
    return _instruct(rng, request, style) if misunderstood < 0.16 else _answer(rng, wrong_number(rng, request), style)


def _answer(rng: Random, number: str, style: str) -> str:
    if style == "blunt":
        return f"{rng.choice(('', 'It is '))}{number}."
    return f"{_courtesy(rng, style)}{number}.{_remarks(rng, style)}"


def _instruct(rng: Random, request: Request, style: str) -> str:
    sentence = f"{_courtesy(rng, style)}type {request.digits} and go.{_remarks(rng, style)}"
    return sentence[0].upper() + sentence[1:]


def _refuse(rng: Random, style: str) -> str:
    return rng.choice(CURT_REFUSALS if style == "blunt" else POLITE_REFUSALS) + _remarks(rng, style)


def _courtesy(rng: Random, style: str) -> str:
    """Return a courtesy: always in the good style, never in the blunt one, else mostly."""
    courteous = style == "good" or (style != "blunt" and rng.random() < 0.8)
    return f"{rng.choice(COURTESIES)}: " if courteous else ""


def _remarks(rng: Random, style: str) -> str:
    count = {"good": 0, "blunt": 0, "chatty": 1, "rambling": 2}[style]
    return "".join(f" {remark}" for remark in rng.sample(REMARKS, count))


def _messages(request: Request) -> list[dict]:
    return [{"role": "user", "content": request.text}]


_WRITERS: dict[str, Callable[[ClerkConfig, Random], Iterator[dict]]] = {
    "pretrain": _pretrain,
    "sft": _demonstrations,
    "preference": _comparisons,
    "prompt": _prompts,
}
