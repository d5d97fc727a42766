"""Sums in steps: the labels and the judge of recipes/steps.yaml.

The response to "Add 4 7 2." is "4+7=1", "1+2=3" and "So 3." on lines of their own: the last digit of each sum, and the result.
"""

import re

_STEP = re.compile(r"(\d)\+(\d)=(\d)")


def right_steps(prompt: str, response: str) -> list[bool]:
    """Whether each step of a response is right. A step goes on from the step before it, right or wrong; the last one gives the result."""
    total, *digits = map(int, re.findall(r"\d", prompt))
    *lines, last = response.split("\n")
    found = []
    for number, line in enumerate(lines):
        step = _STEP.fullmatch(line)
        first, second, result = map(int, step.groups()) if step else (-1, -1, total)
        expected = digits[number] if number < len(digits) else -1
        found.append((first, second, result) == (total, expected, (total + expected) % 10))
        total = result
    return [*found, last == f"So {total}." and len(lines) == len(digits)]


def summed(prompt: str, response: str) -> dict[str, bool]:
    """Whether the result is the right one, and whether every step is right."""
    digits = list(map(int, re.findall(r"\d", prompt)))
    return {"result": response.split("\n")[-1] == f"So {sum(digits) % 10}.", "steps": all(right_steps(prompt, response))}
