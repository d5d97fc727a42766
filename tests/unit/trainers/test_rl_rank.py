"""One rank of RL training against plain PyTorch, other micro-batches, and itself resumed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import largest_difference, rl_job, sequences, train_batch, whole

from rlhf_core.models.build import load_language_model, load_scalar_model, read_state_dict, scalar_head, trunk
from rlhf_core.trainers.rl_rank import TrainerRank, _contiguous
from rlhf_core.types import TrainBatch

pytestmark = pytest.mark.usefixtures("world")
SETTINGS = {"rl.max_grad_norm": 0.5, "rl.rollout.temperature": 0.8}


def connected(folders: tuple[Path, Path], **overrides) -> TrainerRank:
    rank = TrainerRank(0, 1, rl_job(*folders, **SETTINGS, **overrides))
    rank.connect(*rank.address())
    return rank


def resident(rank: TrainerRank, folder: Path) -> dict[str, torch.Tensor]:
    """Weights of policy and critic, as they are saved."""
    rank.save(str(folder))
    critic = next((folder / "critic").glob("*.pt"))
    state = torch.load(critic, weights_only=False)["module"]
    return {**rank.weights(), **{f"critic.{name}": tensor for name, tensor in state.items()}}


# Prompts on the left, responses on the right


def test_contiguous_by_hand():
    batch = train_batch(3)  # prompts of 1, 4 and 2 tokens in 5 columns; responses of 1, 5 and 2 tokens in 7
    tokens = _contiguous(batch)
    for row, (prompt, response) in enumerate([(1, 1), (4, 5), (2, 2)]):
        expected = batch.prompt_ids[row, 5 - prompt :].tolist() + batch.response_ids[row, :response].tolist()
        assert tokens.input_ids[row, : len(expected)].tolist() == expected
        assert tokens.selected[row].tolist() == [prompt <= t < prompt + response for t in range(12)]


def test_contiguous_keeps_prompts_without_padding_and_drops_masked_responses():
    batch = train_batch(8, unscored=(2,)).select([1, 2])
    batch.prompt_mask.fill_(True)
    tokens = _contiguous(batch)
    assert torch.equal(tokens.input_ids, torch.cat([batch.prompt_ids, batch.response_ids], dim=1))
    assert tokens.selected[0].tolist() == [False] * 4 + [True] * 5
    assert not tokens.selected[1].any()


# Scores, log-probabilities, values


def test_forward_equals_each_model_alone_and_unpadded(model_folders: tuple[Path, Path]):
    rank = connected(model_folders, **{"rl.trainer.microbatch_tokens": 30})
    ids, starts = sequences(6, seed=8), [1, 3, 2, 3, 1, 2]
    outputs = rank.forward(ids, starts)
    policy, critic = load_language_model(model_folders[0]), load_scalar_model(model_folders[1])
    logprobs, values = [], []
    with torch.no_grad():
        for sequence, start in zip(ids, starts, strict=True):
            logits = policy(input_ids=torch.tensor([sequence])).logits[0] / 0.8
            logprobs.append(logits.log_softmax(-1)[range(start - 1, len(sequence) - 1), sequence[start:]])
            hidden = trunk(critic)(input_ids=torch.tensor([sequence])).last_hidden_state[0]
            values.append(scalar_head(critic)(hidden)[start - 1 : -1, 0])  # a value is that of the state *before* its token
    assert outputs.keys() == {"old_logprobs", "ref_logprobs", "values"}
    torch.testing.assert_close(outputs["old_logprobs"], torch.cat(logprobs), rtol=0, atol=3e-6)
    torch.testing.assert_close(outputs["ref_logprobs"], torch.cat(logprobs), rtol=0, atol=3e-6)
    torch.testing.assert_close(outputs["values"], torch.cat(values), rtol=0, atol=3e-6)


def test_no_kl_needs_no_reference_and_no_ppo_needs_no_critic(model_folders: tuple[Path, Path]):
    rank = connected(model_folders, **{"rl.algorithm": "rloo", "rl.kl.coef": 0.0})
    assert rank.forward([[5, 6, 7]], [1]).keys() == {"old_logprobs"}
    assert rank.update([whole(train_batch())]).keys().isdisjoint({"value_loss", "critic_grad_norm"})


def test_the_reference_and_the_reward_model_stay_as_they_were(model_folders: tuple[Path, Path]):
    rank = connected(model_folders)
    ids = sequences(4, seed=2)
    scores, before = rank.score(ids), rank.forward(ids, [1] * 4)
    rank.update([whole(train_batch())] * 2)
    after = rank.forward(ids, [1] * 4)
    assert torch.equal(rank.score(ids), scores)
    assert torch.equal(after["ref_logprobs"], before["ref_logprobs"])
    assert float((after["old_logprobs"] - before["old_logprobs"]).abs().max()) > 1e-4
    assert float((after["values"] - before["values"]).abs().max()) > 1e-4


# The update


def plain_losses(batch: TrainBatch, policy, critic, *, aggregation: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Policy and value loss of the whole step, one unpadded row after the other, from the formulas in the papers."""
    per_row: list[tuple[torch.Tensor, torch.Tensor]] = []
    for i in range(len(batch)):
        mask = batch.response_mask[i]
        if not mask.any():
            continue
        prompt, response = batch.prompt_ids[i][batch.prompt_mask[i]], batch.response_ids[i][mask]
        ids, at = torch.cat([prompt, response])[None], slice(len(prompt) - 1, -1)
        logprobs = (policy(input_ids=ids).logits[0, at] / 0.8).log_softmax(-1).gather(1, response[:, None])[:, 0]
        values = scalar_head(critic)(trunk(critic)(input_ids=ids).last_hidden_state)[0, at, 0]
        old_logprobs, advantages, old_values, returns = (
            getattr(batch, name)[i][mask] for name in ("old_logprobs", "advantages", "old_values", "returns")
        )
        ratio = (logprobs - old_logprobs).exp()
        held = old_values + (values - old_values).clamp(-0.2, 0.2)
        per_row.append(
            (
                -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages),
                0.5 * torch.maximum((values - returns) ** 2, (held - returns) ** 2),
            )
        )
    if aggregation == "token_mean":
        policy_loss, value_loss = (torch.cat(rows).mean() for rows in zip(*per_row, strict=True))
    else:
        policy_loss, value_loss = (torch.stack([r.mean() for r in rows]).mean() for rows in zip(*per_row, strict=True))
    return policy_loss, 0.5 * value_loss  # value_coef


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_an_update_equals_a_plain_ppo_step(tmp_path: Path, model_folders: tuple[Path, Path], aggregation: str):
    """Row 3 could not be scored: its mask is empty, and it is in no denominator."""
    rank = connected(model_folders, **{"rl.loss_aggregation": aggregation, "rl.trainer.microbatch_tokens": 30})
    policy, critic = load_language_model(model_folders[0]), load_scalar_model(model_folders[1])
    optimizers = {
        model: torch.optim.AdamW(
            [{"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
             {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0}], lr=lr / 3, betas=(0.9, 0.95)
        )
        for model, lr in ((policy, 5e-4), (critic, 1e-3))
    }  # fmt: skip
    batch = train_batch(8, unscored=(3,))
    losses = plain_losses(batch, policy, critic, aggregation=aggregation)
    norms = []
    for model, loss in zip((policy, critic), losses, strict=True):
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizers[model].step()
    totals = rank.update([whole(batch)])
    assert totals["policy_loss"] == pytest.approx(float(losses[0].detach()), rel=1e-5)
    assert totals["value_loss"] == pytest.approx(float(losses[1].detach()), rel=1e-5)
    assert [totals["grad_norm"], totals["critic_grad_norm"]] == pytest.approx(norms, rel=1e-4)
    assert (totals["tokens"], totals["optimizer_steps"]) == (int(batch.response_mask.sum()), 1)
    expected = {**policy.state_dict(), **{f"critic.model.{name}": tensor for name, tensor in critic.state_dict().items()}}
    assert largest_difference(resident(rank, tmp_path), expected) < 2e-6


OPTIONS = {
    "ppo": {},
    "kl in the loss, entropy": {"rl.kl.placement": "loss", "rl.kl.estimator": "k3", "rl.entropy_coef": 0.01},
    "sequence mean": {"rl.loss_aggregation": "sequence_mean"},
}


@pytest.mark.parametrize("options", OPTIONS)
def test_token_mean_loss_of_the_update_is_the_same_for_any_microbatches(tmp_path: Path, model_folders: tuple[Path, Path], options: str):
    results = []
    for microbatch_tokens in (10_000, 25, 1):
        rank = connected(model_folders, **{"rl.trainer.microbatch_tokens": microbatch_tokens, **OPTIONS[options]})
        totals = rank.update([whole(train_batch(8, seed=seed, unscored=(1, 6))) for seed in range(3)])
        results.append((totals, resident(rank, tmp_path / str(microbatch_tokens))))
    (expected, weights), *others = results
    for totals, cut_weights in others:
        assert totals == pytest.approx(expected, rel=1e-4, abs=1e-6)
        assert largest_difference(cut_weights, weights) < 1e-6


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
        rank.update([whole(train_batch())])
        weights.append(rank.weights())
    assert min(largest_difference(a, b) for k, a in enumerate(weights) for b in weights[:k]) > 1e-6


def test_rows_without_a_mask_survive_and_teach_nothing(tmp_path: Path, model_folders: tuple[Path, Path]):
    """A micro-batch of nothing but unscored rows, and one optimizer step of them: no NaN, and no gradient."""
    rank = connected(model_folders, **{"rl.trainer.microbatch_tokens": 1})
    totals = rank.update([whole(train_batch(4, unscored=(0, 1, 2, 3)))])
    assert {name: totals[name] for name in ("policy_loss", "value_loss", "tokens", "grad_norm", "critic_grad_norm")} == {
        "policy_loss": 0, "value_loss": 0, "tokens": 0, "grad_norm": 0, "critic_grad_norm": 0,
    }  # fmt: skip
    mixed, without = connected(model_folders), connected(model_folders)
    batch = train_batch(8, unscored=(2, 5))
    mixed.update([whole(batch)])
    without.update([whole(batch.select([0, 1, 3, 4, 6, 7]))])
    assert largest_difference(resident(mixed, tmp_path / "a"), resident(without, tmp_path / "b")) < 1e-6


# State


def test_resume_save_load_and_continue_equal_an_uninterrupted_run_bit_for_bit(tmp_path: Path, model_folders: tuple[Path, Path]):
    uninterrupted, first, second = (connected(model_folders) for _ in range(3))
    batches = [whole(train_batch(8, seed=seed)) for seed in range(4)]
    expected = [uninterrupted.update([b]) for b in batches]
    for batch in batches[:2]:
        first.update([batch])
    first.save(str(tmp_path / "state"))
    drawn = torch.rand(3)
    torch.manual_seed(1234)
    second.load(str(tmp_path / "state"))
    assert torch.equal(torch.rand(3), drawn)
    assert [second.update([b]) for b in batches[2:]] == expected[2:]
    assert largest_difference(resident(second, tmp_path / "a"), resident(uninterrupted, tmp_path / "b")) == 0


def test_an_exported_policy_is_a_hugging_face_folder_with_the_updated_weights(tmp_path: Path, model_folders: tuple[Path, Path]):
    rank = connected(model_folders)
    rank.update([whole(train_batch())])
    rank.export(str(tmp_path / "policy"))
    assert largest_difference(read_state_dict(tmp_path / "policy"), rank.weights()) == 0
    assert largest_difference(rank.weights(), load_language_model(model_folders[0]).state_dict()) > 1e-5
    ids = torch.tensor([sequences(1, seed=3)[0]])
    logprobs = (load_language_model(tmp_path / "policy")(input_ids=ids).logits[0, :-1] / 0.8).log_softmax(-1).gather(1, ids[0, 1:, None])
    torch.testing.assert_close(rank.forward(ids.tolist(), [1])["old_logprobs"], logprobs[:, 0].detach(), rtol=0, atol=3e-6)
