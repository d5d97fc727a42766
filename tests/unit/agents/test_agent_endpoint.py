"""The endpoint that agents outside ask: sessions of the unmodified openai client, refusals, repeated requests, streams, tools."""

from __future__ import annotations

import asyncio
import http.client
import json
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from urllib.parse import urlsplit

import httpx
import openai
import pytest
from chat_templates import templated
from openai import AsyncOpenAI, OpenAI

from rlhf_core.agents.chat import Policy, Reply, Task
from rlhf_core.agents.endpoint import Endpoint
from rlhf_core.agents.environment import Environment
from rlhf_core.agents.openai_forms import ChatRequest
from rlhf_core.agents.session import AgentFailed, Session
from rlhf_core.agents.tools import Tool
from rlhf_core.config import EnvironmentConfig
from rlhf_core.engines.rollout.requests import Sample, SamplingSettings
from rlhf_core.models.tokenizer import encode_prompt, turn_end
from rlhf_core.types import Prompt, Rollout

TOKENIZER = templated("thinks")
TOKENIZER.chat_template = "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}" + TOKENIZER.chat_template
END = turn_end(TOKENIZER).trained[-1]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
THREADS = ThreadPoolExecutor(64)

Agent = Callable[[Task, str, str], Awaitable[float | None]]  # task, address, key -> score
AGENT: list[Agent] = []  # that `hosted` plays with
SESSIONS: list[Session] = []


def add(a: int, b: int) -> int:
    """The sum."""
    return a + b


SCHEMA = Tool(add).schema


async def hosted(task: Task, policy: Policy) -> float | None:
    """An episode of an agent that has its address and key only."""
    endpoint = await endpoint_here()
    session = Session(task, policy, timeout=5.0)
    key = endpoint.open(session)
    SESSIONS.append(session)
    try:
        return await AGENT[-1](task, endpoint.address, key)
    finally:
        session.close()
        await endpoint.close_session(key)


@cache
def started(loop: asyncio.AbstractEventLoop) -> asyncio.Task[Endpoint]:
    async def start() -> Endpoint:
        endpoint = Endpoint()
        await endpoint.start()
        return endpoint

    return loop.create_task(start())


async def endpoint_here() -> Endpoint:
    """One for all episodes of an event loop."""
    return await started(asyncio.get_running_loop())


@cache
def client_here(loop: asyncio.AbstractEventLoop | None) -> OpenAI | AsyncOpenAI:
    """A client takes 0.1 s to make."""
    return OpenAI(api_key="none") if loop is None else AsyncOpenAI(api_key="none")


def asynchronous(address: str, key: str) -> AsyncOpenAI:
    return client_here(asyncio.get_running_loop()).with_options(base_url=address, api_key=key)


def script(*texts: str) -> Callable:
    """An engine that says given texts, by the number of replies so far."""

    def generate(ids: list[list[int]], seeds: list[int], settings: SamplingSettings) -> list[Sample]:
        batches.append(len(ids))
        said = [texts[TOKENIZER.decode(of_one).count("<|im_start|>assistant") - 1] for of_one in ids]
        found = [[*TOKENIZER(text, add_special_tokens=False)["input_ids"], END][: settings.max_new_tokens] for text in said]
        return [Sample(ids, [-0.5] * len(ids), ids[-1] == END, version=1) for ids in found]

    batches = generate.batches = []
    return generate


def played(agent: Agent, *texts: str, count: int = 1, tokens: int = 300) -> list[Rollout]:
    AGENT.append(agent)
    return rollouts(hosted, script(*texts), count, tokens)


