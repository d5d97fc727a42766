"""GDPO's advantages: by hand, beside loops, and where scores are missing or say nothing."""

from __future__ import annotations

import math
import statistics
import warnings

import pytest
import torch

from rlhf_core.algorithms.advantages import decoupled_rewards, gdpo, grpo

NAN = float("nan")
pytestmark = pytest.mark.filterwarnings("ignore:groups of equal rewards")


def advantages(
    scores: list[list[float]],
    groups: list[int],
    weights: tuple[float, ...] = (1.0, 1.0),
    *,
    penalties: list[float] | None = None,
    kept=None,
) -> list[float]:
    """The advantage of each response, whose tokens must all have it."""
    response_mask = torch.ones(len(groups), 2, dtype=torch.bool) if kept is None else torch.tensor(kept)[:, None].expand(-1, 2)
    p = torch.tensor(penalties or [0.0] * len(groups), dtype=torch.float64)
    found = gdpo(torch.tensor(scores, dtype=torch.float64), torch.tensor(weights), p, torch.tensor(groups), response_mask)
    assert torch.equal(found[:, 0], found[:, 1])
    return found[:, 0].tolist()


def test_gdpo_by_hand_keeps_apart_what_the_sum_makes_equal():
    scores, groups = [[1.0, 4.0], [0.0, 0.0], [0.0, 2.0], [1.0, 2.0]], [0, 0, 1, 1]
    # Of two different scores a and b the std is |a - b| / sqrt(2), so that the normalised ones are +-1 / sqrt(2) = +-0.707107.
    # Group 0: S = +-(1 + 0.5) 0.707107 = +-1.060660.  Group 1: the second scorer says nothing, S = -+0.707107.
    # std(S) = sqrt((2 * 1.125 + 2 * 0.5) / 3) = 1.040833;  A = +-1.019049 and -+0.679366
    expected = [1.019049, -1.019049, -0.679366, 0.679366]
    assert advantages(scores, groups, (1.0, 0.5)) == pytest.approx(expected, abs=1e-6)
    summed = torch.tensor([3.0, 0.0, 1.0, 2.0])
    of_the_sum = grpo(summed, torch.tensor(groups), torch.ones(4, 1, dtype=torch.bool), normalize_std=True)[:, 0]
    assert of_the_sum.abs().tolist() == pytest.approx([math.sqrt(0.5)] * 4), "of the sum both groups teach as much"


def test_penalties_are_subtracted_as_they_are_and_compared_within_the_group():
    found = advantages([[1.0, 4.0], [0.0, 0.0], [0.0, 2.0], [1.0, 2.0]], [0, 0, 1, 1], (1.0, 0.5), penalties=[0.5, 0.0, 7.0, 7.0])
    # Group 0: S = +-(1.060660 - 0.25) = +-0.810660; group 1 as without penalties.  std = sqrt((2 * 0.657170 + 1) / 3) = 0.878320
    assert found == pytest.approx([0.922966, -0.922966, -0.805067, 0.805067], abs=1e-6)


def plain(scores, groups, weights, penalties, kept) -> list[float]:
    """GDPO in loops over numbers."""
    count = [k and all(map(math.isfinite, row)) for k, row in zip(kept, scores, strict=True)]
    total = [0.0] * len(groups)
    for group in set(groups):
        rows = [i for i, g in enumerate(groups) if g == group and count[i]]
        for k, weight in enumerate(weights):
            of_scorer = [scores[i][k] for i in rows]
            if len(rows) > 1 and len(set(of_scorer)) > 1:
                mean, std = statistics.fmean(of_scorer), statistics.stdev(of_scorer)
                for i in rows:
                    total[i] += weight * (scores[i][k] - mean) / std
        for i in rows:
            total[i] -= penalties[i] - statistics.fmean(penalties[j] for j in rows)
    known = [total[i] for i in range(len(groups)) if count[i]]
    return [t / statistics.stdev(known) if c else 0.0 for t, c in zip(total, count, strict=True)]


