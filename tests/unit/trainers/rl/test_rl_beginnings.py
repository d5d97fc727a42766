"""Rollouts ahead: short responses are compared with the trainer before it is updated, and a lost engine repeats what it had."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from actors_here import Here
from tiny_models import rl_job

from rlhf_core.engines.ray.actors import RoleLost
from rlhf_core.engines.rollout.open import RolloutActor
from rlhf_core.trainers.rl.data import PromptStream, collate, pack
from rlhf_core.trainers.rl.groups import TrainerGroups
from rlhf_core.trainers.rl.loop import Run, check_engine
from rlhf_core.trainers.rl.mismatch import LogprobMismatch
from rlhf_core.trainers.rl.rank import TrainerRank
from rlhf_core.trainers.rl.recovery import Replacements
from rlhf_core.trainers.rl.workers import Workers
from rlhf_core.types import Prompt, Rollout, Span

PROMPTS = [Prompt(f"p{i}", "made", [{"role": "user", "content": "Sort 21."}], [5, 6, 7 + i], None) for i in range(3)]
STREAM = PromptStream(PROMPTS, {}, seed=0)
PLAIN = {"rl.rollout.max_lag": 2, "rl.rollout.max_new_tokens": 12}
FILTERED = {"rl.rollout.top_p": 0.8, "rl.rollout.min_new_tokens": 2, "rl.correction.kind": "tis"}


class LosesOne(Here):
    """Its actor is lost at the first wait, with all calls submitted before."""

    def __init__(self, actor: object):
        super().__init__(actor)
        self.lost, self.replaced, self._bundles = False, [], []

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
    batch = collate([prompt], pack([prompt]), {}, {}, None, old_logprobs_source="from_engine")
    return check_engine(Run(workers._job, workers, None, [], None, None, None), batch, None, step=step)


@pytest.fixture(params=[{}, FILTERED], ids=["plain", "filtered"])
def workers(request, model_folders: tuple[Path, Path], tmp_path: Path) -> Workers:
    """In the first step, whose rollouts have been drawn."""
    changes = {"rl.algorithm": "rloo", "rl.rloo.group_size": 4, "rl.samples_per_step": 8, "rl.minibatch_size": 8, **PLAIN, **request.param}
    job = rl_job(*model_folders, **changes).model_copy(update={"work": str(tmp_path)})
    rank = TrainerRank(0, 1, job)
    rank.connect(None)
    engine = RolloutActor(
        0, backend="pytorch", model_path=job.sft_model, max_length=job.model.max_length, dtype="float32", max_concurrent_sequences=32,
        threads=1, seed=0, trust_remote_code=False, gpu_memory_fraction=0.3,
    )  # fmt: skip
    groups = TrainerGroups(job.rl, [Here(rank)])
    made = Workers(job, SimpleNamespace(trainers=groups, rollouts=Here(engine), take_turns=False, ways=["gloo"]))
    made.draw(STREAM, 0, 2, step=0)
    return made


def next_step(workers: Workers, *, step: int) -> None:
    """As if the weights had been sent, which haven't changed."""
    workers.ahead.end()
    workers.rollouts.recovery.version = workers.rollouts._engines.actors[0]._engine.version = step
    workers.draw(STREAM, 0, 2, step=step)


def test_the_same_policy_passes_and_another_one_ends_the_run(workers: Workers):
    workers.ahead.begin(step=0)
    assert 0 < checked(workers, step=0) < 1e-4
    assert checked(workers, step=0) == workers.rollouts.sync_check.difference == 0.0  # nothing was drawn since
    (rank,), (engine,) = workers._trainers.policy.actors.actors, workers.rollouts._engines.actors
    next_step(workers, step=1)
    torch.manual_seed(0)
    engine._engine.load_weights({name: w + 0.02 * torch.randn_like(w) for name, w in rank.weights().items()}, 1)
    workers.ahead.begin(step=1)
    with pytest.raises(LogprobMismatch, match=r"step 1: expected the rollout engine's .* a largest difference of"):
        checked(workers, step=1)


def test_short_responses_continue_those_in_flight_and_only_their_last_tokens_are_compared(workers: Workers):
    workers.ahead.begin(step=0)
    assert {len(r.spans) for r in workers.ahead.short_rollouts()} == {1}  # all had ended: their prompts begin anew
    for step in (1, 2):
        next_step(workers, step=step)
        workers.ahead.begin(step=step)
        drawn = workers.ahead.short_rollouts()
    cut = [r for r in drawn if len(r.spans) > 1]
    assert cut and all(not r.spans[0].trained and r.spans[0].version == 1 for r in cut)
    assert all(r.spans[-1].trained and r.spans[-1].version == 2 and 1 <= len(r.spans[-1].ids) <= 4 for r in cut)
    forward = workers.submit_forward(drawn, recomputed_fraction=1.0)
    batch = collate(drawn, forward.sequences, {}, workers.collect_forward(forward), None, old_logprobs_source="recompute")
    assert batch.response_mask.sum() == sum(len(r.spans[-1].ids) for r in drawn) < batch.lengths.sum()


def test_responses_of_other_weights_than_were_sent_end_the_run(workers: Workers):
    (engine,) = workers.rollouts._engines.actors
    workers.ahead.begin(step=0)
    assert {span.version for r in workers.ahead.short_rollouts() for span in r.spans} == {0}
    engine._engine.load_weights(engine._engine.own_weights(), 1)
    workers.ahead.begin(step=0)
    with pytest.raises(LogprobMismatch, match=r"expected responses of policy version 0, got some of \[1\]"):
        workers.ahead.short_rollouts()


def test_a_new_engine_repeats_short_and_further_responses(workers: Workers):
    next_step(workers, step=1)  # what is drawn in the background has tokens now
    workers.ahead.begin(step=1)
    drawn = workers.ahead._drawn
    undisturbed = workers.ahead.short_rollouts(), workers.ahead.end(), workers.ahead._admitted
    (engine,), (rank,) = workers.rollouts._engines.actors, workers._trainers.policy.actors.actors
    recovery, ids = workers.rollouts.recovery, workers.rollouts.sync_check.probe_ids
    group = workers.rollouts._engines = recovery.engines = LosesOne(engine)
    recovery._replacements = Replacements(1)
    workers.rollouts.sync_check.start([engine.probe(ids)], rank.probe(ids))
    workers.ahead._drawn = drawn
    workers.ahead.begin(step=1)
    assert (workers.ahead.short_rollouts(), workers.ahead.end(), workers.ahead._admitted) == undisturbed
    assert any(r.num_sampled for r in undisturbed[2].rollouts[3]) and undisturbed[2].complete == 2
    assert group.replaced == [0] and recovery._replacements.count == 1


def test_short_responses_have_few_tokens_and_suffice_for_the_ranks(workers: Workers):
    workers.ahead.begin(step=0)
    drawn, fewest = workers.ahead.short_rollouts(), workers._job.rl.rollout.min_new_tokens
    assert len(drawn) == 8 and max(len(r.spans[-1].ids) for r in drawn) == fewest + 4
    workers.ahead.begin(step=workers._job.rl.steps - 1)
    assert workers.ahead.short_rollouts() == []