def rollouts(play: Callable, engine: Callable, count: int, tokens: int = 300) -> list[Rollout]:
    messages = [[{"role": "user", "content": f"Add {i}."}] for i in range(count)]
    prompts = [Prompt(f"p{i}", "made", m, encode_prompt(TOKENIZER, m), str(i)) for i, m in enumerate(messages)]
    how = {"stops": (END,), "max_length": 700, "deadline": 30.0, "takes_scores": True}
    environment = Environment(EnvironmentConfig(path=f"{__file__}:inside"), TOKENIZER, **how)
    environment._play = play  # a file's function would have globals of its own
    found = environment.play(prompts, list(range(count)), SamplingSettings(tokens, 1.0), engine)
    assert not any(r.dialogue.failed for r in found), "see the log"
    return found


async def inside(task, policy):
    """The agents below, as a function."""
    chat = policy.chat(task.messages, tools=[add])
    reply = await chat.generate()
    for call in reply.tool_calls:
        chat.tool(call, await call.run())
    reply = await chat.generate()
    chat.user("Sure?")
    return float(len((await chat.generate()).text) + int(task.label))


TEXTS = (f"Well.{CALL} or {CALL}", "It is 5.", "Yes.")
TOOL = {"role": "tool"}


async def by_async_client(task: Task, address: str, key: str) -> float:
    messages, ask = list(task.messages), asynchronous(address, key).chat.completions.create
    reply = (await ask(model="policy", messages=messages, tools=[SCHEMA])).choices[0].message
    messages.append(reply)
    messages += [TOOL | {"tool_call_id": c.id, "content": str(add(**json.loads(c.function.arguments)))} for c in reply.tool_calls]
    messages.append((await ask(model="gpt-any", messages=messages, tools=[SCHEMA])).choices[0].message)
    messages.append({"role": "user", "content": [{"type": "text", "text": "Sure?"}]})
    last = await ask(model="policy", messages=messages, tools=[SCHEMA], temperature=0.3, user="me")
    return float(len(last.choices[0].message.content) + int(task.label))


def by_sync_client(task: Task, address: str, key: str) -> float:
    """Sends replies back in its own words' form, and streams."""
    messages, ask = list(task.messages), client_here(None).with_options(base_url=address, api_key=key).chat.completions.create
    with ask(model="policy", messages=messages, tools=[SCHEMA], stream=True) as stream:
        deltas = [chunk.choices[0].delta for chunk in stream]
    calls = [c.model_dump(exclude={"index"}) for delta in deltas for c in delta.tool_calls or []]
    messages.append({"role": "assistant", "content": "".join(d.content or "" for d in deltas), "tool_calls": calls})
    messages += [TOOL | {"tool_call_id": c["id"], "content": "5"} for c in calls]
    messages.append({"role": "assistant", "content": ask(model="policy", messages=messages, tools=[SCHEMA]).choices[0].message.content})
    messages.append({"role": "user", "content": "Sure?"})
    last = ask(model="policy", messages=messages, tools=[SCHEMA])
    return float(len(last.choices[0].message.content) + int(task.label))


def by_bare_http(task: Task, address: str, key: str) -> float:
    """As any language can do it."""
    place = urlsplit(address)

    def ask(messages: list[dict]) -> dict:
        connection = http.client.HTTPConnection(place.hostname, place.port, timeout=20)
        body = json.dumps({"messages": messages, "tools": [SCHEMA]})
        connection.request("POST", f"{place.path}/chat/completions", body, {"Authorization": f"Bearer {key}"})
        return json.loads(connection.getresponse().read())["choices"][0]["message"]

    messages = list(task.messages)
    messages.append(reply := ask(messages))
    messages += [TOOL | {"tool_call_id": call["id"], "content": "5"} for call in reply["tool_calls"]]
    messages.append(ask(messages))
    messages.append({"role": "user", "content": "Sure?"})
    return float(len(ask(messages)["content"]) + int(task.label))


def in_thread(agent: Callable[[Task, str, str], float]) -> Agent:
    return lambda *arguments: asyncio.get_running_loop().run_in_executor(THREADS, agent, *arguments)


