"""The episodes of agents/notebook.py, played by a program of its own with the openai package (docs/agents.md).

With EPISODES_AT_ONCE it claims one episode after the other, so many at once; without, it plays the one that it reads, and prints the score.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from contextlib import suppress

import httpx
from openai import APIStatusError, AsyncOpenAI

from rlhf_core.data.clerk.notebook import number_on

FUNCTIONS = {"read": lambda page: number_on(page), "add": lambda a, b: a + b}


def described(name: str, description: str, *arguments: str) -> dict:
    """A tool of integers, as the model is told of it."""
    parameters = {"type": "object", "properties": {a: {"type": "integer"} for a in arguments}, "required": list(arguments)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOLS = [described("read", "The number on a page of the notebook.", "page"), described("add", "The sum of two numbers.", "a", "b")]


def result(call) -> str:
    try:
        return str(FUNCTIONS[call.function.name](**json.loads(call.function.arguments)))
    except Exception as error:  # a model may call anything with anything
        return f"error: {type(error).__name__}: {error}"


async def play(task: dict, client: AsyncOpenAI) -> float:
    """1 for the right answer, else 0."""
    messages = task["messages"]
    for _ in range(task["max_turns"]):
        answer = await client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
        reply = answer.choices[0].message
        if not reply.tool_calls:
            break
        messages.append(reply)
        messages += [{"role": "tool", "tool_call_id": call.id, "content": result(call)} for call in reply.tool_calls]
    return float(reply.content == f"It is {task['label']}.")


async def claim(client: AsyncOpenAI) -> None:
    """Play one episode after the other, until the run ends this process."""
    while True:
        claimed = await client.post("/episodes/claim", cast_to=httpx.Response)
        if claimed.status_code == 204:  # none for now
            continue
        episode = claimed.json()
        own = client.with_options(api_key=episode["key"])
        try:
            end = {"score": await play(episode["task"], own)}
        except Exception as error:  # this episode has no score; the others go on
            end = {"error": f"{type(error).__name__}: {error}"}
        with suppress(APIStatusError):  # the run has ended the episode
            await own.post("/episodes/finish", cast_to=httpx.Response, body=end)


async def main() -> None:
    client = AsyncOpenAI()  # address and key are in OPENAI_BASE_URL and OPENAI_API_KEY
    if at_once := int(os.environ.get("EPISODES_AT_ONCE", 0)):
        await asyncio.gather(*(claim(client) for _ in range(at_once)))
    else:
        print(await play(json.load(sys.stdin), client))


if __name__ == "__main__":
    asyncio.run(main())
