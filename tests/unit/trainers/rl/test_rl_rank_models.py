"""The models of one rank of RL training: where they come from, and their saved state."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from classifiers import own_scores_alone, save_classifier
from one_rl_rank import connected, resident, update
from tiny_models import largest_difference, rl_job, save_tiny_models, sequences, train_batch, whole

from rlhf_core.models.build import load_language_model, load_scalar_model, trunk
from rlhf_core.models.weights import read_state_dict
from rlhf_core.trainers.rl.credit import ValueUnits
from rlhf_core.trainers.rl.job import RlJob
from rlhf_core.types import Sequences

pytestmark = pytest.mark.usefixtures("world")


# Where models come from


@pytest.mark.parametrize("init", ["sft", "reward_model_trunk"])
def test_a_critic_with_a_new_head_starts_at_0_and_learns(model_folders: tuple[Path, Path], init: str):
    rank = connected(model_folders, **{"rl.ppo.critic_init": init})
    ids = sequences(3, seed=5)
    assert not rank.forward(Sequences.of(ids, [1] * 3))["values"].any()
    start = load_scalar_model(model_folders[1]) if init == "reward_model_trunk" else load_language_model(model_folders[0])
    assert largest_difference(trunk(rank.roles.critic.module.model).state_dict(), trunk(start).state_dict()) == 0
    update(rank, [whole(train_batch())] * 2)
    assert rank.forward(Sequences.of(ids, [1] * 3))["values"].abs().min() > 0


@pytest.mark.parametrize("learn", [False, True])
def test_values_are_in_the_units_of_the_rewards_before_the_update_and_in_it(model_folders: tuple[Path, Path], learn: bool):
    """Whether or not the update continues from earlier passes: returns that are the values leave nothing to learn."""
    raw, scaled, batch = connected(model_folders), connected(model_folders), train_batch()
    scaled.set_value_units(ValueUnits(scale=0.25, offset=-3.0))
    spoken, values = (rank.forward(batch.sequences, keep_graphs=learn)["values"] for rank in (raw, scaled))
    torch.testing.assert_close(values, 0.25 * spoken - 3.0, rtol=0, atol=1e-6)
    known = torch.zeros(batch.response_mask.shape).masked_scatter(batch.response_mask, values)
    totals = update(scaled, [whole(replace(batch, old_values=known, returns=known))])
    assert totals["value_loss"] == pytest.approx(0, abs=1e-9)


def test_each_scorer_has_its_own_model(tmp_path: Path, model_folders: tuple[Path, Path], tokenizer):
    other = save_tiny_models(tmp_path, tokenizer, seed=7)[1]
    scorer = {"kind": "reward_model", "weight": 1.0, "normalization": "none"}
    scorers = [{"name": "first", **scorer}, {"name": "second", "path": str(other), **scorer}]
    rank = connected(model_folders, **{"rl.reward.scorers": scorers})
    ids = sequences(3, seed=5)
    first, second = rank.score_by_reward_model("first", [*ids, None])[:, 0], rank.score_by_reward_model("second", [*ids, None])[:, 0]
    assert torch.equal(first[:3], connected(model_folders).score_by_reward_model("reward_model", ids)[:, 0])
    assert (first[:3] - second[:3]).abs().min() > 1e-3
    assert first[3].isnan() and second[3].isnan()


def test_an_ensemble_answers_with_each_members_scores(tmp_path: Path, model_folders: tuple[Path, Path], tokenizer):
    other = save_tiny_models(tmp_path, tokenizer, seed=7)[1]
    shutil.copytree(model_folders[1], tmp_path / "both")
    shutil.copytree(other, tmp_path / "both/member_1")
    scorer = {"kind": "reward_model", "weight": 1.0, "normalization": "none"}
    scorers = [{"name": "both", "path": str(tmp_path / "both"), "members": 2, **scorer}, {"name": "second", "path": str(other), **scorer}]
    rank = connected(model_folders, **{"rl.reward.scorers": scorers, "rl.ppo.critic_init": "sft"})
    ids = sequences(3, seed=5)
    both = rank.score_by_reward_model("both", ids)
    assert torch.equal(both[:, 0], connected(model_folders).score_by_reward_model("reward_model", ids)[:, 0])
    assert torch.equal(both[:, 1], rank.score_by_reward_model("second", ids)[:, 0])


@pytest.mark.parametrize(
    ("changes", "message"), [({"scorer_models": {}}, "expected a folder for each of"), ({"reward_model": None}, "for the critic")]
)
def test_a_job_without_a_model_that_it_needs_is_refused(model_folders: tuple[Path, Path], changes: dict, message: str):
    job = rl_job(*model_folders)
    with pytest.raises(ValueError, match=message):
        RlJob.model_validate_json(json.dumps({**job.model_dump(mode="json"), **changes}))


def test_sampler_logprobs_are_there_where_tokens_are_filtered(model_folders: tuple[Path, Path]):
    ids = sequences(4, seed=6)
    plain = connected(model_folders).forward(Sequences.of(ids, [1] * 4))
    filtered = connected(model_folders, **{"rl.rollout.top_k": 50, "rl.rollout.top_p": 0.9}).forward(Sequences.of(ids, [1] * 4))
    assert filtered.keys() - plain.keys() == {"sampler_logprobs"}
    assert torch.equal(filtered["old_logprobs"], plain["old_logprobs"])
    assert (filtered["sampler_logprobs"] > plain["old_logprobs"]).all()


# State


def test_the_reference_is_refreshed_on_demand_and_saved(tmp_path: Path, model_folders: tuple[Path, Path]):
    """It becomes the policy of that moment, doesn't follow it any further, and is what a resumed run has."""
    options = {"rl.kl.refresh_reference_every": 2}
    rank, resumed, ids = connected(model_folders, **options), connected(model_folders, **options), sequences(4, seed=2)
    update(rank, [whole(train_batch())])
    rank.refresh_reference()
    refreshed = rank.forward(Sequences.of(ids, [1] * 4))
    assert torch.equal(refreshed["ref_logprobs"], refreshed["old_logprobs"])
    update(rank, [whole(train_batch(seed=1))])
    rank.save(str(tmp_path))
    resumed.load(str(tmp_path))
    for moved in (rank.forward(Sequences.of(ids, [1] * 4)), resumed.forward(Sequences.of(ids, [1] * 4))):
        assert torch.equal(moved["ref_logprobs"], refreshed["ref_logprobs"])
        assert float((moved["old_logprobs"] - refreshed["old_logprobs"]).abs().max()) > 1e-4