@pytest.mark.parametrize("agent", [by_async_client, in_thread(by_sync_client), in_thread(by_bare_http)], ids=["async", "sync", "http"])
def test_64_sessions_at_once_have_the_rollouts_of_a_play_in_the_process(agent):
    AGENT.append(agent)
    by_function, by_clients = script(*TEXTS), script(*TEXTS)
    expected = rollouts(inside, by_function, 64)
    found = rollouts(hosted, by_clients, 64)
    assert found == expected, "ids, log-probabilities, messages, scores and counts"
    assert by_clients.batches == by_function.batches == [64] * 3
    assert all('<tools>[{"type": "function", "function": {"name": "add",' in TOKENIZER.decode(r.prompt.prompt_ids) for r in found)
    assert [r.dialogue.score for r in found] == [4.0 + i for i in range(64)]


@pytest.mark.parametrize("schema", [SCHEMA, SCHEMA["function"]], ids=["as OpenAI's", "function alone"])
def test_tools_of_the_prompt_are_those_of_an_agent_that_sends_its_messages_alone(schema: dict):
    async def agent(task: Task, address: str, key: str) -> float:
        messages, create = [task.messages[0] | {"tools": [schema]}], asynchronous(address, key).chat.completions.create
        (choice,) = (await create(model="policy", messages=messages)).choices
        messages += [choice.message, *(TOOL | {"tool_call_id": c.id, "content": "5"} for c in choice.message.tool_calls)]
        return float(len((await create(model="policy", messages=messages)).choices[0].message.content))

    ((own,), (found,)) = (played(in_order, *TEXTS) for in_order in (by_async_client, agent))
    assert found.prompt == own.prompt and found.dialogue.calls == 2 and found.dialogue.score == len(TEXTS[1])


def test_an_answer_has_openais_form_and_tool_calls_apart_from_the_text():
    async def agent(task: Task, address: str, key: str) -> None:
        client = asynchronous(address, key)
        answer = await client.chat.completions.create(model="policy", messages=task.messages, tools=[SCHEMA])
        (choice,) = answer.choices
        assert (choice.finish_reason, choice.message.content, choice.message.role) == ("tool_calls", "Well. or", "assistant")
        assert [c.id for c in choice.message.tool_calls] == ["call_1_0", "call_1_1"]
        assert json.loads(choice.message.tool_calls[0].function.arguments) == {"a": 2, "b": 3}
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens > 20
        assert [model.id for model in (await client.models.list()).data] == ["policy"]
        assert (await client.models.retrieve("policy")).id == "policy"
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("other")

    (rollout,) = played(agent, *TEXTS)
    assert rollout.dialogue.score is None


def test_a_stream_is_the_answer_in_pieces_and_a_repeated_request_has_the_recorded_answer():
    async def agent(task: Task, address: str, key: str) -> None:
        create = asynchronous(address, key).chat.completions.create
        asked = {"model": "policy", "messages": task.messages, "tools": [SCHEMA]}
        whole, again = await asyncio.gather(create(**asked), create(**asked))
        assert whole == again == await create(**asked)
        chunks = [chunk async for chunk in await create(**asked, stream=True, stream_options={"include_usage": True})]
        message, deltas = whole.choices[0].message, [chunk.choices[0].delta for chunk in chunks[:-1]]
        assert "".join(d.content or "" for d in deltas) == message.content and deltas[0].role == "assistant"
        assert [c.model_dump(exclude={"index"}) for d in deltas for c in d.tool_calls or []] == [c.model_dump() for c in message.tool_calls]
        assert chunks[-2].choices[0].finish_reason == "tool_calls" and chunks[-1].usage == whole.usage and chunks[-1].choices == []

    (rollout,) = played(agent, *TEXTS)
    assert rollout.dialogue.turns == 1


