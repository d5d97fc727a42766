"""The largest digit in steps: the labels and the judge of recipes/steps.yaml.

The response to "Largest of 4 7 2." is "4,7:7", "7,2:7" and "So 7." on lines of their own: the largest so far, the next digit and the larger
of both, and the result.
"""

import re

_STEP = re.compile(r"(\d),(\d):(\d)")


def right_steps(prompt: str, response: str) -> list[bool]:
    """Whether each step of a response is right. A step goes on from the step before it, right or wrong; the last one gives the result."""
    largest, *digits = map(int, re.findall(r"\d", prompt))
    *lines, last = response.split("\n")
    found = []
    for number, line in enumerate(lines):
        step = _STEP.fullmatch(line)
        first, second, result = map(int, step.groups()) if step else (-1, -1, largest)
        found.append((first, second, result) == (largest, digits[number] if number < len(digits) else -1, max(first, second)))
        largest = result
    return [*found, last == f"So {largest}." and len(lines) == len(digits)]


def solved(prompt: str, response: str) -> dict[str, bool]:
    """Whether the result is the right one, and whether every step is right."""
    largest = max(map(int, re.findall(r"\d", prompt)))
    return {"result": response.split("\n")[-1] == f"So {largest}.", "steps": all(right_steps(prompt, response))}
