"""python -m tools.simulate [PART ...] [--replications N] [--seed N] [--write]

Each part is a module of this folder with `simulate(replications, rng) -> list[Row]`. --write puts each part's table into
docs/statistics.md, between the lines `<!-- simulated: PART -->` and `<!-- end -->`.
"""

from __future__ import annotations

import argparse
import importlib
import re
from pathlib import Path

import numpy as np

from tools.simulate.rows import table

PARTS = ("intervals", "rounds", "gate")
PAGE = Path("docs/statistics.md")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.simulate", description="How often each decision is wrong, and how often it finds a gain."
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; without any, all")
    parser.add_argument("--replications", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", action="store_true", help=f"put the tables into {PAGE}")
    arguments = parser.parse_args()
    if unknown := set(arguments.parts) - set(PARTS):
        parser.error(f"PART: expected some of {', '.join(PARTS)}, got {', '.join(sorted(unknown))}")
    for part in arguments.parts or PARTS:
        simulate = importlib.import_module(f"tools.simulate.{part}").simulate
        text = table(simulate(arguments.replications, np.random.default_rng(arguments.seed)))
        print(f"## {part}\n\n{text}\n", flush=True)
        if arguments.write:
            PAGE.write_text(replaced(PAGE.read_text(), part, text))


def replaced(page: str, part: str, text: str) -> str:
    """The page with another table of a part.

    Raises:
        ValueError: the page has no place for it.
    """
    found, count = re.subn(
        rf"(<!-- simulated: {part} -->\n).*?(<!-- end -->)", lambda m: f"{m[1]}\n{text}\n\n{m[2]}", page, count=1, flags=re.DOTALL
    )
    if not count:
        raise ValueError(f"{PAGE}: expected the lines `<!-- simulated: {part} -->` and `<!-- end -->`, got none; add them")
    return found


if __name__ == "__main__":
    main()
