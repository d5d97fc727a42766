"""Tokens of conversations: what is trained on is what the engine saw and sampled, over templates of every shape."""

from __future__ import annotations

import json
from random import Random

import pytest
from chat_templates import TEMPLATES, templated

from rlhf_core.agents.chat import Limits, Policy
from rlhf_core.agents.environment import Environment
from rlhf_core.agents.turns import MARKER, check_turns, ids_behind_reply, prompt_ids
from rlhf_core.config import EnvironmentConfig
from rlhf_core.data.schema import whole_message
from rlhf_core.engines.rollout.requests import Sample, SamplingSettings
from rlhf_core.models.template import Unrenderable
from rlhf_core.models.tokenizer import encode_conversation, encode_prompt, turn_end
from rlhf_core.types import Prompt

QUESTION = [{"role": "user", "content": "Please sort 4172."}]
TALKS = [name for name in TEMPLATES if name != "channels"]  # which ends a last turn otherwise than others
TAKES_TOOLS = ["chatml", "dated", "role_tokens", "thinks", "distilled", "endless", "parts"]
LIMITS = Limits(max_new_tokens=200, max_length=400, max_turns=8, tool_timeout=1.0)


def text_of(tokenizer, messages) -> str:
    """As the library renders a conversation that waits for a reply."""
    if tokenizer.chat_template == TEMPLATES["parts"]:
        messages = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)


@pytest.mark.parametrize("role", ["user", "tool"])
@pytest.mark.parametrize("name", TALKS)
def test_a_conversation_has_the_ids_of_its_rendering_where_replies_are_as_the_template_writes_them(name, role):
    if role == "tool" and name not in TAKES_TOOLS:
        pytest.skip("the template takes no tools")
    tokenizer = templated(name)
    messages, ids = list(QUESTION), encode_prompt(tokenizer, QUESTION)
    replies = []
    for reply in ("Certainly: 1247.", "Sorted: 12."):
        written, start = encode_conversation(tokenizer, messages, reply)
        ids += written[start:]
        replies.append(len(messages))
        messages += [{"role": "assistant", "content": reply}, {"role": role, "content": " Quick, sort 21.\n"}]
        ids += ids_behind_reply(tokenizer, messages, replies, ids[-1], tools=[])
    if name in ("distilled", "thinks", "endless"):  # thoughts are dropped from history; an end token that isn't the template's
        assert tokenizer.decode(ids).count("Quick, sort 21.") == 2
    else:
        assert ids == tokenizer(text_of(tokenizer, messages), add_special_tokens=False)["input_ids"]


def test_an_end_that_is_not_the_templates_stays_and_the_templates_follows():
    tokenizer = templated("chatml")
    messages = [*QUESTION, {"role": "assistant", "content": "12"}, {"role": "user", "content": "21"}]
    end, other = turn_end(tokenizer).trained[-1], tokenizer.eos_token_id
    assert end != other
    after_end = ids_behind_reply(tokenizer, messages, [1], end, tools=[])
    assert ids_behind_reply(tokenizer, messages, [1], other, tools=[]) == [end, *after_end]
    assert tokenizer.decode(after_end) == "\n<|im_start|>user\n21<|im_end|>\n<|im_start|>assistant\n"


