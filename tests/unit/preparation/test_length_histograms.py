"""The histogram of token lengths; the stage itself is in tests/integration/test_prepare_data.py."""

from __future__ import annotations

from collections import Counter

from rlhf_core.preparation.prepare import MAX_BINS, length_histograms


def test_bins_are_whole_tokens_and_the_same_for_all_columns_of_a_use():
    # The longest has 3 tokens: four bins of one token each.
    lengths = {"preference": {"chosen": Counter({1: 2, 3: 1}), "rejected": Counter({0: 4})}}
    assert list(length_histograms(lengths)) == [
        *(("preference", "chosen", 0, 1, 0), ("preference", "chosen", 1, 2, 2)),
        *(("preference", "chosen", 2, 3, 0), ("preference", "chosen", 3, 4, 1)),
        *(("preference", "rejected", 0, 1, 4), ("preference", "rejected", 1, 2, 0)),
        *(("preference", "rejected", 2, 3, 0), ("preference", "rejected", 3, 4, 0)),
    ]


def test_long_texts_share_bins():
    # 100 tokens: 101 lengths in at most 48 bins, so 3 tokens each (ceil(101 / 48)) and 34 bins; 99 and 100 are in the last two.
    rows = list(length_histograms({"sft": {"response": Counter({99: 1, 100: 2, 98: 5})}}))
    assert len(rows) == 34 <= MAX_BINS
    assert rows[-2:] == [("sft", "response", 96, 99, 5), ("sft", "response", 99, 102, 3)]
