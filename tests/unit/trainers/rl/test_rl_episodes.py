"""Episodes by RL's engines and ranks: engine and trainer agree on every sampled token, and a lost engine changes nothing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from actors_here import Here
from tiny_models import rl_job

from rlhf_core.agents.environment import Environment
from rlhf_core.agents.tools import Tool
from rlhf_core.config import EnvironmentConfig
from rlhf_core.engines.ray.actors import RoleLost
from rlhf_core.engines.rollout.open import RolloutActor
from rlhf_core.models.tokenizer import encode_prompt, load_tokenizer, write_ends
from rlhf_core.trainers.rl.data import collate, pack
from rlhf_core.trainers.rl.groups import TrainerGroups
from rlhf_core.trainers.rl.metrics import dialogue_metrics
from rlhf_core.trainers.rl.mismatch import check_logprobs
from rlhf_core.trainers.rl.rank import TrainerRank
from rlhf_core.trainers.rl.recovery import Replacements
from rlhf_core.trainers.rl.rollouts import RolloutEngines
from rlhf_core.trainers.rl.workers import Workers
from rlhf_core.types import Prompt, Rollout


def double(number: int) -> int:
    """Twice the number."""
    return 2 * number


async def talk(task, policy):
    """Up to four turns, however they end."""
    chat = policy.chat(task.messages, tools=[double])
    for turn in range(task.max_turns):
        reply = await chat.generate()
        if not reply.finished:
            break
        chat.user(f"And {len(reply.text) + turn}?")
    return float(len(reply.text))


class LostOnce(Here):
    """Its actor is lost at the third call."""

    calls = 0

    def submit(self, method: str, per_rank: list[tuple], **kwargs) -> list:
        self.calls += 1
        return [None] if self.calls == 3 else super().submit(method, per_rank, **kwargs)

    def submit_one(self, rank: int, method: str, *args, **kwargs):
        return getattr(self.actors[rank], method)(*args, **kwargs)

    def wait(self, references: list, **_) -> list:
        if None in references:
            raise RoleLost("rollout rank 0: dead", [0])
        return references

    def replace(self, ranks: list[int], meanwhile) -> None:
        pass


@pytest.fixture(scope="module")
def workers(model_folders: tuple[Path, Path], tmp_path_factory) -> Workers:
    folder, (sft, reward) = tmp_path_factory.mktemp("episodes"), model_folders
    shutil.copytree(sft, folder / "sft")
    write_ends(folder / "sft", [load_tokenizer(str(sft), trust_remote_code=False).eos_token_id, *range(5, 30)])
    scorers = [{"name": "environment", "kind": "environment", "weight": 1.0, "normalization": "none"}]
    changes = {"rl.environment": {"path": f"{__file__}:talk", "max_turns": 4}, "rl.reward.scorers": scorers, "rl.algorithm": "grpo"}
    job = rl_job(folder / "sft", reward, **changes, **{"rl.rollout.max_new_tokens": 80, "model.max_length": 128})
    job = job.model_copy(update={"work": str(folder)})
    rank = TrainerRank(0, 1, job)
    rank.connect(None)
    engine = RolloutActor(
        0, backend="pytorch", model_path=job.sft_model, max_length=job.model.max_length, dtype="float32", max_concurrent_sequences=32,
        threads=1, seed=0, trust_remote_code=False, gpu_memory_fraction=0.3,
    )  # fmt: skip
    groups = TrainerGroups(job.rl, [Here(rank)])
    return Workers(job, SimpleNamespace(trainers=groups, rollouts=Here(engine), take_turns=False, ways=["gloo"]))


@pytest.fixture(scope="module")
def prompts(workers: Workers) -> list[Prompt]:
    messages = [[{"role": "user", "content": f"Sort 4{n}."}] for n in range(4)]
    return [Prompt(f"p{i}", "made", m, encode_prompt(workers._tokenizer, m), None) for i, m in enumerate(messages)]


@pytest.fixture(scope="module")
def rollouts(workers: Workers, prompts: list[Prompt]) -> list[Rollout]:
    return workers.rollouts.generate(prompts, step=3)


def test_a_group_has_episodes_of_its_prompt(workers: Workers, rollouts: list[Rollout]):
    size = workers._job.rl.group_size
    assert [r.prompt.id for r in rollouts] == [f"p{i}" for i in range(4) for _ in range(size)]
    assert [r.group_id for r in rollouts] == [i for i in range(4) for _ in range(size)]
    found = dialogue_metrics(rollouts)
    assert 1 < found["turns"] <= 4 and found["tool_calls"] == found["failed_episodes"] == 0
    assert len({tuple(r.response_ids) for r in rollouts}) > 4, "the samples of a prompt differ"


def test_engine_and_trainer_agree_on_every_sampled_token(workers: Workers, rollouts: list[Rollout]):
    forward = workers.submit_forward(rollouts, recomputed_fraction=1.0)
    outputs = workers.collect_forward(forward)
    batch = collate(rollouts, forward.sequences, {}, outputs, None, old_logprobs_source="recompute")
    assert int(batch.response_mask.sum()) == sum(r.num_sampled for r in rollouts) < sum(r.num_tokens for r in rollouts)
    assert 0 < check_logprobs(batch, batch.sampler_logprobs, workers._job.rl, step=3, dtype="float32") < 1e-4
    assert torch.equal(batch.policy_versions >= 0, batch.response_mask)
    assert pack(rollouts).lists() == [[*r.prompt.prompt_ids, *r.response_ids] for r in rollouts]


def test_the_same_step_has_the_same_episodes_and_another_one_others(workers: Workers, prompts: list[Prompt], rollouts: list[Rollout]):
    assert workers.rollouts.generate(prompts, step=3) == rollouts
    assert workers.rollouts.generate(prompts, step=4) != rollouts
    greedy = workers.rollouts.generate_greedy(prompts)
    assert [r.group_id for r in greedy] == [0, 1, 2, 3] and workers.rollouts.generate_greedy(prompts) == greedy
    assert len(workers.rollouts.generate_for_calibration(prompts)) == 4


TALK = """
import http.client, json, os, sys, urllib.parse

