"""Runs with a reward by scorer and group, other policy losses and a curriculum: interrupted after any step they end with the same bits."""

from __future__ import annotations

import pkgutil
from pathlib import Path
from typing import Any

import pytest
import torch
from actors_here import Here
from gate_pairs import write_slices
from rl_here import RunHere, rl_job_here, running
from whole_matrix import cells

from rlhf_core.config import curve_columns
from rlhf_core.trainers.rl.job import RlJob

pytestmark = [pytest.mark.usefixtures("world"), pytest.mark.filterwarnings("ignore:groups of equal rewards")]

STEPS, AT = 6, 3
TWO_SCORERS = [
    {"name": "vowel", "kind": "regex", "pattern": "[aeiou]", "weight": 1.0},
    {"name": "brief", "kind": "length", "target_length": 4, "weight": 0.5, "normalization": "running"},
]
PLAIN = {"rl.algorithm": "grpo", "rl.grpo.group_size": 4, "rl.gdpo.group_size": 4, "rl.samples_per_step": 32, "rl.minibatch_size": 16}
PLAIN |= {"rl.steps": STEPS, "rl.rollout.max_new_tokens": 8, "rl.reward.scorers": TWO_SCORERS, "rl.learning_rate": 2e-2}
CURRICULUM = {"rl.curriculum": {"by": "success", "scorer": "vowel", "threshold": 0.5, "half_life": 4.0}}
CURRICULUM |= {"rl.samples_per_step": 64}  # 96 draws of 40 prompts
LAG = {"rl.rollout.max_lag": 2}
DYNAMIC = {"rl.dynamic_sampling.enabled": True, "rl.dynamic_sampling.max_rounds": 3}
LEVEL = {"rl.curriculum": {"by": "column", "column": "level"}}
OPTIONS = {
    "gdpo": {"rl.algorithm": "gdpo"},
    "curriculum": CURRICULUM,
    "gdpo, dynamic": {"rl.algorithm": "gdpo"} | DYNAMIC,
    "gdpo, ahead, dppo_tv": {"rl.algorithm": "gdpo", "rl.policy_loss": "dppo_tv"} | LAG,
    "dppo_kl, icepop": {"rl.policy_loss": "dppo_kl", "rl.clip_low": 0.01, "rl.clip_high": 0.01, "rl.correction.kind": "icepop"},
    "sapo, ahead, sequence_mask": {"rl.policy_loss": "sapo", "rl.correction.kind": "sequence_mask"} | LAG,
    "column, ahead": LEVEL | LAG,
    "curriculum, ahead": CURRICULUM | LAG,
    "curriculum, dynamic": CURRICULUM | DYNAMIC,
    "curriculum, ahead, dynamic": CURRICULUM | DYNAMIC | LAG,
}


class ScorersHere(Here):
    """Text scorers in this process."""

    def __init__(self, role: str, actor: str, count: int, *, kwargs: dict[str, Any], **_: Any):
        super().__init__(pkgutil.resolve_name(actor)(0, **kwargs))

    def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def without_ray(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("rlhf_core.trainers.rl.actor_scorers.ActorGroup", ScorersHere)


def job_in(model_folders: tuple[Path, Path], folder: Path, **changes: Any) -> RlJob:
    """A job whose prompts have levels."""
    job = rl_job_here(model_folders, folder, **changes)
    write_slices(folder / "prepared", {f"p{i}": {"level": str(i * 3 % 5)} for i in range(40)})
    return job


def train(job: RlJob, steps: int) -> tuple[RunHere, list[list[str]], dict[str, torch.Tensor]]:
    """A run on to this step, each step's prompts, and the weights."""
    with running(job) as run:
        while run.progress.step < steps:
            run.step()
        run.save()
        prompts = [[r.prompt.id for rollouts, _ in result.collected.drawn for r in rollouts] for result in run.results]
        return run, prompts, {name: weights.clone() for name, weights in run.rank.actors[0].weights().items()}


@pytest.mark.parametrize("option", cells(OPTIONS, ["gdpo", "curriculum, ahead, dynamic"]))
def test_an_interrupted_run_ends_with_the_same_bits(model_folders: tuple[Path, Path], tmp_path: Path, option: str):
    changes = PLAIN | OPTIONS[option]
    undisturbed, prompts, weights = train(job_in(model_folders, tmp_path / "whole", **changes), STEPS)
    job = job_in(model_folders, tmp_path / "again", **changes)
    _, before, _ = train(job, AT)
    again, after, same = train(job, STEPS)
    assert [*before, *after] == prompts and again.rows == undisturbed.rows[AT:]
    assert all(torch.equal(weights[name], same[name]) for name in weights)
    assert set(undisturbed.rows[0]) - {"reward_mean"} <= {*curve_columns(job.rl), "reward_mean"}
    if job.rl.curriculum is not None and job.rl.curriculum.by == "column":
        levels = [int(i[1:]) * 3 % 5 for step in prompts for i in step[::4]]
        assert levels[:40] == sorted(levels[:40]) and levels[40:] == sorted(levels[40:]) and set(levels[:40]) == set(range(5))
    if job.rl.measures_success:
        assert undisturbed.rows[-1]["drawn_share"] < 1 and undisturbed.progress.curriculum == again.progress.curriculum
        _, uniform, _ = train(job_in(model_folders, tmp_path / "uniform", **changes | {"rl.curriculum": None}), STEPS)
        assert uniform != prompts


def test_an_interrupted_run_that_sends_changes_ends_with_the_bits_of_one_that_sends_all(model_folders, tmp_path: Path):
    changes = PLAIN | {"model.dtype": "bfloat16", "rl.learning_rate": 1e-5}
    undisturbed, _, weights = train(job_in(model_folders, tmp_path / "all", **changes), STEPS)
    job = job_in(model_folders, tmp_path / "changes", **changes | {"rl.rollout.send_changes": True})
    train(job, AT)
    again, _, same = train(job, STEPS)
    assert again.rows == undisturbed.rows[AT:] and all(torch.equal(weights[name], same[name]) for name in weights)
    everything, sent = undisturbed.workers.transfer.traffic, again.workers.transfer.traffic
    assert everything.numbers == 0 < sent.changed < 0.2 * sent.numbers and not sent.resent
    assert sent.nbytes < everything.nbytes / 2  # once all weights, and what three updates changed
    assert again.workers.transfer.take_traffic() == {
        "sync_bytes": sent.nbytes, "sync_changed": sent.changed / sent.numbers, "sync_resent": 0
    }  # fmt: skip
    assert undisturbed.workers.transfer.take_traffic() == {"sync_bytes": everything.nbytes}


def test_a_policy_that_is_sent_again_to_an_engine_counts_once_in_what_has_changed(model_folders, tmp_path: Path):
    """As for an engine that replaces a lost one, with which the others already have the policy."""
    changes = PLAIN | {"model.dtype": "bfloat16", "rl.learning_rate": 1e-5, "rl.rollout.send_changes": True}
    with running(job_in(model_folders, tmp_path, **changes)) as run:
        for _ in range(2):
            run.step()
        transfer = run.workers.transfer
        sent = transfer.traffic
        numbers, changed, nbytes = sent.numbers, sent.changed, sent.nbytes
        transfer.send([0], version=run.progress.step, ids=[5, 6])
        again = transfer.take_traffic()
    assert again["sync_changed"] == changed / numbers and again["sync_bytes"] > nbytes
