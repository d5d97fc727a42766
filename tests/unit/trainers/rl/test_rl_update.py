"""The update of one rank of RL training against plain PyTorch and other micro-batches."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from one_rl_rank import ROUNDING, SUMS, connected, resident, trained, update
from tiny_models import PAD, demonstrations, largest_difference, save_tiny_experts, train_batch, whole
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func
from whole_matrix import cells

from rlhf_core.models.batch import collate_tokens
from rlhf_core.models.build import load_language_model, load_scalar_model, scalar_head, trunk
from rlhf_core.models.weights import read_state_dict
from rlhf_core.trainers.rl.rank import TrainerRank
from rlhf_core.types import Sequences, TrainBatch

pytestmark = pytest.mark.usefixtures("world")


# The update

LOW, HIGH = 0.0005, 0.001  # of probabilities, which are about 1 / 200


def plain_losses(
    batch: TrainBatch, policy, critic, *, policy_loss: str, aggregation: str, dual_clip: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Policy and value loss of the whole step, one unpadded row after the other, from the formulas in the papers."""
    per_row: list[tuple[torch.Tensor, torch.Tensor]] = []
    for i in range(len(batch)):
        mask = batch.response_mask[i]
        if not mask.any():
            continue
        prompt, response = trained(batch, i)
        ids, at = torch.cat([prompt, response])[None], slice(len(prompt) - 1, -1)
        logprobs = (policy(input_ids=ids).logits[0, at] / 0.8).log_softmax(-1).gather(1, response[:, None])[:, 0]
        values = scalar_head(critic)(trunk(critic)(input_ids=ids).last_hidden_state)[0, at, 0]
        old_logprobs, advantages, old_values, returns, weights = (
            getattr(batch, name)[i][mask] for name in ("old_logprobs", "advantages", "old_values", "returns", "importance_weights")
        )
        ratio = (logprobs - old_logprobs).exp()
        if policy_loss == "ppo_clip":
            loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
            loss = torch.where(advantages < 0, torch.minimum(loss, -dual_clip * advantages), loss)
        elif policy_loss == "gspo":
            ratio = (logprobs - old_logprobs).mean().exp()
            loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        elif policy_loss == "cispo":
            loss = -ratio.detach().clamp(0.8, 1.2) * advantages * logprobs
        elif policy_loss == "sapo":
            tau = torch.where(advantages > 0, 0.5, 1.05)
            loss = -4 / tau * torch.sigmoid(tau * (ratio - 1)) * advantages
        else:
            moved = (logprobs.exp() - old_logprobs.exp()) * advantages.sign()
            loss = torch.where(moved > torch.where(advantages > 0, HIGH, LOW), 0.0, -ratio * advantages)
        held = old_values + (values - old_values).clamp(-0.2, 0.2)
        per_row.append((weights * loss, 0.5 * torch.maximum((values - returns) ** 2, (held - returns) ** 2)))
    if aggregation == "token_mean":
        losses = (torch.cat(rows).mean() for rows in zip(*per_row, strict=True))
    elif aggregation == "sequence_mean":
        losses = (torch.stack([r.mean() for r in rows]).mean() for rows in zip(*per_row, strict=True))
    else:
        losses = (torch.stack([r.sum() / 8 for r in rows]).mean() for rows in zip(*per_row, strict=True))  # max_new_tokens
    policy_mean, value_mean = losses
    return policy_mean, 0.5 * value_mean  # value_coef


def stepped(model, loss: torch.Tensor, *, learning_rate: float) -> float:
    """One plain AdamW step, at the first of three warm-up steps. Returns the norm of the gradient."""
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0},
        ],
        lr=learning_rate / 3,
        betas=(0.9, 0.95),
    )
    loss.backward()
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))
    optimizer.step()
    return norm


