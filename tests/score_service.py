"""A service that scores responses, in a thread of the test's process, and that can be told to misbehave."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from aiohttp import web

Tree = dict[str, Any]
Misbehaviour = Callable[["Service", web.Request, Tree], Awaitable[web.StreamResponse | None]]  # None: answer as usual


@dataclass
class Service:
    """Scores a response by its number of characters, in both dialects.

    misbehave: is asked first, for each request. seconds: taken for each item, one after the other in a request.
    scored: response -> how often its score was sent. requests, keys: bodies and idempotency keys in order of arrival.
    """

    misbehave: Misbehaviour | None = None
    seconds: float = 0.0
    key: str | None = None
    url: str = ""
    scored: Counter[str] = field(default_factory=Counter)
    requests: list[Tree] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    most_at_once: int = 0
    _now: int = 0

    async def answer(self, request: web.Request) -> web.StreamResponse:
        tree = json.loads(await request.read())
        self.requests.append(tree)
        self.keys.append(request.headers["Idempotency-Key"])
        self._now += 1
        self.most_at_once = max(self.most_at_once, self._now)
        try:
            if self.key is not None and request.headers.get("Authorization") != f"Bearer {self.key}":
                return web.json_response({"error": f"not the key: {request.headers.get('Authorization')}"}, status=401)
            if self.misbehave is not None and (answer := await self.misbehave(self, request, tree)) is not None:
                return answer
            return web.json_response(await self.scores(tree))
        finally:
            self._now -= 1

    async def scores(self, tree: Tree) -> Tree:
        """The right answer; to be sent."""
        texts = tree["query"] if "query" in tree else [item["response"] for item in tree["items"]]
        await asyncio.sleep(self.seconds * len(texts))
        self.scored.update(texts)
        found = [float(len(text)) for text in texts]
        return {"rewards": found, "scores": found, "extra_logs": {"long": found}} if "query" in tree else {"scores": found}


@contextmanager
def serving(**settings: Any) -> Iterator[Service]:
    service = Service(**settings)
    with running(lambda: _app(service)) as address:
        service.url = f"{address}/score"
        yield service


def _app(service: Service) -> web.Application:
    app = web.Application()
    app.router.add_post("/score", service.answer)
    return app


@contextmanager
def running(make: Callable[[], web.Application]) -> Iterator[str]:
    """Run an aiohttp application on a free port of 127.0.0.1 in a thread. Yields its address."""
    ready, address, ends = threading.Event(), [], []

    async def serve() -> None:
        runner, stop = web.AppRunner(make(), shutdown_timeout=0.1), asyncio.Event()
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        address.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
        ends.append(partial(asyncio.get_running_loop().call_soon_threadsafe, stop.set))
        ready.set()
        await stop.wait()
        await runner.cleanup()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    assert ready.wait(10)
    try:
        yield address[0]
    finally:
        ends[0]()
        thread.join(10)
