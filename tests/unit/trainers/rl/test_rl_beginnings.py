"""One step off policy: short responses are compared with the trainer before it is updated."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from actors_here import Here
from tiny_models import rl_job

from rlhf_core.engines.in_process import RolloutActor
from rlhf_core.engines.ray.actors import RoleLost
from rlhf_core.trainers.rl.data import collate
from rlhf_core.trainers.rl.groups import TrainerGroups
from rlhf_core.trainers.rl.loop import Run, check_engine
from rlhf_core.trainers.rl.mismatch import LogprobMismatch
from rlhf_core.trainers.rl.rank import TrainerRank
from rlhf_core.trainers.rl.recovery import Replacements
from rlhf_core.trainers.rl.workers import Workers
from rlhf_core.types import Prompt, Rollout, Span

PROMPTS = [Prompt(f"p{i}", "made", [{"role": "user", "content": "Sort 21."}], [5, 6, 7 + i], None) for i in range(3)]


FILTERED = {"rl.rollout.top_p": 0.8, "rl.rollout.min_new_tokens": 2, "rl.correction.kind": "tis"}


class LosesOne(Here):
    """Its actor is lost at the first wait, with all calls submitted before."""

    def __init__(self, actor: object):
        super().__init__(actor)
        self.lost, self.replaced = False, []

    def submit(self, method: str, per_rank: list[tuple], **kwargs) -> list:
        return super().submit(method, per_rank, **kwargs) if self.lost else [None]

    def submit_one(self, rank: int, method: str, *args, **kwargs):
        return getattr(self.actors[rank], method)(*args, **kwargs)

    def wait(self, references: list, **_) -> list:
        if not self.lost:
            self.lost = True
            raise RoleLost("rollout rank 0: dead", [0])
        assert None not in references, "lost with the first actor"
        return references

    def replace(self, ranks: list[int], meanwhile: Callable[[], None]) -> None:
        self.replaced += ranks


def checked(workers: Workers, *, step: int) -> float:
    """The check before the update, with rollouts whose log-probabilities are finite."""
    prompt = Rollout(PROMPTS[0], [Span([8], [-1.0], 0)], True, 0)
    batch = collate([prompt], {}, {}, None, pad_id=0, old_logprobs_source="from_engine")
    return check_engine(Run(workers._job, workers, None, [], None, None), batch, step=step)


@pytest.fixture(params=[{}, FILTERED], ids=["plain", "filtered"])
def workers(request, model_folders: tuple[Path, Path], tmp_path: Path) -> Workers:
    changes = {"rl.algorithm": "rloo", "rl.rollout.one_step_off_policy": True, **request.param}
    job = rl_job(*model_folders, **changes).model_copy(update={"work": str(tmp_path)})
    rank = TrainerRank(0, 1, job)
    rank.connect(None)
    engine = RolloutActor(
        0, backend="pytorch", model_path=job.sft_model, max_length=job.model.max_length, dtype="float32", max_concurrent_sequences=32,
        threads=1, seed=0, trust_remote_code=False, gpu_memory_fraction=0.3,
    )  # fmt: skip
    groups = TrainerGroups(job.rl, [Here(rank)])
    return Workers(job, SimpleNamespace(trainers=groups, rollouts=Here(engine), take_turns=False, ways=["gloo"]))


def test_the_same_policy_passes_and_another_one_ends_the_run(workers: Workers):
    workers.rollouts.prefetch(PROMPTS, step=1)
    assert 0 < checked(workers, step=0) < 1e-4
    assert checked(workers, step=0) == workers.rollouts.sync_check.difference == 0.0  # nothing was drawn since
    (rank,), (engine,) = workers._trainers.policy.actors.actors, workers.rollouts._engines.actors
    torch.manual_seed(0)
    engine._engine.load_weights({name: w + 0.02 * torch.randn_like(w) for name, w in rank.weights().items()}, 0)
    workers.rollouts.prefetch(PROMPTS, step=2)
    with pytest.raises(LogprobMismatch, match=r"step 1: expected the rollout engine's .* a largest difference of"):
        checked(workers, step=1)


def test_responses_of_other_weights_than_were_sent_end_the_run(workers: Workers):
    (engine,) = workers.rollouts._engines.actors
    workers.rollouts.prefetch(PROMPTS, step=1)
    assert {span.version for r in workers.rollouts.short_rollouts() for span in r.spans} == {0}
    engine._engine.load_weights(engine._engine.own_weights(), 1)
    workers.rollouts.prefetch(PROMPTS, step=1)
    with pytest.raises(LogprobMismatch, match=r"expected responses of policy version 0, got some of \[1\]"):
        workers.rollouts.short_rollouts()


def test_a_new_engine_repeats_short_and_prefetched_responses(workers: Workers):
    workers.rollouts.prefetch(PROMPTS, step=1)
    undisturbed = workers.rollouts.short_rollouts(), workers.rollouts.wait_prefetched(), workers.rollouts._prefetched
    (engine,), (rank,) = workers.rollouts._engines.actors, workers._trainers.policy.actors.actors
    recovery, ids = workers.rollouts.recovery, workers.rollouts.sync_check.probe_ids
    group = workers.rollouts._engines = recovery.engines = LosesOne(engine)
    recovery._replacements = Replacements(1)
    workers.rollouts.sync_check.start([engine.probe(ids)], rank.probe(ids))
    workers.rollouts.prefetch(PROMPTS, step=1)
    assert (workers.rollouts.short_rollouts(), workers.rollouts.wait_prefetched(), workers.rollouts._prefetched) == undisturbed
    assert group.replaced == [0] and recovery._replacements.count == 1


def test_short_responses_have_few_tokens_and_suffice_for_the_ranks(workers: Workers):
    workers.rollouts.prefetch(PROMPTS, step=1)
    drawn = workers.rollouts.short_rollouts()
    assert len(drawn) == 8 and max(len(r.response_ids) for r in drawn) == workers._job.rl.rollout.min_new_tokens + 4
    workers.rollouts.prefetch([], step=2)
    assert workers.rollouts.short_rollouts() == []
