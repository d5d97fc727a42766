"""Scores from an HTTP service (kind http). Responses go out in batches, several at a time, and each is scored once.

Faults that may pass are tried again: a lost connection, 408, 425, 429, 5xx, and an answer that breaks the protocol. Of such an answer the
scores that are numbers count, and only the other responses are sent again. What then has no score is left unscored, with a logged reason.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import math
import os
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp

from rlhf_core.config import ScorerConfig, shown
from rlhf_core.process import LOOPBACK
from rlhf_core.progress import Reasons
from rlhf_core.scorers.dialects import ANSWERS, REQUESTS, Answer, finite

if TYPE_CHECKING:
    from rlhf_core.scorers.dialects import Named
    from rlhf_core.scorers.text import ScoreItem

MAX_ANSWER = 4 * 2**20  # bytes of an answer that are read
MAX_SAID = 2**16  # bytes of the body of a refusal that are read
MAX_KEY = 4096  # bytes of a key's file
CONNECT_SECONDS = 10.0
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 20.0  # upper limits of random pauses: the first, which doubles each time, and any
NULL = "the service left it unscored"  # kind of reason
PASSING = (408, 425, 429)  # statuses that are tried again, with all from 500 on

log = logging.getLogger("rlhf")
_jitter = random.Random()  # of its own: users' functions draw from the shared one


class Refused(Exception):
    """The service can't be used in this way; trying again wouldn't help."""


class MayPass(Exception):
    """A fault that may pass. after: seconds that the service asks to wait."""

    def __init__(self, reason: str, after: float = 0.0):
        super().__init__(reason)
        self.after = after


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
    Raises:
        ValueError: the service's key can't be read.
    """

    def __init__(self, config: ScorerConfig, report: Reasons):
        self._config, self._report, self._key = config, report, read_key(config)
        self._service: dict[str, str] = {}

    def __call__(self, items: list[ScoreItem]) -> tuple[list[float], dict[str, float]]:
        """One score per item (NaN: not scored), and means of what the service measured. Returns within `timeout`."""
        found = asyncio.run(self._score(items, seconds=self._config.timeout))
        for reason, count in found.missing.values():
            self._report(reason, count=count)
        if found.service and found.service != self._service:
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
        if self._service:
            before = " ".join(self._service.values())
            log.warning("scorer %s: expected scores of the service %s, as before, got those of %s; they may differ", name, before, own)
        else:
            log.info("scorer %s: %s calls itself %s", name, self._config.url, own)
        self._service = service

    async def _score(self, items: Sequence[ScoreItem], *, seconds: float) -> Found:
        config, found = self._config, Found([math.nan] * len(items))
        named = [(f"{item.metadata['id']}/{position}", item) for position, item in enumerate(items)]
        free, end = asyncio.Semaphore(config.concurrency), asyncio.get_running_loop().time() + seconds
        async with aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=config.request_timeout, sock_connect=CONNECT_SECONDS),
            connector=aiohttp.TCPConnector(limit=config.concurrency),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"Accept-Encoding": "identity"} | ({} if self._key is None else {"Authorization": f"Bearer {self._key}"}),
        ) as session:
            starts = range(0, len(named), config.batch_size)
            parts = [range(start, min(start + config.batch_size, len(named))) for start in starts]
            await asyncio.gather(*(self._score_part(session, free, named, part, end, found) for part in parts))
        return found

    async def _score_part(
        self, session: aiohttp.ClientSession, free: asyncio.Semaphore, named: Named, part: range, end: float, found: Found
    ) -> None:
        """Fill in the scores of one request's items, or count the reason why they have none."""
        missing, reason, clock = list(part), "no answer came", asyncio.get_running_loop().time
        try:
            async with asyncio.timeout_at(end), free:
                for attempt in range(self._config.retries + 1):
                    try:
                        missing, reason = await self._ask(session, named, missing, found)
                        after = 0.0
                    except MayPass as fault:
                        reason, after = str(fault), fault.after
                    if not missing:
                        return
                    pause = after + _jitter.uniform(0, min(LONGEST_PAUSE, FIRST_PAUSE * 2**attempt))
                    if attempt == self._config.retries or clock() + pause >= end:
                        break
                    await asyncio.sleep(pause)
        except Refused as refusal:
            reason = str(refusal)
        except TimeoutError:
            reason = f"the time for these responses (timeout) is over: {self._config.url}; before that: {reason}"
        found.miss(reason, count=len(missing))

    async def _ask(self, session: aiohttp.ClientSession, named: Named, asked: list[int], found: Found) -> tuple[list[int], str]:
        """Send one request. Returns the positions of items whose score isn't one, and why.

        Raises:
            MayPass, Refused: there is no answer with scores.
        """
        items = [named[i] for i in asked]
        names = items[0][0] if len(items) == 1 else f"{items[0][0]} to {items[-1][0]}"
        answer = await self._answer(session, items, where=f"{self._config.url}, item {names}")
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

    async def _answer(self, session: aiohttp.ClientSession, items: Named, *, where: str) -> Answer:
        body = json.dumps(REQUESTS[self._config.dialect](self._config.name, items)).encode()
        headers = {"Content-Type": "application/json", "Idempotency-Key": hashlib.sha256(body).hexdigest()[:32]}
        try:
            how = {"headers": headers, "allow_redirects": False, "proxy": proxy_for(self._config.url)}
            async with session.post(self._config.url, data=body, **how) as response:
                try:
                    await self._check_status(response, where)
                    content = await read_at_most(response, MAX_ANSWER, where)
                except BaseException:
                    response.close()  # what is unread stays unread
                    raise
        except (aiohttp.InvalidURL, aiohttp.ClientSSLError) as error:
            raise Refused(f"the service can't be reached: {where}: {type(error).__name__} {error}") from error
        except TimeoutError as error:
            raise MayPass(f"the service didn't answer in time: {where}, {type(error).__name__}") from error
        except aiohttp.ClientError as error:
            raise MayPass(f"the connection to the service failed: {where}: {type(error).__name__} {error}") from error
        try:
            return ANSWERS[self._config.dialect](json.loads(content), len(items))
        except (ValueError, RecursionError) as error:
            got = self._said(content)
            raise MayPass(f"the service's answer can't be used: {where}: {error}; got {got or 'nothing'}") from error

    async def _check_status(self, response: aiohttp.ClientResponse, where: str) -> None:
        status = response.status
        if status < 300:
            return
        if status < 400:
            to = shown(response.headers.get("Location", "nowhere").partition("?")[0])
            raise Refused(f"the service answered {status}: {where}: a redirect to {to}, which isn't followed; set url to the last address")
        said = self._said(await response.content.read(MAX_SAID))
        reason = f"the service answered {status} {shown(response.reason or '', 60)}: {where}: {said or 'without a reason'}"
        if status in PASSING or status >= 500:
            raise MayPass(reason, seconds_of(response.headers.get("Retry-After")))
        raise Refused(reason)

    def _said(self, content: bytes) -> str:
        """The beginning of a body for messages, without the key, which a service may repeat."""
        text = content.decode("utf-8", "replace")
        return shown(text if self._key is None else text.replace(self._key, "***"))


