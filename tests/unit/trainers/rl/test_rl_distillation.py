"""On-policy distillation: passes and updates of a rank against plain PyTorch, and runs that resume to the same bits."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from one_rl_rank import SUMS, connected, trained, update
from rl_here import rl_job_here, running
from tiny_models import assert_weights_agree, largest_difference, rl_job, save_tiny_models, train_batch, whole
from whole_matrix import cells

from rlhf_core.models.build import load_language_model
from rlhf_core.sampling.rewards import RewardNormalizer
from rlhf_core.trainers.rl.credit import compute_advantages
from rlhf_core.trainers.rl.loop import trained_rollouts
from rlhf_core.trainers.rl.minibatch import Minibatch
from rlhf_core.trainers.rl.rank import TrainerRank
from rlhf_core.trainers.rl.saved_rollouts import rollout_table
from rlhf_core.types import Sequences, TrainBatch

pytestmark = pytest.mark.usefixtures("world")

TEMPERATURE = 0.8
TOP = 4
LOSSES = ("sampled", "reverse_kl", "forward_kl", "jsd", "top reverse_kl", "top forward_kl", "top jsd")
ALONE = {"rl.reward.scorers": [], "rl.kl.coef": 0.0, "rl.algorithm": "grpo", "rl.weight_decay": 0.0}
Folders = tuple[Path, Path]


@pytest.fixture(scope="module")
def teachers(tmp_path_factory: pytest.TempPathFactory, tokenizer) -> list[Path]:
    """Two models of other weights than the policy's, of which the second is wider."""
    folder = tmp_path_factory.mktemp("teachers")
    return [save_tiny_models(folder / str(size), tokenizer, seed=size, hidden_size=size)[0] for size in (16, 32)]


def distillation(loss: str, folders: list[Path], *, weights: tuple[float, ...] = (3.0, 1.0), **further: Any) -> dict[str, Any]:
    named = [{"path": str(folder), "weight": weight} for folder, weight in zip(folders, weights, strict=False)]
    top, of = {"top_k": TOP} if loss.startswith("top ") else {}, loss.removeprefix("top ")
    return {"rl.distillation": {"teachers": named, "loss": of, **({"beta": 0.3} if of == "jsd" else {}), **top, **further}}


