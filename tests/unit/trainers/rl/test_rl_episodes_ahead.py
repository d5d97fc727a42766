"""Episodes ahead of the trainer: lag, spans of several policies, tools that sleep, and runs that are killed."""

from __future__ import annotations

import asyncio
import hashlib
import time
from dataclasses import replace
from pathlib import Path

import pytest
from chat_templates import templated
from rl_here import Dies, EnginesHere, Killed, differences, rl_job_here, running, same, whole
from tiny_models import rl_job

from rlhf_core.agents.environment import Environment
from rlhf_core.engines.rollout.requests import Request, Sample
from rlhf_core.models.tokenizer import encode_prompt, turn_end
from rlhf_core.trainers.rl.ahead import CHECK_TOKENS
from rlhf_core.trainers.rl.data import PromptStream
from rlhf_core.trainers.rl.episodes import EpisodesAhead, resumed
from rlhf_core.trainers.rl.job import RlJob
from rlhf_core.trainers.rl.recovery import Replacements
from rlhf_core.trainers.rl.rollouts import RolloutEngines
from rlhf_core.trainers.rl.turns import GpuTimeSharing
from rlhf_core.types import Prompt, Rollout, Span

STEPS = 8
SLOWER = [1.0]  # factor of the tool's time


async def sleep(text: str) -> str:
    """Takes 0 to 20 ms, by the text."""
    await asyncio.sleep(SLOWER[0] * hashlib.sha256(text.encode()).digest()[0] / 255 * 0.02)
    return str(len(text))


async def talk(task, policy):
    """One to four turns, by what was said."""
    chat = policy.chat(task.messages)
    for turn in range(task.max_turns):
        reply = await chat.generate()
        if not reply.finished or (len(reply.text) + len(task.messages[0]["content"])) % 4 == turn:
            break
        chat.user(await sleep(f"{turn} {reply.text}"))


# Stop strings make replies of 1 to 40 tokens of the tiny model.
EPISODES = {
    "rl.environment": {"path": f"{__file__}:talk", "max_turns": 4},
    "rl.rollout.max_lag": 2,
    "rl.rollout.max_new_tokens": 60,
    "rl.reward.max_unscored_fraction": 0.9,  # the reward model has 64 positions
    "rl.rollout.stop": ["o", "s", "i"],
    "model.max_length": 128,
}


def job_of(folders: tuple[Path, Path], folder: Path, **changes) -> RlJob:
    return rl_job_here(folders, folder, **EPISODES | changes)


# The schedule, with engines and a trainer that only take time


class Scripted:
    """An engine whose replies have as many tokens as its prompt's id says, in `token` seconds each, however many it samples at a time.

    calls: of each, how many replies it had.
    """

    def __init__(self, token: float = 0.0):
        self.token, self.version, self.calls = token, 0, []

    def advance(self, requests: list[Request], sampling, due: int, *, stop_ids: tuple[int, ...], least: int) -> list[Sample]:
        left = [min(reply_length(r.prompt_ids) - len(r.given), r.limit) for r in requests]
        steps = max([*left[:due], min(least, max(left))])
        time.sleep(self.token * steps)
        self.calls.append(len([r for r in requests if r.limit > CHECK_TOKENS]))
        return [self._sample(min(steps, n), n == min(steps, n) and r.limit >= n, r) for r, n in zip(requests, left, strict=True)]

    def generate(self, prompts: list[list[int]], seeds, settings, *, stop_ids, group_size: int) -> list[list[Sample]]:
        time.sleep(self.token * max(map(reply_length, prompts)))
        return [[self._sample(reply_length(ids), True, Request(ids, [], 0, 99))] for ids in prompts]

    def _sample(self, count: int, ended: bool, request: Request) -> Sample:
        ids = [WORD] * (count - ended) + [END] * ended
        return Sample(ids, [-1.0] * count, ended, self.version)


def reply_length(ids: list[int]) -> int:
    """4 to 11 tokens, by what came before."""
    return 4 + sum(ids) % 8


TOKENIZER = templated("thinks")
END, WORD = turn_end(TOKENIZER).trained[-1], TOKENIZER.convert_tokens_to_ids("e")
TURNS, REST, TRAINING = 4, (0.05, 0.5), 0.1  # turns of an episode, seconds of a tool, and of an update


async def notebook(task, policy):
    """Three calls of a tool of 50 to 500 ms, and an answer."""
    chat = policy.chat(task.messages)
    for turn in range(TURNS - 1):
        await chat.generate()
        seed = hashlib.sha256(f"{task.metadata['id']} {turn}".encode()).digest()[0] / 255
        await asyncio.sleep(SLOWER[0] * (REST[0] + seed * (REST[1] - REST[0])))
        chat.user(f"page {turn}")
    await chat.generate()