def read_key(config: ScorerConfig) -> str | None:
    """The service's key; None if the scorer names none.

    Raises:
        ValueError: there is no key where the scorer says.
    """
    if config.api_key_env is not None:
        place, key = f"the environment variable {config.api_key_env}", os.environ.get(config.api_key_env, "")
    elif config.api_key_file is not None:
        place = config.api_key_file
        try:
            with Path(place).expanduser().open("rb") as file:
                key = file.read(MAX_KEY + 1).decode("ascii", "replace").strip()
        except OSError as error:
            raise ValueError(f"scorer {config.name}: expected a key in {place}, got: {error.strerror}; put it there") from error
    else:
        return None
    if not key or len(key) > MAX_KEY or not (key.isascii() and key.isprintable()) or " " in key:
        got = "nothing" if not key else f"{len(key)} characters that aren't one word of ASCII"
        raise ValueError(f"scorer {config.name}: expected a key in {place}, got {got}; put it there")
    return key


def proxy_for(url: str) -> str | None:
    """The proxy that environment variables name for this address; none for this machine."""
    parts = urlsplit(url)
    return None if parts.hostname in LOOPBACK or proxy_bypass(parts.netloc) else getproxies().get(parts.scheme)


async def read_at_most(response: aiohttp.ClientResponse, limit: int, where: str) -> bytes:
    """The whole body.

    Raises:
        MayPass: it is larger; the rest isn't read.
    """
    too_large = MayPass(f"the service's answer is too large: {where}: expected at most {limit} bytes")
    if (response.content_length or 0) > limit:
        raise too_large
    content = bytearray()
    async for chunk in response.content.iter_chunked(2**16):
        content += chunk
        if len(content) > limit:
            raise too_large
    return bytes(content)


def seconds_of(retry_after: str | None) -> float:
    """Seconds that a header Retry-After asks to wait, which has seconds or a date; 0 where it has neither."""
    text = (retry_after or "").strip()
    if text.isdecimal():
        return float(text)
    try:
        date = parsedate_to_datetime(text)
    except ValueError:
        return 0.0
    return max(0.0, (date.replace(tzinfo=date.tzinfo or UTC) - datetime.now(UTC)).total_seconds())
