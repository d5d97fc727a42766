"""Episodes: tools and their deadlines, scores, errors, the standard loop, and batches that don't depend on time."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import pytest
from chat_templates import templated

from rlhf_core.agents.chat import Sampled
from rlhf_core.agents.environment import Environment, load_play
from rlhf_core.agents.tools import Tool, ToolCall, parse_calls
from rlhf_core.config import EnvironmentConfig
from rlhf_core.engines.rollout.requests import Sample, SamplingSettings
from rlhf_core.models.tokenizer import encode_prompt, turn_end
from rlhf_core.types import Prompt, Rollout, Span

TOKENIZER = templated("thinks")
END = turn_end(TOKENIZER).trained[-1]
SAMPLING = SamplingSettings(200, 1.0)
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": "3"}}\n</tool_call>'


def add(a: int, b: int = 1) -> int:
    """The sum."""
    return a + b


def fail(why: str) -> str:
    raise KeyError(why)


def sleep(seconds: float) -> str:
    time.sleep(seconds)
    return "awake"


async def doze(seconds: float) -> dict:
    await asyncio.sleep(seconds)
    return {"dozed": seconds}


TOOLS = {function.__name__: Tool(function) for function in (add, fail, sleep, doze)}


def called(name: str, timeout: float = 5.0, **arguments) -> tuple[str, bool]:
    call = ToolCall(name, arguments, None, TOOLS, timeout)
    return asyncio.run(call.run()), call.failed


class Script:
    """An engine that says given texts, by the number of replies so far."""

    def __init__(self, *texts: str):
        self.texts, self.batches = texts, []

    def __call__(self, ids: list[list[int]], seeds: list[int], settings: SamplingSettings) -> list[Sample]:
        self.batches.append((ids, seeds, settings.max_new_tokens))
        said = [self.texts[TOKENIZER.decode(of_one).count("<|im_start|>assistant") - 1] for of_one in ids]
        return [self._sample(text, settings.max_new_tokens) for text in said]

    @staticmethod
    def _sample(text: str, limit: int) -> Sample:
        ids = [*TOKENIZER(text, add_special_tokens=False)["input_ids"], END][:limit]
        return Sample(ids, [-0.5] * len(ids), ids[-1] == END, version=1)


def environment(function: Callable | None = None, *, takes_scores: bool = True, deadline: float = 60.0, **config) -> Environment:
    path = {} if function is None else {"path": f"{__file__}:{function.__name__}"}
    settings = EnvironmentConfig(**path, **config)
    return Environment(settings, TOKENIZER, stops=(END,), max_length=400, deadline=deadline, takes_scores=takes_scores)


def prompts(count: int = 1) -> list[Prompt]:
    messages = [[{"role": "user", "content": f"Add {i}."}] for i in range(count)]
    return [Prompt(f"p{i}", "made", m, encode_prompt(TOKENIZER, m), str(i)) for i, m in enumerate(messages)]


def text(rollout: Rollout) -> str:
    return TOKENIZER.decode([*rollout.prompt.prompt_ids, *rollout.response_ids])


# Tools


@pytest.mark.parametrize(
    ("reply", "calls"),
    [
        (CALL, [("add", {"a": 2, "b": "3"})]),
        (f"I add.{CALL} and {CALL}", [("add", {"a": 2, "b": "3"})] * 2),
        ('<tool_call>{"name": "add", "arguments": {}}</tool_call>', [("add", {})]),
        ("5", []),
        (CALL.replace("</tool_call>", ""), []),
        (CALL.replace('"b"', "b"), []),
        (f"{CALL}<tool_call>add(2, 3)</tool_call>", []),
        ('<tool_call>["add", 2, 3]</tool_call>', []),
        ('<tool_call>{"name": "add", "arguments": [2, 3]}</tool_call>', []),
        ('<tool_call>{"name": 4, "arguments": {}}</tool_call>', []),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", []),
    ],
)
def test_calls_are_read_and_a_malformed_one_makes_the_reply_plain_text(reply, calls):
    assert parse_calls(reply) == calls


def test_a_schema_has_name_docstring_and_types():
    function = Tool(add).schema["function"]
    assert (function["name"], function["description"]) == ("add", "The sum.")
    assert function["parameters"]["required"] == ["a"]
    assert {name: about["type"] for name, about in function["parameters"]["properties"].items()} == {"a": "integer", "b": "integer"}


def test_a_tool_without_types_is_refused():
    with pytest.raises(ValueError, match=r"tool <lambda>: expected a type for each argument, got none for \['a'\]"):
        Tool(lambda a: a)


def test_results_are_text_and_errors_are_the_tools_message():
    assert called("add", a="2", b=3) == ("5", False)
    assert called("doze", seconds=0.0) == ('{"dozed": 0.0}', False)
    assert called("fail", why="no key") == ("error: KeyError: 'no key'", True)
    assert called("ad", a=1) == ("error: there is no tool ad; there are add, fail, sleep, doze", True)
    message, failed = called("add", a="two")
    assert failed and message.startswith("error: a: Input should be a valid integer")
    message, failed = called("add", c=2)
    assert failed and "a: Missing required argument" in message and "c: Unexpected keyword argument" in message


@pytest.mark.parametrize("name", ["sleep", "doze"])
def test_a_tool_has_a_deadline(name):
    began = time.monotonic()
    assert called(name, 0.1, seconds=30.0) == (f"error: {name} took more than 0.1 s", True)
    assert time.monotonic() - began < 10


# Episodes


async def sums(task, policy):
    chat = policy.chat(task.messages, tools=[add])
    reply = await chat.generate()
    assert [call.name for call in reply.tool_calls] == ["add"] and reply.text.startswith("Well.") and reply.finished
    chat.tool(reply.tool_calls[0], await reply.tool_calls[0].run())
    chat.reward(-0.25)
    reply = await chat.generate()
    chat.user("Sure?")
    last = await chat.generate()
    chat.user("never seen")
    return (reply.text == "5") + (last.text == f"yes {task.metadata['id']}")


def test_an_episode_is_one_rollout_of_spans_with_its_score():
    engine = Script(f"Well.{CALL}", "5", "yes p0")
    (rollout,) = environment(sums).play(prompts(), [7], SAMPLING, engine)
    assert [(span.version, span.trained) for span in rollout.spans] == [(1, True), (None, False), (1, True), (None, False), (1, True)]
    assert rollout.finished and rollout.dialogue.score == 1.75 and not rollout.dialogue.failed
    assert (rollout.dialogue.turns, rollout.dialogue.calls, rollout.dialogue.failed_calls) == (3, 1, 0)
    assert [m["role"] for m in rollout.dialogue.messages] == ["user", "assistant", "tool", "assistant", "user"]
    assert TOKENIZER.decode(rollout.response_ids[rollout.dialogue.start :]) == "yes p0<|im_end|>"
    assert "<tool_response>\n5\n</tool_response><|im_end|>\n<|im_start|>assistant\n5<|im_end|>\n<|im_start|>user\nSure?" in text(rollout)
    assert len({seeds[0] for _, seeds, _ in engine.batches}) == 3, "a seed of its own for each turn"


async def coached(task, policy):
    chat = policy.chat(task.messages)
    chat.reward(4.0)
    await chat.generate(learn=False)
    chat.reward(0.5)
    chat.reward(0.25)
    chat.user("again")
    await chat.generate()
    return 1.0


def test_a_reply_may_be_left_out_of_training_and_rewards_are_kept_by_reply():
    (rollout,) = environment(coached).play(prompts(), [0], SAMPLING, Script("a", "b"))
    assert [(span.version, span.trained) for span in rollout.spans] == [(1, False), (None, False), (1, True)]
    assert rollout.dialogue.rewards == [0.75, 0.0] and rollout.dialogue.score == 5.75
    assert rollout.num_sampled == 4 and all(rollout.dialogue.sampled[: len(rollout.spans[0].ids)])


def interrupted(after: int, *, finished: bool = True) -> tuple[Rollout, Rollout]:
    """A whole episode of `sums`, and the same after so many spans."""
    (whole,) = environment(sums).play(prompts(), [7], SAMPLING, Script(f"Well.{CALL}", "5", "yes p0"))
    return whole, replace(whole, spans=whole.spans[:after], finished=finished, dialogue=None)


@pytest.mark.parametrize(
    ("after", "finished", "known"), [(3, True, 4), (4, False, 4), (5, False, 4), (1, True, 2), (1, False, 0), (0, False, 0)]
)
def test_an_interrupted_episode_gets_its_replies_again(after: int, finished: bool, known: int):
    """A reply that was being sampled is asked for again."""
    whole, begun = interrupted(after, finished=finished)
    episodes = environment(sums).begin(200)
    episodes.start("k", begun)
    spans = list(whole.spans)
    while True:
        asked, ended = episodes.wait(["k"])
        if ended:
            break
        so_far = asked["k"].so_far
        assert so_far.spans == spans[: len(so_far.spans)] and len(so_far.spans) >= known and "k" in episodes
        episodes.deliver({"k": Sampled([spans[len(so_far.spans)]], True)})
    assert ended == {"k": whole} and "k" not in episodes


def test_an_interrupted_episode_whose_tools_answer_otherwise_asks_from_there_on():
    whole, begun = interrupted(5)
    first, _, *rest = begun.spans
    other = replace(begun, spans=[first, Span([9, 9], [0.0, 0.0], None, trained=False), *rest])
    episodes = environment(sums).begin(200)
    episodes.start("k", other)
    asked, _ = episodes.wait(["k"])
    assert asked["k"].so_far.spans == whole.spans[:2]
    episodes.cancel()


async def with_system(task, policy):
    chat = policy.chat([{"role": "system", "content": "Be brief."}, *task.messages])
    await chat.generate()


def test_an_episode_keeps_its_prompts_row_and_has_the_ids_that_the_engine_saw():
    (rollout,) = environment(with_system).play(prompts(), [0], SAMPLING, Script("a"))
    assert rollout.prompt.messages == prompts()[0].messages and "Be brief." in TOKENIZER.decode(rollout.prompt.prompt_ids)
    assert rollout.dialogue.opening == 2 and [m["role"] for m in rollout.dialogue.messages] == ["system", "user"]


async def slowly(task, policy):
    chat = policy.chat(task.messages, tools=[sleep])
    for turn in range(2):
        reply = await chat.generate()
        call = ToolCall("sleep", {"seconds": 0.3 if (int(task.label) + turn) % 2 else 0.1}, None, {"sleep": Tool(sleep)}, 5.0)
        chat.tool(call, await call.run())
    return float((await chat.generate()).text == reply.text)


def test_tools_run_at_the_same_time_and_batches_do_not_depend_on_when_they_end():
    engine, began = Script("a", "b", "c"), time.monotonic()
    environment(slowly).play(prompts(20), list(range(20)), SAMPLING, engine)
    assert [len(ids) for ids, _, _ in engine.batches] == [20, 20, 20]
    assert time.monotonic() - began < 4, "40 calls of 0.2 s"
    for ids, _, _ in engine.batches:
        assert [TOKENIZER.decode(of_one).partition(".")[0][-2:].strip() for of_one in ids] == [str(i) for i in range(20)]


async def endless(task, policy):
    chat = policy.chat(task.messages)
    while (await chat.generate()).finished:
        chat.user("more")
    return 0.5


def test_an_episode_is_cut_off_at_its_tokens():
    engine = Script(*["word"] * 50)
    (rollout,) = environment(endless).play(prompts(), [0], SamplingSettings(60, 1.0), engine)
    assert not rollout.finished and rollout.dialogue.score == 0.5
    assert 30 < rollout.num_tokens <= 60 and rollout.spans[-1].version == 1
    assert all(len(ids[0]) + room <= len(rollout.prompt.prompt_ids) + 60 for ids, _, room in engine.batches)


async def greedy_for_more(task, policy):
    chat = policy.chat(task.messages)
    while True:
        await chat.generate()
        chat.user("more")


async def impatient(task, policy):
    chat = policy.chat(task.messages)
    await asyncio.gather(chat.generate(), chat.generate())


def test_two_replies_at_once_are_refused(caplog):
    """Whether the first reply comes before the error is a matter of time."""
    with suppress(ValueError):
        assert environment(impatient).play(prompts(), [0], SAMPLING, Script("a"))[0].dialogue.failed
    assert "one reply at a time" in caplog.text


async def forgetful(task, policy):
    chat = policy.chat(task.messages)
    await chat.generate()
    await chat.generate()


async def no_number(task, policy):
    await policy.chat(task.messages).generate()
    return "good" if task.label == "0" else float("nan")


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (greedy_for_more, "expected tokens that are left"),
        (forgetful, "expected a message since the last reply"),
        (no_number, "expected a finite number or None, got 'good'"),
    ],
)
def test_an_error_after_a_reply_leaves_the_episode_without_a_score(function, why, caplog):
    rollouts = environment(function).play(prompts(2), [0, 1], SamplingSettings(40, 1.0), Script(*["word"] * 30))
    assert [rollout.dialogue.failed for rollout in rollouts] == [True, True]
    assert why in caplog.text and caplog.text.count("episodes with an error have no score") == 1


async def broken(task, policy):
    raise LookupError("no such world")


async def silent(task, policy):
    policy.chat(task.messages)


@pytest.mark.parametrize(
    ("function", "got"),
    [(broken, "LookupError: no such world"), (silent, "a return")],
)
def test_an_error_before_the_first_reply_ends_the_run(function, got):
    with pytest.raises(ValueError, match=f"expected a reply of the policy in each episode, got {got} before the first"):
        environment(function).play(prompts(3), [0, 1, 2], SAMPLING, Script("a"))


async def scores(task, policy):
    await policy.chat(task.messages).generate()
    return 1.0


def test_a_score_that_no_scorer_takes_ends_the_run():
    with pytest.raises(ValueError, match=r"kind: environment\} to rl.reward.scorers"):
        environment(scores, takes_scores=False).play(prompts(), [0], SAMPLING, Script("a"))


async def blocks(task, policy):
    await policy.chat(task.messages).generate()
    if task.label == "1":
        time.sleep(3)


def test_an_episode_that_blocks_has_a_deadline():
    with pytest.raises(TimeoutError, match=r"within rl.deadlines.step=0.3 s, got 1 episode that didn't"):
        environment(blocks, deadline=0.3).play(prompts(2), [0, 1], SAMPLING, Script("a"))


class Stopped(BaseException):
    """What a signal's handler raises."""


