"""Keys that came before."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rlhf_core.data.hashing import SeenKeys, chunks

KEYS = st.lists(st.lists(st.sampled_from([0, 1, 2, 7, 2**63, 2**64 - 1]) | st.integers(0, 2**64 - 1), max_size=12), max_size=12)


@given(KEYS)
def test_each_key_gets_its_number_of_earlier_occurrences(parts):
    seen, counted = SeenKeys(), Counter()
    for keys in parts:
        expected = []
        for key in keys:
            expected.append(counted[key])
            counted[key] += 1
        assert seen.count_and_add(np.array(keys, dtype=np.uint64)).tolist() == expected


def test_a_key_takes_eight_bytes_and_there_are_few_runs():
    seen, keys = SeenKeys(), np.random.default_rng(0).integers(0, 2**63, 50_000).astype(np.uint64)
    for part in chunks(keys.tolist(), 100):
        seen.count_and_add(np.array(part, dtype=np.uint64))
    assert sum(run.nbytes for run in seen._runs) == 8 * 50_000 and len(seen._runs) <= 12
