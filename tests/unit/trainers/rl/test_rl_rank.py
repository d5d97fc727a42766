"""One rank of RL training against plain PyTorch, other micro-batches, and itself resumed."""

from __future__ import annotations

import json
import shutil
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from classifiers import own_scores_alone, save_classifier
from tiny_models import PAD, demonstrations, largest_difference, rl_job, save_tiny_experts, save_tiny_models, sequences, train_batch, whole
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from rlhf_core.config import DEFAULT_LIMITS
from rlhf_core.engines.deepspeed_engine import TrainEngine
from rlhf_core.models.build import load_language_model, load_scalar_model, read_state_dict, scalar_head, trunk
from rlhf_core.trainers.rl.advantages import ValueUnits
from rlhf_core.trainers.rl.job import RlJob
from rlhf_core.trainers.rl.minibatch import Minibatch, add_totals, contiguous, prompt_rows, real_tokens, shared
from rlhf_core.trainers.rl.rank import TrainerRank
from rlhf_core.types import TrainBatch

pytestmark = pytest.mark.usefixtures("world")
# A critic whose values differ from the first step on.
SETTINGS = {"rl.max_grad_norm": 0.5, "rl.rollout.temperature": 0.8, "rl.ppo.critic_init": "reward_model"}
# What rounding may come to, which differs from processor to processor: of weights after a step of 1.7e-4 or more, and of a loss, which is a
# small difference of large sums.
ROUNDING, SUMS = 5e-6, 2e-6


def connected(folders: tuple[Path, Path], **overrides) -> TrainerRank:
    rank = TrainerRank(0, 1, rl_job(*folders, **SETTINGS | overrides))
    rank.connect(rank.address())
    return rank


def update(rank: TrainerRank, minibatches: list[Minibatch], *, kl_coef: float = 0.15, train_policy: bool = True) -> dict[str, float]:
    return rank.update(minibatches, kl_coef=kl_coef, train_policy=train_policy).totals


def resident(rank: TrainerRank, folder: Path) -> dict[str, torch.Tensor]:
    """Weights of policy and critic, as they are saved."""
    rank.save(str(folder))
    critic = next((folder / "critic").glob("*.pt"))
    state = torch.load(critic, weights_only=False)["module"]
    return {**rank.weights(), **{f"critic.{name}": tensor for name, tensor in state.items()}}


# Prompts on the left, responses on the right


def test_contiguous_by_hand():
    batch = train_batch(3)  # prompts of 1, 4 and 2 tokens in 5 columns; responses of 1, 5 and 2 tokens in 7
    tokens = contiguous(batch)
    for row, (prompt, response) in enumerate([(1, 1), (4, 5), (2, 2)]):
        expected = batch.prompt_ids[row, 5 - prompt :].tolist() + batch.response_ids[row, :response].tolist()
        assert tokens.input_ids[row, : len(expected)].tolist() == expected
        assert tokens.selected[row].tolist() == [prompt <= t < prompt + response for t in range(12)]


def test_contiguous_keeps_prompts_without_padding_and_drops_masked_responses():
    batch = train_batch(8, unscored=(2,)).select([1, 2])
    batch.prompt_mask.fill_(True)
    tokens = contiguous(batch)
    assert torch.equal(tokens.input_ids, torch.cat([batch.prompt_ids, batch.response_ids], dim=1))
    assert tokens.selected[0].tolist() == [False] * 4 + [True] * 5
    assert not tokens.selected[1].any()


def test_real_tokens_are_the_prompt_and_the_response_up_to_its_last_trained_token():
    batch = train_batch(3, unscored=(2,))  # prompts of 1, 4 and 2 tokens, responses of 1, 5 and 2
    batch.response_mask[1] = torch.tensor([False, True, False, True, False, False, False])  # of a tool's output, too
    assert real_tokens(batch).sum(1).tolist() == [1 + 1, 4 + 4, 2 + 0]
    assert real_tokens(batch)[1].tolist() == [True] * 8 + [False] * 4


def siblings_batch() -> TrainBatch:
    """Eight samples of two prompts, one of five tokens and one of three; one sample unscored, one with a gap in what is trained on."""
    batch = train_batch(8, unscored=(2,))  # responses of 1, 5, 2, 6, 3, 7, 4 and 1 tokens
    batch.prompt_ids[:4] = torch.tensor([11, 12, 13, 14, 15])
    batch.prompt_ids[4:] = torch.tensor([PAD, PAD, 21, 22, 23])
    batch.prompt_mask[:4], batch.prompt_mask[4:] = True, torch.tensor([False, False, True, True, True])
    batch.response_mask[5, 2] = False  # a tool's output
    return replace(batch, advantages=batch.advantages.where(batch.response_mask, 0.0))