place, key = urllib.parse.urlsplit(os.environ["OPENAI_BASE_URL"]), os.environ["OPENAI_API_KEY"]
task = json.load(sys.stdin)
messages, tools = task["messages"], [json.loads(sys.argv[1])]
for turn in range(task["max_turns"]):
    connection = http.client.HTTPConnection(place.hostname, place.port, timeout=60)
    body = json.dumps({"messages": messages, "tools": tools})
    connection.request("POST", place.path + "/chat/completions", body, {"Authorization": "Bearer " + key})
    choice = json.loads(connection.getresponse().read())["choices"][0]
    text = choice["message"]["content"]
    if choice["finish_reason"] == "length":
        break
    messages += [choice["message"], {"role": "user", "content": f"And {len(text) + turn}?"}]
print(len(text))
"""


def test_an_agent_outside_has_the_bits_of_a_function(workers: Workers, prompts: list[Prompt], rollouts: list[Rollout], tmp_path: Path):
    """Also where fewer episodes are in play at once: the tokens; another batch may round otherwise."""
    (tmp_path / "talk.py").write_text(TALK)
    command = ["python", "-S", "-E", str(tmp_path / "talk.py"), json.dumps(Tool(double).schema)]
    inside, limits = workers.rollouts._environment, {"max_length": workers._job.model.max_length, "deadline": 120.0}
    for processes in (len(rollouts), 5):
        config = EnvironmentConfig(command=command, processes=processes, max_turns=4)
        outside = Environment(config, workers._tokenizer, stops=workers._stops, takes_scores=True, **limits)
        workers.rollouts._environment = outside
        try:
            found = workers.rollouts.generate(prompts, step=3)
        finally:
            workers.rollouts._environment = inside
            outside.close()
        assert [(r.response_ids, r.finished, r.dialogue) for r in found] == [(r.response_ids, r.finished, r.dialogue) for r in rollouts]
        assert processes == 5 or found == rollouts


def test_an_engine_that_is_lost_in_an_episode_changes_nothing(workers: Workers, prompts: list[Prompt], rollouts: list[Rollout]):
    engines: RolloutEngines = workers.rollouts
    (engine,), (rank,), before = engines._engines.actors, workers._trainers.policy.actors.actors, engines._engines
    ids = engines.sync_check.probe_ids
    group = engines._engines = engines.recovery.engines = LostOnce(engine)
    engines.recovery._replacements = Replacements(1)
    engines.sync_check.start([engine.probe(ids)], rank.probe(ids))
    assert engines.generate(prompts, step=3) == rollouts and group.calls > 3 and engines.recovery._replacements.count == 1
    engines._engines = engines.recovery.engines = before
