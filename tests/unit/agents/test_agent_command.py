"""Episodes that a command plays: a process for each or processes that claim, how they end, and that nothing of them remains."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest
from chat_templates import templated

from rlhf_core.agents.environment import Environment
from rlhf_core.agents.outside import try_command
from rlhf_core.agents.process import AgentProcess
from rlhf_core.config import EnvironmentConfig
from rlhf_core.engines.rollout.requests import Sample, SamplingSettings
from rlhf_core.models.tokenizer import encode_prompt, turn_end
from rlhf_core.types import Prompt, Rollout

ROOT = Path(__file__).parents[3]
TOKENIZER = templated("thinks")
END = turn_end(TOKENIZER).trained[-1]
TEXTS = ("one", "two", "three")

# What an agent does at its second turn, by its argument and the number of its episode.
AGENT = """
import http.client, json, os, subprocess, sys, threading, time, urllib.parse

place = urllib.parse.urlsplit(os.environ["OPENAI_BASE_URL"])

def post(path, body, key):
    connection = http.client.HTTPConnection(place.hostname, place.port, timeout=60)
    connection.request("POST", place.path + path, json.dumps(body), {"Authorization": "Bearer " + key})
    answer = connection.getresponse()
    text = answer.read()
    if answer.status >= 400:
        raise SystemExit(text.decode())
    return json.loads(text) if text else None

def play(task, key):
    how, number, messages = sys.argv[1], int(task["label"]), list(task["messages"])
    for turn in range(3):
        misbehave(how, number, turn)
        messages.append(post("/chat/completions", {"messages": messages}, key)["choices"][0]["message"])
        messages.append({"role": "user", "content": f"And {number + turn}?"})
    return number + len(messages[-2]["content"])

