"""Drawing ahead: the beginnings of real responses are compared with the trainer before it moves on."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny_models import rl_job

from rlhf_core.engines.in_process import RolloutActor
from rlhf_core.engines.ray_actors import ActorGroup, RoleLost
from rlhf_core.engines.weights import pack
from rlhf_core.trainers.rl.loop import check_beginnings
from rlhf_core.trainers.rl.mismatch import LogprobMismatch
from rlhf_core.trainers.rl.rank import TrainerRank
from rlhf_core.trainers.rl.recovery import Replacements
from rlhf_core.trainers.rl.workers import Workers
from rlhf_core.types import Prompt

PROMPTS = [Prompt(f"p{i}", "made", [{"role": "user", "content": "Sort 21."}], [5, 6, 7 + i], None) for i in range(3)]


class Here(ActorGroup):
    """A group whose actors are in this process and answer at once."""

    def __init__(self, actor: object):
        self.actors = [actor]

    def submit(self, method: str, per_rank: list[tuple], **kwargs) -> list:
        return [getattr(self.actors[0], method)(*args, **kwargs) for args in per_rank]

    def wait(self, references: list, **_) -> list:
        return references


FILTERED = {"rl.rollout.top_p": 0.8, "rl.rollout.min_new_tokens": 2, "rl.correction.kind": "tis"}


class LosesOne(Here):
    """Its actor is lost when it is first waited for, with all that it was asked."""

    def __init__(self, actor: object):
        super().__init__(actor)
        self.lost, self.replaced = False, []

    def submit(self, method: str, per_rank: list[tuple], **kwargs) -> list:
        return super().submit(method, per_rank, **kwargs) if self.lost else [None]

    def _submit_one(self, rank: int, method: str, *args, **kwargs):
        return getattr(self.actors[rank], method)(*args, **kwargs)

    def wait(self, references: list, **_) -> list:
        if not self.lost:
            self.lost = True
            raise RoleLost("rollout rank 0: dead", [0])
        assert None not in references, "lost with the actor before"
        return references

    def replace(self, ranks: list[int]) -> None:
        self.replaced += ranks


@pytest.fixture(params=[{}, FILTERED], ids=["plain", "filtered"])
def workers(request, model_folders: tuple[Path, Path], tmp_path: Path) -> Workers:
    changes = {"rl.algorithm": "rloo", "rl.rollout.one_step_off_policy": True, **request.param}
    job = rl_job(*model_folders, **changes).model_copy(update={"work": str(tmp_path)})
    rank = TrainerRank(0, 1, job)
    rank.connect("127.0.0.1", 0)
    engine = RolloutActor(
        0, backend="pytorch", model_path=job.sft_model, max_length=job.model.max_length, dtype="float32", max_concurrent_sequences=32,
        threads=1, seed=0, trust_remote_code=False, gpu_memory_fraction=0.3,
    )  # fmt: skip
    return Workers(job, SimpleNamespace(trainers=Here(rank), rollouts=Here(engine)))


def test_the_same_policy_passes_and_another_one_ends_the_run(workers: Workers):
    rl = workers._job.rl
    workers.rollouts.generate_ahead(PROMPTS, step=1)
    assert 0 < check_beginnings(workers, rl, step=0, dtype="float32") < 1e-4
    assert (
        check_beginnings(workers, rl, step=0, dtype="float32") == workers.rollouts.sync_check.difference == 0.0
    )  # nothing was drawn since
    (rank,), (engine,) = workers._trainers.actors, workers.rollouts._engines.actors
    torch.manual_seed(0)
    engine.load_weights(pack({name: w + 0.02 * torch.randn_like(w) for name, w in rank.weights().items()}), 1, [5, 6])
    workers.rollouts.generate_ahead(PROMPTS, step=2)
    with pytest.raises(LogprobMismatch, match=r"step 1: expected the rollout engine's .* a largest difference of"):
        check_beginnings(workers, rl, step=1, dtype="float32")


def test_an_engine_that_is_lost_while_it_begins_is_asked_for_the_rest_too(workers: Workers):
    workers.rollouts.generate_ahead(PROMPTS, step=1)
    undisturbed = workers.rollouts.beginnings(), workers.rollouts.collect_ahead(), workers.rollouts._ahead
    (engine,), (rank,) = workers.rollouts._engines.actors, workers._trainers.actors
    group = workers.rollouts._engines = LosesOne(engine)
    workers.rollouts._replacements = Replacements(1)
    ids = workers.rollouts.sync_check.ids
    workers.rollouts.sync_check.begin([engine.probe(ids)], rank.probe(ids))
    workers.rollouts.generate_ahead(PROMPTS, step=1)
    assert (workers.rollouts.beginnings(), workers.rollouts.collect_ahead(), workers.rollouts._ahead) == undisturbed
    assert group.replaced == [0] and workers.rollouts._replacements.count == 1


def test_they_are_few_tokens_of_as_many_responses_as_trainers_need(workers: Workers):
    workers.rollouts.generate_ahead(PROMPTS, step=1)
    drawn = workers.rollouts.beginnings()
    assert len(drawn) == 8 and max(len(r.response_ids) for r in drawn) == workers._job.rl.rollout.min_new_tokens + 4
    workers.rollouts.generate_ahead([], step=2)
    assert workers.rollouts.beginnings() == []