@pytest.mark.parametrize("seed", range(4))
def test_gdpo_equals_loops_with_missing_scores_masked_rows_and_groups_in_any_order(seed: int):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(24, 3, generator=generator, dtype=torch.float64) * torch.tensor([0.1, 1.0, 50.0])
    scores[:, 1] = (scores[:, 1] > 0.5).double()
    scores[torch.rand(24, 3, generator=generator) < 0.1] = NAN
    groups = [[0, 7, -3, 5, 1, 2][i % 6] for i in torch.randperm(24, generator=generator).tolist()]
    penalties, kept = torch.rand(24, generator=generator).tolist(), (torch.rand(24, generator=generator) > 0.1).tolist()
    weights = (1.0, -0.5, 2.0)
    expected = plain(scores.tolist(), groups, weights, penalties, kept)
    assert advantages(scores.tolist(), groups, weights, penalties=penalties, kept=kept) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("missing", [NAN, math.inf, -math.inf])
def test_a_response_without_one_of_its_scores_is_left_out_and_its_other_score_counts_nowhere(missing: float):
    """Not 0 in place of the missing score, nor its other score alone."""
    whole = [[1.0, 4.0], [0.0, 0.0], [0.5, 1.0], [0.0, 2.0], [1.0, 2.0]]
    with_missing = [*whole, [100.0, missing]]
    found = advantages(with_missing, [0, 0, 0, 1, 1, 0])
    assert found == pytest.approx([*advantages(whole, [0, 0, 0, 1, 1]), 0.0], abs=1e-12)
    totals = decoupled_rewards(
        torch.tensor(with_missing), torch.ones(2), torch.zeros(6), torch.tensor([0, 0, 0, 1, 1, 0]), torch.ones(6, 1, dtype=torch.bool)
    )
    assert totals.isnan().tolist() == [False] * 5 + [True]


def test_scale_and_shift_of_a_scorer_change_nothing():
    scores, groups = torch.tensor([[1.0, 4.0], [0.0, 0.0], [0.5, 1.0], [0.0, 2.0], [1.0, 2.5]]), [0, 0, 0, 1, 1]
    changed = scores * torch.tensor([1000.0, 0.5]) + torch.tensor([-3.0, 9.0])
    assert advantages(changed.tolist(), groups) == pytest.approx(advantages(scores.tolist(), groups), abs=1e-9)


def test_groups_of_one_or_of_equal_scores_get_advantage_exactly_zero_and_others_are_as_large_as_without_penalties():
    found = advantages([[1.0, 4.0], [0.0, 0.0], [3.0, 3.0], [3.0, 3.0], [9.0, 1.0]], [0, 0, 1, 1, 2])
    assert found[2:] == [0.0, 0.0, 0.0] and found[0] == -found[1] > 0
    assert advantages([[1.0, 1.0]] * 4, [0, 0, 1, 1]) == [0.0] * 4
    assert advantages([[NAN, 1.0]] * 2, [0, 0]) == [0.0] * 2


def test_padding_changes_nothing_and_masked_tokens_get_zero():
    scores, weights, groups = torch.tensor([[1.0, 4.0], [0.0, 1.0], [0.5, 0.0]]), torch.ones(2), torch.tensor([0, 0, 0])
    narrow = torch.tensor([[True, True], [True, False], [False, True]])
    wide = torch.cat([narrow, torch.zeros(3, 2, dtype=torch.bool)], 1)
    first, second = (gdpo(scores, weights, torch.zeros(3), groups, mask) for mask in (narrow, wide))
    assert torch.equal(first, second[:, :2]) and not second[:, 2:].any() and not first[~narrow].any()
    assert first.dtype == torch.float32


def test_a_scorer_that_says_nothing_is_not_reported_but_a_group_is():
    scores = torch.tensor([[1.0, 5.0], [0.0, 5.0]])
    mask = torch.ones(2, 1, dtype=torch.bool)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gdpo(scores, torch.ones(2), torch.zeros(2), torch.tensor([0, 0]), mask)
    with pytest.warns(RuntimeWarning, match="groups of equal rewards"):
        gdpo(torch.ones(2, 2), torch.ones(2), torch.zeros(2), torch.tensor([0, 0]), mask)