def test_an_earlier_request_has_its_answer_so_that_another_process_can_take_over():
    async def agent(task: Task, address: str, key: str) -> float:
        return float(await by_async_client(task, address, key) == await by_async_client(task, address, key))

    (rollout,) = played(agent, *TEXTS)
    assert rollout.dialogue.score == 1.0 and (rollout.dialogue.turns, rollout.dialogue.calls) == (3, 2)


def test_log_probabilities_are_those_of_the_sampled_tokens_also_in_a_stream_and_of_a_recorded_answer():
    async def agent(task: Task, address: str, key: str) -> None:
        create = asynchronous(address, key).chat.completions.create
        asked = {"model": "policy", "messages": task.messages, "tools": [SCHEMA]}
        assert (await create(**asked)).choices[0].logprobs is None
        (choice,) = (await create(**asked, logprobs=True, top_logprobs=0)).choices
        tokens = choice.logprobs.content
        assert "".join(token.token for token in tokens) == f"{TEXTS[0]}<|im_end|>" and len(tokens) > 20
        assert {token.logprob for token in tokens} == {-0.5} and bytes(tokens[0].bytes).decode() == tokens[0].token
        chunks = [chunk async for chunk in await create(**asked, logprobs=True, stream=True)]
        assert [t for chunk in chunks if chunk.choices[0].logprobs for t in chunk.choices[0].logprobs.content] == tokens
        messages = [*task.messages, choice.message, *(TOOL | {"tool_call_id": c.id, "content": "é"} for c in choice.message.tool_calls)]
        second = await create(**(asked | {"messages": messages}), logprobs=True)
        assert "".join(token.token for token in second.choices[0].logprobs.content) == f"{TEXTS[1]}<|im_end|>"
        assert len(second.choices[0].logprobs.content) == second.usage.completion_tokens

    (rollout,) = played(agent, *TEXTS)
    assert rollout.dialogue.turns == 2


async def coached(task, policy):
    chat = policy.chat(task.messages)
    await chat.generate(learn=False)
    chat.reward(0.25)
    chat.user("Sure?")
    await chat.generate()
    chat.reward(-1.0)
    return 2.0


def test_replies_have_rewards_and_may_be_left_out_of_training_as_in_a_play():
    async def agent(task: Task, address: str, key: str) -> float:
        client = asynchronous(address, key)

        async def ask(**more) -> openai.types.chat.ChatCompletion:
            return await client.chat.completions.create(model="policy", messages=messages, **more)

        async def reward(reply: openai.types.chat.ChatCompletion, value: float) -> None:
            await client.post("/episodes/reward", cast_to=httpx.Response, body={"id": reply.id, "reward": value})

        messages = list(task.messages)
        first = await ask(extra_body={"learn": False})
        messages += [first.choices[0].message, {"role": "user", "content": "Sure?"}]
        second = await ask()
        for reply, value in ((second, -1.0), (first, 8.0), (first, 0.25), (first, 0.25)):  # late, corrected, told twice
            await reward(reply, value)
        for body, problem in (
            (
                {"id": "chatcmpl-3", "reward": 1.0},
                "id: expected that of an answer, got chatcmpl-3; there were ['chatcmpl-1', 'chatcmpl-2']",
            ),
            ({"id": first.id, "reward": "1"}, "reward.float"),
            ({"id": first.id, "reward": 1.0, "more": 1}, "more: Extra inputs"),
        ):
            code, error = await status(address, f"Bearer {key}", body, path="/episodes/reward")
            assert code == 400 and problem in error["message"], error
        code, error = await status(address, f"Bearer {key}", b'{"id": "chatcmpl-1", "reward": 1e999}', path="/episodes/reward")
        assert code == 400 and "reward: expected a finite number" in error["message"]
        return 2.0

    expected = rollouts(coached, script("A.", "B."), 2)
    assert played(agent, "A.", "B.", count=2) == expected
    assert [r.dialogue.rewards for r in expected] == [[0.25, -1.0]] * 2 and expected[0].dialogue.score == 1.25