def logprobs_of(model, batch: TrainBatch, row: int) -> torch.Tensor:
    """[n, V] at the trained tokens of a row."""
    prompt, response = trained(batch, row)
    logits = model(input_ids=torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
    return (logits / TEMPERATURE).log_softmax(-1)


def plain_loss(
    batch: TrainBatch, loss: str, policy, teachers: list, weights: tuple[float, ...], taught: TrainBatch | None = None
) -> torch.Tensor:
    """The divergence of each trained token, row after row, from the formulas in the papers.

    Args:
        taught: what teachers read.
    """
    found = []
    for i in (i for i in range(len(batch)) if batch.response_mask[i].any()):
        own, mask, ids = logprobs_of(policy, batch, i), batch.response_mask[i], trained(batch, i)[1][:, None]
        total = 0.0
        for teacher, weight in zip(teachers, weights, strict=True):
            theirs = logprobs_of(teacher, taught or batch, i).detach()
            p, q = own.exp(), theirs.exp()
            if loss.startswith("top "):
                best = q.topk(TOP).indices
                p, q = (torch.cat([x.gather(1, best), 1 - x.gather(1, best).sum(1, keepdim=True)], 1) for x in (p, q))
            if loss == "sampled":
                ratio = (own.gather(1, ids)[:, 0] - batch.old_logprobs[i][mask]).exp()
                value = batch.importance_weights[i][mask] * ratio * (own.detach() - theirs).gather(1, ids)[:, 0]
            elif loss.endswith("jsd"):
                m = 0.3 * q + 0.7 * p
                value = 0.3 * (q * (q / m).log()).sum(-1) + 0.7 * (p * (p / m).log()).sum(-1)
            else:
                value = (p * (p / q).log()).sum(-1) if loss.endswith("reverse_kl") else (q * (q / p).log()).sum(-1)
            total = total + weight / sum(weights) * value
        found.append(total)
    return torch.cat(found)


def with_teachers(rank: TrainerRank, batch: TrainBatch, job: TrainerRank | None = None) -> Minibatch:
    """A batch as it comes to the update: with what teachers say that compute before it."""
    outputs = (job or rank).forward(batch.sequences, batch.teacher_sequences)
    mask = torch.arange(batch.response_mask.shape[1]) < (batch.sequences.lengths - batch.sequences.starts)[:, None]
    found = {}
    for name in [name for name in outputs if name.startswith("teacher_")]:
        flat = outputs[name]
        found[name] = torch.full((*mask.shape, *flat.shape[1:]), torch.nan if flat.is_floating_point() else 0, dtype=flat.dtype)
        found[name][mask] = flat
    return whole(replace(batch, **found))


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("number", [1, 2], ids=["a teacher", "two teachers"])
def test_an_update_equals_a_plain_step_towards_the_teachers(model_folders: Folders, teachers: list[Path], loss: str, number: int):
    """Row 3 is not trained on."""
    weights = (3.0, 1.0)[:number]
    rank = connected(
        model_folders, **ALONE, **distillation(loss, teachers[-number:], weights=weights, coef=0.7), **{"rl.minibatch_size": 128}
    )
    policy, batch = load_language_model(model_folders[0]), train_batch(8, unscored=(3,))
    batch.advantages[:] = 0.0
    expected = plain_loss(batch, loss, policy, [load_language_model(folder) for folder in teachers[-number:]], weights)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=5e-4 / 3, betas=(0.9, 0.95), weight_decay=0.0)
    (0.7 * expected.mean()).backward()
    norm = float(torch.nn.utils.clip_grad_norm_(policy.parameters(), 0.5))
    optimizer.step()
    totals = update(rank, [with_teachers(rank, batch)])
    assert totals["distillation_loss_sum"] / totals["tokens"] == pytest.approx(float(expected.detach().mean()), rel=1e-5, abs=1e-5)
    assert totals["policy_loss"] == pytest.approx(0.7 * float(expected.detach().mean()), rel=1e-5, abs=1e-5)
    assert totals["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert_weights_agree(rank.weights(), dict(policy.state_dict()), step=5e-4 / 3)


def with_other_prompts(batch: TrainBatch) -> TrainBatch:
    """What teachers read: tokens before each prompt, and for row 2 fewer than the policy's."""
    ids, starts = batch.sequences.lists(), batch.sequences.starts.tolist()
    prompts = [[9, 8, 7, *of[:start]] if n != 2 else [9] for n, (of, start) in enumerate(zip(ids, starts, strict=True))]
    taught = [[*prompt, *of[start:]] for prompt, of, start in zip(prompts, ids, starts, strict=True)]
    return replace(batch, teacher_sequences=Sequences.of(taught, [len(prompt) for prompt in prompts]))


@pytest.mark.parametrize("loss", cells(LOSSES, ["sampled", "reverse_kl", "top jsd"]))
@pytest.mark.parametrize("how", [{}, {"rl.trainer.microbatch_tokens": 20}], ids=["whole", "small micro-batches"])
def test_teachers_read_their_own_prompts(model_folders: Folders, teachers: list[Path], loss: str, how: dict[str, Any]):
    """Row 3 is not trained on. The sequences that teachers read have the policy's responses, so that plain numbers come from both."""
    rank = connected(model_folders, **ALONE, **distillation(loss, teachers), **{"rl.minibatch_size": 128}, **how)
    policy, batch = load_language_model(model_folders[0]), with_other_prompts(train_batch(8, unscored=(3,)))
    batch.advantages[:] = 0.0
    models = [load_language_model(folder) for folder in teachers]
    expected = plain_loss(batch, loss, policy, models, (3.0, 1.0), replace(batch, sequences=batch.teacher_sequences))
    expected.mean().backward()
    norm = float(torch.nn.utils.clip_grad_norm_(policy.parameters(), 0.5))
    totals = update(rank, [with_teachers(rank, batch)])
    assert totals["distillation_loss_sum"] / totals["tokens"] == pytest.approx(float(expected.detach().mean()), rel=1e-5, abs=1e-5)
    assert totals["grad_norm"] == pytest.approx(norm, rel=1e-4)


HOW = {
    "small micro-batches": {"rl.trainer.microbatch_tokens": 20},
    "sharded": {"rl.trainer.zero_stage": 3},
    "offloaded": {"rl.trainer.offload_frozen": True},
    "with entropy": {"rl.entropy_coef": 0.01},
    "adapters": {"rl.lora": {"rank": 4, "alpha": 8.0, "dropout": 0.0, "target_modules": "all-linear"}},
}


@pytest.mark.parametrize(
    ("loss", "how"),
    cells([(loss, how) for loss in LOSSES for how in HOW], [("sampled", "sharded"), ("top jsd", "sharded"), *(("jsd", h) for h in HOW)]),
)
def test_losses_do_not_depend_on_how_they_are_computed(model_folders: Folders, teachers: list[Path], loss: str, how: str):
    results = []
    for options in ({}, HOW[how]):
        rank = connected(model_folders, **ALONE, **distillation(loss, teachers), **options)
        batches = [with_teachers(rank, train_batch(8, seed=seed, unscored=(1, 6))) for seed in range(2)]
        results.append(update(rank, batches[:1] if how == "adapters" else batches))
    expected, found = results
    assert found["distillation_loss_sum"] == pytest.approx(expected["distillation_loss_sum"], rel=1e-4, abs=SUMS)
    if how in ("small micro-batches", "sharded", "offloaded"):
        assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)