def played(
    folders: tuple[Path, Path], max_lag: int, *, steps: int, token: float, training: float, schedule: str = "counted"
) -> tuple[float, list[list[Rollout]], list[int]]:
    """Seconds of a step, once episodes of all steps are in flight; the rollouts, and the engine's calls."""
    own = {"path": f"{__file__}:notebook", "max_turns": TURNS}
    settings = {"rl.environment": own, "rl.rollout.max_lag": max_lag, "rl.rollout.max_new_tokens": 300, "model.max_length": 600}
    settings["rl.rollout.schedule"] = schedule
    job = rl_job(*folders, **{"rl.algorithm": "reinforce_pp", **settings})
    job = job.model_copy(update={"rl": job.rl.model_copy(update={"samples_per_step": 16, "steps": steps})})
    environment = Environment(job.rl.environment, TOKENIZER, stops=(END,), max_length=600, deadline=60.0, takes_scores=False)
    how = {"stop_ids": (END,), "replacements": Replacements(0), "transfer": None, "renew": None, "vocabulary": 300}
    turns = GpuTimeSharing(None, None, on=False, deadline=1.0)
    engine, found, times = Scripted(token), [], []
    engines = RolloutEngines(job, EnginesHere([engine]), check_trainers=lambda: None, turns=turns, environment=environment, **how)
    ahead = EpisodesAhead(job, engines, environment)
    messages = [[{"role": "user", "content": f"Add {i}."}] for i in range(40)]
    prompts = [Prompt(f"p{i}", "made", m, encode_prompt(TOKENIZER, m), None) for i, m in enumerate(messages)]
    stream = PromptStream(prompts, {}, seed=0)
    for step in range(steps):
        times.append(time.monotonic())
        if max_lag:
            found.append(ahead.draw(stream, 0, 16, step=step))
            ahead.begin(step=step)
            ahead.short_rollouts()
        else:
            found.append(engines.generate(stream.take(16 * step, 16), step=step))
        time.sleep(training)
        if max_lag:
            ahead.end()
        engines.recovery.version = engine.version = step + 1
    begun = max_lag + 1
    return (times[-1] - times[begun]) / (steps - 1 - begun), found, engine.calls


@pytest.mark.long
def test_tools_that_sleep_cost_less_than_half_of_lock_step(model_folders: tuple[Path, Path]):
    """A token takes 3 ms and an update 100 ms, on another device than the engine's."""
    SLOWER[0] = 1.0
    lock_step, _, calls = played(model_folders, 0, steps=4, token=0.003, training=TRAINING)
    assert calls == [] and lock_step > 3 * 0.4 + TRAINING
    for max_lag, schedule, factor in ((2, "counted", 1.3), (4, "counted", 2.0), (2, "free", 1.3), (4, "free", 2.0)):
        how = {"token": 0.003, "training": TRAINING, "schedule": schedule}
        seconds, found, _ = played(model_folders, max_lag, steps=2 * max_lag + 6, **how)
        print(f"max_lag {max_lag}, {schedule}: {seconds:.2f} s a step, lock step {lock_step:.2f} s, {lock_step / seconds:.2f} times")
        assert lock_step / seconds > factor
        lags = [step - span.version for step, rows in enumerate(found) for r in rows for span in r.spans if span.version is not None]
        assert max(lags) == max_lag and min(lags) >= 0
        assert all(r.dialogue.turns == TURNS and r.finished for rows in found for r in rows)


def test_a_call_has_the_turns_of_several_steps(model_folders: tuple[Path, Path]):
    SLOWER[0] = 0.0
    _, _, calls = played(model_folders, TURNS, steps=12, token=0.0, training=0.0)
    # Four turns of the first five steps; then one call between two updates, with a turn of each of the four steps in flight
    assert [n for n in calls if n] == [80] * 4 + [16, 32, 48, 64, 64, 64, 64, 48, 32, 16]


# An interrupted run


def test_an_interrupted_reply_goes_on_and_one_whose_tools_answer_otherwise_begins_anew(caplog):
    prompt = Prompt("p", "made", [], [5, 6], None)
    first, tool, last = Span([7], [-1.0], 3), Span([8], [0.0], None, trained=False), Span([9, 10], [-1.0, -2.0], 4)
    before, asks = Rollout(prompt, [first, tool, last], False, 1), Rollout(prompt, [replace(first, trained=False), tool], False, 1)
    assert resumed(before, asks) == replace(asks, spans=[*asks.spans, last])
    assert resumed(replace(before, finished=True), asks).finished, "the reply had ended at the interruption"
    assert resumed(Rollout(prompt, [first], True, 1), asks) == asks and not caplog.text
    other = replace(asks, spans=[first, replace(tool, ids=[11])])
    assert resumed(before, other) == other and "got other texts of its tools or users" in caplog.text


# Whole runs with the tiny model