APART = [0, 4, 1, 5, 2, 6, 3, 7]  # no sample beside another one of its prompt


def test_samples_of_a_prompt_become_one_row_in_which_the_trained_tokens_are_selected():
    batch = siblings_batch()
    groups, rows = prompt_rows(batch, max_tokens=100)
    assert groups == [[0, 1, 2, 3], [4, 5, 6, 7]] and prompt_rows(batch.select(APART), max_tokens=100)[0] == [[i] for i in range(8)]
    (first,), (second,) = rows
    assert first.prefix == [11, 12, 13, 14, 15] and second.prefix == [21, 22, 23]
    assert list(map(len, first.branches)) == [1, 5, 1, 6]  # of the unscored one only a token is left
    assert list(map(len, second.branches)) == [3, 7, 4, 1]
    tokens = shared([row for group in rows for row in group], batch, pad_id=PAD)
    assert tokens.selected.sum(1).tolist() == [1 + 5 + 0 + 6, 3 + 6 + 4 + 1]
    assert torch.equal(tokens.input_ids[tokens.selected], batch.response_ids[batch.response_mask])


def test_sums_are_added_and_of_the_ratios_the_extremes_kept():
    totals: dict[str, float] = {}
    for tokens, highest, lowest in ((2, 1.5, 0.5), (3, 1.2, 0.4), (1, 1.0, 1.0)):
        add_totals(totals, {"tokens": tokens, "policy_ratio_max": highest, "policy_ratio_min": lowest})
    assert totals == {"tokens": 6, "policy_ratio_max": 1.5, "policy_ratio_min": 0.4}


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


@pytest.mark.parametrize(("algorithm", "recomputed"), [("ppo", 2), ("grpo", 3), ("grpo", 4)])
def test_forward_computes_the_policys_of_the_first_ones_only(model_folders: tuple[Path, Path], algorithm: str, recomputed: int):
    rank = connected(model_folders, **{"rl.algorithm": algorithm})
    ids, starts = [[11, 12, 13, *r] for r in sequences(4, seed=4)], [3] * 4  # one prompt: 3 of 4 cuts its group
    whole, part = rank.forward(ids, starts), rank.forward(ids, starts, recomputed=recomputed)
    first = sum(len(i) - 3 for i in ids[:recomputed])
    assert whole.keys() == part.keys() and len(part["old_logprobs"]) == first
    for name, values in whole.items():
        torch.testing.assert_close(part[name], values[: len(part[name])], rtol=0, atol=3e-6)


def sampled(batch: TrainBatch) -> tuple[list[list[int]], list[int]]:
    """Prompts with whole responses, whatever of them is trained on, and where the responses start."""
    rows = zip(batch.prompt_ids, batch.prompt_mask, batch.response_ids, strict=True)
    return [torch.cat([prompt[mask], response[response != PAD]]).tolist() for prompt, mask, response in rows], batch.prompt_mask.sum(
        1
    ).tolist()


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_models_that_run_at_the_same_time_compute_the_same_bits(tmp_path: Path, model_folders: tuple[Path, Path]):
    found = []
    ids = sequences(12, seed=5, shortest=10, longest=10)  # two micro-batches of six, whether two run at a time or not
    for threads in (2, 1):
        torch.set_num_threads(threads)
        rank = connected(model_folders, **{"rl.trainer.microbatch_tokens": 60})
        assert rank._backend.workers == threads
        requested = {"scores": rank.score_by_reward_model("reward_model", ids), **rank.forward(ids, [3] * 12)}
        reported = update(rank, [whole(train_batch(8, seed=k)) for k in (1, 2)])
        batch = train_batch(12, seed=3)
        kept = {f"{name}, kept": values for name, values in rank.forward(*sampled(batch), keep_graphs=True).items()}
        assert len(rank._graphs) > 1
        add_totals(reported, update(rank, [whole(batch)]))
        found.append((reported, requested | kept | resident(rank, tmp_path / str(threads))))
    (reported, tensors), (told_alone, tensors_alone) = found
    assert reported == told_alone and tensors.keys() == tensors_alone.keys()
    assert all(torch.equal(tensors[name], tensors_alone[name]) for name in tensors)


