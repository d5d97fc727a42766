"""Scores from an HTTP service (kind http). Responses go out in batches, several at a time, and each is scored once.

Of an answer that breaks the protocol the scores that are numbers count, and only the other responses are sent again. What then has no score
is left unscored, with a logged reason. `rlhf_core/scorers/service.py` says what is tried again.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rlhf_core.config import ScorerConfig, shown
from rlhf_core.progress import Reasons
from rlhf_core.scorers.dialects import ANSWERS, REQUESTS, finite
from rlhf_core.scorers.service import Exchange, Service

if TYPE_CHECKING:
    from rlhf_core.scorers.dialects import Named
    from rlhf_core.scorers.text import ScoreItem

NULL = "the service left it unscored"  # kind of reason

log = logging.getLogger("rlhf")


@dataclass
class Found:
    """Results of one call.

    scores: of each item, NaN where there is none. missing: kind of reason -> the first such reason, and how many scores are missing.
    """

    scores: list[float]
    missing: dict[str, tuple[str, int]] = field(default_factory=dict)
    service: dict[str, str] = field(default_factory=dict)
    _sums: Counter[str] = field(default_factory=Counter)
    _counts: Counter[str] = field(default_factory=Counter)

    def miss(self, reason: str, *, count: int) -> None:
        kind = reason.partition(":")[0]
        first, before = self.missing.get(kind, (reason, 0))
        self.missing[kind] = first, before + count

    def measure(self, metrics: Mapping[str, float], *, count: int) -> None:
        for name, value in metrics.items():
            self._sums[name] += value * count
            self._counts[name] += count

    def means(self) -> dict[str, float]:
        """Metrics, weighted by the number of items in each answer."""
        return {name: self._sums[name] / count for name, count in self._counts.items()}


class HttpScorer:
    """A service that scores responses.

    Args:
        report: receives the reasons of missing scores.
        in_time: as for `Service`.
    Raises:
        ValueError: the service's key can't be read.
    """

    def __init__(self, config: ScorerConfig, report: Reasons, *, in_time: bool = False):
        self._config, self._report, self._service = config, report, Service(config, config.url, in_time=in_time)
        self._known: dict[str, str] = {}  # what the service said of itself

    def __call__(self, items: list[ScoreItem]) -> tuple[list[float], dict[str, float]]:
        """Return one score per item (NaN: not scored), and means of what the service measured."""
        found = asyncio.run(self._score(items))
        for reason, count in found.missing.values():
            self._report(reason, count=count)
        if found.service and found.service != self._known:
            self._tell_service(found.service)
        return found.scores, found.means()

    def trial(self, item: ScoreItem, *, seconds: float) -> dict[str, str]:
        """Ask for the score of one item. Returns what the service says of itself.

        Raises:
            ValueError: the service doesn't answer as it should. A score of null is an answer.
        """
        found = asyncio.run(self._score([item], seconds=min(seconds, self._config.timeout)))
        if faults := [reason for kind, (reason, _) in found.missing.items() if kind != NULL]:
            raise ValueError(
                f"scorer {self._config.name}: expected the service at {self._config.url} to score a made-up response, got: "
                f"{shown(faults[0], 1000)}; start the service, or correct this scorer's keys (docs/scorers.md)"
            )
        return found.service

    def _tell_service(self, service: dict[str, str]) -> None:
        name, own = self._config.name, " ".join(service.values())
        if self._known:
            before = " ".join(self._known.values())
            log.warning("scorer %s: expected scores of the service %s, as before, got those of %s; they may differ", name, before, own)
        else:
            log.info("scorer %s: %s calls itself %s", name, self._config.url, own)
        self._known = service

    async def _score(self, items: Sequence[ScoreItem], *, seconds: float | None = None) -> Found:
        found = Found([math.nan] * len(items))
        named = [(f"{item.metadata['id']}/{position}", item) for position, item in enumerate(items)]
        size = self._config.batch_size
        parts = [range(start, min(start + size, len(named))) for start in range(0, len(named), size)]
        await self._service.run(lambda exchange: [self._score_part(exchange, named, part, found) for part in parts], seconds=seconds)
        return found

    async def _score_part(self, exchange: Exchange, named: Named, part: range, found: Found) -> None:
        """Fill in the scores of one request's items, or count the reason why they have none."""
        missing = list(part)

        async def attempt() -> str:
            nonlocal missing
            missing, reason = await self._ask(exchange, named, missing, found)
            return reason

        if reason := await exchange.repeated(attempt):
            found.miss(reason, count=len(missing))

    async def _ask(self, exchange: Exchange, named: Named, asked: list[int], found: Found) -> tuple[list[int], str]:
        """Send one request. Returns the positions of items whose score isn't one, and why.

        Raises:
            MayPass, Refused: there is no answer with scores.
        """
        items = [named[i] for i in asked]
        names = items[0][0] if len(items) == 1 else f"{items[0][0]} to {items[-1][0]}"
        request, answer_of = REQUESTS[self._config.dialect], ANSWERS[self._config.dialect]
        where = f"{self._config.url}, item {names}"
        answer = await exchange.post(request(self._config.name, items), lambda tree: answer_of(tree, len(items)), where=where)
        found.measure(answer.metrics, count=len(items))
        found.service = answer.service or found.service
        faulty, reason = [], ""
        for i, score, error in zip(asked, answer.scores, answer.errors, strict=True):
            if score is None:
                why = f": {shown(error)}" if isinstance(error, str) else ""
                found.miss(f"{NULL}: {self._config.url}, item {named[i][0]}{why}", count=1)
            elif (number := finite(score)) is None:
                faulty.append(i)
                where = f"{self._config.url}, item {named[i][0]}"
                reason = reason or f"a finite number or null was expected of the service: {where}: got {shown(repr(score), 60)}"
            else:
                found.scores[i] = number
        return faulty, reason