@pytest.mark.parametrize("max_lag", [pytest.param(1, marks=pytest.mark.long), 2, pytest.param(4, marks=pytest.mark.long)])
def test_every_span_is_of_the_policy_of_its_version_and_no_episode_is_dropped(model_folders: tuple[Path, Path], tmp_path: Path, max_lag):
    run = whole(job_of(model_folders, tmp_path, **{"rl.rollout.max_lag": max_lag}), STEPS)
    rollouts = [r for result in run.results for r in result.collected.rollouts]
    assert max(differences(run, rollouts)) < 1e-4
    weights = run.rank.weights
    assert max(float((weights[0][name] - weights[STEPS][name]).abs().max()) for name in weights[0]) > 0.005  # the comparison can tell
    assert [row["policy_lag_max"] for row in run.rows] == [min(step, max_lag) for step in range(STEPS)]
    assert all(row["cut_off"] == row["failed_episodes"] == 0 and row["logprob_difference"] < 1e-4 for row in run.rows)
    assert [r.prompt.id for r in rollouts[::2]] == [p.id for p in run.run.prompts.take(0, 4 * STEPS)]  # each once, in the stream's order
    assert {r.dialogue.turns for r in rollouts} == {1, 2, 3, 4}
    if max_lag > 1:  # a reply went on under new weights
        pairs = [(a.version, b.version) for r in rollouts for a, b in zip(r.spans, r.spans[1:], strict=False)]
        assert any(None not in pair and pair[0] < pair[1] for pair in pairs)


def test_results_do_not_depend_on_how_long_tools_take(model_folders: tuple[Path, Path], tmp_path: Path):
    runs = []
    for factor in (0.0, 3.0):
        SLOWER[0] = factor
        runs.append(whole(job_of(model_folders, tmp_path / str(factor)), STEPS))
    assert same(runs[0], runs[1], since=0)


TALK = """
import http.client, json, os, sys, urllib.parse

place, key, task = urllib.parse.urlsplit(os.environ["OPENAI_BASE_URL"]), os.environ["OPENAI_API_KEY"], json.load(sys.stdin)
messages, first = task["messages"], task["messages"][0]["content"]
for turn in range(task["max_turns"]):
    connection = http.client.HTTPConnection(place.hostname, place.port, timeout=60)
    connection.request("POST", place.path + "/chat/completions", json.dumps({"messages": messages}), {"Authorization": "Bearer " + key})
    choice = json.loads(connection.getresponse().read())["choices"][0]
    text = choice["message"]["content"]
    if choice["finish_reason"] == "length" or (len(text) + len(first)) % 4 == turn:
        break
    messages = [*messages, choice["message"], {"role": "user", "content": str(len(f"{turn} {text}"))}]
"""


OUTSIDE = {"command": ["python", "-S", "-E", "-c", TALK], "processes": 24, "max_turns": 4}


def test_agents_outside_play_ahead_with_the_same_bits(model_folders: tuple[Path, Path], tmp_path: Path):
    kinds = {"inside": EPISODES["rl.environment"], "outside": OUTSIDE}
    runs = [whole(job_of(model_folders, tmp_path / kind, **{"rl.environment": environment}), 4) for kind, environment in kinds.items()]
    assert same(*runs, since=0)


@pytest.mark.parametrize(
    "changes",
    [
        {"rl.rollout.engines": 2, "rl.correction.kind": "tis"},
        *(
            pytest.param(changes, marks=pytest.mark.long)
            for changes in (
                {},
                {"rl.algorithm": "ppo", "rl.rollout.max_lag": 1},
                {"rl.algorithm": "remax", "rl.rollout.max_concurrent_sequences": 5, "rl.rollout.max_lag": 4},
                {"rl.algorithm": "grpo", "rl.grpo.group_size": 2, "rl.dynamic_sampling.enabled": True, "rl.reward.clip": 0.1},
                {"rl.environment": OUTSIDE},
            )
        ),
    ],
    ids=["two engines", "plain", "ppo", "remax", "dynamic sampling", "outside"],
)
def test_a_killed_run_ends_with_the_same_bits(model_folders: tuple[Path, Path], tmp_path: Path, changes: dict):
    undisturbed = whole(job_of(model_folders, tmp_path / "whole", **changes), STEPS)
    job, done = job_of(model_folders, tmp_path / "killed", **changes), 0
    for method, call in (("advance", 9), ("receive_weights", 3), ("advance", 7), ("advance", 4)):
        with pytest.raises(Killed), running(job, wrap=lambda actor, m=method, c=call: Dies(actor, m, c)) as run:
            for _ in range(STEPS):
                run.step()
                run.save()
        done = max(done, run.progress.step)
    with running(job) as run:
        assert 1 <= run.progress.step == done < STEPS
        while run.progress.step < STEPS:
            run.step()
        assert same(undisturbed, run, since=done)
