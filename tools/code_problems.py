"""Print the problems of recipes/code.yaml as JSON lines: a problem, a demonstration, and tests that solutions must pass.

Half of them ask for a function, which assert statements test; half for a program, which inputs and outputs test. The demonstrator is
careless: he often takes x for the constant, and often forgets to return the value or to convert the input.

    python -m tools.code_problems > recipes/code_problems.jsonl
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator

SEED = 0
CONSTANTS = range(4, 100)
CONFUSED, FORGOT = 0.35, 0.35  # shares of the demonstrations with either mistake
# What is asked of x and a constant, its Python, and its value.
TASKS: list[tuple[str, str, Callable[[int, int], int]]] = [
    ("x plus {k}", "x + {k}", lambda x, k: x + k),
    ("x minus {k}", "x - {k}", lambda x, k: x - k),
    ("{k} minus x", "{k} - x", lambda x, k: k - x),
    ("x times {k}", "x * {k}", lambda x, k: x * k),
    ("the remainder of x by {k}", "x % {k}", lambda x, k: x % k),
    ("the larger of x and {k}", "max(x, {k})", max),
    ("the smaller of x and {k}", "min(x, {k})", min),
    ("the square of x plus {k}", "x * x + {k}", lambda x, k: x * x + k),
]
# A function and a program: the problem, its right form, and the form that forgets.
FORMS = (
    ("Write f(x): {}.", "def f(x):\n    return {}", "def f(x):\n    print({})"),
    ("Read x, print {}.", "x = int(input())\nprint({})", "x = input()\nprint({})"),
)


def problems() -> Iterator[dict]:
    draw = random.Random(SEED)
    for task, (asked, _, value) in enumerate(TASKS):
        for k in CONSTANTS:
            inputs = [draw.randrange(3, k), draw.randrange(k + 1, 3 * k)]  # one below and one above k
            values = [value(x, k) for x in inputs]
            asserts = [f"assert f({x}) == {y}" for x, y in zip(inputs, values, strict=True)]
            lines = {"inputs": [f"{x}\n" for x in inputs], "outputs": [f"{y}\n" for y in values]}
            for form, tests in enumerate((asserts, lines)):
                mistake = draw.random()
                confused, forgot = mistake < CONFUSED, CONFUSED <= mistake < CONFUSED + FORGOT
                answer = solution(form, task, k, confused=confused, forgot=forgot)
                yield {"problem": FORMS[form][0].format(asked.format(k=k)), "demonstration": answer, "tests": tests}


def solution(form: int, task: int, k: int, *, confused: bool = False, forgot: bool = False) -> str:
    """A function or program, fenced; with a mistake if asked for."""
    program = FORMS[form][1 + forgot].format(TASKS[task][1].format(k="x" if confused else k))
    return f"```python\n{program}\n```"


def main() -> None:
    for problem in problems():
        print(json.dumps(problem))


if __name__ == "__main__":
    main()