def test_a_signal_ends_episodes_at_once_and_others_can_follow():
    """As SIGTERM does in a step of RL (`Stop.interrupts`)."""

    def stop(*_):
        raise Stopped

    played, began, before = environment(sleepy), time.monotonic(), signal.signal(signal.SIGALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        with pytest.raises(Stopped):
            played.play(prompts(3), [0, 1, 2], SAMPLING, Script("a"))
    finally:
        signal.signal(signal.SIGALRM, before)
    assert time.monotonic() - began < 20
    assert played.play(prompts(4)[3:], [3], SAMPLING, Script("a"))[0].dialogue.score == 3.0


async def sleepy(task, policy):
    await policy.chat(task.messages).generate()
    if task.label != "3":
        await asyncio.sleep(60)
    return float(task.label)


# The standard loop


def test_tools_alone_make_the_standard_loop():
    played = environment(tools=[f"{__file__}:add", f"{__file__}:fail"], max_turns=3)
    both = CALL + CALL.replace("add", "fail").replace('"a": 2, "b": "3"', '"why": "x"')
    (rollout,) = played.play(prompts(), [0], SAMPLING, Script(both, "5"))
    assert rollout.dialogue.score is None and rollout.finished
    assert (rollout.dialogue.turns, rollout.dialogue.calls, rollout.dialogue.failed_calls) == (2, 2, 1)
    assert [m["content"] for m in rollout.dialogue.messages[2:]] == ["5", "error: KeyError: 'x'"]
    (rollout,) = played.play(prompts(), [0], SAMPLING, Script(*[CALL] * 9))
    assert (rollout.dialogue.turns, rollout.dialogue.calls) == (3, 2)


async def play(task):
    """Takes too little."""


def not_async(task, policy):
    """Not a coroutine."""


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"path": f"{__file__}:play"}, r"expected it to take \(task, policy\)"),
        ({"path": f"{__file__}:not_async"}, "expected `async def`"),
        ({"path": f"{__file__}:gone"}, "expected a function gone"),
        ({"tools": [f"{__file__}:not_async"]}, r"expected a type for each argument, got none for \['task', 'policy'\]"),
        ({"tools": [f"{__file__}:add"] * 2}, "expected different names"),
    ],
)
def test_what_can_not_be_played_is_refused(config, problem):
    with pytest.raises(ValueError, match=problem):
        load_play(EnvironmentConfig(**config))