@pytest.mark.usefixtures("two_threads")
def test_zero_and_adapters_keep_the_models_in_turn(model_folders: tuple[Path, Path]):
    assert connected(model_folders)._backend.workers == 2
    lora = {"rank": 2, "alpha": 4.0, "dropout": 0.0, "target_modules": "all-linear"}
    for changes in ({"rl.trainer.zero_stage": 1}, {"rl.lora": lora}):
        assert connected(model_folders, **changes)._backend.workers == 1


def test_forward_of_samples_side_by_side_equals_that_of_samples_apart(model_folders: tuple[Path, Path]):
    rank = connected(model_folders, **{"rl.algorithm": "grpo", "rl.trainer.microbatch_tokens": 40})
    prompts, responses = [[11, 12, 13, 14, 15]] * 4 + [[21, 22, 23]] * 4, sequences(8, seed=4)
    ids, starts = [p + r for p, r in zip(prompts, responses, strict=True)], [5] * 4 + [3] * 4
    together, apart = rank.forward(ids, starts), rank.forward([ids[i] for i in APART], [starts[i] for i in APART])
    for name in ("old_logprobs", "ref_logprobs"):
        pieces = dict(zip(APART, apart[name].split([len(responses[i]) for i in APART]), strict=True))
        torch.testing.assert_close(together[name], torch.cat([pieces[i] for i in range(8)]), rtol=0, atol=3e-6)


@pytest.mark.parametrize("tokens", [12, 40, 4096])
def test_an_update_does_not_depend_on_whether_prompts_are_shared(model_folders: tuple[Path, Path], tokens: int):
    batch, found = siblings_batch(), []
    for rows in (list(range(8)), APART):
        rank = connected(model_folders, **{"rl.algorithm": "grpo", "rl.trainer.microbatch_tokens": tokens})
        totals = update(rank, [whole(batch.select(rows))])
        found.append((totals, rank.weights()))
    (together, weights), (apart, others) = found
    assert together == pytest.approx(apart, rel=1e-5, abs=1e-5)
    assert largest_difference(weights, others) < ROUNDING


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
@pytest.mark.parametrize("tokens", [12, 4096])
def test_an_update_without_old_log_probabilities_uses_its_own(model_folders: tuple[Path, Path], algorithm: str, tokens: int):
    """One row is unscored. With KL in the loss, whose gradient has the old ones in it too."""
    kl = {"rl.kl.placement": "loss", "rl.kl.estimator": "k3"}
    settings = {"rl.algorithm": algorithm, "rl.trainer.microbatch_tokens": tokens, **kl}
    batch = siblings_batch()
    batch.response_mask[5, 2] = True  # no gap: `forward` takes whole responses
    scored = batch.response_mask.any(1)
    rows = zip(*(t[scored] for t in (batch.prompt_ids, batch.prompt_mask, batch.response_ids, batch.response_mask)), strict=True)
    fresh = connected(model_folders, **settings)
    ids = [torch.cat([prompt[mask], response[trained]]).tolist() for prompt, mask, response, trained in rows]
    old = fresh.forward(ids, batch.prompt_mask[scored].sum(1).tolist())["old_logprobs"]
    known = replace(batch, old_logprobs=torch.zeros(batch.response_mask.shape).masked_scatter(batch.response_mask, old))
    unknown, wrong = replace(batch, old_logprobs=None), replace(batch, old_logprobs=torch.full(batch.response_mask.shape, 99.0))

    expected = update(fresh, [whole(known)], kl_coef=0.5)
    rank = connected(model_folders, **settings)
    result = rank.update([whole(unknown)], kl_coef=0.5, train_policy=True)
    totals = result.totals
    assert totals == pytest.approx(expected, rel=1e-5, abs=1e-5)
    assert totals["policy_ratio_max"] == totals["policy_ratio_min"] == 1.0
    assert largest_difference(rank.weights(), fresh.weights()) < ROUNDING
    torch.testing.assert_close(result.logprobs, known.old_logprobs, rtol=0, atol=3e-6)
    off = connected(model_folders, **settings)
    update(off, [whole(wrong)], kl_coef=0.5)
    assert largest_difference(off.weights(), fresh.weights()) > 1e-4  # the comparison can tell


