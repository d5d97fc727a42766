"""What doesn't fit together in params.yaml, all of it at once."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_core.config.base import Section
from rlhf_core.config.in_use import is_in_use, keys_in_use
from rlhf_core.config.params import Params


def conflicts(params: Params, *, rounds: bool = False) -> list[str]:
    """Every conflict among the keys that the configuration uses, as `key: expected X, got Y; what to do`, sorted by key.

    Args:
        rounds: of a series of rounds of iterative DPO.
    """
    used = keys_in_use(params, rounds=rounds)
    return sorted({conflict for conflict in conflicts_below(params, "") if is_in_use(key_of(conflict), used)})


def conflicts_below(section: Section, path: str) -> Iterator[str]:
    """Of a section and all sections in it, whether used or not.

    Args:
        path: of the section, with a dot behind it; empty: of the whole.
    """
    yield from (f"{path}{conflict}" for conflict in section.conflicts())
    for name in type(section).model_fields:
        value = getattr(section, name)
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else [(None, value)]
        for key, item in items:
            if isinstance(item, Section):
                yield from conflicts_below(item, f"{path}{name}." if key is None else f"{path}{name}.{key}.")


def key_of(conflict: str) -> str:
    return conflict.partition(": ")[0]