@pytest.mark.parametrize(
    ("policy_loss", "aggregation", "dual_clip"),
    [
        ("ppo_clip", "token_mean", None),
        ("ppo_clip", "sequence_mean", None),
        ("ppo_clip", "constant_horizon", 1.1),
        ("gspo", "sequence_mean", None),
        ("cispo", "token_mean", None),
        ("sapo", "sequence_mean", None),
        ("dppo_tv", "token_mean", None),
    ],
)
def test_an_update_equals_a_plain_step(
    tmp_path: Path, model_folders: tuple[Path, Path], policy_loss: str, aggregation: str, dual_clip: float | None
):
    """Row 3 could not be scored: its mask is empty, and it is in no denominator."""
    options = {"rl.policy_loss": policy_loss, "rl.loss_aggregation": aggregation, "rl.dual_clip": dual_clip}
    options |= {"sapo": {"rl.sapo.positive_temperature": 0.5}, "dppo_tv": {"rl.clip_low": LOW, "rl.clip_high": HIGH}}.get(policy_loss, {})
    rank = connected(model_folders, **options, **{"rl.trainer.microbatch_tokens": 30, "rl.minibatch_size": 128})
    policy, critic = load_language_model(model_folders[0]), load_scalar_model(model_folders[1])
    batch = train_batch(8, unscored=(3,))
    if policy_loss == "gspo":  # one advantage for each response
        batch.advantages[:] = batch.advantages[:, :1]
    formula = {"policy_loss": policy_loss, "aggregation": aggregation, "dual_clip": dual_clip or float("inf")}
    losses = plain_losses(batch, policy, critic, **formula)
    norms = [stepped(policy, losses[0], learning_rate=5e-4), stepped(critic, losses[1], learning_rate=1e-3)]
    totals = update(rank, [whole(batch)])
    assert totals["policy_loss"] == pytest.approx(float(losses[0].detach()), rel=1e-5, abs=SUMS)
    assert totals["value_loss"] == pytest.approx(float(losses[1].detach()), rel=1e-5)
    assert [totals["grad_norm"], totals["critic_grad_norm"]] == pytest.approx(norms, rel=1e-4)
    assert (totals["tokens"], totals["optimizer_steps"], totals["stopped_early"]) == (int(batch.response_mask.sum()), 1, 0)
    expected = {**policy.state_dict(), **{f"critic.model.{name}": tensor for name, tensor in critic.state_dict().items()}}
    assert largest_difference(resident(rank, tmp_path), expected) < ROUNDING


OPTIONS = {
    "ppo": {},
    "kl in the loss, entropy": {"rl.kl.placement": "loss", "rl.kl.estimator": "k3", "rl.entropy_coef": 0.01},
    "sequence mean, demonstrations": {"rl.loss_aggregation": "sequence_mean", "rl.ptx.coef": 0.5},
    # With narrow bounds hardly a response has a gradient, and Adam makes large steps of the rounding of the smallest ones.
    "gspo": {"rl.policy_loss": "gspo", "rl.clip_low": 0.9, "rl.clip_high": 3.0},
    "sapo": {"rl.policy_loss": "sapo"},
    "cispo with a constant horizon": {"rl.policy_loss": "cispo", "rl.loss_aggregation": "constant_horizon"},
}


@pytest.mark.parametrize("options", cells(OPTIONS, list(OPTIONS)[:1] + list(OPTIONS)[-1:]))
def test_token_mean_loss_of_the_update_is_the_same_for_any_microbatches(tmp_path: Path, model_folders: tuple[Path, Path], options: str):
    results = []
    for microbatch_tokens in (10_000, 25, 1):
        rank = connected(model_folders, **{"rl.trainer.microbatch_tokens": microbatch_tokens, **OPTIONS[options]})
        batches = [whole(train_batch(8, seed=seed, unscored=(1, 6)), demonstrations(5, seed=seed)) for seed in range(3)]
        totals = update(rank, batches)
        results.append((totals, resident(rank, tmp_path / str(microbatch_tokens))))
    (expected, weights), *others = results
    for totals, cut_weights in others:
        assert totals == pytest.approx(expected, rel=1e-4, abs=2e-5)  # losses are small differences of large sums
        assert largest_difference(cut_weights, weights) < ROUNDING


def test_kl_in_the_loss_and_entropy_change_the_update(model_folders: tuple[Path, Path]):
    """So that the options above are really tried."""
    weights = []
    for changes in (
        {},
        {"rl.kl.placement": "loss", "rl.kl.estimator": "k3"},
        {"rl.kl.placement": "loss", "rl.kl.estimator": "k2"},
        {"rl.entropy_coef": 0.5},
    ):
        rank = connected(model_folders, **{"rl.algorithm": "rloo", **changes})
        update(rank, [whole(train_batch())])
        weights.append(rank.weights())
    assert min(largest_difference(a, b) for k, a in enumerate(weights) for b in weights[:k]) > 10 * ROUNDING


