"""Forward passes of one rank of RL training against each model alone, and updates that resume after them."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from one_rl_rank import ROUNDING, connected, prompt_and_response, resident, update
from tiny_models import PAD, demonstrations, largest_difference, sequences, train_batch, whole
from whole_matrix import cells

from rlhf_core.config import DEFAULT_LIMITS
from rlhf_core.engines.deepspeed.engine import TrainEngine
from rlhf_core.models.build import load_language_model, load_scalar_model, scalar_head, trunk
from rlhf_core.trainers.rl.minibatch import add_totals, prompt_rows, real_tokens, token_batch
from rlhf_core.types import Sequences, TrainBatch

pytestmark = pytest.mark.usefixtures("world")


# Sequences as rows


def test_trained_tokens_of_the_rows_are_selected_by_hand():
    batch = train_batch(3)  # prompts of 1, 4 and 2 tokens; responses of 1, 5 and 2
    _, groups = prompt_rows(batch.sequences, max_tokens=100, shared=False)
    rows = [row for group in groups for row in group]
    tokens = token_batch(rows, batch.response_mask, pad_id=PAD)
    for i, (prompt, response) in enumerate([(1, 1), (4, 5), (2, 2)]):
        assert tokens.input_ids[i].tolist() == batch.sequences.lists()[i] + [PAD] * (9 - prompt - response)
        assert tokens.selected[i].tolist() == [prompt <= t < prompt + response for t in range(9)]
    assert real_tokens(rows, 9).sum(1).tolist() == [2, 9, 4]


def test_rows_end_with_the_last_trained_token():
    batch = train_batch(3, unscored=(2,))  # prompts of 1, 4 and 2 tokens, responses of 1, 5 and 2
    batch.response_mask[1] = torch.tensor([False, True, False, True, False, False, False])  # of a tool's output, too
    batch = batch.select([0, 1, 2])
    assert batch.sequences.lengths.tolist() == [1 + 1, 4 + 4, 2 + 1]  # of the unscored one a token is left
    _, groups = prompt_rows(batch.sequences, max_tokens=100, shared=False)
    tokens = token_batch([row for group in groups for row in group], batch.response_mask, pad_id=PAD)
    assert tokens.selected.tolist() == [[t == 1 for t in range(8)], [t in (5, 7) for t in range(8)], [False] * 8]


def siblings_batch() -> TrainBatch:
    """Eight samples of two prompts, one of five tokens and one of three; one sample unscored, one with a gap in what is trained on."""
    batch = train_batch(8, unscored=(2,))  # responses of 1, 5, 2, 6, 3, 7, 4 and 1 tokens
    prompts = [[11, 12, 13, 14, 15]] * 4 + [[21, 22, 23]] * 4
    ids = [[*prompt, *prompt_and_response(batch, i)[1].tolist()] for i, prompt in enumerate(prompts)]
    batch.response_mask[5, 2] = False  # a tool's output
    sequences = Sequences.of(ids, [5] * 4 + [3] * 4)
    return replace(batch, sequences=sequences, advantages=batch.advantages.where(batch.response_mask, 0.0))


APART = [0, 4, 1, 5, 2, 6, 3, 7]  # no sample beside another one of its prompt


def test_samples_of_a_prompt_become_one_row_in_which_the_trained_tokens_are_selected():
    batch = siblings_batch().select(list(range(8)))
    groups, rows = prompt_rows(batch.sequences, max_tokens=100, shared=True)
    assert groups == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert prompt_rows(batch.select(APART).sequences, max_tokens=100, shared=True)[0] == [[i] for i in range(8)]
    (first,), (second,) = rows
    assert first.prefix == [11, 12, 13, 14, 15] and second.prefix == [21, 22, 23]
    assert list(map(len, first.branches)) == [1, 5, 1, 6]  # of the unscored one only a token is left
    assert list(map(len, second.branches)) == [3, 7, 4, 1]
    tokens = token_batch([row for group in rows for row in group], batch.response_mask, pad_id=PAD)
    assert tokens.selected.sum(1).tolist() == [1 + 5 + 0 + 6, 3 + 6 + 4 + 1]
    trained = [prompt_and_response(batch, i)[1][batch.response_mask[i, :n]] for i, n in enumerate([1, 5, 1, 6, 3, 7, 4, 1])]
    assert torch.equal(tokens.input_ids[tokens.selected], torch.cat(trained))


def test_sums_are_added_and_of_the_ratios_the_extremes_kept():
    totals: dict[str, float] = {}
    for tokens, highest, lowest in ((2, 1.5, 0.5), (3, 1.2, 0.4), (1, 1.0, 1.0)):
        add_totals(totals, {"tokens": tokens, "policy_ratio_max": highest, "policy_ratio_min": lowest})
    assert totals == {"tokens": 6, "policy_ratio_max": 1.5, "policy_ratio_min": 0.4}


# Scores, log-probabilities, values


def test_forward_equals_each_model_alone_and_unpadded(model_folders: tuple[Path, Path]):
    rank = connected(model_folders, **{"rl.trainer.microbatch_tokens": 30})
    ids, starts = sequences(6, seed=8), [1, 3, 2, 3, 1, 2]
    outputs = rank.forward(Sequences.of(ids, starts))
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
    whole, part = rank.forward(Sequences.of(ids, starts)), rank.forward(Sequences.of(ids, starts), recomputed=recomputed)
    first = sum(len(i) - 3 for i in ids[:recomputed])
    assert whole.keys() == part.keys() and len(part["old_logprobs"]) == first
    for name, values in whole.items():
        torch.testing.assert_close(part[name], values[: len(part[name])], rtol=0, atol=3e-6)


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
        requested = {"scores": rank.score_by_reward_model("reward_model", ids), **rank.forward(Sequences.of(ids, [3] * 12))}
        reported = update(rank, [whole(train_batch(8, seed=k)) for k in (1, 2)])
        batch = train_batch(12, seed=3)
        kept = {f"{name}, kept": values for name, values in rank.forward(batch.sequences, keep_graphs=True).items()}
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
    together, apart = (
        rank.forward(Sequences.of(ids, starts)),
        rank.forward(Sequences.of([ids[i] for i in APART], [starts[i] for i in APART])),
    )
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
    scored = batch.response_mask.any(1).nonzero().flatten().tolist()
    fresh = connected(model_folders, **settings)
    old = fresh.forward(batch.sequences.select(scored))["old_logprobs"]
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
    ({"rl.max_approx_kl": 1e-9, "rl.minibatch_size": 128}, {}, 0),
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
QUICK_KEEPING = (1, 2, 5, 6, 7, 8, 10, 12)  # one for each reason to keep or not


@pytest.mark.parametrize(("settings", "how", "passes"), cells(KEEPING, [KEEPING[k] for k in QUICK_KEEPING]), ids=str)
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
        requested = rank.forward(batch.sequences, recomputed=how.get("recomputed"), keep_graphs=learn)
        kept = [
            weakref.ref(values)
            for part in rank._graphs
            for values in (part.values, part.policy and part.policy.logprobs)
            if values is not None
        ]
        rank.forward(Sequences.of([[5, 6, 7]], [1]))  # a look at something else in between
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
    assert rank.forward(Sequences.of([[5, 6, 7]], [1])).keys() == {"old_logprobs"}
    assert update(rank, [whole(train_batch())]).keys().isdisjoint({"value_loss", "critic_grad_norm"})


def test_the_reference_and_the_reward_model_stay_as_they_were(model_folders: tuple[Path, Path]):
    rank = connected(model_folders)
    ids = sequences(4, seed=2)
    scores, before = rank.score_by_reward_model("reward_model", ids), rank.forward(Sequences.of(ids, [1] * 4))
    update(rank, [whole(train_batch())] * 2)
    after = rank.forward(Sequences.of(ids, [1] * 4))
    assert torch.equal(rank.score_by_reward_model("reward_model", ids), scores)
    assert torch.equal(after["ref_logprobs"], before["ref_logprobs"])
    assert float((after["old_logprobs"] - before["old_logprobs"]).abs().max()) > 1e-4
    assert float((after["values"] - before["values"]).abs().max()) > 1e-4