def test_a_message_that_has_the_marker_is_no_reply():
    tokenizer = templated("chatml")
    messages = [*QUESTION, {"role": "assistant", "content": "12"}, {"role": "user", "content": f"{MARKER} {MARKER}q"}]
    ids = ids_behind_reply(tokenizer, messages, [1], turn_end(tokenizer).trained[-1], tools=[])
    assert tokenizer.decode(ids).startswith(f"\n<|im_start|>user\n{MARKER} {MARKER}q<|im_end|>")


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_that_can_not_go_on_is_refused_before_anything_starts(name):
    tokenizer, tools = templated(name), [{"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}]
    if name == "channels":
        with pytest.raises(ValueError, match="ends as a last one does, got it written"):
            check_turns(tokenizer, [])
    else:
        check_turns(tokenizer, [])
    if name in TAKES_TOOLS:
        check_turns(tokenizer, tools)
    else:
        with pytest.raises(ValueError, match=r"message of role (user|tool) behind a reply"):
            check_turns(tokenizer, tools)


def test_a_template_that_changes_a_reply_is_refused():
    tokenizer = templated("chatml")
    tokenizer.chat_template = TEMPLATES["chatml"].replace("m.content", "m.content | upper")
    with pytest.raises(ValueError, match="role user"):
        check_turns(tokenizer, [])
    with pytest.raises(Unrenderable, match="leaves out or changes"):
        ids_behind_reply(tokenizer, [*QUESTION, {"role": "assistant", "content": "1"}, *QUESTION], [1], 5, tools=[])


def test_the_prompt_has_the_schemas_where_the_template_writes_them():
    tokenizer = templated("chatml")
    tokenizer.chat_template = "{% if tools %}{{ tools | tojson }}{% endif %}" + TEMPLATES["chatml"]
    tool = {"type": "function", "function": {"name": "find_page", "description": "", "parameters": {}}}
    assert "find_page" in tokenizer.decode(prompt_ids(tokenizer, QUESTION, [tool]))
    assert prompt_ids(tokenizer, QUESTION, []) == encode_prompt(tokenizer, QUESTION)


def add(a: int, b: int) -> int:
    """The sum."""
    return a + b


class RandomEngine:
    """Answers any ids by random ones, by the seed alone, and remembers what it saw and answered."""

    def __init__(self, tokenizer):
        self.end, self.vocabulary = turn_end(tokenizer).trained[-1], len(tokenizer)
        self.call = tokenizer('<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>', add_special_tokens=False)[
            "input_ids"
        ]
        self.seen: list[tuple[list[int], Sample]] = []
        self.batches: list[int] = []

    def __call__(self, ids: list[list[int]], seeds: list[int], settings: SamplingSettings) -> list[Sample]:
        self.batches.append(len(ids))
        samples = [self._sample(seed, settings.max_new_tokens) for seed in seeds]
        self.seen += zip(map(list, ids), samples, strict=True)
        return samples

    def _sample(self, seed: int, limit: int) -> Sample:
        rng = Random(seed)
        said = self.call if rng.random() < 0.4 else [rng.randrange(self.vocabulary) for _ in range(rng.randrange(1, 30))]
        drawn = [token for token in said if token != self.end]
        drawn = [*drawn, self.end][:limit]
        return Sample(drawn, [-rng.random() for _ in drawn], drawn[-1] == self.end, version=3)


async def talk(task, policy):
    """Talks of random length, some with a tool."""
    has_tools = task.metadata["source"] == "tools"
    chat = policy.chat(task.messages, tools=[add] if has_tools else [])
    for turn in range(task.max_turns):
        reply = await chat.generate()
        if not reply.finished or (not reply.tool_calls and len(reply.text) % 4 == 0):
            break
        for call in reply.tool_calls:
            chat.tool(call, await call.run())
        if not reply.tool_calls:
            chat.user(f"Go on, {turn}.")
    return None


@pytest.mark.parametrize("name", TALKS)
def test_no_token_differs_from_what_the_engine_saw(name):
    """120 random conversations on each of 9 templates."""
    tokenizer = templated(name)
    engine, source = RandomEngine(tokenizer), "tools" if name in TAKES_TOOLS else "plain"
    environment = Environment(
        EnvironmentConfig(path=f"{__file__}:talk"), tokenizer, stops=(engine.end,), max_length=400, deadline=60.0, takes_scores=False
    )
    messages = [[{"role": "user", "content": f"Sort {number}."}] for number in range(60)]
    prompts = [Prompt(str(i), source, m, encode_prompt(tokenizer, m), None) for i, m in enumerate(messages)]
    rollouts = environment.play(prompts, list(range(120)), SamplingSettings(150, 1.0), engine, copies=2)
    left = list(engine.seen)
    for i, rollout in enumerate(rollouts):
        assert rollout.prompt.id == str(i // 2) and rollout.group_id == i // 2
        before = list(rollout.prompt.prompt_ids)
        assert before == encode_prompt(tokenizer, rollout.prompt.messages) or source == "tools"
        for span in rollout.spans:
            if span.version is None:
                assert not span.trained
            else:
                seen = next(entry for entry in left if entry[0] == before and entry[1].response_ids[: len(span.ids)] == span.ids)
                left.remove(seen)
                assert span.trained and span.version == 3 and span.logprobs == seen[1].logprobs[: len(span.ids)]
            before += span.ids
        assert rollout.spans[-1].trained and rollout.num_tokens <= 150
        assert rollout.dialogue.sampled == [span.trained for span in rollout.spans for _ in span.ids]
        assert rollout.response_ids[-1] == engine.end or not rollout.finished
    assert not left and max(r.dialogue.turns for r in rollouts) > 3
    assert (source == "plain") == (sum(r.dialogue.calls for r in rollouts) == 0)
    assert any(not r.finished for r in rollouts)
    again = environment.play(prompts, list(range(120)), SamplingSettings(150, 1.0), RandomEngine(tokenizer), copies=2)
    assert again == rollouts
    apart = environment.play(prompts[7:8], [14, 15], SamplingSettings(150, 1.0), RandomEngine(tokenizer), copies=2)
    assert [r.spans for r in apart] == [r.spans for r in rollouts[14:16]], "an episode doesn't depend on the others"


def test_earlier_calls_and_parts_of_a_prompt_are_rendered():
    tokenizer = templated("thinks")
    call = {"type": "function", "function": {"name": "find", "arguments": {"page": 4}}}
    messages = [*QUESTION, {"role": "assistant", "content": "", "extra": json.dumps({"tool_calls": [call]})}]
    messages += [{"role": "tool", "content": "9", "extra": json.dumps({"name": "find"})}]
    chat = Policy(Prompt("p", "s", messages, [], None), tokenizer, None, LIMITS, stops=()).chat(list(map(whole_message, messages)))
    assert chat._prompt.prompt_ids == encode_prompt(tokenizer, messages) and chat._messages == messages
    in_parts = [{"role": "user", "content": [{"type": "text", "text": "Please sort"}, {"type": "text", "text": "4172."}]}]
    chat = Policy(Prompt("p", "s", [], [], None), tokenizer, None, LIMITS, stops=()).chat(in_parts)
    assert "Please sort\n4172." in tokenizer.decode(chat._prompt.prompt_ids)


def test_a_policy_has_one_conversation():
    tokenizer = templated("chatml")
    policy = Policy(Prompt("p", "s", QUESTION, [], None), tokenizer, None, LIMITS, stops=())
    policy.chat(QUESTION)
    with pytest.raises(RuntimeError, match="one conversation an episode"):
        policy.chat(QUESTION)
