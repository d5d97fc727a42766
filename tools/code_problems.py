"""Print the problems of recipes/code.yaml as JSON lines: a problem, a demonstration, and tests that solutions must pass.

Half of them ask for a function, which assert statements test; half for a program, which inputs and outputs test. The demonstrator is
careless: most of the demonstrations have one of three mistakes.

    python -m tools.code_problems > recipes/code_problems.jsonl
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator

SEED = 0
CONSTANTS = range(2, 62)
RIGHT = 0.3  # share of the demonstrations without a mistake
# What is asked of x and a constant, its Python, and its value.
TASKS: list[tuple[str, str, Callable[[int, int], int]]] = [
    ("x plus {k}", "x + {k}", lambda x, k: x + k),
    ("x minus {k}", "x - {k}", lambda x, k: x - k),
    ("x times {k}", "x * {k}", lambda x, k: x * k),
    ("{k} minus x", "{k} - x", lambda x, k: k - x),
    ("the remainder of x by {k}", "x % {k}", lambda x, k: x % k),
    ("the larger of x and {k}", "max(x, {k})", max),
    ("the smaller of x and {k}", "min(x, {k})", min),
    ("the square of x plus {k}", "x * x + {k}", lambda x, k: x * x + k),
]


# A function and a program: the problem, its right form, and one that forgets to return or to convert.
FORMS = (
    ("Write f(x): {}.", "def f(x):\n    return {}", "def f(x):\n    print({})"),
    ("Read x, print {}.", "x = int(input())\nprint({})", "x = input()\nprint({})"),
)


def problems() -> Iterator[dict]:
    draw = random.Random(SEED)
    for task, (asked, _, value) in enumerate(TASKS):
        for k in CONSTANTS:
            inputs = [draw.randrange(1, k), draw.randrange(k + 1, 3 * k)]  # tell the smaller from the larger, and x from its remainder
            values = [value(x, k) for x in inputs]
            asserts = [f"assert f({x}) == {y}" for x, y in zip(inputs, values, strict=True)]
            lines = {"inputs": [f"{x}\n" for x in inputs], "outputs": [f"{y}\n" for y in values]}
            for form, tests in enumerate((asserts, lines)):
                problem = FORMS[form][0].format(asked.format(k=k))
                yield {"problem": problem, "demonstration": careless(draw, form, task, k), "tests": tests}


def careless(draw: random.Random, form: int, task: int, k: int) -> str:
    """A solution, or one for another task or constant, or one that forgets to return or to convert."""
    mistake = draw.choice(("task", "constant", "form")) if draw.random() >= RIGHT else None
    if mistake == "task":
        task = draw.choice([other for other in range(len(TASKS)) if other != task])
    elif mistake == "constant":
        k += draw.choice((-1, 1))
    return solution(form, task, k, forgets=mistake == "form")


def solution(form: int, task: int, k: int, *, forgets: bool = False) -> str:
    """A function or program, fenced."""
    program = FORMS[form][1 + forgets].format(TASKS[task][1].format(k=k))
    return f"```python\n{program}\n```"


def main() -> None:
    for problem in problems():
        print(json.dumps(problem))


if __name__ == "__main__":
    main()