def test_log_probabilities_of_sampled_tokens_are_the_teachers_mean_wherever_the_teachers_are(model_folders: Folders, teachers: list[Path]):
    """Beside the policy, with its graphs kept and not, and in a group without it."""
    job, batch = (
        rl_job(*model_folders, **ALONE, **distillation("sampled", teachers), **{"rl.rollout.temperature": TEMPERATURE}),
        train_batch(8),
    )
    models, expected = [load_language_model(folder) for folder in teachers], []
    with torch.no_grad():
        for row in range(len(batch)):
            ids = trained(batch, row)[1][:, None]
            each = [logprobs_of(model, batch, row).gather(1, ids)[:, 0] for model in models]
            expected.append(0.75 * each[0] + 0.25 * each[1])
    for roles in (["policy", "teachers"], ["teachers"]):
        rank = TrainerRank(0, 1, job, roles)
        rank.connect(None)
        for keep in (False, True):
            outputs = rank.forward(batch.sequences, keep_graphs=keep)
            torch.testing.assert_close(outputs["teacher_logprobs"], torch.cat(expected), rtol=1e-5, atol=1e-5)
            assert ("old_logprobs" in outputs) == ("policy" in roles)


def test_a_reward_and_the_teachers_add_up(model_folders: Folders, teachers: list[Path]):
    """The loss is the policy loss plus coef times the divergence."""
    options = {"rl.algorithm": "rloo", "rl.minibatch_size": 128}
    reward = update(connected(model_folders, **options), [whole(train_batch())], kl_coef=0.0)
    both = update(connected(model_folders, **options, **distillation("jsd", teachers, coef=0.4)), [whole(train_batch())], kl_coef=0.0)
    divergence = both["distillation_loss_sum"] / both["tokens"]
    assert both["policy_loss"] == pytest.approx(reward["policy_loss"] + 0.4 * divergence, rel=1e-4, abs=SUMS)
    assert "distillation_loss_sum" not in reward


