"""Print the problems of recipes/steps.yaml as JSON lines: a prompt, a demonstration, and a solution with a label for each step.

A problem asks for the largest of some digits; each step compares the largest so far with the next digit, and the last one gives the
result. The demonstrator is careless and often keeps the smaller digit. The solutions with labels go wrong in more ways: in the digit, in
what it is compared with, and by ending too early.

    python -m tools.step_problems > recipes/step_problems.jsonl
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

from rewards.steps import right_steps

SEED = 0
PROBLEMS = 2600
SLIPS = {"larger": 0.3}  # chances of mistakes in a step of the demonstrator
MISTAKES = {"larger": 0.18, "digit": 0.06, "before": 0.06, "end": 0.06}  # and of a solution with labels


def problems() -> Iterator[dict]:
    draw = random.Random(SEED)
    seen: set[tuple[int, ...]] = set()
    while len(seen) < PROBLEMS:
        digits = tuple(draw.randrange(10) for _ in range(draw.choice((3, 4, 4))))
        if digits in seen:
            continue
        seen.add(digits)
        prompt = f"Largest of {' '.join(map(str, digits))}."
        steps = solution(draw, digits, MISTAKES)
        labels = right_steps(prompt, "\n".join(steps))
        yield {"prompt": prompt, "demonstration": "\n".join(solution(draw, digits, SLIPS)), "completions": steps, "labels": labels}


def solution(draw: random.Random, digits: tuple[int, ...], mistakes: dict[str, float]) -> list[str]:
    """The steps of a solution, in each of which one kind of mistake may occur."""
    steps, largest = [], digits[0]
    for digit in digits[1:]:
        kind = draw.choices([*mistakes, ""], [*mistakes.values(), 1 - sum(mistakes.values())])[0]
        if kind == "end" and steps:
            break
        first, second = (_other(draw, largest) if kind == "before" else largest), (_other(draw, digit) if kind == "digit" else digit)
        largest = min(first, second) if kind == "larger" else max(first, second)
        steps.append(f"{first},{second}:{largest}")
    if draw.random() < mistakes.get("end", 0):
        return steps
    return [*steps, f"So {_other(draw, largest) if draw.random() < mistakes.get('digit', 0) else largest}."]


def _other(draw: random.Random, digit: int) -> int:
    return (digit + draw.randrange(1, 10)) % 10


def main() -> None:
    for problem in problems():
        print(json.dumps(problem))


if __name__ == "__main__":
    main()