def test_rows_without_a_mask_survive_and_teach_nothing(tmp_path: Path, model_folders: tuple[Path, Path]):
    """Beside others, and a micro-batch of nothing but such rows: no NaN, and no gradient."""
    mixed, without = connected(model_folders), connected(model_folders)
    batch = train_batch(8, unscored=(2, 5))
    alone = connected(model_folders, **{"rl.trainer.microbatch_tokens": 1})
    update(mixed, [whole(batch)])
    update(alone, [whole(batch)])
    assert largest_difference(mixed.weights(), alone.weights()) < ROUNDING
    update(without, [whole(batch.select([0, 1, 3, 4, 6, 7]))])
    assert largest_difference(resident(mixed, tmp_path / "a"), resident(without, tmp_path / "b")) < ROUNDING


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_the_kl_coefficient_of_the_moment_counts_not_the_configured_one(model_folders: tuple[Path, Path], estimator: str):
    """The loss is linear in it, and in the reward it is no part of the loss."""
    options = {"rl.kl.placement": "loss", "rl.kl.estimator": estimator, "rl.kl.coef": 7.0}
    losses = [update(connected(model_folders, **options), [whole(train_batch())], kl_coef=c)["policy_loss"] for c in (0.0, 0.2, 0.6)]
    assert losses[2] - losses[0] == pytest.approx(3 * (losses[1] - losses[0]), rel=1e-4)
    assert losses[1] > losses[0] + 1e-3
    in_the_reward = update(connected(model_folders), [whole(train_batch())], kl_coef=0.6)["policy_loss"]
    assert in_the_reward == pytest.approx(losses[0], rel=1e-6, abs=SUMS)


def test_importance_weights_leave_kl_and_entropy_alone(model_folders: tuple[Path, Path]):
    """With weights of 0 the loss is what is added to it: coefficient times KL, less coefficient times entropy."""
    options = {"rl.kl.placement": "loss", "rl.kl.estimator": "k2", "rl.entropy_coef": 0.01}
    batch = train_batch(unscored=(2,))
    batch.importance_weights[:] = torch.where(batch.response_mask, 0.0, torch.nan)
    totals = update(connected(model_folders, **options), [whole(batch)], kl_coef=0.2)
    policy, mask, kl = load_language_model(model_folders[0]), batch.response_mask, 0.0
    with torch.no_grad():
        for i in range(len(batch)):
            prompt, response = trained(batch, i)
            logits = policy(input_ids=torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 :]
            logprobs = (logits[: len(response)] / 0.8).log_softmax(-1).gather(1, response[:, None])[:, 0]
            kl += 0.5 * float((logprobs - batch.ref_logprobs[i][mask[i]]).square().sum())
    expected = (0.2 * kl - 0.01 * totals["entropy_sum"]) / totals["tokens"]
    assert totals["policy_loss"] == pytest.approx(expected, rel=1e-4, abs=SUMS)
    assert totals["grad_norm"] > 0


