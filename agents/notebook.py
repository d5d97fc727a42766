"""An episode with the clerk's notebook: the model reads pages and adds their numbers, until it answers (recipes/agent.yaml)."""

from __future__ import annotations

from rlhf_core.data.clerk.notebook import number_on


def read(page: int) -> int:
    """The number on a page of the notebook."""
    return number_on(page)


def add(a: int, b: int) -> int:
    """The sum of two numbers."""
    return a + b


async def play(task, policy):
    """1 for the right answer, else 0."""
    chat = policy.chat(task.messages, tools=[read, add])
    for _ in range(task.max_turns):
        reply = await chat.generate()
        if not reply.tool_calls:
            break
        for call in reply.tool_calls:
            chat.tool(call, await call.run())
    return float(reply.text == f"It is {task.label}.")
