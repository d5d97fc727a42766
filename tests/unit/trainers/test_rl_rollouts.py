"""Responses that were drawn ahead: kept in a checkpoint as they were, and used for the step that they were drawn for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import rl_job

from rlhf_core.engines.ray_actors import RoleLost
from rlhf_core.trainers.rl_replacements import Replacements
from rlhf_core.trainers.rl_rollouts import AHEAD, Ahead, RolloutEngines
from rlhf_core.types import Prompt, Rollout

PROMPTS = [Prompt(f"p{i}", "made", [{"role": "user", "content": "Sort 21."}], [5, 6, 7 + i], None) for i in range(2)]
ROLLOUTS = [
    Rollout(prompt, [8, 9, 1], [-0.1 - 1e-17 * i, -2.0 / 3, -1e-30], finished=i == 0, group_id=i, policy_version=3)
    for i, prompt in enumerate(PROMPTS)
    for _ in range(4)
]


def engines(folders: tuple[Path, Path], **changes) -> RolloutEngines:
    """Without an actor: none is asked here."""
    changes = {"rl.algorithm": "rloo", "rl.rollout.one_step_off_policy": True, **changes}
    job = rl_job(*folders, **changes)
    unused = {"packed_weights": None, "trainer_logprobs": None}
    return RolloutEngines(job, None, stop_ids=(1,), replacements=Replacements(0), **unused)


def kept(folders: tuple[Path, Path], folder: Path) -> None:
    drawn = engines(folders)
    drawn._ahead = Ahead(4, ROLLOUTS)
    drawn.save_ahead(folder, step=4)


def test_they_come_back_as_they_were_for_the_same_prompts_of_their_step(model_folders: tuple[Path, Path], tmp_path: Path):
    kept(model_folders, tmp_path)
    again = engines(model_folders)
    again.load_ahead(tmp_path, step=4)
    assert again.generate(PROMPTS, step=4) == ROLLOUTS


def test_of_another_step_nothing_is_kept(model_folders: tuple[Path, Path], tmp_path: Path):
    drawn = engines(model_folders)
    drawn._ahead = Ahead(4, ROLLOUTS)
    drawn.save_ahead(tmp_path, step=5)
    assert not (tmp_path / AHEAD).exists()


@pytest.mark.parametrize(
    "changes", [{"rl.rollout.temperature": 0.5}, {"rl.rollout.max_new_tokens": 7}, {"rl.rollout.one_step_off_policy": False}]
)
def test_a_run_that_samples_in_another_way_or_not_ahead_does_not_take_them(model_folders: tuple[Path, Path], tmp_path: Path, changes: dict):
    kept(model_folders, tmp_path)
    other = engines(model_folders, **changes)
    other.load_ahead(tmp_path, step=4)
    assert other._ahead is None


@pytest.mark.parametrize(("top_p", "expected"), [(1.0, 5.0), (0.9, 0.0)])
def test_at_the_edge_of_top_p_one_token_may_differ_when_engines_are_compared(
    model_folders: tuple[Path, Path], top_p: float, expected: float
):
    made = engines(model_folders, **{"rl.rollout.top_p": top_p, "rl.correction.kind": "tis"})
    drawn = ROLLOUTS[:1]
    made._trainer_logprobs = lambda rollouts: torch.tensor(rollouts[0].rollout_logprobs) + torch.tensor([0.0, 5.0, 0.0])
    assert made._difference(drawn) == pytest.approx(expected)


class DyingActors:
    """Stands in for a group on Ray, whose new actors die so many times before one lives."""

    def __init__(self, deaths: int):
        self.deaths, self.started = deaths, 0

    def replace(self, ranks: list[int]) -> None:
        self.started += len(ranks)

    def call_one(self, rank: int, method: str, *_, **__) -> int:
        if self.deaths:
            self.deaths -= 1
            raise RoleLost(f"rollout rank {rank}: dead", [rank])
        return 0


@pytest.mark.parametrize(("deaths", "limit", "lives"), [(0, 1, True), (2, 3, True), (2, 2, False)])
def test_a_new_engine_that_dies_too_is_replaced_in_its_turn_up_to_the_limit(model_folders: tuple[Path, Path], deaths, limit, lives):
    made = engines(model_folders)
    made._engines, made._replacements, made._loaded = DyingActors(deaths), Replacements(limit), object()
    if lives:
        made._replace_behind(RoleLost("rollout rank 1: dead", [1]))
    else:
        with pytest.raises(RoleLost, match="rollout rank 1: dead"):
            made._replace_behind(RoleLost("rollout rank 1: dead", [1]))
    assert made._engines.started == made._replacements.count == min(deaths + 1, limit)
