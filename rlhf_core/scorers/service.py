"""Requests to a service over HTTP: its key, connections, repetitions of faults that may pass, and limits of time and size.

Faults that may pass are tried again: a lost connection, 408, 425, 429, 5xx, and an answer that breaks the protocol.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import nullcontext
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp

from rlhf_core.config import ScorerConfig, TeacherService, shown
from rlhf_core.process import LOOPBACK

MAX_ANSWER = 4 * 2**20  # bytes of an answer that are read, unless its reader expects more
MAX_SAID = 2**16  # bytes of the body of a refusal that are read
MAX_KEY = 4096  # bytes of a key's file
CONNECT_SECONDS = 10.0
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 20.0  # upper limits of random pauses: the first, which doubles each time, and any
PASSING = (408, 425, 429)  # statuses that are tried again, with all from 500 on

_jitter = random.Random()  # of its own: users' functions draw from the shared one


class Refused(Exception):
    """The service can't be used in this way; trying again wouldn't help. status: of its answer; 0 without one."""

    def __init__(self, reason: str, status: int = 0):
        super().__init__(reason)
        self.status = status


class MayPass(Exception):
    """A fault that may pass. after: seconds that the service asks to wait."""

    def __init__(self, reason: str, after: float = 0.0):
        super().__init__(reason)
        self.after = after


class Service:
    """A scorer's or teacher's service.

    Args:
        url: that requests are sent to.
        in_time: all requests of a call must end within the scorer's timeout; otherwise each has so much time for itself.
    Raises:
        ValueError: the service's key can't be read.
    """

    def __init__(self, config: ScorerConfig | TeacherService, url: str, *, in_time: bool):
        self.config, self.url, self._key, self._in_time = config, url, read_key(config), in_time

    async def run(self, start: Callable[[Exchange], list[Coroutine[Any, Any, None]]], *, seconds: float | None = None) -> None:
        """Run coroutines that send requests by one Exchange, at the same time.

        Args:
            seconds: for all of them; None: those of the scorer's timeout, with `in_time`.
        """
        if seconds is None and self._in_time:
            seconds = self.config.timeout
        end = None if seconds is None else asyncio.get_running_loop().time() + seconds
        async with aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=self.config.request_timeout, sock_connect=CONNECT_SECONDS),
            connector=aiohttp.TCPConnector(limit=self.config.concurrency),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"Accept-Encoding": "identity"} | ({} if self._key is None else {"Authorization": f"Bearer {self._key}"}),
        ) as session:
            exchange = Exchange(self, session, end)
            async with asyncio.TaskGroup() as group:
                for coroutine in start(exchange):
                    group.create_task(coroutine)

    def said(self, content: bytes) -> str:
        """Return the beginning of a body for messages, without the key, which a service may repeat."""
        text = content.decode("utf-8", "replace")
        return shown(text if self._key is None else text.replace(self._key, "***"))


class Exchange:
    """The requests of one call, of which at most `concurrency` are sent at the same time.

    Args:
        end: time of the event loop at which all of them end; None: each ends by itself.
    """

    def __init__(self, service: Service, session: aiohttp.ClientSession, end: float | None):
        self._service, self._session, self._end = service, session, end
        self._free = asyncio.Semaphore(service.config.concurrency)

    async def repeated(self, attempt: Callable[[], Awaitable[str]]) -> str:
        """Call `attempt` until it returns an empty text, at most `retries` times more. Returns the last reason why it didn't, if so.

        Args:
            attempt: sends a request; it returns why another is needed, or raises MayPass or Refused.
        """
        config, reason, clock = self._service.config, "no answer came", asyncio.get_running_loop().time
        try:
            async with asyncio.timeout_at(self._end), self._free:
                end = clock() + config.timeout if self._end is None else self._end
                async with asyncio.timeout_at(end) if self._end is None else nullcontext():
                    for number in range(config.retries + 1):
                        after = 0.0
                        try:
                            reason = await attempt()
                        except MayPass as fault:
                            reason, after = str(fault), fault.after
                        if not reason:
                            return ""
                        pause = after + _jitter.uniform(0, min(LONGEST_PAUSE, FIRST_PAUSE * 2**number))
                        if number == config.retries or clock() + pause >= end:
                            break
                        await asyncio.sleep(pause)
        except Refused as refusal:
            reason = str(refusal)
        except TimeoutError:
            reason = f"the time for these responses (timeout) is over: {self._service.url}; before that: {reason}"
        return reason

    async def post(self, tree: dict[str, Any], read: Callable[[Any], Any], *, where: str, limit: int = MAX_ANSWER) -> Any:
        """Send one request. Returns what `read` makes of the answer's JSON.

        Args:
            read: raises ValueError if the answer breaks the protocol.
            where: address and subject, for messages.
            limit: bytes of an answer, at most.
        Raises:
            MayPass, Refused: there is no answer that can be used.
        """
        body = json.dumps(tree).encode()
        headers = {"Content-Type": "application/json", "Idempotency-Key": hashlib.sha256(body).hexdigest()[:32]}
        url = self._service.url
        try:
            async with self._session.post(url, data=body, headers=headers, allow_redirects=False, proxy=proxy_for(url)) as response:
                try:
                    await self._check_status(response, where)
                    content = await read_at_most(response, limit, where)
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
            return read(json.loads(content))
        except (ValueError, RecursionError) as error:
            got = self._service.said(content)
            raise MayPass(f"the service's answer can't be used: {where}: {error}; got {got or 'nothing'}") from error

    async def _check_status(self, response: aiohttp.ClientResponse, where: str) -> None:
        status = response.status
        if status < 300:
            return
        if status < 400:
            to = shown(response.headers.get("Location", "nowhere").partition("?")[0])
            reason = f"the service answered {status}: {where}: a redirect to {to}, which isn't followed; set url to the last address"
            raise Refused(reason, status)
        said = self._service.said(await response.content.read(MAX_SAID))
        reason = f"the service answered {status} {shown(response.reason or '', 60)}: {where}: {said or 'without a reason'}"
        if status in PASSING or status >= 500:
            raise MayPass(reason, seconds_of(response.headers.get("Retry-After")))
        raise Refused(reason, status)


def read_key(config: ScorerConfig | TeacherService) -> str | None:
    """Return the service's key; None if the params name none.

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
            raise ValueError(f"{config.subject}: expected a key in {place}, got: {error.strerror}; put it there") from error
    else:
        return None
    if not key or len(key) > MAX_KEY or not (key.isascii() and key.isprintable()) or " " in key:
        got = "nothing" if not key else f"{len(key)} characters that aren't one word of ASCII"
        raise ValueError(f"{config.subject}: expected a key in {place}, got {got}; put it there")
    return key


def proxy_for(url: str) -> str | None:
    """Return the proxy that environment variables name for this address; none for this machine."""
    parts = urlsplit(url)
    return None if parts.hostname in LOOPBACK or proxy_bypass(parts.netloc) else getproxies().get(parts.scheme)


async def read_at_most(response: aiohttp.ClientResponse, limit: int, where: str) -> bytes:
    """Return the whole body.

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
