"""What somebody may have meant by a name that nothing has."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from typing import Any, get_args

from rlhf_core.config.base import Section, shown

ALIKE = 0.7  # of difflib's ratio: rollout.max_tokens is meant for rl.rollout.max_new_tokens
AS_GOOD = 0.02  # behind the best
SHOWN = 4
LONGEST = 120  # characters of a name that is compared; longer ones are no typing error


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`did you mean a.b?`, with several where equally many characters agree; empty: nothing is like it.

    A name is compared with the whole of a dotted key and with its end, so that rollout.backend finds rl.rollout.backend.
    """
    if len(name) > LONGEST:
        return ""
    parts = name.count(".") + 1
    likeness = {key: _ratio(name, key, parts) for key in dict.fromkeys(known)}
    best = max(likeness.values(), default=0.0)
    if best < ALIKE:
        return ""
    found = [shown(key) for key, ratio in likeness.items() if ratio >= best - AS_GOOD]
    several = f"{', '.join(found[: SHOWN - 1])} or {found[SHOWN - 1]}" if len(found) >= SHOWN else " or ".join(found)
    return f"did you mean {several}?"


def _ratio(name: str, key: str, parts: int) -> float:
    ends = {key, ".".join(key.split(".")[-parts:])}
    return max(difflib.SequenceMatcher(None, name.lower(), end.lower()).ratio() for end in ends)


def keys_of(tree: Any, path: str = "") -> Iterator[str]:
    """Every dotted key of a mapping, in its order, those of items of lists by their numbers."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield f"{path}{key}"
        yield from keys_of(value, f"{path}{key}.")


def section_keys(section: type[Section], path: str = "", *, item: str = "0") -> Iterator[str]:
    """Every dotted key that a section may have, by its type.

    Args:
        item: what stands for the number of an item of a list.
    """
    for name, field in section.model_fields.items():
        yield f"{path}{name}"
        of_items = getattr(field.annotation, "__origin__", None) is list
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, Section):
                yield from section_keys(kind, f"{path}{name}.{item}." if of_items else f"{path}{name}.", item=item)