KL_IN_THE_LOSS = {"rl.kl.placement": "loss", "rl.kl.estimator": "k3"}
KEEPING = [
    ({}, {}, 0),
    ({"rl.trainer.microbatch_tokens": 40}, {}, 0),  # several micro-batches
    ({"rl.trainer.microbatch_tokens": 20}, {}, "all"),  # more than two are too much to keep
    ({"rl.entropy_coef": 0.1}, {}, 0),
    ({"rl.max_approx_kl": 1e-9}, {}, 0),
    ({"rl.ptx.coef": 0.5}, {}, 1),  # that of the demonstrations
    ({"rl.rollout.top_k": 20}, {}, "all"),
    ({"rl.trainer.zero_stage": 1}, {}, "all"),
    ({}, {"recomputed": 3}, "all"),  # the policy was asked of some only
    ({}, {"recomputed": 0}, 1),  # it was not asked
    (KL_IN_THE_LOSS, {"recomputed": 0, "from_update": True}, 1),
    ({}, {"train_policy": False}, 0),
    ({"rl.algorithm": "grpo"}, {}, 0),  # prompts are shared
    ({"rl.algorithm": "grpo"}, {"recomputed": 0}, "all"),
]


@pytest.mark.parametrize(("settings", "how", "passes"), KEEPING)
def test_an_update_resumes_after_the_passes_before_it(
    tmp_path: Path, model_folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, settings: dict, how: dict, passes: int | str
):
    """The one optimizer step of a batch, in another order, with a sample unscored and a gap in what is trained on; as if made anew."""
    batch = siblings_batch()
    old_logprobs = None if how.get("from_update") else batch.old_logprobs
    apart = replace(batch, old_logprobs=old_logprobs).select(APART)
    learned = replace(whole(apart, demonstrations(3, seed=1)), rows=APART)
    called: list[object] = []
    calls = TrainEngine.__call__
    monkeypatch.setattr(TrainEngine, "__call__", lambda engine, *args, **kwargs: called.append(engine) or calls(engine, *args, **kwargs))
    updating = {"kl_coef": 0.15, "train_policy": how.get("train_policy", True)}
    found, counts = [], []
    for learn in (False, True):
        rank = connected(model_folders, **settings)
        requested = rank.forward(*sampled(batch), recomputed=how.get("recomputed"), keep_graphs=learn)
        kept = [
            weakref.ref(values)
            for part in rank._graphs
            for values in (part.values, part.policy and part.policy.logprobs)
            if values is not None
        ]
        rank.forward([[5, 6, 7]], [1])  # a look at something else in between
        called.clear()
        totals = rank.update([learned], **updating).totals
        made = len(called)
        assert all(values() is None for values in kept), "expected what was kept to be given back"
        found.append((requested, totals, rank.weights() if rank.roles.critic is None else resident(rank, tmp_path / str(learn))))
        rank.update([learned], **updating)  # has nothing to go on from
        counts.append((made, len(called) - made))
    (requested, anew, weights), (asked_to_learn, totals, others) = found
    every = counts[0][0]
    assert counts == [(every, every), (every if passes == "all" else passes, every)]
    assert requested.keys() == asked_to_learn.keys()
    for name, values in requested.items():
        torch.testing.assert_close(asked_to_learn[name], values, rtol=0, atol=3e-6)
        assert not asked_to_learn[name].requires_grad
    assert totals == pytest.approx(anew, rel=1e-5, abs=1e-5)
    assert largest_difference(weights, others) < ROUNDING


def test_no_kl_needs_no_reference_and_no_ppo_needs_no_critic(model_folders: tuple[Path, Path]):
    rank = connected(
        model_folders, **{"rl.algorithm": "rloo", "rl.kl.coef": 0.0, "rl.kl.measure": False, "rl.monitor": dict.fromkeys(DEFAULT_LIMITS)}
    )
    assert rank.forward([[5, 6, 7]], [1]).keys() == {"old_logprobs"}
    assert update(rank, [whole(train_batch())]).keys().isdisjoint({"value_loss", "critic_grad_norm"})


def test_the_reference_and_the_reward_model_stay_as_they_were(model_folders: tuple[Path, Path]):
    rank = connected(model_folders)
    ids = sequences(4, seed=2)
    scores, before = rank.score_by_reward_model("reward_model", ids), rank.forward(ids, [1] * 4)
    update(rank, [whole(train_batch())] * 2)
    after = rank.forward(ids, [1] * 4)
    assert torch.equal(rank.score_by_reward_model("reward_model", ids), scores)
    assert torch.equal(after["ref_logprobs"], before["ref_logprobs"])
    assert float((after["old_logprobs"] - before["old_logprobs"]).abs().max()) > 1e-4
    assert float((after["values"] - before["values"]).abs().max()) > 1e-4


# The update