def test_resume_save_load_and_continue_equal_an_uninterrupted_run_bit_for_bit(tmp_path: Path, model_folders: tuple[Path, Path]):
    uninterrupted, first, second = (connected(model_folders) for _ in range(3))
    batches = [whole(train_batch(8, seed=seed)) for seed in range(4)]
    expected = [update(uninterrupted, [b]) for b in batches]
    for batch in batches[:2]:
        update(first, [batch])
    first.save(str(tmp_path / "state"))
    drawn = torch.rand(3)
    torch.manual_seed(1234)
    second.load(str(tmp_path / "state"))
    assert torch.equal(torch.rand(3), drawn)
    assert [update(second, [b]) for b in batches[2:]] == expected[2:]
    assert largest_difference(resident(second, tmp_path / "a"), resident(uninterrupted, tmp_path / "b")) == 0


def test_an_exported_policy_is_a_hugging_face_folder_with_the_updated_weights(tmp_path: Path, model_folders: tuple[Path, Path]):
    rank = connected(model_folders)
    update(rank, [whole(train_batch())])
    rank.export(str(tmp_path / "policy"))
    assert largest_difference(read_state_dict(tmp_path / "policy"), rank.weights()) == 0
    assert largest_difference(rank.weights(), load_language_model(model_folders[0]).state_dict()) > 1e-5
    ids = torch.tensor([sequences(1, seed=3)[0]])
    logprobs = (load_language_model(tmp_path / "policy")(input_ids=ids).logits[0, :-1] / 0.8).log_softmax(-1).gather(1, ids[0, 1:, None])
    torch.testing.assert_close(rank.forward(Sequences.of(ids.tolist(), [1]))["old_logprobs"], logprobs[:, 0].detach(), rtol=0, atol=3e-6)


def test_a_critic_from_a_model_that_scores_whole_sequences_is_refused(sft_folder: Path, tmp_path: Path):
    folder = save_classifier(tmp_path, "bert")
    with pytest.raises(ValueError, match=r"critic_init reward_model: expected .* got BertForSequenceClassification, .*; set it to sft"):
        connected((sft_folder, folder), **{"rl.algorithm": "ppo", "rl.ppo.critic_init": "reward_model"})


def test_a_rank_scores_with_a_ready_made_encoder_beside_a_new_critic(sft_folder: Path, tmp_path: Path):
    folder, ids = save_classifier(tmp_path, "roberta"), sequences(5, seed=6)
    rank = connected((sft_folder, folder), **{"rl.algorithm": "ppo", "rl.ppo.critic_init": "sft"})
    expected = own_scores_alone(load_scalar_model(folder), ids)
    torch.testing.assert_close(rank.score_by_reward_model("reward_model", [*ids, None])[:5], expected, rtol=0, atol=1e-5)


LORA = {"rank": 2, "alpha": 8.0, "dropout": 0.0, "target_modules": "all-linear"}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"model.dtype": "bfloat16"},
        {"rl.trainer.zero_stage": 2},
        {"rl.trainer.zero_stage": 3, "model.dtype": "bfloat16"},
        {"rl.lora": LORA},
        {"rl.lora": LORA | {"quantize": "nf4"}},
        {"rl.ema_decay": 0.9},
    ],
    ids=lambda settings: " ".join(key.rpartition(".")[2] for key in settings) or "default",
)
def test_the_policy_of_a_checkpoint_exports_the_same_bits_after_further_steps(
    tmp_path: Path, model_folders: tuple[Path, Path], settings: dict
):
    """The best policy is exported from its step's checkpoint."""
    rank = connected(model_folders, **{"rl.algorithm": "grpo", **settings})
    update(rank, [whole(train_batch(3))])
    rank.save(str(tmp_path / "step"))
    rank.export(str(tmp_path / "then"))
    update(rank, [whole(train_batch(5))])
    rank.export(str(tmp_path / "later"))
    rank.load(str(tmp_path / "step"))
    rank.export(str(tmp_path / "again"))
    then, later, again = (read_state_dict(tmp_path / name) for name in ("then", "later", "again"))
    assert any(not torch.equal(then[name], later[name]) for name in then)
    assert then.keys() == again.keys() and all(torch.equal(then[name], again[name]) for name in then)