def misbehave(how, number, turn):
    if how == "all" and turn == number % 2:
        if number in (2, 3):
            subprocess.Popen(["sh", "-c", "sleep 300; : " + __file__], start_new_session=True)
            sys.exit("out of luck")
        if number in (4, 5):
            time.sleep(300)
        if number in (6, 7):
            print("a score"); sys.exit(0)
    if how == "once" and number == 2 and turn == 1:
        try:
            os.close(os.open(__file__ + ".mark", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        os.kill(os.getpid(), 9)
    if how == "always" and number == 2 and turn == 1:
        os._exit(4)
    if how == "late" and number == 2 and turn == 1:
        time.sleep(300)

def work():
    while True:
        episode = post("/episodes/claim", {}, os.environ["OPENAI_API_KEY"])
        if episode:
            post("/episodes/finish", {"score": play(episode["task"], episode["key"])}, episode["key"])

open(__file__ + ".seen", "w").write(" ".join(os.environ))
if sys.argv[1] == "useless":
    sys.exit("no such module")
if "EPISODES_AT_ONCE" in os.environ:
    threads = [threading.Thread(target=work) for _ in range(int(os.environ["EPISODES_AT_ONCE"]))]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
else:
    print(play(json.load(sys.stdin), os.environ["OPENAI_API_KEY"]))
"""


async def inside(task, policy):
    chat, number = policy.chat(task.messages), int(task.label)
    for turn in range(3):
        reply = await chat.generate()
        chat.user(f"And {number + turn}?")
    return number + len(reply.text)


def engine(ids: list[list[int]], seeds: list[int], settings: SamplingSettings) -> list[Sample]:
    said = [TEXTS[TOKENIZER.decode(of_one).count("<|im_start|>assistant") - 1] for of_one in ids]
    found = [[*TOKENIZER(text, add_special_tokens=False)["input_ids"], END] for text in said]
    return [Sample(ids, [-0.5] * len(ids), True, version=1) for ids in found]


def prompts(count: int) -> list[Prompt]:
    messages = [[{"role": "user", "content": f"Add {i}."}] for i in range(count)]
    return [Prompt(f"p{i}", "made", m, encode_prompt(TOKENIZER, m), str(i)) for i, m in enumerate(messages)]


class Commands:
    """Environments of a command, closed at the end."""

    def __init__(self, folder: Path):
        self.file, self.opened = folder / "agent.py", []
        self.file.write_text(AGENT)

    def environment(self, how: str = "well", **config) -> Environment:
        settings = EnvironmentConfig(**({"command": ["python", "-S", "-E", str(self.file), how]} | config))
        found = Environment(settings, TOKENIZER, stops=(END,), max_length=400, deadline=30.0, takes_scores=True)
        self.opened.append(found)
        return found

    def play(self, count: int, how: str = "well", **config) -> list[Rollout]:
        return self.environment(how, **config).play(prompts(count), list(range(count)), SamplingSettings(300, 1.0), engine)

    def left(self) -> list[str]:
        """Command lines of processes of the agent."""
        found = [" ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])]
        return [line for line in found if str(self.file) in line]

    def wait_for_end(self, seconds: float = 5.0) -> None:
        until = time.monotonic() + seconds
        while self.left() and time.monotonic() < until:
            time.sleep(0.1)
        assert not self.left()


@pytest.fixture
def commands(tmp_path: Path):
    made = Commands(tmp_path)
    yield made
    for environment in made.opened:
        environment.close()
    made.wait_for_end()


def expected(count: int, commands: Commands) -> list[Rollout]:
    return commands.play(count, command=[], path=f"{__file__}:inside")


def test_a_process_for_each_episode_has_the_rollouts_of_a_play(commands, monkeypatch):
    for name, value in {"MY_TOKEN": "hidden", "WANTED_KEY": "shown", "OPENAI_API_KEY": "another", "RLHF_ENVIRONMENT": "WANTED_KEY"}.items():
        monkeypatch.setenv(name, value)
    assert commands.play(7, processes=3) == expected(7, commands), (
        "ids, messages, scores; the next episode takes the place of one that ended"
    )
    assert not commands.left()


def test_processes_that_claim_have_the_rollouts_of_a_play_in_every_step(commands):
    environment = commands.environment(processes=2, claims=3)
    for _ in range(2):
        found = environment.play(prompts(9), list(range(9)), SamplingSettings(300, 1.0), engine)
        assert found == expected(9, commands) and len(commands.left()) == 4, "two processes with their keepers"
    environment.close()
    assert not commands.left()


def test_a_process_sees_no_secrets_but_those_that_params_name(commands, monkeypatch):
    for name, value in {"MY_TOKEN": "a", "RAY_ADDRESS": "b", "WANTED_KEY": "c", "RLHF_ENVIRONMENT": "WANTED_KEY"}.items():
        monkeypatch.setenv(name, value)
    commands.play(1)
    seen = commands.file.with_name("agent.py.seen").read_text().split()
    assert {"WANTED_KEY", "PATH", "OPENAI_API_KEY", "OPENAI_BASE_URL"} < set(seen)
    assert not {"MY_TOKEN", "RAY_ADDRESS"} & set(seen)


def test_agents_that_crash_or_are_silent_leave_their_episodes_without_a_score(commands, caplog):
    """2, 3: exit; 4, 5: silent; 6, 7: no number. The even ones before the first reply, the odd ones after it."""
    began = time.monotonic()
    found = commands.play(8, "all", agent_timeout=4.0)
    assert time.monotonic() - began < 25
    assert [r.dialogue.failed for r in found] == [False, False] + [True] * 6
    assert [r.dialogue.score for r in found] == [5.0, 6.0] + [None] * 6
    assert found[:2] == expected(2, commands)
    assert [r.dialogue.turns for r in found[2:]] == [1] * 6, "one reply at least, which a rollout needs"
    assert caplog.text.count("episodes with an error have no score") == 3, "once for each reason"
    assert "got exit code 1; its error output ends with:\n    out of luck" in caplog.text
    assert not commands.left(), "processes in sessions of their own included"


def test_an_episode_whose_process_is_killed_is_played_on_by_another_one(commands, caplog):
    found = commands.play(6, "once", processes=2, claims=3)
    assert found == expected(6, commands) and "got exit code 137, which leaves " in caplog.text
    assert commands.file.with_name("agent.py.mark").exists()


@pytest.mark.parametrize(
    ("how", "why"), [("always", "2 processes ended that had claimed it"), ("late", "silent for rl.environment.agent_timeout=4 s")]
)
def test_an_episode_that_costs_its_process_twice_or_is_silent_has_no_score_and_others_have(commands, how, why, caplog):
    found = commands.play(4, how, processes=4, claims=1, agent_timeout=4.0)
    assert [r.dialogue.failed for r in found] == [False, False, True, False] and why in caplog.text
    assert [f for f in found if not f.dialogue.failed] == [e for i, e in enumerate(expected(4, commands)) if i != 2]


def test_a_command_that_claims_nothing_ends_the_run_by_name(commands):
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=r"useless: expected agents to go on; (.*\n)*.*ended 3 times (.*\n)*.*no such module"):
        commands.play(2, "useless", claims=2)
    assert time.monotonic() - began < 8


def lose_the_server(environment: Environment) -> None:
    asyncio.run_coroutine_threadsafe(environment._outside._endpoint.close(), environment._loop)


def lose_the_thread(environment: Environment) -> None:
    environment._loop.call_soon_threadsafe(environment._loop.stop)


@pytest.mark.parametrize(
    ("lose", "name"),
    [(lose_the_server, "its endpoint no longer listens"), (lose_the_thread, "the thread that plays episodes")],
)
def test_a_background_part_that_ends_ends_the_run_by_name_within_5_seconds(commands, lose, name):
    environment = commands.environment("late", processes=2, claims=2)
    lost = []

    def losing(*arguments):
        if not lost:
            lost.append(time.monotonic())
            lose(environment)
        return engine(*arguments)

    with pytest.raises(RuntimeError, match=name):
        environment.play(prompts(4), [0, 1, 2, 3], SamplingSettings(300, 1.0), losing)
    assert time.monotonic() - lost[0] < 5


def test_a_task_that_keeps_processes_and_fails_ends_the_run_by_name(commands):
    environment = commands.environment("always", processes=2, claims=2)

    async def fail(*_):
        raise KeyError("a defect")

    environment._outside._hand_back = fail
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="an unexpected KeyError: 'a defect'"):
        environment.play(prompts(4), [0, 1, 2, 3], SamplingSettings(300, 1.0), engine)
    assert time.monotonic() - began < 8


def test_a_command_does_not_outlive_its_keeper(commands):
    async def killed() -> int:
        command = ["sh", "-c", f"sleep 300; : {commands.file}"]
        async with AgentProcess(command, dict(os.environ), folder=ROOT) as process:
            while len(commands.left()) < 2:
                await asyncio.sleep(0.05)
            os.kill(process._process.pid, signal.SIGKILL)
            return await asyncio.wait_for(process.wait(), 5)

    assert asyncio.run(killed()) == -signal.SIGKILL
    commands.wait_for_end()


DRIVER = """
import sys
sys.path[:0] = [{root!r}, {tests!r}, {unit!r}]
from pathlib import Path
import test_agent_command as here
commands = here.Commands(Path({folder!r}))
print("begins", flush=True)
commands.play(4, "late", **{config!r})
"""


@pytest.mark.parametrize("config", [{}, pytest.param({"processes": 2, "claims": 2}, marks=pytest.mark.long)], ids=["each", "claims"])
def test_no_process_outlives_a_driver_that_is_killed(tmp_path, config):
    unit = str(Path(__file__).parent)
    text = DRIVER.format(root=str(ROOT), tests=str(ROOT / "tests"), unit=unit, folder=str(tmp_path), config=config)
    driver = subprocess.Popen([sys.executable, "-c", textwrap.dedent(text)], stdout=subprocess.PIPE, cwd=ROOT)
    commands = Commands(tmp_path)
    until = time.monotonic() + 60
    while len(commands.left()) < 4 and time.monotonic() < until:
        time.sleep(0.1)
    assert len(commands.left()) >= 4
    driver.kill()
    driver.wait()
    commands.wait_for_end()


def test_a_command_is_tried_with_a_policy_that_says_nothing(commands, caplog):
    row = {"id": "a", "source": "s", "messages": prompts(3)[2].messages, "label": "2"}
    command = ["python", "-S", "-E", str(commands.file)]

    def tried(how: str, **config) -> None:
        try_command(EnvironmentConfig(command=[*command, how], **config), TOKENIZER, row, max_length=400)

    with pytest.raises(ValueError, match=r"expected it to ask for a reply, got none; correct it: exit code 1.*\n.*no such module"):
        tried("useless")
    with pytest.raises(ValueError, match=r"expected it to ask for a reply, got none; (.*\n)*.*ended 3 times(.*\n)*.*no such module"):
        tried("useless", claims=4)
    tried("well")
    tried("well", claims=4)
    assert not caplog.text
    tried("always", claims=4)
    assert "a trial in which the model says nothing has no score" in caplog.text
    with pytest.raises(ValueError, match="expected a program, got none of the name nodde"):
        try_command(EnvironmentConfig(command=["nodde", "agent.js"]), TOKENIZER, row, max_length=400)