SMALL = {"rl.algorithm": "grpo", "rl.grpo.group_size": 4, "rl.reward.scorers": [], "rl.kl.coef": 0.0, "rl.steps": 30, "rl.monitor.kl": None}
RUNS = {
    "sampled": {},
    "reverse_kl": {"rl.kl.coef": 0.01},
    "jsd": {"rl.minibatch_size": 4, "rl.trainer.microbatch_tokens": 64, "rl.distillation.teacher_template": "Be brief. {prompt}"},
    "forward_kl": {"rl.rollout.max_lag": 1},
    "top reverse_kl": {"rl.minibatch_size": 4},
    "top forward_kl": {"rl.rollout.max_lag": 1},
    "top jsd": {"rl.distillation.teacher_template": "{prompt} Be brief."},
}


@pytest.mark.parametrize("loss", cells(LOSSES, ["sampled", "jsd"]))
def test_a_run_without_a_reward_resumes_to_the_same_bits(model_folders: Folders, teachers: list[Path], tmp_path: Path, loss: str):
    options = SMALL | distillation(loss, teachers) | RUNS[loss]
    with running(rl_job_here(model_folders, tmp_path / "whole", **options)) as uninterrupted:
        for _ in range(6):
            uninterrupted.step()
        expected, curve = uninterrupted.rank.actors[0].weights(), [row["distillation_loss"] for row in uninterrupted.rows]
        assert all(math.isnan(row["score_mean"]) and row["unscored_fraction"] == 0 for row in uninterrupted.rows)
    job = rl_job_here(model_folders, tmp_path / "parts", **options)
    for last in (3, 6):
        with running(job) as part:
            while part.progress.step < last:
                part.step()
            part.save()
            found, rows = part.rank.actors[0].weights(), [row["distillation_loss"] for row in part.rows]
    assert rows == curve[3:] and len(set(curve)) == 6
    assert largest_difference(found, expected) == 0


def test_a_run_comes_closer_to_its_teacher(model_folders: Folders, teachers: list[Path], tmp_path: Path):
    with running(rl_job_here(model_folders, tmp_path, **SMALL | distillation("reverse_kl", teachers[1:]))) as run:
        for _ in range(20):
            run.step()
    losses = [row["distillation_loss"] for row in run.rows]
    assert sum(losses[-5:]) < 0.87 * sum(losses[:5]), losses


def test_without_a_reward_advantages_are_zero_and_truncated_responses_count_unless_masked(
    model_folders: Folders, teachers: list[Path], tmp_path, tokenizer
):
    for masked in (False, True):
        options = SMALL | distillation("reverse_kl", teachers) | {"rl.reward.mask_truncated": masked, "rl.rollout.max_new_tokens": 3}
        with running(rl_job_here(model_folders, tmp_path / str(masked), **options)) as run:
            batch = run.step().batch
            trained_batch, metrics = compute_advantages(batch, run.job.rl, RewardNormalizer(run.job.rl.reward), kl_coef=0.0)
            table = rollout_table(1, trained_rollouts(run.run, run.results[-1]), [0, 1], run.job.rl, tokenizer)
        assert table["reward"].null_count == table["score"].null_count == 2
        assert not trained_batch.advantages.any() and "advantage_zero_fraction" not in metrics
        assert not batch.finished.all()
        expected = batch.response_mask & (batch.finished[:, None] if masked else True)
        assert torch.equal(trained_batch.response_mask, expected)


def test_a_job_without_its_teachers_is_refused(model_folders: Folders, teachers: list[Path]):
    job = rl_job(*model_folders, **ALONE, **distillation("sampled", teachers))
    with pytest.raises(ValueError, match=r"teacher_models: expected 2 folders, got 0"):
        type(job).model_validate(dict(job) | {"teacher_models": []})
