"""Engine and trainer that take turns, in this process: the order of their switches, what is refused, and lost engines."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import pytest
from actors_here import Here, HerePeer
from tiny_models import rl_job, train_batch, whole

from rlhf_core.engines.ray.actors import PeerLost
from rlhf_core.engines.ray.places import RoleLost
from rlhf_core.engines.rollout.open import RolloutActor
from rlhf_core.sampling.rewards import RewardNormalizer
from rlhf_core.trainers.rl.groups import TrainerGroups
from rlhf_core.trainers.rl.rank import TrainerRank
from rlhf_core.trainers.rl.recovery import Replacements
from rlhf_core.trainers.rl.state import Progress
from rlhf_core.trainers.rl.workers import Workers
from rlhf_core.types import Prompt, Sequences, UpdateResult

pytestmark = pytest.mark.usefixtures("world")
PROMPTS = [Prompt(f"p{i}", "made", [{"role": "user", "content": "Sort 21."}], [5, 6, 7 + i], None) for i in range(3)]
GPUS = {"wake_up", "sleep", "keep", "generate", "probe", "send_weights", "forward", "update"}


class Recorded(Here):
    """Remembers calls. The actor is lost at the call `dies_at`; `new` makes another one."""

    has_gpus = False

    def __init__(self, actor: object, calls: list[str], new=None):
        super().__init__(actor)
        self.calls, self.new, self.dies_at, self.lost = calls, new, None, False

    def submit(self, method: str, per_rank: list[tuple], **kwargs) -> list:
        return [self.submit_one(0, method, *args, **kwargs) for args in per_rank]

    def submit_one(self, rank: int, method: str, *args, **kwargs):
        of_call = [str(arg) for arg in args if method in ("sleep", "wake_up", "keep")]
        self.calls += [" ".join([method, *of_call])] if method in GPUS else []
        if method == self.dies_at:
            self.dies_at, self.lost = None, True
        return None if self.lost else getattr(self.actors[rank], method)(*args, **kwargs)

    def peer(self, rank: int) -> HerePeer:
        found = super().peer(rank)
        if self.dies_at == "receive_weights":
            self.dies_at = None
            found.submit = self._dead
        return found

    def _dead(self, method: str, *args) -> Future:
        call: Future = Future()
        call.set_exception(PeerLost(late=False))
        return call

    def wait(self, references: list, **_) -> list:
        if self.lost:
            raise RoleLost("rollout rank 0: dead", [0])
        return references

    def replace(self, ranks: list[int], meanwhile: Callable[[], None]) -> None:
        self.actors, self.lost = [self.new()], False
        self.calls.append("start")


@pytest.fixture
def made(model_folders: tuple[Path, Path], tmp_path: Path) -> SimpleNamespace:
    job = rl_job(*model_folders, **{"rl.algorithm": "rloo", "rl.rollout.take_turns": True, "rl.rollout.dispatch": "equal"}).model_copy(
        update={"work": str(tmp_path)}
    )
    rank = TrainerRank(0, 1, job)
    rank.connect(None)

    def new() -> RolloutActor:
        return RolloutActor(
            0, backend="pytorch", model_path=job.sft_model, max_length=job.model.max_length, dtype="float32", max_concurrent_sequences=32,
            threads=1, seed=0, trust_remote_code=False, gpu_memory_fraction=0.3, sleeps=True,
        )  # fmt: skip

    calls: list[str] = []
    engines = Recorded(new(), calls, new)
    groups = TrainerGroups(job.rl, [Recorded(rank, calls)])
    workers = Workers(job, SimpleNamespace(trainers=groups, rollouts=engines, take_turns=True, ways=["gloo"]))
    workers.rollouts.recovery._replacements = Replacements(1)
    workers.turns.begin()
    workers.rollouts.start(rank.probe(workers.rollouts.sync_check.probe_ids))
    calls.clear()
    return SimpleNamespace(workers=workers, rank=rank, engines=engines, calls=calls)


def update(workers: Workers) -> UpdateResult:
    plan = [whole(train_batch(8, seed=0))]
    batch = SimpleNamespace(old_logprobs=plan[0].batch.old_logprobs, rollout_logprobs=None)
    return workers.update([[plan]], batch, kl_coef=0.1, train_policy=True)


def test_a_step_switches_once_to_the_trainer_and_once_back(made):
    workers, calls = made.workers, made.calls
    for step in range(2):
        rollouts = workers.rollouts.generate(PROMPTS, step=step)
        workers.turns.trainers(forget=True)
        workers.collect_forward(workers.submit_forward(rollouts, recomputed_fraction=1.0))
        update(workers)
        workers.sync_weights(version=step + 1)
        assert calls == [
            *("generate", "sleep 2", "keep all", "forward", "update"),
            *("keep weights", "wake_up ['weights']", "send_weights"),
            *("keep nothing", "wake_up", "probe"),
        ]
        calls.clear()
    assert all(seconds > 0 for seconds in workers.turns.seconds.values()) and workers.turns.memory == {}


def test_weights_stay_where_engines_work_again_before_a_sync(made):
    first = made.workers.rollouts.generate(PROMPTS, step=0)
    made.workers.collect_forward(made.workers.submit_forward(first, recomputed_fraction=1.0))
    assert made.workers.rollouts.generate(PROMPTS, step=0) == first
    assert made.calls == ["generate", "sleep 1", "keep all", "forward", "keep nothing", "wake_up", "generate"]


@pytest.mark.parametrize("dies_at", ["wake_up", "receive_weights", "probe", "sleep", "generate"])
def test_a_lost_engine_is_replaced_with_the_policys_weights_at_any_time(made, dies_at):
    """The trainer gives the GPU to the start of a new engine, whatever it was doing."""
    workers, (engine,) = made.workers, made.engines.actors
    workers.turns.trainers()
    update(workers)
    if dies_at in ("generate", "sleep"):
        workers.sync_weights(version=1)
    made.engines.dies_at = dies_at
    workers.turns.trainers() if dies_at == "sleep" else None
    if dies_at in ("wake_up", "receive_weights", "probe"):
        workers.sync_weights(version=1)
    rollouts = workers.rollouts.generate(PROMPTS, step=1)
    assert made.engines.actors != [engine] and workers.replacements.count == 0 and workers.rollouts.recovery._replacements.count == 1
    begun = made.calls.index("start")
    assert [call for call in made.calls[:begun] if call.startswith("keep")][-1] == "keep nothing"
    assert {span.version for rollout in rollouts for span in rollout.spans} == {1}
    undisturbed = workers.rollouts.recovery.probes()[0]
    workers.turns.trainers()
    assert made.rank.probe(workers.rollouts.sync_check.probe_ids) == pytest.approx(undisturbed, abs=1e-5)


def test_a_checkpoint_is_saved_and_loaded_in_the_trainers_turn_and_engines_get_its_weights(made):
    workers, calls, normalizer = made.workers, made.calls, RewardNormalizer(made.workers._job.rl.reward)
    update(workers)
    workers.sync_weights(version=0)
    expected = workers.rollouts.generate(PROMPTS, step=0)
    workers.snapshot(Progress.start(workers._job.rl), normalizer, score=None)
    workers.store.publish()
    workers.store.wait()
    update(workers)
    workers.sync_weights(version=1)
    assert workers.rollouts.generate(PROMPTS, step=0) != expected
    calls.clear()
    assert workers.resume(normalizer).step == 0
    assert calls[:2] == ["sleep 1", "keep all"] and calls[-3:] == ["keep nothing", "wake_up", "probe"]
    assert workers.rollouts.generate(PROMPTS, step=0) == expected


def test_an_abandoned_step_ends_the_engines_before_the_trainer_saves(made):
    ended = []
    made.engines.end = lambda *, deadline: ended.append(deadline)
    made.workers.turns.end_engines()
    made.workers.turns.trainers()
    assert made.calls == ["keep all"] and len(ended) == 1


def test_who_is_not_at_turn_refuses_to_work(made):
    made.workers.turns.trainers()
    (engine,) = made.engines.actors
    with pytest.raises(RuntimeError, match="rollout engine: expected it to be awake for generate, got an engine that sleeps; call wake_up"):
        engine.generate([[5, 6]], [0], made.workers.rollouts.sampling, stop_ids=(1,), group_size=1)
    made.workers.turns.engines()
    with pytest.raises(RuntimeError, match="expected weights on the device, got nothing"):
        made.rank.forward(Sequences.of([[5, 6, 7]], [1]))
