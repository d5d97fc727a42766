"""rl.rollout.schedule `free`: engines sample until the update has ended, and what ends in the background ends the run by name."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from rl_here import EnginesHere, differences, rl_job_here, running, whole
from test_rl_ahead import MIXED, job_of
from test_rl_episodes_ahead import END, SLOWER, TOKENIZER, played
from test_rl_episodes_ahead import job_of as episodes_job
from tiny_models import rl_job

from rlhf_core.agents.environment import Environment
from rlhf_core.engines.ray.actors import RoleLost
from rlhf_core.engines.rollout.open import RolloutActor
from rlhf_core.engines.rollout.requests import Sample
from rlhf_core.models.tokenizer import encode_prompt
from rlhf_core.trainers.rl.ahead import Admitted, RolloutsAhead, begun
from rlhf_core.trainers.rl.data import PromptStream
from rlhf_core.trainers.rl.episodes import EpisodesAhead, in_background
from rlhf_core.trainers.rl.job import RlJob
from rlhf_core.trainers.rl.recovery import Replacements
from rlhf_core.trainers.rl.rollouts import RolloutEngines
from rlhf_core.trainers.rl.turns import GpuTimeSharing
from rlhf_core.types import Prompt, Rollout

ROOT = Path(__file__).parents[4]
FREE = {"rl.rollout.schedule": "free"}
TOKEN = 0.02  # seconds at least


class Beside(EnginesHere):
    """Engines of this process, each in a thread, of which some are lost to whoever looks at them."""

    def __init__(self, actors: list[RolloutActor]):
        super().__init__(actors)
        self._threads, self.lost = [ThreadPoolExecutor(1) for _ in actors], 0

    def submit(self, method: str, per_rank: list[tuple], **kwargs) -> list:
        pairs = zip(self._threads, self.actors, per_rank, strict=True)
        return [thread.submit(getattr(actor, method), *args, **kwargs) for thread, actor, args in pairs]

    def look(self, rank: int, *args):
        if self.lost and not args[1]:
            self.lost -= 1
            raise RoleLost("lost", [rank])
        return self.actors[rank].look(*args)

    def wait(self, references: list, **_) -> list:
        return [found.result(timeout=60) if hasattr(found, "result") else found for found in references]


def engines_of(job: RlJob, count: int = 1) -> tuple[RolloutsAhead, Beside]:
    """Rollouts ahead on real engines of the tiny model, whose steps take TOKEN seconds."""
    actors = []
    for rank in range(count):
        actor = RolloutActor(
            rank, backend="pytorch", model_path=job.sft_model, max_length=job.model.max_length, dtype="float32",
            max_concurrent_sequences=64, threads=1, seed=0, trust_remote_code=False, gpu_memory_fraction=0.3,
        )  # fmt: skip
        step = actor._engine._decoder.step

        def slow(ids, step=step):
            time.sleep(TOKEN)
            return step(ids)

        actor._engine._decoder.step = slow
        actors.append(actor)
    beside = Beside(actors)
    how = {"stop_ids": (1,), "replacements": Replacements(0), "transfer": None, "renew": None, "vocabulary": 300}
    turns = GpuTimeSharing(None, None, on=False, deadline=1.0)
    return RolloutsAhead(job, RolloutEngines(job, beside, check_trainers=lambda: None, turns=turns, **how)), beside


def sampled(ahead: RolloutsAhead, step: int) -> int:
    return sum(r.num_sampled for r in ahead._admitted.rollouts.get(step, []))


@pytest.mark.parametrize("count", [1, 2])
def test_engines_sample_as_long_as_the_trainer_works(model_folders: tuple[Path, Path], count: int):
    """Two steps of one response each; the one that is due has four tokens left, and the other one a hundred."""
    changes = FREE | {"rl.rollout.max_new_tokens": 100, "model.max_length": 120, "rl.rollout.engines": count}
    stream = PromptStream([Prompt(f"p{i}", "made", [], [5, 9 + i], None) for i in range(4)], {}, seed=0)
    tokens = {}
    for training in (0.0, 0.5, 4.0):
        ahead, _ = engines_of(job_of(model_folders, max_lag=2, prompts=1, group_size=1, steps=9, **changes), count)
        drawn = Admitted(0).admit(stream, ahead._rl, version=0)
        ahead._drawn = drawn.extended({(0, 0): Sample([7], [-1.0], True, 0)})
        ahead._rl = ahead._rl.model_copy(update={"rollout": ahead._rl.rollout.model_copy(update={"last_tokens": 4})})
        ahead.begin(step=0)
        ahead.short_rollouts()
        time.sleep(training)
        ahead.end()
        assert sampled(ahead, 1) <= 4 and ahead._admitted.complete == 1
        tokens[training] = sampled(ahead, 2)
    assert tokens[0.0] < tokens[0.5] < tokens[4.0] == 100, tokens


def test_engines_end_where_one_of_them_is_lost(model_folders: tuple[Path, Path]):
    ahead, engines = engines_of(job_of(model_folders, max_lag=2, prompts=2, group_size=1, steps=9, **FREE), 2)
    stream = PromptStream([Prompt(f"p{i}", "made", [], [5, 9 + i], None) for i in range(4)], {}, seed=0)
    ahead.draw(stream, 0, 2, step=0)
    ahead.begin(step=0)
    ahead.short_rollouts()
    engines.lost, call = 1, ahead._running.dealt.call
    ahead.end()
    assert call.kwargs == {"stop_ids": (1,), "least": 0}, "a new engine in place of a lost one ends by itself"
    assert all(r.finished or r.num_sampled == 40 for r in ahead._admitted.rollouts[1])


def test_every_span_is_of_the_policy_of_its_version(model_folders: tuple[Path, Path], tmp_path: Path):
    run = whole(rl_job_here(model_folders, tmp_path, **MIXED | FREE), 8)
    rollouts = [r for result in run.results for r in result.collected.rollouts]
    assert max(differences(run, rollouts)) < 1e-4
    assert all(row["policy_lag_max"] <= 2 and row["cut_off"] == 0 and row["logprob_difference"] < 1e-4 for row in run.rows)
    assert [r.prompt.id for r in rollouts[::2]] == [p.id for p in run.run.prompts.take(0, 32)]  # each once, in the stream's order


# Episodes


def check_lags(found: list[list[Rollout]], max_lag: int) -> None:
    lags = [step - span.version for step, rows in enumerate(found) for r in rows for span in r.spans if span.version is not None]
    assert min(lags) >= 0 and max(lags) <= max_lag
    assert all(r.dialogue.turns == 4 and r.finished for rows in found for r in rows)
    assert all(len(rows) == 16 for rows in found)


def test_free_episodes_are_whole_and_none_is_too_old(model_folders: tuple[Path, Path]):
    SLOWER[0] = 0.1
    _, found, calls = played(model_folders, 2, steps=8, token=0.0005, training=0.02, schedule="free")
    check_lags(found, 2)
    assert len([n for n in calls if n]) > 8


def test_free_episodes_of_the_tiny_model_have_spans_of_their_versions(model_folders: tuple[Path, Path], tmp_path: Path):
    SLOWER[0] = 1.0
    run = whole(episodes_job(model_folders, tmp_path, **FREE), 6)
    rollouts = [r for result in run.results for r in result.collected.rollouts]
    assert max(differences(run, rollouts)) < 1e-4 and max(row["policy_lag_max"] for row in run.rows) <= 2
    assert all(row["failed_episodes"] == 0 for row in run.rows)


# What ends in the background


async def sits(task, policy):
    """A reply, and then nothing."""
    chat = policy.chat(task.messages)
    await chat.generate()
    await asyncio.sleep(600)


CLAIMS = ["python", "-S", "-E", "-c", "import time; time.sleep(600)"]


def playing(folders: tuple[Path, Path], config: dict, deadline: float = 60.0) -> tuple[EpisodesAhead, Environment]:
    """Episodes of two steps in flight, of which none has an end."""
    sizes = {"rl.samples_per_step": 2, "rl.minibatch_size": 2}
    job = rl_job(*folders, **{"rl.algorithm": "reinforce_pp", "rl.rollout.max_lag": 1, **sizes, **FREE, "rl.environment": config})
    environment = Environment(job.rl.environment, TOKENIZER, stops=(END,), max_length=64, deadline=deadline, takes_scores=False)
    how = {"stop_ids": (END,), "replacements": Replacements(0), "transfer": None, "renew": None, "vocabulary": 300}
    turns = GpuTimeSharing(None, None, on=False, deadline=1.0)
    engines = RolloutEngines(job, EnginesHere([Answers()]), check_trainers=lambda: None, turns=turns, environment=environment, **how)
    return EpisodesAhead(job, engines, environment), environment


class Answers:
    """An engine that ends each reply at once."""

    def advance(self, requests, settings, due, **how):
        return [Sample([END], [-1.0], True, 0) for _ in requests]


def begin_to_play(ahead: EpisodesAhead) -> None:
    messages = [{"role": "user", "content": "Add."}]
    prompts = [Prompt(f"p{i}", "made", messages, encode_prompt(TOKENIZER, messages), None) for i in range(2)]
    admitted = Admitted(2, {1: begun(prompts, 1)})
    ahead._played = in_background(lambda: ahead._play_freely(admitted, due=1, tokens=4))


def lose_the_loop(environment: Environment) -> None:
    environment._loop.call_soon_threadsafe(environment._loop.stop)


def lose_the_endpoint(environment: Environment) -> None:
    asyncio.run_coroutine_threadsafe(environment._outside._endpoint.close(), environment._loop)


def lose_the_thread(environment: Environment) -> None:
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "episodes ahead"]
    assert ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(MemoryError)) == 1


@pytest.mark.parametrize(
    ("config", "lose", "error", "name"),
    [
        ({"path": f"{__file__}:sits"}, lose_the_loop, RuntimeError, "the thread that plays episodes"),
        ({"path": f"{__file__}:sits"}, lose_the_thread, MemoryError, None),
        ({"command": CLAIMS, "processes": 2, "claims": 2}, lose_the_endpoint, RuntimeError, "its endpoint no longer listens"),
    ],
    ids=["loop", "thread", "endpoint"],
)
def test_what_ends_during_an_update_is_told_within_5_seconds(model_folders: tuple[Path, Path], config, lose, error, name):
    ahead, environment = playing(model_folders, config)
    try:
        begin_to_play(ahead)
        time.sleep(1.5)
        ahead.look()  # all is well
        lose(environment)
        until = time.monotonic() + 5
        with pytest.raises(error, match=name):
            while time.monotonic() < until:  # without a pause: a look in the midst of the end says the same
                ahead.look()
    finally:
        ahead._trained.set()
        environment.close()


def test_a_run_looks_while_it_waits_for_its_trainer(model_folders: tuple[Path, Path], tmp_path: Path):
    with running(episodes_job(model_folders, tmp_path)) as run:
        run.rank.meanwhile()
        lose_the_loop(run.workers.ahead._environment)
        until = time.monotonic() + 5
        with pytest.raises(RuntimeError, match="the thread that plays episodes"):
            while time.monotonic() < until:
                run.rank.meanwhile()


def test_an_episode_that_neither_asks_nor_ends_ends_the_run(model_folders: tuple[Path, Path]):
    ahead, environment = playing(model_folders, {"path": f"{__file__}:sits"}, deadline=1.0)
    begin_to_play(ahead)
    with pytest.raises(TimeoutError, match=r"within rl\.deadlines\.step=1 s, got 2 episodes that didn't"):
        ahead._played.result(timeout=10)
    environment.close()


PROGRAM = """
import json, sys, time
import ray
from rlhf_core.engines.ray.actors import ActorGroup

