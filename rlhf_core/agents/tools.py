"""Tools that a model calls: their JSON schemas, the calls in its replies, and their results. Every call has a deadline."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter, ValidationError, validate_call
from pydantic.errors import PydanticSchemaGenerationError

from rlhf_core.config import shown

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


class Tool:
    """A typed function that the model may call.

    schema: for the chat template, of the function's name, docstring and arguments.

    Raises:
        ValueError: an argument has no type, or one that JSON can't express.
    """

    def __init__(self, function: Callable[..., Any]):
        self.name = function.__name__
        arguments = inspect.signature(function).parameters.values()
        if untyped := [a.name for a in arguments if a.annotation is inspect.Parameter.empty]:
            raise ValueError(f"tool {self.name}: expected a type for each argument, got none for {untyped}; annotate them")
        try:
            parameters = TypeAdapter(function).json_schema()
        except (PydanticSchemaGenerationError, TypeError, ValueError, NameError) as error:
            raise ValueError(f"tool {self.name}: expected types that JSON has, got: {shown(str(error))}; change them") from error
        about = {"name": self.name, "description": inspect.getdoc(function) or "", "parameters": parameters}
        self.schema = {"type": "function", "function": about}
        self._call, self._is_async = validate_call(function), inspect.iscoroutinefunction(function)

    async def __call__(self, arguments: Mapping[str, Any]) -> Any:
        """Return the function's value. A function that isn't async runs in a thread; arguments are converted to their types."""
        return await (self._call(**arguments) if self._is_async else _in_thread(lambda: self._call(**arguments)))


@dataclass(frozen=True)
class OutsideTool:
    """A tool that runs in another process, which sends its schema and its results."""

    schema: dict[str, Any]

    @property
    def name(self) -> str:
        return self.schema["function"]["name"]

    async def __call__(self, arguments: Mapping[str, Any]) -> Any:
        raise RuntimeError(f"{self.name} runs outside of this process")


@dataclass
class ToolCall:
    """A call in a reply.

    failed: `run` returned an error; None: it wasn't run.
    """

    name: str
    arguments: dict[str, Any]
    failed: bool | None = None
    _tools: Mapping[str, Tool | OutsideTool] = field(default_factory=dict, repr=False)
    _timeout: float = field(default=30.0, repr=False)

    async def run(self) -> str:
        """Return the tool's result as text: a string as it is, another value as JSON. An error is a text that begins with `error: `."""
        self.failed = True
        if self.name not in self._tools:
            return f"error: there is no tool {self.name}; there are {', '.join(self._tools)}"
        limit = asyncio.timeout(self._timeout)
        try:
            async with limit:
                value = await self._tools[self.name](self.arguments)
            result = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        except ValidationError as error:
            return "error: " + "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        except Exception as error:  # a user's tool may raise anything
            late = f"{self.name} took more than {self._timeout:g} s"
            return f"error: {late if limit.expired() else f'{type(error).__name__}: {error}'}"
        self.failed = False
        return result


def parse_calls(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Name and arguments of each `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, the form of Hermes and Qwen.

    No calls if one of them is malformed: the reply is then plain text.
    """
    found = []
    for block in _CALL.findall(text):
        try:
            call = json.loads(block)
        except (ValueError, RecursionError):
            return []
        if not (isinstance(call, dict) and isinstance(call.get("name"), str) and isinstance(call.get("arguments"), dict)):
            return []
        found.append((call["name"], call["arguments"]))
    return found


def without_calls(text: str) -> str:
    """Return a reply's text around its calls."""
    return _CALL.sub("", text).strip()


async def _in_thread(call: Callable[[], Any]) -> Any:
    """Return the call's value, from a thread that doesn't keep the process from ending."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(value: Any, error: BaseException | None) -> None:
        if not future.done():
            future.set_result(value) if error is None else future.set_exception(error)

    def work() -> None:
        value, failed = None, None
        try:
            value = call()
        except BaseException as error:  # a future can't hold a StopIteration
            failed = error if isinstance(error, Exception) and not isinstance(error, StopIteration) else RuntimeError(repr(error))
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(settle, value, failed)

    threading.Thread(target=work, name="tool", daemon=True).start()
    return await future
