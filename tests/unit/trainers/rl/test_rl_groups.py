"""Roles in groups of their own against all roles on one rank: outputs, updates, references and checkpoints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from actors_here import Here
from tiny_models import demonstrations, largest_difference, rl_job, sequences, train_batch, whole

from rlhf_core.checkpoint.settings import StoreSettings
from rlhf_core.sampling.rewards import RewardNormalizer
from rlhf_core.trainers.rl.actor_scorers import ActorScorers
from rlhf_core.trainers.rl.groups import TrainerGroups
from rlhf_core.trainers.rl.minibatch import Minibatch
from rlhf_core.trainers.rl.rank import TrainerRank
from rlhf_core.trainers.rl.recovery import Replacements
from rlhf_core.trainers.rl.state import Progress
from rlhf_core.trainers.rl.workers import Workers
from rlhf_core.types import Prompt, Rollout, Span, UpdateResult

pytestmark = pytest.mark.usefixtures("world")
PPO = {"rl.algorithm": "ppo", "rl.ppo.critic_init": "reward_model", "rl.ptx.coef": 0.5, "rl.trainer.microbatch_tokens": 40}
LORA = {"rank": 2, "alpha": 4.0, "dropout": 0.0, "target_modules": "all-linear"}
CRITIC_ALONE = [{"roles": ["critic"]}, {"roles": ["reward_models", "reference", "policy"]}]
PLACEMENTS = ["two_groups", "apart", CRITIC_ALONE]
ROUNDING = 5e-6


def workers(folders: tuple[Path, Path], work: Path, placement: str | list, changes: dict) -> Workers:
    job = rl_job(*folders, **changes | {"rl.placement": placement}).model_copy(update={"work": str(work), "checkpoints": StoreSettings()})
    work.mkdir(exist_ok=True)
    ranks = [TrainerRank(0, 1, job, group.roles) for group in job.rl.role_groups]
    for rank in ranks:
        rank.connect(rank.address())
    groups = TrainerGroups(job.rl, [Here(rank) for rank in ranks])
    made = Workers(job, SimpleNamespace(trainers=groups, rollouts=None, take_turns=False, ways=[]))
    if job.rl.starts_rounded and made._trainers.find("reference") is not made._trainers.policy:
        made.refresh_reference()  # as at the start of a job
    return made


def hosts(made: Workers, role: str) -> TrainerRank:
    return made._trainers.find(role).actors.actors[0]


def rollouts() -> list[Rollout]:
    ids = sequences(8, seed=3)
    return [Rollout(Prompt(f"p{i}", "made", [], s[:2], None), [Span(s[2:], [-5.0] * (len(s) - 2), 0)], True, i) for i, s in enumerate(ids)]


def forward(made: Workers, fraction: float = 1.0) -> dict[str, torch.Tensor]:
    return made.collect_forward(made.submit_forward(rollouts(), recomputed_fraction=fraction))


def scores(made: Workers) -> torch.Tensor:
    scorers = ActorScorers(made._job, made._trainers.find("reward_models"), Replacements(0), made.turns)
    return scorers.submit_sequences("reward_model", [*sequences(4, seed=5), None])()


def update(made: Workers, seeds: range, *, train_policy: bool = True) -> UpdateResult:
    """A minibatch for each seed; the policy is too far from that of seed 2."""
    plan: list[Minibatch] = []
    for seed in seeds:
        batch = train_batch(8, seed=seed, unscored=tuple(range(8)) if seed == 1 else (6,))
        plan.append(whole(replace(batch, old_logprobs=batch.old_logprobs - 3.0 * (seed == 2)), demonstrations(4, seed=seed)))
    batch = SimpleNamespace(old_logprobs=plan[0].batch.old_logprobs, rollout_logprobs=None)
    plans = [[plan] for _ in made._job.rl.learning_groups]
    return made.update(plans, batch, kl_coef=0.1, train_policy=train_policy)


def weights(made: Workers) -> dict[str, torch.Tensor]:
    critic = hosts(made, "critic").roles.critic.state_dict()
    return hosts(made, "policy").weights() | {f"critic.{name}": value for name, value in critic.items()}


@pytest.mark.parametrize("ranks", [2, 4])
def test_shares_of_several_ranks_come_back_in_the_order_of_the_rollouts(model_folders: tuple[Path, Path], tmp_path: Path, ranks: int):
    """One rank of a world of its own computes all of them."""
    alone, shared = (
        forward(workers(model_folders, tmp_path / "work", "together", {"rl.algorithm": "ppo", "rl.trainer.ranks": n})) for n in (1, ranks)
    )
    for name, values in alone.items():
        torch.testing.assert_close(shared[name], values, rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("changes", [{}, {"rl.max_approx_kl": 1.0, "rl.minibatch_size": 128}], ids=["to the end", "ended early"])
def test_groups_compute_and_learn_what_one_rank_does(model_folders: tuple[Path, Path], tmp_path: Path, changes: dict):
    found = []
    for placement in ("together", *PLACEMENTS):
        made = workers(model_folders, tmp_path / "work", placement, PPO | changes)
        assert len(made._trainers.all) == len(made._job.rl.role_groups) == {"together": 1, "apart": 4}.get(str(placement), 2)
        outputs = forward(made) | {f"part, {name}": values for name, values in forward(made, 0.4).items()} | {"scores": scores(made)}
        warmup = update(made, range(10, 11), train_policy=False).metrics
        found.append((outputs, warmup, update(made, range(4)).metrics, weights(made)))
    outputs, warmup, metrics, learned = found[0]
    assert outputs.keys() >= {"old_logprobs", "ref_logprobs", "values"} and outputs["scores"].shape == (5, 1)
    assert "policy_loss" not in warmup and "value_loss" in warmup
    assert metrics["stopped_early"] == ("rl.max_approx_kl" in changes) and metrics["skipped_steps"] == 1
    for other, its_warmup, its_metrics, its_weights in found[1:]:
        assert other.keys() == outputs.keys()
        for name, values in outputs.items():
            torch.testing.assert_close(other[name], values, rtol=0, atol=ROUNDING, equal_nan=True)
        assert its_warmup == pytest.approx(warmup, rel=1e-4, abs=1e-6) and its_metrics == pytest.approx(metrics, rel=1e-4, abs=1e-6)
        assert largest_difference(its_weights, learned) < ROUNDING


@pytest.mark.parametrize(
    "changes",
    [
        {"rl.kl.refresh_reference_every": 1},
        {"rl.lora": LORA},
        {"rl.lora": LORA | {"quantize": "nf4"}},
        {"rl.lora": LORA | {"quantize": "nf4"}, "rl.kl.refresh_reference_every": 1},
    ],
    ids=["moves", "adapters", "rounded", "rounded and moves"],
)
def test_a_reference_apart_is_the_one_of_the_same_rank(model_folders: tuple[Path, Path], tmp_path: Path, changes: dict):
    found = []
    for placement in ("together", "apart"):
        made = workers(model_folders, tmp_path / "work", placement, {"rl.algorithm": "grpo", **changes})
        before = forward(made)["ref_logprobs"]
        update(made, range(1))
        if "rl.kl.refresh_reference_every" in changes:
            made.refresh_reference()
        found.append((before, forward(made)["ref_logprobs"]))
    (before, after), (elsewhere, later) = found
    torch.testing.assert_close(elsewhere, before, rtol=0, atol=ROUNDING)
    torch.testing.assert_close(later, after, rtol=0, atol=ROUNDING)
    moved = float((after - before).abs().max())
    assert moved > 1e-4 if "rl.kl.refresh_reference_every" in changes else moved < ROUNDING


def test_a_checkpoint_resumes_to_the_same_bits_and_in_any_placement(model_folders: tuple[Path, Path], tmp_path: Path):
    changes = PPO | {"rl.kl.refresh_reference_every": 1}
    saved = workers(model_folders, tmp_path / "work", "apart", changes)
    normalizer = RewardNormalizer(saved._job.rl.reward)
    update(saved, range(1))
    saved.refresh_reference()
    saved.snapshot(Progress.start(saved._job.rl), normalizer, score=None)
    saved.store.publish()
    saved.store.wait()
    expected = update(saved, range(3, 4)).metrics, weights(saved), forward(saved)["ref_logprobs"]
    for placement in ("apart", "two_groups", "together"):
        resumed = workers(model_folders, tmp_path / "work", placement, changes)
        resumed.load_step(0)
        metrics, learned, reference = update(resumed, range(3, 4)).metrics, weights(resumed), forward(resumed)["ref_logprobs"]
        assert metrics == pytest.approx(expected[0], rel=1e-4, abs=1e-6)
        assert largest_difference(learned, expected[1]) <= (0 if placement == "apart" else ROUNDING)
        torch.testing.assert_close(reference, expected[2], rtol=0, atol=0 if placement == "apart" else ROUNDING)
