"""Serves a reward model over HTTP to scorers of kind http, in both of their dialects, until Ctrl-C or SIGTERM.

POST /score takes the dialect items, POST /get_reward OpenRLHF's; GET /health says which model it is.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import math
import shlex
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, TextIO

import torch
from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rlhf_core.config import shown
from rlhf_core.data.pictures import Picture, PictureFiles, pictures_of, with_pictures
from rlhf_core.data.tokens import pictures_beside
from rlhf_core.engines.vllm.server import ServerSettings
from rlhf_core.models.folder import step_separator
from rlhf_core.models.tokenizer import Unrenderable, load_tokenizer, turn_end
from rlhf_core.models.vision import Sight, sees, vision_of
from rlhf_core.preparation.drops import Dropped
from rlhf_core.preparation.pictures import PictureStore, of_base64
from rlhf_core.provenance.file_hashes import dvc_md5
from rlhf_core.scorers.dialects import VERSION
from rlhf_core.scorers.reward.input import scored_ids
from rlhf_core.scorers.reward.loaded import LoadedModel
from rlhf_core.scorers.reward.model import load_members
from rlhf_core.use.choice import Chosen

MAX_BODY = 32 * 2**20  # bytes of a request
MAX_ITEMS = 1024  # of a request
MAX_WAITING = 64  # requests; further ones are told to come again
BODY_SECONDS = 60.0  # for a request's body to arrive
STOP_SECONDS = 5.0  # for answers under way

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class _Form(BaseModel):
    model_config = ConfigDict(strict=True)


class _Message(_Form):
    model_config = ConfigDict(strict=True, extra="allow")  # such as tool_calls
    role: str
    content: str | list[dict[str, Any]]  # parts: texts, and for a model that sees pictures in base64


class _Metadata(_Form):
    finished: bool = True


class _Item(_Form):
    messages: list[_Message] = Field(min_length=1)
    response: str
    metadata: _Metadata = _Metadata()


class ItemsRequest(_Form):
    version: Literal[VERSION]  # type: ignore[valid-type]
    items: list[_Item] = Field(max_length=MAX_ITEMS)


class OpenRlhfRequest(_Form):
    query: list[str] = Field(max_length=MAX_ITEMS)


class RewardService:
    """Answers requests with a reward model's scores, one request after the other.

    Args:
        own: name and version that answers declare.
        key: that requests must send; None: none is asked for.
    """

    def __init__(self, model: LoadedModel, own: dict[str, str], *, key: str | None):
        self._model, self._own, self._key = model, own, key
        self._end, self._vision = turn_end(model.tokenizer), vision_of(model.tokenizer)
        self._worker, self._waiting = ThreadPoolExecutor(1), 0

    def app(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY, middlewares=[self._guard])
        app.router.add_post("/score", self._score)
        app.router.add_post("/get_reward", self._get_reward)
        app.router.add_get("/health", self._health)
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Refuse a wrong key and more waiting requests than allowed; every refusal is JSON with its reason."""
        sent = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if self._key is not None and not hmac.compare_digest(sent, f"Bearer {self._key}".encode()):
            return _refusal(401, "expected the key of this service as a bearer token, got another or none")
        if self._waiting >= MAX_WAITING:
            return _refusal(503, f"expected at most {MAX_WAITING} requests at once; come again", **{"Retry-After": "1"})
        self._waiting += 1
        try:
            return await handler(request)
        except web.HTTPException as error:  # no such path, or a body above the limit
            return _refusal(error.status, error.text or error.reason)
        except ValidationError as error:
            first = error.errors()[0]
            return _refusal(422, f"{'.'.join(map(str, first['loc'])) or 'body'}: {first['msg']}")
        except TimeoutError:
            return _refusal(408, f"expected the whole body within {BODY_SECONDS:g} s")
        finally:
            self._waiting -= 1

    async def _health(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"service": self._own})

    async def _score(self, request: web.Request) -> web.StreamResponse:
        items = ItemsRequest.model_validate_json(await _body(request)).items
        scores, errors = await self._in_turn(self._ids_of_items, items)
        return web.json_response({"scores": scores, "errors": errors, "service": self._own})

    async def _get_reward(self, request: web.Request) -> web.StreamResponse:
        texts = OpenRlhfRequest.model_validate_json(await _body(request)).query
        scores, _ = await self._in_turn(self._ids_of_texts, texts)
        return web.json_response({"rewards": scores, "scores": scores, "extra_logs": {}})

    async def _in_turn(
        self, encode: Callable[[Any, PictureStore], list[list[int] | str]], what: Sequence[Any]
    ) -> tuple[list[float | None], list[str | None]]:
        def work() -> tuple[list[float | None], list[str | None]]:
            with TemporaryDirectory() as scratch:  # for the pictures of this request
                return self._scores(encode(what, PictureStore(Path(scratch))), Path(scratch))

        return await asyncio.get_running_loop().run_in_executor(self._worker, work)

    def _scores(self, encoded: list[list[int] | str], pictures: Path) -> tuple[list[float | None], list[str | None]]:
        """Scores of token ids, and the reasons where there is none. `encoded` has a reason in place of ids that can't be scored."""
        model = replace(self._model, sight=None if self._vision is None else Sight(self._vision, PictureFiles(pictures)))
        found = model.score([None if isinstance(ids, str) else ids for ids in encoded]).tolist()
        scores = [score if math.isfinite(score) else None for score in found]
        unknown = "the model gives it no finite score"
        return scores, [None if s is not None else ids if isinstance(ids, str) else unknown for s, ids in zip(scores, encoded, strict=True)]

    def _ids_of_items(self, items: Sequence[_Item], pictures: PictureStore) -> list[list[int] | str]:
        return [self._fitting(lambda item=item: self._rendered(item, pictures)) for item in items]

    def _rendered(self, item: _Item, pictures: PictureStore) -> list[int]:
        messages = [_whole(message.model_dump(), pictures) for message in item.messages]
        return scored_ids(self._model.tokenizer, messages, item.response, finished=item.metadata.finished)

    def _ids_of_texts(self, texts: Sequence[str], _: PictureStore) -> list[list[int] | str]:
        return [self._fitting(lambda text=text: self._completed(text)) for text in texts]

    def _completed(self, text: str) -> list[int]:
        """Return ids of a rendered conversation. What the template writes after a turn's end is added: no sampled response has it."""
        ids, (trained, after) = self._model.tokenizer(text, add_special_tokens=False)["input_ids"], self._end
        return [*ids, *after] if trained and tuple(ids[-len(trained) :]) == trained else ids

    def _fitting(self, encode: Callable[[], list[int]]) -> list[int] | str:
        try:
            ids = encode()
        except (Unrenderable, Dropped) as error:
            return shown(str(error))
        if self._vision is not None and ids.count(self._vision.filler_id) != self._vision.num_tokens(pictures_beside(ids)):
            return f"texts with {self._vision.filler}, which stands for a picture"
        if len(ids) > self._model.max_length:
            return f"{len(ids)} tokens, more than the {self._model.max_length} of --max-length"
        return ids or "no tokens"


