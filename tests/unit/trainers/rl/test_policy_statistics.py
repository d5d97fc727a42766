"""Repetition, variety, correlations and divergence per token, by hand."""

from __future__ import annotations

import math

import pytest
import torch

from rlhf_core.trainers.rl.metrics import correlation, distinct, rank_correlation, repetition, token_log_ratios

NAN, INF = math.nan, math.inf


def batch(*responses: list[int], width: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded with 7, a token that also occurs."""
    width = max(width, *map(len, responses))
    ids = torch.tensor([[*r, *[7] * (width - len(r))] for r in responses])
    return ids, torch.arange(width) < torch.tensor([len(r) for r in responses])[:, None]


def test_repetition_is_the_mean_share_of_ngrams_that_stood_there_before():
    # 1 2 1 2 1: pairs 12 21 12 21, two of four again. 7 7 7: pairs 77 77, one of two. 1 2 3: none. A single token has no pair.
    responses = ([1, 2, 1, 2, 1], [7, 7, 7], [1, 2, 3], [5])
    assert repetition(*batch(*responses), n=2) == pytest.approx((2 / 4 + 1 / 2 + 0) / 3)
    assert repetition(*batch(*responses, width=9), n=2) == pytest.approx(1 / 3), "padding changes nothing"
    # triples: 121 212 121, one of three; 777 once; 123 once
    assert repetition(*batch(*responses), n=3) == pytest.approx((1 / 3) / 3)
    assert math.isnan(repetition(*batch([5], [6]), n=2)) and math.isnan(repetition(*batch([5], [6], width=4), n=3))


def test_distinct_counts_over_the_whole_batch():
    # 1 2, 1 2, 7: three different tokens of five, one different pair of two
    responses = batch([1, 2], [1, 2], [7], width=4)
    assert distinct(*responses, n=1) == pytest.approx(3 / 5)
    assert distinct(*responses, n=2) == pytest.approx(1 / 2)
    assert math.isnan(distinct(*responses, n=3))


def test_ngrams_differ_by_order_and_hold_for_large_vocabularies():
    assert distinct(*batch([1, 0, 1]), n=2) == 1.0
    top = 2**20
    assert distinct(*batch([top, 0, 1, top, 0]), n=3) == 1.0


def test_an_ngram_across_a_gap_does_not_count():
    ids, mask = torch.tensor([[1, 2, 1, 2]]), torch.tensor([[True, True, False, True]])
    assert repetition(ids, mask, n=2) == 0.0 and distinct(ids, mask, n=2) == 1.0


def test_correlations_by_hand():
    first, second = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 2.0, 4.0])
    # deviations -1 0 1 and -4/3 -1/3 5/3: 3 / sqrt(2 * 42/9)
    assert correlation(first, second) == pytest.approx(3 / math.sqrt(2 * 42 / 9))
    assert rank_correlation(first, second) == pytest.approx(1.0)
    # ranks 1 2 3 4 and, tied, 1.5 1.5 3.5 3.5: deviations give 4 / sqrt(5 * 4)
    assert rank_correlation(torch.tensor([1.0, 5.0, 6.0, 90.0]), torch.tensor([0.0, 0.0, 1.0, 1.0])) == pytest.approx(4 / math.sqrt(20))


@pytest.mark.parametrize("measure", [correlation, rank_correlation])
def test_rows_without_a_number_are_left_out_and_what_does_not_vary_has_no_correlation(measure):
    first, second = torch.tensor([1.0, NAN, 3.0, 2.0, 9.0]), torch.tensor([2.0, 5.0, 0.0, 1.0, -INF])
    assert measure(first, second) == pytest.approx(-1.0)
    assert math.isnan(measure(first, torch.full((5,), 0.1)))
    assert math.isnan(measure(first[:2], second[:2]))


def test_token_kl_by_hand():
    logprobs, reference = torch.tensor([[-1.0, -2.0], [-0.5, NAN]]), torch.tensor([[-2.0, -1.5], [-4.5, INF]])
    mask = torch.tensor([[True, True], [True, False]])
    # log ratios 1, -0.5 and 4
    assert token_log_ratios(logprobs, reference, mask) == pytest.approx((1.5, -0.5, 4.0))
    assert all(map(math.isnan, token_log_ratios(logprobs, reference, torch.zeros(2, 2, dtype=torch.bool))))