def plain_losses(
    batch: TrainBatch, policy, critic, *, policy_loss: str, aggregation: str, dual_clip: float
) -> tuple[torch.Tensor, torch.Tensor]:
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
        else:
            loss = -ratio.detach().clamp(0.8, 1.2) * advantages * logprobs
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
    ],
)
def test_an_update_equals_a_plain_step(
    tmp_path: Path, model_folders: tuple[Path, Path], policy_loss: str, aggregation: str, dual_clip: float | None
):
    """Row 3 could not be scored: its mask is empty, and it is in no denominator."""
    options = {"rl.policy_loss": policy_loss, "rl.loss_aggregation": aggregation, "rl.dual_clip": dual_clip}
    rank = connected(model_folders, **options, **{"rl.trainer.microbatch_tokens": 30})
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
    "cispo with a constant horizon": {"rl.policy_loss": "cispo", "rl.loss_aggregation": "constant_horizon"},
}


@pytest.mark.parametrize("options", OPTIONS)
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
            prompt, response = batch.prompt_ids[i][batch.prompt_mask[i]], batch.response_ids[i][mask[i]]
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
    tokens, real = contiguous(batch), real_tokens(batch)
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
        prompt, response = batch.prompt_ids[i][batch.prompt_mask[i]].tolist(), batch.response_ids[i][batch.response_mask[i]].tolist()
        if response:
            batch.old_logprobs[i, : len(response)] = rank.forward([prompt + response], [len(prompt)])["old_logprobs"]
    return batch


@pytest.mark.parametrize("stage", [0, 2])
def test_a_minibatch_too_far_from_the_sampling_policy_ends_the_steps_updates(tmp_path: Path, model_folders: tuple[Path, Path], stage: int):
    """It and those after it leave no trace: not now, and not in the next step."""
    options = {"rl.max_approx_kl": 0.5, "rl.trainer.zero_stage": stage, "rl.ptx.coef": 0.5}
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
        assert update(connected(model_folders, **{"rl.max_approx_kl": limit}), [batch])["stopped_early"] == stops


def test_while_the_critic_warms_up_the_policy_stands_still(tmp_path: Path, model_folders: tuple[Path, Path]):
    """The critic learns what it learns beside the policy; afterwards the policy starts at the beginning of its own schedule."""
    options = {"rl.ptx.coef": 0.5, "rl.max_approx_kl": 1e-9}
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


# Where models come from


@pytest.mark.parametrize("init", ["sft", "reward_model_trunk"])
def test_a_critic_with_a_new_head_starts_at_0_and_learns(model_folders: tuple[Path, Path], init: str):
    rank = connected(model_folders, **{"rl.ppo.critic_init": init})
    ids = sequences(3, seed=5)
    assert not rank.forward(ids, [1] * 3)["values"].any()
    start = load_scalar_model(model_folders[1]) if init == "reward_model_trunk" else load_language_model(model_folders[0])
    assert largest_difference(trunk(rank.roles.critic.module.model).state_dict(), trunk(start).state_dict()) == 0
    update(rank, [whole(train_batch())] * 2)
    assert rank.forward(ids, [1] * 3)["values"].abs().min() > 0


@pytest.mark.parametrize("learn", [False, True])
def test_values_are_in_the_units_of_the_rewards_before_the_update_and_in_it(model_folders: tuple[Path, Path], learn: bool):
    """Whether the update goes on from the passes before it or not: returns that are the values leave nothing to learn."""
    raw, scaled, batch = connected(model_folders), connected(model_folders), train_batch()
    scaled.set_value_units(ValueUnits(scale=0.25, offset=-3.0))
    spoken, values = (rank.forward(*sampled(batch), keep_graphs=learn)["values"] for rank in (raw, scaled))
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
    plain = connected(model_folders).forward(ids, [1] * 4)
    filtered = connected(model_folders, **{"rl.rollout.top_k": 50, "rl.rollout.top_p": 0.9}).forward(ids, [1] * 4)
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
    refreshed = rank.forward(ids, [1] * 4)
    assert torch.equal(refreshed["ref_logprobs"], refreshed["old_logprobs"])
    update(rank, [whole(train_batch(seed=1))])
    rank.save(str(tmp_path))
    resumed.load(str(tmp_path))
    for moved in (rank.forward(ids, [1] * 4), resumed.forward(ids, [1] * 4)):
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
    torch.testing.assert_close(rank.forward(ids.tolist(), [1])["old_logprobs"], logprobs[:, 0].detach(), rtol=0, atol=3e-6)


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
