"""An OpenAI-compatible endpoint on the loopback address, whose key says which episode a request belongs to.

POST /v1/chat/completions (streams too), GET /v1/models, POST /v1/episodes/reward; and for processes that play one episode after the other
POST /v1/episodes/claim with a worker's key, POST /v1/episodes/finish with an episode's.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import secrets
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress

from aiohttp import web
from pydantic import BaseModel, ConfigDict, ValidationError

from rlhf_core.agents.openai_forms import MODEL, ChatRequest, Refused, chunks_of
from rlhf_core.agents.session import AgentFailed, Session
from rlhf_core.config import shown

HOST = "127.0.0.1"
MAX_BODY = 32 * 2**20  # bytes of a request
BACKLOG = 1024  # connections that wait to be accepted
IDLE_SECONDS = 3600.0  # after which a connection is closed: clients keep theirs while the trainer works
CLAIM_SECONDS = 20.0  # after which a claim is answered without an episode
REMEMBERED = 4096  # keys of ended episodes

log = logging.getLogger("rlhf")


class _Finish(BaseModel):
    """How an episode ended.    error: why it has no score."""

    model_config = ConfigDict(strict=True, extra="forbid")
    score: float | int | None = None
    error: str | None = None


class _Reward(BaseModel):
    """The reward of a reply.    id: of its answer."""

    model_config = ConfigDict(strict=True, extra="forbid")
    id: str
    reward: float | int


class Worker:
    """A process that claims episodes.

    Args:
        most: episodes that it may have at once.

    claimed: key -> episode, of those that haven't ended.    has_asked: it has asked for one, so the command works.
    late: set once it was silent for too long.    gone: it has ended.
    """

    def __init__(self, most: int):
        self.claimed: dict[str, Session] = {}
        self._most, self.has_asked, self.gone = most, False, False
        self.late = asyncio.Event()

    @property
    def is_full(self) -> bool:
        return len(self.claimed) >= self._most

    def claim(self, key: str, session: Session) -> None:
        self.claimed[key] = session
        session.claims += 1


class Endpoint:
    """The server, and who may use it. All methods run in one event loop."""

    def __init__(self) -> None:
        self._sessions: dict[str, Session] = {}
        self._workers: dict[str, Worker] = {}
        self._ended: deque[str] = deque(maxlen=REMEMBERED)
        self._unclaimed: list[str] = []
        self._more = asyncio.Condition()
        self._told: set[str] = set()

    async def start(self) -> None:
        """Listen on a free port."""
        app = web.Application(client_max_size=MAX_BODY, middlewares=[self._guard])
        app.router.add_post("/v1/chat/completions", self._complete)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{name}", self._models)
        app.router.add_post("/v1/episodes/reward", self._reward)
        app.router.add_post("/v1/episodes/claim", self._claim)
        app.router.add_post("/v1/episodes/finish", self._finish)
        self._runner = web.AppRunner(app, access_log=None, keepalive_timeout=IDLE_SECONDS, shutdown_timeout=0.1)
        await self._runner.setup()
        self._site = web.TCPSite(self._runner, HOST, 0, backlog=BACKLOG)
        await self._site.start()
        self._port = self._runner.addresses[0][1]

    async def close(self) -> None:
        await self._runner.cleanup()

    @property
    def listens(self) -> bool:
        """Whether requests are accepted. Any thread may ask, also while the server closes: its sockets, which have no
        address then, aren't read."""
        return self._site._server.is_serving()

    @property
    def address(self) -> str:
        """What clients take as their base URL."""
        return f"http://{HOST}:{self._port}/v1"

    # Who may ask

    def open(self, session: Session) -> str:
        """Let requests play an episode. Returns the key."""
        key = f"sk-episode-{secrets.token_urlsafe(24)}"
        self._sessions[key] = session
        return key

    async def close_session(self, key: str) -> None:
        """The episode has ended; its key is refused from now on."""
        session = self._sessions.pop(key)
        self._ended.append(key)
        self._unclaimed = [other for other in self._unclaimed if other != key]
        for worker in self._workers.values():
            if worker.claimed.pop(key, None) is not None and session.is_silent:
                worker.late.set()
        await self._wake()

    def hire(self, *, most: int) -> tuple[str, Worker]:
        """Return a worker that claims up to so many episodes at once, and its key."""
        key, worker = f"sk-worker-{secrets.token_urlsafe(24)}", Worker(most)
        self._workers[key] = worker
        return key, worker

    def dismiss(self, key: str) -> None:
        self._workers.pop(key).gone = True

    async def offer(self, key: str, *, first: bool = False) -> None:
        """Let workers claim an episode.

        Args:
            first: before those that wait already.
        """
        if key in self._sessions:
            self._unclaimed.insert(0 if first else len(self._unclaimed), key)
        await self._wake()

    def end_all(self, error: AgentFailed) -> None:
        """No agent is left."""
        for session in self._sessions.values():
            session.end(error)

    async def _wake(self) -> None:
        """Let claims that wait look again."""
        async with self._more:
            self._more.notify_all()

    # Requests

    @web.middleware
    async def _guard(self, request: web.Request, handler: Callable[..., Awaitable[web.StreamResponse]]) -> web.StreamResponse:
        """Every refusal is JSON with its reason."""
        try:
            return await handler(request)
        except Refused as error:
            refused = error
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            refused = Refused(f"{where + ': ' if where else ''}{first['msg'].removeprefix('Value error, ')}")
        except web.HTTPException as error:
            refused = Refused(error.text or error.reason, status=error.status)
        return web.json_response(refused.body, status=refused.status)

    def _key(self, request: web.Request) -> str:
        """
        Raises:
            Refused: nobody has the key.
        """
        key = _sent_key(request)
        if key in self._sessions or key in self._workers:
            return key
        if key in self._ended:
            raise Refused("key: expected that of an episode in play, got that of one that has ended; stop", status=410)
        raise Refused("key: expected that of an episode, got another or none", status=401, code="invalid_api_key")

    def _session(self, request: web.Request) -> Session:
        """
        Raises:
            Refused: the key is that of a worker, or nobody's.
        """
        if (session := self._sessions.get(self._key(request))) is None:
            raise Refused("key: expected that of an episode, got a worker's; claim an episode first", status=403)
        return session

    async def _models(self, request: web.Request) -> web.StreamResponse:
        self._key(request)
        about = {"id": MODEL, "object": "model", "created": 0, "owned_by": "the run"}
        if (name := request.match_info.get("name")) is None:
            return web.json_response({"object": "list", "data": [about]})
        if name != MODEL:
            raise Refused(f"model: expected {MODEL}, got {shown(name)}", status=404, code="model_not_found")
        return web.json_response(about)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        session = self._session(request)
        asked = ChatRequest.model_validate_json(await request.read())
        self._tell(asked.ignored)
        answer = await session.answer(asked)
        if not asked.stream:
            return web.json_response(answer)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        usage = bool(asked.stream_options and asked.stream_options.include_usage)
        events = [*map(json.dumps, chunks_of(answer, with_usage=usage)), "[DONE]"]
        await response.write("".join(f"data: {event}\n\n" for event in events).encode())
        return response

    def _tell(self, ignored: list[str]) -> None:
        """Log parameters that are left to the run, each once."""
        if new := [name for name in ignored if name not in self._told]:
            self._told.update(new)
            log.warning("rl.environment: requests have %s, which the run's own sampling settings replace", ", ".join(new))

    async def _claim(self, request: web.Request) -> web.StreamResponse:
        """Return an episode for a worker: its key and its task. 204 if there is none for a while."""
        worker = self._workers.get(self._key(request))
        if worker is None:
            raise Refused("key: expected a worker's, got that of an episode; claim with the key of the environment", status=403)
        worker.has_asked = True

        def is_lost() -> bool:
            return worker.gone or request.transport is None or request.transport.is_closing()

        async with self._more:
            with suppress(TimeoutError):
                async with asyncio.timeout(CLAIM_SECONDS):
                    await self._more.wait_for(lambda: is_lost() or (self._unclaimed and not worker.is_full))
            if is_lost() or worker.is_full or not self._unclaimed:
                return web.Response(status=204)
            key = self._unclaimed.pop(0)
            worker.claim(key, session := self._sessions[key])
        return web.json_response({"key": key, "task": session.task_tree})

    async def _reward(self, request: web.Request) -> web.StreamResponse:
        """Return once the reward of a reply is noted. It may be told again."""
        session = self._session(request)
        told = _Reward.model_validate_json(await request.read())
        session.reward(told.id, told.reward)
        return web.json_response({})

    async def _finish(self, request: web.Request) -> web.StreamResponse:
        """Return the end of an episode. It may be told again."""
        if _sent_key(request) in self._ended:
            return web.json_response({})
        session = self._session(request)
        told = _Finish.model_validate_json(await request.read())
        if told.score is not None and not math.isfinite(told.score):
            raise Refused(f"score: expected a finite number or null, got {told.score}")
        session.end(told.score if told.error is None else AgentFailed("it says that it failed", [shown(told.error, 600)]))
        return web.json_response({})


def _sent_key(request: web.Request) -> str:
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""