def _whole(message: dict[str, Any], pictures: PictureStore) -> dict[str, Any]:
    """Return a message with its pictures, as OpenAI's clients send them, kept in the store.

    Raises:
        Unrenderable, Dropped: a part is neither text nor a picture as a data URL.
    """
    if isinstance(message["content"], str):
        try:
            named = pictures_of([message])
        except (ValueError, KeyError, TypeError, AttributeError):
            raise Unrenderable("a message whose extra isn't that of prepared data") from None
        if named:
            raise Unrenderable("a picture by its hash, where a data URL is expected")
        return message
    parts: list[str | Picture] = []
    for part in message["content"]:
        address = part.get("image_url")
        url = address.get("url") if isinstance(address, dict) else address
        if isinstance(part.get("text"), str):
            parts.append(part["text"])
        elif isinstance(url, str) and url.startswith("data:"):
            parts.append(pictures.add(of_base64(url.partition(",")[2])))
        else:
            raise Unrenderable(f"a part of type {shown(str(part.get('type')))}, where text or image_url with a data URL is expected")
    return with_pictures(message, parts)


async def _body(request: web.Request) -> bytes:
    async with asyncio.timeout(BODY_SECONDS):
        return await request.read()


def _refusal(status: int, reason: str, **headers: str) -> web.Response:
    return web.json_response({"error": reason}, status=status, headers=headers)


def reward_service(chosen: Chosen, settings: ServerSettings) -> RewardService:
    """The service of a reward model; its declared version is the md5 of the model's folder, as in dvc.lock and in a version's lineage.

    Raises:
        ValueError: the folder has no reward model that scores a conversation with one number.
    """
    if step_separator(chosen.folder) is not None:
        raise ValueError(
            f"{chosen.folder}: expected a reward model that scores whole responses, got a process reward model; use it as a scorer of kind "
            "reward_model (docs/process.md)"
        )
    device, trust = torch.device("cuda" if torch.cuda.is_available() else "cpu"), settings.trust_remote_code
    members = load_members(
        chosen.folder, device=device, trust_remote_code=trust, training_dtype=settings.dtype, dtype=getattr(torch, settings.dtype)
    )
    vision = "frozen" if sees(chosen.folder) else None
    tokenizer = load_tokenizer(str(chosen.folder), trust_remote_code=trust, scores=True, vision=vision)
    own = {"name": chosen.name, "version": chosen.md5 or dvc_md5(chosen.folder)}
    return RewardService(LoadedModel(members, tokenizer, settings.max_length, device), own, key=settings.api_key)


def serve_rewards(chosen: Chosen, settings: ServerSettings, out: TextIO, *, key_variable: str | None) -> int:
    """Serve until a stop signal. Returns the exit code.

    Raises:
        ValueError: as `reward_service`.
    """
    app = reward_service(chosen, settings).app()

    def say(_: str) -> None:
        print(
            f"Serving {settings.name} at {settings.address}/score (dialect items) and {settings.address}/get_reward (openrlhf) until "
            f"Ctrl-C. Try it:\n{curl(settings, key_variable)}",
            file=out,
            flush=True,
        )

    web.run_app(app, host=settings.host, port=settings.port, print=say, access_log=None, shutdown_timeout=STOP_SECONDS)
    print("Stopped.", file=out, flush=True)
    return 0


def curl(settings: ServerSettings, key_variable: str | None) -> str:
    """Return a shell command with an example request. The key stays in its environment variable."""
    body = {"version": VERSION, "items": [{"messages": [{"role": "user", "content": "Hello"}], "response": "Hello to you."}]}
    key = "" if key_variable is None else f' -H "Authorization: Bearer ${key_variable}"'
    return f"curl {settings.address}/score -H 'Content-Type: application/json'{key} -d {shlex.quote(json.dumps(body))}"
