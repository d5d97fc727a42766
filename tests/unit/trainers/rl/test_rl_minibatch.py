"""What each rank gets of an optimizer step: the step is the same on any number of ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tiny_models import tiny_params, train_batch

from rlhf_core.trainers.rl.minibatch import Minibatch, plan_update
from rlhf_core.types import Sequences, TrainBatch

SAMPLES = 32


class NoDemonstrations:
    def batch(self, number: int) -> list[tuple[list[int], int]]:
        return []


def plans(
    ranks: int, *, group_size: int, minibatch_size: int, epochs: int = 1, sharing: int = 1, batch: TrainBatch | None = None
) -> list[list[Minibatch]]:
    rl = tiny_params(
        **{
            "rl.algorithm": "rloo" if group_size > 1 else "reinforce_pp",
            f"rl.{'rloo' if group_size > 1 else 'reinforce_pp'}.group_size": group_size,
            "rl.samples_per_step": SAMPLES,
            "rl.minibatch_size": minibatch_size,
            "rl.ppo_epochs": epochs,
            "rl.trainer.ranks": ranks,
            "rl.trainer.sequence_parallel": sharing,
        }
    ).rl
    return plan_update(train_batch(SAMPLES, unscored=(3, 4)) if batch is None else batch, NoDemonstrations(), rl, seed=7, step=5)


def steps(planned: list[list[Minibatch]]) -> list[list[int]]:
    """Rows of each optimizer step, of all ranks."""
    return [sorted(row for minibatch in ranks for row in minibatch.rows) for ranks in zip(*planned, strict=True)]


SIZES = [(1, 8), (4, 8), (8, 8), (8, 16), (8, 32), (8, 4)]  # group, minibatch


@pytest.mark.parametrize(("group_size", "minibatch_size"), SIZES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_optimizer_steps_have_the_same_rows_and_denominators_on_any_number_of_ranks(ranks: int, group_size: int, minibatch_size: int):
    alone = plans(1, group_size=group_size, minibatch_size=minibatch_size)
    planned = plans(ranks, group_size=group_size, minibatch_size=minibatch_size)
    assert steps(planned) == steps(alone)
    assert {len(m.rows) for plan in planned for m in plan} == {minibatch_size // ranks}
    for k, (whole,) in enumerate(zip(*alone, strict=True)):
        parts = [plan[k] for plan in planned]
        assert {(m.num_loss_tokens, m.num_sequences) for m in parts} == {(whole.num_loss_tokens, whole.num_sequences)}
        assert sum(int(m.batch.response_mask.sum()) for m in parts) == whole.num_loss_tokens


def test_ranks_that_share_sequences_have_the_same_plan():
    planned, unshared = (plans(ranks, group_size=4, minibatch_size=8, sharing=ranks // 2) for ranks in (4, 2))
    assert [[m.rows for m in plan] for plan in planned[::2]] == [[m.rows for m in plan] for plan in unshared]
    assert planned[0] is planned[1] and planned[2] is planned[3]


@pytest.mark.parametrize(("group_size", "minibatch_size"), SIZES)
def test_each_epoch_has_every_row_once_in_an_order_of_its_own(group_size: int, minibatch_size: int):
    (plan,) = plans(1, group_size=group_size, minibatch_size=minibatch_size, epochs=2)
    count = SAMPLES // minibatch_size
    first, second = ([row for m in part for row in m.rows] for part in (plan[:count], plan[count:]))
    assert sorted(first) == sorted(second) == list(range(SAMPLES)) and first != second


def test_samples_of_a_prompt_stay_together_where_their_number_allows_it():
    def groups(ranks: int, **sizes: int) -> list[list[int]]:
        """Which prompts a rank's minibatches have samples of, with the number of those."""
        counted = [[row // sizes["group_size"] for row in m.rows] for plan in plans(ranks, **sizes) for m in plan]
        return [sorted(prompts.count(p) for p in set(prompts)) for prompts in counted]

    assert groups(1, group_size=8, minibatch_size=16) == [[8, 8]] * 2
    assert groups(2, group_size=4, minibatch_size=8) == [[4]] * 8
    assert groups(2, group_size=8, minibatch_size=8) == [[4]] * 8  # one group for two ranks: each gets half of it
    assert groups(1, group_size=8, minibatch_size=4) != [[4]] * 8  # drawn sample by sample


@pytest.mark.parametrize("group_size", [1, 4])
def test_ranks_get_about_equally_many_tokens(group_size: int):
    """Each eighth response is as long as all others of its eight together, ten times; chance would give both ranks equally many rarely."""
    batch, lengths = train_batch(SAMPLES), torch.where(torch.arange(SAMPLES) % 8 == 0, 70, 1)
    wide = {name: value.repeat(1, 10) for name, value in batch._tensors().items()}
    ids = [[5] * (start + length) for start, length in zip(batch.sequences.starts.tolist(), lengths.tolist(), strict=True)]
    sequences = Sequences.of(ids, batch.sequences.starts.tolist())
    batch = replace(batch, sequences=sequences, **wide | {"response_mask": torch.arange(70) < lengths[:, None]})
    planned = plans(2, group_size=group_size, minibatch_size=SAMPLES, epochs=4, batch=batch)
    for first, second in zip(*planned, strict=True):
        assert abs(int(first.batch.response_mask.sum()) - int(second.batch.response_mask.sum())) < 70
