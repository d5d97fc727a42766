"""Print the problems of recipes/code.yaml as JSON lines: a problem, a solution, and tests that solutions must pass.

Half of them ask for a function, which assert statements test; half for a program, which inputs and outputs test.

    python -m tools.code_problems > recipes/code_problems.jsonl
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator

SEED = 0
CONSTANTS = range(2, 22)
INPUTS = 4  # of each problem
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


def problems() -> Iterator[dict]:
    draw = random.Random(SEED)
    for asked, python, value in TASKS:
        for k in CONSTANTS:
            inputs = draw.sample(range(30), INPUTS)
            wanted, expression = asked.format(k=k), python.format(k=k)
            yield {
                "problem": f"Write f(x): {wanted}.",
                "solution": fenced(f"def f(x):\n    return {expression}"),
                "tests": [f"assert f({x}) == {value(x, k)}" for x in inputs],
            }
            yield {
                "problem": f"Read x, print {wanted}.",
                "solution": fenced(f"x = int(input())\nprint({expression})"),
                "tests": {"inputs": [f"{x}\n" for x in inputs], "outputs": [f"{value(x, k)}\n" for x in inputs]},
            }


def fenced(program: str) -> str:
    return f"```python\n{program}\n```"


def main() -> None:
    for problem in problems():
        print(json.dumps(problem))


if __name__ == "__main__":
    main()
