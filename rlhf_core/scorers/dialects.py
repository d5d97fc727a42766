"""What is sent to a service that scores responses, and what it answers, in both dialects: our own (items) and OpenRLHF's."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlhf_core.config import shown

if TYPE_CHECKING:
    from rlhf_core.scorers.text import ScoreItem

    Named = list[tuple[str, ScoreItem]]  # items with a name that is unique in a call

VERSION = 1  # of the dialect items
MAX_METRICS = 32  # of an answer


@dataclass(frozen=True)
class Answer:
    """A well-formed answer to one request.

    scores: of each item, as they came. errors: the service's reasons for null. service: what the service says of itself.
    """

    scores: list[Any]
    errors: list[Any]
    metrics: dict[str, float]
    service: dict[str, str]


def finite(value: Any) -> float | None:
    """Return a JSON number as a finite float; None for anything else, true and false among it."""
    try:
        number = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def request_of_items(scorer: str, items: Named) -> dict[str, Any]:
    return {
        "version": VERSION,
        "scorer": scorer,
        "items": [
            {"id": name, "messages": item.messages, "response": item.response, "label": item.label, "metadata": item.metadata}
            for name, item in items
        ],
    }


def request_of_openrlhf(scorer: str, items: Named) -> dict[str, Any]:
    """Return what OpenRLHF's trainer sends to --reward.remote_url; query: prompt and response as the policy's template renders them."""
    return {
        "query": [item.rendered[1] for _, item in items],
        "prompts": [item.rendered[0] for _, item in items],
        "labels": [item.label for _, item in items],
    }


def answer_of_items(tree: Any, count: int) -> Answer:
    """Raises: ValueError: it isn't an answer for `count` items."""
    scores, errors, service = _list(tree, "scores", count), tree.get("errors"), tree.get("service")
    errors = errors if isinstance(errors, list) and len(errors) == count else [None] * count
    told = service if isinstance(service, dict) else {}
    own = {name: shown(told[name], 100) for name in ("name", "version") if isinstance(told.get(name), str)}
    return Answer(scores, errors, _metrics(tree.get("metrics")), own)


def answer_of_openrlhf(tree: Any, count: int) -> Answer:
    """Raises: ValueError: it isn't an answer for `count` items."""
    if count == 1 and isinstance(tree, dict) and finite(tree.get("rewards")) is not None:  # services for one query at a time
        tree = tree | {"rewards": [tree["rewards"]]}
    return Answer(_list(tree, "rewards", count), [None] * count, _metrics(tree.get("extra_logs")), {})


def _list(tree: Any, name: str, count: int) -> list[Any]:
    found = tree.get(name) if isinstance(tree, dict) else None
    if not isinstance(found, list):
        raise ValueError(f"expected an object with a list `{name}`")
    if len(found) != count:
        raise ValueError(f"expected {count} in `{name}`, one for each item, got {len(found)}")
    return found


def _metrics(tree: Any) -> dict[str, float]:
    """Return the numbers of an object by name; of a list with one for each item their mean. What is neither is left out."""
    found = {}
    for name, value in list(tree.items())[:MAX_METRICS] if isinstance(tree, dict) else ():
        numbers = [number for v in (value if isinstance(value, list) else [value]) if (number := finite(v)) is not None]
        if numbers:
            found[shown(name, 60)] = math.fsum(numbers) / len(numbers)
    return found


REQUESTS = {"items": request_of_items, "openrlhf": request_of_openrlhf}
ANSWERS = {"items": answer_of_items, "openrlhf": answer_of_openrlhf}