def test_demonstrations_add_their_mean_negative_log_probability_at_temperature_1(model_folders: tuple[Path, Path]):
    rank = connected(model_folders, **{"rl.algorithm": "rloo", "rl.ptx.coef": 0.7, "rl.trainer.microbatch_tokens": 30})
    policy, critic = load_language_model(model_folders[0]), load_scalar_model(model_folders[1])
    batch, examples = train_batch(), demonstrations(6, seed=4)
    rl_loss, _ = plain_losses(batch, policy, critic, policy_loss="ppo_clip", aggregation="token_mean", dual_clip=float("inf"))
    logprobs = []
    for k, example in enumerate(examples):
        ids = example.ids
        trained = [i for i in range(example.start, len(ids)) if k % 2 == 0 or i != 3]
        logits = policy(input_ids=torch.tensor([ids])).logits[0]
        logprobs.append(logits.log_softmax(-1)[[i - 1 for i in trained], [ids[i] for i in trained]])
    ptx_loss = -torch.cat(logprobs).mean()
    norm = stepped(policy, rl_loss + 0.7 * ptx_loss, learning_rate=5e-4)
    totals = update(rank, [whole(batch, examples)])
    assert totals["policy_loss"] == pytest.approx(float(rl_loss.detach()), rel=1e-5, abs=SUMS)
    assert totals["ptx_loss"] == pytest.approx(float(ptx_loss.detach()), rel=1e-5)
    assert totals["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert largest_difference(rank.weights(), policy.state_dict()) < ROUNDING


@pytest.mark.parametrize("microbatch_tokens", [30, 10_000])
def test_experts_are_balanced_over_the_whole_step_without_its_padding(
    tmp_path: Path, model_folders: tuple[Path, Path], tokenizer, microbatch_tokens: int
):
    """Against Hugging Face's loss over one batch of all rows; the expected policy loss is that of the same step without balancing."""
    folders = save_tiny_experts(tmp_path, tokenizer), model_folders[1]
    options = {"rl.algorithm": "rloo", "rl.trainer.microbatch_tokens": microbatch_tokens}
    rank, without = connected(folders, **options, **{"rl.moe_aux_coef": 0.9}), connected(folders, **options)
    batch, model = train_batch(), load_language_model(folders[0])
    tokens = collate_tokens(batch.sequences.lists(), batch.sequences.starts.tolist(), pad_id=PAD)
    real = torch.arange(tokens.input_ids.shape[1]) < batch.sequences.lengths[:, None]
    logits = model.base_model(input_ids=tokens.input_ids, output_router_logits=True).router_logits
    aux_loss = load_balancing_loss_func(logits, num_experts=4, top_k=2, attention_mask=real.long())
    totals, expected = update(rank, [whole(batch)]), update(without, [whole(batch)])
    assert totals["moe_aux_loss"] == pytest.approx(float(aux_loss.detach()), rel=1e-5)
    assert totals["policy_loss"] == pytest.approx(expected["policy_loss"], rel=1e-5, abs=SUMS)
    assert "moe_aux_loss" not in expected
    rl_loss, _ = plain_losses(
        batch, model, load_scalar_model(folders[1]), policy_loss="ppo_clip", aggregation="token_mean", dual_clip=float("inf")
    )
    norm = stepped(model, rl_loss + 0.9 * aux_loss, learning_rate=5e-4)
    assert totals["grad_norm"] == pytest.approx(norm, rel=1e-4)
    rank.export(str(tmp_path / "policy"))
    assert largest_difference(load_language_model(tmp_path / "policy").state_dict(), model.state_dict()) < ROUNDING
    assert largest_difference(read_state_dict(tmp_path / "policy"), rank.weights()) == 0


def test_balancing_experts_of_a_model_without_any_is_refused(model_folders: tuple[Path, Path]):
    with pytest.raises(
        ValueError, match=r"moe_aux_coef: expected 0 with a model without experts.*got 0\.1 with LlamaForCausalLM; set it to 0"
    ):
        connected(model_folders, **{"rl.moe_aux_coef": 0.1})


# The end of a step, and what stands still in it


def far(batch: TrainBatch) -> TrainBatch:
    """Sampled, so it says, by a policy that is far from ours."""
    batch.old_logprobs.add_(2.0)
    return batch


def near(rank: TrainerRank, *, seed: int) -> TrainBatch:
    """Sampled by the rank's policy itself."""
    batch = train_batch(8, seed=seed, unscored=(1,))
    for i in range(len(batch)):
        prompt, response = (ids.tolist() for ids in trained(batch, i))
        if response:
            batch.old_logprobs[i, : len(response)] = rank.forward(Sequences.of([prompt + response], [len(prompt)]))["old_logprobs"]
    return batch


@pytest.mark.parametrize("stage", [0, 2])
def test_a_minibatch_too_far_from_the_sampling_policy_ends_the_steps_updates(tmp_path: Path, model_folders: tuple[Path, Path], stage: int):
    """It and those after it leave no trace: not now, and not in the next step."""
    options = {"rl.max_approx_kl": 0.5, "rl.minibatch_size": 128, "rl.trainer.zero_stage": stage, "rl.ptx.coef": 0.5}
    stopped, undisturbed = connected(model_folders, **options), connected(model_folders, **options)
    first = whole(near(stopped, seed=1), demonstrations(3, seed=1))
    distant, third = whole(far(train_batch(seed=2)), demonstrations(3, seed=2)), whole(train_batch(seed=3), demonstrations(3, seed=3))
    totals, expected = update(stopped, [first, distant, third]), update(undisturbed, [first])
    assert (totals["optimizer_steps"], totals["stopped_early"]) == (1, 1)
    assert (expected["optimizer_steps"], expected["stopped_early"]) == (1, 0)
    for name in ("policy_loss", "value_loss", "ptx_loss", "grad_norm", "critic_grad_norm"):
        assert totals[name] == expected[name]
    assert totals["tokens"] == first.num_loss_tokens + distant.num_loss_tokens
    assert totals["approx_kl_sum"] > 0.5 * distant.num_loss_tokens > 0.5 * expected["approx_kl_sum"]
    again = whole(near(stopped, seed=4), demonstrations(3, seed=4))
    assert update(stopped, [again]) == update(undisturbed, [again])
    assert largest_difference(resident(stopped, tmp_path / "a"), resident(undisturbed, tmp_path / "b")) == 0


@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize("from_update", [False, True])
def test_a_minibatch_without_anything_to_learn_leaves_no_trace(
    tmp_path: Path, model_folders: tuple[Path, Path], stage: int, from_update: bool
):
    """All of its responses are masked. Momentum and weight decay would move both models, and their schedules would go on."""
    options = {"rl.trainer.zero_stage": stage, "rl.ptx.coef": 0.5}
    skipping, undisturbed = connected(model_folders, **options), connected(model_folders, **options)
    first, third = (whole(train_batch(seed=k), demonstrations(3, seed=k)) for k in (1, 3))
    masked = whole(train_batch(4, seed=2, unscored=(0, 1, 2, 3)), demonstrations(3, seed=2))
    assert update(skipping, [first]) == update(undisturbed, [first])
    before = resident(skipping, tmp_path / "before")
    batch = replace(masked.batch, old_logprobs=None) if from_update else masked.batch
    result = skipping.update([replace(masked, batch=batch)], kl_coef=0.15, train_policy=True)
    totals = result.totals
    assert totals == {"optimizer_steps": 0, "stopped_early": 0, "skipped_steps": 1}
    assert largest_difference(resident(skipping, tmp_path / "after"), before) == 0
    if from_update:
        assert torch.equal(result.logprobs, torch.zeros(masked.batch.response_mask.shape))
    else:
        assert result.logprobs is None
    assert update(skipping, [masked, third]) == update(undisturbed, [third]) | {"skipped_steps": 1}
    assert largest_difference(resident(skipping, tmp_path / "a"), resident(undisturbed, tmp_path / "b")) == 0


def test_the_limit_is_on_the_mean_of_the_minibatch(model_folders: tuple[Path, Path]):
    batch = whole(far(train_batch(seed=2)))
    measured = update(connected(model_folders), [batch])
    mean = measured["approx_kl_sum"] / measured["tokens"]
    for limit, stops in ((mean * 0.999, 1), (mean * 1.001, 0)):
        assert update(connected(model_folders, **{"rl.max_approx_kl": limit, "rl.minibatch_size": 128}), [batch])["stopped_early"] == stops


def test_while_the_critic_warms_up_the_policy_stands_still(tmp_path: Path, model_folders: tuple[Path, Path]):
    """The critic learns what it learns beside the policy; afterwards the policy starts at the beginning of its own schedule."""
    options = {"rl.ptx.coef": 0.5, "rl.max_approx_kl": 1e-9, "rl.minibatch_size": 128}
    warming, both = connected(model_folders, **options), connected(model_folders)
    batches = [whole(train_batch(seed=k), demonstrations(3, seed=k)) for k in range(2)]
    totals, expected = update(warming, batches, train_policy=False), update(both, batches)
    assert totals.keys() == {"tokens", "value_loss", "critic_grad_norm", "optimizer_steps", "stopped_early", "skipped_steps"}
    assert totals == {name: expected[name] for name in totals}
    found, beside = resident(warming, tmp_path / "a"), resident(both, tmp_path / "b")
    critic = [name for name in found if name.startswith("critic.")]
    assert largest_difference({n: found[n] for n in critic}, {n: beside[n] for n in critic}) == 0
    assert largest_difference(warming.weights(), load_language_model(model_folders[0]).state_dict()) == 0
    fresh = connected(model_folders, **options)
    first = whole(near(fresh, seed=9), demonstrations(3, seed=9))
    assert update(warming, [first])["grad_norm"] == update(fresh, [first])["grad_norm"]
    assert largest_difference(warming.weights(), fresh.weights()) == 0
