"""Rollout engines that are lost are replaced."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_models import rl_job

from rlhf_core.engines.ray.actors import ActorGroup, RoleLost
from rlhf_core.engines.transfer.sender import Sent
from rlhf_core.trainers.rl.mismatch import WeightSyncCheck
from rlhf_core.trainers.rl.recovery import Replacements, RolloutRecovery
from rlhf_core.trainers.rl.rollouts import RolloutEngines
from rlhf_core.trainers.rl.turns import GpuTimeSharing

TRAINER = [-1.0, -2.5, -0.25]  # of the probe


def engines(folders: tuple[Path, Path], **changes) -> RolloutEngines:
    """Without an actor: no test here calls one."""
    changes = {"rl.algorithm": "rloo", "rl.rollout.max_lag": 1, **changes}
    job = rl_job(*folders, **changes)
    turns = GpuTimeSharing(None, None, on=False, deadline=1.0)
    how = {"stop_ids": (1,), "replacements": Replacements(0), "transfer": None, "turns": turns, "renew": None, "vocabulary": 300}
    how["check_trainers"] = lambda: None
    made = RolloutEngines(job, None, **how)
    made.sync_check.start([TRAINER], TRAINER)
    return made


class DyingActors:
    """Stands in for a group on Ray and for the transfer to it: new actors die so many times before one lives."""

    def __init__(self, deaths: int, says: list[float]):
        self.deaths, self.started, self.says, self.kept = deaths, 0, says, []

    def replace(self, ranks: list[int], meanwhile: Callable[[], None]) -> None:
        meanwhile()
        self.started += len(ranks)

    def send(self, ranks: list[int], *, kept: bool, **_) -> tuple[Sent, RoleLost | None]:
        self.kept.append(kept)
        if self.deaths:
            self.deaths -= 1
            return Sent(), RoleLost(f"rollout rank {ranks[0]}: dead", ranks)
        return Sent(answers={rank: (0, self.says) for rank in ranks}), None


def recovery(folders: tuple[Path, Path], actors: DyingActors, *, limit: int) -> RolloutRecovery:
    made = engines(folders).recovery
    made.engines = made._transfer = actors
    made._replacements, made.loaded = Replacements(limit), True
    return made


@pytest.mark.parametrize(("deaths", "limit", "lives"), [(0, 1, True), (2, 3, True), (2, 2, False)])
def test_a_new_engine_that_dies_too_is_replaced_in_its_turn_up_to_the_limit(model_folders: tuple[Path, Path], deaths, limit, lives):
    made = recovery(model_folders, DyingActors(deaths, TRAINER), limit=limit)
    if lives:
        made.replace(RoleLost("rollout rank 1: dead", [1]))
    else:
        with pytest.raises(RoleLost, match="rollout rank 1: dead"):
            made.replace(RoleLost("rollout rank 1: dead", [1]))
    assert made.engines.started == made._replacements.count == min(deaths + 1, limit)
    assert all(made.engines.kept)  # the trainer's weights are newer than what engines sample with


def test_an_engine_is_not_replaced_if_a_trainer_rank_is_lost_too(model_folders: tuple[Path, Path]):
    """As where both were on one node: there may be no room for a new engine, and the job can't go on anyway."""

    def trainer_lost() -> None:
        raise RoleLost("trainer rank 1: dead", [1])

    made = recovery(model_folders, DyingActors(0, TRAINER), limit=4)
    made._check_trainers = trainer_lost
    with pytest.raises(RoleLost, match="trainer rank 1: dead") as caught:
        made.replace(RoleLost("rollout rank 0: dead", [0]))
    assert not caught.value.ranks and not made.engines.started


class LosesOneAtFirst(ActorGroup):
    """A group on Ray but for Ray: of its two engines the second is lost when it is first asked."""

    def __init__(self):
        self.actors, self.lost, self.replaced = [None, None], True, []

    def submit_one(self, rank: int, method: str, *args, **_) -> tuple[int, str]:
        return rank, method

    def wait(self, references: list[tuple[int, str]], **_) -> list[list[float]]:
        if self.lost:
            self.lost = False
            raise RoleLost("rollout rank 1: dead", [1])
        assert references == [(0, "probe"), (1, "probe")]
        return [TRAINER, TRAINER]

    def replace(self, ranks: list[int], meanwhile: Callable[[], None]) -> None:
        self.replaced += ranks


@pytest.mark.parametrize("limit", [0, 1])
def test_an_engine_that_is_lost_before_the_first_sync_is_replaced_up_to_the_limit(model_folders: tuple[Path, Path], limit: int):
    made = engines(model_folders)
    made._engines = made.recovery.engines = LosesOneAtFirst()
    made.recovery._replacements = Replacements(limit)
    made.sync_check = made.recovery._sync_check = WeightSyncCheck(made._job, vocabulary=300)
    if limit:
        made.start(TRAINER)
        assert made.sync_check.disagreement(TRAINER) is None
    else:
        with pytest.raises(RoleLost, match="rollout rank 1: dead"):
            made.start(TRAINER)
    assert made._engines.replaced == [1] * limit


@pytest.mark.parametrize("says", [[-1.0, -2.5, -0.2], [-1.0, math.nan, -0.25]])
def test_a_new_engine_with_other_weights_ends_the_run(model_folders: tuple[Path, Path], says: list[float]):
    made = recovery(model_folders, DyingActors(0, says), limit=1)
    with pytest.raises(RoleLost, match=r"rollout rank 1: expected a new engine .*largest difference of .*max_logprob_difference"):
        made.replace(RoleLost("rollout rank 1: dead", [1]))