async def status(address: str, header: str | None, body: dict | bytes, path: str = "/chat/completions") -> tuple[int, dict]:
    headers = {} if header is None else {"Authorization": header}
    async with httpx.AsyncClient(trust_env=False) as client:
        sent = {"content": body} if isinstance(body, bytes) else {"json": body}
        answer = await client.post(f"{address}{path}", headers=headers, **sent)
    return answer.status_code, answer.json()["error"]


USER = {"role": "user", "content": "Add 0."}


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({"n": 2}, "n: expected 1, got 2; the endpoint has no other"),
        ({"stop": ["x"]}, "stop: expected []"),
        ({"tool_choice": "required"}, "tool_choice: expected"),
        ({"logprobs": True, "top_logprobs": 2}, "top_logprobs: expected 0"),
        ({"response_format": {"type": "json_object"}}, "response_format: expected"),
        ({"functions": []}, "functions: expected no such parameter"),
        ({"messages": []}, "messages: List should have at least 1 item"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages.0.content"),
        ({"max_tokens": 0}, "max_tokens: Input should be greater than or equal to 1"),
        ({"messages": [USER] * 300}, "expected fewer than model.max_length=700 tokens"),
        (b"{", "Invalid JSON"),
    ],
)
def test_what_the_endpoint_does_not_have_is_refused_with_a_reason(body, problem):
    async def agent(task: Task, address: str, key: str) -> None:
        code, error = await status(address, f"Bearer {key}", body if isinstance(body, bytes) else {"messages": [USER], **body})
        assert code == 400 and problem in error["message"] and error["type"] == "invalid_request_error", error
        assert not SESSIONS[-1].asked
        await asynchronous(address, key).chat.completions.create(model="policy", messages=[USER])

    played(agent, "A.")


def test_only_an_episodes_key_is_let_in_and_only_while_it_is_played():
    keys = []

    async def agent(task: Task, address: str, key: str) -> None:
        keys.append(key)
        for wrong in (None, "Bearer", "Bearer sk-episode-x", f"Bearer {key[:-1]}", key, f"Basic {key}"):
            code, error = await status(address, wrong, {"messages": [USER]})
            assert (code, error["code"]) == (401, "invalid_api_key"), wrong
        with pytest.raises(openai.AuthenticationError, match="expected that of an episode"):
            await asynchronous(address, "sk-no").models.list()
        await asynchronous(address, key).chat.completions.create(model="policy", messages=[USER])

    played(agent, "A.", count=2)
    assert len(set(keys)) == 2


def test_an_ended_episodes_key_is_refused_and_one_keys_requests_do_not_reach_another_episode():
    async def both() -> None:
        endpoint = Endpoint()
        await endpoint.start()
        task = Task([USER], None, {}, 3)
        sessions = [Session(task, None, timeout=5.0) for _ in range(2)]
        first, second = map(endpoint.open, sessions)
        assert await status(endpoint.address, f"Bearer {second}", {"nonsense": 1}) and first != second
        await endpoint.close_session(first)
        code, error = await status(endpoint.address, f"Bearer {first}", {"messages": [USER]})
        assert code == 410 and "one that has ended" in error["message"]
        code, error = await status(endpoint.address, f"Bearer {endpoint.hire(most=1)[0]}", {"messages": [USER]})
        assert code == 403 and "claim an episode first" in error["message"]
        code, _ = await status(endpoint.address, f"Bearer {second}", {}, path="/nothing")
        assert code == 404
        for session in sessions:
            session.close()
        await endpoint.close()

    asyncio.run(both())


