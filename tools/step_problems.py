"""Print the problems of recipes/steps.yaml as JSON lines: a prompt, a demonstration, and a solution with a label for each step.

A problem asks for the last digit of a sum; each step adds a digit, and the last one gives the result. The demonstrator is careless. The
solutions with labels go wrong in more ways: in the sum, in the digit, in what they add to, and by ending too early.

    python -m tools.step_problems > recipes/step_problems.jsonl
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

from rewards.steps import right_steps

SEED = 0
PROBLEMS = 2600
SLIP = 0.22  # chance of a wrong sum in a step of the demonstrator
MISTAKES = {"sum": 0.12, "digit": 0.05, "before": 0.05, "end": 0.05}  # chances in a step of a solution with labels


def problems() -> Iterator[dict]:
    draw = random.Random(SEED)
    seen: set[tuple[int, ...]] = set()
    while len(seen) < PROBLEMS:
        digits = tuple(draw.randrange(10) for _ in range(draw.choice((3, 4, 4))))
        if digits in seen:
            continue
        seen.add(digits)
        prompt = f"Add {' '.join(map(str, digits))}."
        steps = solution(draw, digits, MISTAKES)
        labels = right_steps(prompt, "\n".join(steps))
        demonstration = "\n".join(solution(draw, digits, {"sum": SLIP}))
        yield {"prompt": prompt, "demonstration": demonstration, "completions": steps, "labels": labels}


def solution(draw: random.Random, digits: tuple[int, ...], mistakes: dict[str, float]) -> list[str]:
    """The steps of a solution, in each of which one kind of mistake may occur."""
    steps, total = [], digits[0]
    for digit in digits[1:]:
        kind = draw.choices([*mistakes, ""], [*mistakes.values(), 1 - sum(mistakes.values())])[0]
        if kind == "end" and steps:
            break
        first, second = (_other(draw, total) if kind == "before" else total), (_other(draw, digit) if kind == "digit" else digit)
        total = _other(draw, (first + second) % 10) if kind == "sum" else (first + second) % 10
        steps.append(f"{first}+{second}={total}")
    ends = "end" not in mistakes or draw.random() >= mistakes["end"]
    return [*steps, f"So {_other(draw, total) if draw.random() < mistakes.get('digit', 0) else total}."] if ends else steps


def _other(draw: random.Random, digit: int) -> int:
    return (digit + draw.randrange(1, 10)) % 10


def main() -> None:
    for problem in problems():
        print(json.dumps(problem))


if __name__ == "__main__":
    main()