size = {"num_cpus": 2, "object_store_memory": 80_000_000}
ray.init(**size, include_dashboard=False, logging_level="ERROR", log_to_driver=False, _temp_dir=sys.argv[1])
group = ActorGroup("trainer", "sleeper:Sleeper", 2, cpus=0, threads=1, start_deadline=100.0, kwargs={})
group.wait_ready()
looks, found = [], []

def look():
    looks.append(time.monotonic())
    if len(looks) == 3:
        raise RuntimeError("the endpoint has ended")

group.meanwhile = look
began = time.monotonic()
try:
    group.call("sleep", [(60,), (60,)], deadline=100.0)
except RuntimeError as error:
    found.append([str(error), time.monotonic() - began])
group.close()
again = ActorGroup("trainer", "sleeper:Sleeper", 2, cpus=0, threads=1, start_deadline=100.0, kwargs={})
again.meanwhile = lambda: None
found.append(again.call("sleep", [(2.5,), (0,)], deadline=100.0))
for deadline in (0.5, 2.2):
    try:
        again.call("sleep", [(0,), (4,)], deadline=deadline)
    except Exception as error:
        found.append(str(error))
    again.wait_ready()
print(json.dumps(found))
"""


@pytest.mark.long
def test_a_wait_for_ranks_looks_at_what_works_beside(tmp_path: Path, tmp_path_factory):
    (tmp_path / "sleeper.py").write_text(
        "import time\n\nclass Sleeper:\n    def __init__(self, rank):\n        self.rank = rank\n\n"
        "    def sleep(self, seconds):\n        time.sleep(seconds)\n        return self.rank\n"
    )
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-c", PROGRAM, str(tmp_path_factory.mktemp("r"))]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stderr[-3000:]
    told, answers, *late = json.loads(ended.stdout.splitlines()[-1])
    assert told[0] == "the endpoint has ended" and told[1] < 5
    assert answers == [0, 1]
    assert all("trainer rank 1: expected sleep to finish, got no answer within" in message for message in late) and len(late) == 2