REPLY = {"role": "assistant", "content": "A."}


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([{**USER, "content": "Other."}, REPLY, USER], "messages[0].content: expected the conversation so far unchanged, got"),
        (
            [USER, {**REPLY, "content": "B."}, USER],
            "messages[1].content: expected the conversation so far unchanged, got 'B.' in",
        ),
        ([USER, REPLY], "expected the whole conversation of 2 messages and a new one, got 2"),
        ([USER, REPLY, REPLY], "expected messages of user or tool behind a reply, got one of assistant"),
        ([USER, REPLY, {"role": "tool", "tool_call_id": "x", "content": "1"}], "expected the tool_call_id of a call, got x"),
    ],
)
def test_a_rewritten_history_is_refused_and_the_conversation_goes_on(messages, problem):
    async def agent(task: Task, address: str, key: str) -> float:
        create = asynchronous(address, key).chat.completions.create
        await create(model="policy", messages=[USER])
        code, error = await status(address, f"Bearer {key}", {"messages": messages})
        assert code == 400 and problem in error["message"], error
        code, error = await status(address, f"Bearer {key}", {"messages": [USER, REPLY, USER], "tools": [SCHEMA]})
        assert code == 400 and "expected those of the conversation's first request" in error["message"]
        return float((await create(model="policy", messages=[USER, REPLY, USER])).choices[0].message.content == "B.")

    (rollout,) = played(agent, "A.", "B.")
    assert rollout.dialogue.score == 1.0 and rollout.dialogue.turns == 2


def test_one_reply_at_a_time_and_none_after_the_last_token():
    async def agent(task: Task, address: str, key: str) -> float:
        create = asynchronous(address, key).chat.completions.create
        first = asyncio.ensure_future(create(model="policy", messages=[USER]))
        while not SESSIONS[-1].asked:
            await asyncio.sleep(0.01)
        code, error = await status(address, f"Bearer {key}", {"messages": [USER, USER]})
        assert code == 400 and ("one request at a time" in error["message"] or "messages[1]" in error["message"]), "or it has come already"
        said = (await first).choices[0].message
        cut = await create(model="policy", messages=[USER, said, USER], max_completion_tokens=3)
        assert cut.choices[0].finish_reason == "length" and cut.usage.completion_tokens == 3
        with pytest.raises(openai.BadRequestError, match="expected tokens that are left") as error:
            await create(model="policy", messages=[USER, said, USER, cut.choices[0].message, USER])
        assert error.value.code == "context_length_exceeded"
        return 1.0

    (rollout,) = played(agent, "A.", "one two three four five six")
    assert not rollout.finished and rollout.dialogue.score == 1.0


def test_an_opening_of_several_roles_is_as_the_template_takes_it():
    called = {"name": "add", "arguments": '{"a": 2}'}
    opening = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "2 and 3?"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "a", "type": "function", "function": called}]},
        {"role": "tool", "tool_call_id": "a", "content": "5"},
    ]

    async def agent(task: Task, address: str, key: str) -> None:
        await asynchronous(address, key).chat.completions.create(model="policy", messages=opening)

    (rollout,) = played(agent, "A.", "B.", "C.")
    text = TOKENIZER.decode(rollout.prompt.prompt_ids)
    assert "system\nBe brief." in text and '"arguments": {"a": 2}' in text and "<tool_response>\n5" in text


def test_a_silent_agent_has_a_deadline_that_a_wait_for_the_policy_does_not_count_for():
    async def watched() -> float:
        loop = asyncio.get_running_loop()

        class Slow:
            played = None

            def chat(self, messages, tools=()):
                self.played = self
                return self

            usage = (1, 1)

            async def generate(self, *, learn, limit):
                await asyncio.sleep(0.6)
                return Reply("A.", [], True)

        session = Session(Task([USER], None, {}, 1), Slow(), timeout=0.3)
        await session.within_timeout(session.answer(ChatRequest(messages=[USER])))
        began = loop.time()
        with pytest.raises(AgentFailed, match=r"silent for rl.environment.agent_timeout=0.3 s"):
            await session.within_timeout(asyncio.sleep(5))
        session.close()
        return loop.time() - began

    assert asyncio.run(watched()) == pytest.approx(0.3, abs=0.2)
